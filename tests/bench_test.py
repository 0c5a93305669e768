#!/usr/bin/env python3
"""The benches' own arithmetic: figures of a job, limits from a file's shape, the SVG writer, tables."""
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import types
import unittest
import xml.dom.minidom

TOP = os.environ.get("top_srcdir") or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.environ.get("top_builddir") or os.path.join(TOP, "build")
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(TOP, "bench"))

import figures  # noqa: E402
import ggufshape  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import svg  # noqa: E402


class Figures(unittest.TestCase):
    def test_job(self):
        # Two requests; the second begins at 2 s. Both decode from 2 s to 4 s: tokens at 3, 4 of the first, 3 of the second.
        f = figures.of_job([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 5.0]], 5.0)
        self.assertEqual(f["batch"], 2)
        self.assertAlmostEqual(f["decode_tok_s"], 3 / 2)
        self.assertAlmostEqual(f["output_tok_s"], 7 / 5)
        self.assertAlmostEqual(f["ttft_p50_s"], 1.5)
        self.assertAlmostEqual(f["itl_p50_ms"], 1000)
        self.assertAlmostEqual(f["itl_max_ms"], 2000)

    def test_quantile(self):
        self.assertEqual(figures.quantile([3, 1, 2], 0.5), 2)
        self.assertAlmostEqual(figures.quantile([0, 10], 0.99), 9.9)
        self.assertIsNone(figures.quantile([], 0.5))

    def test_none_at_once(self):
        f = figures.of_job([[1.0, 2.0], [3.0, 4.0]], 4.0)
        self.assertEqual(f["batch"], 1)
        self.assertAlmostEqual(f["decode_tok_s"], 1.0)

    def test_silent(self):
        self.assertIsNone(figures.of_job([[], []], 1.0, 2)["ttft_p50_s"])


class Shape(unittest.TestCase):
    def shape(self, *args):
        with tempfile.TemporaryDirectory() as tmp:
            path = os.path.join(tmp, "m.gguf")
            subprocess.run([os.path.join(BUILD, "tests/random-model"), *args, path], check=True)
            return ggufshape.Shape(path)

    def test_tiny_gqa(self):
        s = self.shape("--preset", "tiny-gqa")
        body = 4 * (2 * 256 * 768 + 2 * 256 * 256 + 3 * 256 * 512)
        self.assertEqual(s.body, (body, body // 32 * 20))
        self.assertEqual(s.head, (1024 * 256, 1024 * 256 // 32 * 34))
        self.assertEqual(s.kv_bytes(), 2 * 4 * 4 * 64 * 2)

    def test_limits(self):
        s = self.shape("--preset", "tiny-gqa")
        self.assertAlmostEqual(s.decode_limit(0, 1, 1e9), 1e9 / (s.body[1] + s.head[1]))
        self.assertGreater(s.prefill_limit(128, 1e12, 1e12), s.prefill_limit(4096, 1e12, 1e12))

    def test_no_gguf(self):
        with self.assertRaises(ValueError):
            ggufshape.Shape(__file__)


class Shares(unittest.TestCase):
    """skvd's share of the limit: each round's of the better of the probes around it, the median of them."""

    def test_in_turn(self):
        class Machine(run.Records):
            def probe(self, rates=iter([100, 80, 50, 40, 10, 20])):
                return {"limits": {"mem": {"one": 1, "all": 200, "mean": next(rates), "unit": "GB/s"}}}
        rec = Machine(types.SimpleNamespace(out=None))
        rates = iter([90, 25, 19])
        with contextlib.redirect_stderr(io.StringIO()):
            run.in_turn(types.SimpleNamespace(rounds=3), rec, "engine", "decode 0",
                        [("skvd full", lambda: next(rates)), ("llama.cpp", lambda: 10)], lambda limits: limits["mem"]["mean"])
        ours, theirs = rec.all
        self.assertEqual(ours["shares"], [0.9, 0.5, 0.95])
        self.assertEqual(ours["share"], 0.9)
        self.assertEqual(theirs["skvd_is"], 2.5)
        self.assertNotIn("share", theirs)

    def test_better(self):
        self.assertEqual(run.better({"a": {"one": 1, "all": 5, "mean": 3, "unit": "x"}}, {"a": {"one": 2, "all": 4, "mean": 4, "unit": "x"}}),
                         {"a": {"one": 2, "all": 5, "mean": 4, "unit": "x"}})


class Drawing(unittest.TestCase):
    def test_svg(self):
        s = svg.chart("A & B", "x", "y", [("one", [(1, 2), (10, 20)]), ("two", [(1, 5), (10, 5)])], "note")
        d = xml.dom.minidom.parseString(s)
        lines = d.getElementsByTagName("polyline")
        self.assertEqual(len(lines), 2)
        ys = [float(p.split(",")[1]) for p in lines[0].getAttribute("points").split()]
        self.assertGreater(ys[0], ys[1]) # more is higher up
        flat = [float(p.split(",")[1]) for p in lines[1].getAttribute("points").split()]
        self.assertEqual(flat[0], flat[1])

    def test_tables(self):
        records = [{"part": "engine", "row": "prefill 512", "who": "skvd full", "tokens_per_s": 900.0, "skvd_is": 1.0, "share": 0.4},
                   {"part": "engine", "row": "prefill 512", "who": "llama.cpp", "tokens_per_s": 300.0, "skvd_is": 3.0},
                   {"part": "engine", "row": "prefill 512", "who": "skvd full", "tokens_per_s": 950.0, "skvd_is": 1.0, "share": 0.5}]
        t = report.tables(records)
        self.assertIn("| prefill 512 | 950       | 50 %     | 300       | 3.00x   |", t)


if __name__ == "__main__":
    r = unittest.main(exit=False, verbosity=0).result
    bad = len(r.failures) + len(r.errors)
    print("%d passed, %d failed" % (r.testsRun - bad, bad))
    sys.exit(1 if bad else 0)
