#!/usr/bin/env python3
"""The daemon over its socket, with the scripted engine of fake_engine.c: the contract, clients that go away, wire faults.
test_daemon_limits.py has slow readers and limits; test_daemon_life.py the process, administrators, settings, log and metrics.

Each test with the shared daemon ends "healthy": a fixed question gets its known answer, no page is in use, and the process
is still the same one."""
import os
import re
import select
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from daemon_rig import daemon, healthy, refused, until  # noqa: E402
from rig import SANITIZED, own, rss_kb, run  # noqa: E402
from skvwire import pack  # noqa: E402


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


def test_frame_faults(d):
    before = rss_kb(d)
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
        assert rss_kb(d) - before < 20000, "a declaration cost memory"


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
    before = rss_kb(d)
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
            assert SANITIZED or rss_kb(d) - before < 4000, "what is not handled yet piles up"
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


if __name__ == "__main__":
    sys.exit(run([(n, f) for n, f in globals().items() if n.startswith("test_")], daemon, healthy))
