#!/usr/bin/env python3
"""Expected values for tests/test_tokenizer.c from independent tools: Hugging Face `tokenizers` and `sentencepiece`.

    make_tokenizer_goldens.py OUTDIR      # writes pretok.tsv, bpe.tsv, spm.tsv (tests/data)
    make_tokenizer_goldens.py --sweep OUT # every code point below U+30000 in short frames, as pretok.tsv (large)

Fields are escaped as in ref_to_tsv.py.

pretok: pre-tokenizer, text, length in bytes of each word.
bpe:    "tok" pre token type | "merge" pre "left right" | "case" pre flags text ids (vocabularies trained here)
spm:    "tok" piece type score | "case" text ids (a SentencePiece BPE model with byte fallback, trained here)"""
import inspect
import io
import os
import random
import sys
import textwrap

import sentencepiece as spm
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN2 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


PRES = {
    "gpt-2": byte_level(True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level(False)]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level(False)]),
}
PARTS = ["a", "B", "word", "Hello", " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n", "'s", "'S", "'ll", "'LL", "'Ve",
         "'re", "'m", "'x", "'", "''", "'\u017f", "1", "12", "123", "1234", "\u0663\u0664", "\u00bd", "\u2167", ".", ",", "...",
         "!?", "()", "{};", "_", "-", "\u00e9", "e\u0301", "\u4e2d\u6587", "\u65e5\u672c", "\u0e01\u0e32", "\u0939\u093f", "\U0001f600",
         "\U0001f469\u200d\U0001f467", "\u00a0", "\u2003", "\u3000", "\u0085", "\u200b", "\u2028", "\ufeff", "\u00df", "\u0130", "\ufb06", "\u212a",
         "\U00010400", "\U0001d7d8", "\u0300", "@", "#", "http://x.y/z?q=1", "foo_bar", "CamelCase", "\u0645\u0631\u062d\u0628\u0627"]


def field(s):
    return "".join("\\x%02x" % ord(c) if c < " " or c in "\\\x7f" else c for c in s)


def write(path, rows):
    with open(path, "wb") as f:
        for r in rows:
            f.write(("\t".join(field(str(x)) for x in r) + "\n").encode("utf-8", "strict"))


def texts(n, seed):
    rng = random.Random(seed)
    yield "It's a test, isn't it? We'LL see: they've 12345 reasons.\n\n  Indented   text\t\tand tabs \n"
    for _ in range(n):
        yield "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 14)))


def lengths(pre, text):
    return [len(text[a:b].encode()) for _, (a, b) in pre.pre_tokenize_str(text)]


def pretok_rows():
    for name, pre in PRES.items():
        for t in texts(250, 7):
            yield name, t, " ".join(map(str, lengths(pre, t)))


def sweep_rows():
    for name, pre in PRES.items():
        for cp in range(0x80, 0x30000):
            if 0xD800 <= cp < 0xE000:
                continue
            c = chr(cp)
            t = "a%sb %s1 %s\n%s  %s'%s .%s" % (c, c, c, c, c, c, c)
            yield name, t, " ".join(map(str, lengths(pre, t)))


def corpus():
    parts = [inspect.getdoc(o) or "" for o in (str, int, dict, list, textwrap, inspect, random, os, io)]
    for o in (str, int, dict, list):
        parts += [inspect.getdoc(getattr(o, m)) or "" for m in dir(o)]
    return [line for p in parts for line in p.splitlines(keepends=True)] + ["x = 1234; y = 2024 * 3.14\n"] * 20


def bpe_rows():
    for name, pre in PRES.items():
        tok = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
        tok.pre_tokenizer = pre
        specials = ["<|im_start|>", "<|im_end|>", "<|im|>"]
        trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      special_tokens=specials, show_progress=False)
        tok.train_from_iterator(corpus(), trainer)
        tok.add_tokens([AddedToken("  indent", normalized=False)])
        model = __import__("json").loads(tok.to_str())
        by_id = {i: t for t, i in tok.get_vocab(with_added_tokens=True).items()}
        for i in range(len(by_id)):
            kind = 3 if by_id[i] in specials else 4 if by_id[i] == "  indent" else 1
            yield "tok", name, by_id[i], kind
        for m in model["model"]["merges"]:
            yield "merge", name, " ".join(m) if isinstance(m, list) else m
        cases = list(texts(120, 11)) + corpus()[:60]
        cases += ["a<|im_start|>b<|im_end|>\n", "<|im|><|im_start|><|im_", "x  indent y   indent", "".join(corpus())[:3000]]
        cases += ["encode" * 40, "ab" * 100, "=" * 200, "strings" * 300]
        for t in cases:
            yield "case", name, "s", t, " ".join(map(str, tok.encode(t, add_special_tokens=False).ids))


def spm_rows():
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(sentence_iterator=iter(x.rstrip("\n") for x in corpus() if x.strip()), model_writer=out,
                                   vocab_size=700, model_type="bpe", byte_fallback=True, character_coverage=0.99,
                                   normalization_rule_name="identity", remove_extra_whitespaces=False,
                                   allow_whitespace_only_pieces=True, split_digits=True, unk_id=0, bos_id=1, eos_id=2,
                                   pad_id=-1, minloglevel=2, num_threads=1)
    sp = spm.SentencePieceProcessor(model_proto=out.getvalue())
    for i in range(sp.get_piece_size()):
        kind = 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
        yield "tok", sp.id_to_piece(i), kind, "%.9g" % sp.get_score(i)
    cases = list(texts(200, 13)) + [x for x in corpus()[:60]] + ["", " ", "  ", "a", "encode" * 40, "".join(corpus())[:3000],
                                                                 "\u2581x \u2581", "strings" * 300]
    for t in cases:
        if t:
            yield "case", t, " ".join(map(str, sp.encode(t)))


def main():
    if sys.argv[1] == "--sweep":
        write(sys.argv[2], sweep_rows())
        return
    for name, rows in (("pretok", pretok_rows), ("bpe", bpe_rows), ("spm", spm_rows)):
        write(os.path.join(sys.argv[1], name + ".tsv"), rows())


main()
