"""MessagePack-RPC frames, and what both clients share: no sockets here."""
import os

import msgpack

from . import errors

REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
FRAME_LIMIT = 64 << 20  # bytes taken of one frame


def default_path():
    """The socket that is used when none is named."""
    path = os.environ.get("SKVD_SOCKET")
    if path:
        return path
    if os.geteuid() == 0:
        return "/run/skvd.sock"
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}", "skvd.sock")


class Record(dict):
    """A map of the wire whose keys are attributes too; maps inside are Records as well."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Frames:
    """Bytes in, messages out; refuses what is no MessagePack-RPC."""

    def __init__(self):
        self._unpacker = msgpack.Unpacker(raw=False, strict_map_key=True, object_hook=Record, max_buffer_size=FRAME_LIMIT)

    def feed(self, data):
        """The messages that are complete with these bytes, as (kind, msgid or method, error or None, result or params)."""
        out = []
        try:
            self._unpacker.feed(data)
            for m in self._unpacker:
                out.append(self._check(m))
        except (ValueError, msgpack.exceptions.UnpackException) as e:
            raise errors.ProtocolError(f"what came from the socket is not MessagePack-RPC: {e}") from e
        return out

    @staticmethod
    def _check(m):
        if isinstance(m, list) and len(m) == 4 and m[0] == RESPONSE and isinstance(m[1], int):
            return RESPONSE, m[1], m[2], m[3]
        if isinstance(m, list) and len(m) == 3 and m[0] == NOTIFICATION and isinstance(m[1], str) and isinstance(m[2], list):
            return NOTIFICATION, m[1], None, m[2]
        raise ValueError("neither a response nor a notification")


def request(msgid, method, args):
    """The bytes of a request; arguments that are None are left out."""
    args = {k: v for k, v in args.items() if v is not None}
    return msgpack.packb([REQUEST, msgid, method, [args] if args else []], use_bin_type=True)


def owner(params):
    """The msgid that a notification's params name, and what is told: (None, ...) when it belongs to no request."""
    if len(params) == 2 and isinstance(params[0], int) and not isinstance(params[0], bool):
        return params[0], params[1]
    return None, params[0] if len(params) == 1 else params


def prompt_args(prompt, messages, tokens, args):
    given = {"prompt": prompt, "messages": messages, "tokens": tokens}
    if sum(v is not None for v in given.values()) != 1:
        raise TypeError("give exactly one of prompt, messages and tokens")
    return {**given, **args}


class Methods:
    """The protocol's methods, over self.call and self._pick: blocking in Client, awaitable in AsyncClient."""

    def generate(self, prompt=None, *, messages=None, tokens=None, **args):
        """The whole answer at once: text, tokens, finish, timing, kv, ..."""
        return self.call("generate", stream=False, **prompt_args(prompt, messages, tokens, args))

    def score(self, prompt=None, continuation=None, *, messages=None, tokens=None, **args):
        """Log-probabilities of a continuation (text or tokens) after a prompt: tokens, logprobs, sum, ..."""
        return self.call("score", continuation=continuation, **prompt_args(prompt, messages, tokens, args))

    def tokenize(self, text, *, special=True, bos=False):
        """Text to a list of token numbers."""
        return self._pick("tokens", "tokenize", text=text, special=special, bos=bos)

    def detokenize(self, tokens):
        """Token numbers to text."""
        return self._pick("text", "detokenize", tokens=list(tokens))

    def apply_template(self, messages, *, add_generation_prompt=True):
        """Messages as the model sees them: text, tokens."""
        return self.call("apply_template", messages=messages, add_generation_prompt=add_generation_prompt)

    def hello(self):
        return self.call("hello", client="skvd for Python", version="0.1.0")

    def status(self):
        return self.call("status")

    def sequences(self):
        return self._pick("sequences", "sequences")

    def kv(self):
        return self.call("kv")

    def kept(self, sequence):
        return self.call("kept", sequence=sequence)

    def get(self):
        return self.call("get")

    def set(self, **settings):
        """Change settings; an underscore stands for the dash of a setting's name."""
        return self.call("set", **{k.replace("_", "-"): v for k, v in settings.items()})

    def drain(self):
        return self.call("drain")

    def resume(self):
        return self.call("resume")

    def reload(self):
        return self.call("reload")

    def kill(self, sequence):
        return self.call("kill", sequence=sequence)

    def shutdown(self, grace_ms=None):
        return self.call("shutdown", grace_ms=grace_ms)
