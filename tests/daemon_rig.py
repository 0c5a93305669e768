"""What the tests with the scripted engine of fake_engine.c share: daemons, and what "healthy" means."""
import os
import time

from rig import BUILD, number, tmp
from skvwire import Daemon, Refused

SKVD = os.path.join(BUILD, "tests/skvd-fake")
MODEL = os.path.join(tmp, "model.bin")
with open(MODEL, "wb") as model:
    model.write(b"\0" * 8192)


def daemon(*args, conf="", sock=None, log=None, wait=True, env=None, **popen):
    """conf is the text of its configuration file; d.conf is where that lies."""
    n = number()
    sock = sock or os.path.join(tmp, "d%d.sock" % n)
    path = os.path.join(tmp, "d%d.conf" % n)
    with open(path, "w") as f:
        f.write(conf)
    argv = [SKVD, "--model", MODEL, "--socket", sock, "--log-level", "debug", *args, "--config", path]
    d = Daemon(argv, sock, log or os.path.join(tmp, "d%d.log" % n), env=dict(os.environ, **(env or {})), wait=wait, **popen)
    d.conf = path
    return d


def healthy(d):
    """A fixed question gets its known answer, no page is in use, and the process is still the same one."""
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
