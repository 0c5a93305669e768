#!/usr/bin/env python3
"""Reference cases from JSON lines to the tables that the C tests read (tests/tsv.h).

    ref_to_tsv.py tokenizer FILE.jsonl > tests/data/tokenizer.tsv
    ref_to_tsv.py chat FILE.jsonl > tests/data/chat.tsv
    ref_to_tsv.py logits FILE.jsonl > tests/data/logits.tsv
    ref_to_tsv.py evict FILE.jsonl > tests/data/evict.tsv

A row is a line, a field ends at a tab; a field's bytes below 0x20, 0x7f and the backslash are \\xHH.

tokenizer: kind, flags (s: special tokens are parsed, l: lossy), text, ids.
chat: flags (g: add_generation_prompt, c: a content has a control token's text), text, ids, then role and content of
each message.
logits: name, ids, top ids, their logits, logsumexp, greedy ids, margins, index of the end token in greedy (-1: none).
evict: name, B, pool, ids (with B = 0 only), greedy ids, margins, then for probes 0, 1, 8, 47: top ids, logits, logsumexp; then for
(layer 3, head 0) and (layer 15, head 2): positions kept after prefill, cut, positions kept at the end, evictions flattened
(position, score, second-lowest score)."""
import json
import sys


def field(s):
    return "".join("\\x%02x" % ord(c) if c < " " or c in "\\\x7f" else c for c in s)


def tokenizer(r):
    flags = ("s" if r["special"] else "") + ("l" if r.get("lossy") else "")
    return [r["kind"], flags, r["text"], " ".join(map(str, r["ids"]))]


def chat(r):
    flags = ("g" if r["add_generation_prompt"] else "") + ("c" if r.get("content_has_special") else "")
    row = [flags, r["text"], " ".join(map(str, r["ids"]))]
    for m in r["messages"]:
        row += [m["role"], m["content"]]
    return row


def numbers(a):
    return " ".join(str(x) for x in a)


def logits(r):
    return [r["name"], numbers(r["ids"]), numbers(t[0] for t in r["top"]), numbers(t[1] for t in r["top"]), str(r["logsumexp"]),
            numbers(r["greedy"]), numbers(r["margin"]), str(r["eos_at"])]


def evict(r):
    row = [r["name"], str(r["B"]), str(r["pool"]), numbers(r.get("ids", [])), numbers(r["greedy"]), numbers(r["margin"])]
    for k in ("0", "1", "8", "47"):
        p = r["probe"][k]
        row += [numbers(t[0] for t in p["top"]), numbers(t[1] for t in p["top"]), str(p["logsumexp"])]
    for h in ("L3H0", "L15H2"):
        if r["B"] == 0:
            row += ["", "", "", ""]
            continue
        row += [numbers(r["kept_prefill"][h]), numbers(r["cut"].get(h) or []), numbers(r["kept_end"][h]),
                numbers(x for e in r["evicted"][h] for x in e)]
    return row


def main():
    make = {"tokenizer": tokenizer, "chat": chat, "logits": logits, "evict": evict}[sys.argv[1]]
    with open(sys.argv[2], encoding="utf-8") as f:
        for line in f:
            sys.stdout.buffer.write(("\t".join(field(x) for x in make(json.loads(line))) + "\n").encode("utf-8"))


main()
