#!/usr/bin/env python3
"""Situations that users of other servers reported, over the socket of a real skvd with a small random model: requests and
clients. test_troubles_life.py has the process, the wire and sparsity; test_troubles_text.py what needs real text.

Each ends "healthy": a fixed question gets the answer that it got first, the KV pages in use are back at the idle value, and
the process is the same one. Numbers in names are those of the collection of reports."""
import os
import random
import re
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rig import SANITIZED, http_get, own, rss_kb, run, tmp  # noqa: E402
from skvwire import Refused, pack  # noqa: E402
from troubles_rig import (CONTEXT, GREEDY, SLOW, SPARSE, Running, ask, daemon, end_sessions, fresh, gone, greedy,  # noqa: E402
                          heavy_model, healthy, kept, learn, model, prompt, read_tokens, refused, streamed, until)

# ---- going away ----


def test_01_closes_in_a_long_answer(d):
    p = d.peer(timeout=60)
    read_tokens(p, p.start("generate", **greedy(30, 900)), 3)
    p.close()
    gone(d)
    assert "reason=disconnect" in d.log()


def seconds(line):
    """Of the day, from a line of the log."""
    h, m, sec = re.match(r"[-0-9]+T(\d+):(\d+):([0-9.]+)Z", line).groups()
    return int(h) * 3600 + int(m) * 60 + float(sec)


@own
def test_01_ends_within_two_steps():
    with Running("--kv-memory", "16M", gguf=heavy_model()) as d:
        with d.peer(timeout=60) as p:
            i = p.start("generate", **greedy(30, 100000))
            read_tokens(p, i, 3)
            q = d.peer(timeout=60)
            read_tokens(q, q.start("generate", **greedy(40, 100000, 2)), 3)
            q.close()
            until(lambda: p.call("status")["running"] == 1, what="one running")
            closed, ended = [x for x in d.log().splitlines() if "conn=3 " in x and "reason=disconnect" in x][-2:]
            assert " close " in closed and " request " in ended, (closed, ended)  # closed first, then ended at once
            assert int(re.search(r" out=(\d+)", ended).group(1)) < 1500, ended
            assert seconds(ended) - seconds(closed) < 2 * SLOW, (closed, ended)
            p.call("cancel", msgid=i)
            refused(lambda: p.result(i), "cancelled")


@own
def test_02_closes_in_the_longest_prompt():
    with Running("--kv-memory", "16M", gguf=heavy_model()) as d:
        with d.peer(timeout=60) as q:
            t = time.time()
            r = ask(q, 2047, 1)
            whole = time.time() - t
            for wait in (0, 0.2, 0.5):
                p = d.peer()
                p.start("generate", **greedy(2047, 1, progress=True))
                time.sleep(wait * whole)
                p.close()
                gone(d)
            # in prefill for certain: two such prompts, and the first progress is in
            p = d.peer(timeout=60)
            ids = [p.start("generate", **greedy(2047, 1, k, progress=True)) for k in range(4)]
            while not any(m[1] == "progress" and m[2][1]["phase"] == "prefill" for m in p.seen):
                p.seen.append(p.message())
            p.close()
            gone(d)
            assert len(ids) == 4 and ask(q, 2047, 1)["tokens"] == r["tokens"]


def test_03_a_stranger_goes_and_cancels(d):
    with d.peer(timeout=60) as a:
        solo = ask(a, 50, 200, 3)["text"]
        i = a.start("generate", use_id=900, **greedy(50, 200, 3))
        b = d.peer()
        b.start("generate", **greedy(300, 50, 4))
        assert b.call("cancel", msgid=900) == {"cancelled": False}
        b.close()
        r = a.result(i)
        assert r["text"] == solo == "".join(t["text"] for t in a.tokens(i))


@own
def test_04_twenty_queued_are_cancelled():
    with Running("--max-batch", "1") as d:
        with d.peer(timeout=60) as p:
            slow = p.start("generate", **greedy(20, 600, stream=False))
            ids = [p.start("generate", **greedy(30, 20, k)) for k in range(20)]
            for i in ids:
                p.start("cancel", use_id=5000 + i, msgid=i)
            for i in ids:
                e = refused(lambda: p.result(i), "cancelled")
                assert e["completion_tokens"] == 0 and not p.tokens(i), e
            order = [m[1] for m in p.seen if m[0] == 1 and m[1] >= 5000]
            assert order == sorted(order), order
            assert p.result(slow)["completion_tokens"] == 600


@own
def test_04_order_is_kept():
    with Running("--max-batch", "1") as d:
        with d.peer(timeout=60) as p:
            ids = [p.start("generate", **greedy(20, 300 if k == 0 else 5, k)) for k in range(8)]
            for i in ids[1::2]:
                p.start("cancel", msgid=i)
            for i in ids[1::2]:
                refused(lambda: p.result(i), "cancelled")
            for i in ids[0::2]:
                p.result(i)
            first = [next(k for k, m in enumerate(p.seen) if m[1] == "token" and m[2][0] == i) for i in ids[0::2]]
            assert first == sorted(first), first


def test_05_duplicate_ids(d):
    with d.peer(timeout=60) as p, d.peer(timeout=60) as q:
        for x in (p, q):
            x.start("generate", use_id=7, **greedy(20, 100))
        p.start("generate", use_id=7, tokens=[50])
        refused(lambda: p.result(7), "bad_request")
        a, b = p.result(7), q.result(7)
        assert a["tokens"] == b["tokens"] == ask(p, 20, 100)["tokens"]
        for x in (p, q):
            assert [t["token"] for t in x.tokens(7)] == a["tokens"]


# ---- sizes ----

def test_06_empty_prompts(d):
    with d.peer(timeout=60) as p:
        for args in ({"tokens": []}, {"prompt": "", "raw": True}):
            e = refused(lambda: p.call("generate", max_tokens=4, **args), "bad_request")
            assert "empty" in e["message"], e
        for args in ({"prompt": "   \n\t "}, {"prompt": " ", "raw": True}, {"messages": [{"role": "user", "content": ""}]},
                     {"messages": [{"role": "user", "content": " \n "}]}):
            r = p.call("generate", max_tokens=4, **dict(GREEDY, **args))
            assert r["completion_tokens"] == 4 and r["prompt_tokens"] > 0, r
        refused(lambda: p.call("generate", messages=[]), "bad_request")
        refused(lambda: p.call("score", tokens=[50], continuation=[]), "bad_request")
        refused(lambda: p.call("score", tokens=[], continuation=[50]), "bad_request")
        assert p.call("tokenize", text="") == {"tokens": []} and p.call("detokenize", tokens=[]) == {"text": ""}


def test_07_no_tokens_wanted(d):
    with d.peer(timeout=60) as p:
        i = p.start("generate", tokens=prompt(20), max_tokens=0, logprobs=5)
        r = p.result(i)
        assert r["completion_tokens"] == 0 and r["tokens"] == [] and r["text"] == "" and not p.tokens(i), r
        assert r["finish"] == "length" and r["prompt_tokens"] == 20, r
        # and as the warming of a session: what follows is as if it had been said at once
        name = fresh("warm")
        p.call("generate", **greedy(20, 0, session=name, stream=False, kv={"policy": "full"}))
        r = ask(p, 30, 10, 2, session=name)
        whole = p.call("generate", **dict(GREEDY, tokens=prompt(20) + prompt(30, 2), max_tokens=10, kv={"policy": "full"}))
        assert r["tokens"] == whole["tokens"]
        end_sessions(p)


def test_08_prompts_around_the_context(d):
    with d.peer(timeout=60) as p:
        r = ask(p, CONTEXT - 1, 50)
        assert r["finish"] == "length" and r["completion_tokens"] == 2 and r["prompt_tokens"] == CONTEXT - 1, r
        r = ask(p, CONTEXT, 50)
        assert r["finish"] == "length" and r["completion_tokens"] == 1 and r["prompt_tokens"] == CONTEXT, r
        for n in (CONTEXT + 1, 10 * CONTEXT):
            e = refused(lambda: ask(p, n, 1), "context_overflow")
            assert str(CONTEXT) in e["message"] and str(n) in e["message"], e
        text = "x" * (10 * CONTEXT)
        n = len(p.call("tokenize", text=text)["tokens"])
        e = refused(lambda: p.call("generate", prompt=text, raw=True), "context_overflow")
        assert n > CONTEXT and str(CONTEXT) in e["message"] and str(n) in e["message"], e
        e = refused(lambda: p.call("score", tokens=prompt(CONTEXT - 2), continuation=prompt(5)), "context_overflow")
        assert str(CONTEXT) in e["message"] and str(CONTEXT + 3) in e["message"], e
        name = fresh("long")
        ask(p, 1000, 10, session=name)
        e = refused(lambda: ask(p, 100, 10, 2, session=name), "context_overflow")
        assert str(CONTEXT) in e["message"], e
        assert ask(p, 5, 5, 3, session=name)["completion_tokens"] == 5  # the session is still there
        end_sessions(p)


@own
def test_09_larger_than_the_pool():
    with Running("--kv-memory", "300K") as d:
        with d.peer(timeout=60) as p:
            solo = ask(p, 100, 800)["tokens"]
            # in one write: the small model is done with all of it while a busy machine lets this script wait
            p.raw(pack([0, 901, "generate", [greedy(100, 800)]]) +
                  pack([0, 902, "generate", [greedy(1000, 10, kv={"policy": "full"})]]))
            e = refused(lambda: p.result(902), "too_large")
            assert "KiB" in e["message"] and "1000 prompt" in e["message"], e
            assert len(p.tokens(901)) < 800, "refused only when the others were done"
            assert p.result(901)["tokens"] == solo


@own
def test_10_each_most_of_the_pool():
    with Running("--kv-memory", "700K", "--kv-policy", "full") as d:
        with d.peer(timeout=120) as p:
            solo = {k: ask(p, 600 + 50 * k, 20, k)["tokens"] for k in range(6)}
            for at_once in (2, 3, 6):
                ids = {k: p.start("generate", **greedy(600 + 50 * k, 20, k, stream=False)) for k in range(at_once)}
                for k, i in ids.items():
                    assert p.result(i)["tokens"] == solo[k], k


def test_11_no_limit(d):
    with d.peer(timeout=120) as p:
        for args in ({"max_tokens": 2 ** 31 - 1}, {"max_tokens": CONTEXT}):
            r = p.call("generate", **dict(greedy(900, 0, stream=False), **args))
            assert r["finish"] == "length" and r["prompt_tokens"] + r["completion_tokens"] == CONTEXT + 1, r


@own
def test_12_absurd_sizes_at_start():
    for args, rc, says in ((("--context", "1"), 2, "context 1 cannot be"), (("--context", "2"), 2, "from 32 to"),
                           (("--context", "31"), 2, "from 32 to"), (("--context", "1025"), 2, "from 32 to 1024"),
                           (("--context", "99999999"), 2, "not an integer from"), (("--context", "-1"), 2, "not an integer from"),
                           (("--kv-memory", "1"), 4, "raise --kv-memory"), (("--kv-memory", "2304"), 4, "is 1 pages"),
                           (("--kv-memory", "13823"), 4, "is 5 pages")):
        d = daemon(*args, wait=False)
        assert d.p.wait(20 * SLOW) == rc and says in d.log(), (args, d.p.returncode, d.log())
        assert not os.path.exists(d.sock)
        d.stop()
    with Running("--context", "0") as d:
        with d.peer() as p:
            assert p.call("hello")["model"]["context"] == CONTEXT
    d = daemon("--context", "32")
    with d.peer(timeout=60) as p:
        assert ask(p, 31, 10)["completion_tokens"] == 2
    assert d.stop() == 0
    d = daemon("--kv-memory", "16128")  # seven pages: one sequence of one page a head
    with d.peer(timeout=60) as p:
        assert ask(p, 20, 10)["completion_tokens"] == 10
        refused(lambda: ask(p, 40, 1), "too_large")
        until(lambda: p.call("status")["pages_used"] == 0)
    assert d.stop() == 0


# ---- values ----

def test_13_tokens_outside(d):
    with d.peer() as p:
        for t in (-1, p.call("hello")["model"]["vocab"], 2 ** 31 - 1, 2 ** 31, -2 ** 31, -2 ** 63, 2 ** 63, 2 ** 64 - 1):
            e = refused(lambda: p.call("generate", tokens=[50, t]), "bad_request")
            assert "tokens[1]" in e["message"], e
            e = refused(lambda: p.call("score", tokens=[50, 51], continuation=[50, 51, t]), "bad_request")
            assert "continuation[2]" in e["message"], e
            e = refused(lambda: p.call("score", tokens=[t], continuation=[50]), "bad_request")
            assert "tokens[0]" in e["message"], e
            e = refused(lambda: p.call("detokenize", tokens=[t]), "bad_request")
            assert "tokens[0]" in e["message"], e


INTEGERS = (("max_tokens", 0, 2 ** 31 - 1), ("top_k", 0, 2 ** 31 - 1), ("logprobs", 0, 64), ("priority", -10, 10),
            ("deadline_ms", 1, 2 ** 31 - 1), ("seed", 0, 2 ** 64 - 1))


def test_14_extremes(d):
    def both(name, lo, hi, f, ends=True):
        for v in (lo - 1, lo, hi, hi + 1, -2 ** 31, -2 ** 63, 2 ** 31, 2 ** 32, 2 ** 63, 2 ** 64 - 1):
            if not -2 ** 63 <= v < 2 ** 64:
                continue
            try:
                r = f(v)
                assert lo <= v <= hi, (name, v)
                assert "tokens" in r
            except Refused as e:
                if lo <= v <= hi and name == "deadline_ms" and v == 1:
                    assert e.code == "deadline", e
                    continue
                assert e.code == "bad_request" and name in e.message, (name, v, e)
                assert not lo < v < hi, (name, v, e)

    with d.peer(timeout=60) as p:
        for name, lo, hi in INTEGERS:
            both(name, lo, hi, lambda v: p.call("generate", **dict({"tokens": prompt(200), "max_tokens": 3, "stream": False}, **{name: v})))
        for name, lo, hi in INTEGERS[2:5]:
            both(name, lo, hi, lambda v: p.call("score", tokens=prompt(100), continuation=[50, 51], **{name: v}))
        for policy in SPARSE:
            for name, lo, hi in (("budget", 16, CONTEXT), ("sink", 0, 1024), ("recent", 1, 65536), ("alpha", 0, 65536),
                                 ("pool", 1, 255), ("full_layers", 0, 1024)):
                # what goes together is one's own business here: a large sink needs a large budget, or is refused
                both(name, lo, hi, lambda v: ask(p, 200, 4, kv={"policy": policy, name: v}))
        for v in ([[0, 0]], [[-1, 3]], [[3, 2]], [[0, 201]], [[0, 2 ** 31]], [[5, 9], [8, 12]], [[-2 ** 63, 2 ** 63 - 1]], [[0]], [7]):
            refused(lambda: ask(p, 200, 4, pin=v, kv={"policy": "snapkv", "budget": 64}), "bad_request")
        for v in (float("nan"), float("inf"), -float("inf"), -1.0, 1e300):
            for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
                if v == -1.0 and "_penalty" in name and name != "repeat_penalty":
                    continue
                e = refused(lambda: p.call("generate", tokens=prompt(20), max_tokens=3, **{name: v}), "bad_request")
                assert name in e["message"], e
        for policy in ["full"] + SPARSE:
            assert ask(p, 600, 8, kv={"policy": policy, "budget": 64})["kv"]["policy"] == policy
        refused(lambda: ask(p, kv={"policy": "magic"}), "bad_request")


def check_logprobs(t):
    assert isinstance(t["logprob"], float) and -1.1e30 < t["logprob"] <= 0, t
    assert all(isinstance(x[2], float) and -1.1e30 < x[2] <= 0 for x in t["top"]), t
    assert t["top"] == sorted(t["top"], key=lambda x: -x[2])


def test_15_logprobs_are_numbers(d):
    with d.peer(timeout=60) as p:
        i = p.start("generate", **greedy(30, 5, logprobs=64))
        p.result(i)
        for t in p.tokens(i):
            check_logprobs(t)
            assert len(t["top"]) == 64 and len({x[0] for x in t["top"]}) == 64
        r = p.call("score", tokens=prompt(20), continuation=prompt(10, 5), logprobs=3)
        assert all(isinstance(x, float) for x in r["logprobs"]) and len(r["logprobs"]) == 10
        assert abs(sum(r["logprobs"]) - r["sum"]) < 1e-3


def poisoned(what, value):
    """A model whose embedding (or output) row of token 100 begins with `value`. Rows are found by what is in them: they are F32."""
    path = model("f32", type="F32", tied=0)
    with open(path, "rb") as f:
        b = bytearray(f.read())
    rows = 512 * 64 * 4
    at = tensor_offset(b, what)
    assert at + rows <= len(b)
    b[at + 100 * 256:at + 100 * 256 + 4] = struct.pack("<f", value)
    out = path + "." + what
    with open(out, "wb") as f:
        f.write(b)
    return out


def tensor_offset(b, name):
    """Where a tensor's data begins: its entry ends with the offset, the data is aligned to 32 bytes behind all entries."""
    at = b.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", b, at)
    (off,) = struct.unpack_from("<Q", b, at + 4 + 8 * dims + 4)
    n_tensors = struct.unpack_from("<Q", b, 8)[0]
    end = at
    for first in (b.index(struct.pack("<Q", len(n)) + n) for n in tensor_names(b, n_tensors)):
        p = first + 8 + struct.unpack_from("<Q", b, first)[0]
        end = max(end, p + 4 + 8 * struct.unpack_from("<I", b, p)[0] + 12)
    return (end + 31) // 32 * 32 + off


def tensor_names(b, n):
    names = [b"token_embd.weight", b"output.weight", b"output_norm.weight"]
    for layer in range(3):
        names += [b"blk.%d.%s.weight" % (layer, t) for t in (b"attn_norm", b"attn_q", b"attn_k", b"attn_v", b"attn_output",
                                                             b"ffn_norm", b"ffn_gate", b"ffn_up", b"ffn_down")]
    assert len(names) == n, n
    return names


@own
def test_15_not_a_number():
    bad, good = [50, 100, 51], prompt(40, 3)
    with Running(gguf=poisoned("token_embd.weight", float("nan"))) as d:
        with d.peer(timeout=60) as p:
            solo = p.call("generate", **dict(GREEDY, tokens=good, max_tokens=60, logprobs=2))["tokens"]
            i = p.start("generate", **dict(GREEDY, tokens=good, max_tokens=60))
            for more in ({}, {"logprobs": 5}, {"temperature": 1.0}, {"session": fresh("nan")}):
                e = refused(lambda: p.call("generate", **dict(GREEDY, **dict({"tokens": bad, "max_tokens": 5}, **more))), "internal")
                assert "not a number" in e["message"], e
            refused(lambda: p.call("score", tokens=bad, continuation=[52, 53], logprobs=2), "internal")
            refused(lambda: p.call("score", tokens=[50, 51], continuation=[100, 53]), "internal")
            assert p.result(i)["tokens"] == solo
            end_sessions(p)
    with Running(gguf=poisoned("output.weight", -float("inf"))) as d:
        with d.peer(timeout=60) as p:
            ends = set()
            for seed in range(12):  # the infinite logit is of either sign, by the sign of the state that it meets
                i = p.start("generate", **greedy(20, 4, seed, logprobs=64))
                try:
                    r = p.result(i)
                    ends.add("answer")
                except Refused as e:
                    assert e.code == "internal", e
                    ends.add("internal")
                for t in p.tokens(i):
                    check_logprobs(t)
                r = p.call("score", tokens=prompt(20, seed), continuation=[100])
                ends.add("least" if -1.1e30 < r["logprobs"][0] < -9e29 else "most" if r["logprobs"][0] == 0 else "other")
            assert "least" in ends and "other" not in ends, ends


# ---- text: test_troubles_text.py has more ----

def test_16_stop_strings(d):
    with d.peer(timeout=60) as p:
        whole, tried = ask(p, 40, 60)["text"], 0
        for a in range(3, min(len(whole) - 12, 40), 3):
            for n in (2, 5, 9):
                stop = whole[a:a + n]
                at = whole.index(stop)
                if "\ufffd" in stop:  # bytes that are no text can't be asked for
                    continue
                tried += 1
                r = streamed(p, **greedy(40, 60, stop=[stop, "\x00never", stop + "longer"]))
                assert r["text"] == whole[:at] and r["finish"] == "stop" and r["stop"] == stop, (stop, r["text"], whole)
        assert tried > 5, whole


def test_17_ends_within_a_stop_string(d):
    with d.peer(timeout=60) as p:
        whole = ask(p, 40, 20)["text"]
        for k in (1, 3, 7):
            r = streamed(p, **greedy(40, 20, stop=[whole[-k:] + "and more"]))
            assert r["text"] == whole and r["finish"] == "length"


@own
def test_18_whole_characters():
    for name, more in (("random", {}), ("pieces", {"tokenizer": "llama"})):
        with Running(gguf=model(name, **more)) as d:
            with d.peer(timeout=60) as p:
                odd = 0
                for seed in range(6):  # the reader of the test decodes strictly
                    r = streamed(p, tokens=prompt(20, seed), temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed,
                                 ignore_eos=True, max_tokens=80)
                    odd += r["text"].count("\ufffd")
                assert odd > 0, "no broken byte came: nothing was tested"


# ---- pace ----

@own
def test_19_a_reader_stops():
    with Running("--reader-timeout", "1s", "--output-high", "32K", "--output-low", "8K", "--kv-memory", "32M") as d:
        def five(p):
            t = time.time()
            ids = [p.start("generate", **greedy(30, 300, k)) for k in range(5)]
            for i in ids:
                assert p.result(i)["completion_tokens"] == 300
            return time.time() - t

        with d.peer(timeout=60) as p:
            alone = min(five(p) for _ in range(2))
            before = rss_kb(d)
            slow = d.peer(timeout=60)
            for k in range(4):
                slow.start("generate", **greedy(20, 1000, k, logprobs=64))
            until(lambda: "reason=slow" in d.log() or any(s["state"] == "paused" for s in p.call("sequences")["sequences"]),
                  what="a pause")
            beside = min(five(p) for _ in range(2))
            assert beside < 3 * alone + 1, (alone, beside)
            until(lambda: "reason=slow" in d.log(), 30, "the slow reader dropped")
            assert SANITIZED or rss_kb(d) - before < 16000
        slow.close()


@own
def test_20_a_pace_beside_the_longest_prompt():
    with Running("--kv-memory", "16M", "--step-time", "20", gguf=heavy_model()) as d:
        with d.peer(timeout=120) as p:
            a = p.start("generate", **greedy(30, 100000))
            read_tokens(p, a, 3)
            from_ = len(p.seen)
            b = p.start("generate", **greedy(2047, 1, 5, progress=True))
            t, gaps = time.time(), []
            while not any(m[0] == 1 and m[1] == b for m in p.seen):
                last = time.time()
                n = len(p.tokens(a))
                read_tokens(p, a, n + 1)
                gaps.append(time.time() - last)
            took = time.time() - t
            p.call("cancel", msgid=a)
            refused(lambda: p.result(a), "cancelled")
            # between two of its tokens the prompt comes a step's worth ahead, never most of the way
            most, done = 0, 0
            for m in p.seen[from_:]:
                if m[1] == "token" and m[2][0] == a:
                    at = done
                elif m[1] == "progress" and m[2][0] == b and m[2][1]["phase"] == "prefill":
                    most = max(most, m[2][1]["done"] - done)
                    done = m[2][1]["done"]
            assert at > 0 and len(gaps) >= 5 and most < 1200, (len(gaps), most, took)
            assert max(gaps) < took / 2 + 1, (max(gaps), took)


@own
def test_kept_attention_mass():
    """What `kv`, `status` and the metrics call the kept share of attention is that of the scores that `kept` gives: the last 16
    queries' probabilities, which sum to 16 over all slots of a head."""
    path = os.path.join(tmp, "mass.m")
    with Running("--metrics", "unix:" + path) as d:
        with d.peer(timeout=60) as p:
            assert [x["kept_mass"] for x in p.call("kv")["layers"]] == [None] * 3 and p.call("status")["kept_mass"] is None
            mean = [None] * 3
            for k, budget in enumerate((64, 128, 32)):
                name = fresh("mass")
                p.call("generate", **dict(GREEDY, tokens=prompt(600, k), max_tokens=0, session=name, stream=False,
                                          kv={"policy": "snapkv", "budget": budget, "alpha": 16, "full_layers": 1}))
                layers = kept(p, name)[1]["layers"]
                for i in 1, 2:
                    heads = [sum(h["scores"]) / 16 for h in layers[i]["heads"]]
                    now = sum(heads) / len(heads)
                    assert 0.01 < now < 0.99 and heads[0] != heads[1], heads
                    mean[i] = now if mean[i] is None else 0.95 * mean[i] + 0.05 * now
                told = [x["kept_mass"] for x in p.call("kv")["layers"]]
                assert told[0] is None and all(abs(told[i] - mean[i]) < 1e-5 for i in (1, 2)), (told, mean)
                assert abs(p.call("status")["kept_mass"] - (mean[1] + mean[2]) / 2) < 1e-5
            ask(p, 300, 1, kv={"policy": "snapkv", "budget": CONTEXT})  # nothing goes, so nothing is measured
            assert [x["kept_mass"] for x in p.call("kv")["layers"]] == told

            def metrics():
                return dict(re.findall(r'layer_kept_attention_mass\{layer="(\d)"\} (\S+)', http_get(path)))
            until(lambda: all(abs(float(metrics().get(str(i), 0)) - mean[i]) < 1e-5 for i in (1, 2)), what="the layers' figures")
            assert sorted(metrics()) == ["1", "2"]
            end_sessions(p)


@own
def test_21_two_prompts_of_most_of_the_pool():
    with Running("--kv-memory", "620K", "--kv-policy", "full") as d:  # 275 pages; 1000 tokens need 192
        with d.peer(timeout=120) as p:
            solo = [ask(p, 1000, 10, k)["tokens"] for k in (1, 2)]
            steps = p.call("status")["steps"]
            ids = [p.start("generate", **greedy(1000, 10, k, progress=True)) for k in (1, 2)]
            assert [p.result(i)["tokens"] for i in ids] == solo
            for i in ids:
                done = [m[2][1]["done"] for m in p.seen if m[1] == "progress" and m[2][0] == i and m[2][1]["phase"] == "prefill"]
                assert done == sorted(done) and done[-1] == 1000, done
            assert p.call("status")["tokens_in"] == 40 + 4 * 1000, "a prompt was read twice"
            assert p.call("status")["steps"] > steps


def test_22_hundreds_with_cancels(d):
    r = random.Random(22)
    sizes = []
    with d.peer(timeout=60) as p:
        known = {(a, b): p.call("generate", **dict(GREEDY, tokens=prompt(a, 9) + prompt(b, b), max_tokens=12))["tokens"]
                 for a in (0, 32, 64) for b in (1, 17, 45)}
    for round_ in range(3):
        with d.peer(timeout=240) as p:
            ids = []
            for k in range(170 if SLOW == 1 else 20):
                which = r.choice(list(known))
                ids.append((p.start("generate", **dict(GREEDY, tokens=prompt(which[0], 9) + prompt(which[1], which[1]), stream=False,
                                                       max_tokens=12)), which))
                if r.random() < 0.3:
                    p.start("cancel", use_id=100000 + k, msgid=ids[-1][0])
            for i, which in ids:
                try:
                    assert p.result(i)["tokens"] == known[which], which
                except Refused as e:
                    assert e.code == "cancelled" and e.error["tokens"] == known[which][:e.error["completion_tokens"]], e
        healthy(d)
        sizes.append(rss_kb(d))
    assert SANITIZED or sizes[-1] - sizes[0] < 8000, sizes


def test_23_alone_and_in_company(d):
    with d.peer(timeout=120) as p:
        hot = {"tokens": prompt(60, 5), "temperature": 1.0, "seed": 42, "max_tokens": 30, "ignore_eos": True, "stream": False}
        solo, solo_hot = ask(p, 600, 30, 5)["tokens"], p.call("generate", **hot)["tokens"]
        assert len(set(solo_hot)) > 3, solo_hot
        for step in (1, 5, 20, 500):
            p.call("set", **{"step-time": step})
            ids = [p.start("generate", **greedy(50 + 70 * k, 40, 100 + k, stream=False)) for k in range(8)]
            a = p.start("generate", **greedy(600, 30, 5, stream=False))
            b = p.start("generate", **hot)
            assert p.result(a)["tokens"] == solo and p.result(b)["tokens"] == solo_hot, step
            for i in ids:
                p.result(i)
        p.call("set", **{"step-time": 20})


if __name__ == "__main__":
    sys.exit(run([(n, f) for n, f in globals().items() if n.startswith("test_")], lambda: learn(daemon()), healthy))
