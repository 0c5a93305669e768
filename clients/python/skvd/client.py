"""The blocking client."""
import collections
import itertools
import socket

from . import errors, wire


class Stream:
    """The tokens of a running `generate`: iterate for Records with i, token, text (and logprob, top). Afterwards `result` is the
    whole answer. Leaving early (break, close, with) cancels the request."""

    def __init__(self, client, msgid):
        self._client = client
        self._msgid = msgid
        self._waiting = collections.deque()
        self._ended = False
        self._error = None
        self.result = None

    def _note(self, method, value):
        if method == "token":
            self._waiting.append(value)

    def _end(self, error, result):
        self._ended, self._error, self.result = True, error, result

    def __iter__(self):
        try:
            while True:
                while self._waiting:
                    yield self._waiting.popleft()
                if self._ended:
                    break
                self._client._read()
            if self._error is not None:
                raise self._error
        finally:
            self.close()

    def text(self):
        """All of the text that is still to come."""
        return "".join(t.text for t in self)

    def close(self):
        """Cancel the request unless it has ended."""
        if self._ended or self._client._socket is None:
            return
        self._waiting.clear()
        self._client.call("cancel", msgid=self._msgid)
        while not self._ended:
            self._client._read()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class _Call:
    def __init__(self):
        self.ended, self.error, self.result = False, None, None

    def _note(self, method, value):
        pass

    def _end(self, error, result):
        self.ended, self.error, self.result = True, error, result


class Client(wire.Methods):
    """A connection to skvd. Not to be shared between threads; several streams at a time are fine."""

    def __init__(self, path=None, *, timeout=None):
        """path: the socket (default: wire.default_path()); timeout: seconds without a byte from the daemon."""
        self.path = path or wire.default_path()
        self.events = collections.deque()  # notifications of no request: ("event", map)
        self._ids = itertools.count(1)
        self._open = {}
        self._frames = wire.Frames()
        self._last_words = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(self.path)
        except OSError as e:
            self._socket.close()
            self._socket = None
            raise errors.NoDaemon(f"no daemon at {self.path}: {e.strerror or e}; start one with: skvd --model FILE "
                                  f"--socket {self.path}") from e

    def close(self):
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._fail(errors.NoDaemon("the connection was closed by this program"))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def _fail(self, error):
        for entry in list(self._open.values()):
            entry._end(error, None)
        self._open.clear()

    def _send(self, entry, method, args, msgid=None):
        msgid = msgid or next(self._ids)
        if self._socket is None:
            raise errors.NoDaemon("the connection is closed")
        data = wire.request(msgid, method, args)
        self._open[msgid] = entry
        try:
            self._socket.sendall(data)
        except OSError as e:
            self._lost(errors.NoDaemon(f"the connection is over: {e.strerror or e}"), e)
        return msgid

    def _lost(self, error, cause=None):
        """The daemon's own last words are the better reason."""
        error = self._last_words or error
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._fail(error)
        raise error from cause

    def _read(self):
        """Wait for bytes and hand out what they say."""
        if self._socket is None:
            raise errors.NoDaemon("the connection is closed")
        try:
            data = self._socket.recv(1 << 16)
        except socket.timeout as e:
            raise errors.NoDaemon("the daemon has sent nothing for too long") from e
        except OSError as e:
            self._lost(errors.NoDaemon(f"the connection is over: {e.strerror or e}"), e)
        if not data:
            self._lost(errors.NoDaemon("the daemon closed the connection"))
        try:
            messages = self._frames.feed(data)
        except errors.ProtocolError as e:
            self._lost(e)
        for kind, name, error, value in messages:
            if kind == wire.RESPONSE:
                entry = self._open.pop(name, None)
                if entry is not None:
                    entry._end(None if error is None else errors.from_wire(error), value)
                continue
            msgid, told = wire.owner(value)
            if msgid is None and name == "error":
                self._last_words = errors.from_wire(told)
            if msgid is None:
                self.events.append((name, told))
            elif msgid in self._open:
                self._open[msgid]._note(name, told)

    def call(self, method, **args):
        """Any method: its result, or an Error."""
        entry = _Call()
        self._send(entry, method, args)
        while not entry.ended:
            self._read()
        if entry.error is not None:
            raise entry.error
        return entry.result

    def _pick(self, field, method, **args):
        return self.call(method, **args)[field]

    def stream(self, prompt=None, *, messages=None, tokens=None, **args):
        """Start a `generate`; iterate over the Stream for its tokens."""
        args = wire.prompt_args(prompt, messages, tokens, args)
        stream = Stream(self, next(self._ids))
        self._send(stream, "generate", args, stream._msgid)
        return stream

    def subscribe(self, *topics):
        """An endless iterator over the daemon's events (maps), for administrators."""
        self.call("subscribe", topics=list(topics))
        return self._events()

    def _events(self):
        while True:
            while self.events:
                name, told = self.events.popleft()
                if name == "event":
                    yield told
            self._read()
