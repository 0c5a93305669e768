#!/usr/bin/env python3
"""The daemon over its socket, with the scripted engine of fake_engine.c: wire faults, limits, slow readers, signals.

Each test with the shared daemon ends "healthy": a fixed question gets its known answer, no page is in use, and the process
is still the same one."""
import errno
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from skvwire import Daemon, Peer, Refused, pack  # noqa: E402

BUILD = os.environ.get("top_builddir", os.getcwd())
SKVD = os.path.join(BUILD, "tests/skvd-fake")
SANITIZED = os.environ.get("SKVD_SANITIZED", "") != ""
tmp = tempfile.mkdtemp(prefix="skvd-test-")
MODEL = os.path.join(tmp, "model.bin")
counter = 0
alone = set()


def own(f):
    """This test starts its own daemon."""
    alone.add(f.__name__)
    return f


def daemon(*args, conf=None, sock=None, wait=True, env=None, **popen):
    global counter
    counter += 1
    sock = sock or os.path.join(tmp, "d%d.sock" % counter)
    argv = [SKVD, "--model", MODEL, "--socket", sock, "--log-level", "debug"] + list(args)
    path = os.path.join(tmp, "d%d.conf" % counter)
    with open(path, "w") as f:
        f.write(conf or "")
    argv += ["--config", path]
    full = dict(os.environ, **(env or {}))
    return Daemon(argv, sock, os.path.join(tmp, "d%d.log" % counter), env=full, wait=wait, **popen)


def healthy(d):
    assert d.p.poll() is None, "the daemon is gone: " + d.log()[-2000:]
    with d.peer() as p:
        r = p.call("generate", prompt="n=3", stream=False)
        assert r["text"] == " w0 w1 w2", r
        end = time.time() + 5
        while True:
            st = p.call("status")
            if st["pages_used"] == 0 and st["requests"] == 1:
                break
            assert time.time() < end, st
            time.sleep(0.02)
        assert st["pid"] == d.p.pid
        assert st["backend"] == p.call("hello")["model"]["backend"] != "", st


def until(f, seconds=5, what="it"):
    end = time.time() + seconds
    while not f():
        assert time.time() < end, "%s did not come true" % what
        time.sleep(0.01)


def refused(f, code, says=None):
    try:
        f()
    except Refused as e:
        assert e.code == code, e
        assert says is None or says in e.message, e
        return e.error
    raise AssertionError("not refused")


def fault(d, data, code, says):
    """data gets one notification `error`, and the end of that connection only."""
    with d.peer() as other, d.peer() as p:
        o = other.start("generate", prompt="n=20 delay=5", stream=False)
        p.raw(data)
        m = p.message()
        assert m[0] == 2 and m[1] == "error", m
        assert m[2][0]["code"] == code and says in m[2][0]["message"], m
        assert p.message() is None
        assert other.result(o)["completion_tokens"] == 20


# ---- the contract --------------------------------------------------------------------------------------

def test_hello(d):
    with d.peer() as p:
        r = p.call("hello", client="test", version="1")
        assert r["server"] == "skvd" and r["protocol"] == 1 and r["uid"] == os.getuid() and r["admin"] is True, r
        assert set(r["model"]) >= {"name", "arch", "context", "vocab", "layers", "heads", "kv_heads"}
        assert p.call("hello") == r


def test_generate_stream(d):
    with d.peer() as p:
        i = p.start("generate", prompt="n=5", logprobs=1, progress=True)
        r = p.result(i)
        toks = p.tokens(i)
        assert [t["i"] for t in toks] == list(range(5)) and "".join(t["text"] for t in toks) == r["text"]
        assert toks[0]["logprob"] == -0.5 and toks[0]["top"][0][1] == " w0"
        phases = [m[2][1]["phase"] for m in p.seen if m[1] == "progress"]
        assert phases == ["queued", "prefill"], phases
        assert r["finish"] == "length" and r["tokens"] == [0, 1, 2, 3, 4] and r["completion_tokens"] == 5
        assert set(r["timing"]) == {"queued_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms"}
        assert set(r["kv"]) == {"policy", "slots_full", "slots_kept", "bytes", "bytes_full_cache"}


def test_no_stream_no_tokens(d):
    with d.peer() as p:
        i = p.start("generate", prompt="n=5 eos=1", stream=False)
        assert p.result(i)["finish"] == "eos" and p.seen == []


def test_max_tokens(d):
    with d.peer() as p:
        assert p.call("generate", prompt="n=50", max_tokens=4)["completion_tokens"] == 4
        assert p.call("generate", prompt="n=50", max_tokens=0)["completion_tokens"] == 0
        assert p.call("generate", prompt="")["completion_tokens"] == 8
        assert p.call("generate", tokens=[])["completion_tokens"] == 8
        assert p.call("generate", messages=[{"role": "user", "content": "n=2"}])["completion_tokens"] == 2


def test_queries(d):
    with d.peer() as p:
        assert p.call("tokenize", text="h\u00e9") == {"tokens": [104, 0xC3, 0xA9]}
        assert p.call("detokenize", tokens=[104, 105]) == {"text": "hi"}
        r = p.call("apply_template", messages=[{"role": "user", "content": "x"}])
        assert r == {"text": "x\n", "tokens": [120, 10]}
        r = p.call("score", prompt="a", continuation="bc")
        assert r["tokens"] == [98, 99] and r["logprobs"] == [-1.0, -1.0] and r["sum"] == -2.0
        assert p.call("score", tokens=[1], continuation=[7, 8, 9])["tokens"] == [7, 8, 9]


def test_bad_requests(d):
    with d.peer() as p:
        refused(lambda: p.call("generate", prompt="x", max_tokns=1), "bad_request", "did you mean 'max_tokens'")
        refused(lambda: p.call("generat", prompt="x"), "unknown_method", "did you mean 'generate'")
        refused(lambda: p.call("nonsense"), "unknown_method", "nonsense")
        refused(lambda: p.call("generate"), "bad_request", "exactly one of")
        refused(lambda: p.call("generate", tokens=[1, 256]), "bad_request", "tokens[1] is 256")
        refused(lambda: p.call("generate", tokens=[1, -1]), "bad_request", "tokens[1] is -1")
        refused(lambda: p.call("score", prompt="x", continuation=[300]), "bad_request", "continuation[0] is 300")
        refused(lambda: p.call("generate", prompt="bad \udcff byte"), "bad_request", "UTF-8")
        refused(lambda: p.call("kept", sequence=10 ** 9), "not_found")
        for extreme in (-2 ** 63, -1, 2 ** 31, 2 ** 63 - 1, 2 ** 64 - 1):
            for name in ("max_tokens", "top_k", "logprobs", "priority", "deadline_ms"):
                if name == "priority" and extreme == -1:
                    continue
                refused(lambda: p.call("generate", prompt="x", **{name: extreme}), "bad_request", name)
            for name in ("budget", "sink", "recent", "alpha", "pool", "full_layers"):
                refused(lambda: p.call("generate", prompt="x", kv={name: extreme}), "bad_request", name)
        p.raw(pack([0, 77, "hello", [1]]))
        refused(lambda: p.result(77), "bad_request", "one map of named arguments")


def test_many_in_flight(d):
    with d.peer() as p:
        ids = [p.start("generate", prompt="n=%d delay=%d" % (k % 7 + 1, k % 3)) for k in range(60)]
        for k, i in enumerate(ids):
            r = p.result(i)
            n = k % 7 + 1
            assert r["completion_tokens"] == n
            assert "".join(t["text"] for t in p.tokens(i)) == r["text"] == "".join(" w%d" % x for x in range(n))


def test_duplicate_msgid(d):
    with d.peer() as p, d.peer() as q:
        p.start("generate", use_id=5, prompt="n=10 delay=5", stream=False)
        q.start("generate", use_id=5, prompt="n=10 delay=5", stream=False)
        p.start("generate", use_id=5, prompt="n=1", stream=False)
        refused(lambda: p.result(5), "bad_request", "msgid 5 is in flight")
        assert p.result(5)["completion_tokens"] == 10
        assert q.result(5)["completion_tokens"] == 10
        p.start("generate", use_id=5, prompt="n=1", stream=False)  # free again
        assert p.result(5)["completion_tokens"] == 1


def test_cancel(d):
    with d.peer() as p:
        i = p.start("generate", prompt="n=10000 delay=2")
        until(lambda: p.seen.append(p.message()) or len(p.tokens(i)) >= 3)
        assert p.call("cancel", msgid=i) == {"cancelled": True}
        e = refused(lambda: p.result(i), "cancelled")
        text = "".join(t["text"] for t in p.tokens(i))
        assert e["text"] == text and e["completion_tokens"] == len(e["tokens"]) >= 3
        assert p.call("cancel", msgid=i) == {"cancelled": False}
        i = p.start("generate", prompt="n=10000 delay=2", stream=False)
        p.raw(pack([2, "cancel", [{"msgid": i}]]))  # as a notification
        refused(lambda: p.result(i), "cancelled")


def test_cancel_others(d):
    with d.peer() as a, d.peer() as b:
        i = a.start("generate", use_id=9, prompt="n=50 delay=2")
        assert b.call("cancel", msgid=9) == {"cancelled": False}
        b.close()
        assert a.result(i)["completion_tokens"] == 50
        assert "".join(t["text"] for t in a.tokens(i)) == "".join(" w%d" % k for k in range(50))


def test_cancel_sequence(d):
    with d.peer() as a, d.peer() as b:
        i = a.start("generate", prompt="n=100000 delay=2", stream=False)
        until(lambda: b.call("status")["sequences"])
        q = b.call("status")["sequences"][0]["id"]
        assert b.call("cancel", sequence=q + 1000) == {"cancelled": False}
        assert b.call("cancel", sequence=q) == {"cancelled": True}
        refused(lambda: a.result(i), "cancelled")
        until(lambda: b.call("cancel", sequence=q) == {"cancelled": False})
        a.call("generate", prompt="n=1", session="mine")
        q = [s for s in b.call("status")["sequences"] if s["session"] == "mine"][0]["id"]
        assert b.call("cancel", sequence=q) == {"cancelled": True}
        until(lambda: not b.call("status")["sequences"])
        refused(lambda: b.call("cancel"), "bad_request", "exactly one of msgid and sequence")
        refused(lambda: b.call("cancel", msgid=1, sequence=q), "bad_request", "exactly one")


def test_cancel_queue_at_once(d):
    with d.peer() as p:
        slow = p.start("generate", prompt="n=30 delay=5", stream=False)
        ids = [p.start("generate", prompt="pre=5000 n=5") for _ in range(20)]
        for i in ids:
            p.start("cancel", use_id=1000 + i, msgid=i)
        for i in ids:
            e = refused(lambda: p.result(i), "cancelled")
            assert e["completion_tokens"] == 0 and not p.tokens(i)
        assert p.result(slow)["completion_tokens"] == 30


def test_deadline(d):
    with d.peer() as p:
        e = refused(lambda: p.call("generate", prompt="n=10000 delay=5", deadline_ms=60), "deadline")
        assert 0 < e["completion_tokens"] < 60


def test_engine_failure_is_one_request(d):
    with d.peer() as p:
        a = p.start("generate", prompt="n=20 delay=3", stream=False)
        refused(lambda: p.call("generate", prompt="n=2 fail=internal"), "internal")
        refused(lambda: p.call("generate", prompt="n=2 fail=context_overflow"), "context_overflow")
        assert p.result(a)["completion_tokens"] == 20


def test_sessions_idle(d):
    with d.peer() as p:
        p.call("generate", prompt="n=1", session="s1")
        seqs = [s for s in p.call("sequences")["sequences"] if s["session"] == "s1"]
        assert len(seqs) == 1 and seqs[0]["state"] == "idle"
        assert p.call("kill", sequence=seqs[0]["id"]) == {"killed": True}
        until(lambda: not [s for s in p.call("sequences")["sequences"] if s["session"] == "s1"])
        refused(lambda: p.call("kill", sequence=seqs[0]["id"]), "not_found")


# ---- going away ----------------------------------------------------------------------------------------

def test_disconnect_mid_answer(d):
    p = d.peer()
    i = p.start("generate", prompt="n=100000 delay=1")
    until(lambda: p.seen.append(p.message()) or len(p.tokens(i)) >= 3)
    p.close()
    with d.peer() as q:
        until(lambda: q.call("status")["running"] == 0, 1, "freed")
    assert re.search(r"request method=generate .*reason=disconnect", d.log())


def test_disconnect_without_stream(d):
    p = d.peer()
    p.start("generate", prompt="n=100000 delay=1", stream=False)
    with d.peer() as q:
        until(lambda: q.call("status")["running"] == 1)
        p.close()
        until(lambda: q.call("status")["running"] == 0, 1, "freed")


def test_half_close_is_answered(d):
    with d.peer() as p:
        i = p.start("generate", prompt="n=30 delay=2")
        p.s.shutdown(socket.SHUT_WR)
        assert p.result(i)["completion_tokens"] == 30
        assert p.message() is None


def test_half_close_then_gone(d):
    p = d.peer()
    p.start("generate", prompt="n=100000 delay=1", stream=False)
    p.s.shutdown(socket.SHUT_WR)
    with d.peer() as q:
        until(lambda: q.call("status")["running"] == 1)
        p.close()
        until(lambda: q.call("status")["running"] == 0, 2, "freed")


# ---- the wire ------------------------------------------------------------------------------------------

def test_byte_by_byte(d):
    with d.peer() as p:
        for b in pack([0, 1, "generate", [{"prompt": "n=2", "stream": False}]]):
            p.raw(bytes([b]))
            time.sleep(0.001)
        assert p.result(1)["completion_tokens"] == 2


def test_two_and_a_half_frames(d):
    one = pack([0, 1, "hello", []])
    two = pack([0, 2, "hello", []])
    with d.peer() as p:
        p.raw(one + two + one[:3])
        assert p.result(1) and p.result(2)
        p.raw(one[3:])
        assert p.result(1)


def test_large_frame(d):
    text = "x" * (15 << 20)
    with d.peer(timeout=60) as p:
        assert len(p.call("detokenize", tokens=[97] * 100000)["text"]) == 100000
        i = p.start("generate", prompt=text + " n=1", stream=False)
        assert p.result(i)["prompt_tokens"] > 15 << 20


def rss_kb(pid):
    with open("/proc/%d/status" % pid) as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def test_frame_faults(d):
    before = rss_kb(d.p.pid)
    fault(d, b"\xdd\xff\xff\xff\xff", "too_large", "4294967295 elements")
    fault(d, b"\x94\x00\x01\xa1x\x91\xdf\xff\xff\xff\xff", "too_large", "elements")
    fault(d, b"\x94\x00\x01\xdb\xff\xff\xff\xff", "too_large", "frame-limit")
    fault(d, b"\x94\x00\x01\xa1x" + b"\x91" * 64, "bad_request", "nests deeper")
    fault(d, b"\x94\x00\x01\xa1x\xc1", "bad_request", "0xc1")
    fault(d, b"GET / HTTP/1.0\r\n\r\n", "bad_request", "not MessagePack-RPC")
    fault(d, pack([0, "id", "hello", []]), "bad_request", "msgid")
    fault(d, pack([7, 1, "hello", []]), "bad_request", "begins with 0")
    fault(d, pack([0, 1, "hello", {}]), "bad_request", "params is an array")
    fault(d, pack([0, 1, 5, []]), "bad_request", "method is a string")
    if not SANITIZED:
        assert rss_kb(d.p.pid) - before < 20000, "a declaration cost memory"


def test_fault_ends_what_was_in_flight(d):
    with d.peer() as p:
        p.start("generate", prompt="n=100000 delay=1", stream=False)
        p.raw(b"\xc1")
        until(lambda: p.message() is None)
    with d.peer() as q:
        until(lambda: q.call("status")["running"] == 0, 1)


def test_unread_garbage_after_fault(d):
    with d.peer() as p:
        p.raw(b"\xc1" * 100000)
        m = p.message()
        assert m[1] == "error"


def test_odd_but_sound(d):
    with d.peer() as p:
        p.raw(pack([1, 5, None, None]))            # a response to nothing
        p.raw(pack([2, "whatever", [1, 2, 3]]))    # a notification that means nothing here
        p.raw(pack([2, "cancel", [{"msgid": "x"}]]))
        assert p.call("hello")["server"] == "skvd"


def test_a_flood_of_frames(d):
    """One client sends tiny messages as fast as the socket takes them: it is read no faster than they are handled, and others are
    answered meanwhile."""
    before = rss_kb(d.p.pid)
    blob, stop = pack([2, "x", []]) * 100000, threading.Event()

    def flood():
        with d.peer(timeout=1) as p:
            while not stop.is_set():
                try:
                    p.s.send(blob)
                except socket.timeout:
                    pass

    t = threading.Thread(target=flood)
    t.start()
    try:
        with d.peer(timeout=30) as p:
            for _ in range(20):
                assert p.call("generate", prompt="n=3")["completion_tokens"] == 3
                time.sleep(0.02)
            assert SANITIZED or rss_kb(d.p.pid) - before < 4000, "what is not handled yet piles up"
    finally:
        stop.set()
        t.join()
    with d.peer() as p:
        i = [p.start("hello") for _ in range(1000)]  # and none is lost of those that are answered, in their order
        assert all(p.result(k) for k in i)
        p.raw(pack([0, 5000, "hello", []]) * 1 + blob[:5000] + pack([0, 5001, "hello", []]))
        p.s.shutdown(socket.SHUT_WR)
        assert p.result(5000) and p.result(5001) and p.message() is None


def test_a_flood_of_many(d):
    """Each of many clients has sent ten thousands of messages: who comes with one is answered before any of them is done."""
    n = 5 if SANITIZED else 40
    with d.peer(timeout=60) as p:
        many = [d.peer(timeout=60) for _ in range(n)]
        for m in many:
            m.raw(pack([2, "x", []]) * 30000 + pack([0, 1, "hello", []]))
        assert p.call("hello")
        done = select.select([m.s for m in many], [], [], 0)[0]
        assert len(done) < n / 2, "%d of %d are done" % (len(done), n)
        for m in many:
            assert m.result(1)
            m.close()


def test_thousand_idle(d):
    peers = [d.peer() for _ in range(1000)]
    with d.peer() as p:
        assert p.call("status")["connections"] >= 1001
        t = time.time()
        assert p.call("generate", prompt="n=3")["completion_tokens"] == 3
        assert time.time() - t < 2
    for p in peers:
        p.close()


@own
def test_half_frame_times_out():
    d = daemon("--frame-timeout", "300ms")
    try:
        with d.peer() as p, d.peer() as idle:
            p.raw(b"\x94\x00")
            m = p.message()
            assert m[1] == "error" and "frame-timeout" in m[2][0]["message"], m
            assert p.message() is None
            assert idle.call("hello")  # nothing begun, nothing timed out
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_idle_times_out():
    d = daemon("--idle-timeout", "300ms")
    try:
        with d.peer() as p, d.peer() as busy:
            i = busy.start("generate", prompt="n=100 delay=8", stream=False)
            assert p.message() is None
            assert busy.result(i)["completion_tokens"] == 100
    finally:
        assert d.stop() == 0


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
        before = rss_kb(d.p.pid)
        slow = d.peer()
        slow.start("generate", prompt="n=100000 big=1000", max_tokens=100000)
        with d.peer() as p:
            until(lambda: p.call("status")["running"] == 1)
            until(lambda: p.call("status")["running"] == 0, 10, "dropped")
        assert "reason=slow" in d.log()
        assert SANITIZED or rss_kb(d.p.pid) - before < 20000
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
        before = rss_kb(d.p.pid)
        for setting in "max-buffer-per-user", "max-buffer":
            peers, said = halves(d, 20)
            assert len(said) >= 14 and all("limited by %s)" % setting in m for m in said), said
            with d.peer(timeout=60) as p:  # who asks for little is answered
                assert p.call("generate", prompt="n=3")["completion_tokens"] == 3
                assert SANITIZED or rss_kb(d.p.pid) - before < 12000
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


@own
def test_descriptors_run_out():
    d = daemon("--max-connections", "100000", "--max-connections-per-user", "100000",
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    try:
        first = d.peer()
        assert first.call("hello")
        peers = [d.peer() for _ in range(80)]

        time.sleep(0.7)
        def spent():
            with open("/proc/%d/stat" % d.p.pid) as f:
                v = f.read().split()
            return (int(v[13]) + int(v[14])) / os.sysconf("SC_CLK_TCK")

        a = spent()
        time.sleep(1)
        assert spent() - a < 0.3, "accept spins"
        assert first.call("generate", prompt="n=3")["completion_tokens"] == 3
        assert "accept failed" in d.log()
        for p in peers:
            p.close()
        first.close()
        time.sleep(0.5)
        healthy(d)
    finally:
        assert d.stop() == 0


# ---- life ----------------------------------------------------------------------------------------------

@own
def test_ready_line_and_mode():
    d = daemon()
    try:
        assert re.search(r"info ready socket=%s pid=%d" % (re.escape(d.sock), d.p.pid), d.log())
        assert stat.S_IMODE(os.stat(d.sock).st_mode) == 0o660
    finally:
        assert d.stop() == 0
    assert not os.path.exists(d.sock)


@own
def test_started_twice():
    d = daemon()
    try:
        e = daemon(sock=d.sock, wait=False)
        assert e.p.wait(10) == 5
        assert "a daemon is alive" in e.log()
        e.stop()
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_stale_socket():
    d = daemon()
    d.stop(signal.SIGKILL)
    assert os.path.exists(d.sock)
    d = daemon(sock=d.sock)
    try:
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_plain_file_stays():
    path = os.path.join(tmp, "plain")
    with open(path, "w") as f:
        f.write("precious")
    d = daemon(sock=path, wait=False)
    assert d.p.wait(10) == 2
    assert "not a socket" in d.log()
    d.stop()
    with open(path) as f:
        assert f.read() == "precious"


@own
def test_path_too_long():
    d = daemon(sock=os.path.join(tmp, "x" * 120), wait=False)
    assert d.p.wait(10) == 2
    assert "Unix socket's path can have 107" in d.log(), d.log()
    d.stop()


@own
def test_exit_codes():
    def run(*args):
        r = subprocess.run([SKVD] + list(args), capture_output=True, text=True, timeout=20)
        return r.returncode, r.stdout, r.stderr

    sock = os.path.join(tmp, "never.sock")
    assert run()[0] == 2
    rc, _, err = run("--modle", "x")
    assert rc == 2 and "did you mean 'model'" in err
    rc, _, err = run("--model", MODEL, "--threads", "many")
    assert rc == 2 and "threads: 'many' is not an integer from 0 to 1024" in err
    assert run("--model", MODEL, "--socket")[0] == 2
    rc, _, err = run("--model", "/nonexistent.gguf", "--socket", sock)
    assert rc == 3 and "/nonexistent.gguf" in err, (rc, err)
    assert not os.path.exists(sock)
    assert run("--version") == (0, run("--version")[1], "") and "skvd " in run("--version")[1]
    rc, out, _ = run("--help")
    assert rc == 0 and "--kv-memory SIZE" in out


@own
def test_sigterm_drains():
    d = daemon()
    with d.peer() as p:
        i = p.start("generate", prompt="n=100 delay=5")
        j = p.start("generate", prompt="pre=200 n=2", stream=False)
        p.seen.append(p.message())
        d.p.send_signal(signal.SIGTERM)
        until(lambda: not os.path.exists(d.sock))
        refused(lambda: p.call("generate", prompt="x"), "draining")
        assert p.result(i)["completion_tokens"] == 100
        assert p.result(j)["completion_tokens"] == 2
        assert p.message() is None
    assert d.stop() == 0


@own
def test_sigterm_twice():
    d = daemon()
    with d.peer() as p:
        i = p.start("generate", prompt="n=100000 delay=5")
        p.seen.append(p.message())
        d.p.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        t = time.time()
        d.p.send_signal(signal.SIGTERM)
        e = refused(lambda: p.result(i), "cancelled")  # the final frame
        assert e["completion_tokens"] > 0
    assert d.stop() == 0 and time.time() - t < 3


@own
def test_sigterm_grace_ends():
    d = daemon("--drain-timeout", "300ms")
    with d.peer() as p:
        i = p.start("generate", prompt="n=100000 delay=5", stream=False)
        time.sleep(0.1)
        d.p.send_signal(signal.SIGTERM)
        refused(lambda: p.result(i), "cancelled")
    assert d.stop() == 0


@own
def test_shutdown_method():
    d = daemon()
    with d.peer() as p:
        i = p.start("generate", prompt="n=20 delay=5", stream=False)
        assert p.call("shutdown", grace_ms=5000) == {"stopping": True}
        assert p.result(i)["completion_tokens"] == 20
    assert d.p.wait(10) == 0
    d.stop()


@own
def test_truncated_model():
    path = os.path.join(tmp, "short.bin")
    with open(path, "wb") as f:
        f.write(b"x" * 65536)
    d = daemon("--model", path)
    with d.peer() as p:
        p.start("generate", prompt="n=100000 delay=1 touch=1", stream=False)
        time.sleep(0.1)
        os.truncate(path, 0)
        try:
            p.message()
        except OSError:
            pass
    assert d.p.wait(10) == 3
    assert "truncated" in d.log()
    d.stop()
    assert not os.path.exists(d.sock)


@own
def test_a_lost_device_ends_the_service():
    d = daemon()
    with d.peer() as p:
        slow = p.start("generate", prompt="n=1000 delay=20", stream=False)
        refused = p.start("generate", prompt="dead=1 fail=internal", stream=False)
        for msgid in refused, slow:
            m = p.wait(msgid)
            assert m[2] is not None and m[2]["code"] in ("internal", "cancelled"), m
    assert d.p.wait(10) == 1
    assert "the device failed" in d.log()
    d.stop()
    assert not os.path.exists(d.sock)


@own
def test_wedged_engine_shows():
    d = daemon("--step-limit", "200ms")
    try:
        with d.peer() as p:
            stuck = p.start("generate", prompt="wedge=4000 n=1", stream=False)
            until(lambda: p.call("status")["state"] == "stuck", 4)
            assert p.call("status")["step_age_ms"] >= 200
            assert not [m for m in p.seen if m[0] == 1 and m[1] == stuck], "status waits for a stuck engine"
            until(lambda: p.call("status")["state"] == "serving", 10)
        assert "engine stuck" in d.log()
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_background():
    sock, log, pid = (os.path.join(tmp, "bg." + x) for x in ("sock", "log", "pid"))
    r = subprocess.run([SKVD, "--model", MODEL, "--socket", sock, "--log-file", log, "--daemon"], timeout=20)
    assert r.returncode == 0
    with Peer(sock) as p:  # the parent left only when it could serve
        pid = p.call("status")["pid"]
    r = subprocess.run([SKVD, "--model", MODEL, "--socket", sock, "--log-file", log, "--daemon"], timeout=20)
    assert r.returncode == 5
    os.kill(pid, signal.SIGTERM)
    until(lambda: not os.path.exists(sock))
    until(lambda: "stopped" in open(log).read())


@own
def test_notify_and_watchdog():
    path = os.path.join(tmp, "notify")
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.bind(path)
    s.settimeout(5)
    d = daemon("--step-limit", "300ms", env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"})
    seen = []
    try:
        while not any("WATCHDOG=1" in m for m in seen):
            seen.append(s.recv(4096).decode())
        assert any("READY=1" in m for m in seen) and "STATUS=loading" in seen[0], seen
        with d.peer() as p:
            p.start("generate", prompt="wedge=1500 n=1", stream=False)
            until(lambda: "stuck" in seen[-1] or seen.append(s.recv(4096).decode()))
            s.settimeout(0.7)
            try:  # no sign of life while the engine is stuck
                assert "WATCHDOG" not in s.recv(4096).decode()
            except socket.timeout:
                pass
            s.settimeout(5)
            until(lambda: "WATCHDOG" in seen[-1] or seen.append(s.recv(4096).decode()))
    finally:
        assert d.stop() == 0
    while "STOPPING=1" not in seen[-1]:
        seen.append(s.recv(4096).decode())
    s.close()


@own
def test_socket_activation():
    path = os.path.join(tmp, "act.sock")
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.bind(path)
    s.listen(10)
    early = Peer(path)  # before there is a daemon
    script = "import os,sys; os.dup2(int(sys.argv[1]),3); os.environ['LISTEN_PID']=str(os.getpid()); os.execv(sys.argv[2],sys.argv[2:])"
    log = os.path.join(tmp, "act.log")
    d = Daemon([sys.executable, "-c", script, str(s.fileno()), SKVD, "--model", MODEL], path, log,
               env=dict(os.environ, LISTEN_FDS="1"), pass_fds=[s.fileno()])
    try:
        assert early.call("hello")["server"] == "skvd"
        healthy(d)
    finally:
        assert d.stop() == 0
    assert os.path.exists(path), "systemd's socket is not ours to remove"
    early.close()
    s.close()


# ---- administrators ------------------------------------------------------------------------------------

def test_admin_lists(d):
    with d.peer() as p:
        i = p.start("generate", prompt="n=100000 delay=5", stream=False)
        until(lambda: p.call("sequences")["sequences"])
        (q,) = p.call("sequences")["sequences"]
        assert set(q) == {"id", "uid", "pid", "session", "state", "prompt_tokens", "completion_tokens", "age_ms", "kv_bytes",
                          "policy"}, q
        assert q["pid"] == os.getpid() and q["uid"] == os.getuid()
        k = p.call("kept", sequence=q["id"])
        assert k["n"] == 3 and k["layers"][0]["heads"][0]["positions"] == [0, 1, 2], k
        kv = p.call("kv")
        assert kv["pages_total"] == 1000 and len(kv["layers"]) == 2 and kv["layers"][0]["kept_mass"] is None
        assert p.call("kill", sequence=q["id"]) == {"killed": True}
        refused(lambda: p.result(i), "cancelled")


def test_drain_resume(d):
    with d.peer() as p:
        i = p.start("generate", prompt="n=30 delay=5", stream=False)
        assert p.call("drain") == {"draining": True}
        refused(lambda: p.call("generate", prompt="x"), "draining", "administrator")
        assert p.call("status")["state"] == "draining"
        assert p.result(i)["completion_tokens"] == 30
        assert p.call("resume") == {"draining": False}
        assert p.call("generate", prompt="n=1")["completion_tokens"] == 1


def test_set_get(d):
    with d.peer() as p:
        g = p.call("get")
        assert g["max-requests"] == 4096 and g["log-level"] == "debug" and g["frame-timeout"] == 30000, g
        r = p.call("set", **{"max-requests": 77, "frame_timeout": "5s", "step-time": 20})
        assert r["max-requests"] == 77 and r["frame-timeout"] == 5000 and r["step-time"] == 20
        refused(lambda: p.call("set", **{"max-requests": 5, "model": "x"}), "bad_request", "restart")
        refused(lambda: p.call("set", **{"max-requests": 5, "nope": 1}), "bad_request", "nope")
        refused(lambda: p.call("set", **{"max-requests": 5, "log-level": "loud"}), "bad_request", "none of error")
        refused(lambda: p.call("set", **{"output-low": "1G"}), "bad_request", "ascending")
        assert p.call("get")["max-requests"] == 77, "all or none"
        p.call("set", **{"max-requests": 4096, "frame-timeout": 30000})


def test_subscribe(d):
    with d.peer() as p, d.peer() as w:
        assert w.call("subscribe", topics=["sequences", "steps"]) == {"subscribed": True}
        refused(lambda: w.call("subscribe", topics=["all"]), "bad_request", "no topic")
        p.call("generate", prompt="n=3")
        ev = []
        until(lambda: ev.append(w.message()[2][0]) or any(e.get("event") == "ended" for e in ev))
        assert any(e.get("event") == "started" and e["uid"] == os.getuid() for e in ev)
        assert any(e.get("event") == "ended" and e["reason"] == "length" and e["completion_tokens"] == 3 for e in ev)
        until(lambda: ev.append(w.message()[2][0]) or any(e["topic"] == "steps" for e in ev))
        assert w.call("subscribe", topics=[]) == {"subscribed": False}


@own
def test_others_are_forbidden():
    if os.getuid() != 0:
        return "needs root"
    os.chmod(tmp, 0o755)
    d = daemon("--socket-mode", "0666")
    code = ("import sys; sys.path.insert(0, sys.argv[2]); from skvwire import *; p = Peer(sys.argv[1]); "
            "print(p.call('hello')['admin'])\n"
            "for m in 'sequences kv get drain resume reload shutdown'.split():\n"
            "  try: p.call(m); print('BAD', m)\n"
            "  except Refused as e: print(e.code)\n"
            "print(p.call('generate', prompt='n=2')['text'])\n"
            "print([s['uid'] for s in p.call('status')['sequences']])\n"
            "print(any(p.call('cancel', sequence=k)['cancelled'] for k in range(50)))")

    def as_nobody(groups=()):
        def drop():
            os.setgroups(list(groups))
            os.setgid(65534)
            os.setuid(65534)
        here = os.path.join(tmp, "py")
        if not os.path.isdir(here):
            os.mkdir(here)
            shutil.copy(os.path.join(os.path.dirname(os.path.abspath(__file__)), "skvwire.py"), here)
        python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
        r = subprocess.run([python, "-c", code, d.sock, here], preexec_fn=drop, capture_output=True, text=True, cwd="/",
                           env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"})
        return (r.stdout + r.stderr).split("\n")

    try:
        with d.peer() as p:
            p.start("generate", prompt="n=100000 delay=5", stream=False)  # root's: not theirs to see
            time.sleep(0.1)
            out = as_nobody()
            assert out[:8] == ["False"] + ["forbidden"] * 7, out
            assert out[8] == " w0 w1" and out[9] == "[]", out
            assert out[10] == "False" and p.call("status")["running"] == 1, out
    finally:
        assert d.stop(signal.SIGKILL) != 0
    d = daemon("--socket-mode", "0666", "--admin-group", "daemon")
    import grp
    try:
        out = as_nobody([grp.getgrnam("daemon").gr_gid])
        assert out[0] == "True" and "forbidden" not in out, out
    finally:
        d.stop()


@own
def test_user_drop():
    if os.getuid() != 0:
        return "needs root"
    os.chmod(tmp, 0o755)
    os.chmod(MODEL, 0o644)
    d = daemon("--user", "nobody", "--socket-group", "daemon")
    try:
        with open("/proc/%d/status" % d.p.pid) as f:
            s = f.read()
        import grp
        import pwd
        assert os.stat(d.sock).st_gid == grp.getgrnam("daemon").gr_gid
        who = pwd.getpwnam("nobody")
        for what, n in ("Uid", who.pw_uid), ("Gid", who.pw_gid):
            assert re.search(r"%s:(\s+%d){4}\n" % (what, n), s), s
        assert set(re.search(r"Groups:(.*)", s).group(1).split()) == {str(g) for g in os.getgrouplist("nobody", who.pw_gid)}, s
        assert re.search(r"CapEff:\s+0+\n", s) and re.search(r"CapPrm:\s+0+\n", s), s
        if not SANITIZED:
            assert "NoNewPrivs:\t1" in s
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_sandbox():
    """What a break-in would try, from the loop's thread and from the engine's: no process, no program, no network, no file."""
    if SANITIZED:
        return "a sanitizer's build has no filter"
    for args in ((), ("--sandbox", "off")):
        d = daemon(*args)
        try:
            with open("/proc/%d/status" % d.p.pid) as f:
                status = dict(line.split(":\t", 1) for line in f)
            with d.peer() as p:
                p.call("generate", prompt="n=1 forbidden=1")
            tried = {m[0]: dict((k, int(v)) for k, v in (x.split("=") for x in m[1].split()))
                     for m in re.findall(r"forbidden thread=(\w+) (.*)", d.log())}
            assert set(tried) == {"loop", "engine"}, tried
            files = "landlock=on" in d.log()
            for thread, t in tried.items():
                if args:
                    assert t.pop("exec") == errno.ENOENT and not any(t.values()), (thread, t)
                    continue
                assert [t[k] for k in ("inet", "code", "process", "exec")] == [errno.EPERM] * 4, (thread, t)
                assert not files or t["write"] == errno.EACCES, (thread, t)
                assert not files or thread != "loop" or t["read"] == errno.EACCES, (thread, t)
            if not args:
                assert int(status["Seccomp"]) == 2 and int(status["NoNewPrivs"]) == 1, status
                for task in os.listdir("/proc/%d/task" % d.p.pid):
                    with open("/proc/%d/task/%s/status" % (d.p.pid, task)) as f:
                        assert "Seccomp:\t2" in f.read(), task
            healthy(d)
        finally:
            assert d.stop() == 0
    if os.path.exists("/var/tmp/skvd-forbidden"):
        os.unlink("/var/tmp/skvd-forbidden")


@own
def test_units():
    analyze = shutil.which("systemd-analyze")
    if not analyze:
        return "needs systemd-analyze"
    here = os.path.join(tmp, "units")
    os.mkdir(here)
    for unit in "skvd.service", "skvd.socket":
        with open(os.path.join(BUILD, "daemon", unit)) as f, open(os.path.join(here, unit), "w") as to:
            to.write(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", re.sub(r"(?m)^Documentation=.*\n", "", f.read())))
    r = subprocess.run([analyze, "verify", "skvd.service", "skvd.socket"], cwd=here, capture_output=True, text=True)
    said = [x for x in r.stderr.splitlines() if "skvd" in x]  # of our units; a machine may have faulty ones of its own
    assert r.returncode == 0 and not said, r.stderr
    r = subprocess.run([analyze, "security", "--offline=true", "--no-pager", "--threshold=15", "skvd.service"], cwd=here,
                       capture_output=True, text=True)
    if "unrecognized option" in r.stderr:
        return "systemd-analyze is too old"
    assert r.returncode == 0, r.stdout[-200:] + r.stderr  # 1.5 of 10, most of it what talking to others takes


# ---- settings, log, metrics ----------------------------------------------------------------------------

@own
def test_config_file():
    def check(text):
        path = os.path.join(tmp, "c.conf")
        with open(path, "w") as f:
            f.write(text)
        r = subprocess.run([SKVD, "--check-config", "--config", path], capture_output=True, text=True, timeout=20)
        return r.returncode, r.stdout, r.stderr.replace(path, "FILE")

    rc, out, _ = check('# comment\nmodel = "/a b/c.gguf"\n\tframe-limit 1M\nreader_timeout = 5m\nsandbox=off\n')
    assert rc == 0 and 'model = "/a b/c.gguf"' in out and "frame-limit = 1M\n" in out and "reader-timeout = 300s" in out
    assert "sandbox = off" in out
    assert check(out)[1] == out, "a dump read again gives the same"
    for text, says in (("\n\nmodle = x\n", "FILE:3: 'modle' is not a setting; did you mean 'model'?"),
                       ("max-requests = lots\n", "FILE:1: max-requests: 'lots' is not an integer from 1 to 1000000"),
                       ("frame-limit = 1\n", "FILE:1: frame-limit: '1' is not a size"),
                       ("log-level = loud", "FILE:1: log-level: 'loud' is none of error, warning, info, debug"),
                       ("sandbox = maybe", "neither on nor off"), ("threads =", "FILE:1: threads needs a value"),
                       ("daemon = on", "belongs on the command line"), ("model = \"x", "quoted value"),
                       ("kv-pool = 4", "kv-pool: 4 is even"), ("output-low = 1G", "ascending"),
                       ("model = \xff\xfe", None), ("a\0b", "NUL")):
        rc, _, err = check(text)
        assert rc == 2 or says is None, (text, rc)
        assert says is None or says in err, (text, err)


@own
def test_reload():
    d = daemon("--max-requests", "50", conf="max-connections = 100\nlog-level = info\n")
    try:
        with d.peer() as p, open(os.path.join(tmp, "d%d.conf" % counter), "w") as f:
            f.write("max-connections = 200\nmax-requests = 9\nthreads = 3\nsession-idle = 5s\nmax-batch = 4000\n")
            f.flush()
            before = p.call("get")["max-batch"]
            r = p.call("reload")
            assert sorted(r["applied"]) == ["max-connections", "session-idle"] and r["restart"] == ["threads"], r
            assert r["refused"] == ["max-batch"] and "name=max-batch refused" in d.log(), r  # the engine's word
            g = p.call("get")
            assert g["max-connections"] == 200 and g["max-requests"] == 50 and g["session-idle"] == 5
            assert g["max-batch"] == before, g
            f.write("nonsense\n")
            f.flush()
            refused(lambda: p.call("reload"), "bad_request", ":6: 'nonsense' is not a setting")
            f.truncate(0)
            f.seek(0)
            f.write("max-connections = 300\n")
            f.flush()
            d.p.send_signal(signal.SIGHUP)
            until(lambda: p.call("get")["max-connections"] == 300)
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_log_full_disk():
    if not os.path.exists("/dev/full"):
        return "needs /dev/full"
    d = daemon("--log-file", "/dev/full", wait=False)
    try:
        until(lambda: os.path.exists(d.sock), 10)
        until(lambda: Peer(d.sock).call("hello"))
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_log_pipe_nobody_reads():
    r, w = os.pipe()
    global counter
    counter += 1
    sock = os.path.join(tmp, "pipe.sock")
    p = subprocess.Popen([SKVD, "--model", MODEL, "--socket", sock, "--log-level", "debug"], stderr=w)
    try:
        until(lambda: os.path.exists(sock), 10)
        with Peer(sock) as c:
            for _ in range(2000):  # far more than a pipe holds
                c.call("generate", prompt="n=0", stream=False)
    finally:
        p.terminate()
        assert p.wait(20) == 0
        os.close(r)
        os.close(w)


@own
def test_log_to_the_journal():
    """Lines for systemd's journal begin with their level, lines for any other file do not."""
    path = os.path.join(tmp, "d%d.log" % (counter + 1))
    with open(path, "w") as f:
        st = os.fstat(f.fileno())
    for known in True, False:
        d = daemon(env={"JOURNAL_STREAM": "%d:%d" % (st.st_dev, st.st_ino)})
        assert d.stop() == 0
        lines = d.log().splitlines()
        assert lines and all(re.match(r"<[3-7]>\d{4}-" if known else r"\d{4}-", x) for x in lines), lines
        assert any(x.startswith("<6>" if known else "2") and " info ready " in x for x in lines), lines


@own
def test_log_lines():
    d = daemon()
    try:
        with d.peer() as p:
            p.call("hello", client="a \"b\"", version="2")
            p.call("generate", prompt="n=4")
        line = [x for x in d.log().split("\n") if "request method=generate" in x][-1]
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info request method=generate uid=\d+ pid=%d conn=\d+ msgid=2 "
                        r"id=\d+ reason=length prompt=3 cached=0 out=4 " % os.getpid(), line), line
    finally:
        assert d.stop() == 0


@own
def test_log_flood():
    """Requests that are refused one after the other don't fill the disk, and the log says that it leaves some out."""
    d = daemon("--log-level", "info")
    try:
        with d.peer() as p:
            for _ in range(20):
                ids = [p.start("generate", prompt="fail=bad_request n=0") for _ in range(50)]
                for i in ids:
                    refused(lambda: p.result(i), "bad_request")
            time.sleep(1.1)
            i = p.start("generate", prompt="fail=bad_request n=0")
            refused(lambda: p.result(i), "bad_request")
            refused(lambda: p.call("generate", prompt="fail=internal"), "internal")
        lines = re.findall("reason=bad_request", d.log())
        assert 50 <= len(lines) < 800 and re.search(r"log-lost lines=\d\d+", d.log()), len(lines)
        assert "msgid=%d " % i in d.log() and "reason=internal" in d.log()
    finally:
        assert d.stop() == 0


def http_get(s, path):
    s.settimeout(5)
    s.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path.encode())
    out = b""
    while True:
        b = s.recv(65536)
        if not b:
            return out.decode()
        out += b


@own
def test_metrics():
    path = os.path.join(tmp, "metrics.sock")
    d = daemon("--metrics", "unix:" + path)
    try:
        time.sleep(1.2)  # the layers are asked for once a second
        with d.peer() as p:
            p.call("generate", prompt="n=4")
            p.call("generate", prompt="n=4 eos=1")
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
        text = http_get(s, "/metrics")
        s.close()
        assert "200 OK" in text
        for name in ("num_requests_running 0", "num_requests_waiting 0", "kv_cache_usage_perc 0", "generation_tokens_total 8",
                     'request_success_total{finished_reason="length"} 1', 'request_success_total{finished_reason="eos"} 1',
                     "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count", "request_queue_time_seconds_sum",
                     "evicted_slots_total", "kv_bytes_saved", 'layer_kept_ratio{layer="1"}',
                     'layer_kept_attention_mass{layer="1"} 0.97'):
            assert "skvd_" + name in text, name
        body = text.split("\r\n\r\n", 1)[1]
        promtool = shutil.which("promtool")
        if promtool:
            r = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, text=True)
            assert r.returncode == 0, r.stderr
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
        assert "404" in http_get(s, "/other")
        s.close()
        healthy(d)
    finally:
        assert d.stop() == 0
    assert not os.path.exists(path)


@own
def test_a_flood_of_one_users_connections():
    """Two hundred connections of one user have sent all they could: who comes with a message waits for a few of them, not for all.
    So many messages are handled from one of his answers to the next."""
    path = os.path.join(tmp, "flood.sock")
    n, each, calls, turn = 200, 5000 if SANITIZED else 30000, 20, 64

    def handled():
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
            return int(re.search(r"^skvd_messages_total (\d+)", http_get(s, "/metrics"), re.M)[1])

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


@own
def test_metrics_tcp():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
    s.close()
    d = daemon("--metrics", "127.0.0.1:%d" % port)
    try:
        s = socket.create_connection(("127.0.0.1", port))
        assert "skvd_build_info" in http_get(s, "/metrics")
        s.close()
    finally:
        assert d.stop() == 0
    d = daemon("--metrics", "0.0.0.0:80", wait=False)
    assert d.p.wait(10) == 2 and "neither unix:PATH nor 127.0.0.1:PORT" in d.log()
    d.stop()


def main():
    only = [a[2:] for a in sys.argv[1:] if a.startswith("-k")]
    tests = [(n, f) for n, f in globals().items() if n.startswith("test_") and (not only or any(k in n for k in only))]
    with open(MODEL, "wb") as f:
        f.write(b"\0" * 8192)
    shared = daemon()
    passed = failed = skipped = 0
    for name, f in tests:
        try:
            if name in alone:
                why = f()
            else:
                why = f(shared)
                healthy(shared)
            if why:
                skipped += 1
                print("skip", name, why)
            else:
                passed += 1
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            failed += 1
            print("FAIL", name)
            traceback.print_exc(file=sys.stdout)
            if shared.p.poll() is not None:
                print(shared.log()[-3000:])
                shared = daemon()
        sys.stdout.flush()
    rc = shared.stop()
    if rc != 0:
        failed += 1
        print("FAIL the shared daemon exits with", rc, shared.log()[-3000:])
    shutil.rmtree(tmp, ignore_errors=True)
    print("%d passed, %d failed, %d skipped" % (passed, failed, skipped))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
