#!/usr/bin/env python3
"""One measurement of OpenVINO GenAI (PyPI `openvino-genai`, CPU, continuous batching) on a GGUF file; prints a JSON line.

    peer_openvino.py MODEL PROMPTS.jsonl prefill TOKENS
    peer_openvino.py MODEL PROMPTS.jsonl decode DEPTH
    peer_openvino.py MODEL PROMPTS.jsonl job REQUESTS TOKENS ANSWER [evict]

`evict` turns its per-layer KV eviction on (512 slots). Prompts are lines {"tokens": [...]}."""
import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def pipeline(model, evict):
    s = genai.SchedulerConfig()
    s.cache_size = 4
    s.max_num_batched_tokens = 512
    s.max_num_seqs = 64
    s.dynamic_split_fuse = True
    if evict:
        s.use_cache_eviction = True
        s.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=32, recent_size=64, max_cache_size=512, aggregation_mode=genai.AggregationMode.NORM_SUM)
    return genai.ContinuousBatchingPipeline(model, s, "CPU", {"INFERENCE_NUM_THREADS": 2})


def generate(pipe, prompts, n):
    """All prompts at once, n tokens each: wall time, and per prompt the times of its tokens."""
    g = genai.GenerationConfig()
    g.max_new_tokens = g.min_new_tokens = n
    g.ignore_eos = True
    g.do_sample = False
    t0 = time.monotonic()
    handles = [pipe.add_request(i, ov.Tensor(np.array([p], dtype=np.int64)), g) for i, p in enumerate(prompts)]
    times = [[] for _ in prompts]
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.monotonic() - t0
        for h, t in zip(handles, times):
            while h.can_read():
                for out in h.read().values():
                    t += [now] * len(out.generated_ids)
    return time.monotonic() - t0, times


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def main():
    model, prompts, what, *rest = sys.argv[1:]
    evict = rest[-1:] == ["evict"]
    with open(prompts, encoding="utf-8") as f:
        ids = [json.loads(line)["tokens"] for line in f]
    pipe = pipeline(model, evict)
    generate(pipe, [ids[-1][:64]], 8)
    if what == "prefill":
        n = int(rest[0])
        _, t = generate(pipe, [ids[0][:n]], 1)
        print(json.dumps({"tokens_per_s": n / t[0][0]}))
    elif what == "decode":
        _, t = generate(pipe, [ids[1][: max(int(rest[0]), 8)]], 65)
        print(json.dumps({"tokens_per_s": (len(t[0]) - 1) / (t[0][-1] - t[0][0])}))
    else:
        k, n, out = (int(x) for x in rest[:3])
        wall, times = generate(pipe, [p[:n] for p in ids[:k]], out)
        gaps = [1e3 * (b - a) for t in times for a, b in zip(t, t[1:])]
        print(json.dumps({"wall_s": wall, "ttft_p50_s": quantile([t[0] for t in times], 0.5), "itl_p50_ms": quantile(gaps, 0.5),
                          "itl_p99_ms": quantile(gaps, 0.99), "itl_max_ms": max(gaps)}))


main()
