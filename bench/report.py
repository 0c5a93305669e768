"""Tables (Markdown, and readable as they are) of what run.py measured."""


def num(v, digits=None):
    if v is None:
        return "-"
    if digits is None:
        digits = 0 if abs(v) >= 100 else 1 if abs(v) >= 10 else 2
    return "%.*f" % (digits, v)


def brief(figures):
    out = []
    for k, v in figures.items():
        if isinstance(v, float):
            out.append("%s %s" % (k, num(v)))
        elif isinstance(v, (int, str)):
            out.append("%s %s" % (k, v))
    return ", ".join(out)


def table(heads, rows):
    cells = [heads] + [[str(c) for c in r] for r in rows]
    width = [max(len(r[i]) for r in cells) for i in range(len(heads))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, width)) + " |" for r in cells]
    lines.insert(1, "| " + " | ".join("-" * w for w in width) + " |")
    return "\n".join(lines) + "\n"


def latest(records, part):
    """The last figure of each (row, contender), in the order of first appearance."""
    out = {}
    for r in records:
        if r["part"] == part:
            out[r["row"], r["who"]] = r
    return list(out.values())


def limits(records):
    for r in reversed(records):
        if r["part"] == "limits":
            l = r["limits"]
            return "Limits, %s, %s (one thread): %s\n" % (r["row"], r["who"], ", ".join(
                "%s %s (%s) %s%s" % (k, num(v["all"]), num(v["one"]), v["unit"], ", mean %s" % num(v["mean"]) if k == "mem" else "") for k, v in l.items()))
    return ""


def rates(records, part):
    """A line a row; skvd's rate and share, each peer's rate and how many times it skvd is."""
    rows = {}
    for r in latest(records, part):
        rows.setdefault(r["row"], {})[r["who"]] = r
    names = []
    for row in rows.values():
        names += [n for n in row if n not in names]
    names.sort(key=lambda n: (n != "skvd full", n.startswith("skvd")))
    out = []
    for row, who in rows.items():
        line = [row]
        for n in names:
            r = who.get(n)
            line.append("" if r is None else num(r["tokens_per_s"]))
            if n == "skvd full":
                line.append("" if r is None or "share" not in r else "%.0f %%" % (100 * r["share"]))
            elif not n.startswith("skvd"):
                line.append("" if r is None else "%sx" % num(r["skvd_is"], 2))
        out.append(line)
    heads = ["tokens/s"]
    for n in names:
        heads += [n, "of limit"] if n == "skvd full" else [n] if n.startswith("skvd") else [n, "skvd is"]
    return table(heads, out) if out else ""


JOB = [("wall_s", "wall s", 1), ("output_tok_s", "output t/s", 1), ("ttft_p50_s", "first token P50 s", 1), ("itl_p50_ms", "between tokens P50 ms", 0),
       ("itl_p99_ms", "P99", 0), ("itl_max_ms", "max", 0), ("decode_tok_s", "decode t/s", 0), ("batch", "at batch", 0), ("failed", "failed", 0)]


def jobs(records, part):
    out = []
    list_ = latest(records, part)
    for r in list_:
        base = next((b for b in list_ if b["row"] == r["row"] and b["who"] == ("skvd sparse" if "evict" in r["who"] else "skvd full")), None)
        ratio = "" if base is None or base is r else num(r["wall_s"] / base["wall_s"], 2) + "x " + base["who"][5:]
        out.append([r["who"], *(num(r.get(k), d) for k, _, d in JOB), ratio])
    rows = sorted({r["row"] for r in list_})
    return "" if not out else "Jobs of %s:\n\n" % ", ".join(rows) + table(["", *(h for _, h, _ in JOB), "wall is"], out)


def kernels(records):
    rows = []
    for r in latest(records, "kernels"):
        share = "" if r.get("share") is None else "%.0f %%" % (100 * r["share"])
        rate = "" if r.get("rate") is None else "%s %s" % (num(r["rate"]), r["unit"])
        if "us" in r:
            rows.append([r["row"], r["who"], r.get("threads", ""), num(r["us"], 2), rate, share])
    return table(["operation", "shape", "threads", "us", "rate", "of limit"], rows) if rows else ""


def values(records, part):
    rows = [[r["row"], "%s %s" % (num(r["value"]), r["unit"]), r["goal"]] for r in latest(records, part)]
    return table(["figure", "measured", "goal"], rows) if rows else ""


def batches(records):
    rows = [[r["row"], r["who"], num(r["tokens_per_s"])] for r in latest(records, "batch")]
    return table(["row", "", "tokens/s"], rows) if rows else ""


def tables(records):
    parts = [limits(records), kernels(records), rates(records, "engine"), batches(records), jobs(records, "serve"), jobs(records, "job"),
             rates(records, "shapes"), values(records, "health")]
    return "\n".join(p for p in parts if p)
