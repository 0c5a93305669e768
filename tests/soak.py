#!/usr/bin/env python3
"""Random clients against a real skvd with a small random model, for SKVD_SOAK_SECONDS (20): mixed lengths, cancels,
disconnects, slow readers, bad frames, administrators. Greedy answers must be the ones that the same request got alone. As
root, half of them are another user.

At the end: an empty pool, no descriptor more than at the start, memory that does not grow with time."""
import argparse
import ctypes
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from skvwire import Daemon, Refused, pack  # noqa: E402

BUILD = os.environ.get("top_builddir", os.getcwd())
ARGS = argparse.ArgumentParser(description="Random clients against a real skvd.")
ARGS.add_argument("seconds", nargs="?", type=float, default=float(os.environ.get("SKVD_SOAK_SECONDS", "20")))
ARGS.add_argument("--seed", type=int, default=0)
SECONDS, SEED = vars(ARGS.parse_args()).values()
CLIENTS = 8
OTHER_USER = 65534
SANITIZED = os.environ.get("SKVD_SANITIZED", "") != ""
tmp = tempfile.mkdtemp(prefix="skvd-soak-")
model = os.path.join(tmp, "random.gguf")
counts, failures = {}, []
lock = threading.Lock()


def count(what):
    with lock:
        counts[what] = counts.get(what, 0) + 1


def tokens(n, seed):
    r = random.Random(seed)
    return [r.randrange(40, 200) for _ in range(n)]


def request(k):
    """One of forty fixed requests."""
    r = random.Random(k)
    return {"tokens": tokens(r.randrange(1, 400), k), "max_tokens": r.randrange(0, 60), "temperature": 0, "ignore_eos": True,
            "kv": {"policy": r.choice("full snapkv sparse h2o tova streaming pyramid article".split()), "budget": r.choice((32, 64, 512))}}


def answers(d, r, p):
    k = r.randrange(len(known))
    i = p.start("generate", stream=r.random() < 0.5, **request(k))
    got = p.result(i)
    if got["tokens"] != known[k]:
        raise AssertionError("request %d: %r, alone %r" % (k, got["tokens"], known[k]))
    text = "".join(t["text"] for t in p.tokens(i))
    if text and text != got["text"]:
        raise AssertionError("streamed text differs")


def sampled(d, r, p):
    p.call("generate", tokens=tokens(r.randrange(1, 200), r.random()), max_tokens=r.randrange(1, 50), seed=r.randrange(99),
           stop=["ab", "c"], logprobs=r.choice((0, 3)), priority=r.randrange(-10, 11))


def cancels(d, r, p):
    i = p.start("generate", tokens=tokens(r.randrange(1, 900), 1), max_tokens=500, ignore_eos=True)
    time.sleep(r.random() * 0.1)
    p.start("cancel", msgid=i)
    try:
        p.result(i)
    except Refused as e:
        if e.code != "cancelled":
            raise


def disconnects(d, r, p):
    for _ in range(r.randrange(1, 4)):
        p.start("generate", tokens=tokens(r.randrange(1, 900), 1), max_tokens=500, ignore_eos=True)
    time.sleep(r.random() * 0.1)


def reads_slowly(d, r, p):
    i = p.start("generate", tokens=tokens(5, 1), max_tokens=300, ignore_eos=True, logprobs=20)
    time.sleep(r.random())
    p.result(i)


def bad_frame(d, r, p):
    p.raw(r.choice((b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x94\x00\x01" + b"\x91" * 64, b"GET /", bytes(r.randrange(256) for _ in range(40)))))
    p.s.settimeout(1)
    try:
        while p.message() is not None:
            pass
    except (OSError, AssertionError):
        pass


def half_frame(d, r, p):
    whole = pack([0, 1, "generate", [{"prompt": "x" * 1000}]])
    p.raw(whole[:r.randrange(len(whole))])


def bad_request(d, r, p):
    for args in ({"prompt": "x", "tokens": [1]}, {"prompt": 5}, {"tokens": [10 ** 9]}, {"prompt": "x", "kv": {"budget": 1}}):
        try:
            p.call("generate", **args)
            raise AssertionError("not refused: %r" % args)
        except Refused as e:
            if e.code != "bad_request":
                raise


def admin(d, r, p):
    for m in ("status", "sequences", "kv", "get"):
        p.call(m)
    for q in p.call("sequences")["sequences"][:1]:
        try:
            p.call("kept", sequence=q["id"])
        except Refused:
            pass
    p.call("set", **{"step-time": r.choice((20, 50))})
    p.call("subscribe", topics=["sequences", "steps"])
    p.call("tokenize", text="hello " * r.randrange(50))


def session(d, r, p):
    name = "s%d" % r.randrange(6)
    try:
        p.call("generate", tokens=tokens(r.randrange(1, 100), 3), max_tokens=5, session=name, ignore_eos=True)
    except Refused as e:
        if e.code not in ("not_found", "context_overflow", "bad_request"):  # ended, full, or in use by another of us
            raise


def become_other_user():
    """This thread alone; the C library's seteuid would change all of them."""
    ctypes.CDLL(None).syscall(117, -1, OTHER_USER, -1)  # setresuid on x86-64


ACTS = [answers] * 6 + [sampled] * 2 + [cancels, disconnects, reads_slowly, bad_frame, half_frame, bad_request, admin, session]
known = []


def client(d, seed, end, other):
    r = random.Random(seed)
    if other:
        become_other_user()
    while time.time() < end and not failures:
        act = r.choice(ACTS)
        try:
            with d.peer(timeout=120) as p:
                act(d, r, p)
            count(act.__name__)
        except Refused as e:
            if e.code == "overloaded":
                count("overloaded")
                time.sleep(e.error["retry_after_ms"] / 1000)
            elif other and act is admin and e.code == "forbidden":
                count("forbidden")
            else:
                failures.append("%s: %s" % (act.__name__, e))
        except Exception as e:
            failures.append("%s: %r" % (act.__name__, e))


def figures(d):
    with open("/proc/%d/status" % d.p.pid) as f:
        rss = int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))
    end, fds = time.time() + 1, []
    while time.time() < end:  # a connection that just ended is still there for a moment
        fds.append(len(os.listdir("/proc/%d/fd" % d.p.pid)))
        time.sleep(0.02)
    return rss, min(fds)


def empty(d):
    end = time.time() + 60
    with d.peer(timeout=60) as p:
        while True:
            for q in p.call("sequences")["sequences"]:
                try:
                    p.call("kill", sequence=q["id"])
                except Refused:
                    pass
            st = p.call("status")
            if st["pages_used"] == 0 and st["connections"] == 1 and st["running"] == st["waiting"] == 0:
                return
            if time.time() > end:
                failures.append("not empty: %r" % st)
                return
            time.sleep(0.05)


def main():
    subprocess.run([os.path.join(BUILD, "tests/random-model"), "--layers", "3", "--width", "64", "--heads", "4", "--kv-heads", "2",
                    "--head-dim", "16", "--ffn", "128", "--context", "1024", "--tied", "0", "--seed", "7", model], check=True)
    sock = os.path.join(tmp, "sock")
    two_users = os.getuid() == 0 and os.uname().machine == "x86_64"
    os.chmod(tmp, 0o755)
    d = Daemon([os.path.join(BUILD, "skvd"), "--model", model, "--socket", sock, "--kv-memory", "3M", "--threads", "2",
                "--log-level", "warning", "--socket-mode", "0666", "--config", "/dev/null", "--reader-timeout", "30s", "--frame-timeout", "2s"],
               sock, os.path.join(tmp, "log"), wait=False)
    while True: # between bind and listen the path is there and nobody behind it
        try:
            d.peer().close()
            break
        except OSError:
            if d.p.poll() is not None:
                raise
            time.sleep(0.02)
    with d.peer(timeout=60) as p:
        for k in range(40):
            known.append(p.call("generate", stream=False, **request(k))["tokens"])
        if len({t for a in known for t in a}) < 50:
            failures.append("answers that say nothing")
    rounds = 3 if SECONDS < 300 else 10
    empty(d)
    seen = []
    for n in range(rounds):
        end = time.time() + SECONDS / rounds
        threads = [threading.Thread(target=client, args=(d, 1000003 * SEED + 1000 * n + k, end, two_users and k % 2)) for k in range(CLIENTS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if d.p.poll() is not None:
            failures.append("the daemon is gone")
            break
        empty(d)
        seen.append(figures(d))
    if len(seen) == rounds:
        if seen[-1][1] > seen[len(seen) // 2][1]:  # the first third may open what stays open
            failures.append("descriptors grow: %r" % seen)
        if not SANITIZED and seen[-1][0] > seen[0][0] + max(8000, seen[0][0] // 10):
            failures.append("memory grows: %r" % seen)
    rc = d.stop() if d.p.poll() is None else d.p.returncode
    if rc != 0:
        failures.append("exit %r" % rc)
    for f in failures:
        print("FAIL", f)
    if failures:
        print(d.log()[-3000:])
    shutil.rmtree(tmp, ignore_errors=True)
    print("%.0f s:" % SECONDS, ", ".join("%s %d" % x for x in sorted(counts.items())))
    print("memory (KiB) and descriptors after each round:", seen)
    print("%d passed, %d failed" % (1 if not failures else 0, len(failures)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
