#!/usr/bin/env python3
"""How the time of a token grows: `make growth`, or

    bench/growth.py --build DIR [--model GGUF] [--save FILE.json] [--svg FOLDER]      # measure, and draw
    bench/growth.py --from FILE.json --svg FOLDER                                        # draw what was saved

Against the context (128 to 7000 tokens, one sequence) and against the batch (1 to 64 sequences of 1000 tokens), full cache and
sparse, from `skvctl --json bench`; draws growth-context.svg and growth-batch.svg. Beside each curve the slope of its last
doublings is printed: 0 is flat, 1 is linear."""
import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile

import peers
import svg

CONTEXTS = [128, 256, 512, 1024, 2048, 4096, 7000]
BATCHES = [1, 2, 4, 8, 16, 32, 64]
POLICIES = ["full", "sparse"]
BATCH_INPUT = 1000


def say(text):
    print(text, flush=True)


def bench(d, policy, n, out, many):
    return d.ctl("bench", "--kv", "policy=" + policy, "--input", str(n), "--output", str(out), "--concurrency", str(many))["runs"][0]


def measure(a):
    """Time between tokens (ms): of one sequence by its context; of a step by how many decode at once."""
    points = []
    # A long step target: prompts are read in large pieces, so that all decode together before the first of them ends.
    with peers.Daemon(a, "--kv-memory", "3G", "--step-time", "1000") as d:
        for n in a.contexts:
            for policy in POLICIES:
                best = min(bench(d, policy, n, 64, 1)["itl_p50_ms"] for _ in range(a.rounds))
                points.append({"by": "context", "x": n, "policy": policy, "ms": best})
                say("context %5d  %-8s %7.2f ms a token" % (n, policy, best))
        for many in a.batches:
            for policy in POLICIES:
                runs = [bench(d, policy, BATCH_INPUT, 96, many) for _ in range(a.rounds if many < 16 else 1)]
                r = max(runs, key=lambda r: r["decode_tok_s"] or 0)
                points.append({"by": "batch", "x": r["decode_batch"], "policy": policy, "ms": 1e3 * r["decode_batch"] / r["decode_tok_s"]})
                say("batch %2d (asked %2d)  %-8s %7.2f ms a step, %7.1f tokens/s" % (r["decode_batch"], many, policy, points[-1]["ms"],
                                                                                r["decode_tok_s"]))
    return points


def slope(points):
    """Between the last point and the one nearest a quarter of its x, both logarithmic."""
    x1, y1 = points[-1]
    x0, y0 = min(points[:-1], key=lambda p: abs(math.log(4 * p[0] / x1)))
    return math.log(y1 / y0) / math.log(x1 / x0)


def draw(a, machine, model, points):
    for by, title, x_label, y_label, value in (
            ("context", "Time of a token by context, one sequence", "tokens in context", "ms a token", lambda p: p["ms"]),
            ("batch", "Time of a token by batch, %d tokens each" % BATCH_INPUT, "sequences decoding at once", "ms a token of any sequence",
             lambda p: p["ms"] / p["x"])):
        series = []
        for policy in POLICIES:
            curve = sorted((p["x"], value(p)) for p in points if p["by"] == by and p["policy"] == policy)
            if len(curve) < 2:
                continue
            series.append((policy, curve))
            say("%s, %s: slope of the last doublings %.2f" % (by, policy, slope(curve)))
        if series:
            with open(os.path.join(a.svg, "growth-%s.svg" % by), "w", encoding="utf-8") as f:
                f.write(svg.chart(title, x_label, y_label, series, "%s, %s" % (machine, model)))


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    return "%s, %d cores, %s" % (names[0] if names else "unknown CPU", os.cpu_count(), platform.machine())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build")
    p.add_argument("--model", default=os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf"))
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--contexts", type=lambda s: [int(x) for x in s.split(",")], default=CONTEXTS)
    p.add_argument("--batches", type=lambda s: [int(x) for x in s.split(",")], default=BATCHES)
    p.add_argument("--from", dest="saved")
    p.add_argument("--save")
    p.add_argument("--svg")
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) # through the blocks that end the children
    if a.saved:
        with open(a.saved, encoding="utf-8") as f:
            all_ = json.load(f)
    elif a.build:
        with tempfile.TemporaryDirectory(prefix="skvd-growth-") as a.tmp:
            all_ = {"machine": machine(), "model": os.path.basename(a.model), "points": measure(a)}
    else:
        p.error("--build DIR or --from FILE")
    if a.save:
        with open(a.save, "w", encoding="utf-8") as f:
            json.dump(all_, f, indent=1)
    if a.svg:
        draw(a, all_["machine"], all_["model"], all_["points"])


main()
