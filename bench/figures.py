"""Figures of a job from the moments at which its tokens came: the same for every server that is measured."""


def quantile(values, q):
    """As skvctl's: linear between neighbours."""
    values = sorted(values)
    if not values:
        return None
    at = q * (len(values) - 1)
    i = int(at)
    return values[i] if i + 1 >= len(values) else values[i] + (at - i) * (values[i + 1] - values[i])


def full_batch(times):
    """(most requests decoding at once, tokens/s of all while so many were)."""
    live = [t for t in times if t]
    moments = sorted([(t[0], 1) for t in live] + [(t[-1], -1) for t in live], key=lambda m: (m[0], -m[1]))
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    now, spans = 0, []
    for (at, step), (after, _) in zip(moments, moments[1:]):
        now += step
        if now >= most and after > at:
            spans.append((at, after))
    seconds = sum(b - a for a, b in spans)
    tokens = sum(1 for t in live for x in t for a, b in spans if a < x <= b)
    return most, tokens / seconds if seconds > 0 else None


def of_job(times, wall, failed=0):
    """times: per request the seconds, since all were sent, at which each token came."""
    gaps = [1e3 * (b - a) for t in times for a, b in zip(t, t[1:])]
    batch, rate = full_batch(times)
    return {"wall_s": wall, "output_tok_s": sum(len(t) for t in times) / wall, "ttft_p50_s": quantile([t[0] for t in times if t], 0.5),
            "itl_p50_ms": quantile(gaps, 0.5), "itl_p99_ms": quantile(gaps, 0.99), "itl_max_ms": max(gaps, default=None),
            "batch": batch, "decode_tok_s": rate, "failed": failed}


def of_skvctl(run):
    """The same names from a run of `skvctl --json bench`."""
    return {"wall_s": run["wall_ms"] / 1e3, "output_tok_s": run["output_tok_s"], "ttft_p50_s": run["ttft_p50_ms"] / 1e3,
            "itl_p50_ms": run["itl_p50_ms"], "itl_p99_ms": run["itl_p99_ms"], "itl_max_ms": run["itl_max_ms"],
            "batch": run["decode_batch"], "decode_tok_s": run["decode_tok_s"], "failed": run["failed"]}
