/* test_attn.c - attention over pages: every ISA and cache dtype against a softmax in double, batch invariance to the
 * bit, scores as column sums, decode's probabilities, scores and victims. */
#include <check.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/isa_attn.h"
#include "tests/attn_rig.h"

static const struct kern_isa *isas[4];
static int n_isa;

/* |o - exact| <= o * max|v|; scores: relative plus absolute. The bounds of isa_attn.h, the exact value being computed from
 * what the cache holds and f32 queries. */
struct bound {
    float o, score_rel, score_abs;
};

static struct bound bound_of(const struct kern_isa *isa, enum kern_kv_dtype dtype, bool decode)
{
    bool wide = strcmp(isa->name, "avx512") != 0 || dtype == KERN_KV_F32;
    if (decode && dtype == KERN_KV_INT8 && strcmp(isa->name, "scalar") != 0)
        return (struct bound){ 0x1p-15f, 2e-4f, 1e-6f };
    if (!decode && dtype != KERN_KV_F32 && strcmp(isa->name, "avx2") == 0)
        return (struct bound){ 0x1p-11f, 4e-3f, 1e-6f };
    return wide ? (struct bound){ 2e-6f, 2e-5f, 1e-7f } : (struct bound){ 0x1p-7f, 3e-2f, 1e-5f };
}

/* ---- the exact answer ---------------------------------------------------------------------------------- */

/* Probabilities of one query head over n slots of (lane, layer 0, head), and the output. */
static void exact_row(struct rig *r, int lane, int head, const float *q, int n, double *prob, double *o, double *max_v)
{
    struct cpu *c = &r->c;
    size_t at = cpu_kv_index(c, lane, 0, head);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages;
    float kv[512];
    double max = -INFINITY, sum = 0;

    for (int i = 0; i < n; i++) {
        kern_attn_load_k(&c->kv.page, cpu_page(c, table[i / 32]), i % 32, kv);
        prob[i] = 0;
        for (int d = 0; d < c->d.head_dim; d++)
            prob[i] += (double)q[d] * kv[d];
        prob[i] *= c->d.attn_scale;
        max = prob[i] > max ? prob[i] : max;
    }
    for (int i = 0; i < n; i++)
        sum += prob[i] = exp(prob[i] - max);
    memset(o, 0, c->d.head_dim * sizeof *o);
    *max_v = 0;
    for (int i = 0; i < n; i++) {
        prob[i] /= sum;
        kern_attn_load_v(&c->kv.page, cpu_page(c, table[i / 32]), i % 32, kv);
        for (int d = 0; d < c->d.head_dim; d++) {
            o[d] += prob[i] * kv[d];
            *max_v = fabs(kv[d]) > *max_v ? fabs(kv[d]) : *max_v;
        }
    }
}

static const float *q_at(const struct rig *r, int row, int h)
{
    return r->c.qkv + (size_t)row * r->c.qkv_width + (size_t)h * r->c.d.head_dim;
}

static const float *att_at(const struct rig *r, int row, int h)
{
    return r->c.att + ((size_t)row * r->c.d.n_head + h) * r->c.d.head_dim;
}

static void check_out(const struct rig *r, int row, int h, const double *o, double max_v, float bound)
{
    const float *got = att_at(r, row, h);
    for (int d = 0; d < r->c.d.head_dim; d++)
        ck_assert_msg(fabs(got[d] - o[d]) <= bound * max_v,
                      "%s %s hd %d g %d row %d head %d dim %d: %g, exact %g, max|v| %g", r->c.isa->name,
                      kern_kv_dtype_name(r->c.kv.page.dtype), r->c.d.head_dim, r->c.g, row, h, d, got[d], o[d], max_v);
}

static void check_score(const struct rig *r, const char *what, int head, int slot, float got, double exact,
                        struct bound b)
{
    ck_assert_msg(fabs(got - exact) <= b.score_rel * fabs(exact) + b.score_abs,
                  "%s %s %s hd %d g %d head %d slot %d: %.8g, exact %.8g", what, r->c.isa->name,
                  kern_kv_dtype_name(r->c.kv.page.dtype), r->c.d.head_dim, r->c.g, head, slot, got, exact);
}

/* ---- prefill ----------------------------------------------------------------------------------------------- */

/* A prompt of n in tiles of at most max_rows, the last alpha rows scored; the last tile's rows are checked, and the score
 * row, whose exact sum needs alpha <= the last tile. */
static void prefill_case(const struct kern_isa *isa, enum kern_kv_dtype dtype, int head_dim, int n_kv, int g, int n,
                         int alpha)
{
    struct rig_shape shape = { dtype, head_dim, n_kv, g, 1, 1, n, 96, 2 };
    struct bound b = bound_of(isa, dtype, false);
    struct rig r;
    double *prob = calloc(n, sizeof *prob), *sum = calloc((size_t)n * n_kv, sizeof *sum), o[512], max_v;
    float *score = calloc((size_t)n * n_kv, sizeof *score);
    int pos0 = 0;

    rig_init(&r, isa, &shape);
    cpu_score_begin(&r.c, 0, n);
    for (; n - pos0 > 96; pos0 += 96)
        rig_prefill(&r, 0, 0, pos0, 96, n - alpha);
    rig_prefill(&r, 0, 0, pos0, n - pos0, n - alpha);
    ck_assert_int_le(alpha, n - pos0);
    for (int row = 0; row < n - pos0; row++) {
        if (row % 17 && row < n - pos0 - alpha)
            continue;
        for (int h = 0; h < n_kv * g; h++) {
            exact_row(&r, 0, h / g, q_at(&r, row, h), pos0 + row + 1, prob, o, &max_v);
            check_out(&r, row, h, o, max_v, b.o);
            for (int i = 0; row >= n - pos0 - alpha && i <= pos0 + row; i++)
                sum[(size_t)(h / g) * n + i] += prob[i] / g;
        }
    }
    cpu_score_read(&r.c, 0, n, score);
    for (int i = 0; i < n * n_kv; i++)
        check_score(&r, "prefill score", i / n, i % n, score[i], sum[i], b);
    rig_fini(&r);
    free(prob);
    free(sum);
    free(score);
}

START_TEST(prefill_equals_softmax)
{
    static const int dims[] = { 64, 72, 80, 96, 128, 256, 65 }, groups[] = { 3, 1, 4, 8, 3, 2, 13 };
    static const int lens[] = { 1, 31, 32, 33, 257 };
    const struct kern_isa *isa = isas[_i / KERN_KV_DTYPES];
    enum kern_kv_dtype dtype = _i % KERN_KV_DTYPES;

    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
        for (size_t l = 0; l < sizeof lens / sizeof lens[0]; l++)
            prefill_case(isa, dtype, dims[d], d % 2 + 1, groups[d], lens[l], lens[l] < 20 ? 1 : 20);
    prefill_case(isa, dtype, 64, 3, 3, 1000, 32);
}
END_TEST

/* The rows of a prompt and its score row, computed in several ways, are the same bits. */
struct run {
    float *att;   /* [n][width] */
    float *score; /* [n_kv][n] */
};

/* Lane 1's prompt of n tokens in tiles of `tile` rows; lane 0 has a segment of `other` rows before it in each pass. */
static struct run run_tiles(const struct kern_isa *isa, enum kern_kv_dtype dtype, int n, int tile, int other,
                            int threads)
{
    struct rig_shape shape = { dtype, 64, 2, 3, 1, 2, n > 512 ? n : 512, tile + other, threads };
    struct rig r;
    struct run run;

    rig_init(&r, isa, &shape);
    int width = r.c.d.n_head * 64;
    run.att = calloc((size_t)n * width, sizeof *run.att);
    run.score = calloc((size_t)n * 2, sizeof *run.score);
    cpu_score_begin(&r.c, 0, other);
    cpu_score_begin(&r.c, 1, n);
    for (int pos = 0; pos < n; pos += tile) {
        int m = n - pos < tile ? n - pos : tile, first = other > 0 ? 0 : 1;
        struct ops_seg seg[2] = { { .lane = 0, .n_row = other, .score_from = 0 },
                                  { .lane = 1, .row0 = other, .n_row = m, .pos0 = pos, .slot0 = pos } };
        seg[1].score_from = n - 30 - pos + other;
        struct ops_pass pass = { .n_row = other + m, .n_seg = 2 - first, .seg = seg + first };
        for (int i = 0; i < other; i++)
            rig_row(&r, i, 0, i);
        for (int i = 0; i < m; i++)
            rig_row(&r, other + i, 1, pos + i);
        cpu_kv_store(&r.c, 0, &pass, NULL);
        cpu_attn_prefill(&r.c, 0, &pass);
        memcpy(run.att + (size_t)pos * width, att_at(&r, other, 0), (size_t)m * width * sizeof(float));
    }
    rig_set_len(&r, 1, 0, n);
    cpu_score_read(&r.c, 1, n, run.score);
    rig_fini(&r);
    return run;
}

START_TEST(prefill_rows_are_invariant)
{
    static const struct {
        int tile, other, threads;
    } way[] = { { 600, 0, 1 }, { 600, 77, 2 }, { 64, 5, 3 }, { 37, 0, 2 }, { 1, 1, 1 } };
    const struct kern_isa *isa = isas[_i / KERN_KV_DTYPES];
    enum kern_kv_dtype dtype = _i % KERN_KV_DTYPES;
    const int n = 300;
    struct run first = run_tiles(isa, dtype, n, way[0].tile, way[0].other, way[0].threads);

    for (size_t i = 1; i < sizeof way / sizeof way[0]; i++) {
        struct run run = run_tiles(isa, dtype, n, way[i].tile, way[i].other, way[i].threads);
        ck_assert_msg(memcmp(run.att, first.att, (size_t)n * 6 * 64 * sizeof(float)) == 0, "%s %s: way %zu differs",
                      isa->name, kern_kv_dtype_name(dtype), i);
        for (int j = 0; j < 2 * n && way[i].tile >= n; j++) /* tiles are part of the order of the score's sum */
            ck_assert_msg(run.score[j] == first.score[j], "%s: score %d of way %zu", isa->name, j, i);
        free(run.att);
        free(run.score);
    }
    free(first.att);
    free(first.score);
}
END_TEST

/* A continued session: heads of different lengths, positions that are not the slots. */
START_TEST(prefill_continues_ragged_heads)
{
    const struct kern_isa *isa = isas[_i];
    struct rig_shape shape = { KERN_KV_F32, 64, 2, 3, 1, 1, 256, 64, 2 };
    int32_t slot0[2] = { 40, 7 };
    struct ops_seg seg = { .n_row = 50, .pos0 = 1000, .slot0 = 0, .head_slot0 = slot0, .score_from = 45 };
    struct ops_pass pass = { .n_row = 50, .n_seg = 1, .seg = &seg };
    double prob[256], o[64], max_v, sum[2][256] = { { 0 } };
    float score[2 * 256];
    struct bound b = bound_of(isa, KERN_KV_F32, false);
    struct rig r;

    rig_init(&r, isa, &shape);
    rig_prefill(&r, 0, 0, 0, 40, 1000);
    cpu_score_begin(&r.c, 0, 256);
    for (int i = 0; i < 50; i++)
        rig_row(&r, i, 0, 1000 + i);
    cpu_kv_store(&r.c, 0, &pass, NULL);
    cpu_attn_prefill(&r.c, 0, &pass);
    for (int row = 0; row < 50; row++)
        for (int h = 0; h < 6; h++) {
            int n = slot0[h / 3] + row + 1;
            exact_row(&r, 0, h / 3, q_at(&r, row, h), n, prob, o, &max_v);
            check_out(&r, row, h, o, max_v, b.o);
            for (int i = 0; row >= 45 && i < n; i++)
                sum[h / 3][i] += prob[i] / 3;
        }
    cpu_score_read(&r.c, 0, 256, score);
    for (int i = 0; i < 512; i++)
        check_score(&r, "ragged", i / 256, i % 256, score[i], sum[i / 256][i % 256], b);
    int32_t pos[256];
    r.c.kv.len[1] = 57;
    cpu_kv_read(&r.c, 0, 0, 1, pos, score);
    ck_assert_int_eq(pos[6], 6);
    ck_assert_int_eq(pos[7], 1000);
    ck_assert_int_eq(pos[56], 1049);
    rig_fini(&r);
}
END_TEST

/* ---- decode --------------------------------------------------------------------------------------------------- */

/* One decode step at position n of each lane (len[i] slots in use before it). */
static void decode_step(struct rig *r, int lanes, const int *len, const struct kern_rule *rule)
{
    struct ops_seg seg[8];
    int32_t slot[8 * 8];
    struct ops_pass pass = { .n_row = lanes, .n_seg = lanes, .seg = seg };

    for (int i = 0; i < lanes; i++) {
        seg[i] = (struct ops_seg){ .lane = i, .row0 = i, .n_row = 1, .pos0 = len[i] };
        rig_row(r, i, i, len[i]);
        for (int h = 0; h < r->c.d.n_kv; h++)
            slot[i * r->c.d.n_kv + h] = len[i];
        rig_set_len(r, i, 0, len[i] + 1);
    }
    cpu_kv_store(&r->c, 0, &pass, slot);
    cpu_attn_decode(&r->c, 0, &pass, rule);
}

static void decode_case(const struct kern_isa *isa, enum kern_kv_dtype dtype, int head_dim, int n_kv, int g, int n)
{
    struct rig_shape shape = { dtype, head_dim, n_kv, g, 1, 1, n, n > 1 ? n - 1 : 1, 2 };
    struct kern_rule rule = { .decay = 0.5f, .weight = 2 };
    struct bound b = bound_of(isa, dtype, true);
    double *prob = calloc(n, sizeof *prob), *sum = calloc((size_t)n * n_kv, sizeof *sum), o[512], max_v;
    float *score = calloc(n, sizeof *score), *before = calloc(n, sizeof *before);
    int32_t *pos = calloc(n, sizeof *pos);
    int len = n - 1;
    struct rig r;

    rig_init(&r, isa, &shape);
    if (len > 0)
        rig_prefill(&r, 0, 0, 0, len, len);
    for (int i = 0; i < len; i++) { /* scores that decay */
        before[i] = (float)(i % 7);
        for (int h = 0; h < n_kv; h++) {
            uint32_t page = r.c.kv.table[cpu_kv_index(&r.c, 0, 0, h) * r.c.kv.max_pages + i / 32];
            ((float *)(cpu_page(&r.c, page) + r.c.kv.page.score))[i % 32] = before[i];
        }
    }
    decode_step(&r, 1, &len, &rule);
    for (int h = 0; h < n_kv * g; h++) {
        exact_row(&r, 0, h / g, q_at(&r, 0, h), n, prob, o, &max_v);
        check_out(&r, 0, h, o, max_v, b.o);
        for (int i = 0; i < n; i++)
            sum[(size_t)(h / g) * n + i] += prob[i] / g;
    }
    for (int h = 0; h < n_kv; h++) {
        double total = 0;
        cpu_kv_read(&r.c, 0, 0, h, pos, score);
        for (int i = 0; i < n; i++) {
            double exact = before[i] * 0.5 + 2 * sum[(size_t)h * n + i];
            ck_assert_int_eq(pos[i], i);
            check_score(&r, "decode score", h, i, score[i], exact, b);
            total += (score[i] - before[i] * 0.5) / 2;
        }
        ck_assert_double_eq_tol(total, 1, 1e-5);
    }
    rig_fini(&r);
    free(prob);
    free(sum);
    free(score);
    free(before);
    free(pos);
}

START_TEST(decode_equals_softmax)
{
    static const int dims[] = { 64, 72, 80, 96, 128, 256, 65 }, groups[] = { 3, 1, 4, 8, 3, 2, 13 };
    static const int lens[] = { 1, 31, 32, 33, 257, 700 };
    const struct kern_isa *isa = isas[_i / KERN_KV_DTYPES];
    enum kern_kv_dtype dtype = _i % KERN_KV_DTYPES;

    for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
        for (size_t l = 0; l < sizeof lens / sizeof lens[0]; l++)
            decode_case(isa, dtype, dims[d], d % 2 + 1, groups[d], lens[l]);
}
END_TEST

/* A lane's step is the same bits alone and in a batch, with any number of threads. */
START_TEST(decode_is_batch_invariant)
{
    const struct kern_isa *isa = isas[_i / KERN_KV_DTYPES];
    enum kern_kv_dtype dtype = _i % KERN_KV_DTYPES;
    static const int lens[5] = { 640, 1, 255, 511, 37 };
    struct kern_rule rule[5];
    float *out[2];

    for (int i = 0; i < 5; i++)
        rule[i] = (struct kern_rule){ .decay = 1, .weight = 1 };
    for (int way = 0; way < 2; way++) {
        struct rig_shape shape = { dtype, 64, 3, 3, 1, 5, 672, 640, way ? 3 : 1 };
        struct rig r;
        int at = 0;
        out[way] = calloc(9 * 64 + 3 * 641, sizeof(float));
        rig_init(&r, isa, &shape);
        for (int i = 0; i < (way ? 5 : 1); i++)
            rig_prefill(&r, i, 0, 0, lens[i], lens[i]);
        decode_step(&r, way ? 5 : 1, lens, rule);
        memcpy(out[way], att_at(&r, 0, 0), 9 * 64 * sizeof(float));
        for (int h = 0; h < 3; h++, at += 641) {
            int32_t pos[641];
            cpu_kv_read(&r.c, 0, 0, h, pos, out[way] + 9 * 64 + at);
        }
        rig_fini(&r);
    }
    ck_assert_int_eq(memcmp(out[0], out[1], (9 * 64 + 3 * 641) * sizeof(float)), 0);
    free(out[0]);
    free(out[1]);
}
END_TEST

/* The newest pair overwrites the victim; victims are the lowest scores outside sink, recent and pins; ties: the lowest
 * position. A plain list does the same beside it. */
START_TEST(decode_evicts_the_lowest)
{
    enum { N = 70, STEPS = 60 };
    const struct kern_isa *isa = isas[_i];
    struct rig_shape shape = { KERN_KV_BF16, 64, 2, 3, 1, 1, 96, 96, 2 };
    static const struct kern_range pin[2] = { { 9, 11 }, { 30, 33 } };
    struct kern_rule rule = { .budget = N, .sink = 4, .recent = 16, .pin = pin, .n_pin = 2, .decay = 1, .weight = 1 };
    int32_t pos[96], slot[2];
    float score[96];
    struct rig r;

    rig_init(&r, isa, &shape);
    rig_prefill(&r, 0, 0, 0, N - 1, N);
    r.c.kv.cap[0] = r.c.kv.cap[1] = N;
    if (_i == 0)
        rule.weight = 0; /* equal scores: the oldest go */
    for (int p = N - 1; p < N - 1 + STEPS; p++) {
        struct ops_seg seg = { .n_row = 1, .pos0 = p };
        struct ops_pass pass = { .n_row = 1, .n_seg = 1, .seg = &seg };
        int32_t took[2] = { r.c.kv.victim[0], r.c.kv.victim[1] };
        slot[0] = slot[1] = p == N - 1 ? N - 1 : -1;
        rig_row(&r, 0, 0, p);
        rig_set_len(&r, 0, 0, N);
        cpu_kv_store(&r.c, 0, &pass, slot);
        ck_assert_int_eq(r.c.kv.victim[0], -1);
        cpu_attn_decode(&r.c, 0, &pass, &rule);
        for (int h = 0; h < 2; h++) {
            int best = -1;
            cpu_kv_read(&r.c, 0, 0, h, pos, score);
            ck_assert_int_eq(pos[p == N - 1 ? N - 1 : took[h]], p);
            for (int i = 0; i < N; i++) {
                bool safe = pos[i] < 4 || pos[i] > p - 16 || (pos[i] >= 9 && pos[i] < 11) ||
                            (pos[i] >= 30 && pos[i] < 33);
                if (!safe && (best < 0 || score[i] < score[best] || (score[i] == score[best] && pos[i] < pos[best])))
                    best = i;
            }
            ck_assert_int_eq(r.c.kv.victim[h], best);
            if (rule.weight == 0)
                ck_assert_int_eq(pos[best], p == N - 1 ? 4 : pos[best]);
        }
    }
    /* Nothing but sink and recent: no candidate. */
    rule.sink = 1000000;
    struct ops_seg seg = { .n_row = 1, .pos0 = 1000 };
    struct ops_pass pass = { .n_row = 1, .n_seg = 1, .seg = &seg };
    cpu_kv_store(&r.c, 0, &pass, slot);
    cpu_attn_decode(&r.c, 0, &pass, &rule);
    ck_assert_int_eq(r.c.kv.victim[0], -1);
    rig_fini(&r);
}
END_TEST

/* ---- pages ---------------------------------------------------------------------------------------------------- */

START_TEST(page_layouts)
{
    struct kern_page_layout pl;
    kern_page_layout_init(&pl, KERN_KV_BF16, 64);
    ck_assert_uint_eq(pl.v, 4096);
    ck_assert_uint_eq(pl.bytes, 8192 + 256);
    ck_assert_uint_eq(kern_page_slot_bytes(&pl), 256);
    kern_page_layout_init(&pl, KERN_KV_INT8, 64);
    ck_assert_uint_eq(pl.v, 2048);
    ck_assert_uint_eq(pl.bytes, 4096 + 512);
    ck_assert_uint_eq(kern_page_slot_bytes(&pl), 136);
    kern_page_layout_init(&pl, KERN_KV_F32, 72);
    ck_assert_int_eq(pl.hd, 80);
    ck_assert_uint_eq(pl.bytes, 2 * 80 * 32 * 4 + 256);
    ck_assert_str_eq(kern_kv_dtype_name(KERN_KV_INT8), "int8");
}
END_TEST

/* What is stored is the value rounded to nearest even (bf16), or within half a step (int8), in the documented place. */
START_TEST(store_rounds_and_places)
{
    const struct kern_isa *isa = isas[_i];
    static const int dims[] = { 64, 72, 65, 128 };
    unsigned char *page[2];

    for (int t = 0; t < KERN_KV_DTYPES; t++)
        for (int d = 0; d < 4; d++) {
            struct kern_page_layout pl;
            float k[128], v[128], back[128];
            uint64_t seed = 99;
            kern_page_layout_init(&pl, t, dims[d]);
            for (int i = 0; i < 2; i++) {
                page[i] = aligned_alloc(64, pl.bytes);
                memset(page[i], 0, pl.bytes);
            }
            for (int slot = 0; slot < 32; slot++) {
                for (int i = 0; i < dims[d]; i++) {
                    k[i] = rig_normal(&seed);
                    v[i] = slot == 5 ? 0 : rig_normal(&seed);
                }
                isas[0]->att.store(&pl, page[0], slot, k, v);
                isa->att.store(&pl, page[1], slot, k, v);
                kern_attn_load_k(&pl, page[1], slot, back);
                for (int i = 0; i < dims[d]; i++)
                    ck_assert_float_le(fabsf(back[i] - k[i]), t == KERN_KV_F32    ? 0
                                                              : t == KERN_KV_BF16 ? fabsf(k[i]) / 256
                                                                                  : 6.0f / 127 * 0.51f);
                kern_attn_load_v(&pl, page[1], slot, back);
                for (int i = 0; i < dims[d]; i++)
                    ck_assert_float_le(fabsf(back[i] - v[i]), t == KERN_KV_F32    ? 0
                                                              : t == KERN_KV_BF16 ? fabsf(v[i]) / 256
                                                                                  : 6.0f / 127 * 0.51f);
            }
            ck_assert_msg(memcmp(page[0], page[1], pl.bytes) == 0, "%s %s hd %d", isa->name,
                          kern_kv_dtype_name(t), dims[d]);
            free(page[0]);
            free(page[1]);
        }
}
END_TEST

START_TEST(page_clear_zeroes)
{
    struct rig_shape shape = { KERN_KV_BF16, 64, 1, 1, 1, 1, 64, 64, 1 };
    struct rig r;
    rig_init(&r, isas[0], &shape);
    rig_prefill(&r, 0, 0, 0, 64, 64);
    cpu_page_clear(&r.c, &r.c.kv.table[1], 1);
    const unsigned char *page = cpu_page(&r.c, r.c.kv.table[1]), *kept = cpu_page(&r.c, r.c.kv.table[0]);
    int zero = 0, other = 0;
    for (size_t i = 0; i < r.c.kv.page.bytes; i++) {
        zero += page[i] == 0;
        other += kept[i] != 0;
    }
    ck_assert_int_eq(zero, (int)r.c.kv.page.bytes);
    ck_assert_int_gt(other, 4000);
    rig_fini(&r);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("attention");
    TCase *tc = tcase_create("attention");

    n_isa = kern_isa_list(isas);
    tcase_set_timeout(tc, 300);
    tcase_add_test(tc, page_layouts);
    tcase_add_test(tc, page_clear_zeroes);
    tcase_add_loop_test(tc, store_rounds_and_places, 0, n_isa);
    tcase_add_loop_test(tc, prefill_equals_softmax, 0, n_isa * KERN_KV_DTYPES);
    tcase_add_loop_test(tc, prefill_rows_are_invariant, 0, n_isa * KERN_KV_DTYPES);
    tcase_add_loop_test(tc, prefill_continues_ragged_heads, 0, n_isa);
    tcase_add_loop_test(tc, decode_equals_softmax, 0, n_isa * KERN_KV_DTYPES);
    tcase_add_loop_test(tc, decode_is_batch_invariant, 0, n_isa * KERN_KV_DTYPES);
    tcase_add_loop_test(tc, decode_evicts_the_lowest, 0, n_isa);
    suite_add_tcase(suite, tc);
    SRunner *sr = srunner_create(suite);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
