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


def measure(a, keep):
    """Time between tokens (ms, P50: what disturbs a few steps does not count): of one sequence by its context; of a step by
    how many decode at once."""
    # A long step target: prompts are read in large pieces, so that all decode together before the first of them ends.
    with peers.Daemon(a, "--kv-memory", "3G", "--step-time", "1000") as d:
        for n in a.contexts:
            for policy in a.policies:
                best = min(bench(d, policy, n, 64, 1)["itl_p50_ms"] for _ in range(a.rounds))
                keep({"by": "context", "x": n, "policy": policy, "ms": best})
                say("context %5d  %-8s %7.2f ms a token" % (n, policy, best))
        for many in a.batches:
            for policy in a.policies:
                runs = [bench(d, policy, BATCH_INPUT, 128, many) for _ in range(a.rounds if many < 16 else 1)]
                if max(r["decode_batch"] for r in runs) < many:
                    say("batch %d, %s: no more than %d decoded at once, left out" % (many, policy, runs[0]["decode_batch"]))
                    continue
                best = min(r["itl_p50_ms"] for r in runs)
                keep({"by": "batch", "x": many, "policy": policy, "ms": best})
                say("batch %2d  %-8s %7.2f ms a step, %7.1f tokens/s" % (many, policy, best, 1e3 * many / best))


def better(old, new):
    """Of each point the faster one: what disturbs a measurement only makes it slower."""
    best = {}
    for p in old + new:
        key = p["by"], p["x"], p["policy"]
        if key not in best or p["ms"] < best[key]["ms"]:
            best[key] = p
    return sorted(best.values(), key=lambda p: (p["by"], p["x"], p["policy"]))


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
    p.add_argument("--contexts", type=lambda s: [int(x) for x in s.split(",") if int(x) > 0], default=CONTEXTS, help="%s; 0: none" % CONTEXTS)
    p.add_argument("--batches", type=lambda s: [int(x) for x in s.split(",") if int(x) > 0], default=BATCHES, help="%s; 0: none" % BATCHES)
    p.add_argument("--policies", type=lambda s: s.split(","), default=POLICIES, help="of full,sparse")
    p.add_argument("--from", dest="saved")
    p.add_argument("--save", help="a file that is there already: points are added to it, the faster of two is kept")
    p.add_argument("--svg")
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) # through the blocks that end the children
    if not a.saved and not a.build:
        p.error("--build DIR or --from FILE")
    all_ = {"machine": machine(), "model": os.path.basename(a.model), "points": []}
    for path in (a.saved, a.save):
        if path and os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                all_ = json.load(f)

    def keep(point):
        all_["points"] = better(all_["points"], [point])
        if a.save:
            with open(a.save, "w", encoding="utf-8") as f:
                json.dump(all_, f, indent=1)
    if a.build:
        with tempfile.TemporaryDirectory(prefix="skvd-growth-", ignore_cleanup_errors=True) as a.tmp:
            measure(a, keep)
    if a.svg:
        draw(a, all_["machine"], all_["model"], all_["points"])


main()
