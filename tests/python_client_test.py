#!/usr/bin/env python3
"""The Python package against tests/fake_skvd.py: blocking and asyncio."""
import asyncio
import os
import sys
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.environ.get("top_srcdir") or os.path.dirname(HERE)
sys.dont_write_bytecode = True
sys.path[:0] = [os.path.join(TOP, "clients", "python"), os.path.join(TOP, "tests")]

try:
    import msgpack
except ImportError:
    print("python3 has no msgpack module: skipped")
    sys.exit(77)
import skvd  # noqa: E402
from client_test import ANSWER, Fake  # noqa: E402


class WithFake(unittest.TestCase):
    args = ()

    def setUp(self):
        self.d = Fake(*self.args)
        self.addCleanup(self.d.close)


class Blocking(WithFake):
    def setUp(self):
        super().setUp()
        self.c = skvd.Client(self.d.socket, timeout=30)
        self.addCleanup(self.c.close)

    def test_generate(self):
        r = self.c.generate("x", max_tokens=5, kv={"policy": "full"})
        self.assertEqual((r.finish, r.completion_tokens, r.kv.policy, r["kv"]["slots_kept"]), ("length", 5, "full", 90))
        self.assertGreaterEqual(r.timing.total_ms, 0)

    def test_stream(self):
        s = self.c.stream(messages=[{"role": "user", "content": "ECHO Grüße \U0001f600"}], logprobs=1)
        tokens = list(s)
        self.assertEqual("".join(t.text for t in tokens), "ECHO Grüße \U0001f600")
        self.assertEqual([t.i for t in tokens], list(range(len(tokens))))
        self.assertEqual(s.result.text, "ECHO Grüße \U0001f600")
        self.assertEqual(tokens[0].top[0][0], ord("E"))

    def test_two_streams_at_once(self):
        a, b = (self.c.stream(messages=[{"role": "user", "content": f"ECHO {i}"}]) for i in "ab")
        together = [(x.text, y.text) for x, y in zip(a, b)]
        self.assertEqual("".join(x for x, _ in together), "ECHO a")
        self.assertEqual("".join(y for _, y in together), "ECHO b")

    def test_small_methods(self):
        self.assertEqual(self.c.tokenize("hé<|im_end|>"), [104, 195, 169, 257])
        self.assertEqual(self.c.detokenize(iter([104, 105])), "hi")
        self.assertIn("assistant", self.c.apply_template([{"role": "user", "content": "x"}]).text)
        self.assertEqual(len(self.c.score("a", " b").logprobs), 2)
        self.assertEqual(self.c.hello().server, "skvd")
        self.assertEqual(self.c.status().pages_total, 1000)
        self.assertEqual(self.c.sequences(), [])
        self.assertEqual(len(self.c.kv().layers), 30)
        self.c.set(step_ms=7)
        self.assertEqual(self.c.get()["step-ms"], 7)
        with self.assertRaises(AttributeError):
            self.c.status().nosuch

    def test_errors(self):
        for error, call in ((skvd.BadRequest, lambda: self.c.generate("x", kv={"policy": "bogus"})),
                            (skvd.UnknownMethod, lambda: self.c.call("nosuch")),
                            (skvd.NotFound, lambda: self.c.kept(999)),
                            (skvd.ContextOverflow, lambda: self.c.generate("x" * 9000)),
                            (skvd.Overloaded, lambda: self.c.generate("x", session="busy"))):
            with self.assertRaises(error) as e:
                call()
            self.assertIsInstance(e.exception, skvd.Error)
            self.assertTrue(e.exception.message)
        self.assertEqual(e.exception.retry_after_ms, 250)
        with self.assertRaises(TypeError):
            self.c.generate("x", tokens=[1])
        self.assertEqual(self.c.generate("x").text, ANSWER)  # the connection is as good as before

    def test_events(self):
        events = self.c.subscribe("sequences")
        with skvd.Client(self.d.socket) as other:
            other.generate("x")
        self.assertEqual(next(events)["what"], "ended")

    def test_a_daemon_that_ends(self):
        threading.Timer(0.1, self.d.process.terminate).start()
        with self.assertRaises(skvd.NoDaemon):
            while True:
                self.c.generate("x")
                time.sleep(0.01)
        with self.assertRaises(skvd.NoDaemon):
            self.c.status()
        with self.assertRaises(ConnectionError):
            skvd.Client("/nonexistent/s")


class BlockingSlowly(WithFake):
    args = ("--delay-ms", "20")

    def test_leaving_a_stream_cancels(self):
        with skvd.Client(self.d.socket) as c:
            for token in c.stream("x", ignore_eos=True, max_tokens=10000):
                if token.i == 3:
                    break
            s = c.stream("x", ignore_eos=True, max_tokens=10000)
            next(iter(s))
            s.close()
            self.assertEqual((c.status().running, c.status().cancelled), (0, 2))

    def test_a_cancelled_answer_has_its_beginning(self):
        with skvd.Client(self.d.socket) as c:
            s = c.stream("x", ignore_eos=True, max_tokens=10000)
            it = iter(s)
            next(it), next(it)
            c.call("cancel", msgid=s._msgid)
            with self.assertRaises(skvd.Cancelled) as e:
                list(it)
            self.assertGreaterEqual(e.exception.result["completion_tokens"], 2)
            self.assertTrue(ANSWER.startswith(e.exception.result["text"]))

    def test_a_silent_daemon(self):
        with skvd.Client(self.d.socket, timeout=0.005) as c:
            with self.assertRaises(skvd.NoDaemon):
                c.generate("x")


class Asyncio(WithFake):
    args = ("--delay-ms", "2")

    def run_with(self, work):
        async def main():
            async with await skvd.AsyncClient.connect(self.d.socket) as c:
                return await asyncio.wait_for(work(c), 30)
        return asyncio.run(main())

    def test_many_at_once(self):
        async def work(c):
            return await asyncio.gather(*(c.generate(messages=[{"role": "user", "content": f"ECHO {i}"}]) for i in range(20)))
        self.assertEqual([r.text for r in self.run_with(work)], [f"ECHO {i}" for i in range(20)])

    def test_stream(self):
        async def work(c):
            s = c.stream("x", max_tokens=12)
            texts = [t.text async for t in s]
            return "".join(texts), s.result, await c.tokenize("hi"), await c.status()
        text, result, tokens, status = self.run_with(work)
        self.assertEqual((text, result.finish, tokens), (result.text, "length", [104, 105]))
        self.assertTrue(ANSWER.startswith(text) and text)
        self.assertEqual(status.running, 0)

    def test_leaving_cancels(self):
        async def work(c):
            async with c.stream("x", ignore_eos=True, max_tokens=10000) as s:
                async for token in s:
                    if token.i == 3:
                        break
            task = asyncio.create_task(c.generate("x", ignore_eos=True, max_tokens=10000))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.1)
            return await c.status()
        status = self.run_with(work)
        self.assertEqual((status.running, status.cancelled), (0, 2))

    def test_errors(self):
        async def work(c):
            with self.assertRaises(skvd.BadRequest):
                await c.generate("x", kv={"policy": "bogus"})
            with self.assertRaises(skvd.BadRequest):
                async for _ in c.stream("x", kv={"policy": "bogus"}):
                    pass
            self.d.process.terminate()
            with self.assertRaises(skvd.NoDaemon):
                while True:
                    await c.generate("x")
            with self.assertRaises(skvd.NoDaemon):
                await c.status()
        self.run_with(work)

    def test_events(self):
        async def work(c):
            events = await c.subscribe("sequences")
            await c.generate("x", max_tokens=1)
            return await events.__anext__()
        self.assertEqual(self.run_with(work)["what"], "ended")


class Frames(unittest.TestCase):
    def test_what_is_no_rpc_is_refused(self):
        for data in (b"\xc1", b"HTTP/1.1 400\r\n", msgpack.packb([0, 1, "x", []]), msgpack.packb([1, 2, 3]),
                     msgpack.packb({"a": 1}), msgpack.packb([1, "x", None, None]), b"\x94\x01\x01\xc0\xa2\xff\xff"):
            with self.assertRaises(skvd.ProtocolError):
                skvd.wire.Frames().feed(data)

    def test_byte_by_byte(self):
        f = skvd.wire.Frames()
        data = msgpack.packb([1, 7, None, {"a": {"b": 1}}]) + msgpack.packb([2, "event", [{"x": 1}]])
        got = [m for i in range(len(data)) for m in f.feed(data[i:i + 1])]
        self.assertEqual([m[0] for m in got], [1, 2])
        self.assertEqual(got[0][3].a.b, 1)

    def test_none_is_left_out(self):
        self.assertEqual(msgpack.unpackb(skvd.wire.request(3, "m", {"a": None, "b": 0})), [0, 3, "m", [{"b": 0}]])
        self.assertEqual(msgpack.unpackb(skvd.wire.request(3, "m", {})), [0, 3, "m", []])


def main():
    result = unittest.TextTestRunner(verbosity=1).run(unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"]))
    bad = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - bad} passed, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
