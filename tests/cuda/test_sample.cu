// test_sample.cu - choosing tokens on the device against sorting and doubles.
#include "tests/cuda/rig.h"

using rig::between;
using rig::dev;
using rig::uniform;

struct ref_cand {
    double v;
    int id;
};

// The rules of engine/sampler.h by sorting; the draw goes by falling logits. -1: no number among them.
static int want_token(std::vector<float> x, const smp_row &u, const smp_pen *pen)
{
    for (int i = 0; i < u.n_pen; i++) {
        float &v = x[pen[i].token];
        v = v > 0 ? v / u.repeat : v * u.repeat;
        v -= (float)pen[i].count * u.frequency + u.presence;
    }
    std::vector<ref_cand> c;
    for (size_t i = 0; i < x.size(); i++)
        if (x[i] > -INFINITY)
            c.push_back({ x[i], (int)i });
    if (c.empty())
        return -1;
    std::sort(c.begin(), c.end(), [](const ref_cand &a, const ref_cand &b) { return a.v > b.v || (a.v == b.v && a.id < b.id); });
    if (!(u.temperature > 0))
        return c[0].id;
    double top = c[0].v, sum = 0, acc = 0;
    auto weight = [=](double v, double t) { return v == top ? 1.0 : exp((v - top) / t); };
    if (u.top_k > 0 && (size_t)u.top_k < c.size())
        c.resize(u.top_k);
    if (u.top_p < 1) {
        for (const ref_cand &k : c)
            sum += weight(k.v, 1);
        size_t n = 0;
        while (n < c.size() && (n == 0 || acc < sum * (double)u.top_p))
            acc += weight(c[n++].v, 1);
        c.resize(n);
    }
    while (u.min_p > 0 && c.size() > 1 && c.back().v < (double)(float)((float)top + logf(u.min_p)))
        c.pop_back();
    sum = acc = 0;
    for (const ref_cand &k : c)
        sum += weight(k.v, (double)u.temperature);
    for (const ref_cand &k : c) {
        acc += weight(k.v, (double)u.temperature);
        if (acc > u.u * sum)
            return k.id;
    }
    return c.back().id;
}

// True when a hair's difference in the shares decides: sums of rounded numbers may go either way there.
static bool on_the_edge(const std::vector<float> &x, const smp_row &u, const smp_pen *pen, int want)
{
    for (int k = 0; k < 9; k++) {
        smp_row v = u;
        v.u = std::min(std::max(u.u + (k % 3 - 1) * 2e-5, 0.0), 0.9999999);
        v.top_p = u.top_p < 1 ? std::min(u.top_p + (float)(k / 3 - 1) * 2e-5f, 0.999999f) : u.top_p;
        if (want_token(x, v, pen) != want)
            return true;
    }
    return false;
}

static int edges, judged;

// `ranks` parts side by side, as a gather leaves them.
static void choose(int vocab, int ranks, const std::vector<std::vector<float>> &x, std::vector<smp_row> row,
                   const std::vector<smp_pen> &pen)
{
    int n = (int)x.size(), part = (vocab + ranks - 1) / ranks;
    size_t stride = (size_t)n * part;
    std::vector<float> laid(stride * ranks, 1e30f); // past a part's end: must not be looked at
    for (int r = 0; r < n; r++)
        for (int i = 0; i < vocab; i++)
            laid[i / part * stride + (size_t)r * part + i % part] = x[r][i];
    dev<float> dx(laid);
    dev<smp_row> drow(row);
    dev<smp_pen> dpen(pen);
    dev<int32_t> out(std::vector<int32_t>(n, -7));
    cu_sample(0, { dx.p, stride, vocab, part, drow.p, dpen.p, out.p }, n);
    std::vector<int32_t> got = out.get();
    std::vector<float> after = dx.get();
    for (int r = 0; r < n; r++) {
        if (!row[r].on) {
            CHECK(got[r] == -7);
            bool same = true; // the host's rows come back as they were
            for (int i = 0; i < vocab; i++)
                same = same && memcmp(&after[i / part * stride + (size_t)r * part + i % part], &x[r][i], 4) == 0;
            CHECK(same);
            continue;
        }
        int want = want_token(x[r], row[r], &pen[r * SMP_PENS]);
        judged++;
        if (got[r] != want && on_the_edge(x[r], row[r], &pen[r * SMP_PENS], want)) {
            edges++;
            continue;
        }
        if (got[r] != want)
            printf("vocabulary %d, %d ranks, top_k %d top_p %g min_p %g temperature %g: got %d, want %d\n", vocab, ranks,
                   row[r].top_k, (double)row[r].top_p, (double)row[r].min_p, (double)row[r].temperature, got[r], want);
        CHECK(got[r] == want);
    }
}

static std::vector<float> logits(int vocab, int kind)
{
    std::vector<float> x = rig::randoms(vocab, 8.0f);
    for (int i = 0; i < vocab; i++) {
        if (kind == 1) // ties everywhere
            x[i] = (float)between(-2, 2);
        else if (kind == 2) // sorted: the best are in few threads' hands
            x[i] = (float)i / (float)vocab;
        else if (kind == 3 && !between(0, 2))
            x[i] = between(0, 1) ? NAN : -INFINITY;
        else if (kind == 4)
            x[i] = NAN;
    }
    if (kind == 5)
        x[between(0, vocab - 1)] = INFINITY;
    return x;
}

static void batch(int vocab, int kind, int ranks, int rows)
{
    std::vector<std::vector<float>> x;
    std::vector<smp_row> row;
    std::vector<smp_pen> pen((size_t)rows * SMP_PENS, smp_pen{ 0, 0 });
    const int ks[] = { 0, 1, 2, 40, 300, 511, 600 };
    for (int r = 0; r < rows; r++) {
        x.push_back(logits(vocab, kind));
        smp_row u = { between(0, 5) > 0, ks[between(0, 6)], 0, 0.8f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, 0.0 };
        if (u.top_k >= vocab)
            u.top_k = 0;
        if (!between(0, 3))
            u.temperature = between(0, 1) ? 0.0f : 2.0f;
        if (between(0, 1))
            u.top_p = between(0, 1) ? 0.95f : 0.1f;
        if (between(0, 1))
            u.min_p = between(0, 1) ? 0.05f : 0.5f;
        u.u = uniform(0.0f, 0.999999f);
        if (kind != 5 && between(0, 1)) {
            u.repeat = 1.3f;
            u.presence = 0.4f;
            u.frequency = 0.2f;
            u.n_pen = std::min(between(0, SMP_PENS), vocab);
            for (int i = 0; i < u.n_pen; i++)
                pen[r * SMP_PENS + i] = { (int)((int64_t)vocab * i / u.n_pen), between(1, 3) };
        }
        row.push_back(u);
    }
    choose(vocab, ranks, x, row, pen);
}

int main(int argc, char **argv)
{
    bool small_run = argc > 1 && strcmp(argv[1], "small") == 0;
    for (int round = 0; round < (small_run ? 1 : 4); round++)
        for (int kind = 0; kind < 6; kind++)
            for (int vocab : { 1, 5, 301, 513, 5000 })
                batch(vocab, kind, vocab > 300 ? between(1, 3) : 1, 3);
    batch(20000, 0, 2, 4);
    if (!small_run) { // so many in the running that the short list overflows
        std::vector<float> x = logits(60000, 0);
        smp_row u = { 1, 511, 0, 1.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, 0.7 };
        choose(60000, 1, { x, x }, { u, u }, std::vector<smp_pen>(2 * SMP_PENS));
        batch(49152, 0, 1, 6);
    }
    CHECK(edges * 50 < judged);
    return rig::done();
}
