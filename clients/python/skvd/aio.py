"""The asyncio client."""
import asyncio
import itertools

from . import errors, wire

_END = object()


class AsyncStream:
    """The tokens of a running `generate`: `async for` gives Records with i, token, text (and logprob, top). Afterwards `result` is
    the whole answer. Leaving early (aclose, async with, the task's cancellation) cancels the request; after a plain
    `break` say so with aclose()."""

    def __init__(self, client, msgid):
        self._client = client
        self._msgid = msgid
        self._queue = asyncio.Queue()
        self._ended = asyncio.Event()
        self._error = None
        self.result = None

    def _note(self, method, value):
        if method == "token":
            self._queue.put_nowait(value)

    def _end(self, error, result):
        self._error, self.result = error, result
        self._ended.set()
        self._queue.put_nowait(_END)

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self._client._forget(self._msgid)
            raise
        if item is not _END:
            return item
        self._queue.put_nowait(_END)  # whoever asks again hears the same
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def text(self):
        """All of the text that is still to come."""
        return "".join([t.text async for t in self])

    async def aclose(self):
        """Cancel the request unless it has ended, and wait for its end."""
        if not self._ended.is_set():
            self._client._forget(self._msgid)
            await self._ended.wait()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.aclose()


class _Call:
    def __init__(self):
        self.future = asyncio.get_running_loop().create_future()

    def _note(self, method, value):
        pass

    def _end(self, error, result):
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class AsyncClient(wire.Methods):
    """A connection to skvd for one event loop; any number of requests at a time. A task that is cancelled while it waits
    for an answer has its request cancelled."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._open = {}
        self._frames = wire.Frames()
        self._last_words = None
        self._over = None
        self._events = []  # queues of subscribers
        self._task = asyncio.get_running_loop().create_task(self._pump())

    @classmethod
    async def connect(cls, path=None):
        path = path or wire.default_path()
        try:
            return cls(*await asyncio.open_unix_connection(path))
        except OSError as e:
            raise errors.NoDaemon(f"no daemon at {path}: {e.strerror or e}; start one with: skvd --model FILE "
                                  f"--socket {path}") from e

    async def close(self):
        self._stop(errors.NoDaemon("the connection was closed by this program"))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._writer.wait_closed()
        except OSError:
            pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.close()

    def _stop(self, error):
        if self._over is not None:
            return
        self._over = self._last_words or error
        self._writer.close()
        for entry in list(self._open.values()):
            entry._end(self._over, None)
        self._open.clear()
        for queue in self._events:
            queue.put_nowait(_END)

    async def _pump(self):
        try:
            while data := await self._reader.read(1 << 16):
                for message in self._frames.feed(data):
                    self._take(*message)
            self._stop(errors.NoDaemon("the daemon closed the connection"))
        except OSError as e:
            self._stop(errors.NoDaemon(f"the connection is over: {e.strerror or e}"))
        except errors.ProtocolError as e:
            self._stop(e)

    def _take(self, kind, name, error, value):
        if kind == wire.RESPONSE:
            entry = self._open.pop(name, None)
            if entry is not None:
                entry._end(None if error is None else errors.from_wire(error), value)
            return
        msgid, told = wire.owner(value)
        if msgid is not None:
            if msgid in self._open:
                self._open[msgid]._note(name, told)
            return
        if name == "error":
            self._last_words = errors.from_wire(told)
        for queue in self._events if name == "event" else []:
            queue.put_nowait(told)

    def _send(self, entry, method, args):
        if self._over is not None:
            raise self._over
        msgid = next(self._ids)
        data = wire.request(msgid, method, args)
        self._open[msgid] = entry
        self._writer.write(data)
        return msgid

    def _forget(self, msgid):
        """Have a request cancelled without waiting for the answer to that."""
        if self._over is None and msgid in self._open:
            self._writer.write(wire.request(next(self._ids), "cancel", {"msgid": msgid}))

    async def call(self, method, **args):
        """Any method: its result, or an Error."""
        entry = _Call()
        msgid = self._send(entry, method, args)
        try:
            await self._writer.drain()
            return await entry.future
        except asyncio.CancelledError:
            self._forget(msgid)
            raise
        except OSError as e:
            self._stop(errors.NoDaemon(f"the connection is over: {e.strerror or e}"))
            return await entry.future

    async def _pick(self, field, method, **args):
        return (await self.call(method, **args))[field]

    def stream(self, prompt=None, *, messages=None, tokens=None, **args):
        """Start a `generate`; `async for` over the AsyncStream for its tokens."""
        stream = AsyncStream(self, 0)
        stream._msgid = self._send(stream, "generate", wire.prompt_args(prompt, messages, tokens, args))
        return stream

    async def subscribe(self, *topics):
        """An endless asynchronous iterator over the daemon's events (maps), for administrators."""
        queue = asyncio.Queue()
        self._events.append(queue)
        await self.call("subscribe", topics=list(topics))
        return self._told(queue)

    async def _told(self, queue):
        try:
            while (told := await queue.get()) is not _END:
                yield told
        finally:
            self._events.remove(queue)
