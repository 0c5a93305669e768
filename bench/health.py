"""Figures of the daemon as a neighbour: how fast it is there, what it takes when it does nothing, how it shares the machine."""
import os
import re
import subprocess
import sys
import time

import peers


def measure(a, rec):
    starts = []
    for _ in range(5):
        with peers.Daemon(a) as d:
            starts.append(d.start_s)
    rec.add("health", "start to ready, file cached", "skvd", value=1e3 * min(starts), unit="ms", goal="< 300")
    with peers.Daemon(a) as d:
        r = d.ctl("bench", "--input", "1", "--output", "32", "--concurrency", "1", "--requests", "20")["runs"][0]
        rec.add("health", "first token of a 1-token prompt", "skvd", value=r["ttft_p50_ms"] / r["itl_p50_ms"], unit="decode steps", goal="<= 1.3",
                ttft_p50_ms=r["ttft_p50_ms"], itl_p50_ms=r["itl_p50_ms"])
        time.sleep(1)
        cpu = d.cpu_s()
        time.sleep(5)
        rec.add("health", "CPU of 5 s without work", "skvd", value=1e3 * (d.cpu_s() - cpu), unit="ms", goal="0")
    tokenizer(a, rec)
    sharing(a, rec)


def tokenizer(a, rec):
    text = peers.run([*a.prefix, a.build + "/tests/bench_text"])
    for what, rate in re.findall(r"^encode (.+?)\s+\d+ bytes .*?([\d.]+) MB/s", text, re.M):
        rec.add("health", "tokenizer, " + what, "skvd", value=float(rate), unit="MB/s", goal=">= 20")


def rates(a, threads):
    return {what: peers.skvd_row(a, what, n, threads=threads, rounds=3) for what, n in (("prefill", 512), ("decode", 512))}


def sharing(a, rec):
    """Without the prefix: a real-time priority would decide the question."""
    prefix, a.prefix = a.prefix, []
    cores = os.cpu_count()
    alone = rates(a, cores)
    for what, v in rates(a, 2 * cores).items():
        rec.add("health", "%s, %d threads on %d cores" % (what, 2 * cores, cores), "skvd", value=v / alone[what], unit="of %d threads' rate" % cores,
                goal="no collapse")
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for what, v in rates(a, cores).items():
            rec.add("health", "%s beside a busy process" % what, "skvd", value=v / alone[what], unit="of its rate alone",
                    goal=">= %.2f (half of its share, %d / %d)" % (cores / (cores + 1) / 2, cores, cores + 1))
    finally:
        neighbour.kill()
        neighbour.wait()
    a.prefix = prefix
