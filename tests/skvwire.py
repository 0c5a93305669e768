"""MessagePack-RPC for the tests, written from the specification alone: an independent peer of the daemon, and one that
can also say what no library would let it say."""
import socket
import struct
import subprocess
import time


def pack(v):
    if v is None:
        return b"\xc0"
    if v is True or v is False:
        return b"\xc3" if v else b"\xc2"
    if isinstance(v, int):
        if 0 <= v < 128:
            return bytes([v])
        if -32 <= v < 0:
            return struct.pack("b", v)
        if v >= 0:
            return b"\xcf" + struct.pack(">Q", v)
        return b"\xd3" + struct.pack(">q", v)
    if isinstance(v, float):
        return b"\xcb" + struct.pack(">d", v)
    if isinstance(v, str):
        b = v.encode("utf-8", "surrogateescape")
        return (bytes([0xA0 | len(b)]) if len(b) < 32 else b"\xdb" + struct.pack(">I", len(b))) + b
    if isinstance(v, bytes):
        return b"\xc6" + struct.pack(">I", len(v)) + v
    if isinstance(v, (list, tuple)):
        head = bytes([0x90 | len(v)]) if len(v) < 16 else b"\xdd" + struct.pack(">I", len(v))
        return head + b"".join(map(pack, v))
    if isinstance(v, dict):
        head = bytes([0x80 | len(v)]) if len(v) < 16 else b"\xdf" + struct.pack(">I", len(v))
        return head + b"".join(pack(k) + pack(x) for k, x in v.items())
    raise TypeError(type(v))


class More(Exception):
    pass


def unpack(b, i=0):
    """The value at b[i:] and the position behind it; More when it is not complete."""

    def take(n):
        nonlocal i
        if i + n > len(b):
            raise More
        i += n
        return b[i - n:i]

    def num(fmt):
        return struct.unpack(">" + fmt, take(struct.calcsize(fmt)))[0]

    def many(n):
        nonlocal i
        out = []
        for _ in range(n):
            v, i = unpack(b, i)
            out.append(v)
        return out

    def pairs(n):
        flat = many(2 * n)
        return dict(zip(flat[0::2], flat[1::2]))

    c = take(1)[0]
    if c < 0x80:
        r = c
    elif c < 0x90:
        r = pairs(c & 15)
    elif c < 0xA0:
        r = many(c & 15)
    elif c < 0xC0:
        r = take(c & 31).decode()
    elif c >= 0xE0:
        r = c - 256
    else:
        r = {
            0xC0: lambda: None, 0xC2: lambda: False, 0xC3: lambda: True,
            0xC4: lambda: take(num("B")), 0xC5: lambda: take(num("H")), 0xC6: lambda: take(num("I")),
            0xCA: lambda: num("f"), 0xCB: lambda: num("d"),
            0xCC: lambda: num("B"), 0xCD: lambda: num("H"), 0xCE: lambda: num("I"), 0xCF: lambda: num("Q"),
            0xD0: lambda: num("b"), 0xD1: lambda: num("h"), 0xD2: lambda: num("i"), 0xD3: lambda: num("q"),
            0xD9: lambda: take(num("B")).decode(), 0xDA: lambda: take(num("H")).decode(),
            0xDB: lambda: take(num("I")).decode(),
            0xDC: lambda: many(num("H")), 0xDD: lambda: many(num("I")),
            0xDE: lambda: pairs(num("H")), 0xDF: lambda: pairs(num("I")),
        }[c]()
    return r, i


class Refused(Exception):
    def __init__(self, error):
        super().__init__("%(code)s: %(message)s" % error)
        self.error = error
        self.code = error["code"]
        self.message = error["message"]


class Peer:
    """One connection. Messages that nobody waits for yet are kept in self.seen."""

    def __init__(self, path, timeout=10, bufsize=None):
        self.s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if bufsize:
            self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, bufsize)
        self.s.settimeout(timeout)
        self.s.connect(path)
        self.buf = b""
        self.seen = []
        self.next_id = 0

    def __enter__(self):
        return self

    def __exit__(self, *a):
        self.close()

    def close(self):
        self.s.close()

    def raw(self, b):
        self.s.sendall(b)

    def start(self, method, use_id=None, **args):
        msgid = use_id
        if msgid is None:
            self.next_id += 1
            msgid = self.next_id
        self.raw(pack([0, msgid, method, [args] if args else []]))
        return msgid

    def message(self):
        """The next message; None at the end of the stream."""
        while True:
            try:
                v, i = unpack(self.buf)
                self.buf = self.buf[i:]
                return v
            except More:
                more = self.s.recv(1 << 20)
                if not more:
                    if self.buf:
                        raise AssertionError("the stream ends within a message")
                    return None
                self.buf += more

    def wait(self, msgid):
        """The whole response [1, msgid, error, result]; everything else goes to self.seen."""
        for k, m in enumerate(self.seen):
            if m[0] == 1 and m[1] == msgid:
                return self.seen.pop(k)
        while True:
            m = self.message()
            if m is None:
                raise EOFError("closed while waiting for %d; seen %r" % (msgid, self.seen))
            if m[0] == 1 and m[1] == msgid:
                return m
            self.seen.append(m)

    def result(self, msgid):
        m = self.wait(msgid)
        if m[2] is not None:
            raise Refused(m[2])
        return m[3]

    def call(self, method, **args):
        return self.result(self.start(method, **args))

    def tokens(self, msgid):
        return [m[2][1] for m in self.seen if m[0] == 2 and m[1] == "token" and m[2][0] == msgid]


class Daemon:
    """A daemon of our own; stderr goes to a file that log() reads."""

    def __init__(self, argv, sock, log, env=None, wait=True, **popen):
        self.sock = sock
        self.log_path = log
        self.log_file = open(log, "ab")
        self.p = subprocess.Popen(argv, stderr=self.log_file, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env, **popen)
        if wait:
            self.wait_ready()

    def log(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def wait_ready(self, seconds=60):
        end = time.time() + seconds
        while " ready " not in self.log():
            if self.p.poll() is not None or time.time() > end:
                raise AssertionError("not ready (exit %r): %s" % (self.p.poll(), self.log()))
            time.sleep(0.01)

    def peer(self, **kw):
        return Peer(self.sock, **kw)

    def stop(self, sig=15, seconds=40):
        if self.p.poll() is None:
            self.p.send_signal(sig)
        try:
            return self.p.wait(seconds)
        except subprocess.TimeoutExpired:
            self.p.kill()
            raise AssertionError("did not stop: " + self.log())
        finally:
            self.log_file.close()
            self.p.stdout.close()
