/* test_select.c - phase 3 against a plain reference: what is kept, in which order, with which pairs, scores, lengths,
 * caps and kept mass; random rules and ties. */
#include <check.h>
#include <stdio.h>

#include "kernels/cpu/cpu_attn.h"
#include "tests/attn_rig.h"

#ifdef SKV_SANITIZED
#define ROUNDS 40 /* the same rules, fewer of them: its instructions are slow */
#else
#define ROUNDS 120
#endif

enum { MAX_N = 700, MAX_KV = 4 };

/* Stands for the backend's, which needs a model's output projection: any norm that differs per head will do. */
void cpu_value_norm(struct cpu *c, int layer, int kv_head, const float *v, int n, float *out, int worker)
{
    (void)worker;
    for (int i = 0; i < n; i++) {
        out[i] = 0;
        for (int d = 0; d < c->d.head_dim; d++)
            out[i] += fabsf(v[i * c->d.head_dim + d]) * (float)(1 + (d + kv_head + layer) % 3);
    }
}

/* ---- the reference: repeated arg max ----------------------------------------------------------------------- */

struct ref_head {
    int n;
    int32_t pos[MAX_N];
    float score[MAX_N], pooled[MAX_N], value[MAX_N], wide[MAX_N];
    bool keep[MAX_N], safe[MAX_N];
};

static bool ref_safe(const struct kern_rule *rule, int32_t pos, int32_t newest)
{
    bool safe = pos < rule->sink || pos > newest - rule->recent;
    for (int i = 0; i < rule->n_pin; i++)
        safe = safe || (pos >= rule->pin[i].from && pos < rule->pin[i].to);
    return safe;
}

static void ref_pool(const struct kern_rule *rule, int width, int shift, struct ref_head *h, float *out)
{
    for (int i = 0; i < h->n; i++) {
        float sum = 0, max = -INFINITY;
        out[i] = rule->use_score ? h->score[i] : (float)h->pos[i];
        if (!rule->use_score || width <= 1 || i < rule->pool_from || i >= rule->pool_to)
            continue;
        bool any = false;
        for (int j = i - shift - width / 2; j <= i - shift + width / 2; j++) {
            if (j < rule->pool_from || j >= rule->pool_to || j >= h->n)
                continue;
            any = true;
            sum += h->score[j];
            max = h->score[j] > max ? h->score[j] : max;
        }
        out[i] = rule->pool_kind == KERN_POOL_MAX ? (any ? max : 0) : sum / (float)width;
    }
}

/* Best slot that is neither safe nor kept (nor marked), by `by`; ties: the lower position. */
static int ref_best(const struct ref_head *h, const float *by, const bool *marked)
{
    int best = -1;
    for (int i = 0; i < h->n; i++) {
        if (h->safe[i] || h->keep[i] || (marked && marked[i]))
            continue;
        if (best < 0 || by[i] > by[best] || (by[i] == by[best] && h->pos[i] < h->pos[best]))
            best = i;
    }
    return best;
}

/* How many unprotected slots each head keeps. */
static void ref_budgets(const struct kern_rule *rule, struct ref_head *h, int n_kv, int *take)
{
    static bool marked[MAX_KV][MAX_N];
    int left = 0;
    memset(marked, 0, sizeof marked);
    for (int k = 0; k < n_kv; k++) {
        int budget = rule->budget, n_cand = 0, floor_n;
        for (int i = 0; i < h[k].n; i++) {
            budget -= h[k].safe[i];
            n_cand += !h[k].safe[i];
        }
        budget = budget > 0 ? budget : 0;
        bool shared = rule->use_score && rule->head_floor < 1;
        floor_n = shared ? (int)floorf((float)budget * rule->head_floor) : budget;
        floor_n = floor_n < n_cand ? floor_n : n_cand;
        left += shared ? budget - floor_n : 0;
        take[k] = floor_n;
        for (int i = 0; i < floor_n; i++)
            marked[k][ref_best(&h[k], h[k].pooled, marked[k])] = true;
    }
    for (; left > 0; left--) {
        int best_k = -1, best = -1;
        for (int k = 0; k < n_kv; k++) {
            int i = ref_best(&h[k], h[k].pooled, marked[k]);
            if (i >= 0 && (best < 0 || h[k].pooled[i] > h[best_k].pooled[best] ||
                           (h[k].pooled[i] == h[best_k].pooled[best] && h[k].pos[i] < h[best_k].pos[best]))) {
                best_k = k;
                best = i;
            }
        }
        if (best < 0)
            return;
        marked[best_k][best] = true;
        take[best_k]++;
    }
}

static void ref_select(const struct kern_rule *rule, struct ref_head *h, int n_kv, int n_query)
{
    int take[MAX_KV];
    for (int k = 0; k < n_kv; k++) {
        int32_t newest = 0;
        for (int i = 0; i < h[k].n; i++)
            newest = h[k].pos[i] > newest ? h[k].pos[i] : newest;
        for (int i = 0; i < h[k].n; i++) {
            h[k].safe[i] = ref_safe(rule, h[k].pos[i], newest);
            h[k].keep[i] = false;
        }
        ref_pool(rule, rule->pool, rule->pool_shift, &h[k], h[k].pooled);
        ref_pool(rule, rule->wide, rule->wide_shift, &h[k], h[k].wide);
        for (int i = 0; i < h[k].n; i++)
            h[k].value[i] = (h[k].pooled[i] * (1.0f / (float)n_query) + rule->value_eps) * h[k].value[i];
    }
    ref_budgets(rule, h, n_kv, take);
    for (int k = 0; k < n_kv; k++) {
        bool wide = rule->wide > 1 && rule->use_score;
        int first = wide ? (int)((float)take[k] * rule->narrow) : rule->by_value ? take[k] / 2 : take[k];
        for (int i = 0; i < take[k]; i++)
            h[k].keep[ref_best(&h[k], i < first ? h[k].pooled : wide ? h[k].wide : h[k].value, NULL)] = true;
        for (int i = 0; i < h[k].n; i++)
            h[k].keep[i] = h[k].keep[i] || h[k].safe[i];
    }
}

/* ---- one case -------------------------------------------------------------------------------------------------- */

static uint32_t dice(uint64_t *seed, uint32_t n)
{
    rig_uniform(seed);
    return (uint32_t)(*seed >> 33) % n;
}

/* Positions 0 .. n-1 in lane 0, layer 1; each head's score row with many ties. */
static void fill(struct rig *r, const int *n, uint64_t *seed, struct ref_head *ref)
{
    struct cpu *c = &r->c;
    for (int h = 0; h < c->d.n_kv; h++) {
        size_t at = cpu_kv_index(c, 0, 1, h);
        float *score = cpu_score_row(c, 0, h);
        c->kv.len[at] = ref[h].n = n[h];
        for (int i = 0; i < n[h]; i++) {
            unsigned char *page = cpu_page(c, c->kv.table[at * c->kv.max_pages + i / 32]);
            float v[64];
            rig_row(r, 0, h, i);
            c->isa->att.store(&c->kv.page, page, i % 32, c->qkv, c->qkv + 64);
            ((int32_t *)(page + c->kv.page.pos))[i % 32] = i;
            ((float *)(page + c->kv.page.score))[i % 32] = -7;
            ref[h].pos[i] = i;
            score[i] = ref[h].score[i] = (float)dice(seed, 40) * 0.125f;
            kern_attn_load_v(&c->kv.page, page, i % 32, v);
            cpu_value_norm(c, 1, h, v, 1, &ref[h].value[i], 0);
        }
    }
}

static void check_head(struct rig *r, int head, const struct ref_head *ref, const struct kern_rule *rule, float mass)
{
    struct cpu *c = &r->c;
    size_t at = cpu_kv_index(c, 0, 1, head);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages;
    int32_t pos[MAX_N];
    float score[MAX_N], got[64];
    struct kern_page_layout pl = c->kv.page;
    unsigned char *page = aligned_alloc(64, pl.bytes);
    double kept = 0, all = 0;
    int n = 0;

    cpu_kv_read(c, 0, 1, head, pos, score);
    for (int i = 0; i < ref->n; i++) {
        float f = rule->use_score ? ref->score[i] : 0;
        all += f;
        if (!ref->keep[i])
            continue;
        kept += f;
        ck_assert_msg(n < c->kv.len[at] && pos[n] == ref->pos[i], "head %d: kept %d of %d is %d, should be %d", head, n,
                      c->kv.len[at], pos[n], ref->pos[i]);
        ck_assert_float_eq(score[n], f);
        rig_row(r, 0, head, ref->pos[i]);
        memset(page, 0, pl.bytes);
        c->isa->att.store(&pl, page, 3, c->qkv, c->qkv + 64);
        float want[64];
        kern_attn_load_k(&pl, page, 3, want);
        kern_attn_load_k(&pl, cpu_page(c, table[n / 32]), n % 32, got);
        ck_assert_int_eq(memcmp(want, got, sizeof got), 0);
        kern_attn_load_v(&pl, page, 3, want);
        kern_attn_load_v(&pl, cpu_page(c, table[n / 32]), n % 32, got);
        ck_assert_int_eq(memcmp(want, got, sizeof got), 0);
        n++;
    }
    ck_assert_int_eq(c->kv.len[at], n);
    ck_assert_int_eq(c->kv.victim[at], -1);
    if (all > 0)
        ck_assert_float_eq_tol(mass, (float)(kept / all), 1e-6f);
    free(page);
}

static void random_rule(uint64_t *seed, int n, struct kern_rule *rule, struct kern_range *pin)
{
    pin[0].from = (int32_t)dice(seed, (uint32_t)n);
    pin[0].to = pin[0].from + (int32_t)dice(seed, 20);
    pin[1].from = pin[0].to + (int32_t)dice(seed, (uint32_t)n);
    pin[1].to = pin[1].from + (int32_t)dice(seed, 50);
    *rule = (struct kern_rule){
        .budget = 1 + (int32_t)dice(seed, (uint32_t)n + 30),
        .sink = (int32_t)dice(seed, 8),
        .recent = (int32_t)dice(seed, 64),
        .pin = pin,
        .n_pin = (int32_t)dice(seed, 3),
        .pool = 1 + 2 * (int32_t)dice(seed, 12),
        .pool_kind = dice(seed, 2) ? KERN_POOL_MAX : KERN_POOL_AVG,
        .pool_from = (int32_t)dice(seed, 10),
        .pool_to = n - (int32_t)dice(seed, 30),
        .use_score = dice(seed, 8) > 0,
        .by_value = dice(seed, 2),
        .value_eps = 1e-4f,
        .head_floor = dice(seed, 2) ? 1 : (float)dice(seed, 11) * 0.1f,
    };
    if (dice(seed, 3) == 0)
        rule->pool = 1;
    if (dice(seed, 2) == 0) {
        rule->pool_shift = (int32_t)dice(seed, 20);
        rule->wide = 1 + 2 * (int32_t)dice(seed, 30);
        rule->wide_shift = (int32_t)dice(seed, 40);
        rule->narrow = (float)dice(seed, 11) * 0.1f;
    }
}

START_TEST(select_equals_reference)
{
    struct rig_shape shape = { _i % KERN_KV_DTYPES, 64, 3, 2, 2, 1, MAX_N, 8, 2 };
    static struct ref_head ref[MAX_KV];
    struct rig r;
    uint64_t seed = 77 + (uint64_t)_i;

    rig_init(&r, kern_isa_get("scalar", NULL), &shape);
    for (int round = 0; round < ROUNDS; round++) {
        struct kern_rule rule;
        struct kern_range pin[2];
        int n[3], max = 1 + (int)dice(&seed, MAX_N);
        float mass[3];
        for (int h = 0; h < 3; h++)
            n[h] = round % 3 ? max : 1 + (int)dice(&seed, MAX_N);
        random_rule(&seed, max, &rule, pin);
        fill(&r, n, &seed, ref);
        ref_select(&rule, ref, 3, 5);
        cpu_select(&r.c, 0, 1, &rule, 5, mass);
        for (int h = 0; h < 3; h++)
            check_head(&r, h, &ref[h], &rule, mass[h]);
    }
    rig_fini(&r);
}
END_TEST

/* ---- lengths and caps -------------------------------------------------------------------------------------------- */

static void lens_after(const struct kern_rule *rule, int n, int32_t *len, int32_t *cap)
{
    struct rig_shape shape = { KERN_KV_BF16, 64, 2, 1, 2, 1, MAX_N, 8, 1 };
    static struct ref_head ref[MAX_KV];
    struct rig r;
    uint64_t seed = 5;
    int ns[2] = { n, n };

    rig_init(&r, kern_isa_get("scalar", NULL), &shape);
    fill(&r, ns, &seed, ref);
    for (int i = 0; i < n; i++) /* head 1 has the higher scores */
        cpu_score_row(&r.c, 0, 1)[i] += 100;
    cpu_select(&r.c, 0, 1, rule, 5, NULL);
    memcpy(len, r.c.kv.len + cpu_kv_index(&r.c, 0, 1, 0), 2 * sizeof *len);
    memcpy(cap, r.c.kv.cap + cpu_kv_index(&r.c, 0, 1, 0), 2 * sizeof *cap);
    rig_fini(&r);
}

START_TEST(lengths_and_caps)
{
    struct kern_rule rule = { .budget = 100, .sink = 4, .recent = 16, .pool = 1, .use_score = true, .head_floor = 1 };
    int32_t len[2], cap[2];

    lens_after(&rule, 300, len, cap);
    ck_assert(len[0] == 100 && len[1] == 100 && cap[0] == 100 && cap[1] == 100);
    lens_after(&rule, 60, len, cap); /* nothing is evicted, room up to the budget */
    ck_assert(len[0] == 60 && cap[0] == 100);
    rule.recent = 150; /* protected beyond the budget */
    lens_after(&rule, 300, len, cap);
    ck_assert(len[0] == 154 && cap[0] == 154);
    rule.recent = 16;
    rule.head_floor = 0.25f; /* head 0 keeps 20 + 20 of its 80, head 1 the rest */
    lens_after(&rule, 300, len, cap);
    ck_assert(len[0] == 40 && len[1] == 160 && cap[0] == 40 && cap[1] == 160);
    rule.budget = 0;
    lens_after(&rule, 300, len, cap);
    ck_assert(len[0] == 300 && len[1] == 300 && cap[0] == INT32_MAX && cap[1] == INT32_MAX);
}
END_TEST

/* Slots out of order, as decode leaves them: the gather puts positions in ascending order, pairs and scores with them. */
START_TEST(gather_restores_order)
{
    struct rig_shape shape = { _i, 64, 1, 1, 2, 1, 128, 8, 1 };
    struct kern_rule rule = { .budget = 50, .sink = 2, .recent = 10, .pool = 1, .use_score = true, .head_floor = 1 };
    static struct ref_head ref, sorted;
    struct rig r;
    float mass;
    int n = 100;

    rig_init(&r, kern_isa_get("scalar", NULL), &shape);
    struct cpu *c = &r.c;
    size_t at = cpu_kv_index(c, 0, 1, 0);
    c->kv.len[at] = ref.n = n;
    for (int i = 0; i < n; i++) {
        unsigned char *page = cpu_page(c, c->kv.table[at * c->kv.max_pages + i / 32]);
        int32_t pos = i * 37 % n; /* a permutation */
        rig_row(&r, 0, 0, pos);
        c->isa->att.store(&c->kv.page, page, i % 32, c->qkv, c->qkv + 64);
        ((int32_t *)(page + c->kv.page.pos))[i % 32] = ref.pos[i] = pos;
        cpu_score_row(c, 0, 0)[i] = ref.score[i] = (float)(pos * 53 % n);
    }
    ref_select(&rule, &ref, 1, 1);
    cpu_select(c, 0, 1, &rule, 1, &mass);
    sorted.n = n;
    for (int i = 0; i < n; i++) {
        sorted.pos[ref.pos[i]] = ref.pos[i];
        sorted.score[ref.pos[i]] = ref.score[i];
        sorted.keep[ref.pos[i]] = ref.keep[i];
    }
    check_head(&r, 0, &sorted, &rule, mass);
    ck_assert_int_eq(c->kv.len[at], 50);
    rig_fini(&r);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("select");
    TCase *tc = tcase_create("select");

    tcase_set_timeout(tc, 120);
    tcase_add_loop_test(tc, select_equals_reference, 0, 2 * KERN_KV_DTYPES);
    tcase_add_test(tc, lengths_and_caps);
    tcase_add_loop_test(tc, gather_restores_order, 0, KERN_KV_DTYPES);
    suite_add_tcase(suite, tc);
    SRunner *sr = srunner_create(suite);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
