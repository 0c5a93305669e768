#!/usr/bin/env python3
"""The benches behind the README's table: `make bench`, or

    bench/run.py --build DIR [--model GGUF] [--parts kernels,engine,serve,job] [--llama DIR] [--openvino PYTHON] [--rounds N] [--json]

kernels  tests/bench_kernels: each operation, its rate and its share of the machine's limit
engine   prefill and decode rows, skvd's engine and the peers in turn, round after round, so that noise hits all
serve    full against sparse in the memory that ten full sequences need, through the daemon (skvctl bench --compare)
job      20 requests of 4000 tokens in, 500 out, all at once: skvd full and sparse, and OpenVINO GenAI without and with its eviction

--llama is a folder with llama.cpp's llama-bench (for instance built from the source in PyPI's llama-cpp-python 0.3.36 with
GGML_NATIVE=ON); --openvino is the python of a virtual environment with openvino-genai. Peers that are not given are left out.
Everything stays on this machine."""
import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS = [("prefill", 512), ("prefill", 4096), ("decode", 0), ("decode", 4000)]
OUT = []


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(cmd, timeout=1800):
    r = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, text=True)
    if r.returncode != 0:
        raise RuntimeError("%s: %s" % (cmd[0], r.stderr.strip()[-400:]))
    return r.stdout


def machine():
    name = "unknown CPU"
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return "%s, %d cores, %s" % (name, os.cpu_count(), platform.machine())


def prompts_file(a, n=20, length=4096):
    """Prompts without shared beginnings; content does not matter for speed, but every peer gets the same."""
    path = os.path.join(a.tmp, "prompts.jsonl")
    rnd = random.Random(1)
    with open(path, "w") as f:
        for _ in range(n):
            f.write(json.dumps({"tokens": [rnd.randrange(100, 40000) for _ in range(length)]}) + "\n")
    return path


# ---- one row, one contender ------------------------------------------------------------------------

def skvd_row(a, what, n, policy, dtype="bf16"):
    row = "prefill:%d" % n if what == "prefill" else "decode:%d:1" % max(n, 8)
    out = run([a.build + "/tests/bench_engine", a.model, "--json", "--rounds", "1", "--policy", policy, "--dtype", dtype, "--rows", row,
               "--threads", str(a.threads)])
    return json.loads(out.splitlines()[-1])["tokens_per_s"]


def llama_row(a, what, n):
    args = ["-p", str(n), "-n", "0"] if what == "prefill" else ["-p", "0", "-n", "48", "-d", str(n)]
    out = json.loads(run([a.llama + "/llama-bench", "-m", a.model, "-t", str(a.threads), "-r", "1", "-o", "json", *args]))
    return out[-1]["avg_ts"]


def openvino(a, *args):
    return json.loads(run([a.openvino, HERE + "/peer_openvino.py", a.model, a.prompts, *[str(x) for x in args]]).splitlines()[-1])


def contenders(a, what, n):
    yield "skvd full", lambda: skvd_row(a, what, n, "full")
    if what == "decode" and n > 1000:
        yield "skvd sparse", lambda: skvd_row(a, what, n, "sparse")
        yield "skvd full int8", lambda: skvd_row(a, what, n, "full", "int8")
    if a.llama:
        yield "llama.cpp", lambda: llama_row(a, what, n)
    if a.openvino:
        yield "OpenVINO", lambda: openvino(a, what, n)["tokens_per_s"]


def engine(a):
    for what, n in ROWS:
        best = {}
        for _ in range(a.rounds):
            for name, measure in contenders(a, what, n):
                best.setdefault(name, []).append(measure())
        ours = max(best["skvd full"])
        for name, v in best.items():
            OUT.append({"part": "engine", "row": "%s %d" % (what, n), "who": name, "tokens_per_s": max(v), "rounds": v,
                        "skvd_is": ours / max(v)})
            if not a.json:
                print("%-14s %-16s %9.1f tokens/s   skvd full is %.2fx" % ("%s %d" % (what, n), name, max(v), ours / max(v)), flush=True)


# ---- through the daemon -----------------------------------------------------------------------------------

class Daemon:
    def __init__(self, a, *options):
        self.socket = os.path.join(a.tmp, "s%d" % time.monotonic_ns())
        self.log = open(os.path.join(a.tmp, "log"), "a")
        self.p = subprocess.Popen([a.build + "/skvd", "--model", a.model, "--socket", self.socket, "--threads", str(a.threads), *options],
                                  stderr=self.log, stdout=self.log)
        for _ in range(600):
            if os.path.exists(self.socket) or self.p.poll() is not None:
                break
            time.sleep(0.05)
        if self.p.poll() is not None:
            raise RuntimeError("skvd did not start: see " + self.log.name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.p.terminate()
        self.p.wait()


def bench(a, daemon, *args):
    return json.loads(run([a.build + "/skvctl", "--socket", daemon.socket, "--json", "bench", *args], 3600))


def serve(a):
    """The KV memory that ten sequences of 4000 + 500 tokens need in a full cache: pages of 32 slots a layer and KV head."""
    with Daemon(a, "--kv-memory", "64M") as d:
        kv = json.loads(run([a.build + "/skvctl", "--socket", d.socket, "--json", "kv"]))
    heads = a.kv_heads * len(kv["layers"])
    memory = 10 * heads * ((4500 + 31) // 32) * kv["pages"]["page_bytes"] if "pages" in kv else None
    memory = memory or 10 * heads * 141 * 8448
    with Daemon(a, "--kv-memory", str(memory)) as d:
        out = bench(a, d, "--compare", "full,sparse", "--input", "4000", "--output", "500", "--concurrency", "20")
    OUT.append({"part": "serve", "kv_memory": memory, "result": out})
    if not a.json:
        print("serve, KV memory of ten full sequences (%d MiB): %s" % (memory >> 20, json.dumps(out)), flush=True)


def job(a):
    for policy in ("full", "sparse"):
        with Daemon(a, "--kv-memory", "4G", "--kv-policy", policy) as d:
            out = bench(a, d, "--prompts", a.prompts, "--input", "4000", "--output", "500", "--concurrency", "20", "--requests", "20")
        OUT.append({"part": "job", "who": "skvd " + policy, "result": out})
        if not a.json:
            print("job, skvd %s: %s" % (policy, json.dumps(out)), flush=True)
    for evict in ((), ("evict",)) if a.openvino else ():
        out = openvino(a, "job", 20, 4000, 500, *evict)
        OUT.append({"part": "job", "who": " ".join(("OpenVINO", *evict)), "result": out})
        if not a.json:
            print("job, OpenVINO%s: %s" % (" with eviction" if evict else "", json.dumps(out)), flush=True)


def kernels(a):
    out = run([a.build + "/tests/bench_kernels"])
    OUT.append({"part": "kernels", "text": out})
    if not a.json:
        print(out, flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", required=True)
    p.add_argument("--model", default=os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf"))
    p.add_argument("--parts", default="kernels,engine,serve")
    p.add_argument("--llama")
    p.add_argument("--openvino")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--kv-heads", type=int, default=3)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    parts = {"kernels": kernels, "engine": engine, "serve": serve, "job": job}
    with tempfile.TemporaryDirectory(prefix="skvd-bench-") as a.tmp:
        a.prompts = prompts_file(a)
        say(machine())
        for part in a.parts.split(","):
            say("-- " + part)
            parts[part](a)
    if a.json:
        print(json.dumps({"machine": machine(), "results": OUT}))


main()
