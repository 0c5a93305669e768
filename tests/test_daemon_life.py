#!/usr/bin/env python3
"""The daemon over its socket: the process, administrators, settings, log and metrics. See test_daemon.py."""
import errno
import grp
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from daemon_rig import MODEL, SKVD, daemon, healthy, refused, until  # noqa: E402
from rig import BUILD, SANITIZED, http_get, own, run, tmp  # noqa: E402
from skvwire import Daemon, Peer  # noqa: E402

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
                       ("frame-timeout = soon\n", "FILE:1: frame-timeout: 'soon' is not a time with ms, s, m, h or d from 0 to 86400s"),
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
        with d.peer() as p, open(d.conf, "w") as f:
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
    for known in True, False:
        path = os.path.join(tmp, "journal-%s.log" % known)
        with open(path if known else os.devnull, "a") as f:
            st = os.fstat(f.fileno())
        d = daemon(log=path, env={"JOURNAL_STREAM": "%d:%d" % (st.st_dev, st.st_ino)})
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
def test_log_is_plain_text():
    """Whatever names clients have, the log is UTF-8 without what could hide a line or harm the terminal that shows it."""
    d = daemon("--log-level", "info")
    try:
        for name in "\u009b31mred", "x" * 39 + "\u00e9", "a\u2028b", "\u202eabc\u2066", "\u00e9 \u4f60 \U0001f600":
            with d.peer() as p:
                p.call("hello", client=name)
                p.raw(b"\xc1")
                assert p.message()[1] == "error"
        until(lambda: d.log().count("reason=fault") == 5)
        with open(d.log_path, "rb") as f:
            text = f.read().decode()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text), text
        assert "client=??31mred" in text and 'client="\u00e9 \u4f60 \U0001f600"' in text, text
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


@own
def test_metrics():
    path = os.path.join(tmp, "metrics.sock")
    d = daemon("--metrics", "unix:" + path)
    try:
        time.sleep(1.2)  # the layers are asked for once a second
        with d.peer() as p:
            p.call("generate", prompt="n=4")
            p.call("generate", prompt="n=4 eos=1")
        text = http_get(path)
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
        assert "404" in http_get(path, "/other")
        healthy(d)
    finally:
        assert d.stop() == 0
    assert not os.path.exists(path)


@own
def test_metrics_tcp():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
    s.close()
    d = daemon("--metrics", "127.0.0.1:%d" % port)
    try:
        assert "skvd_build_info" in http_get(("127.0.0.1", port))
    finally:
        assert d.stop() == 0
    d = daemon("--metrics", "0.0.0.0:80", wait=False)
    assert d.p.wait(10) == 2 and "neither unix:PATH nor 127.0.0.1:PORT" in d.log()
    d.stop()


if __name__ == "__main__":
    sys.exit(run([(n, f) for n, f in globals().items() if n.startswith("test_")], daemon, healthy))
