#!/usr/bin/env python3
"""Many clients with long prompts at once on the real model: each one's tokens are those of its solo run.

    same_answers.py [--clients 20] [--input 4000] [--output 100] [--policy NAME]... [--kv-memory SIZE]

Not part of `make check`: it takes minutes of all cores (`make check-long`)."""
import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from skvwire import Daemon  # noqa: E402

BUILD = os.environ.get("top_builddir", os.getcwd())
MODEL = os.environ.get("SKVD_TEST_MODEL") or os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf")


def prompt(p, n, seed):
    """n tokens of a text of random short words, none shared with another seed from the first token on."""
    r = random.Random(seed)
    words = "time sea small green letter under house paper river cold thing night open word line road field bird stone hand".split()
    text = " ".join("%s%s" % (r.choice(words), r.choice(("", "", "s", ".", ",", " %d" % r.randrange(1000)))) for _ in range(n))
    return p.call("tokenize", text=text)["tokens"][:n]


def one(d, tokens, args, policy, out, k):
    with d.peer(timeout=7200) as p:
        out[k] = p.call("generate", tokens=tokens, temperature=0, ignore_eos=True, max_tokens=args.output, stream=False,
                        kv={"policy": policy})


def together(d, prompts, args, policy):
    out = {}
    threads = [threading.Thread(target=one, args=(d, t, args, policy, out, k)) for k, t in enumerate(prompts)]
    began = time.time()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out, time.time() - began


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("clients", 20), ("input", 4000), ("output", 100)):
        a.add_argument("--" + name, type=int, default=value)
    a.add_argument("--policy", action="append")
    a.add_argument("--kv-memory", default="2G")
    args = a.parse_args()
    if not os.path.exists(MODEL):
        print("no %s: skipped" % MODEL)
        return 77
    tmp = tempfile.mkdtemp(prefix="skvd-same-")
    sock = os.path.join(tmp, "sock")
    d = Daemon([os.path.join(BUILD, "skvd"), "--model", MODEL, "--socket", sock, "--config", "/dev/null", "--log-level", "info",
                "--kv-memory", args.kv_memory, "--max-batch", "32"], sock, os.path.join(tmp, "log"))
    passed = failed = 0
    with d.peer(timeout=600) as p:
        prompts = [prompt(p, args.input, k) for k in range(args.clients)]
    assert all(len(t) == args.input for t in prompts)
    for policy in args.policy or ["full", "sparse"]:
        solo, alone = {}, time.time()
        for k, t in enumerate(prompts):
            one(d, t, args, policy, solo, k)
            print("\r%s: alone %d of %d" % (policy, k + 1, len(prompts)), end="", flush=True)
        alone = time.time() - alone
        got, beside = together(d, prompts, args, policy)
        for k in range(len(prompts)):
            same = k in got and got[k]["tokens"] == solo[k]["tokens"] and got[k]["completion_tokens"] == args.output
            passed, failed = passed + same, failed + (not same)
            if not same:
                print("\nFAIL %s, client %d:\n  alone    %r\n  together %r" % (policy, k, solo[k]["tokens"], got.get(k)))
        print("\r%s: %d clients, %d + %d tokens: %.0f s one after another, %.0f s together, %.1f output tokens/s" % (
            policy, args.clients, args.input, args.output, alone, beside, args.clients * args.output / beside))
    with d.peer(timeout=60) as p:
        st = p.call("status")
        if st["pages_used"] != 0 or st["pid"] != d.p.pid:
            failed += 1
            print("FAIL not idle: %r" % st)
    if d.stop() != 0:
        failed += 1
        print("FAIL exit", d.p.returncode, d.log()[-2000:])
    shutil.rmtree(tmp, ignore_errors=True)
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
