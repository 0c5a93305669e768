/* test_ring.c - scores in bursts: a ring of the last decode queries against a plain computation in double, which remembers the
 * probabilities that each query had in its own step; victims after it; the same bits in any batch. */
#include <check.h>
#include <stdio.h>

#include "kernels/cpu/cpu_attn.h"
#include "tests/attn_rig.h"

enum { N = 300, STEPS = 75, RING = 11, HEADS = 2, MAX_LANES = 5, LAYERS = 2 };

static const struct kern_isa *isas[4];
static int n_isa;

/* What a score may be off: the pass over the ring uses prefill's arithmetic (kernels/isa_attn.h). */
static double tolerance(const struct kern_isa *isa, enum kern_kv_dtype dtype)
{
    if (dtype == KERN_KV_F32 || strcmp(isa->name, "scalar") == 0)
        return 2e-5;
    return strcmp(isa->name, "avx2") == 0 ? 4e-3 : 3e-2;
}

/* prob [slot] of query head h of pass row `row` over all slots of (lane, layer, its KV head): exact. */
static void exact_probs(struct rig *r, int lane, int layer, int row, int h, int len, double *prob)
{
    struct cpu *c = &r->c;
    size_t at = cpu_kv_index(c, lane, layer, h / c->g);
    const float *q = c->qkv + (size_t)row * c->qkv_width + (size_t)h * c->d.head_dim;
    float k[256];
    double max = -INFINITY, sum = 0;

    for (int i = 0; i < len; i++) {
        kern_attn_load_k(&c->kv.page, cpu_page(c, c->kv.table[at * c->kv.max_pages + i / 32]), i % 32, k);
        prob[i] = 0;
        for (int d = 0; d < c->d.head_dim; d++)
            prob[i] += (double)q[d] * k[d];
        prob[i] *= c->d.attn_scale;
        max = fmax(max, prob[i]);
    }
    for (int i = 0; i < len; i++)
        sum += prob[i] = exp(prob[i] - max);
    for (int i = 0; i < len; i++)
        prob[i] /= sum;
}

/* A decode step of n lanes at position p in `layer`; each lane's newest pair overwrites its victim once len is N. */
static void step(struct rig *r, int n, int layer, int p, struct kern_rule *rule)
{
    struct ops_seg seg[MAX_LANES];
    int32_t slot[MAX_LANES * HEADS];
    struct ops_pass pass = { .n_row = n, .n_seg = n, .seg = seg };
    struct kern_rule rules[MAX_LANES];

    for (int i = 0; i < n; i++) {
        seg[i] = (struct ops_seg){ .lane = i, .row0 = i, .n_row = 1, .pos0 = p };
        rig_row(r, i, i, p);
        rules[i] = *rule;
        for (int h = 0; h < HEADS; h++) {
            size_t at = cpu_kv_index(&r->c, i, layer, h);
            slot[i * HEADS + h] = r->c.kv.len[at] < r->c.kv.cap[at] ? r->c.kv.len[at]++ : -1;
        }
    }
    cpu_kv_store(&r->c, layer, &pass, slot);
    cpu_attn_decode(&r->c, layer, &pass, rules);
}

static void start(struct rig *r, const struct kern_isa *isa, enum kern_kv_dtype dtype, int head_dim, int g, int lanes, int threads)
{
    struct rig_shape shape = { dtype, head_dim, HEADS, g, LAYERS, lanes, N, N, threads };

    rig_init(r, isa, &shape);
    for (int lane = 0; lane < lanes; lane++) {
        rig_prefill(r, lane, 1, 0, N - 20, N);
        for (int h = 0; h < HEADS; h++)
            r->c.kv.cap[cpu_kv_index(&r->c, lane, 1, h)] = N;
    }
}

static void place(struct kern_rule *rule, int s)
{
    rule->ring_at = s % RING;
    rule->burst = (s + 4) % RING == RING - 1 && s + 1 >= RING;
}

static void burst_case(const struct kern_isa *isa, enum kern_kv_dtype dtype, int head_dim, int g)
{
    static double seen[RING][HEADS][N + STEPS], prob[N];
    struct kern_rule rule = { .budget = N, .sink = 4, .recent = 2 * RING, .decay = 0.25f, .weight = 2, .ring = RING };
    double tol = tolerance(isa, dtype);
    int32_t pos[N];
    float before[HEADS][N] = { { 0 } }, score[N];
    struct rig r;
    int bursts = 0;

    start(&r, isa, dtype, head_dim, g, 1, 2);
    for (int s = 0; s < STEPS; s++) {
        int p = N - 20 + s;
        int32_t took[HEADS] = { r.c.kv.victim[cpu_kv_index(&r.c, 0, 1, 0)], r.c.kv.victim[cpu_kv_index(&r.c, 0, 1, 1)] };
        place(&rule, s);
        memset(seen[rule.ring_at], 0, sizeof seen[0]);
        step(&r, 1, 1, p, &rule);
        for (int h = 0; h < HEADS; h++) {
            size_t at = cpu_kv_index(&r.c, 0, 1, h);
            int len = r.c.kv.len[at], best = -1;
            ck_assert_int_eq(len, p < N ? p + 1 : N);
            cpu_kv_read(&r.c, 0, 1, h, pos, score);
            before[h][p < N ? p : took[h]] = 0;
            for (int j = 0; j < g; j++) {
                exact_probs(&r, 0, 1, 0, h * g + j, len, prob);
                for (int i = 0; i < len; i++)
                    seen[rule.ring_at][h][pos[i]] += prob[i] / g;
            }
            for (int i = 0; i < len; i++) {
                double want = before[h][i], sum = 0;
                for (int k = 0; k < RING; k++)
                    sum += seen[k][h][pos[i]];
                if (rule.burst)
                    want = 0.25 * want + 2 * sum;
                ck_assert_msg(fabs(score[i] - want) <= (rule.burst ? tol * want + 1e-6 : 0),
                              "%s %s hd %d g %d step %d head %d slot %d position %d: %g, exact %g", isa->name,
                              kern_kv_dtype_name(dtype), head_dim, g, s, h, i, pos[i], (double)score[i], want);
                before[h][i] = score[i];
                bool safe = pos[i] < 4 || pos[i] > p - 2 * RING;
                if (!safe && (best < 0 || score[i] < score[best] || (score[i] == score[best] && pos[i] < pos[best])))
                    best = i;
            }
            ck_assert_int_eq(r.c.kv.victim[at], len == N ? best : -1);
        }
        bursts += rule.burst;
    }
    ck_assert_int_eq(bursts, 6);
    rig_fini(&r);
}

START_TEST(burst_equals_plain)
{
    static const int dims[] = { 64, 80, 128 }, groups[] = { 3, 1, 13 };
    const struct kern_isa *isa = isas[_i / KERN_KV_DTYPES];

    for (int k = 0; k < 3; k++)
        burst_case(isa, _i % KERN_KV_DTYPES, dims[k], groups[k]);
}
END_TEST

/* Lane 0's slots, positions and scores after all steps, alone and beside others, with one thread and three: the same bits. */
START_TEST(burst_is_batch_invariant)
{
    const struct kern_isa *isa = isas[_i / KERN_KV_DTYPES];
    struct kern_rule rule = { .budget = N, .sink = 4, .recent = 2 * RING, .weight = 1, .ring = RING };
    static int32_t pos[2][HEADS][N];
    static float score[2][HEADS][N];

    for (int way = 0; way < 2; way++) {
        struct rig r;
        int lanes = way ? MAX_LANES : 1;
        start(&r, isa, _i % KERN_KV_DTYPES, 64, 3, lanes, way ? 3 : 1);
        for (int s = 0; s < STEPS; s++) {
            place(&rule, s);
            step(&r, lanes, 1, N - 20 + s, &rule);
        }
        for (int h = 0; h < HEADS; h++)
            cpu_kv_read(&r.c, 0, 1, h, pos[way][h], score[way][h]);
        rig_fini(&r);
    }
    ck_assert_mem_eq(pos[0], pos[1], sizeof pos[0]);
    ck_assert_mem_eq(score[0], score[1], sizeof score[0]);
}
END_TEST

/* Rings of different lanes and layers are apart, and what a lane's last sequence left is not read: a second sequence that fills the
 * ring anew gives the scores that it gives on fresh memory. */
START_TEST(rings_are_apart)
{
    struct kern_rule rule = { .budget = N, .sink = 4, .recent = 2 * RING, .weight = 1, .ring = RING }, other = rule;
    int32_t pos[2][N];
    float score[2][N];

    for (int way = 0; way < 2; way++) {
        struct rig r;
        start(&r, isas[0], KERN_KV_F32, 64, 3, 2, 1);
        if (way == 1) { /* somebody else, in both layers and with another ring */
            rig_prefill(&r, 0, 0, 0, 40, N);
            for (int h = 0; h < HEADS; h++)
                r.c.kv.cap[cpu_kv_index(&r.c, 0, 0, h)] = N;
            other.ring = OPS_RING;
            for (int s = 0; s < 30; s++) {
                other.ring_at = s % OPS_RING;
                step(&r, 1, 0, 40 + s, &other);
                step(&r, 2, 1, 5000 + s, &other);
            }
            for (int lane = 0; lane < 2; lane++)
                rig_prefill(&r, lane, 1, 0, N - 20, N);
        }
        for (int s = 0; s < 20; s++) {
            place(&rule, s);
            step(&r, 1, 1, N - 20 + s, &rule);
        }
        cpu_kv_read(&r.c, 0, 1, 1, pos[way], score[way]);
        rig_fini(&r);
    }
    ck_assert_mem_eq(pos[0], pos[1], sizeof pos[0]);
    ck_assert_mem_eq(score[0], score[1], sizeof score[0]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("ring");
    TCase *tc = tcase_create("ring");

    n_isa = kern_isa_list(isas);
    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, burst_equals_plain, 0, n_isa * KERN_KV_DTYPES);
    tcase_add_loop_test(tc, burst_is_batch_invariant, 0, n_isa * KERN_KV_DTYPES);
    tcase_add_test(tc, rings_are_apart);
    suite_add_tcase(suite, tc);
    SRunner *sr = srunner_create(suite);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
