// test_select.cu - phase 3 after a prefill, against a selection by repeated search.
//
// The expectation is computed the slow way: sort by (score, position, head) with std::sort and take from the top. What
// is kept must be equal, not close: the pooled scores of both sides are the same f32 operations.
#include "tests/cuda/rig.h"

extern "C" {
#include "kernels/ops.h"
}

using rig::between;
using rig::close_to;
using rig::dev;
using rig::kv_rig;
using rig::randoms;
using rig::uniform;

struct item {
    float score;
    int pos, head, slot;
    bool operator<(const item &o) const // better first
    {
        return score != o.score ? score > o.score : pos != o.pos ? pos < o.pos : head < o.head;
    }
};

struct want_head {
    std::vector<item> cand;
    std::vector<bool> keep;
    int budget, n_floor, take;
};

struct rule_case {
    kern_rule rule;
    std::vector<kern_range> pins;
    std::vector<float> norm; // [n_kv][n], by_value
    int n_query;
};

static std::vector<float> pooled(const kern_rule &r, int width, int shift, const std::vector<float> &in)
{
    std::vector<float> out = in;
    int n = (int)in.size(), from = std::max(r.pool_from, 0), to = std::min(r.pool_to, n), half = width / 2;
    for (int i = from; width > 1 && i < to; i++) {
        float sum = 0, top = 0;
        bool any = false;
        for (int j = i - shift - half; j <= i - shift + half; j++)
            if (j >= from && j < to) {
                sum += in[j];
                top = any ? std::max(top, in[j]) : in[j];
                any = true;
            }
        out[i] = r.pool_kind == KERN_POOL_MAX ? top : sum / (float)width;
    }
    return out;
}

static std::vector<want_head> want_keep(kv_rig &kv, const rule_case &c, const std::vector<float> &row, int stride)
{
    const kern_rule &r = c.rule;
    std::vector<want_head> w(kv.n_kv);
    std::vector<item> open;
    bool shared = r.use_score && r.head_floor < 1;
    int left = 0;
    for (int h = 0; h < kv.n_kv; h++) {
        int n = kv.len[kv.index(1, h)], newest = 0, safe = 0;
        std::vector<float> s(row.begin() + (long)h * stride, row.begin() + (long)h * stride + n), p = pooled(r, r.pool, r.pool_shift, s);
        w[h].keep.assign(n, r.budget == 0);
        for (int i = 0; i < n; i++)
            newest = std::max(newest, kv.pos(1, h, i));
        for (int i = 0; i < n; i++) {
            int pos = kv.pos(1, h, i);
            bool pinned = false;
            for (const kern_range &g : c.pins)
                pinned = pinned || (pos >= g.from && pos < g.to);
            if (pos < r.sink || pos > newest - r.recent || pinned) {
                w[h].keep[i] = true;
                safe++;
            } else {
                w[h].cand.push_back({ r.use_score ? p[i] : (float)pos, pos, h, i });
            }
        }
        std::sort(w[h].cand.begin(), w[h].cand.end());
        int cand = (int)w[h].cand.size();
        w[h].budget = std::max(r.budget - safe, 0);
        w[h].n_floor = std::min((int)floorf((float)w[h].budget * r.head_floor), cand);
        w[h].take = shared ? w[h].n_floor : std::min(w[h].budget, cand);
        left += w[h].budget - w[h].n_floor;
        open.insert(open.end(), w[h].cand.begin() + w[h].n_floor, w[h].cand.end());
    }
    if (r.budget == 0)
        return w;
    std::sort(open.begin(), open.end());
    for (int i = 0; shared && i < left && i < (int)open.size(); i++)
        w[open[i].head].take++;
    for (int h = 0; h < kv.n_kv; h++) {
        std::vector<item> &cand = w[h].cand;
        bool wide = r.wide > 1 && r.use_score;
        int k = w[h].take;
        if (k < (int)cand.size())
            k = wide ? (int)((float)k * r.narrow) : r.by_value ? k / 2 : k;
        for (int i = 0; i < k; i++)
            w[h].keep[cand[i].slot] = true;
        if (k == w[h].take)
            continue;
        cand.erase(cand.begin(), cand.begin() + k);
        std::vector<float> own(row.begin() + (long)h * stride, row.begin() + (long)h * stride + (long)w[h].keep.size());
        own = pooled(r, r.wide, r.wide_shift, own);
        for (item &x : cand)
            x.score = wide ? own[x.slot]
                           : (x.score * (1.0f / (float)std::max(c.n_query, 1)) + r.value_eps) *
                                 c.norm[(size_t)h * stride + x.slot];
        std::sort(cand.begin(), cand.end());
        for (int i = 0; i < w[h].take - k; i++)
            w[h].keep[cand[i].slot] = true;
    }
    return w;
}

// The bytes of K, V and scales of one slot.
static std::vector<float> pair_of(kv_rig &kv, int head, int slot)
{
    std::vector<float> a = kv.k(1, head, slot), b = kv.v(1, head, slot);
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

static void check_result(kv_rig &before, kv_rig &kv, const rule_case &c, const std::vector<want_head> &w,
                         const std::vector<float> &row, int stride, const std::vector<float> &mass)
{
    bool shared = c.rule.use_score && c.rule.head_floor < 1;
    long total = 0;
    for (int h = 0; h < kv.n_kv; h++)
        total += kv.len[kv.index(1, h)];
    for (int h = 0; h < kv.n_kv; h++) {
        std::vector<std::pair<int, int>> order; // position, old slot
        double kept = 0, all = 0;
        for (size_t i = 0; i < w[h].keep.size(); i++) {
            double f = c.rule.use_score ? row[(size_t)h * stride + i] : 0;
            all += f;
            if (!w[h].keep[i])
                continue;
            kept += f;
            order.push_back({ before.pos(1, h, (int)i), (int)i });
        }
        std::sort(order.begin(), order.end());
        size_t idx = kv.index(1, h);
        int n = kv.len[idx], bad = 0;
        CHECK(n == (int)order.size());
        for (int i = 0; i < n && i < (int)order.size(); i++) {
            int old = order[i].second;
            float score = c.rule.use_score ? row[(size_t)h * stride + old] : 0.0f;
            bad += kv.pos(1, h, i) != order[i].first || kv.score(1, h, i) != score || pair_of(kv, h, i) != pair_of(before, h, old);
        }
        CHECK(bad == 0);
        bool full = shared && total >= (long)c.rule.budget * kv.n_kv;
        CHECK(kv.cap[idx] == (c.rule.budget == 0                ? INT32_MAX
                              : full || n > c.rule.budget ? n
                                                          : c.rule.budget));
        CHECK(kv.victim[idx] == -1);
        close_to("kept mass", mass[h], all > 0 ? kept / all : w[h].keep.size() ? (double)n / w[h].keep.size() : 1, 1e-6);
    }
}

static void select_one(kern_kv_dtype dt, int hd, int n_kv, const std::vector<int> &len, rule_case c, bool shuffled)
{
    int most = *std::max_element(len.begin(), len.end()), pages = (most + 31) / 32 + 1, stride = 1;
    while (stride < pages * 32)
        stride <<= 1;
    kv_rig kv(dt, hd, 2, n_kv, pages), before(dt, hd, 2, n_kv, pages);
    std::vector<float> row = randoms((size_t)n_kv * stride, 1.0f);
    for (float &f : row) // many ties
        f = between(0, 2) ? fabsf(f) : 0.25f * (float)between(0, 3);
    for (int h = 0; h < n_kv; h++) {
        kv.fill(1, h, len[h], 1.0f);
        for (int i = 0; shuffled && i < len[h]; i++)
            std::swap(kv.pos(1, h, i), kv.pos(1, h, between(0, len[h] - 1)));
    }
    c.norm = randoms((size_t)n_kv * stride);
    for (float &f : c.norm)
        f = fabsf(f);
    c.rule.pool_to = between(most / 2, most + 3);
    before.pool = kv.pool;
    before.table = kv.table;
    before.len = kv.len;
    kv.put();

    std::vector<int32_t> pins;
    for (const kern_range &g : c.pins) {
        pins.push_back(g.from);
        pins.push_back(g.to);
    }
    size_t cells = (size_t)n_kv * stride;
    dev<float> drow(row), dpooled(cells), dnorm(c.norm), dmass(n_kv);
    dev<int32_t> dpin(pins), dpos(cells), dkeep(cells), dsrc(cells);
    dev<sel_key> dkey(cells);
    dev<sel_head> dhead(n_kv);
    dev<unsigned char> spare((size_t)n_kv * pages * kv.pl.bytes);
    const kern_rule &r = c.rule;
    sel_params p;
    memset(&p, 0, sizeof p);
    p.kv = kv.view;
    p.lane = 1;
    p.hd = hd;
    p.budget = r.budget;
    p.sink = r.sink;
    p.recent = r.recent;
    p.pool = r.pool;
    p.pool_shift = r.pool_shift;
    p.wide = r.wide;
    p.wide_shift = r.wide_shift;
    p.narrow = r.narrow;
    p.pool_max = r.pool_kind == KERN_POOL_MAX;
    p.pool_from = r.pool_from;
    p.pool_to = r.pool_to;
    p.use_score = r.use_score;
    p.by_value = r.by_value;
    p.shared = r.use_score && r.head_floor < 1;
    p.n_pin = (int)c.pins.size();
    p.head_floor = r.head_floor;
    p.value_eps = r.value_eps;
    p.per_query = 1.0f / (float)std::max(c.n_query, 1);
    p.pin = dpin.p;
    p.row = drow.p;
    p.row_stride = stride;
    p.stride = stride;
    p.pooled = dpooled.p;
    p.norm = dnorm.p;
    p.pos = dpos.p;
    p.keep = dkeep.p;
    p.src = dsrc.p;
    p.key = dkey.p;
    p.head = dhead.p;
    p.spare = spare.p;
    p.kept_mass = dmass.p;
    cu_select_begin(0, p);
    if (r.budget && (r.by_value || cu_select_wide(p)))
        cu_select_rest(0, p);
    cu_select_end(0, p, dt, pages);
    kv.get();
    check_result(before, kv, c, want_keep(before, c, row, stride), row, stride, dmass.get());
}

static rule_case random_rule(int most)
{
    rule_case c;
    memset(&c.rule, 0, sizeof c.rule);
    c.rule.decay = c.rule.weight = 1.0f;
    const int pools[] = { 1, 3, 7, 21 };
    const float floors[] = { 1.0f, 1.0f, 0.5f, 0.2f, 0.0f };
    c.rule.budget = between(1, most + most / 4 + 1);
    c.rule.sink = between(0, 4);
    c.rule.recent = between(1, 1 + most / 8);
    c.rule.pool = pools[between(0, 3)];
    c.rule.pool_kind = between(0, 1) ? KERN_POOL_MAX : KERN_POOL_AVG;
    c.rule.pool_from = between(0, 5);
    c.rule.use_score = between(0, 4) != 0;
    c.rule.by_value = between(0, 2) == 0;
    c.rule.pool_shift = between(0, 2) ? 0 : between(-4, 4);
    c.rule.wide = between(0, 2) ? 0 : 2 * between(1, 20) + 1;
    c.rule.wide_shift = between(-15, 15);
    c.rule.narrow = uniform(0.0f, 1.0f);
    c.rule.value_eps = 1e-3f;
    c.rule.head_floor = floors[between(0, 4)];
    c.n_query = between(0, 32);
    for (int i = between(0, 2); i > 0; i--) {
        int from = between(0, most);
        c.pins.push_back({ from, from + between(1, 6) });
    }
    return c;
}

// Value norms: V out of pages, |row| sums of a product.
static void test_values(kern_kv_dtype dt)
{
    const int hd = 64, n = 70, d_model = 300;
    kv_rig kv(dt, hd, 2, 2, 4);
    kv.fill(1, 1, n, 1.0f);
    kv.put();
    dev<unsigned short> out(64 * hd);
    sel_params p;
    memset(&p, 0, sizeof p);
    p.kv = kv.view;
    p.lane = 1;
    p.hd = hd;
    cu_select_values(0, p, dt, 1, 32, 38, out.p); // slots 32 .. 69
    std::vector<unsigned short> v = out.get();
    int bad = 0;
    for (int i = 0; i < 38; i++)
        for (int d = 0; d < hd; d++)
            bad += v[i * hd + d] != rig::to_bf16(kv.v(1, 1, 32 + i)[d]);
    CHECK(bad == 0);
    std::vector<float> c = randoms(5 * d_model), norm(5, 1.0f);
    dev<float> dc(c), dn(norm);
    cu_select_norm(0, dc.p, 5, d_model, 0.25f, dn.p);
    norm = dn.get();
    for (int i = 0; i < 5; i++) {
        double s = 0;
        for (int d = 0; d < d_model; d++)
            s += fabs(c[i * d_model + d]);
        close_to("value norm", norm[i], 1 + 0.25 * s, 1e-4);
    }
}

int main(int argc, char **argv)
{
    bool small_run = argc > 1 && strcmp(argv[1], "small") == 0;
    const int lengths[] = { 1, 31, 32, 33, 257, 1000 };
    for (int i = 0; i < (small_run ? 20 : 120); i++) {
        int n_kv = between(1, 8), most = lengths[between(0, small_run ? 4 : 5)];
        std::vector<int> len(n_kv, most);
        for (int h = 0; h < n_kv && i % 3 == 0; h++)
            len[h] = std::max(1, most - between(0, most / 2));
        rule_case c = random_rule(most);
        if (i % 20 == 7)
            c.rule.budget = 0;
        select_one(i % 2 ? KERN_KV_INT8 : KERN_KV_BF16, i % 5 ? 64 : 80, n_kv, len, c, i % 4 == 1);
    }
    test_values(KERN_KV_BF16);
    test_values(KERN_KV_INT8);
    return rig::done();
}
