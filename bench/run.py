#!/usr/bin/env python3
"""The benches behind the README's tables: `make bench BENCH_FLAGS="..."`, or

    bench/run.py --build DIR [--parts PART,...] [--llama DIR] [--model-q8 GGUF] [--openvino PYTHON] [--rounds N] [--json] [--out FILE]
    bench/run.py --tables FILE... [--parts PART,...]      # the tables again, from what --out wrote; "limits" is a part there

kernels  tests/bench_kernels: each operation: shape, time, rate, share of what the machine can do (measured in the same run)
engine   prefill and decode, skvd's engine and the peers in turn, round after round, so that noise hits all; the ratio is the
         median over the rounds, the rate the best of them; shares are of the limits measured before
serve    full against sparse in the KV memory that ten full sequences need (skvctl bench --compare)
job      20 requests of 4000 tokens in, 500 out, all at once, over each server's own interface: skvd, llama-server with its
         defaults and with -b 512, OpenVINO GenAI without and with its eviction; --only names some
shapes   a file of Llama 3.2 1B's shape with random weights in Q4_K, Q8_0 and bf16: prefill and decode, skvd and llama.cpp
health   start to ready, a 1-token prompt's first token, the tokenizer, CPU when idle, more threads than cores, a busy neighbour

--llama is a folder with llama.cpp's llama-bench and llama-server (for instance built from the source in PyPI's llama-cpp-python
0.3.36 with GGML_NATIVE=ON: cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF && cmake --build build --target llama-bench llama-server
llama-quantize); --model-q8 is the model as Q8_0 for it (llama-quantize --allow-requantize MODEL OUT Q8_0); --openvino is the python of
a virtual environment with openvino-genai. What is not given is left out. --prefix goes before each measured program that has the
machine for itself, such as `chrt -f 5`; not before servers, which would then not let their clients run.
Everything stays on this machine."""
import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
from functools import partial

import figures
import health
import peers
import report
from ggufshape import Shape

HERE = os.path.dirname(os.path.abspath(__file__))
ENGINE_ROWS = [("prefill", 512), ("prefill", 4096), ("decode", 0), ("decode", 4000)]
SHAPE_ROWS = [("prefill", 512), ("decode", 0)]
SHAPE_TYPES = [("Q4_K", "Q6_K", "int8"), ("Q8_0", "Q8_0", "dot8"), ("BF16", "BF16", "bf16")]  # layers, output, the limit of products


def say(text):
    print(text, file=sys.stderr, flush=True)


def machine():
    name = "unknown CPU"
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        for line in f:
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return "%s, %d cores, %s" % (name, os.cpu_count(), platform.machine())


def write_prompts(a):
    """The bundled prompts, each made longer by those that follow, so that any cut of it has a beginning of its own."""
    with open(a.prompts or HERE + "/prompts.jsonl", encoding="utf-8") as f:
        ids = [json.loads(line)["tokens"] for line in f]
    a.prompts = os.path.join(a.tmp, "prompts.jsonl")
    with open(a.prompts, "w", encoding="utf-8") as f:
        for i in range(len(ids)):
            f.write(json.dumps({"tokens": (ids[i] + ids[(i + 1) % len(ids)])[:8000]}) + "\n")


class Records:
    """What was measured: kept, appended to --out at once, and drawn as tables in the end."""

    def __init__(self, a):
        self.all, self.a = [], a

    def add(self, part, row, who, **figures):
        r = {"part": part, "row": row, "who": who, **figures}
        self.all.append(r)
        say("   %-8s %-28s %-24s %s" % (part, row, who, report.brief(figures)))
        if self.a.out:
            with open(self.a.out, "a", encoding="utf-8") as f:
                f.write(json.dumps({"machine": self.a.machine, **r}) + "\n")

    def probe(self):
        return json.loads(peers.run([*self.a.prefix, self.a.build + "/tests/bench_kernels", "--json", "--filter", "no operation",
                                     "--threads", str(self.a.threads)]))

    def limits(self, probes=3):
        """The machine's rates: the best of all probes so far, other work only ever lowers one."""
        best = next((r["limits"] for r in reversed(self.all) if r["part"] == "limits"), None)
        for _ in range(probes):
            out = self.probe()
            best = better(out["limits"], best) if best else out["limits"]
        self.add("limits", out["isa"], "%d threads" % out["threads"], limits=best)
        return best


def better(one, other):
    """Of two limits, for each operation the higher rates."""
    return {name: {**v, **{k: max(v[k], other[name][k]) for k in ("one", "all", "mean")}} for name, v in one.items()}


# ---- rows of one engine ---------------------------------------------------------------------------------------

LESS = ("skvd full, int8 cache", "skvd sparse")  # they read less than the limit is for


def in_turn(a, rec, part, row, contenders, limit):
    """contenders: [(name, function giving tokens/s)], the first is skvd. limit: function giving the tokens/s that limits allow it.
    The machine's rates are swinging (a shared host's memory by a factor of two within seconds), so that skvd's share is the median of
    its rounds' shares of the better of what was probed right before and right after."""
    rounds, shares = {name: [] for name, _ in contenders}, {name: [] for name, _ in contenders}
    for _ in range(a.rounds):
        for name, measure in contenders:
            whole = name.startswith("skvd") and name not in LESS
            before = rec.probe()["limits"] if whole else None
            try:
                rounds[name].append(measure())
            except peers.Failed as e:
                say("   %s, %s: %s" % (row, name, e))
                rounds[name].append(None)
                continue
            if whole:
                shares[name].append(rounds[name][-1] / limit(better(rec.probe()["limits"], before)))
    ours = rounds[contenders[0][0]]
    for name, v in rounds.items():
        pairs = [x / y for x, y in zip(ours, v) if x and y]
        if pairs:
            rec.add(part, row, name, tokens_per_s=max(x for x in v if x), rounds=v, skvd_is=statistics.median(pairs),
                    **({"share": statistics.median(shares[name]), "shares": shares[name]} if shares[name] else {}))


def limit_of(shape, what, n, product, limits):
    g = {k: v["mean" if k == "mem" else "all"] * 1e9 for k, v in limits.items()} # no memory keeps up its best moment for a row's time
    if what == "prefill":
        return shape.prefill_limit(n, g[product], g["bf16"])
    return shape.decode_limit(n, 1, g["mem"])


def engine(a, rec):
    shape = Shape(a.model)
    rec.limits()
    ov = peers.OpenVino(a, prefix=a.prefix) if a.openvino else None
    for what, n in a.rows:
        list_ = [("skvd full", lambda w=what, k=n: peers.skvd_row(a, w, k))]
        if a.llama:
            list_.append(("llama.cpp", lambda w=what, k=n: peers.llama_row(a, a.model, w, k)))
        if a.llama and a.model_q8:
            list_.append(("llama.cpp Q8_0", lambda w=what, k=n: peers.llama_row(a, a.model_q8, w, k)))
        if ov:
            list_.append(("OpenVINO GenAI", lambda w=what, k=n: ov.ask(w, k)["tokens_per_s"]))
        if what == "decode" and n > 1000:
            list_.append(("skvd full, int8 cache", lambda k=n: peers.skvd_row(a, "decode", k, dtype="int8")))
            list_.append(("skvd sparse", lambda k=n: peers.skvd_row(a, "decode", k, "sparse")))
        in_turn(a, rec, "engine", "%s %d" % (what, n), list_, partial(limit_of, shape, what, n, "int8"))
    if ov:
        ov.__exit__()


def batch(a, rec):
    """skvd's engine alone: the peers' figures for 20 sequences come from the job, where they hold as many at once."""
    for policy, dtype in (("full", "bf16"), ("full", "int8"), ("sparse", "bf16")):
        rate = peers.skvd_row(a, "decode", 4000, policy, dtype, batch=20, rounds=a.rounds)
        rec.add("batch", "decode 4000, batch 20", "skvd %s%s" % (policy, ", int8 cache" if dtype == "int8" else ""), tokens_per_s=rate)


def shapes(a, rec):
    rec.limits()
    folder = a.cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "skvd")
    os.makedirs(folder, exist_ok=True)
    for kind, embed, product in SHAPE_TYPES:
        path = os.path.join(folder, "llama-3.2-1b-random.%s.gguf" % kind)
        if not os.path.exists(path):
            say("   writing " + path)
            peers.run([a.build + "/tests/random-model", "--preset", "llama-3.2-1b", "--type", kind, "--embed-type", embed, path])
        with open(path, "rb") as f: # into the page cache
            while f.read(1 << 24):
                pass
        for what, n in SHAPE_ROWS:
            list_ = [("skvd full", lambda w=what, k=n, p=path: peers.skvd_row(a, w, k, model=p))]
            if a.llama:
                list_.append(("llama.cpp", lambda w=what, k=n, p=path: peers.llama_row(a, p, w, k)))
            in_turn(a, rec, "shapes", "1B %s, %s %d" % (kind, what, n), list_,
                    partial(limit_of, Shape(path), what, n, product))


# ---- through the servers -----------------------------------------------------------------------------------------

def serve(a, rec):
    """The KV memory that ten sequences need in a full cache: pages of 32 slots, a layer and KV head."""
    n, out, many = a.job
    with peers.Daemon(a, "--kv-memory", "64M") as d:
        kv = d.ctl("kv")
        heads = Shape(a.model).kv_heads * len(kv["layers"])
    memory = many // 2 * heads * ((n + out + 31) // 32) * (kv.get("pages") or {}).get("page_bytes", 8448)
    with peers.Daemon(a, "--kv-memory", str(memory), "--step-time", "100") as d:
        r = d.ctl("bench", "--compare", "full,sparse", "--prompts", a.prompts, "--input", str(n), "--output", str(out), "--concurrency", str(many))
    for x in r["runs"]:
        rec.add("serve", "%d x %d/%d in %d MiB" % (many, n, out, memory >> 20), "skvd " + x["label"], at_once=x["running_max"],
                kv_bytes=x["kv_bytes"], **figures.of_skvctl(x))


def job_contenders(a):
    n, out, many = a.job

    def openvino(*options):
        with peers.OpenVino(a, *options) as p:
            return p.ask("job", many, n, out)
    yield "skvd full", lambda: peers.skvd_job(a, "full", many, n, out)
    if a.openvino:
        yield "OpenVINO GenAI", openvino
    if a.llama:
        q8 = " Q8_0" if a.model_q8 else ""
        yield "llama-server" + q8, lambda: peers.llama_job(a, a.model_q8 or a.model, many, n, out)
        yield "llama-server%s -b 512" % q8, lambda: peers.llama_job(a, a.model_q8 or a.model, many, n, out, "-b", "512")
    yield "skvd full, int8 cache", lambda: peers.skvd_job(a, "full", many, n, out, "--kv-dtype", "int8")
    yield "skvd sparse", lambda: peers.skvd_job(a, "sparse", many, n, out)
    if a.openvino:
        yield "OpenVINO GenAI, eviction", lambda: openvino("evict")


def job(a, rec):
    n, out, many = a.job
    for name, measure in job_contenders(a):
        if a.only and name not in a.only:
            continue
        try:
            rec.add("job", "%d x %d/%d" % (many, n, out), name, **measure())
        except peers.Failed as e:
            say("   job, %s: %s" % (name, e))


def kernels(a, rec):
    rec.limits()
    out = json.loads(peers.run([*a.prefix, a.build + "/tests/bench_kernels", "--json", "--threads", str(a.threads)]))
    limits = rec.limits()
    for op in out["ops"]:
        if "limit" in op:
            op["share"] = op["rate"] / limits[op["limit"]]["all" if op["threads"] > 1 else "one"]
        rec.add("kernels", op.pop("op"), op.pop("shape"), **op)


PARTS = {"kernels": kernels, "engine": engine, "batch": batch, "serve": serve, "job": job, "shapes": shapes, "health": health.measure}
USUAL = "kernels,engine,batch,serve,health"


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build")
    p.add_argument("--model", default=os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf"))
    p.add_argument("--model-q8")
    p.add_argument("--parts", help="of %s (%s)" % (",".join(PARTS), USUAL))
    p.add_argument("--rows", help="of the engine part, such as prefill:512,decode:4000")
    p.add_argument("--job", default="4000:500:20", help="tokens in : out : requests (4000:500:20)")
    p.add_argument("--only", help="names of the job part, with ; between: those and no others", type=lambda s: s.split(";"))
    p.add_argument("--llama")
    p.add_argument("--openvino")
    p.add_argument("--prompts", help='lines {"tokens": [...]} instead of the bundled ones')
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--cache", help="folder for the large files of the shapes part")
    p.add_argument("--prefix", default="", type=shlex.split)
    p.add_argument("--json", action="store_true")
    p.add_argument("--out", help="append each figure to this file, a line of JSON each")
    p.add_argument("--tables", nargs="+")
    a = p.parse_args()
    a.machine = machine()
    a.rows = [(r.split(":")[0], int(r.split(":")[1])) for r in a.rows.split(",")] if a.rows else ENGINE_ROWS
    a.job = [int(x) for x in a.job.split(":")]
    if not a.tables and not a.build:
        p.error("--build DIR is needed")
    return a


def main():
    a = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)) # through the blocks that end the children
    rec = Records(a)
    if a.tables:
        for path in a.tables:
            with open(path, encoding="utf-8") as f:
                rec.all += [r for r in map(json.loads, f) if not a.parts or r["part"] in a.parts.split(",")]
        a.machine = rec.all[0]["machine"] if rec.all else a.machine
    else:
        with tempfile.TemporaryDirectory(prefix="skvd-bench-") as a.tmp:
            write_prompts(a)
            say(a.machine)
            for part in (a.parts or USUAL).split(","):
                say("-- " + part)
                PARTS[part](a, rec)
    if a.json:
        print(json.dumps({"machine": a.machine, "results": rec.all}))
    else:
        print(a.machine)
        print(report.tables(rec.all))


if __name__ == "__main__":
    main()
