#!/usr/bin/env python3
"""Situations that users of other servers reported, where the text matters: with the real model; skipped where it is absent.
See test_troubles.py."""
import os
import re
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rig import SANITIZED, own, run, tmp  # noqa: E402
from troubles_rig import REAL, SPARSE, Running, daemon, healthy, learn, streamed  # noqa: E402

COUNT = {"prompt": "one two three four five six seven eight nine one two two three four five six seven", "raw": True,
         "temperature": 0, "max_tokens": 24}
EMOJI = {"prompt": "\U0001f600\U0001f680\u4f60\u597d \U0001f600\U0001f680\u4f60\u597d \U0001f600\U0001f680\u4f60\u597d \U0001f600\U0001f680",
         "raw": True, "temperature": 0}


def test_16_stop_strings_over_tokens(d):
    with d.peer(timeout=120) as p:
        r = streamed(p, **COUNT)
        ends, whole = [], ""
        for t in [p.call("detokenize", tokens=[t])["text"] for t in r["tokens"]]:
            whole += t
            ends.append(len(whole))
        assert whole == r["text"] and len(ends) == 24, r
        for first in (2, 6, 9):
            for span in (2, 3, 5):  # from the middle of one token to the middle of another
                a, b = ends[first] - 1, ends[first + span - 1] + 1
                stop = whole[a:b]
                at = whole.index(stop)
                for stops in ([stop], [stop, stop[:-1] + "~"], [stop + "~", stop, stop[1:] + "~"], ["~" + stop, stop]):
                    r = streamed(p, **dict(COUNT, stop=stops))
                    assert r["text"] == whole[:at] and r["finish"] == "stop" and r["stop"] == stop, (stops, r, whole)
        # one the prefix of another: the text ends before both, whichever it was
        r = streamed(p, **dict(COUNT, stop=[" nine one", " nine", " nin"]))
        assert r["text"] == whole[:whole.index(" nin")] and r["stop"] in (" nine one", " nine", " nin"), r
        # overlapping ones: never past the first
        r = streamed(p, **dict(COUNT, stop=["nine one two", "one tw"]))
        assert r["finish"] == "stop" and r["text"] in (whole[:whole.index("nine one two")], whole[:whole.index("one tw")]), r


def test_17_ends_within_a_stop_string(d):
    with d.peer(timeout=120) as p:
        for n in (5, 9, 14):
            whole = streamed(p, **dict(COUNT, max_tokens=n))["text"]
            for k in (1, 4, 8):
                r = streamed(p, **dict(COUNT, max_tokens=n, stop=[whole[-k:] + "\x01"]))
                assert r["text"] == whole and r["finish"] == "length", (r, whole)


def test_18_characters_over_tokens(d):
    with d.peer(timeout=120) as p:
        r = streamed(p, **dict(EMOJI, max_tokens=40))
        whole = r["text"]
        assert max(whole) >= "\u0800" and len(r["tokens"]) > len(whole), "no character took several tokens: nothing was tested"
        for n in range(1, 25):  # the end falls within a character: it is flushed as U+FFFD, and nothing else is changed
            t = streamed(p, **dict(EMOJI, max_tokens=n))["text"]
            assert whole.startswith(t.rstrip("\ufffd")), (n, t, whole)
        for text in ("\U0001f469\u200d\U0001f680 caf\u00e9 \u0645\u0631\u062d\u0628\u0627 \u6f22\u5b57", "\U0001f600" * 9):
            tokens = p.call("tokenize", text=text)["tokens"]
            assert p.call("detokenize", tokens=tokens) == {"text": text}


def test_35_short_prompts_say_the_same(d):
    """A prompt of tens of tokens has nothing evicted: every policy says what `full` says."""
    asks = ({"prompt": "The capital of France is", "raw": True}, {"messages": [{"role": "user", "content": "Name five fruits."}]},
            {"messages": [{"role": "user", "content": "Hi"}]})
    with d.peer(timeout=120) as p:
        for k, ask in enumerate(asks):
            ask = dict(ask, temperature=0, max_tokens=40)
            full = streamed(p, **dict(ask, kv={"policy": "full"}))
            assert k > 0 or full["text"].startswith(" Paris"), full
            for policy in SPARSE:
                r = streamed(p, **dict(ask, kv={"policy": policy}))
                assert r["tokens"] == full["tokens"], (policy, r["text"])
                assert r["kv"]["slots_kept"] == r["kv"]["slots_full"], r["kv"]


def held(pid, pool_bytes):
    """MiB of memory that a process holds: [the KV pool, of the model's file, all else, of libraries]. A build for GPUs has large
    ones, with memory of their own between their parts."""
    maps = []
    with open("/proc/%d/smaps" % pid) as f:
        for line in f:
            m = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)", line)
            if m:
                maps.append([int(m.group(1), 16), int(m.group(2), 16), m.group(3), 0])
            elif line.startswith("Rss:"):
                maps[-1][3] = int(line.split()[1]) / 1024
    ends = {}
    for at, to, name, _ in maps:
        if ".so" in name:
            ends[name] = (ends.get(name, (at, to))[0], to)
    got = [0, 0, 0, 0]
    for at, to, name, mib in maps:
        if ".so" in name or (not name and any(a <= at and to <= b for a, b in ends.values())):
            got[3] += mib
        elif not name and abs(to - at - pool_bytes) < 1 << 20:
            got[0] += mib
        else:
            got[1 if name.endswith(".gguf") else 2] += mib
    return got


@own
def test_memory_beside_weights_and_pool():
    """A prompt of the whole context and eight clients at once: all that is held beside the file and the pool, the repacked
    copy of the weights with it, is below 150 MiB."""
    with Running("--kv-memory", "160M", "--context", "4096", "--threads", "2", gguf=REAL) as d:
        with d.peer(timeout=300) as p:
            kv = p.call("kv")
            context = p.call("hello")["model"]["context"]
            long = [20 + i * i % 49000 for i in range(context - 10)]
            p.call("generate", tokens=long, max_tokens=4, stream=False, ignore_eos=True, kv={"policy": "full"})
            ids = [p.start("generate", tokens=long[i:i + 300], max_tokens=30, ignore_eos=True, stream=False) for i in range(8)]
            for i in ids:
                p.result(i)
            pool, mapped, rest, libraries = held(d.p.pid, kv["pages_total"] * kv["page_bytes"])
            print("a context of %d: pool %.0f MiB, of the file %.0f MiB, libraries %.0f MiB, beside them %.0f MiB"
                  % (context, pool, mapped, libraries, rest))
            assert pool > 80, "the pool was not found"
            assert rest < 150, (pool, mapped, rest)


def start():
    return learn(daemon("--kv-memory", "64M", "--context", "2048", gguf=REAL), REAL)


if __name__ == "__main__":
    why = "the real model takes too long here" if SANITIZED else "no %s (bootstrap fetches it; SKVD_TEST_MODEL names another)" % REAL
    if SANITIZED or not os.path.exists(REAL):
        shutil.rmtree(tmp)
        print(why + ": skipped")
        sys.exit(77)
    sys.exit(run([(n, f) for n, f in globals().items() if n.startswith("test_")], start, healthy))
