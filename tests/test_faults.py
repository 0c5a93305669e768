#!/usr/bin/env python3
"""The n-th allocation fails, for every n that is reached: first while the daemon starts, then while it serves.

At start it either comes up or ends with a clean exit status. While it serves it may refuse the request that is hit, or drop
the connection; it stays the same process, and afterwards answers the fixed question. Needs --enable-fault-injection."""
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from skvwire import Daemon, Peer, Refused  # noqa: E402

SKVD = os.path.join(os.environ.get("top_builddir", os.getcwd()), "tests/skvd-fake")
LIMIT = 5000
tmp = tempfile.mkdtemp(prefix="skvd-faults-")
model = os.path.join(tmp, "model.bin")
sock = os.path.join(tmp, "s")
log = os.path.join(tmp, "log")


def start(var, n, wait=True):
    if os.path.exists(log):
        os.unlink(log)
    env = dict(os.environ, **{var: str(n)})
    return Daemon([SKVD, "--model", model, "--socket", sock, "--log-level", "debug", "--metrics", "unix:" + sock + ".m"], sock, log,
                  env=env, wait=wait)


def scenario():
    """A bit of everything; whatever fails may fail with an answer or the end of the connection."""
    for what in (("hello", {"client": "x"}), ("generate", {"prompt": "n=3", "logprobs": 1, "stop": ["x"], "progress": True,
                                                           "pin": [[0, 1]], "kv": {"policy": "full"}}),
                 ("generate", {"messages": [{"role": "user", "content": "n=2"}], "session": "s", "seed": 1}),
                 ("score", {"prompt": "a", "continuation": [1, 2]}), ("tokenize", {"text": "abc"}),
                 ("status", {}), ("sequences", {}), ("kv", {}), ("set", {"max-requests": 100, "step-time": 10}), ("get", {}),
                 ("reload", {}), ("subscribe", {"topics": ["sequences"]}), ("generate", {"prompt": "n=1 big=20000"}),
                 ("nonsense", {}), ("generate", {"prompt": "x", "bad": 1})):
        try:
            with Peer(sock) as p:
                p.call(what[0], **what[1])
        except (Refused, EOFError, OSError):
            pass


def healthy(d):
    end = time.time() + 5
    while True:
        try:
            with Peer(sock) as p:
                r = p.call("generate", prompt="n=3", stream=False)
                st = p.call("status")
                if r["text"] == " w0 w1 w2" and st["pages_used"] == 0 and st["requests"] == 1 and st["connections"] == 1:
                    assert st["pid"] == d.p.pid
                    return
        except (Refused, EOFError, OSError):
            pass
        assert d.p.poll() is None and time.time() < end, "not healthy: " + d.log()[-3000:]
        time.sleep(0.01)


def main():
    probe = subprocess.run([SKVD, "--version"], env=dict(os.environ, SKVD_FAIL_ALLOC="1"), capture_output=True, text=True)
    if "fault-injected" not in probe.stderr:
        print("this build has no fault injection (--enable-fault-injection): skipped")
        return 77
    with open(model, "wb") as f:
        f.write(b"\0" * 8192)
    passed = failed = 0
    n = 0
    for n in range(1, LIMIT):
        d = start("SKVD_FAIL_ALLOC", n, wait=False)
        end = time.time() + 10
        while d.p.poll() is None and " ready " not in d.log() and time.time() < end:
            time.sleep(0.002)
        hit = "fault-injected" in d.log()
        try:
            if d.p.poll() is None:
                healthy(d)
            rc = d.stop()
            assert rc in (0, 1, 2, 3, 4), "exit %d" % rc
            assert rc == 0 or "memory" in d.log(), "no word of memory"
            passed += 1
        except AssertionError as e:
            failed += 1
            print("FAIL start, allocation %d: %s\n%s" % (n, e, d.log()[-600:]))
            if d.p.poll() is None:
                d.stop(9)
        if not hit:
            break
    print("start: %d allocations" % (n - 1))
    for n in range(1, LIMIT):
        d = start("SKVD_FAIL_ALLOC_READY", n)
        try:
            scenario()
            healthy(d)
            rc = d.stop()
            assert rc == 0, rc
            passed += 1
        except AssertionError as e:
            failed += 1
            print("FAIL serving, allocation %d: %s\n%s" % (n, e, d.log()[-600:]))
            if d.p.poll() is None:
                d.stop(9)
        if "fault-injected" not in d.log():
            break
    print("serving: %d allocations" % (n - 1))
    shutil.rmtree(tmp, ignore_errors=True)
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
