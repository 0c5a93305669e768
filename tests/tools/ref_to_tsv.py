#!/usr/bin/env python3
"""Reference cases from JSON lines to the tables that the C tests read (tests/tsv.h).

    ref_to_tsv.py tokenizer FILE.jsonl > tests/data/tokenizer.tsv
    ref_to_tsv.py chat FILE.jsonl > tests/data/chat.tsv

A row is a line, a field ends at a tab; a field's bytes below 0x20, 0x7f and the backslash are \\xHH.

tokenizer: kind, flags (s: special tokens are parsed, l: lossy), text, ids.
chat: flags (g: add_generation_prompt, c: a content has a control token's text), text, ids, then role and content of
each message."""
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


def main():
    make = {"tokenizer": tokenizer, "chat": chat}[sys.argv[1]]
    with open(sys.argv[2], encoding="utf-8") as f:
        for line in f:
            sys.stdout.buffer.write(("\t".join(field(x) for x in make(json.loads(line))) + "\n").encode("utf-8"))


main()
