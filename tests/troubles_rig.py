"""What the tests of other servers' troubles share: daemons with random models, requests, and what "healthy" means."""
import os
import random
import signal
import subprocess
import time

from rig import BUILD, SANITIZED, number, tmp
from skvwire import Daemon, Refused

SKVD = os.path.join(BUILD, "skvd")
SLOW = 10 if SANITIZED else 1
CONTEXT = 1024
REAL = os.environ.get("SKVD_TEST_MODEL") or os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf")
GREEDY = {"temperature": 0, "ignore_eos": True}
ORDINARY = [t for t in range(40, 200) if t != 100]
SPARSE = "streaming snapkv pyramid h2o tova article sparse".split()

known = {}


def model(name="random", **shape):
    """A random model of this shape; made once. Not tied: one that is says its last token for ever, whatever it is asked."""
    path = os.path.join(tmp, name + ".gguf")
    want = dict(layers=3, width=64, heads=4, kv_heads=2, head_dim=16, ffn=128, context=CONTEXT, seed=7, tied=0)
    want.update(shape)
    if not os.path.exists(path):
        argv = [os.path.join(BUILD, "tests/random-model")]
        for k, v in want.items():
            argv += ["--" + k.replace("_", "-"), str(v)]
        subprocess.run(argv + [path], check=True)
    return path


def heavy_model():
    """One whose longest prompt takes a second or so on a fast idle machine, too: what a test does meanwhile takes 0.1 s."""
    if SANITIZED:
        return model("heavy", layers=4, width=256, heads=4, head_dim=64, ffn=512, context=2048)
    return model("heavy", layers=8, width=512, heads=8, kv_heads=4, head_dim=64, ffn=2048, context=2048)


def daemon(*args, wait=True, gguf=None, sock=None, **popen):
    n = number()
    sock = sock or os.path.join(tmp, "%d.sock" % n)
    conf = os.path.join(tmp, "empty.conf")
    open(conf, "w").close()
    argv = [SKVD, "--model", gguf or model(), "--socket", sock, "--config", conf, "--log-level", "debug"]
    for name, value in (("--threads", "2"), ("--kv-memory", "4M")):
        if name not in args:
            argv += [name, value]
    return Daemon(argv + list(args), sock, os.path.join(tmp, "%d.log" % n), wait=wait, **popen)


def until(f, seconds=20, what="it"):
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
    raise AssertionError("not refused: %.300r" % (r,))


def prompt(n, seed=1):
    """n token ids, all of single characters or so; no special ones, and not 100."""
    r = random.Random(seed)
    return [r.choice(ORDINARY) for _ in range(n)]


def greedy(n=40, out=16, seed=1, **more):
    return dict(GREEDY, tokens=prompt(n, seed), max_tokens=out, **more)


def ask(p, n=40, out=16, seed=1, **more):
    return p.call("generate", **dict(greedy(n, out, seed), stream=False, **more))


def streamed(p, **args):
    """The result of a request whose notifications were checked against it."""
    i = p.start("generate", **args)
    r = p.result(i)
    t = p.tokens(i)
    assert "".join(x["text"] for x in t) == r["text"], (t, r["text"])
    assert [x["i"] for x in t[:r["completion_tokens"]]] == list(range(r["completion_tokens"]))
    return r


def read_tokens(p, i, n):
    """Until n tokens of request i are there."""
    while len(p.tokens(i)) < n:
        m = p.message()
        assert m is not None, "the stream ended"
        p.seen.append(m)


def fresh(name):
    """A session's name that was never used: one that ended is `not_found` until it is begun anew."""
    return "%s-%d" % (name, number())


def end_sessions(p):
    for q in p.call("sequences")["sequences"]:
        p.call("kill", sequence=q["id"])
    until(lambda: not p.call("sequences")["sequences"], what="no session left")


def kept(p, session):
    """[layer][head] -> positions, and the answer of `kept`."""
    (q,) = [q for q in p.call("sequences")["sequences"] if q["session"] == session]
    k = p.call("kept", sequence=q["id"])
    return [[h["positions"] for h in layer["heads"]] for layer in k["layers"]], k


def healthy(d):
    """The fixed question has the answer that this daemon gave when it was fresh; nothing is held; the process is the same."""
    assert d.p.poll() is None, "the daemon is gone: " + d.log()[-2000:]
    with d.peer(timeout=60 * SLOW) as p:
        r = ask(p)
        assert r["tokens"] == known[d.first], (r["tokens"], known[d.first])
        until(lambda: p.call("status")["pages_used"] == 0, what="an empty pool")
        st = p.call("status")
        assert st["pid"] == d.p.pid and st["pages_free"] == st["pages_total"], st
        assert st["running"] == st["waiting"] == 0 and st["requests"] == 1, st


def learn(d, gguf=None):
    """Ask the fixed question for the first time; daemons of one model must agree on it."""
    d.first = gguf or model()
    with d.peer(timeout=60 * SLOW) as p:
        t = ask(p)["tokens"]
        assert known.setdefault(d.first, t) == t, (t, known[d.first])
        assert len(set(t)) > 1, "an answer that says nothing: %r" % t
    return d


class Running:
    """with Running(args) as d: a daemon of its own, healthy at the end, which exits with 0."""

    def __init__(self, *args, gguf=None, **more):
        self.args, self.gguf, self.more = args, gguf, more

    def __enter__(self):
        self.d = daemon(*self.args, gguf=self.gguf, **self.more)
        try:
            return learn(self.d, self.gguf)
        except Exception:
            self.d.stop(signal.SIGKILL)
            raise

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                healthy(self.d)
        finally:
            rc = self.d.stop(signal.SIGTERM if kind is None else signal.SIGKILL)
        if kind is None:
            assert rc == 0, (rc, self.d.log()[-2000:])
        else:
            print(self.d.log()[-2000:])


def gone(d):
    with d.peer() as p:
        until(lambda: p.call("status")["running"] == 0 and p.call("status")["waiting"] == 0, what="nothing running")
