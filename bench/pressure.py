#!/usr/bin/env python3
"""Does a reader that stops slow the others down? bench/pressure.py --build DIR [--model FILE] [--rounds N]

One client reads the tokens of a long answer. By turns it is alone, and beside clients whose answers nobody reads: their
sockets fill, their output waits up to output-high, their sequences are paused. Printed are the reader's tokens a second in
both states and the ratio (medians over the rounds). Exit 1: it changed by more than 10 %."""
import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from skvwire import Daemon  # noqa: E402

ap = argparse.ArgumentParser(description="A reader's pace alone and beside readers that stopped.")
ap.add_argument("--build", default=".")
ap.add_argument("--model", default=os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf"))
ap.add_argument("--rounds", type=int, default=6)
ap.add_argument("--seconds", type=float, default=2)
ap.add_argument("--stopped", type=int, default=4, help="readers that stop")
args = ap.parse_args()
LONG = {"prompt": "Tell a long story.", "max_tokens": 100000, "ignore_eos": True, "seed": 1}


def begin(p):
    i = p.start("generate", **LONG)
    while True:
        m = p.message()
        if m[0] == 2:
            return
        assert m[1] != i, m


def pace(p, seconds):
    """Tokens a second, over whole gaps."""
    n, first, last = 0, None, None
    end = time.time() + seconds
    while time.time() < end:
        m = p.message()
        if m[0] == 1:  # its context is full: the next answer
            begin(p)
            n, first = 0, None
            continue
        last = time.time()
        first = first or last
        n += 1
    return (n - 1) / (last - first)


def main():
    tmp = tempfile.mkdtemp(prefix="skvd-pressure-")
    sock = os.path.join(tmp, "sock")
    d = Daemon([os.path.join(args.build, "skvd"), "--model", args.model, "--socket", sock, "--config", "/dev/null",
                "--output-high", "64K", "--output-low", "16K", "--reader-timeout", "1h"], sock, os.path.join(tmp, "log"))
    alone, beside = [], [] # by turns: alone[k] before beside[k], alone[k + 1] after it
    try:
        with d.peer(timeout=60) as reader, d.peer(timeout=60) as admin:
            begin(reader)
            pace(reader, 1)
            alone.append(pace(reader, args.seconds))
            for _ in range(args.rounds):
                stopped = [d.peer() for _ in range(args.stopped)]
                for p in stopped:
                    p.start("generate", logprobs=64, **LONG)
                end = time.time() + 60
                while sum(s["state"] == "paused" for s in admin.call("sequences")["sequences"]) < args.stopped:
                    assert time.time() < end, "they are not paused"
                    pace(reader, 0.1)
                beside.append(pace(reader, args.seconds))
                for p in stopped:
                    p.close()
                while len(admin.call("sequences")["sequences"]) > 1:
                    pace(reader, 0.1)
                alone.append(pace(reader, args.seconds))
    finally:
        d.stop(9)
        shutil.rmtree(tmp, ignore_errors=True)
    # An answer gets slower as it gets longer: each is compared with what was just before and just after.
    ratio = statistics.median(2 * b / (x + y) for b, x, y in zip(beside, alone, alone[1:]))
    print("alone %.1f tokens/s, beside %d stopped readers %.1f tokens/s: ratio %.3f"
          % (statistics.median(alone), args.stopped, statistics.median(beside), ratio))
    return 0 if abs(ratio - 1) < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
