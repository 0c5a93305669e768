"""Figures of the daemon as a neighbour: how fast it is there, what it takes when it does nothing, how it shares the machine."""
import os
import re
import statistics
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


def ratios(a, rounds, other):
    """What prefill and decode keep of their rate with a thread for each core: the median of rounds of the two in turn."""
    cores, kept = os.cpu_count(), {}
    for _ in range(rounds):
        for what in ("prefill", "decode"):
            alone = peers.skvd_row(a, what, 512, threads=cores, rounds=2)
            kept.setdefault(what, []).append(other(what) / alone)
    return {what: statistics.median(v) for what, v in kept.items()}


def beside_busy(a, what):
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return peers.skvd_row(a, what, 512, threads=os.cpu_count(), rounds=2)
    finally:
        neighbour.kill()
        neighbour.wait()


def sharing(a, rec):
    """Without the prefix: a real-time priority would decide the question."""
    prefix, a.prefix = a.prefix, []
    cores = os.cpu_count()
    for what, v in ratios(a, 5, lambda what: peers.skvd_row(a, what, 512, threads=2 * cores, rounds=2)).items():
        rec.add("health", "%s, %d threads on %d cores" % (what, 2 * cores, cores), "skvd", value=v, unit="of %d threads' rate" % cores,
                goal=">= 0.85")
    for what, v in ratios(a, 5, lambda what: beside_busy(a, what)).items():
        rec.add("health", "%s beside a busy process" % what, "skvd", value=v, unit="of its rate alone",
                goal=">= %.2f (half of its share, %d / %d)" % (cores / (cores + 1) / 2, cores, cores + 1))
    a.prefix = prefix
