"""The programs that skvd is measured beside, and skvd itself: how each is started and asked for a figure."""
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

import figures

HERE = os.path.dirname(os.path.abspath(__file__))


class Failed(Exception):
    pass


def run(cmd, timeout=1800):
    try:
        r = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, text=True)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Failed(str(e)) from e
    if r.returncode != 0:
        raise Failed("%s: %s" % (" ".join(cmd[:4]), r.stderr.strip()[-400:]))
    return r.stdout


class Child:
    """A program that runs until the block ends."""

    def __init__(self, a, cmd, **more):
        self.log = tempfile.NamedTemporaryFile("w+", prefix="log-", dir=a.tmp)
        self.p = subprocess.Popen(cmd, stderr=self.log, **more)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.p.send_signal(signal.SIGTERM)
        try:
            self.p.wait(30)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()
        self.log.close()

    def check(self):
        if self.p.poll() is not None:
            self.log.flush()
            with open(self.log.name, encoding="utf-8", errors="replace") as f:
                raise Failed("%s ended with %d: %s" % (self.p.args[0], self.p.returncode, f.read()[-400:]))


# ---- skvd ------------------------------------------------------------------------------------------------

class Daemon(Child):
    """skvd; start_s is the time from its start to READY=1."""

    def __init__(self, a, *options, model=None):
        self.a = a
        self.socket = tempfile.mktemp(prefix="s", dir=a.tmp)
        note = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        note_path = tempfile.mktemp(prefix="n", dir=a.tmp)
        note.bind(note_path)
        note.settimeout(1)
        t = time.monotonic()
        super().__init__(a, [a.build + "/skvd", "--model", model or a.model, "--socket", self.socket, "--threads", str(a.threads), *options],
                         stdout=subprocess.DEVNULL, env=dict(os.environ, NOTIFY_SOCKET=note_path))
        while True:
            try:
                if b"READY=1" in note.recv(4096):
                    break
            except socket.timeout:
                self.check()
        self.start_s = time.monotonic() - t
        note.close()
        os.unlink(note_path)

    def ctl(self, *args):
        return json.loads(run([self.a.build + "/skvctl", "--socket", self.socket, "--json", *args], 3600))

    def cpu_s(self):
        """of all its threads"""
        with open("/proc/%d/stat" % self.p.pid, encoding="utf-8") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def skvd_row(a, what, n, policy="full", dtype="bf16", model=None, threads=None, batch=1, rounds=1):
    row = "prefill:%d" % n if what == "prefill" else "decode:%d:%d" % (max(n, 8), batch)
    out = run([*a.prefix, a.build + "/tests/bench_engine", model or a.model, "--json", "--rounds", str(rounds), "--policy", policy,
               "--dtype", dtype, "--rows", row, "--threads", str(threads or a.threads), "--prompts", a.prompts])
    return json.loads(out.splitlines()[-1])["tokens_per_s"]


def skvd_job(a, policy, requests, n, out, *options):
    with Daemon(a, "--kv-memory", "4G", "--kv-policy", policy, *options) as d:
        r = d.ctl("bench", "--prompts", a.prompts, "--input", str(n), "--output", str(out), "--concurrency", str(requests),
                  "--requests", str(requests))
    return figures.of_skvctl(r["runs"][0])


# ---- llama.cpp ---------------------------------------------------------------------------------------------

def llama_row(a, model, what, n):
    """llama-bench; its prompts are random tokens of its own (what they are makes no difference to it)."""
    args = ["-p", str(n), "-n", "0"] if what == "prefill" else ["-p", "0", "-n", "48", "-d", str(n)]
    out = run([*a.prefix, a.llama + "/llama-bench", "-m", model, "-t", str(a.threads), "-r", "1", "-o", "json", *args,
               *(["--no-warmup"] if n > 2000 else [])])
    return json.loads(out)[-1]["avg_ts"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def llama_request(port, ids, n, t0, times, failed):
    """One streamed completion; appends the moment of each token."""
    body = json.dumps({"prompt": ids, "n_predict": n, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False})
    try:
        c = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
        c.request("POST", "/completion", body, {"Content-Type": "application/json"})
        r = c.getresponse()
        for line in r:
            if line.startswith(b"data: "):
                d = json.loads(line[6:])
                now = time.monotonic() - t0
                times += [now] * (d["tokens_predicted"] - len(times)) # a token in the middle of a character is sent with the next
        c.close()
    except (OSError, ValueError, KeyError, http.client.HTTPException) as e:
        failed.append(str(e))
        return
    if len(times) < n:
        failed.append("%d of %d tokens" % (len(times), n))


def llama_job(a, model, requests, n, out, *options):
    """llama-server with a slot a request, all sent at once."""
    port = free_port()
    context = requests * ((n + out + 255) // 256 * 256)
    with Child(a, [a.llama + "/llama-server", "-m", model, "-t", str(a.threads), "--host", "127.0.0.1", "--port", str(port), "-np", str(requests),
                   "-c", str(context), *options], stdout=subprocess.DEVNULL) as server:
        while True:
            server.check()
            try:
                c = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                c.request("GET", "/health")
                if c.getresponse().status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        with open(a.prompts, encoding="utf-8") as f:
            ids = [json.loads(line)["tokens"][:n] for line in f][:requests]
        warm = []
        llama_request(port, ids[-1][:16], 4, 0, [], warm)
        times, failed, t0 = [[] for _ in ids], [], time.monotonic()
        threads = [threading.Thread(target=llama_request, args=(port, p, out, t0, t, failed)) for p, t in zip(ids, times)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        wall = time.monotonic() - t0
    if failed:
        raise Failed("llama-server: %d of %d requests failed: %s" % (len(failed), requests, failed[0]))
    return figures.of_job(times, wall)


# ---- OpenVINO ------------------------------------------------------------------------------------------------

class OpenVino(Child):
    """One pipeline for many figures. It loads for seconds, which nobody else should be measured beside: so it is waited for."""

    def __init__(self, a, *options, prefix=()):
        super().__init__(a, [*prefix, a.openvino, HERE + "/peer_openvino.py", a.model, a.prompts, str(a.threads), *options], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        self.answer()

    def ask(self, *words):
        self.p.stdin.write(" ".join(str(w) for w in words) + "\n")
        self.p.stdin.flush()
        return self.answer()

    def answer(self):
        for line in self.p.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.p.wait()
        self.check()
        raise Failed("OpenVINO gave no answer")

