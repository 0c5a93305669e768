// test_attn.cu - rope and store, prefill in two passes, decode with scores and victims, against plain loops in double.
#include "tests/cuda/rig.h"

#include <string>

using rig::between;
using rig::close_to;
using rig::dev;
using rig::kv_rig;
using rig::randoms;
using rig::uniform;

static const int head_sizes[] = { 64, 80, 96, 128, 256 };
static const int groups[] = { 1, 3, 4, 8 };
static const int lengths[] = { 1, 31, 32, 33, 257, 1000 };
static const kern_kv_dtype dtypes[] = { KERN_KV_BF16, KERN_KV_INT8 };
static bool small_run; // sanitizer builds: fewer and shorter

static float bf16_round(float f)
{
    return rig::from_bf16(rig::to_bf16(f));
}

static double dot(const float *a, const std::vector<float> &b)
{
    double s = 0;
    for (size_t i = 0; i < b.size(); i++)
        s += (double)a[i] * b[i];
    return s;
}

// A[slot] = softmax over slots [0, n) of scale q k.
static std::vector<double> softmax_row(kv_rig &kv, int lane, int head, const float *q, int n, double scale,
                                       double *lse = nullptr)
{
    std::vector<double> a(n);
    double m = -1e300, l = 0;
    for (int s = 0; s < n; s++) {
        a[s] = scale * dot(q, kv.k(lane, head, s));
        m = std::max(m, a[s]);
    }
    for (double &x : a)
        l += x = exp(x - m);
    for (double &x : a)
        x /= l;
    if (lse)
        *lse = m + log(l);
    return a;
}

// --- rope and store ---------------------------------------------------------------------------------------

struct rope_case {
    int hd, g, n_kv, rot, half;
    bool bias, norms;
    kern_kv_dtype dtype;
};

static std::vector<float> rope_want(const rope_case &c, const float *v, const float *bias, const float *norm, int pos,
                                    const std::vector<float> &freq, bool rotate)
{
    std::vector<float> o(c.hd);
    double s = 0;
    for (int i = 0; i < c.hd; i++) {
        o[i] = v[i] + (bias ? bias[i] : 0.0f);
        s += (double)o[i] * o[i];
    }
    if (!rotate)
        return o;
    if (norm)
        for (int i = 0; i < c.hd; i++)
            o[i] = (float)(o[i] / sqrt(s / c.hd + 1e-5) * norm[i]);
    for (int i = 0; i < c.rot / 2; i++) {
        int a = c.half ? i : 2 * i, b = c.half ? i + c.rot / 2 : 2 * i + 1;
        double angle = (double)((float)pos * freq[i]), x = o[a], y = o[b];
        o[a] = (float)(x * cos(angle) - y * sin(angle));
        o[b] = (float)(x * sin(angle) + y * cos(angle));
    }
    return o;
}

static void rope_one(const rope_case &c)
{
    const int n_row = 3, n_head = c.n_kv * c.g, heads = n_head + 2 * c.n_kv;
    kv_rig kv(c.dtype, c.hd, 2, c.n_kv, 2);
    std::vector<float> qkv = randoms((size_t)n_row * heads * c.hd, 2.0f), freq(c.rot / 2);
    std::vector<float> bq = randoms(n_head * c.hd), bk = randoms(c.n_kv * c.hd), bv = randoms(c.n_kv * c.hd);
    std::vector<float> qn = randoms(c.hd), kn = randoms(c.hd);
    for (int i = 0; i < c.rot / 2; i++)
        freq[i] = powf(10000.0f, -2.0f * (float)i / (float)c.rot);
    std::vector<int32_t> lane = { 1, -1, 0 }, pos = { 7, 5, 4000 }, slot(n_row * c.n_kv, 33);
    for (int h = 0; h < c.n_kv; h++)
        slot[2 * c.n_kv + h] = -1; // row 2 overwrites its victim
    for (int &v : kv.victim)
        v = 5;
    kv.score(0, 0, 5) = 3.0f;
    kv.put();
    dev<float> dq(qkv), df(freq), dbq(bq), dbk(bk), dbv(bv), dqn(qn), dkn(kn);
    dev<int32_t> dl(lane), dp(pos), ds(slot);
    dev<unsigned short> q16((size_t)n_row * n_head * c.hd);
    rope_params p = { n_head, c.n_kv, c.hd, c.rot, c.half, 1e-5f, df.p, c.bias ? dbq.p : nullptr,
                      c.bias ? dbk.p : nullptr, c.bias ? dbv.p : nullptr, c.norms ? dqn.p : nullptr,
                      c.norms ? dkn.p : nullptr };
    cu_rope_store(0, c.dtype, p, kv.view, { nullptr, dl.p, dp.p, ds.p }, 0, n_row, dq.p, q16.p);
    std::vector<float> got = dq.get();
    std::vector<unsigned short> got16 = q16.get();
    kv.get();
    double worst_q = 0, worst_k = 0, worst_v = 0;
    for (int r = 0; r < n_row; r += 2)
        for (int h = 0; h < heads; h++) {
            bool is_q = h < n_head, is_v = h >= n_head + c.n_kv;
            int kh = is_v ? h - n_head - c.n_kv : h - n_head, at = r == 0 ? 33 : 5;
            const float *bias = is_q ? &bq[h * c.hd] : is_v ? &bv[kh * c.hd] : &bk[kh * c.hd];
            std::vector<float> want = rope_want(c, &qkv[((size_t)r * heads + h) * c.hd], c.bias ? bias : nullptr,
                                                c.norms ? (is_q ? qn : kn).data() : nullptr, pos[r], freq, !is_v);
            float top = 0;
            for (float f : want)
                top = std::max(top, fabsf(f));
            std::vector<float> have = is_q   ? std::vector<float>(&got[((size_t)r * heads + h) * c.hd],
                                                                  &got[((size_t)r * heads + h) * c.hd] + c.hd)
                                      : is_v ? kv.v(lane[r], kh, at)
                                             : kv.k(lane[r], kh, at);
            double &worst = is_q ? worst_q : is_v ? worst_v : worst_k;
            for (int i = 0; i < c.hd; i++) {
                rig::worsen(worst, fabs(have[i] - want[i]) / top);
                if (is_q)
                    CHECK(got16[((size_t)r * n_head + h) * c.hd + i] == rig::to_bf16(have[i]));
            }
        }
    double tol = c.dtype == KERN_KV_INT8 ? 0.51 / 127 : 1.0 / 256;
    close_to("rope q", worst_q, 0, 2e-5);
    close_to("rope k", worst_k, 0, tol);
    close_to("rope v", worst_v, 0, tol);
    CHECK(kv.pos(1, 0, 33) == 7 && kv.pos(0, c.n_kv - 1, 5) == 4000 && kv.score(0, 0, 5) == 0.0f);
    CHECK(memcmp(&got[(size_t)heads * c.hd], &qkv[(size_t)heads * c.hd], (size_t)heads * c.hd * 4) == 0); // padding row
}

static void test_rope()
{
    for (int hd : head_sizes)
        for (kern_kv_dtype dt : dtypes)
            rope_one({ hd, groups[between(0, 3)], between(1, 3), between(0, 1) ? hd : hd / 2, between(0, 1),
                       between(0, 1) == 1, between(0, 1) == 1, dt });
}

// --- prefill ------------------------------------------------------------------------------------------------

struct prefill_seg {
    int lane, rows, len, scored; // rows of the pass; slots with them; the last `scored` rows count
};

static void prefill_want(kv_rig &kv, const prefill_seg &s, int row0, int g, const std::vector<float> &q,
                         const std::vector<unsigned short> &out, const std::vector<float> &lse, int lse_rows,
                         const std::vector<float> &score, int stride, int n_head, double scale)
{
    int hd = kv.pl.head_dim;
    double worst_o = 0, worst_lse = 0, worst_score = 0;
    for (int kh = 0; kh < kv.n_kv; kh++) {
        std::vector<double> want(s.len, 0.0);
        for (int i = 0; i < s.rows; i++) {
            // Outputs of some rows, scores of all that count.
            bool scored = i >= s.rows - s.scored, look = i < 2 || i >= s.rows - 2 || i % 37 == 0;
            for (int j = 0; (scored || look) && j < g; j++) {
                int r = row0 + i, h = kh * g + j;
                double l;
                std::vector<double> a =
                    softmax_row(kv, s.lane, kh, &q[((size_t)r * n_head + h) * hd], s.len - s.rows + i + 1, scale, &l);
                if (scored) {
                    rig::worsen(worst_lse, fabs(lse[(size_t)h * lse_rows + r] - l));
                    for (size_t k = 0; k < a.size(); k++)
                        want[k] += a[k] / g;
                }
                if (!look)
                    continue;
                std::vector<double> o(hd, 0.0);
                for (size_t k = 0; k < a.size(); k++) {
                    std::vector<float> v = kv.v(s.lane, kh, (int)k);
                    for (int d = 0; d < hd; d++)
                        o[d] += a[k] * v[d];
                }
                for (int d = 0; d < hd; d++)
                    rig::worsen(worst_o, fabs(rig::from_bf16(out[((size_t)r * n_head + h) * hd + d]) - o[d]));
            }
        }
        for (int k = 0; s.scored && k < s.len; k++) // 0.5: what an earlier tile had left there
            rig::worsen(worst_score, fabs(score[(size_t)kh * stride + k] - 0.5 - want[k]) / (0.01 + want[k]));
    }
    close_to("prefill output", worst_o, 0, 1.0 / 128); // p in bf16, |v| <= 1, output in bf16
    close_to("prefill lse", worst_lse, 0, 1e-4);
    close_to("prefill score", worst_score, 0, 1e-3);
}

static void prefill_one(int hd, int g, int n_kv, kern_kv_dtype dt, std::vector<prefill_seg> segs)
{
    int n_head = n_kv * g, n_row = 0, most_rows = 0, most = 0, lanes = (int)segs.size() + 1;
    for (prefill_seg &s : segs) {
        n_row += s.rows;
        most_rows = std::max(most_rows, s.rows);
        most = std::max(most, s.len);
    }
    kv_rig kv(dt, hd, lanes, n_kv, (most + 31) / 32 + 1);
    std::vector<int32_t> lane, row0, rows, from, pos, rlane, slot;
    std::vector<float> q = randoms((size_t)n_row * n_head * hd, 1.5f);
    std::vector<unsigned short> q16(q.size());
    for (size_t i = 0; i < q.size(); i++) {
        q16[i] = rig::to_bf16(q[i]);
        q[i] = bf16_round(q[i]);
    }
    for (prefill_seg &s : segs) {
        for (int h = 0; h < n_kv; h++)
            kv.fill(s.lane, h, s.len, 1.5f);
        lane.push_back(s.lane);
        row0.push_back((int)rlane.size());
        rows.push_back(s.rows);
        from.push_back((int)rlane.size() + s.rows - s.scored);
        for (int i = 0; i < s.rows; i++) {
            rlane.push_back(s.lane);
            pos.push_back(s.len - s.rows + i);
            for (int h = 0; h < n_kv; h++)
                slot.push_back(s.len - s.rows + i);
        }
    }
    kv.put();
    int stride = kv.max_pages * 32, lse_rows = n_row + 5;
    dev<int32_t> dl(lane), dr(row0), dn(rows), df(from), dp(pos), drl(rlane), ds(slot);
    dev<unsigned short> dq(q16), out(q.size());
    dev<float> lse((size_t)n_head * lse_rows), score(std::vector<float>((size_t)lanes * n_kv * stride, 0.5f));
    std::vector<float *> row_p(lanes);
    for (int i = 0; i < lanes; i++)
        row_p[i] = score.p + (size_t)i * n_kv * stride;
    dev<float *> drow(row_p);
    dev<int32_t> dstride(std::vector<int32_t>(lanes, stride));
    float scale = 1.0f / sqrtf((float)hd);
    pass_view pass = { nullptr, drl.p, dp.p, ds.p };
    seg_view seg = { dl.p, dr.p, dn.p, df.p };
    cu_prefill(0, dt, hd, { kv.view, pass, seg, 0, g, n_head, lse_rows, scale, dq.p, out.p, lse.p }, (int)segs.size(),
               most_rows);
    cu_score(0, dt, hd, { kv.view, pass, seg, 0, g, n_head, lse_rows, scale, dq.p, lse.p, drow.p, dstride.p },
             (int)segs.size(), most);
    std::vector<unsigned short> o = out.get();
    std::vector<float> l = lse.get(), sc = score.get();
    for (size_t i = 0; i < segs.size(); i++)
        prefill_want(kv, segs[i], row0[i], g, q, o, l, lse_rows,
                     std::vector<float>(sc.begin() + (long)segs[i].lane * n_kv * stride,
                                        sc.begin() + (long)(segs[i].lane + 1) * n_kv * stride),
                     stride, n_head, scale);
}

static prefill_seg random_seg(int lane, int most_rows)
{
    int len = lengths[between(0, small_run ? 3 : 5)], rows = std::min(between(1, most_rows), len);
    return { lane, rows, len, between(0, rows) };
}

static void test_prefill()
{
    for (int hd : head_sizes)
        for (int g : groups)
            for (kern_kv_dtype dt : dtypes) {
                if (!cu_head_dim_ok(hd) || (small_run && between(0, 3)))
                    continue;
                int most = std::max(1, (small_run ? 40 : 160) / g);
                prefill_one(hd, g, between(1, 2), dt, { random_seg(1, most), random_seg(0, most) });
            }
    // The lengths one by one, whole prompts, all rows scored.
    for (int len : lengths)
        if (len <= (small_run ? 33 : 257))
            prefill_one(64, 3, 1, KERN_KV_BF16, { { 0, std::min(len, 256), len, std::min(len, 256) } });
}

// --- decode ---------------------------------------------------------------------------------------------------

struct decode_rule {
    dec_rule u;
    bool at_cap;
};

static bool may_go(const dec_rule &u, const std::vector<int32_t> &pin, int pos, int now)
{
    bool pinned = false;
    for (int i = 0; i < u.n_pin; i++)
        pinned = pinned || (pos >= pin[2 * (u.pin0 + i)] && pos < pin[2 * (u.pin0 + i) + 1]);
    return pos >= u.sink && pos <= now - u.recent && !pinned;
}

static void decode_want(kv_rig &before, kv_rig &kv, int r, int lane, int now, int g, const float *q, const float *out,
                        const dec_rule &u, const std::vector<int32_t> &pin, double scale)
{
    int hd = kv.pl.head_dim;
    double worst_o = 0, worst_score = 0;
    for (int kh = 0; kh < kv.n_kv; kh++) {
        int n = before.len[before.index(lane, kh)];
        std::vector<double> p(n, 0.0);
        for (int j = 0; j < g; j++) {
            std::vector<double> a = softmax_row(before, lane, kh, q + (kh * g + j) * hd, n, scale), o(hd, 0.0);
            for (int k = 0; k < n; k++) {
                p[k] += a[k] / g;
                std::vector<float> v = before.v(lane, kh, k);
                for (int d = 0; d < hd; d++)
                    o[d] += a[k] * v[d];
            }
            for (int d = 0; d < hd; d++)
                rig::worsen(worst_o, fabs(out[(kh * g + j) * hd + d] - o[d]));
        }
        int want = -1;
        for (int k = 0; k < n; k++) {
            double s = before.score(lane, kh, k);
            if (u.on & DEC_SCORE)
                s = u.decay * s + u.weight * p[k];
            rig::worsen(worst_score, fabs(kv.score(lane, kh, k) - s));
            if (!may_go(u, pin, kv.pos(lane, kh, k), now))
                continue;
            // The choice is judged by the kernel's own scores, so that rounding can't blur it.
            float mine = kv.score(lane, kh, k), best = want < 0 ? 0 : kv.score(lane, kh, want);
            if (want < 0 || mine < best || (mine == best && kv.pos(lane, kh, k) < kv.pos(lane, kh, want)))
                want = k;
        }
        size_t idx = kv.index(lane, kh);
        bool choose = (u.on & DEC_VICTIM) && n >= kv.cap[idx];
        CHECK(kv.victim[idx] == (choose ? want : before.victim[idx]));
    }
    char name[64];
    snprintf(name, sizeof name, "decode output hd %d g %d row %d", hd, g, r);
    close_to(name, worst_o, 0, 2e-5);
    close_to("decode score", worst_score, 0, 2e-6);
}

static void decode_one(int hd, int g, int n_kv, kern_kv_dtype dt, int n_row)
{
    int n_head = n_kv * g, most = 0, width = (n_head + 2 * n_kv) * hd;
    std::vector<int32_t> lane(n_row), now(n_row), pin = { 3, 5, 40, 41, 0, 1, 9, 12 };
    std::vector<dec_rule> rule(n_row);
    kv_rig kv(dt, hd, n_row + 1, n_kv, 33);
    for (int r = 0; r < n_row; r++) {
        lane[r] = r % 3 == 2 ? -1 : n_row - r; // some rows are padding
        int on[] = { 0, DEC_VICTIM, DEC_VICTIM | DEC_SCORE };
        rule[r] = { on[between(0, 2)], between(0, 4), between(1, 8), between(0, 2), between(0, 2), uniform(0.5f, 1.0f),
                    uniform(0.0f, 1.0f), 0, 0 };
        if (lane[r] < 0)
            continue;
        for (int h = 0; h < n_kv; h++) {
            int n = lengths[between(0, small_run ? 4 : 5)];
            most = std::max(most, n);
            kv.fill(lane[r], h, n, 1.5f);
            now[r] = std::max(now[r], n - 1 + between(0, 2));
            for (int k = 0; k + 1 < n; k += 2) { // slots out of order, and equal scores
                std::swap(kv.pos(lane[r], h, k), kv.pos(lane[r], h, k + 1));
                if (!(rule[r].on & DEC_SCORE))
                    kv.score(lane[r], h, k) = kv.score(lane[r], h, k + 1) = 0.25f * (float)between(0, 2);
            }
            kv.cap[kv.index(lane[r], h)] = between(0, 1) ? n : n + 1;
        }
    }
    std::vector<float> q = randoms((size_t)n_row * width, 1.5f);
    kv.put();
    int n_split = (most + DEC_SPLIT - 1) / DEC_SPLIT + 1; // a split past the end, as in a captured graph
    if (most == 0)
        return;
    dev<float> dq(q), po((size_t)n_row * n_head * n_split * hd), ml((size_t)n_row * n_head * n_split * 2);
    dev<float> logit((size_t)n_row * n_head * n_split * DEC_SPLIT), out((size_t)n_row * n_head * hd);
    dev<int32_t> dl(lane), dn(now), dpin(pin);
    dev<dec_rule> drule(rule);
    float scale = 1.0f / sqrtf((float)hd);
    kv_rig before(dt, hd, n_row + 1, n_kv, 33);
    before.pool = kv.pool;
    before.table = kv.table;
    before.len = kv.len;
    before.victim = kv.victim;
    cu_decode(0, dt, hd,
              { kv.view, { nullptr, dl.p, dn.p, nullptr }, 0, g, n_head, n_split, width, scale, dq.p, po.p, ml.p,
                logit.p, out.p, drule.p, dpin.p, { nullptr, nullptr, nullptr }, dt },
              n_row);
    kv.get();
    std::vector<float> o = out.get();
    for (int r = 0; r < n_row; r++)
        if (lane[r] >= 0)
            decode_want(before, kv, r, lane[r], now[r], g, &q[(size_t)r * width], &o[(size_t)r * n_head * hd], rule[r],
                        pin, scale);
}

// A row decodes over slots that are overwritten in place; a ring of its last queries scores them in bursts, and the plain sum of
// the probabilities that each query had in its step says what it should be.
static void ring_one(int hd, int g, kern_kv_dtype dt)
{
    const int n_kv = 2, n_head = n_kv * g, width = (n_head + 2 * n_kv) * hd, n = small_run ? 40 : 90, ring = between(1, DEC_PLACES);
    kv_rig kv(dt, hd, 2, n_kv, 33);
    std::vector<int32_t> lane = { 1 }, pin = { 0, 0 };
    std::vector<std::vector<std::vector<double>>> seen(ring, std::vector<std::vector<double>>(n_kv));
    dev<unsigned short> rq((size_t)2 * n_head * DEC_PLACES * hd);
    dev<float> rml((size_t)2 * n_head * DEC_PLACES * 2);
    dev<int32_t> rpos((size_t)2 * n_kv * DEC_PLACES), dl(lane), dpin(pin);
    float scale = 1.0f / sqrtf((float)hd);
    for (int h = 0; h < n_kv; h++) {
        kv.fill(1, h, n, 1.5f);
        kv.cap[kv.index(1, h)] = n;
    }
    for (int s = 0; s < 2 * ring + 1; s++) {
        // The newest position takes a slot of its own in each head, as a victim's would be.
        for (int h = 0; h < n_kv && s > 0; h++)
            kv.pos(1, h, (7 * s + 3 * h) % n) = n - 1 + s;
        std::vector<int32_t> now = { n - 1 + s };
        std::vector<float> q = randoms(width, 1.5f);
        bool burst = s % ring == ring - 1;
        std::vector<dec_rule> rule = { { DEC_VICTIM | DEC_RING | (burst ? DEC_BURST : 0), 4, 8, 0, 0, 0.5f, 2.0f, ring, s % ring } };
        std::vector<std::vector<float>> before(n_kv, std::vector<float>(n));
        for (int h = 0; h < n_kv; h++) {
            std::vector<double> p(n + 2 * ring + 1, 0.0);
            for (int j = 0; j < g; j++) {
                std::vector<double> a = softmax_row(kv, 1, h, &q[(size_t)(h * g + j) * hd], n, scale);
                for (int k = 0; k < n; k++)
                    p[kv.pos(1, h, k)] += a[k] / g;
            }
            seen[s % ring][h] = p;
            for (int k = 0; k < n; k++)
                before[h][k] = kv.score(1, h, k);
        }
        kv.put();
        dev<float> dq(q), po((size_t)n_head * hd), ml((size_t)n_head * 2), logit((size_t)n_head * DEC_SPLIT);
        dev<float> out((size_t)n_head * hd);
        dev<int32_t> dn(now);
        dev<dec_rule> drule(rule);
        cu_decode(0, dt, hd,
                  { kv.view, { nullptr, dl.p, dn.p, nullptr }, 0, g, n_head, 1, width, scale, dq.p, po.p, ml.p, logit.p, out.p,
                    drule.p, dpin.p, { rq.p, rml.p, rpos.p }, dt },
                  1);
        kv.get();
        double worst = 0;
        for (int h = 0; h < n_kv; h++)
            for (int k = 0; k < n; k++) {
                double want = before[h][k], sum = 0;
                for (int i = 0; burst && i < ring; i++)
                    sum += seen[i][h][kv.pos(1, h, k)];
                if (burst)
                    want = 0.5 * want + 2 * sum;
                rig::worsen(worst, fabs(kv.score(1, h, k) - want) - (burst ? 3e-2 * sum : 0));
            }
        close_to("ring score", worst, 0, 1e-6);
    }
}

static void test_ring()
{
    for (int hd : head_sizes)
        for (int g : { 1, 3, 8 })
            for (kern_kv_dtype dt : dtypes)
                if (cu_head_dim_ok(hd) && (!small_run || !between(0, 2)))
                    ring_one(hd, g, dt);
}

static void test_decode()
{
    const int more_groups[] = { 1, 2, 3, 4, 6, 8 };
    for (int hd : head_sizes)
        for (int g : more_groups)
            for (kern_kv_dtype dt : dtypes)
                if (cu_head_dim_ok(hd) && (!small_run || !between(0, 2)))
                    decode_one(hd, g, between(1, 3), dt, small_run ? 2 : 4);
}

int main(int argc, char **argv)
{
    small_run = argc > 1 && strcmp(argv[1], "small") == 0;
    OK(cu_prefill_setup());
    OK(cu_decode_setup());
    test_rope();
    test_prefill();
    test_decode();
    test_ring();
    return rig::done();
}
