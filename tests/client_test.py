#!/usr/bin/env python3
"""skvctl's commands against tests/fake_skvd.py: what they print, what they send, how they exit."""
import json
import os
import pty
import re
import shutil
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


class Bench(WithFake):
    args = ("--delay-ms", "1")

    def test_figures_add_up(self):
        j = self.d.json("bench", "-c", "3", "-r", "7", "-i", "90", "-n", "20", "--compare", "full,sparse")
        self.assertEqual([r["label"] for r in j["runs"]], ["full", "sparse"])
        for r in j["runs"]:
            self.assertEqual((r["ok"], r["failed"], r["prompt_tokens"], r["output_tokens"]), (7, 0, 630, 140))
            self.assertEqual(r["decode_batch"], 3)
            self.assertAlmostEqual(r["output_tok_s"], 140e3 / r["wall_ms"], delta=0.1)
            self.assertLessEqual(r["ttft_p50_ms"], r["ttft_max_ms"])
            self.assertGreater(r["itl_p50_ms"], 1.0)  # the fake daemon waits 1 ms before each token
            self.assertLessEqual(r["itl_p99_ms"], r["itl_max_ms"])
            self.assertLessEqual(19 * r["itl_mean_ms"], r["request_max_ms"] + 1)  # the mean request has 19 gaps
        self.assertEqual(j["runs"][0]["kept_share"], 1.0)
        self.assertAlmostEqual(j["ratios"][0]["kept_share"], j["runs"][1]["kept_share"], places=6)
        self.assertAlmostEqual(j["ratios"][0]["wall_ms"], j["runs"][1]["wall_ms"] / j["runs"][0]["wall_ms"], places=6)

    def test_a_table_and_prompts_of_a_file(self):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
            for i in range(3):
                print(json.dumps({"i": i, "tokens": [i + 65] * (10 + i)}), file=f)
            f.flush()
            out = self.d.ctl("bench", "-c", "2", "-r", "3", "-n", "4", "-f", f.name).stdout
            self.assertIn("10 to 12 tokens in", out)
            self.assertRegex(out, r"finished +3\n")
            self.assertRegex(out, r"first token P50 +[0-9.]+ ms")
            j = self.d.json("bench", "-c", "2", "-r", "3", "-n", "4", "-i", "5", "-f", f.name)
            self.assertEqual(j["runs"][0]["prompt_tokens"], 15)

    def test_failures_are_counted(self):
        r = self.d.ctl("--json", "bench", "-c", "2", "-r", "4", "-n", "4", "-i", "9000", "--warmup", "0", status=1)
        run = json.loads(r.stdout)["runs"][0]
        self.assertEqual((run["ok"], run["failures"]), (0, {"context_overflow": 4}))


class Eval(WithFake):
    file = os.path.join(TOP, "tests", "data", "eval.jsonl")

    def eval(self, *args):
        return self.d.json("eval", self.file, *args)["sizes"][0]["variants"]

    def test_the_full_cache_is_the_measure(self):
        v = self.eval("--kv", "policy=full", "--kv", "policy=snapkv,ratio=0.9")
        self.assertEqual([x["label"] for x in v], ["full", "full", "snapkv r=0.9"])
        self.assertEqual((v[0]["mean"], v[0]["kl"], v[1]["mean"], v[1]["kl"], v[1]["kl_text"]), (1, 0, 1, 0, 0))
        self.assertEqual(v[0]["tasks"], v[1]["tasks"])
        self.assertEqual({k: t["n"] for k, t in v[0]["tasks"].items()}, {"number": 4, "colour": 4, "recite": 4, "continue": 4})
        self.assertLess(v[2]["kept"], 0.25)
        self.assertLess(v[2]["mean"], 1)
        self.assertGreater(v[2]["kl"], 0.1)
        self.assertGreater(v[2]["tasks"]["continue"]["nll"], v[0]["tasks"]["continue"]["nll"])

    def test_the_mean_is_the_capped_mean_over_tasks(self):
        v = self.eval("--ratio", "0.5")[1]
        scored = [t for name, t in v["tasks"].items() if name != "continue"]
        want = sum(min(1, t["relative"]) for t in scored) / len(scored)
        self.assertAlmostEqual(v["mean"], want, places=6)
        self.assertAlmostEqual(v["kl"], sum(t["kl"] for t in scored) / len(scored), places=6)

    def test_a_record_is_scored_as_the_daemon_said(self):
        """One record by hand: the right answer is known where its tokens are all the likeliest."""
        with open(self.file) as f:
            rec = json.loads(f.readline())
        prompt = (f"<|im_start|>user\n{rec['context']}{rec['question']}<|im_end|>\n<|im_start|>assistant\n"
                  f"{rec['answer_prefix']}")
        call = {"prompt": prompt, "continuation": rec["answer"], "logprobs": 2, "kv": {"policy": "full"}}
        said = json.loads(self.d.ctl("call", "score", json.dumps(call)).stdout)
        known = all(row[0][0] == t for row, t in zip(said["top"], said["tokens"]))
        with tempfile.TemporaryDirectory() as d:
            self.eval("--tasks", "number", "-d", d + "/x")
            with open(d + "/x") as f:
                first = json.loads(f.readline())
        self.assertEqual(first["id"], rec["id"])
        self.assertEqual(first["prompt_tokens"], len(json.loads(self.d.ctl("--json", "tokenize", input=prompt).stdout)["tokens"]))
        self.assertEqual(first["variants"][0]["score"], float(known))

    def test_progress_without_a_terminal(self):
        said = {}
        for every in "0.001", "0", "":
            r = subprocess.run([SKVCTL, "-s", self.d.socket, "--json", "eval", self.file, "--ratio", "0.9", "-c", "1"],
                               capture_output=True, text=True, env=dict(os.environ, SKVCTL_PROGRESS=every))
            self.assertEqual(r.returncode, 0, r.stderr)
            json.loads(r.stdout)
            said[every] = r.stderr.splitlines()
        self.assertGreater(len(said["0.001"]), 3)
        shares = []
        for line in said["0.001"]:
            self.assertRegex(line, r"^skvctl: +\d+ %  \d+ of 16 records, \d+ requests in flight$")
            shares.append(int(line.split()[1]))
        self.assertEqual(shares, sorted(shares))
        self.assertEqual((said["0"], said[""]), ([], []))  # never; and this one was done within ten seconds

    def test_orders_and_ways(self):
        for order in "tail", "header", "context":
            for way in "score", "generate":
                v = self.eval("--order", order, "--by", way, "--ratio", "0.9")
                self.assertEqual((v[0]["failed"], v[1]["failed"]), (0, 0), (order, way))

    def test_halves(self):
        ids = []
        for half in "A", "B":
            with tempfile.TemporaryDirectory() as d:
                self.eval("--split", half, "-d", d + "/x")
                with open(d + "/x") as f:
                    ids.append({json.loads(line)["id"] for line in f})
        self.assertFalse(ids[0] & ids[1])
        self.assertEqual(len(ids[0] | ids[1]), 16)
        self.assertEqual(len(ids[0]), 8)
        for half in ids:  # records of one context stay together
            self.assertEqual({i.split("-")[0] for i in half if i.endswith("a")},
                             {i.split("-")[0] for i in half if i.endswith("b")})

    def test_a_baseline_gives_the_same(self):
        with tempfile.TemporaryDirectory() as d:
            args = ("--ratio", "0.75", "-b", d + "/base")
            first = self.eval(*args)
            with open(d + "/base") as f:
                self.assertEqual(len(f.readlines()), 16)
            again = self.eval(*args)
        for a, b in zip(first, again):
            for task in a["tasks"]:
                for key, value in a["tasks"][task].items():
                    self.assertAlmostEqual(value, b["tasks"][task][key], places=7)

    def test_a_daemon_that_tells_less(self):
        d = Fake("--plain-score")
        v = json.loads(d.ctl("--json", "eval", self.file, "--tasks", "continue").stdout)["sizes"][0]["variants"]
        self.assertIsNone(v[1]["kl"])
        self.assertGreater(v[1]["tasks"]["continue"]["nll"], 0)
        d.close()

    def test_bad_files(self):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
            print('{"task": "x", "answer": "y", "score": "nosuch"}', file=f, flush=True)
            self.assertIn(f.name + ":1: score must be", self.d.ctl("eval", f.name, status=2).stderr)
        self.d.ctl("eval", "/nonexistent", status=2)
        self.d.ctl("eval", self.file, "--ratio", "1.5", status=2)
        self.d.ctl("eval", self.file, "--order", "nosuch", status=2)


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
        self.assertIn("none of your sequences", self.d.ctl("cancel", str(seqs[0]["id"] + 1000), status=1).stderr)
        self.assertIn("forbidden", self.d.ctl("kill", str(seqs[0]["id"]), status=1).stderr)
        self.assertEqual(self.d.ctl("cancel", str(seqs[0]["id"])).stdout, "cancelled\n")
        self.assertEqual(p.wait(20), 1)
        self.assertIn("forbidden", self.d.ctl("kv", status=1).stderr)


class Inspect(WithFake):
    def setUp(self):
        if not self.d.json("ps"):
            self.d.ctl("run", "--session", "s", "word " * 40)
        self.seq = str(self.d.json("ps")[0]["id"])

    def test_the_map(self):
        lines = self.d.ctl("inspect", self.seq, "-w", "50").stdout.splitlines()
        self.assertEqual(len(lines), 33)
        full, sparse = lines[0], lines[29]
        self.assertIn("\u2588" * 50 + " 100 %", full)
        self.assertNotIn("100 %", sparse)
        kept = self.d.json("inspect", self.seq)
        share = sum(len(h["positions"]) for h in kept["layers"][29]["heads"]) / (3 * kept["n"])
        self.assertIn(f" {100 * share:.0f} %", sparse)
        self.assertIn(f"{kept['n']} positions, 30 layers, 3 KV heads", lines[31])

    def test_the_picture(self):
        import xml.etree.ElementTree as tree
        root = tree.fromstring(self.d.ctl("inspect", self.seq, "--svg", "-").stdout)
        rects = [e for e in root.iter() if e.tag.endswith("rect")]
        texts = [e.text for e in root.iter() if e.tag.endswith("text")]
        self.assertEqual(len(rects), 31)  # the paper and one a layer
        self.assertIn("29 sparse", texts)
        # A full layer's heads are one rectangle each; a sparse one's are the runs of positions held.
        y = {e.get("y"): [] for e in rects[1:]}
        self.assertEqual(len(y), 30)
        kept = self.d.json("inspect", self.seq)
        runs = sum(1 + sum(b != a + 1 for a, b in zip(h["positions"], h["positions"][1:]))
                   for layer in kept["layers"] for h in layer["heads"])
        paths = [e for e in root.iter() if e.tag.endswith("path") and e.get("fill")]
        self.assertEqual(len(paths), runs)

    def test_top_into_a_pipe_is_one_look(self):
        out = self.d.ctl("top").stdout
        self.assertIn("full 0-2 sparse 3-29", out)
        self.assertNotIn("\033", out)
        self.assertIn("kv", self.d.json("top"))

    def test_a_stranger(self):
        self.assertIn("not_found", self.d.ctl("inspect", "99999", status=1).stderr)
        self.d.ctl("inspect", self.seq, "--head", "7", status=1)


class Chat(WithFake):
    def chat(self, text, *args, status=0):
        return self.d.ctl("chat", *args, input=text, status=status)

    def test_only_what_is_new_is_sent(self):
        self.assertEqual(self.chat("ECHO one\nECHO two\n").stdout, "ECHO one\nECHO two\n")

    def test_without_a_session_all_is_sent(self):
        self.assertEqual(self.chat("ECHO one\nECHO two\n", "--no-session").stdout,
                         "ECHO one\nECHO one / ECHO one / ECHO two\n")

    def test_a_lost_session_is_made_up_for(self):
        p = subprocess.Popen([SKVCTL, "-s", self.d.socket, "chat", "--session", "lost"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        p.stdin.write("ECHO one\n")
        p.stdin.flush()
        self.assertEqual(p.stdout.readline(), "ECHO one\n")
        self.d.ctl("kill", str(next(s["id"] for s in self.d.json("ps") if s["session"] == "lost")))
        out, err = p.communicate("ECHO two\n", timeout=30)
        self.assertEqual(out, "ECHO one / ECHO one / ECHO two\n")
        self.assertIn("sending the conversation again", err)

    def test_commands(self):
        out = self.chat("/system brief\nECHO a\n/new\nECHO b\n/nosuch\n/quit\nECHO c\n").stdout
        self.assertIn("brief / ECHO a\nbrief / ECHO b\n", out)
        self.assertIn("/stats", out)
        self.assertNotIn("ECHO c", out)

    def test_lines_that_go_on(self):
        self.assertEqual(self.chat("ECHO a\\\nb\n").stdout, "ECHO a\nb\n")

    def test_errors_end_a_chat_without_a_terminal(self):
        self.assertIn("queue is full", self.chat("x\ny\n", "--session", "busy", status=1).stderr)


@unittest.skipUnless(shutil.which("tmux"), "tmux is not installed")
class Terminal(unittest.TestCase):
    """What a person sees, in a terminal of 100 x 30."""

    def setUp(self):
        self.d = Fake("--delay-ms", "15")
        self.home = tempfile.TemporaryDirectory()
        self.tmux_socket = os.path.join(self.home.name, "tmux")

    def tearDown(self):
        self.tmux("kill-server", check=False)
        self.d.close()
        self.home.cleanup()

    def tmux(self, *args, check=True):
        r = subprocess.run(["tmux", "-S", self.tmux_socket, "-f", "/dev/null", *args], capture_output=True, text=True,
                           timeout=20)
        if check:
            self.assertEqual(r.returncode, 0, r.stderr)
        return r.stdout

    def start(self, *args):
        env = {**os.environ, "HOME": self.home.name, "XDG_STATE_HOME": self.home.name, "LC_ALL": "C.UTF-8"}
        r = subprocess.run(["tmux", "-S", self.tmux_socket, "-f", "/dev/null", "-u", "new-session", "-d", "-x", "100", "-y",
                            "30", " ".join([SKVCTL, "-s", self.d.socket, *args]) + "; echo ended with $?; sleep 30"],
                           env=env, capture_output=True, text=True, timeout=20)
        self.assertEqual(r.returncode, 0, r.stderr)

    def keys(self, *keys):
        self.tmux("send-keys", *keys)

    def wait_for(self, text, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            screen = self.tmux("capture-pane", "-p")
            if text(screen) if callable(text) else text in screen:
                return screen
            time.sleep(0.1)
        self.fail(f"'{text}' did not appear in:\n{screen}")

    def test_chat(self):
        self.start("chat")
        self.wait_for("ends.\n>")
        self.keys("hello", "Enter")
        self.wait_for("one two")
        self.keys("C-c")  # stops the answer, not the program
        screen = self.wait_for("(stopped)")
        self.assertNotIn("nine ten.", screen)
        self.keys("half a line", "C-c")  # at the prompt: another line
        self.keys("ECHO again", "Enter")
        self.wait_for(" / ECHO again")
        self.keys("Up")  # history
        self.wait_for(lambda screen: screen.count("> ECHO again") == 2)
        self.keys("C-c")
        self.wait_for(lambda screen: screen.rstrip().endswith("\n>"))
        self.keys("C-d")
        self.wait_for("ended with 0")
        with open(os.path.join(self.home.name, "skvd", "chat_history")) as f:
            self.assertIn("again", f.read())

    def test_top(self):
        p = subprocess.Popen([SKVCTL, "-s", self.d.socket, "run", "--ignore-eos", "-n", "1000", "x"], stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL)
        self.start("top", "-d", "0.2")
        screen = self.wait_for("decode")
        self.assertIn("1 running", screen)
        self.assertIn("full 0-2 sparse 3-29", screen)
        self.keys("s")
        self.wait_for("(now KV)")
        p.terminate()
        p.wait(10)
        self.wait_for("no sequences")
        self.tmux("resize-window", "-x", "60", "-y", "12")
        self.wait_for("no sequences")
        self.keys("q")
        self.wait_for("ended with 0")

    def test_inspect_in_colours(self):
        self.d.ctl("run", "--session", "s", "word " * 20)
        self.start("inspect", "1")
        screen = self.wait_for("held by all heads")
        self.assertIn("\u2580" * 80, screen)
        self.assertIn("100 % 100 %", screen)
        self.assertIn("\033[38;5;", self.tmux("capture-pane", "-p", "-e"))

    def test_a_progress_bar(self):
        self.start("bench", "-c", "2", "-r", "8", "-n", "60", "-i", "30")
        self.wait_for("of 8 done")
        self.wait_for("between tokens P50")
        self.assertNotIn("of 8 done", self.wait_for("ended with 0"))


class Sessions(WithFake):
    def test_a_session_stays_listed(self):
        self.d.ctl("run", "--session", "mine", "x")
        self.assertIn("mine", self.d.ctl("ps").stdout)

    def test_a_name_keeps_to_its_cell(self):
        self.d.ctl("run", "--session", "a\u202eb\u2028c\u2067d\u009be", "x")
        self.assertIn("a?b?c?d?e", self.d.ctl("ps").stdout)
        self.assertIn("\u009be", self.d.ctl("--json", "ps").stdout)
        master, slave = pty.openpty()
        p = subprocess.Popen([SKVCTL, "-s", self.d.socket, "--json", "ps"], stdout=slave)
        self.assertEqual(p.wait(20), 0)
        said = os.read(master, 65536).decode()
        os.close(slave)
        os.close(master)
        self.assertIn("\ufffde", said)
        self.assertNotIn("\u009b", said)


class Cancel(WithFake):
    args = ("--delay-ms", "30")

    def test_cancel(self):
        for args in ((), ("--mine",)):
            p = subprocess.Popen([SKVCTL, "-s", self.d.socket, "run", "--ignore-eos", "-n", "5000", "x"],
                                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not self.d.json("ps"):
                time.sleep(0.05)
            self.d.ctl("cancel", *(args or [str(self.d.json("ps")[0]["id"])]))
            self.assertEqual(p.wait(20), 1)


class LongPrompt(WithFake):
    args = ("--delay-ms", "1200")

    def test_run_says_how_much_is_read(self):
        for every, said in ("0.001", True), ("", False):
            r = subprocess.run([SKVCTL, "-s", self.d.socket, "run", "-n", "1", "word " * 50], stdin=subprocess.DEVNULL,
                               capture_output=True, text=True, env=dict(os.environ, SKVCTL_PROGRESS=every))
            self.assertEqual((r.returncode, r.stdout), (0, "G\n"), r.stderr)
            self.assertEqual(bool(re.search(r"skvctl: +75 %  \d+ of \d+ prompt tokens read\n", r.stderr)), said, r.stderr)


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
