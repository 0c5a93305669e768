#!/usr/bin/env python3
"""OpenVINO GenAI (PyPI `openvino-genai`, CPU, continuous batching) on a GGUF file, for run.py. Reads commands, a line each, and
answers each with a line of JSON, after one that says that it is ready:

    peer_openvino.py MODEL PROMPTS.jsonl THREADS [evict]
    prefill TOKENS | decode DEPTH | job REQUESTS TOKENS ANSWER

`evict` turns its per-layer KV eviction on (512 slots). Prompts are lines {"tokens": [...]}."""
import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

import figures


def pipeline(model, threads, evict):
    s = genai.SchedulerConfig()
    s.cache_size = 4
    s.max_num_batched_tokens = 512
    s.max_num_seqs = 64
    s.dynamic_split_fuse = True
    if evict:
        s.use_cache_eviction = True
        s.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=32, recent_size=64, max_cache_size=512, aggregation_mode=genai.AggregationMode.NORM_SUM)
    return genai.ContinuousBatchingPipeline(model, s, "CPU", {"INFERENCE_NUM_THREADS": threads})


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


def answer(pipe, ids, turn, what, *rest):
    if what == "prefill":
        n = int(rest[0])
        _, t = generate(pipe, [ids[turn % len(ids)][:n]], 1)
        return {"tokens_per_s": n / t[0][0]}
    if what == "decode":
        _, t = generate(pipe, [ids[turn % len(ids)][: max(int(rest[0]), 8)]], 65)
        return {"tokens_per_s": (len(t[0]) - 1) / (t[0][-1] - t[0][0])}
    k, n, out = (int(x) for x in rest)
    wall, times = generate(pipe, [p[:n] for p in ids[:k]], out)
    return figures.of_job(times, wall, sum(len(t) < out for t in times))


def main():
    model, prompts, threads, *rest = sys.argv[1:]
    with open(prompts, encoding="utf-8") as f:
        ids = [json.loads(line)["tokens"] for line in f]
    pipe = pipeline(model, int(threads), rest == ["evict"])
    generate(pipe, [ids[-1][:64]], 8)
    print(json.dumps({"ready": True}), flush=True)
    for turn, line in enumerate(sys.stdin):
        print(json.dumps(answer(pipe, ids, turn, *line.split())), flush=True)


main()
