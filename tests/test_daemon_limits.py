#!/usr/bin/env python3
"""The daemon over its socket: slow readers and limits. See test_daemon.py."""
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from daemon_rig import daemon, healthy, refused, until  # noqa: E402
from rig import SANITIZED, http_get, own, rss_kb, run, tmp  # noqa: E402
from skvwire import pack  # noqa: E402

# ---- slow readers --------------------------------------------------------------------------------------

@own
def test_slow_reader_pauses_and_goes_on():
    d = daemon("--output-high", "64K", "--output-low", "16K", "--output-limit", "4M")
    try:
        with d.peer(timeout=30) as slow, d.peer() as p:
            i = slow.start("generate", prompt="n=3000 big=1000", max_tokens=3000)
            until(lambda: any(s["state"] == "paused" for s in p.call("sequences")["sequences"]), 10, "paused")
            t = time.time()
            assert p.call("generate", prompt="n=100 delay=1")["completion_tokens"] == 100
            assert time.time() - t < 2, "others are delayed"
            r = slow.result(i)  # reading again
            assert r["completion_tokens"] == 3000
            assert "".join(t["text"] for t in slow.tokens(i)) == r["text"]
        assert "pause conn" in d.log() and "unpause conn" in d.log()
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_slow_reader_dropped():
    d = daemon("--reader-timeout", "500ms", "--output-high", "64K", "--output-low", "16K")
    try:
        before = rss_kb(d)
        slow = d.peer()
        slow.start("generate", prompt="n=100000 big=1000", max_tokens=100000)
        with d.peer() as p:
            until(lambda: p.call("status")["running"] == 1)
            until(lambda: p.call("status")["running"] == 0, 10, "dropped")
        assert "reason=slow" in d.log()
        assert SANITIZED or rss_kb(d) - before < 20000
        slow.close()
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_held_up_itself():
    """What passes while the daemon stands still is not the clients' time."""
    d = daemon("--reader-timeout", "2s", "--frame-timeout", "2s", "--idle-timeout", "2s", "--output-high", "64K",
               "--output-low", "16K")
    try:
        with d.peer(timeout=30) as reader, d.peer() as half, d.peer() as idle:
            i = reader.start("generate", prompt="n=2000 big=1000", max_tokens=2000)
            until(lambda: "pause conn" in d.log())
            half.raw(pack([0, 1, "hello", []])[:2])
            idle.call("hello")
            d.p.send_signal(signal.SIGSTOP)
            time.sleep(3.5)
            d.p.send_signal(signal.SIGCONT)
            half.raw(pack([0, 1, "hello", []])[2:])
            assert idle.call("hello") and half.result(1)
            assert reader.result(i)["completion_tokens"] == 2000
        healthy(d)
    finally:
        assert d.stop() == 0


# ---- limits --------------------------------------------------------------------------------------------

@own
def test_quotas():
    d = daemon("--max-requests-per-connection", "3", "--max-requests-per-user", "5", "--max-prompt-per-user", "2000")
    try:
        with d.peer() as a, d.peer() as b:
            for p, n in ((a, 3), (b, 2)):
                for _ in range(n):
                    p.start("generate", prompt="n=100000 delay=5", stream=False)
            e = refused(lambda: a.call("generate", prompt="x"), "overloaded", "max-requests-per-connection")
            assert e["retry_after_ms"] > 0
            e = refused(lambda: b.call("generate", prompt="x"), "overloaded", "max-requests-per-user")
            assert e["retry_after_ms"] > 0
            a.call("set", **{"max-requests-per-user": 100, "max-requests": 6})
            b.start("generate", prompt="n=100000 delay=5", stream=False)
            e = refused(lambda: d.peer().call("generate", prompt="x"), "overloaded", "max-requests)")
            assert e["retry_after_ms"] > 0
        with d.peer() as p:
            p.call("set", **{"max-requests": 4096})
            until(lambda: p.call("status")["requests"] == 1)
            refused(lambda: p.call("generate", prompt="x" * 5000), "too_large", "max-prompt")
            for m in "generate", "apply_template":  # messages without a text take memory, too
                refused(lambda: p.call(m, messages=[{"role": "", "content": ""}] * 50), "too_large", "counts as 4800 bytes")
            for prompt in ({"prompt": "x" * 1500}, {"messages": [{"role": "user", "content": "x" * 1500}]}, {"tokens": [1] * 375}):
                i = p.start("generate", prompt="n=100000 delay=5 " + "x" * 1500, stream=False)
                for m, more in ("generate", {}), ("score", {"continuation": "x"}):
                    e = refused(lambda: p.call(m, **prompt, **more), "overloaded", "max-prompt-per-user")
                    assert e["retry_after_ms"] > 0
                for more in {"continuation": "x" * 1500}, {"continuation": [1] * 375}, {"continuation": "x", "candidates": [[1] * 375]}:
                    refused(lambda: p.call("score", prompt="x", **more), "overloaded", "max-prompt-per-user")
                p.call("set", **{"max-prompt-per-user": 100000, "max-prompt": 2000})
                e = refused(lambda: p.call("generate", **prompt), "overloaded", "max-prompt)")
                assert e["retry_after_ms"] > 0
                p.call("set", **{"max-prompt": "256M", "max-prompt-per-connection": 2000})
                e = refused(lambda: p.call("generate", **prompt), "overloaded", "max-prompt-per-connection")
                assert e["retry_after_ms"] > 0
                with d.peer() as q:
                    assert q.call("generate", prompt="n=1 " + "x" * 1500)["completion_tokens"] == 1
                p.call("cancel", msgid=i)
                refused(lambda: p.result(i), "cancelled")
                assert p.call("generate", prompt="n=1 " + "x" * 1500)["completion_tokens"] == 1
                p.call("set", **{"max-prompt-per-user": 2000, "max-prompt-per-connection": "64M"})
                until(lambda: p.call("status")["requests"] == 1)
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_limits_set_while_running():
    """Each limit that `set` may change holds for what comes next, and `reload` gives back what the file says."""
    d = daemon(conf="max-deadline = 0\nframe-timeout = 30s\n")

    def closed(p, says):
        m = p.message()
        assert m[:2] == [2, "error"] and says in m[2][0]["message"], m
        assert p.message() is None

    try:
        with d.peer(timeout=30) as p:
            p.call("set", **{"max-requests-per-connection": 1})
            i = p.start("generate", prompt="n=100000 delay=5", stream=False)
            e = refused(lambda: p.call("generate", prompt="n=1"), "overloaded", "max-requests-per-connection")
            assert e["retry_after_ms"] > 0
            p.call("set", **{"max-requests-per-connection": 10, "max-deadline": "200ms"})
            p.call("cancel", msgid=i)
            refused(lambda: p.result(i), "cancelled")
            for asked in {}, {"deadline_ms": 3600000}:
                t = time.time()
                refused(lambda: p.call("generate", prompt="n=100000 delay=5", stream=False, **asked), "deadline")
                assert 0.19 <= time.time() - t < 60
            p.call("set", **{"frame-limit": 4096, "nesting-limit": 6})
            for data, says in ((pack([0, 1, "tokenize", [{"text": "x" * 5000}]]), "frame-limit"), (b"\x94\x00\x01\xa1x" + b"\x91" * 8, "deeper")):
                with d.peer() as q:
                    q.raw(data)
                    closed(q, says)
            p.call("set", **{"frame-limit": "16M", "nesting-limit": 16, "frame-timeout": "200ms"})
            with d.peer() as q:
                q.raw(b"\x94\x00")
                closed(q, "frame-timeout")
            assert sorted(p.call("reload")["applied"])[:2] == ["frame-timeout", "max-deadline"]
            r = p.call("get")
            assert r["max-deadline"] == 0 and r["frame-timeout"] == 30000, r
            p.call("set", **{"output-low": "4K", "output-high": "8K", "output-limit": "64K", "reader-timeout": "300ms"})
            with d.peer() as q:
                q.start("generate", prompt="n=100000 big=1000", max_tokens=100000)
                until(lambda: p.call("status")["running"] == 1)
                until(lambda: p.call("status")["running"] == 0, 20)
            assert "reason=slow" in d.log()
            p.call("set", **{"idle-timeout": "200ms"})
            with d.peer() as q:
                assert q.message() is None
        healthy(d)
    finally:
        assert d.stop() == 0


def halves(d, n):
    """n connections with a message each that is begun and does not end; the errors of those that were refused it."""
    peers = [d.peer() for _ in range(n)]
    for p in peers:
        try:
            p.raw(b"\x94\x00\x01\xa1x\x91\xdb" + struct.pack(">I", 1000000) + b"x" * 900000)
        except OSError:
            pass  # it was closed meanwhile
    time.sleep(0.2)
    gone = select.select([p.s for p in peers], [], [], 0)[0]
    said = [p.message() for p in peers if p.s in gone]
    assert all(m[:2] == [2, "error"] and m[2][0]["code"] == "overloaded" and m[2][0]["retry_after_ms"] > 0 for m in said), said
    return peers, [m[2][0]["message"] for m in said]


@own
def test_buffer_quota():
    """Messages that are never finished and answers that are never read cost what a user may have of them, not a connection each."""
    d = daemon("--frame-limit", "1M", "--max-buffer-per-user", "5M")
    try:
        before = rss_kb(d)
        for setting in "max-buffer-per-user", "max-buffer":
            peers, said = halves(d, 20)
            assert len(said) >= 14 and all("limited by %s)" % setting in m for m in said), said
            with d.peer(timeout=60) as p:  # who asks for little is answered
                assert p.call("generate", prompt="n=3")["completion_tokens"] == 3
                assert SANITIZED or rss_kb(d) - before < 12000
                for q in peers:
                    q.close()
                until(lambda: p.call("status")["connections"] == 1, 30)
                assert p.call("generate", prompt="n=1 " + "x" * 900000, stream=False)["completion_tokens"] == 1  # all is given back
            lazy = [d.peer() for _ in range(40)]
            for q in lazy:
                q.start("tokenize", text="\u00e9" * 100000)  # half of the answer fits into the socket
            with d.peer(timeout=60) as p:
                until(lambda: p.call("status")["connections"] <= 32, 30)
                assert p.call("generate", prompt="n=3")["completion_tokens"] == 3
                assert re.search("reason=slow .*limited by %s" % setting, d.log())
                for q in lazy:
                    q.close()
                p.call("set", **{"max-buffer-per-user": "1G", "max-buffer": "5M"})
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_kv_quota():
    d = daemon("--max-kv-per-user", "2000")  # the scripted engine's sequences need 1000 bytes each
    try:
        with d.peer() as p:
            first = [p.start("generate", prompt="n=100000 delay=5", stream=False) for _ in range(2)]
            e = refused(lambda: p.call("generate", prompt="n=1"), "overloaded", "max-kv-per-user")
            assert e["retry_after_ms"] > 0
            assert p.call("cancel", msgid=first[0]) == {"cancelled": True}
            refused(lambda: p.result(first[0]), "cancelled")
            assert p.call("generate", prompt="n=1")["completion_tokens"] == 1
            p.call("set", **{"max-kv-per-user": 3500})
            p.start("generate", prompt="n=100000 delay=5", stream=False)
            assert p.call("generate", prompt="n=1")["completion_tokens"] == 1
            p.call("set", **{"max-kv-per-connection": 2000})
            e = refused(lambda: p.call("generate", prompt="n=1"), "overloaded", "max-kv-per-connection")
            assert e["retry_after_ms"] > 0
            with d.peer() as q:
                assert q.call("generate", prompt="n=1")["completion_tokens"] == 1
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_connection_quota():
    for setting, most in ("max-connections", "max-connections-per-user"), ("max-connections-per-user", "max-connections"):
        d = daemon("--" + setting, "20")  # we are administrators: 16 more
        try:
            peers = [d.peer() for _ in range(36)]
            assert peers[-1].call("hello")
            with d.peer() as p:
                m = p.message()
                assert m[1] == "error" and m[2][0]["code"] == "overloaded" and m[2][0]["retry_after_ms"] > 0, m
                assert setting + ")" in m[2][0]["message"] and most + ")" not in m[2][0]["message"], m
                assert p.message() is None
            peers[0].call("set", **{setting: 21})
            peers.append(d.peer())
            assert peers[-1].call("hello")
            for p in peers:
                p.close()

            def in_again():
                try:
                    with d.peer() as p:
                        return p.call("status")["connections"] < 20
                except EOFError:
                    return False
            until(in_again)
            healthy(d)
        finally:
            assert d.stop() == 0


@own
def test_queue_full():
    d = daemon("--max-batch", "1", "--queue-length", "3")
    try:
        with d.peer() as p:
            for _ in range(4):
                p.start("generate", prompt="n=100000 delay=5", stream=False)
                time.sleep(0.05)
            e = refused(lambda: p.call("generate", prompt="n=1"), "overloaded", "queue-length")
            assert e["retry_after_ms"] == 500
    finally:
        assert d.stop(signal.SIGKILL) != 0


def cpu_seconds(d):
    with open("/proc/%d/stat" % d.p.pid) as f:
        v = f.read().split()
    return (int(v[13]) + int(v[14])) / os.sysconf("SC_CLK_TCK")


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


@own
def test_descriptors_run_out():
    d = daemon("--max-connections", "100000", "--max-connections-per-user", "100000",
               preexec_fn=few_descriptors)
    try:
        first = d.peer()
        assert first.call("hello")
        peers = [d.peer() for _ in range(80)]
        time.sleep(0.7)
        a = cpu_seconds(d)
        time.sleep(1)
        assert cpu_seconds(d) - a < 0.3, "accept spins"
        assert first.call("generate", prompt="n=3")["completion_tokens"] == 3
        assert "accept failed" in d.log()
        for p in peers:
            p.close()
        first.close()
        time.sleep(0.5)
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_metrics_connections():
    """Who connects to the metrics and says nothing takes neither all descriptors nor the metrics from who asks; and where there are
    no descriptors left, who asks waits."""
    path = os.path.join(tmp, "idle.m")
    d = daemon("--metrics", "unix:" + path, "--max-connections", "1000", "--max-connections-per-user", "1000",
               preexec_fn=few_descriptors)

    def connected():
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
        return s

    def held():
        return len(os.listdir("/proc/%d/fd" % d.p.pid))

    try:
        before = held()
        idle = [connected() for _ in range(100)]
        for s in idle[50:]:
            s.send(b"GET /met")
        for _ in range(3):
            with d.peer() as p:
                assert p.call("generate", prompt="n=3")["completion_tokens"] == 3
            assert "skvd_build_info" in http_get(path)
        assert held() - before <= 16, held()
        for s in idle:
            s.close()
        until(lambda: held() == before)
        peers = [d.peer() for _ in range(80)]
        until(lambda: "accept failed" in d.log())
        with connected() as s:
            s.settimeout(10)
            s.send(b"GET /metrics HTTP/1.0\r\n\r\n")
            a = cpu_seconds(d)
            time.sleep(1)
            assert cpu_seconds(d) - a < 0.3, "accept spins"
            assert "[warn]" not in d.log(), "libevent's own word in the log"
            for p in peers:
                p.close()
            assert s.recv(100).startswith(b"HTTP/1.0 200 OK")
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_a_flood_of_one_users_connections():
    """Two hundred connections of one user have sent all they could: who comes with a message waits for a few of them, not for all.
    So many messages are handled from one of his answers to the next."""
    path = os.path.join(tmp, "flood.sock")
    n, each, calls, turn = 200, 5000 if SANITIZED else 30000, 20, 64

    def handled():
        return int(re.search(r"^skvd_messages_total (\d+)", http_get(path), re.M)[1])

    d = daemon("--metrics", "unix:" + path)
    try:
        with d.peer(timeout=60) as p:
            many = [d.peer(timeout=60) for _ in range(n)]
            for m in many:
                m.raw(pack([2, "x", []]) * each + pack([0, 1, "hello", []]))
            before = handled()
            for _ in range(calls):
                p.call("hello")
            between = handled() - before
            assert len(select.select([m.s for m in many], [], [], 0)[0]) < n / 2, "the flood was over too soon"
            assert between < calls * n * turn / 2, between
            for m in many:
                assert m.result(1)
                m.close()
    finally:
        assert d.stop() == 0


if __name__ == "__main__":
    sys.exit(run([(n, f) for n, f in globals().items() if n.startswith("test_")], daemon, healthy))
