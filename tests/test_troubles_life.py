#!/usr/bin/env python3
"""Situations that users of other servers reported: the process, the wire, sparsity. See test_troubles.py."""
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rig import BUILD, SANITIZED, http_get, own, rss_kb, run, tmp  # noqa: E402
from skvwire import Refused, pack  # noqa: E402
from troubles_rig import (CONTEXT, GREEDY, SLOW, SPARSE, Running, ask, daemon, end_sessions, fresh, gone, greedy,  # noqa: E402
                          healthy, heavy_model, kept, learn, model, prompt, read_tokens, refused, until)

# ---- life ----


@own
def test_24_sigterm():
    for state in ("idle", "prefill", "decode", "twice"):
        d = daemon("--drain-timeout", "60s", "--kv-memory", "16M", gguf=heavy_model())
        with d.peer(timeout=120) as p:
            i = None
            if state != "idle":
                i = p.start("generate", **greedy(2000 if state != "decode" else 20, 40, progress=True))
                assert p.call("hello")["server"] == "skvd"  # so the request was read before the signal
            if state == "decode":
                read_tokens(p, i, 1)
            d.p.send_signal(signal.SIGTERM)
            if state == "twice":
                until(lambda: "stop reason" in d.log(), what="the first signal heard")
                d.p.send_signal(signal.SIGTERM)
            if i is not None:
                try:
                    assert p.result(i)["completion_tokens"] == 40
                except Refused as e:
                    assert e.code == "cancelled" and state == "twice", e
            assert p.message() is None, "the connection is closed at the end"
        assert d.stop(0) == 0, state
        assert not os.path.exists(d.sock)


@own
def test_24_sigterm_grace():
    d = daemon("--drain-timeout", "300ms", "--kv-memory", "16M", gguf=heavy_model())
    with d.peer(timeout=120) as p:
        ids = [p.start("generate", **greedy(2000, 100000, k)) for k in range(3)]
        p.call("hello")
        d.p.send_signal(signal.SIGTERM)
        for i in ids:
            e = refused(lambda: p.result(i), "cancelled")
            assert "tokens" in e, e
    assert d.stop(0) == 0


@own
def test_25_started_twice():
    with Running() as d:
        e = daemon(sock=d.sock, wait=False)
        assert e.p.wait(20 * SLOW) == 5 and "alive" in e.log(), e.log()
        e.stop()
    d = daemon()
    d.stop(signal.SIGKILL)
    assert os.path.exists(d.sock)
    with Running(sock=d.sock):
        pass
    plain = os.path.join(tmp, "plain")
    with open(plain, "w") as f:
        f.write("precious")
    for path, says in ((plain, "not a socket"), (os.path.join(tmp, "x" * 110), "107"), (os.path.join(tmp, "none", "sock"), "none")):
        d = daemon(sock=path, wait=False)
        assert d.p.wait(20 * SLOW) == 2 and says in d.log(), (path, d.p.returncode, d.log())
        d.stop()
    with open(plain) as f:
        assert f.read() == "precious"
    # 107 bytes are the longest that fit
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        with Running(sock=os.path.join(short, "y" * (107 - len(short) - 1))):
            pass


@own
def test_26_malformed_models():
    path = os.path.join(tmp, "bad.gguf")
    with open(model(), "rb") as f:
        good = f.read()
    bad = [b"", b"GGUF", b"GGML" + good[4:], good[:100], good[:len(good) // 2], good[:-1], good[:4] + b"\xff" * 20 + good[24:],
           good[:8] + b"\xff" * 8 + good[16:], good[:16] + b"\xff" * 8 + good[24:], b"\0" * 4096, os.urandom(4096)]
    for key in (b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count"):
        at = good.index(key) + len(key) + 4
        bad += [good[:at] + v + good[at + 4:] for v in (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0" if key != b"llama.block_count" else b"\7\0\0\0")]
    for b in bad:
        with open(path, "wb") as f:
            f.write(b)
        d = daemon(gguf=path, wait=False)
        if d.p.wait(20 * SLOW) != 3 or "exit code=bad_model" not in d.log():
            raise AssertionError("%d bytes: exit %r, %s" % (len(b), d.p.returncode, d.log()))
        d.stop()
    for path in (tmp, "/dev/null", os.path.join(tmp, "none.gguf")):
        d = daemon(gguf=path, wait=False)
        assert d.p.wait(20 * SLOW) == 3 and path in d.log(), d.log()
        d.stop()


@own
def test_27_a_wedged_engine_shows():
    # a step that may take ten seconds takes a whole prompt at once: for as long the engine answers nobody
    with Running("--step-limit", "100ms", "--step-time", "10000", "--kv-memory", "32M", gguf=heavy_model()) as d:
        with d.peer(timeout=120) as p, d.peer(timeout=120) as q:
            ids = [p.start("generate", **greedy(2047, 1, k, stream=False)) for k in range(6)]
            seen = []

            def shown():
                seen.append(q.call("status"))
                return any(x["state"] == "stuck" and x["step_age_ms"] >= 100 for x in seen) or seen[-1]["finished"] > 6
            until(shown, 60, "a step's age")
            assert any(x["state"] == "stuck" and x["step_age_ms"] >= 100 for x in seen), seen[-3:]
            for i in ids:
                p.result(i)
            until(lambda: q.call("status")["state"] == "serving", what="serving again")
        assert "engine stuck" in d.log()


# ---- wire ----

FAULTS = ((b"\xdd\xff\xff\xff\xff", "too_large"), (b"\x94\x00\x01\xa1x\x91\xdf\xff\xff\xff\xff", "too_large"),
          (b"\x94\x00\x01\xdb\xff\xff\xff\xff", "too_large"), (b"\x94\x00\x01\xa1x" + b"\x91" * 64, "bad_request"),
          (b"\x94\x00\x01\xa1x" + b"\x81\xa1k" * 64, "bad_request"), (b"\xc1", "bad_request"), (b"GET / HTTP/1.0\r\n\r\n", "bad_request"))


def test_28_frames(d):
    before = rss_kb(d)
    with d.peer(timeout=60) as other:
        solo = ask(other, 30, 200)["tokens"]
        i = other.start("generate", **greedy(30, 900))
        for data, code in FAULTS:
            with d.peer() as p:
                p.raw(data)
                m = p.message()
                assert m[:2] == [2, "error"] and m[2][0]["code"] == code, m
                assert p.message() is None
        assert other.result(i)["tokens"][:200] == solo
    assert SANITIZED or rss_kb(d) - before < 16000, "a declaration cost memory"
    whole = pack([0, 1, "generate", [greedy(40, 16, stream=False)]])
    with d.peer(timeout=60) as p:
        for b in whole:
            p.raw(bytes([b]))
        assert len(p.result(1)["tokens"]) == 16
        p.raw(whole + whole[:len(whole) // 2])
        p.result(1)
        p.raw(whole[len(whole) // 2:])
        p.result(1)
    for n in (1, 3, len(whole) // 2, len(whole) - 1):  # gone in the middle of one
        with d.peer() as p:
            p.raw(whole[:n])


def test_28_readable_but_wrong(d):
    """Whole frames of a sound shape, with content that is none: an error each, and the connection goes on."""
    with d.peer(timeout=60) as p:
        for text in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"ab\xe2\x82"):  # no UTF-8
            p.raw(b"\x94\x00\x07" + pack("generate") + b"\x91\x81" + pack("prompt") + bytes([0xa0 + len(text)]) + text)
            refused(lambda: p.result(7), "bad_request")
        deep = "x"
        for _ in range(8):
            deep = [deep]
        refused(lambda: p.call("generate", prompt=deep), "bad_request")
        for args in ({"session": "x" * 10000}, {"stop": ["a"] * 1000}, {"pin": [[0, 1]] * 1000}):
            refused(lambda: p.call("generate", **greedy(10, 4, **args)), "bad_request", "too_large")
        assert ask(p)["completion_tokens"] == 16


def test_28_a_thousand_idle(d):
    peers = [d.peer() for _ in range(1000)]
    healthy_with = peers[500]
    assert ask(healthy_with)["completion_tokens"] == 16
    until(lambda: healthy_with.call("status")["connections"] >= 1000, what="all accepted")
    for p in peers:
        p.close()
    with d.peer() as p:
        until(lambda: p.call("status")["connections"] == 1, what="all closed")


@own
def test_28_no_descriptors_left():
    with Running("--max-connections", "10000", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))) as d:
        first = d.peer(timeout=60)
        solo = ask(first, 30, 100)["tokens"]
        peers = [d.peer() for _ in range(100)]
        until(lambda: "accept failed" in d.log(), what="the limit")
        assert ask(first, 30, 100)["tokens"] == solo
        for p in peers + [first]:
            p.close()

        def in_again():
            try:
                with d.peer(timeout=5) as p:
                    return p.call("status")["connections"] == 1
            except (OSError, EOFError):
                return False
        until(in_again, what="accepting again")


# ---- sparsity ----

def test_29_a_budget_for_all(d):
    with d.peer(timeout=60) as p:
        full = ask(p, 300, 30, 6, kv={"policy": "full"})["tokens"]
        args = {"tokens": prompt(300, 6), "continuation": prompt(30, 7)}
        score = p.call("score", kv={"policy": "full"}, **args)["logprobs"]
        assert len(set(full)) > 3
        for policy in SPARSE:
            kv = {"policy": policy, "budget": CONTEXT}
            assert ask(p, 300, 30, 6, kv=kv)["tokens"] == full, policy
            assert p.call("score", kv=kv, **args)["logprobs"] == score, policy


@own
def test_30_many_with_the_smallest_budget():
    with Running("--max-sequences", "64", "--max-batch", "64", "--kv-memory", "8M") as d:
        stop, bad, looks = threading.Event(), [], [0, 0]

        def look():
            with d.peer(timeout=120) as q:
                while not stop.is_set():
                    k = q.call("kv")
                    if k["pages_used"] + k["pages_free"] != k["pages_total"] or sum(x["pages"] for x in k["layers"]) != k["pages_used"]:
                        bad.append(k)
                    looks[0] += 1
                    for s in q.call("sequences")["sequences"][:1]:
                        if s["state"] != "decode":
                            continue
                        try:
                            a = q.call("kept", sequence=s["id"])
                        except Refused:
                            continue
                        for layer in a["layers"]:
                            for h in layer["heads"]:
                                pos = h["positions"]
                                ok = pos == sorted(set(pos)) and 16 <= len(pos) <= 17 and pos[:2] == [0, 1]
                                ok = ok and pos[-8:] == list(range(pos[-1] - 7, pos[-1] + 1)) and pos[-1] >= a["n"] - 2
                                if not ok:
                                    bad.append((a["n"], pos))
                        looks[1] += 1

        t = threading.Thread(target=look)
        t.start()
        try:
            with d.peer(timeout=240) as p:
                ids = [p.start("generate", **greedy(100, 600 if SLOW == 1 else 100, k, stream=False,
                                                    kv={"policy": "snapkv", "budget": 16, "recent": 8, "sink": 2})) for k in range(64)]
                for i in ids:
                    r = p.result(i)
                    assert 0 < r["kv"]["slots_kept"] <= 16 * 6 + 6 < r["kv"]["slots_full"], r["kv"]
        finally:
            stop.set()
            t.join()
        assert not bad and min(looks) > 0, (looks, bad[:3])


def test_31_same_kept_set_in_company(d):
    def held(p, start, policy):
        names = {fresh("kept"): k for k in start}
        ids = [p.start("generate", session=name, **greedy(300 + 100 * k, 20, k, stream=False, kv={"policy": policy, "budget": 64}))
               for name, k in names.items()]
        for i in ids:
            p.result(i)
        out = {k: kept(p, name)[0] for name, k in names.items()}
        end_sessions(p)
        return out

    with d.peer(timeout=60) as p:
        for policy in SPARSE:
            apart = {}
            for k in (1, 2, 3):
                apart.update(held(p, (k,), policy))
            assert held(p, (1, 2, 3), policy) == apart and len(apart) == 3, policy


def test_32_the_pool_falls(d):
    with d.peer(timeout=60) as p:
        used = {}
        page = p.call("kv")
        for policy, pages in (("full", 6 * -(-900 // 32)), ("snapkv", 6 * -(-65 // 32))):
            r = ask(p, 900, 1, session=fresh("pool"), kv={"policy": policy, "budget": 64})
            used[policy] = p.call("status")["pages_used"]
            assert used[policy] <= pages and used[policy] >= pages - 6, (policy, used, pages)
            assert r["kv"]["bytes"] == used[policy] * page["page_bytes"] and r["kv"]["slots_full"] == 900 * 6, r["kv"]
            end_sessions(p)
            until(lambda: p.call("status")["pages_used"] == 0)
        assert used["snapkv"] * 3 < used["full"], used


@own
def test_32_more_fit():
    most = {}
    for policy in ("full", "snapkv"):
        with Running("--kv-policy", policy, "--kv-budget", "64", "--kv-recent", "32", "--kv-memory", "1M", "--max-sequences", "32",
                     "--max-batch", "32") as d:
            with d.peer(timeout=120) as p, d.peer(timeout=120) as q:
                k = p.call("kv")
                assert (k["fit_plan"] == k["fit_full"]) == (policy == "full"), k
                ids = [p.start("generate", **greedy(600, 300, n, stream=False)) for n in range(10)]
                most[policy] = 0
                while True:
                    st = q.call("status")
                    most[policy] = max(most[policy], st["running"])
                    if st["waiting"] == st["running"] == 0 and st["finished"] > 10:
                        break
                for i in ids:
                    p.result(i)
    assert most["full"] <= 3 < most["snapkv"], most


def check_session_after_an_end(d):
    """After a stop string, a cancel, a deadline: the session goes on exactly as if all had been said at once (full), or as
    another one of the same course (sparse)."""
    def begin(p, name, end, kv):
        said = prompt(300, 8)
        args = greedy(300, 400, 8, session=name, kv=kv)
        if end == "stop":
            text = ask(p, 300, 30, 8, kv=kv)["text"]
            cut = next(text[k:k + 3] for k in range(5, 25) if "\ufffd" not in text[k:k + 3])
            r = p.call("generate", **dict(args, stop=[cut]))
            assert r["finish"] == "stop"
            return said + r["tokens"]
        if end == "length":
            return said + p.call("generate", **dict(args, max_tokens=20))["tokens"]
        i = p.start("generate", **args)
        read_tokens(p, i, 3)
        if end == "cancel":
            p.call("cancel", msgid=i)
        else:
            (q,) = [q for q in p.call("sequences")["sequences"] if q["session"] == name]
            p.call("kill", sequence=q["id"])
        e = refused(lambda: p.result(i), "cancelled")
        return said + e["tokens"]

    with d.peer(timeout=60) as p:
        for end in ("cancel", "stop", "length", "kill"):
            name = fresh("s33")
            said = begin(p, name, end, {"policy": "full"})
            try:
                r = ask(p, 20, 8, 2, session=name)
            except Refused as e:
                assert e.code == "not_found" and end == "kill", (end, e)
                continue
            assert end != "kill", "a session that an administrator ended goes on as if nothing were"
            whole = p.call("generate", **dict(GREEDY, tokens=said + prompt(20, 2), max_tokens=8, kv={"policy": "full"}))
            assert r["tokens"] == whole["tokens"] and r["cached_tokens"] >= len(said) - 1, (end, r, whole)
        for end in ("stop", "length"):
            for policy in ("snapkv", "sparse"):
                two = []
                for _ in range(2):
                    name = fresh("s33")
                    begin(p, name, end, {"policy": policy, "budget": 64})
                    two.append(ask(p, 20, 8, 2, session=name)["tokens"])
                assert two[0] == two[1], (end, policy, two)
        for policy in ("full", "snapkv"):  # a cancel at any time of a prefill: on with it, or lost and said so
            for wait in (0, 0.001, 0.004, 0.01):
                name = fresh("s33")
                ask(p, 200, 5, 4, session=name, kv={"policy": policy, "budget": 64})
                i = p.start("generate", **greedy(700, 5, 5, session=name))
                time.sleep(wait)
                p.start("cancel", msgid=i)
                try:
                    p.result(i)
                except Refused as e:
                    assert e.code == "cancelled", e
                try:
                    assert ask(p, 20, 5, 2, session=name)["completion_tokens"] == 5
                except Refused as e:
                    assert e.code == "not_found", e
                    assert ask(p, 20, 5, 2, session=name)["completion_tokens"] == 5  # begun anew
        end_sessions(p)


@own
def test_33_a_session_after_an_end():
    # exact: an answer's pairs come from decode steps, those of the whole text from a prefill, and the two round differently
    # and so slow that the cancel of a long answer comes before its end
    slow = {} if SANITIZED else dict(layers=6, width=256, heads=4, head_dim=64, ffn=1024)
    with Running("--compute", "f32", "--kv-memory", "16M", gguf=model("random32", **slow)) as d:
        check_session_after_an_end(d)


def test_34_one_prompt_two_policies(d):
    with d.peer(timeout=60) as p:
        policies = ["full"] + SPARSE
        a = {x: ask(p, 700, 20, 9, kv={"policy": x, "budget": 64})["tokens"] for x in policies}
        b = {x: ask(p, 700, 20, 9, kv={"policy": x, "budget": 64})["tokens"] for x in reversed(policies)}
        assert a == b and len({tuple(x) for x in a.values()}) > 1, a
        name = fresh("s34")
        ask(p, 700, 5, 9, session=name, kv={"policy": "snapkv", "budget": 64})
        refused(lambda: ask(p, 10, 5, 9, session=name, kv={"policy": "full"}), "bad_request")
        end_sessions(p)


def test_35_short_prompts_keep_all(d):
    with d.peer(timeout=60) as p:
        for policy in SPARSE:
            for n in (1, 2, 17, 30, 64):
                r = ask(p, n, 10, kv={"policy": policy})
                assert r["kv"]["slots_kept"] == r["kv"]["slots_full"], (policy, n, r["kv"])
                assert r["tokens"] == ask(p, n, 10, kv={"policy": "full"})["tokens"], (policy, n)


def check_protected(d, n_layers=3):
    with d.peer(timeout=60) as p:
        pins = set(range(100, 120)) | {300}
        for policy in SPARSE:
            # of one token only: all scores are as equal as they can be
            for what in (prompt(500), [77] * 500):
                for out in (1, 150):
                    name = fresh("pin")
                    r = p.call("generate", **dict(GREEDY, tokens=what, max_tokens=out, session=name, pin=[[100, 120], [300, 301]],
                                                  kv={"policy": policy, "budget": 128, "sink": 4, "recent": 16}))
                    layers, k = kept(p, name)
                    last = 500 + r["completion_tokens"] - 2  # the last token of an answer has no place yet
                    want = pins | set(range(4)) | set(range(last - 14, last + 1))
                    for heads in layers:
                        for h in heads:
                            assert want <= set(h), (policy, out, sorted(want - set(h)), h)
                            assert h == sorted(set(h)) and h[-1] in (last, last + 1), h
                    end_sessions(p)


def test_36_protected_tokens_stay(d):
    check_protected(d)


@own
def test_36_protected_tokens_stay_in_int8():
    with Running("--kv-dtype", "int8", gguf=model("random8")) as d:
        check_protected(d)


# ---- what the system does ----


def test_clients_are_killed(d):
    """Real clients, killed in the middle of their answers."""
    ctl = os.path.join(BUILD, "skvctl")
    for k in range(3):
        clients = [subprocess.Popen([ctl, "--socket", d.sock, "run", "--max-tokens", "900", "--ignore-eos", "text %d" % (4 * k + i)],
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for i in range(4)]
        for c in clients:
            c.stdout.read(1)  # it has begun
            c.kill()
        for c in clients:
            c.wait()
            c.stdout.close()
        gone(d)


@own
def test_a_truncated_model():
    path = os.path.join(tmp, "truncated.gguf")
    shutil.copy(model(), path)
    d = daemon(gguf=path)
    try:
        with d.peer(timeout=60) as p:
            ask(p)
            os.truncate(path, 4096)
            try:
                ask(p, 200, 4, 9)
            except (EOFError, OSError):
                pass
        assert d.p.wait(60 * SLOW) == 3 and "truncated" in d.log(), d.log()[-500:]
    finally:
        d.stop(signal.SIGKILL)


@own
def test_a_full_disk():
    """The log's file system has a few pages: service goes on, and so does the log when there is room again."""
    disk = os.path.join(tmp, "disk")
    os.mkdir(disk)
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True).returncode != 0:
        return
    log = os.path.join(disk, "log")
    d = daemon("--log-file", log, wait=False)
    try:
        until(lambda: os.path.exists(d.sock) and os.path.getsize(log) > 0, what="a log")
        d.log_path = log
        d.wait_ready()
        learn(d)
        with d.peer(timeout=60) as p:
            for k in range(100):
                ask(p, 5, 1, k)
            assert os.path.getsize(log) == 16384
            os.truncate(log, 0)
            ask(p, 5, 1)
            until(lambda: os.path.getsize(log) > 0, what="a line in the log")
        healthy(d)
        assert d.stop() == 0
    finally:
        d.stop(signal.SIGKILL)
        subprocess.run(["umount", "-l", disk], check=True)


# ---- users ----


def peer_of(d, uid):
    """A connection whose other end the daemon takes for this user: it is told who connected."""
    os.chmod(os.path.dirname(d.sock), 0o755)
    os.seteuid(uid)
    try:
        return d.peer(timeout=60 * SLOW)
    finally:
        os.seteuid(0)


@own
def test_a_flood_of_one_user():
    """All places are one user's, with the longest answers and the highest priority. Another's requests are answered meanwhile."""
    if os.getuid() != 0:
        return
    with Running("--kv-memory", "64M", "--socket-mode", "0666", "--max-batch", "2", gguf=heavy_model()) as d:
        with d.peer(timeout=60 * SLOW) as p, peer_of(d, 65534) as q:
            assert [x.call("hello")["uid"] for x in (p, q)] == [0, 65534]
            solo = [ask(p, 20, 12, k)["tokens"] for k in range(6)]
            ids = [p.start("generate", **greedy(20, 2000, k, priority=10)) for k in range(6)]
            read_tokens(p, ids[1], 2)
            for k in range(6):
                assert ask(q, 20, 12, k, priority=-10)["tokens"] == solo[k]
            st = q.call("status")
            assert st["finished"] == 1 + 6 + 6 and st["running"] + st["waiting"] == 6, st  # none of the flood's has ended
            for i, alone in zip(ids[:2], solo):
                read_tokens(p, i, 12)
                assert [t["token"] for t in p.tokens(i)[:12]] == alone
            for i in ids:
                p.call("cancel", msgid=i)
                refused(lambda: p.result(i), "cancelled")


@own
def test_a_stranger_in_a_flood():
    """One user has asked for all the memory there is, many times over. Another one, never seen before, is answered meanwhile."""
    if os.getuid() != 0:
        return
    memory = "16M" if SANITIZED else "64M"  # four such answers, less the reserve
    with Running("--kv-memory", memory, "--kv-policy", "full", "--socket-mode", "0666", gguf=heavy_model()) as d:
        with d.peer(timeout=60 * SLOW) as p, peer_of(d, 65534) as q:
            solo = ask(p, 20, 12, 9)["tokens"]
            for n in 0, 1024:
                p.call("set", **{"kv-reserve": n})
                assert p.call("get")["kv-reserve"] == n
            done = p.call("status")["finished"]
            ids = [p.start("generate", **greedy(20, 2000, k)) for k in range(8)]
            for i in ids[:3]:
                read_tokens(p, i, 2)
            st = q.call("status")
            assert (st["running"], st["waiting"]) == (3, 5), st
            assert ask(q, 20, 12, 9)["tokens"] == solo
            st = q.call("status")
            assert (st["running"], st["waiting"], st["finished"]) == (3, 5, done + 1), st
            # what there is no room for waits, is told so, and no longer than it wants to
            large = q.start("generate", **greedy(20, 2000, 10))
            read_tokens(q, large, 1)
            i = q.start("generate", **greedy(20, 2000, 10, progress=True, deadline_ms=500))
            assert sorted(x["state"] for x in q.call("status")["sequences"]) == ["decode", "waiting"]
            e = refused(lambda: q.result(i), "deadline")
            assert e["completion_tokens"] == 0 and e["timing"]["queued_ms"] >= 500, e
            told = [m[2][1] for m in q.seen if m[1] == "progress" and m[2][0] == i]
            assert told == [{"phase": "queued", "done": 0, "total": 1}], told
            q.call("cancel", msgid=large)
            refused(lambda: q.result(large), "cancelled")
            for i in ids:
                p.call("cancel", msgid=i)
                refused(lambda: p.result(i), "cancelled")


@own
def test_a_users_sessions_stay():
    """One user begins session after session until the memory is full, many times over: the other's only one is still there."""
    if os.getuid() != 0:
        return
    with Running("--socket-mode", "0666", "--kv-policy", "full") as d:
        with d.peer(timeout=60 * SLOW) as p, peer_of(d, 65534) as q:
            name = fresh("mine")
            ask(q, 100, 4, session=name)
            theirs = [fresh("s") for _ in range(60)]
            for s in theirs:
                ask(p, 300, 2, session=s)
            assert ask(q, 10, 4, session=name)["cached_tokens"] >= 100
            refused(lambda: ask(p, 10, 4, session=theirs[0]), "not_found")
            assert ask(p, 10, 4, session=name)["cached_tokens"] == 0  # a name is its user's
            for user in (p, q):
                for x in user.call("status")["sequences"]:
                    user.call("cancel", sequence=x["id"])


@own
def test_nothing_of_another_user():
    """Who is no administrator tries every method at another user's prompts, answers, sessions and pages, while they are at work, idle
    and gone: he gets nothing of them, and his own answers are those of a daemon that only he ever used, bit for bit."""
    if os.getuid() != 0:
        return
    words = ["xylograph", "quahog", "vellichor"]  # what the other one says, in every way to say it
    text, name = " ".join(words) + " 1 2 3 4 5 6 7 8 9 " * 20, "mine"
    args = dict(GREEDY, max_tokens=12, stream=False)
    seen = []

    def tries(d, uid, numbers, msgids):
        with peer_of(d, uid) as q:
            return tries_of(q, numbers, msgids)

    def tries_of(q, numbers, msgids):
        """The answers that q gets to what he may ask."""
        def call(method, **more):
            i = q.start(method, **more)
            m = q.wait(i)
            seen.extend([repr(m), repr(q.seen)])
            q.seen.clear()
            return m[2] or m[3]
        for n in numbers:
            assert call("kept", sequence=n)["code"] == call("kill", sequence=n)["code"] == "forbidden"
            assert call("cancel", sequence=n) == {"cancelled": False}
        for i in msgids:
            assert call("cancel", msgid=i) == {"cancelled": False}
        for method in "sequences kv get drain resume reload shutdown".split():
            assert call(method)["code"] == "forbidden", method
        assert call("subscribe", topics=["sequences"])["code"] == call("set", **{"log-level": "debug"})["code"] == "forbidden"
        assert call("status")["sequences"] == []
        out = []
        for more in ({"prompt": text}, {"prompt": text, "session": name}, {"messages": [{"role": "user", "content": text}]},
                     {"tokens": prompt(40), "logprobs": 5, "stream": True}, {"tokens": prompt(400, 3), "kv": {"policy": "snapkv", "budget": 64}}):
            i = q.start("generate", **dict(args, progress=True, **more))
            r = q.result(i)
            assert r["cached_tokens"] == 0, r
            out.append((r["tokens"], r["kv"], [t.get("top") for t in q.tokens(i)]))
            q.seen.clear()
        for kv in ({"policy": "full"}, {"policy": "snapkv", "budget": 64}):
            out.append(q.call("score", tokens=prompt(400, 4), continuation=prompt(8, 5), kv=kv, logprobs=5))
        (x,) = call("status")["sequences"]
        assert call("cancel", sequence=x["id"]) == {"cancelled": True}
        until(lambda: not call("status")["sequences"], what="no session of one's own")
        return out

    with Running("--socket-mode", "0666", "--kv-memory", "16M", "--metrics", "unix:" + os.path.join(tmp, "other.m"),
                 gguf=heavy_model()) as d:
        with d.peer(timeout=60 * SLOW) as p:
            alone = tries(d, 65534, range(1, 4), range(1, 4))
            seen.clear()
            said = p.call("generate", prompt=text, session=name, **args)["text"]
            p.call("generate", messages=[{"role": "system", "content": text}, {"role": "user", "content": text}], **args)
            busy = p.start("generate", **dict(args, max_tokens=100000, prompt=text[:400]))
            until(lambda: p.call("status")["running"] == 1, what="one at work")
            ids = [x["id"] for x in p.call("sequences")["sequences"]]
            assert len(ids) == 2
            assert tries(d, 65533, ids, [busy]) == alone
            p.call("cancel", msgid=busy)
            refused(lambda: p.result(busy), "cancelled")
            end_sessions(p)
            for k in range(2):  # every page has been theirs once
                ask(p, 1900, 20, k, kv={"policy": "full"})
            assert tries(d, 65532, ids, [busy]) == alone
        heard = "\n".join(seen) + d.log() + http_get(os.path.join(tmp, "other.m"))
        assert "skvd_" in heard and len(said) > 8
        for secret in words + [said]:
            assert secret not in heard, secret


@own
def test_memory_over_500_requests():
    """Requests that evict, of every policy: the process is no larger after 500 of them than after the first hundred."""
    sizes = []
    with Running("--kv-memory", "8M") as d, d.peer(timeout=60 * SLOW) as p:
        for k in range(60 if SANITIZED else 500):  # there, what is lost is told at exit
            r = ask(p, n=150 + k % 50, out=80, seed=k, kv={"policy": SPARSE[k % len(SPARSE)], "budget": 64, "sink": 4, "recent": 16,
                                                           "full_layers": 0})
            assert r["kv"]["slots_kept"] < r["kv"]["slots_full"] / 2, r["kv"]
            sizes.append(rss_kb(d))
    if not SANITIZED:
        assert sizes[-1] - sizes[99] < 512, [sizes[i] for i in (0, 99, 199, 299, 399, 499)]
    print("memory after 1, 100 and all requests: %d, %d, %d KiB" % (sizes[0], sizes[min(99, len(sizes) - 1)], sizes[-1]))


if __name__ == "__main__":
    sys.exit(run([(n, f) for n, f in globals().items() if n.startswith("test_")], lambda: learn(daemon()), healthy))
