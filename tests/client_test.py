#!/usr/bin/env python3
"""skvctl's commands against tests/fake_skvd.py: what they print, what they send, how they exit."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOP = os.environ.get("top_srcdir") or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.environ.get("top_builddir") or os.path.join(TOP, "build")
SKVCTL = os.path.join(BUILD, "skvctl")
ANSWER = "Grüße from the fake daemon: one two three four five \U0001f600 six seven eight nine ten."

try:
    import msgpack  # noqa: F401  (the fake daemon needs it)
except ImportError:
    print("python3 has no msgpack module: skipped")
    sys.exit(77)


class Fake:
    """A fake daemon on a socket of its own."""

    def __init__(self, *args):
        self.dir = tempfile.TemporaryDirectory()
        self.socket = os.path.join(self.dir.name, "s")
        self.process = subprocess.Popen([sys.executable, os.path.join(TOP, "tests", "fake_skvd.py"), self.socket, *args],
                                        stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline().startswith("ready")

    def ctl(self, *args, input="", status=0, timeout=60):
        r = subprocess.run([SKVCTL, "--socket", self.socket, *args], input=input, capture_output=True, text=True,
                           timeout=timeout)
        assert r.returncode == status, f"skvctl {args}: exit {r.returncode}, {r.stderr}"
        return r

    def json(self, *args, **kw):
        return json.loads(self.ctl("--json", *args, **kw).stdout)

    def close(self):
        self.process.terminate()
        self.process.wait(10)
        self.process.stdout.close()
        self.dir.cleanup()


class WithFake(unittest.TestCase):
    args = ()

    @classmethod
    def setUpClass(cls):
        cls.d = Fake(*cls.args)

    @classmethod
    def tearDownClass(cls):
        cls.d.close()


class Commands(WithFake):
    def test_run(self):
        self.assertEqual(self.d.ctl("run", "hello").stdout, ANSWER + "\n")

    def test_run_reads_a_pipe(self):
        out = self.d.ctl("run", "ECHO", input="piped text").stdout
        self.assertEqual(out, "ECHO\n\npiped text\n")

    def test_run_options_reach_the_daemon(self):
        r = self.d.json("run", "-n", "3", "--kv", "policy=full", "--stop", "a", "--stop", "b", "--pin", "0-4", "x")
        self.assertEqual((r["finish"], r["completion_tokens"], r["kv"]["policy"]), ("length", 3, "full"))

    def test_run_says_what_the_daemon_refused(self):
        r = self.d.ctl("run", "--kv", "policy=bogus", "x", status=1)
        self.assertIn("kv.policy 'bogus' is unknown", r.stderr)
        self.assertEqual(r.stdout, "")

    def test_overload_says_when_to_come_again(self):
        r = self.d.ctl("run", "--session", "busy", "x", status=1)
        self.assertIn("250 ms", r.stderr)

    def test_bad_usage(self):
        for args in (["nosuch"], ["run", "--top-p", "7", "x"], ["run", "--nosuch"], ["score", "one"], [], ["run"],
                     ["kill", "x"], ["run", "--kv", "budget", "x"], ["run", "--pin", "9-3", "x"], ["cancel"],
                     ["set", "novalue"], ["call", "status", "[1]"]):
            r = self.d.ctl(*args, status=2)
            self.assertTrue(r.stderr, args)
            self.assertEqual(r.stdout, "", args)

    def test_every_command_has_help(self):
        listed = [line.split()[0] for line in self.d.ctl("help").stdout.splitlines() if line.startswith("  ")]
        self.assertGreaterEqual(len(listed), 20)
        for name in listed:
            self.assertIn("usage: skvctl", self.d.ctl(name, "--help").stdout)

    def test_no_daemon(self):
        for args in (["status"], ["run", "x"], ["ps"]):
            r = subprocess.run([SKVCTL, "-s", "/nonexistent/s", *args], input="", capture_output=True, text=True, timeout=60)
            self.assertEqual(r.returncode, 3, args)
            self.assertIn("/nonexistent/s", r.stderr)
            self.assertIn("skvd --model", r.stderr)

    def test_tokens(self):
        self.assertEqual(self.d.ctl("tokenize", "hé<|im_end|>").stdout, "104 195 169 257\n")
        self.assertEqual(self.d.ctl("tokenize", "--count", input="hello").stdout, "5\n")
        self.assertEqual(self.d.ctl("detokenize", "104", "105").stdout, "hi\n")
        self.assertIn('"<|im_end|>"', self.d.ctl("tokenize", "--table", "<|im_end|>").stdout)
        self.assertEqual(self.d.ctl("template", "--system", "S", "U").stdout,
                         "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n")

    def test_score(self):
        self.assertIn("perplexity", self.d.ctl("score", "a b", " c").stdout)
        self.assertEqual(len(self.d.json("score", "a b", " c")["logprobs"]), 2)

    def test_status_and_kv(self):
        self.assertIn("0 of 1000 used", self.d.ctl("status").stdout)
        self.assertEqual(self.d.json("status")["pages_total"], 1000)
        self.assertIn("no sequences", self.d.ctl("ps").stdout)
        kv = self.d.ctl("kv").stdout
        self.assertIn("48 sequences of 4000 tokens", kv)
        self.assertEqual(sum("sparse" in line for line in kv.splitlines()), 27)

    def test_settings(self):
        self.d.ctl("set", "step-ms=25")
        self.assertEqual(self.d.ctl("get", "step-ms").stdout, "25\n")
        self.d.ctl("get", "nosuch", status=1)
        self.assertIn("nosuch", self.d.ctl("set", "nosuch=1", status=1).stderr)

    def test_drain_and_resume(self):
        self.d.ctl("drain")
        self.assertIn("draining", self.d.ctl("run", "x", status=1).stderr)
        self.assertIn("draining", self.d.ctl("status").stdout)
        self.d.ctl("resume")
        self.d.ctl("run", "x")

    def test_version_and_call(self):
        self.assertIn("skvd 0.1.0-fake", self.d.ctl("version").stdout)
        self.assertEqual(self.d.json("version")["daemon"]["server"], "skvd")
        self.assertEqual(json.loads(self.d.ctl("call", "tokenize", '{"text": "a"}').stdout), {"tokens": [97]})
        self.assertIn("unknown_method", self.d.ctl("call", "nosuch", status=1).stderr)

    def test_kill_of_a_stranger(self):
        self.assertIn("not_found", self.d.ctl("kill", "999999", status=1).stderr)


class Slow(WithFake):
    args = ("--delay-ms", "30", "--not-admin")

    def test_ctrl_c_stops_the_answer(self):
        p = subprocess.Popen([SKVCTL, "-s", self.d.socket, "run", "x"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        time.sleep(0.4)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=20)
        self.assertEqual(p.returncode, 1)
        self.assertIn("(stopped)", err)
        self.assertTrue(ANSWER.startswith(out.strip()) and out.strip(), out)
        self.assertGreaterEqual(self.d.json("status")["cancelled"], 1)

    def test_ps_of_one_who_may_not_see_all(self):
        p = subprocess.Popen([SKVCTL, "-s", self.d.socket, "run", "x"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(0.3)
        seqs = self.d.json("ps")
        self.assertEqual(len(seqs), 1)
        self.d.ctl("cancel", str(seqs[0]["id"]))
        self.assertEqual(p.wait(20), 1)
        self.assertIn("forbidden", self.d.ctl("kv", status=1).stderr)


class Sessions(WithFake):
    def test_a_session_stays_listed(self):
        self.d.ctl("run", "--session", "mine", "x")
        self.assertIn("mine", self.d.ctl("ps").stdout)


class Shutdown(unittest.TestCase):
    def test_shutdown(self):
        d = Fake()
        d.ctl("shutdown", "--grace-ms", "0")
        self.assertEqual(d.process.wait(10), 0)
        d.close()


def main():
    result = unittest.TextTestRunner(verbosity=1).run(unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"]))
    bad = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - bad} passed, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
