#!/usr/bin/env python3
"""A scripted daemon: the wire contract without a model, so that clients can be tested for what they say and show.

usage: fake_skvd.py SOCKET [--delay-ms N] [--not-admin] [--plain-score]

A token is a byte; <|im_start|> and <|im_end|> are 256 and 257. `generate` answers with ANSWER, word by word. `score` knows
every answer under policy "full" and forgets with the share that a policy evicts, always in the same way. Prints
"ready SOCKET" when it listens; ends on SIGTERM or `shutdown`.
"""
import argparse
import asyncio
import math
import os
import signal
import sys
import time
import zlib

import msgpack

VERSION = "0.1.0-fake"
SPECIAL = {"<|im_start|>": 256, "<|im_end|>": 257}
VOCAB = 258
ANSWER = "Grüße from the fake daemon: one two three four five \U0001f600 six seven eight nine ten."
CONTEXT = 8192


class Failure(Exception):
    def __init__(self, code, message, **fields):
        super().__init__(message)
        self.map = {"code": code, "message": message, **fields}


def tokenize(text, special=True):
    out = []
    while text:
        name = next((s for s in SPECIAL if text.startswith(s)), None) if special else None
        if name:
            out.append(SPECIAL[name])
            text = text[len(name):]
        else:
            out.extend(text[0].encode())
            text = text[1:]
    return out


def detokenize(tokens):
    names = {v: k.encode() for k, v in SPECIAL.items()}
    return b"".join(names.get(t, bytes([t & 255])) for t in tokens).decode("utf-8", "replace")


def render(messages, generation=True):
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if generation else "")


def draw(*key):
    """The same number in [0, 1) for the same key."""
    return (zlib.crc32(repr(key).encode()) * 0x9E3779B1 & 0xFFFFFFFF) / 2**32


class Server:
    def __init__(self, opts):
        self.opts = opts
        self.started = time.monotonic()
        self.sequences = {}
        self.next_sequence = 1
        self.finished = self.cancelled = self.failed = 0
        self.tokens_in = self.tokens_out = 0
        self.draining = False
        self.gone = set()
        self.settings = {"log-level": "info", "step-ms": 50}
        self.ended = asyncio.Event()
        self.listeners = set()

    def prompt_of(self, a):
        given = [k for k in ("prompt", "messages", "tokens") if k in a]
        if len(given) != 1:
            raise Failure("bad_request", "give exactly one of prompt, messages, tokens")
        if "tokens" in a:
            tokens = a["tokens"]
            for i, t in enumerate(tokens):
                if not isinstance(t, int) or not 0 <= t < VOCAB:
                    raise Failure("bad_request", f"tokens[{i}] is {t}, allowed are 0 to {VOCAB - 1}")
        elif "messages" in a:
            tokens = tokenize(render(a["messages"]))
        else:
            tokens = tokenize(a["prompt"])
        if len(tokens) > CONTEXT:
            raise Failure("context_overflow", f"the prompt has {len(tokens)} tokens, the context {CONTEXT}")
        return tokens

    @staticmethod
    def kv_of(a, n):
        kv = a.get("kv") or {}
        policy = kv.get("policy", "sparse")
        if policy not in ("full", "streaming", "snapkv", "pyramid", "h2o", "tova", "article", "sparse"):
            raise Failure("bad_request", f"kv.policy '{policy}' is unknown; allowed: full streaming snapkv ...")
        keep = n if policy == "full" else min(n, kv.get("budget", max(16, n // 10)))
        return {"policy": policy, "slots_full": n * 90, "slots_kept": n * 9 + keep * 81, "bytes": keep * 23040,
                "bytes_full_cache": n * 23040}, policy, keep / n if n else 1.0

    async def m_hello(self, conn, msgid, a):
        return {"server": "skvd", "version": VERSION, "protocol": 1, "uid": os.getuid(), "admin": not self.opts.not_admin,
                "model": {"name": "fake", "arch": "llama", "context": CONTEXT, "vocab": VOCAB, "layers": 30, "heads": 9,
                          "kv_heads": 3}}

    async def m_generate(self, conn, msgid, a):
        start = time.monotonic()
        prompt = self.prompt_of(a)
        kv, policy, _ = self.kv_of(a, len(prompt))
        if self.draining:
            raise Failure("draining", "the daemon is finishing its work and takes no more")
        if a.get("session") == "gone" or a.get("session") in self.gone:
            raise Failure("not_found", f"session \"{a['session']}\" is gone; send the whole conversation again")
        if a.get("session") == "busy":
            raise Failure("overloaded", "the queue is full", retry_after_ms=250)
        seq = self.next_sequence
        self.next_sequence += 1
        info = {"id": seq, "uid": os.getuid(), "pid": os.getpid(), "session": a.get("session"), "state": "decode",
                "prompt_tokens": len(prompt), "completion_tokens": 0, "start": start, "kv_bytes": kv["bytes"],
                "policy": policy, "prompt": prompt}
        self.sequences[seq] = info
        self.tokens_in += len(prompt)
        ids, text, first = [], "", None
        finish = "eos"
        try:
            for k in range(4):
                if a.get("progress"):
                    conn.notify("progress", [msgid, {"phase": "prefill", "done": k * len(prompt) // 4, "total": len(prompt)}])
                await asyncio.sleep(self.opts.delay_ms / 4000)
            words = [m["content"] for m in a.get("messages", [])]
            source = tokenize(" / ".join(words)) if words and "ECHO" in words[-1] else tokenize(ANSWER)
            if a.get("ignore_eos"):
                source = source * (1 + a.get("max_tokens", 512) // len(source))
            pending = b""
            for i, t in enumerate(source):
                if i >= a.get("max_tokens", 512):
                    finish = "length"
                    break
                if info.get("killed"):
                    raise asyncio.CancelledError
                pending += bytes([t & 255])
                try:
                    piece = pending.decode()
                    pending = b""
                except UnicodeDecodeError:
                    piece = ""
                ids.append(t)
                text += piece
                info["completion_tokens"] = len(ids)
                self.tokens_out += 1
                first = first or time.monotonic()
                if a.get("stream", True):
                    note = {"i": i, "token": t, "text": piece}
                    if a.get("logprobs"):
                        note["logprob"] = -0.1
                        note["top"] = [[t, chr(t) if t < 128 else "", -0.1]]
                    conn.notify("token", [msgid, note])
                if self.opts.delay_ms:
                    await asyncio.sleep(self.opts.delay_ms / 1000)
                elif i % 16 == 15:
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise Failure("cancelled", "the request was cancelled",
                          text=text, tokens=ids, completion_tokens=len(ids)) from None
        finally:
            if a.get("session"):
                info["state"] = "idle"
            else:
                self.sequences.pop(seq, None)
        now = time.monotonic()
        self.finished += 1
        for c in self.listeners:
            c.notify("event", [{"topic": "sequences", "what": "ended", "id": seq}])
        return {"text": text, "tokens": ids, "finish": finish, "prompt_tokens": len(prompt), "cached_tokens": 0,
                "completion_tokens": len(ids), "kv": kv,
                "timing": {"queued_ms": 0.1, "prefill_ms": 1000 * ((first or now) - start),
                           "ttft_ms": 1000 * ((first or now) - start), "decode_ms": 1000 * (now - (first or now)),
                           "total_ms": 1000 * (now - start)}}

    async def m_score(self, conn, msgid, a):
        prompt = self.prompt_of(a)
        kv, policy, kept = self.kv_of(a, len(prompt))
        cont = a["continuation"]
        cont = tokenize(cont) if isinstance(cont, str) else cont
        logprobs, top = [], []
        for i, t in enumerate(cont):
            # The right token is likeliest with this probability, else another one is.
            knows = draw(prompt[-64:], i, policy) < (0.95 if policy == "full" else 0.5 + 0.5 * kept)
            other = (t + 1) % VOCAB
            pair = [[t, 0.9 * (1 - 0.2 * (1 - kept))], [other, 0.05]] if knows else [[other, 0.6], [t, 0.2]]
            logprobs.append(math.log(next(p for x, p in pair if x == t)))
            top.append([[x, detokenize([x]), math.log(p)] for x, p in pair])
        out = {"tokens": cont, "logprobs": logprobs, "sum": sum(logprobs)}
        unknown = set(a) - {"prompt", "messages", "tokens", "continuation", "kv", "refeed", "raw", "deadline_ms", "priority"}
        if not self.opts.plain_score:
            unknown -= {"logprobs", "candidates"}
            out["kv"] = kv
            if a.get("logprobs"):
                out["top"] = [x[:a["logprobs"]] for x in top]
            if "candidates" in a:
                known = [{x[0]: x[2] for x in row} for row in top]
                out["candidates"] = [[known[min(i, len(known) - 1)].get(c, -20.0) for c in row]
                                     for i, row in enumerate(a["candidates"])]
        if unknown:
            raise Failure("bad_request", f"score has no argument '{sorted(unknown)[0]}'")
        return out

    async def m_cancel(self, conn, msgid, a):
        if "sequence" in a:
            found = a["sequence"] in self.sequences
            if found:
                self.sequences[a["sequence"]]["killed"] = True
            return {"cancelled": found}
        task = conn.tasks.get(a.get("msgid"))
        if task:
            task.cancel()
        return {"cancelled": task is not None}

    async def m_tokenize(self, conn, msgid, a):
        return {"tokens": tokenize(a["text"], a.get("special", True))}

    async def m_detokenize(self, conn, msgid, a):
        return {"text": detokenize(a["tokens"])}

    async def m_apply_template(self, conn, msgid, a):
        text = render(a["messages"], a.get("add_generation_prompt", True))
        return {"text": text, "tokens": tokenize(text)}

    def list(self):
        return [{"age_ms": 1000 * (time.monotonic() - s["start"]),
                 **{k: v for k, v in s.items() if k not in ("start", "prompt", "killed")}} for s in self.sequences.values()]

    async def m_status(self, conn, msgid, a):
        running = sum(s["state"] == "decode" for s in self.sequences.values())
        return {"uptime_ms": 1000 * (time.monotonic() - self.started), "running": running, "waiting": 0,
                "finished": self.finished, "failed": self.failed, "cancelled": self.cancelled, "state": "draining" if self.draining else "serving",
                "tokens_in": self.tokens_in, "tokens_out": self.tokens_out, "tokens_in_per_s": 10.0, "tokens_out_per_s": 20.0,
                "step_ms_last": 41.5, "step_ms_mean": 40.0, "step_age_ms": 0, "idle_sessions": len(self.sequences) - running,
                "pages_total": 1000, "pages_used": 100 * running, "pages_free": 1000 - 100 * running, "sequences": self.list()}

    async def m_sequences(self, conn, msgid, a):
        return {"sequences": self.list()}

    async def m_kv(self, conn, msgid, a):
        layers = [{"policy": "full" if i < 3 else "sparse", "budget": 0 if i < 3 else 400, "sink": 4, "recent": 16,
                   "pages": 375 if i < 3 else 39, "bytes": 1536000 if i < 3 else 159744, "slots": 12000 if i < 3 else 1248,
                   "evicted": 0 if i < 3 else 10752, "kept_mass": None if i < 3 else 0.97} for i in range(30)]
        return {"layers": layers, "pages_total": 10000, "pages_used": 2178, "pages_free": 7822, "page_bytes": 4096,
                "slots_per_page": 32, "token_bytes_full": 23040, "fit_context": 4000, "fit_plan": 48, "fit_full": 10,
                "dtype": "bf16"}

    async def m_kept(self, conn, msgid, a):
        seq = self.sequences.get(a["sequence"])
        if seq is None:
            raise Failure("not_found", f"there is no sequence {a['sequence']}")
        n = len(seq["prompt"])
        heads = lambda layer: [{"positions": (p := [i for i in range(n) if layer < 3 or i < 4 or i >= n - 16
                                                    or draw(layer, h, i) < 0.15]),
                                "scores": [draw(layer, h, i, "s") for i in p]} for h in range(3)]
        return {"n": n, "layers": [{"policy": "full" if i < 3 else "sparse", "heads": heads(i)} for i in range(30)]}

    async def m_set(self, conn, msgid, a):
        for name in a:
            if name not in self.settings:
                raise Failure("bad_request", f"there is no setting '{name}'")
        self.settings.update(a)
        return {}

    async def m_get(self, conn, msgid, a):
        return dict(self.settings)

    async def m_drain(self, conn, msgid, a):
        self.draining = True
        return {}

    async def m_resume(self, conn, msgid, a):
        self.draining = False
        return {}

    async def m_reload(self, conn, msgid, a):
        return {"changed": [], "restart": []}

    async def m_kill(self, conn, msgid, a):
        if a["sequence"] not in self.sequences:
            raise Failure("not_found", f"there is no sequence {a['sequence']}")
        if self.sequences[a["sequence"]]["state"] == "idle":
            self.gone.add(self.sequences.pop(a["sequence"])["session"])
        else:
            self.sequences[a["sequence"]]["killed"] = True
        return {"killed": True}

    async def m_subscribe(self, conn, msgid, a):
        self.listeners.add(conn)
        return {}

    async def m_shutdown(self, conn, msgid, a):
        asyncio.get_running_loop().call_later(0.05, self.ended.set)
        return {}

    ADMIN = {"sequences", "kv", "kept", "set", "get", "drain", "resume", "reload", "kill", "subscribe", "shutdown"}


class Connection:
    def __init__(self, server, writer):
        self.server, self.writer, self.tasks = server, writer, {}

    def send(self, message):
        if not self.writer.is_closing():
            self.writer.write(msgpack.packb(message))

    def notify(self, method, params):
        self.send([2, method, params])

    async def answer(self, msgid, method, params):
        s = self.server
        try:
            handler = getattr(s, "m_" + method, None)
            if handler is None:
                raise Failure("unknown_method", f"there is no method '{method}'")
            if method in s.ADMIN and s.opts.not_admin:
                raise Failure("forbidden", f"{method} is for administrators")
            result = await handler(self, msgid, params[0] if params else {})
            self.send([1, msgid, None, result])
        except Failure as f:
            s.failed += f.map["code"] != "cancelled"
            self.send([1, msgid, f.map, None])
        except asyncio.CancelledError:
            self.send([1, msgid, {"code": "cancelled", "message": "the request was cancelled"}, None])
        except Exception as e:  # a mistake of this script must be seen by the test that hits it
            self.send([1, msgid, {"code": "internal", "message": repr(e)}, None])
        finally:
            self.tasks.pop(msgid, None)


async def serve(server, reader, writer):
    conn = Connection(server, writer)
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=64 << 20)
    try:
        while data := await reader.read(65536):
            unpacker.feed(data)
            for message in unpacker:
                if not isinstance(message, list) or len(message) != 4 or message[0] != 0:
                    conn.notify("error", [{"code": "bad_request", "message": "not a MessagePack-RPC request"}])
                    return
                _, msgid, method, params = message
                conn.tasks[msgid] = asyncio.create_task(conn.answer(msgid, method, params))
    except (ConnectionError, ValueError):
        pass
    finally:
        server.listeners.discard(conn)
        for task in list(conn.tasks.values()):
            task.cancel()
        writer.close()


async def main():
    p = argparse.ArgumentParser()
    p.add_argument("socket")
    p.add_argument("--delay-ms", type=float, default=0)
    p.add_argument("--not-admin", action="store_true")
    p.add_argument("--plain-score", action="store_true")
    opts = p.parse_args()
    server = Server(opts)
    listener = await asyncio.start_unix_server(lambda r, w: serve(server, r, w), opts.socket)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.ended.set)
    print("ready", opts.socket, flush=True)
    await server.ended.wait()
    listener.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
