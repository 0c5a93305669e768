"""The whole daemon on the shim (backend "cuda-shim"): against the reference data, against the CPU's exact mode, with its
KV pairs evicted, over one, two and three ranks in one process and in as many, and what happens when one is lost. The default
model where the reference needs it (skipped without it), a small random one elsewhere: a step of the former takes the shim
seconds. Arguments: build tree, source tree, `fast` for the main cases alone."""
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time

top, src = sys.argv[1:3]
fast = sys.argv[3:] == ["fast"]
sys.path.insert(0, os.path.join(src, "tests"))
from skvwire import Daemon  # noqa: E402

MODEL = os.environ.get("SKVD_TEST_MODEL") or os.path.expanduser("~/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf")
SHIM = "tests/cuda/%s/skvd-shim" % ("fast" if fast else "plain")
PROMPT_LIMIT = 5 if fast else 40  # tokens of the reference prompts that are run
ANSWER = 2 if fast else 5
# Activations and cache in bf16, sums in f32: between the reference's tolerances for a 16-bit cache (0.05) and for int8
# activations (2.0); greedy answers may part where the margin is below twice that.
TOLERANCE, MARGIN = 0.5, 1.0

passed = failed = 0


def check(ok, what):
    global passed, failed
    passed += bool(ok)
    failed += not ok
    print("%s: %s" % ("ok" if ok else "FAIL", what), flush=True)


def rows(name):
    with open(os.path.join(src, "tests/data", name)) as f:
        for line in f:
            yield line.rstrip("\n").split("\t")


def ints(field):
    return [int(x) for x in field.split()]


def floats(field):
    return [float(x) for x in field.split()]


def command(folder, name, model, program, args):
    return [os.path.join(top, program), "--model", model, "--sandbox", "off", "--threads", "1", "--kv-memory", "64M",
            "--max-sequences", "4", "--context", "1024", "--socket", os.path.join(folder, name + ".sock"), *args]


class Shim(Daemon):
    def __init__(self, folder, name, model, *args, program=SHIM, env=None):
        sock = os.path.join(folder, name + ".sock")
        argv = command(folder, name, model, program, args)
        super().__init__(argv, sock, os.path.join(folder, name + ".log"), env=dict(os.environ, **(env or {})), wait=False)
        self.wait_ready(300)

    def answer(self, tokens, n, **more):
        with self.peer(timeout=900) as p:
            how = {"temperature": 0, **more}
            msgid = p.start("generate", tokens=tokens, max_tokens=n, ignore_eos=True, **how)
            r = p.result(msgid)
            return r, p.tokens(msgid)

    def kept(self, session):
        with self.peer(timeout=900) as p:
            seq = [s["id"] for s in p.call("sequences")["sequences"] if s["session"] == session]
            return [[h["positions"] for h in layer["heads"]] for layer in p.call("kept", sequence=seq[0])["layers"]]


def parted(got, want, margin):
    """By what margin the first token was chosen that is another one; 0: all are equal."""
    return next((m for g, w, m in zip(got, want, margin) if g != w), 0)


def equal_until(got, want, margin, limit):
    """Equal tokens up to the first step that rounding may decide."""
    return parted(got, want, margin) < limit


def reference_logits(d):
    worst = kl = n = 0
    for name, ids, top_ids, top_logits, lse, greedy, margin, *_ in rows("logits.tsv"):
        ids = ints(ids)
        if len(ids) > PROMPT_LIMIT:
            continue
        r, tokens = d.answer(ids, ANSWER, logprobs=64)
        have = {t: lp for t, _, lp in tokens[0]["top"]}
        for t, logit in zip(ints(top_ids), floats(top_logits)):
            want = logit - float(lse)
            if t in have:
                worst = max(worst, abs(have[t] - want))
                kl += math.exp(want) * (want - have[t])
        n += 1
        check(equal_until(r["tokens"], ints(greedy), floats(margin), MARGIN), "%s: %s" % (name, r["tokens"]))
    print("%d prompts: worst log-probability off by %.3f, mean KL over the listed tokens %.5f" % (n, worst, kl / n))
    check(n >= 4 and worst < TOLERANCE and abs(kl / n) < 0.006, "log-probabilities as in the reference")


def evict_rows():
    prompt = None
    for r in rows("evict.tsv"):
        if r[3]:
            prompt = ints(r[3])
        if r[0] == "e500" and r[1] != "0":
            yield r, prompt


def article(budget, pool):
    return {"policy": "article", "budget": budget, "alpha": 32, "recent": 32, "sink": 4, "full_layers": 3, "pool": pool or 1,
            "pool_kind": "max"}


def overlap(a, b):
    return len(set(a) & set(b)) / max(len(b), 1)


def reference_evict(d):
    for r, prompt in evict_rows():
        budget, pool = int(r[1]), int(r[2])
        if (budget, pool) not in ((128, 0), (256, 5)):
            continue
        name = "e500-%d-%d" % (budget, pool)
        d.answer(prompt, 0, session=name, kv=article(budget, pool))
        kept = d.kept(name)
        for head, want in (kept[3][0], r[18]), (kept[15][2], r[22]):
            want = ints(want)
            check(len(head) == len(want) and overlap(head, want) >= 0.95, "%s: %.1f %% of the reference's positions kept"
                  % (name, 100 * overlap(head, want)))
        full = [len(h) for layer in kept[:3] for h in layer]
        check(full == [len(prompt)] * 9, name + ": the first layers keep everything")


def against_cpu(folder, name, model, shim, prompts):
    d = Shim(folder, "cpu-" + name, model, "--backend", "cpu", "--compute", "f32", program="skvd")
    for what, tokens, n, kv in prompts:
        want, ev = d.answer(tokens, n, kv=kv, logprobs=2)
        got, _ = shim.answer(tokens, n, kv=kv)
        margin = [e["top"][0][2] - e["top"][1][2] for e in ev]
        check(equal_until(got["tokens"], want["tokens"], margin, MARGIN), "%s, %s: the CPU's answer: %s" % (name, what, got["tokens"]))
        check(got["kv"]["slots_kept"] == want["kv"]["slots_kept"], "%s, %s: as many pairs kept as on the CPU" % (name, what))
    check(d.stop() == 0, name + ": the CPU's daemon ends well")


def alone(d, prompts):
    """What one rank says, by what margin, and keeps."""
    out = {}
    for what, tokens, n, kv in prompts:
        r, ev = d.answer(tokens, n, session=what, kv=kv, logprobs=2)
        out[what] = r["tokens"], [e["top"][0][2] - e["top"][1][2] for e in ev], d.kept(what)
    return out


def same(d, who, mine, prompts, exact=False):
    """Sums over ranks add in another order, which a near tie may show: among the positions kept, and, after it, in a token. With
    tp-exact they do not: nothing differs."""
    for what, tokens, n, kv in prompts:
        got, _ = d.answer(tokens, n, session=what, kv=kv)
        want, margin, kept = mine[what]
        by = parted(got["tokens"], want, margin)
        limit = 0.1 if kv["policy"] == "full" else 0.3  # another position kept is another cache from then on
        check(got["tokens"] == want if exact else by < limit, "%s by %s: the same answer%s" % (what, who, " to a tie of %.3f" % by if by else ""))
        check(steps(d)[1] > 0, "%s: steps are prepared ahead" % who)
        if got["tokens"] == want:
            heads = [(set(a), set(b)) for la, lb in zip(d.kept(what), kept) for a, b in zip(la, lb)]
            share = sum(len(a & b) for a, b in heads) / sum(len(b) for _, b in heads)
            check(share == 1 if exact or kv["policy"] == "full" else share > 0.99, "%s by %s: %.2f %% of the positions kept are the same"
                  % (what, who, 100 * share))


def ranks(folder, name, model, mine, prompts, *more):
    for tp in (3,) if fast and more else (2, 3):
        d = Shim(folder, "tp%d-%s" % (tp, name), model, "--backend", "cuda-shim", "--tp", str(tp), *more, env={"SHIM_DEVICES": str(tp)})
        same(d, "%d ranks, %s" % (tp, name), mine, prompts, bool(more))
        check(d.stop() == 0, "%d ranks end well" % tp)


def exact(folder, model, mine, prompts):
    """With tp-exact: one rank, two and three, and processes, by the tokens and by each position kept."""
    more = "--tp-exact", "on"
    d = Shim(folder, "exact", model, "--backend", "cuda-shim", *more)
    alike = alone(d, prompts)
    check("exact sums over devices" in d.log(), "exact: the log says so")
    check(d.stop() == 0, "exact: it ends well")
    check(any(alike[what] != mine[what] for what in mine), "exact: it is another rounding")
    ranks(folder, "exact", model, alike, prompts, *more)
    if not fast:
        w = World(folder, "exact2", model, 2, more=more)
        try:
            same(w.d, "2 processes, exact", alike, prompts, True)
        finally:
            w.end()
    env = World.env(2)
    both = [subprocess.Popen(command(folder, "unlike%d" % i, model, SHIM, ("--backend", "cuda-shim", *more[:2 * i])),
                             stderr=subprocess.PIPE, text=True, env=dict(os.environ, **env(i))) for i in range(2)]
    said = [p.communicate(timeout=120)[1] for p in both]
    check(all(p.returncode > 0 for p in both) and "rank 1 computes something else" in said[0], "exact in one of two processes: %r" % (said,))
    r = subprocess.run(command(folder, "cpu", model, "skvd", ("--backend", "cpu", *more)), stderr=subprocess.PIPE, text=True, timeout=60)
    check(r.returncode != 0 and "only the cuda backend" in r.stderr, "exact on the CPU: %r" % r.stderr)


def steps(d):
    """Decode steps so far, and how many of them were prepared while the one before ran."""
    with d.peer() as p:
        s = p.call("status")
    return s["steps_graph"] + s["steps_plain"], s["steps_ahead"]


def prepared(d, prompts):
    """A step that runs is prepared during the one before where nobody ends, comes or asks; where somebody does, another one is
    written, and what the others answer and keep is what they do alone."""
    full, tight = prompts[0], prompts[1]
    n = 60

    def start(p, of, n, **more):
        return p.start("generate", tokens=of[1], max_tokens=n, temperature=0, ignore_eos=True, kv=of[3], **more)

    before = steps(d)
    alone = [d.answer(of[1], n, session="alone%d" % i, kv=of[3])[0] for i, of in enumerate((full, tight))]
    kept = [d.kept("alone%d" % i) for i in range(2)]
    after = steps(d)
    check(after[1] - before[1] == 2 * (n - 2), "%d of %d decode steps of two requests, one after the other, were prepared while the "
          "one before ran" % (after[1] - before[1], after[0] - before[0]))
    text = alone[0]["text"]
    at = len(text) // 2
    short, _ = d.answer(full[1], n, kv=full[3], stop=[text[at:at + 8]])
    check(short["finish"] == "stop" and 1 < len(short["tokens"]) < n - 1, "it ends at its stop text after %d tokens" % len(short["tokens"]))

    before = steps(d)
    with d.peer(timeout=900) as p, d.peer(timeout=900) as q:
        company = [start(p, of, n, session="company%d" % i) for i, of in enumerate((full, tight))]
        while not p.tokens(company[1]):
            p.seen.append(p.message())
        with d.peer(timeout=900) as asks:
            seq = [s["id"] for s in asks.call("sequences")["sequences"] if s["session"] == "company1"][0]
            some = asks.call("kept", sequence=seq)
        stops, broken = start(q, full, n, stop=[text[at:at + 8]]), start(q, tight, 900)
        stopped = q.result(stops)
        while not q.tokens(broken):
            q.seen.append(q.message())
        q.call("cancel", msgid=broken)
        got = [p.result(i) for i in company]
    after = steps(d)
    check(all(a["tokens"] == b["tokens"] for a, b in zip(got, alone)), "with others that end, come and are broken off: the same answers")
    check([d.kept("company%d" % i) for i in range(2)] == kept, "and the same positions kept")
    check(some["n"] < len(tight[1]) + n and all(len(set(h["positions"])) == len(h["positions"]) for layer in some["layers"]
                                               for h in layer["heads"]), "what is kept is asked for in the middle of it")
    check(stopped["tokens"] == short["tokens"], "the same end at the stop text")
    check(0 < after[1] - before[1] < after[0] - before[0], "%d of %d decode steps of four requests beside each other were prepared"
          % (after[1] - before[1], after[0] - before[0]))


class World:
    """A rank a process, as torchrun or mpirun would start them; the first one listens."""

    def __init__(self, folder, name, model, n, names=("RANK", "WORLD_SIZE", "LOCAL_RANK"), more=()):
        env = self.env(n, names)
        self.logs = [os.path.join(folder, "%s-%d.log" % (name, i)) for i in range(1, n)]
        self.followers = []
        for i in range(1, n):
            argv = command(folder, name, model, SHIM, ("--backend", "cuda-shim", *more))
            with open(self.logs[i - 1], "wb") as log:
                self.followers.append(subprocess.Popen(argv, stderr=log, env=dict(os.environ, **env(i))))
        self.d = Shim(folder, name, model, "--backend", "cuda-shim", *more, env=env(0))

    @staticmethod
    def env(n, names=("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        """Of a rank, by its number."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        return lambda rank: dict(zip(names, (str(rank), str(n), str(rank))), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                                 SHIM_DEVICES=str(n))

    def log(self, i):
        with open(self.logs[i], errors="replace") as f:
            return f.read()

    def end(self):
        for f in self.followers:
            if f.poll() is None:
                f.kill()
            f.wait()
        if self.d.p.poll() is None:
            self.d.p.kill()
        self.d.stop()


def processes(folder, model, mine, prompts):
    mpi = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    for n, names in (2, ("RANK", "WORLD_SIZE", "LOCAL_RANK")), (3, mpi):
        w = World(folder, "world%d" % n, model, n, names)
        try:
            same(w.d, "%d processes" % n, mine, prompts)
            for p in [*w.followers, w.d.p]:  # all of them get it, as from a terminal
                p.terminate()
            check(w.d.stop() == 0 and [f.wait(30) for f in w.followers] == [0] * (n - 1), "%d processes end well" % n)
        finally:
            w.end()


def lost_rank(folder, model):
    for who in "follower", "leader":
        w = World(folder, "lost-" + who, model, 2)
        try:
            with w.d.peer(timeout=120) as p:
                msgid = p.start("generate", tokens=[1, 2, 3], max_tokens=900, temperature=0, ignore_eos=True)
                while not p.tokens(msgid):
                    p.seen.append(p.message())
                if who == "follower":
                    w.followers[0].kill()
                    m = p.wait(msgid)
                    check(m[2] is not None and m[2]["code"] == "internal" and "rank 1" in m[2]["message"], "a lost rank: %r" % (m[2],))
                    check(w.d.p.wait(30) == 1 and "rank 1" in w.d.log(), "a lost rank: the service ends and says whose")
                else:
                    w.d.p.kill()
                    check(w.followers[0].wait(30) == 1 and "rank 0" in w.log(0), "a lost leader: the follower ends and says so")
        finally:
            w.end()


def lost(folder, model):
    """An illegal access on the device in the middle of an answer: an error to the client, a message, exit status 1."""
    d = Shim(folder, "lost", model, "--backend", "cuda-shim", env={"SHIM_FAIL": "300"})
    with d.peer(timeout=300) as p:
        msgid = p.start("generate", tokens=[1, 2, 3], max_tokens=1000, temperature=0, ignore_eos=True)
        m = p.wait(msgid)
    check(m[2] is not None and m[2]["code"] == "internal" and "error 700" in m[2]["message"], "lost device: %r" % (m[2],))
    check(d.p.wait(30) == 1 and "the device failed" in d.log(), "lost device: the daemon ends and says why")
    d.stop()


def graphs(d, what):
    with d.peer() as p:
        s = p.call("status")
        names = s["backend"], p.call("hello", client="test", version="1")["model"]["backend"]
    check(names == ("cuda-shim", "cuda-shim"), "%s: status and hello name the shim as what computes: %s, %s" % (what, *names))
    check(s["steps_graph"] > 2 and s["steps_plain"] == 0, "%s: status: %d decode steps, each one graph" % (what, s["steps_graph"]))


def small(folder):
    """A random model of four layers."""
    model = os.path.join(folder, "small.gguf")
    subprocess.run([os.path.join(top, "tests/random-model"), "--layers", "4", "--width", "192", "--heads", "9", "--kv-heads", "3",
                    "--head-dim", "64", "--ffn", "512", "--vocab", "2000", "--type", "Q4_1", "--embed-type", "Q8_0", "--tied", "0",
                    "--context", "1024", model], check=True, stdout=subprocess.DEVNULL)
    rng = random.Random(5)
    prompts = [(what, [rng.randrange(300, 2000) for _ in range(n)], 12, kv) for what, n, kv in
               (("everything kept", 30, {"policy": "full"}), ("a budget of 32", 90, {"policy": "sparse", "budget": 32, "recent": 8}),
                ("a budget of 64 of many", 300, {"policy": "article", "budget": 64, "full_layers": 1}))]
    d = Shim(folder, "small", model, "--backend", "cuda-shim")
    check("backend=cuda-shim" in d.log(), "the log names the shim")
    against_cpu(folder, "small", model, d, prompts)
    mine = alone(d, prompts)
    drawn = [d.answer(prompts[0][1], 12, seed=7, temperature=1.0, top_k=50)[0]["tokens"] for _ in range(2)]
    check(drawn[0] == drawn[1] != mine["everything kept"][0], "drawn on the device: %s" % drawn[0])
    prepared(d, prompts)
    graphs(d, "small")
    check(d.stop() == 0, "it ends well")
    ranks(folder, "small", model, mine, prompts)
    processes(folder, model, mine, prompts)
    exact(folder, model, mine, prompts)
    lost_rank(folder, model)
    lost(folder, model)


def real(folder):
    d = Shim(folder, "real", MODEL, "--backend", "cuda-shim")
    reference_logits(d)
    if not fast:
        text = "Name the three primary colours, one after the other, and say which of them you like best and why. "
        with d.peer() as p:
            chat = [p.call("apply_template", messages=[{"role": "user", "content": c}])["tokens"]
                    for c in ("What is the capital of France?", 3 * text)]
        prompts = [("everything kept", chat[0], 6, {"policy": "full"}),
                   ("a budget of 32", chat[1], 6, {"policy": "sparse", "budget": 32, "recent": 8})]
        against_cpu(folder, "real", MODEL, d, prompts)
        ranks(folder, "real", MODEL, alone(d, prompts), prompts)
        reference_evict(d)
    graphs(d, "real")
    check(d.stop() == 0, "it ends well")


def main():
    t = time.time()
    with tempfile.TemporaryDirectory() as folder:
        small(folder)
        print("%.0f s" % (time.time() - t), flush=True)
        if os.access(MODEL, os.R_OK):
            real(folder)
        else:
            print("no model at %s: the reference is not compared" % MODEL)
    print("%.0f s" % (time.time() - t))
    print("%d passed, %d failed" % (passed, failed))
    return failed != 0


sys.exit(main())
