#!/usr/bin/env python3
"""Situations that users of other servers reported, over the socket of a real skvd with a small random model.

Each ends "healthy": a fixed question gets the answer that it got first, the KV pages in use are back at the idle value, and
the process is the same one."""
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from skvwire import Daemon, Refused  # noqa: E402

BUILD = os.environ.get("top_builddir", os.getcwd())
SKVD = os.path.join(BUILD, "skvd")
SLOW = 10 if os.environ.get("SKVD_SANITIZED") or os.environ.get("SKVD_VALGRIND") else 1
CONTEXT = 1024
tmp = tempfile.mkdtemp(prefix="skvd-troubles-")
MODEL = os.path.join(tmp, "random.gguf")
GREEDY = {"temperature": 0, "ignore_eos": True}
counter = 0
alone = set()


def own(f):
    alone.add(f.__name__)
    return f


def daemon(*args, wait=True, model=None):
    global counter
    counter += 1
    sock = os.path.join(tmp, "%d.sock" % counter)
    conf = os.path.join(tmp, "empty.conf")
    open(conf, "w").close()
    argv = [SKVD, "--model", model or MODEL, "--socket", sock, "--config", conf, "--log-level", "debug", "--threads", "2"]
    if "--kv-memory" not in args:
        argv += ["--kv-memory", "4M"]
    return Daemon(argv + list(args), sock, os.path.join(tmp, "%d.log" % counter), wait=wait)


def until(f, seconds=10, what="it"):
    end = time.time() + seconds * SLOW
    while not f():
        assert time.time() < end, "%s did not come true" % what
        time.sleep(0.02)


def refused(f, *codes):
    try:
        r = f()
    except Refused as e:
        assert e.code in codes, e
        return e.error
    raise AssertionError("not refused: %r" % (r,))


def prompt(n, seed=1):
    """n token ids, all of single characters or so; no special ones."""
    r = random.Random(seed)
    return [r.randrange(40, 200) for _ in range(n)]


def ask(p, n=40, out=16, seed=1, **more):
    return p.call("generate", **dict(GREEDY, tokens=prompt(n, seed), max_tokens=out, stream=False, **more))


known = {}


def fresh(name):
    """A session's name that was never used: one that ended is `not_found` until it is begun anew."""
    global counter
    counter += 1
    return "%s-%d" % (name, counter)


def healthy(d):
    assert d.p.poll() is None, "the daemon is gone: " + d.log()[-2000:]
    with d.peer(timeout=60) as p:
        r = ask(p)
        k = known.setdefault(d, r["tokens"])
        assert r["tokens"] == k, (r["tokens"], k)
        until(lambda: p.call("status")["pages_used"] == 0, what="an empty pool")
        st = p.call("status")
        assert st["pid"] == d.p.pid and st["pages_free"] == st["pages_total"], st


def gone(d):
    with d.peer() as p:
        until(lambda: p.call("status")["running"] == 0 and p.call("status")["waiting"] == 0, 5, "nothing running")


# ---- going away ----

def test_01_closes_in_a_long_answer(d):
    p = d.peer(timeout=60)
    i = p.start("generate", **dict(GREEDY, tokens=prompt(30), max_tokens=900))
    while len(p.tokens(i)) < 3:
        p.seen.append(p.message())
    p.close()
    gone(d)
    assert "reason=disconnect" in d.log()


def test_02_closes_in_the_longest_prompt(d):
    p = d.peer()
    p.start("generate", **dict(GREEDY, tokens=prompt(CONTEXT - 2), max_tokens=1))
    p.close()
    gone(d)


def test_03_a_stranger_goes_and_cancels(d):
    with d.peer(timeout=60) as a:
        solo = ask(a, 50, 200, 3)["text"]
        i = a.start("generate", use_id=900, **dict(GREEDY, tokens=prompt(50, 3), max_tokens=200))
        b = d.peer()
        b.start("generate", **dict(GREEDY, tokens=prompt(300, 4), max_tokens=50))
        assert b.call("cancel", msgid=900) == {"cancelled": False}
        b.close()
        r = a.result(i)
        assert r["text"] == solo == "".join(t["text"] for t in a.tokens(i))


@own
def test_04_twenty_queued_are_cancelled():
    d = daemon("--max-batch", "1")
    try:
        with d.peer(timeout=60) as p:
            slow = p.start("generate", **dict(GREEDY, tokens=prompt(20), max_tokens=600, stream=False))
            ids = [p.start("generate", **dict(GREEDY, tokens=prompt(30, k), max_tokens=20)) for k in range(20)]
            for i in ids:
                p.start("cancel", use_id=5000 + i, msgid=i)
            for i in ids:
                e = refused(lambda: p.result(i), "cancelled")
                assert e["completion_tokens"] == 0 and not p.tokens(i), e
            assert p.result(slow)["completion_tokens"] == 600
        healthy(d)
    finally:
        assert d.stop() == 0


def test_05_duplicate_ids(d):
    with d.peer(timeout=60) as p, d.peer(timeout=60) as q:
        for x in (p, q):
            x.start("generate", use_id=7, **dict(GREEDY, tokens=prompt(20), max_tokens=100, stream=False))
        p.start("generate", use_id=7, tokens=[50])
        refused(lambda: p.result(7), "bad_request")
        assert p.result(7)["tokens"] == q.result(7)["tokens"]


# ---- sizes ----

def test_06_empty_prompts(d):
    with d.peer(timeout=60) as p:
        for args in ({"prompt": ""}, {"tokens": []}, {"prompt": "   \n\t "}, {"prompt": "", "raw": True},
                     {"messages": [{"role": "user", "content": ""}]}):
            try:
                r = p.call("generate", max_tokens=4, **args)
                assert r["completion_tokens"] <= 4
            except Refused as e:
                assert e.code == "bad_request", e


def test_07_no_tokens_wanted(d):
    with d.peer(timeout=60) as p:
        r = p.call("generate", tokens=prompt(20), max_tokens=0, logprobs=5)
        assert r["completion_tokens"] == 0 and r["tokens"] == [] and r["text"] == "", r


def test_08_prompts_around_the_context(d):
    with d.peer(timeout=60) as p:
        assert ask(p, CONTEXT - 1, 1)["completion_tokens"] == 1
        for n in (CONTEXT + 1, 10 * CONTEXT):
            e = refused(lambda: ask(p, n, 1), "context_overflow")
            assert str(CONTEXT) in e["message"] and str(n) in e["message"], e


@own
def test_09_larger_than_the_pool():
    d = daemon("--kv-memory", "300K")
    try:
        with d.peer(timeout=60) as p:
            t = time.time()
            e = refused(lambda: ask(p, 1000, 10, kv={"policy": "full"}), "too_large", "context_overflow", "overloaded")
            assert time.time() - t < 2 * SLOW and re.search(r"\d", e["message"]), e
            assert ask(p, 100, 10)["completion_tokens"] == 10
        healthy(d)
    finally:
        assert d.stop() == 0


@own
def test_10_each_most_of_the_pool():
    d = daemon("--kv-memory", "700K", "--kv-policy", "full")
    try:
        with d.peer(timeout=120) as p:
            solo = {k: ask(p, 850, 20, k)["tokens"] for k in range(4)}
            ids = {k: p.start("generate", **dict(GREEDY, tokens=prompt(850, k), max_tokens=20, stream=False)) for k in solo}
            for k, i in ids.items():
                assert p.result(i)["tokens"] == solo[k], k
        healthy(d)
    finally:
        assert d.stop() == 0


def test_11_no_limit(d):
    with d.peer(timeout=120) as p:
        r = ask(p, 900, 2 ** 31 - 1)
        assert r["finish"] == "length" and r["prompt_tokens"] + r["completion_tokens"] in (CONTEXT, CONTEXT + 1), r


@own
def test_12_absurd_sizes_at_start():
    for args in (("--kv-memory", "4K"), ("--context", "1"), ("--context", "2"), ("--context", "31"), ("--context", "99999999")):
        d = daemon(*args, wait=False)
        until(lambda: d.p.poll() is not None or " ready " in d.log(), 20)
        if d.p.poll() is None:
            assert d.stop() == 0
        else:
            assert d.stop() in (2, 3, 4) and "exit code=" in d.log() or "skvd:" in d.log(), d.log()


# ---- values ----

def test_13_tokens_outside(d):
    with d.peer() as p:
        for t in (-1, p.call("hello")["model"]["vocab"], 2 ** 31, -2 ** 31, 2 ** 40):
            e = refused(lambda: p.call("generate", tokens=[50, t]), "bad_request")
            assert "tokens[1]" in e["message"], e
            refused(lambda: p.call("detokenize", tokens=[t]), "bad_request")


def test_14_extremes(d):
    with d.peer(timeout=60) as p:
        for name, lo, hi in (("budget", 16, 2 ** 31 - 1), ("sink", 0, 1024), ("recent", 1, 65536), ("alpha", 0, 65536),
                             ("pool", 1, 255), ("full_layers", 0, 1024)):
            for v in (lo - 1, lo, hi, hi + 1):
                try:
                    r = ask(p, 200, 4, kv={"policy": "snapkv", name: v})
                    assert lo <= v <= hi and r["completion_tokens"] == 4, (name, v)
                except Refused as e:
                    assert e.code == "bad_request", (name, v, e)
        for policy in "full streaming snapkv pyramid h2o tova article sparse".split():
            assert ask(p, 600, 8, kv={"policy": policy, "budget": 64})["kv"]["policy"] == policy
        refused(lambda: ask(p, kv={"policy": "magic"}), "bad_request")


def test_15_logprobs_are_numbers(d):
    with d.peer(timeout=60) as p:
        i = p.start("generate", **dict(GREEDY, tokens=prompt(30), max_tokens=5, logprobs=64))
        p.result(i)
        for t in p.tokens(i):
            assert isinstance(t["logprob"], float) and len(t["top"]) == 64, t
            assert all(isinstance(x[2], float) and x[2] <= 0 for x in t["top"])
            assert t["top"] == sorted(t["top"], key=lambda x: -x[2])
        r = p.call("score", tokens=prompt(20), continuation=prompt(10, 5), logprobs=3)
        assert all(isinstance(x, float) for x in r["logprobs"]) and len(r["logprobs"]) == 10
        assert abs(sum(r["logprobs"]) - r["sum"]) < 1e-3


# ---- text ----

def test_16_stop_strings(d):
    with d.peer(timeout=60) as p:
        whole = ask(p, 40, 60)["text"]
        for a in range(3, min(len(whole) - 12, 40), 7):
            for n in (2, 5, 9):
                stop = whole[a:a + n]
                at = whole.index(stop)
                i = p.start("generate", **dict(GREEDY, tokens=prompt(40), max_tokens=60, stop=[stop, "\x00never", stop + "longer"]))
                r = p.result(i)
                assert r["text"] == whole[:at] and r["finish"] == "stop" and r["stop"] == stop, (stop, r["text"], whole)
                assert "".join(t["text"] for t in p.tokens(i)) == r["text"]


def test_17_ends_within_a_stop_string(d):
    with d.peer(timeout=60) as p:
        whole = ask(p, 40, 20)["text"]
        i = p.start("generate", **dict(GREEDY, tokens=prompt(40), max_tokens=20, stop=[whole[-3:] + "and more"]))
        r = p.result(i)
        assert r["text"] == whole and r["finish"] == "length"
        assert "".join(t["text"] for t in p.tokens(i)) == whole


def test_18_whole_characters(d):
    with d.peer(timeout=60) as p:
        for seed in range(6):  # the reader of the test decodes strictly
            i = p.start("generate", tokens=prompt(20, seed), temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed,
                        ignore_eos=True, max_tokens=80)
            r = p.result(i)
            assert "".join(t["text"] for t in p.tokens(i)) == r["text"]


# ---- pace ----

@own
def test_19_a_reader_stops():
    d = daemon("--reader-timeout", "1s", "--output-high", "32K", "--output-low", "8K")
    try:
        slow = d.peer(timeout=60)
        for k in range(4):
            slow.start("generate", **dict(GREEDY, tokens=prompt(20), max_tokens=1000, logprobs=64))
        with d.peer(timeout=60) as p:
            assert ask(p, 40, 100)["completion_tokens"] == 100
            until(lambda: "reason=slow" in d.log(), 30, "the slow reader dropped")
        slow.close()
        healthy(d)
    finally:
        assert d.stop() == 0


def test_21_two_large_prompts_at_once(d):
    with d.peer(timeout=120) as p:
        ids = [p.start("generate", progress=True, **dict(GREEDY, tokens=prompt(1000, k), max_tokens=10)) for k in (1, 2)]
        for i in ids:
            p.result(i)
        for i in ids:
            done = [m[2][1]["done"] for m in p.seen if m[1] == "progress" and m[2][0] == i and m[2][1]["phase"] == "prefill"]
            assert done == sorted(done), done


def rss_kb(d):
    with open("/proc/%d/status" % d.p.pid) as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def test_22_hundreds_with_cancels(d):
    r = random.Random(22)
    sizes = []
    for round_ in range(3):
        with d.peer(timeout=240) as p:
            ids = []
            for k in range(100 if SLOW == 1 else 20):
                shared = prompt(r.choice((0, 32, 64)), 9)
                ids.append(p.start("generate", **dict(GREEDY, tokens=shared + prompt(r.randrange(5, 60), k), stream=False,
                                                      max_tokens=r.randrange(1, 20))))
                if r.random() < 0.3:
                    p.start("cancel", use_id=100000 + k, msgid=ids[-1])
            for i in ids:
                try:
                    p.result(i)
                except Refused as e:
                    assert e.code == "cancelled", e
        healthy(d)
        sizes.append(rss_kb(d))
    assert SLOW > 1 or sizes[-1] - sizes[0] < 8000, sizes


def test_23_alone_and_in_company(d):
    with d.peer(timeout=120) as p:
        hot = {"tokens": prompt(60, 5), "temperature": 1.0, "seed": 42, "max_tokens": 30, "ignore_eos": True, "stream": False}
        solo, solo_hot = ask(p, 60, 30, 5)["tokens"], p.call("generate", **hot)["tokens"]
        ids = [p.start("generate", **dict(GREEDY, tokens=prompt(50 + 70 * k, 100 + k), max_tokens=40, stream=False)) for k in range(8)]
        a = p.start("generate", **dict(GREEDY, tokens=prompt(60, 5), max_tokens=30, stream=False))
        b = p.start("generate", **hot)
        assert p.result(a)["tokens"] == solo and p.result(b)["tokens"] == solo_hot
        for i in ids:
            p.result(i)


# ---- life ----

@own
def test_24_sigterm():
    for state in ("idle", "prefill", "decode", "twice"):
        d = daemon("--drain-timeout", "60s")
        with d.peer(timeout=120) as p:
            i = None
            if state != "idle":
                i = p.start("generate", **dict(GREEDY, tokens=prompt(900 if state == "prefill" else 20), max_tokens=100))
            if state in ("decode", "twice"):
                p.seen.append(p.message())
            d.p.send_signal(signal.SIGTERM)
            if state == "twice":
                d.p.send_signal(signal.SIGTERM)
            if i is not None:
                try:
                    assert p.result(i)["completion_tokens"] == 100
                except Refused as e:
                    assert e.code == "cancelled" and state == "twice", e
                except (EOFError, ConnectionError):  # not accepted yet when the signal came
                    assert state == "prefill"
        assert d.stop(0) == 0, state


@own
def test_26_malformed_models():
    path = os.path.join(tmp, "bad.gguf")
    with open(MODEL, "rb") as f:
        good = f.read()
    for bad in (b"", b"GGUF", b"GGML" + good[4:], good[:100], good[:len(good) // 2], good[:4] + b"\xff" * 20 + good[24:]):
        with open(path, "wb") as f:
            f.write(bad)
        d = daemon(model=path, wait=False)
        assert d.p.wait(20 * SLOW) == 3 and "exit code=bad_model" in d.log(), d.log()
        d.stop()


# ---- sparsity ----

def test_29_a_budget_for_all(d):
    with d.peer(timeout=60) as p:
        full = ask(p, 300, 30, 6, kv={"policy": "full"})["tokens"]
        for policy in ("snapkv", "h2o", "tova", "sparse", "pyramid"):
            r = ask(p, 300, 30, 6, kv={"policy": policy, "budget": CONTEXT})
            assert r["tokens"] == full, policy


def test_30_many_with_the_smallest_budget(d):
    with d.peer(timeout=240) as p:
        ids = [p.start("generate", **dict(GREEDY, tokens=prompt(100, k), max_tokens=150, stream=False,
                                          kv={"budget": 16, "recent": 8, "sink": 2})) for k in range(32)]
        for i in ids:
            r = p.result(i)
            assert r["completion_tokens"] == 150 and 0 < r["kv"]["slots_kept"] < r["kv"]["slots_full"], r["kv"]


def test_31_same_kept_set_in_company(d):
    def kept(p, start):
        names = {fresh("kept"): k for k in start}
        ids = [p.start("generate", session=name, **dict(GREEDY, tokens=prompt(400, k), max_tokens=1, stream=False,
                                                                kv={"policy": "snapkv", "budget": 64})) for name, k in names.items()]
        for i in ids:
            p.result(i)
        out = {}
        for q in p.call("sequences")["sequences"]:
            if q["session"] in names:
                k = p.call("kept", sequence=q["id"])
                out[names[q["session"]]] = [[h["positions"] for h in layer["heads"]] for layer in k["layers"]]
                p.call("kill", sequence=q["id"])
        until(lambda: not p.call("sequences")["sequences"])
        return out

    with d.peer(timeout=60) as p:
        apart = kept(p, (1,))
        apart.update(kept(p, (2,)))
        assert kept(p, (1, 2)) == apart and len(apart) == 2


def test_32_the_pool_falls(d):
    with d.peer(timeout=60) as p:
        used = {}
        for policy in ("full", "snapkv"):
            ask(p, 900, 1, session=fresh("pool"), kv={"policy": policy, "budget": 64})
            used[policy] = p.call("status")["pages_used"]
            for q in p.call("sequences")["sequences"]:
                p.call("kill", sequence=q["id"])
            until(lambda: p.call("status")["pages_used"] == 0)
        assert used["snapkv"] * 3 < used["full"], used


def test_33_a_session_after_a_cancel(d):
    with d.peer(timeout=60) as p:
        for end in ("cancel", "stop", "length"):
            name = fresh("s33")
            i = p.start("generate", session=name, **dict(GREEDY, tokens=prompt(300, 8), max_tokens=400 if end == "cancel" else 20))
            if end == "cancel":
                while len(p.tokens(i)) < 3:
                    p.seen.append(p.message())
                p.call("cancel", msgid=i)
                refused(lambda: p.result(i), "cancelled")
            else:
                p.result(i)
            try:
                r = ask(p, 20, 5, 2, session=name)
                assert r["completion_tokens"] == 5
            except Refused as e:
                assert e.code == "not_found", e
            for q in p.call("sequences")["sequences"]:
                p.call("kill", sequence=q["id"])


def test_34_one_prompt_two_policies(d):
    with d.peer(timeout=60) as p:
        a = {x: ask(p, 700, 20, 9, kv={"policy": x, "budget": 64})["tokens"] for x in ("full", "snapkv")}
        b = {x: ask(p, 700, 20, 9, kv={"policy": x, "budget": 64})["tokens"] for x in ("snapkv", "full")}
        assert a == b


def test_35_short_prompts_keep_all(d):
    with d.peer(timeout=60) as p:
        r = ask(p, 30, 10)
        assert r["kv"]["slots_kept"] == r["kv"]["slots_full"], r["kv"]


def test_36_pinned_tokens_stay(d):
    with d.peer(timeout=60) as p:
        ask(p, 500, 1, session=fresh("pin"), pin=[[100, 120], [300, 301]], kv={"policy": "snapkv", "budget": 128})
        (q,) = p.call("sequences")["sequences"]
        want = set(range(100, 120)) | {300}
        for layer in p.call("kept", sequence=q["id"])["layers"]:
            for h in layer["heads"]:
                assert want <= set(h["positions"])
                assert h["positions"] == sorted(h["positions"])
        p.call("kill", sequence=q["id"])


def main():
    only = [a[2:] for a in sys.argv[1:] if a.startswith("-k")]
    tests = [(n, f) for n, f in globals().items() if n.startswith("test_") and (not only or any(k in n for k in only))]
    subprocess.run([os.path.join(BUILD, "tests/random-model"), "--layers", "3", "--width", "64", "--heads", "4", "--kv-heads", "2",
                    "--head-dim", "16", "--ffn", "128", "--context", str(CONTEXT), "--seed", "7", MODEL], check=True)
    shared = daemon()
    passed = failed = 0
    for name, f in tests:
        try:
            if name in alone:
                f()
            else:
                f(shared)
                healthy(shared)
            passed += 1
        except Exception:
            failed += 1
            print("FAIL", name)
            traceback.print_exc(file=sys.stdout)
            if shared.p.poll() is not None or name not in alone:
                print(shared.log()[-1500:])
                try:
                    shared.stop(signal.SIGKILL)
                except AssertionError:
                    pass
                shared = daemon()
        sys.stdout.flush()
    rc = shared.stop()
    if rc != 0:
        failed += 1
        print("FAIL the shared daemon exits with", rc, shared.log()[-3000:])
    shutil.rmtree(tmp, ignore_errors=True)
    print("%d passed, %d failed" % (passed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
