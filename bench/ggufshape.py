"""What a GGUF file's matrices weigh: enough of the format to work out the limits of prefill and decode from a machine's rates."""
import struct

# type: (name, weights a block, bytes a block)
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
         8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2)}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Reader:
    def __init__(self, f):
        self.f = f

    def num(self, code):
        return struct.unpack("<" + code, self.f.read(struct.calcsize(code)))[0]

    def text(self):
        return self.f.read(self.num("Q")).decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.num(SCALARS[kind])
        item, n = self.num("I"), self.num("Q")
        if item in SCALARS:
            self.f.seek(n * struct.calcsize(SCALARS[item]), 1)
            return None
        for _ in range(n):
            self.value(item)
        return None


class Shape:
    """body, head: (weights, bytes) that a token goes through in the layers and in the output matrix."""

    def __init__(self, path):
        with open(path, "rb") as f:
            r = Reader(f)
            if f.read(4) != b"GGUF" or r.num("I") not in (2, 3):
                raise ValueError(path + ": not a GGUF file of version 2 or 3")
            n_tensor, n_key = r.num("Q"), r.num("Q")
            keys = {}
            for _ in range(n_key):
                name = r.text()
                keys[name] = r.value(r.num("I"))
            tensors = {}
            for _ in range(n_tensor):
                name, n = r.text(), 1
                for _ in range(r.num("I")):
                    n *= r.num("Q")
                kind = TYPES[r.num("I")]
                r.num("Q")
                tensors[name] = (n, n // kind[1] * kind[2], kind[0])
        arch = keys["general.architecture"] + "."
        self.layers, self.width = keys[arch + "block_count"], keys[arch + "embedding_length"]
        self.heads = keys[arch + "attention.head_count"]
        self.kv_heads = keys.get(arch + "attention.head_count_kv", self.heads)
        self.head_dim = keys.get(arch + "attention.key_length", self.width // self.heads)
        layers = [t for name, t in tensors.items() if name.startswith("blk.") and t[0] > self.width]
        out = tensors.get("output.weight") or tensors["token_embd.weight"]
        self.body = sum(t[0] for t in layers), sum(t[1] for t in layers)
        self.head = out[0], out[1]
        self.type = max(layers)[2]

    def kv_bytes(self, value_bytes=2):
        """of one token in all layers"""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes

    def prefill_limit(self, n, product_rate, attention_rate):
        """Tokens/s of a prompt of n: products of the layers for each, of the output once, causal attention."""
        attention = 4 * self.layers * self.heads * self.head_dim * n * (n + 1) / 2
        return n / ((2 * self.body[0] * n + 2 * self.head[0]) / product_rate + attention / attention_rate)

    def decode_limit(self, depth, batch, memory_rate, value_bytes=2):
        """Tokens/s of a batch: weights are read once a step, each sequence's cache too."""
        return batch * memory_rate / (self.body[1] + self.head[1] + batch * depth * self.kv_bytes(value_bytes))
