#!/usr/bin/env python3
"""Quality records (JSON lines) to the table that tests/lab/lab reads: one line a record, tab between fields, \\xHH escapes.

    quality_to_tsv.py FILE.jsonl... > records.tsv

Fields: id, task, score, half (A or B, by context), prompt up to the answer's header, answer prefix, answer, choices joined by \\x1f."""
import json
import sys
import zlib


def field(s):
    return "".join("\\x%02x" % ord(c) if c < " " or c in "\\\x7f" else c for c in s)


rows = []
for name in sys.argv[1:]:
    for line in open(name, encoding="utf-8"):
        r = json.loads(line)
        if r["format"] == "chat":
            prompt = "<|im_start|>user\n" + r["context"] + r["question"] + "<|im_end|>\n<|im_start|>assistant\n"
        else:
            prompt = r["context"] + r["question"]
        half = "AB"[zlib.crc32(r["context_id"].encode()) & 1]
        rows.append((r["context_id"], [r["id"], r["task"], r["score"], half, prompt, r["answer_prefix"] or "", r["answer"],
                                       "\x1f".join(r["choices"] or [])]))
rows.sort(key=lambda x: x[0])
for _, row in rows:
    sys.stdout.buffer.write(("\t".join(field(x) for x in row) + "\n").encode("utf-8"))
