/* test_sampler: what is kept and drawn, against a plain sort of the whole vocabulary. */
#include "config.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sampler.h"

static uint32_t lcg;

static float uniform(void)
{
    lcg = lcg * 1664525u + 1013904223u;
    return (float)(lcg >> 8) / 16777216.0f;
}

static float normal(void)
{
    float s = 0;
    for (int i = 0; i < 12; i++)
        s += uniform();
    return s - 6;
}

static struct engine_sampling plain(void)
{
    return (struct engine_sampling){ .temperature = 1, .top_p = 1, .repeat_penalty = 1, .seed = 1, .seed_set = true };
}

/* ---- the plain way -------------------------------------------------------------------------------------- */

struct item {
    double logit;
    int id;
};

static int cmp_item(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit < y->logit ? 1 : -1;
    return x->id - y->id;
}

/* Probability of each token under the settings, by sorting everything in double. */
static void plain_probs(const struct engine_sampling *s, const float *logits, int n, double *p)
{
    struct item *v = malloc((size_t)n * sizeof(*v));
    int m = 0, kept;
    double total = 0, sum = 0;
    ck_assert_ptr_nonnull(v);
    for (int i = 0; i < n; i++) {
        p[i] = 0;
        if (logits[i] > -INFINITY)
            v[m++] = (struct item){ logits[i], i };
    }
    qsort(v, (size_t)m, sizeof(*v), cmp_item);
    if (s->top_k > 0 && s->top_k < m)
        m = s->top_k;
    for (int i = 0; i < m; i++)
        total += exp(v[i].logit - v[0].logit);
    for (kept = 0; kept < m && (kept == 0 || s->top_p >= 1 || sum < (double)s->top_p * total); kept++)
        sum += exp(v[kept].logit - v[0].logit);
    while (kept > 1 && exp(v[kept - 1].logit - v[0].logit) < (double)s->min_p)
        kept--;
    sum = 0;
    for (int i = 0; i < kept; i++)
        sum += exp((v[i].logit - v[0].logit) / (double)s->temperature);
    for (int i = 0; i < kept; i++)
        p[v[i].id] = exp((v[i].logit - v[0].logit) / (double)s->temperature) / sum;
    free(v);
}

#define SMALL 60
#define DRAWS 20000

static const struct {
    float temperature, top_p, min_p;
    int top_k;
} settings[] = {
    { 1, 1, 0, 0 },     { 0.5f, 1, 0, 0 },   { 2, 1, 0, 0 },       { 1, 1, 0, 5 },        { 0.8f, 1, 0, 1 },
    { 1, 0.5f, 0, 0 },  { 1, 0.9f, 0, 0 },   { 0.7f, 0.9f, 0, 10 }, { 1, 1, 0.1f, 0 },    { 1, 1, 0.5f, 7 },
    { 1, 0.8f, 0.2f, 0 }, { 0.8f, 0.95f, 0.05f, 40 }, { 1, 0.001f, 0, 0 }, { 1.5f, 0.6f, 0.01f, 59 }, { 1, 1, 1, 0 },
    { 0.01f, 1, 0, 0 }, { 1, 0, 0, 0 },      { 1, 1, 0, 1000 },
};

/* Frequencies of many draws against the probabilities: nothing outside, chi-square within 5 deviations. */
START_TEST(distribution)
{
    struct engine_sampling set = plain();
    float logits[SMALL], copy[SMALL];
    double p[SMALL], chi = 0;
    int count[SMALL] = { 0 }, cells = 0;
    lcg = 17;
    for (int i = 0; i < SMALL; i++)
        logits[i] = i == 3 ? NAN : i == 4 ? -INFINITY : 2 * normal();
    logits[10] = logits[20] = logits[30]; /* ties */
    set.temperature = settings[_i].temperature;
    set.top_p = settings[_i].top_p;
    set.min_p = settings[_i].min_p;
    set.top_k = settings[_i].top_k;
    struct sampler *s = sampler_new(&set, SMALL);
    ck_assert_ptr_nonnull(s);
    plain_probs(&set, logits, SMALL, p);
    for (int i = 0; i < DRAWS; i++) {
        memcpy(copy, logits, sizeof(copy));
        int32_t id = sampler_pick(s, copy, i);
        ck_assert_int_ge(id, 0);
        ck_assert_int_lt(id, SMALL);
        ck_assert_msg(p[id] > 0, "token %d is not among the kept", id);
        count[id]++;
    }
    for (int i = 0; i < SMALL; i++)
        if (p[i] * DRAWS > 5) {
            chi += (count[i] - p[i] * DRAWS) * (count[i] - p[i] * DRAWS) / (p[i] * DRAWS);
            cells++;
        }
    ck_assert_int_gt(cells, 0);
    ck_assert_msg(chi < cells + 5 * sqrt(2.0 * cells), "chi-square %.1f of %d cells", chi, cells);
    sampler_free(s);
}
END_TEST

/* Large vocabularies: every draw is one that the plain way keeps, and the rarest kept one can come. */
START_TEST(large)
{
    enum { N = 5003 };
    static float logits[N], copy[N];
    static double p[N];
    struct engine_sampling set = plain();
    lcg = (uint32_t)_i + 1;
    for (int i = 0; i < N; i++)
        logits[i] = _i % 3 == 0 ? floorf(4 * normal()) / 2 : 3 * normal(); /* many ties in a third of the rounds */
    set.top_k = _i % 5 == 0 ? 0 : 1 + (_i * 37) % 300;
    set.top_p = _i % 4 == 0 ? 1 : 0.3f + 0.7f * uniform();
    set.min_p = _i % 2 ? 0 : 0.02f * uniform();
    set.temperature = 50; /* nearly flat: all that are kept come */
    plain_probs(&set, logits, N, p);
    int kept = 0, seen = 0;
    static unsigned char got[N];
    memset(got, 0, sizeof(got));
    for (int i = 0; i < N; i++)
        kept += p[i] > 0;
    struct sampler *s = sampler_new(&set, N);
    for (int i = 0; i < 4000; i++) {
        memcpy(copy, logits, sizeof(copy));
        int32_t id = sampler_pick(s, copy, i);
        ck_assert_msg(p[id] > 0, "round %d: token %d is not among the %d kept", _i, id, kept);
        seen += !got[id];
        got[id] = 1;
    }
    if (kept <= 300)
        ck_assert_msg(seen > kept * 9 / 10, "round %d: %d of %d kept came", _i, seen, kept);
    sampler_free(s);
}
END_TEST

/* ---- exactness -------------------------------------------------------------------------------------------- */

START_TEST(greedy)
{
    enum { N = 999 };
    static float logits[N];
    struct engine_sampling set = plain();
    set.temperature = 0;
    set.top_k = 40;
    struct sampler *s = sampler_new(&set, N);
    for (int round = 0; round < 200; round++) {
        int best = 0;
        lcg = (uint32_t)round;
        for (int i = 0; i < N; i++) {
            logits[i] = floorf(3 * normal());
            if (logits[i] > logits[best])
                best = i; /* the first of equals */
        }
        ck_assert_int_eq(sampler_pick(s, logits, round), best);
    }
    for (int i = 0; i < N; i++)
        logits[i] = NAN;
    ck_assert_int_eq(sampler_pick(s, logits, 0), -1);
    for (int i = 0; i < N; i++)
        logits[i] = -INFINITY;
    ck_assert_int_eq(sampler_pick(s, logits, 0), -1);
    logits[N - 1] = -1e30f;
    ck_assert_int_eq(sampler_pick(s, logits, 0), N - 1);
    sampler_free(s);
}
END_TEST

/* NaN and infinities with a temperature. */
START_TEST(odd_logits)
{
    enum { N = 64 };
    float logits[N];
    struct engine_sampling set = plain();
    set.top_p = 0.9f;
    set.min_p = 0.05f;
    for (int k = 0; k < 2; k++) {
        set.top_k = k * 10;
        struct sampler *s = sampler_new(&set, N);
        for (int i = 0; i < N; i++)
            logits[i] = i % 2 ? NAN : -INFINITY;
        ck_assert_int_eq(sampler_pick(s, logits, 0), -1);
        logits[33] = 0;
        for (int i = 0; i < 20; i++)
            ck_assert_int_eq(sampler_pick(s, logits, i), 33);
        logits[40] = INFINITY;
        for (int i = 0; i < 20; i++)
            ck_assert_int_eq(sampler_pick(s, logits, i), 40);
        sampler_free(s);
    }
}
END_TEST

/* The i-th draw depends on the seed, i and the logits only. */
START_TEST(reproducible)
{
    enum { N = 500 };
    float logits[N], copy[N];
    int32_t first[100];
    struct engine_sampling set = plain();
    int same = 0, repeats = 0;
    set.seed = 42;
    lcg = 3;
    for (int i = 0; i < N; i++)
        logits[i] = normal();
    struct sampler *a = sampler_new(&set, N);
    for (int i = 0; i < 100; i++) {
        memcpy(copy, logits, sizeof(copy));
        first[i] = sampler_pick(a, copy, i);
        repeats += i && first[i] == first[i - 1];
    }
    struct sampler *b = sampler_new(&set, N);
    for (int i = 99; i >= 0; i--) {
        memcpy(copy, logits, sizeof(copy));
        ck_assert_int_eq(sampler_pick(b, copy, i), first[i]);
    }
    set.seed = 43;
    struct sampler *c = sampler_new(&set, N);
    for (int i = 0; i < 100; i++) {
        memcpy(copy, logits, sizeof(copy));
        same += sampler_pick(c, copy, i) == first[i];
    }
    ck_assert_int_lt(same, 20);
    ck_assert_int_lt(repeats, 20);
    set.seed_set = false; /* two samplers without a seed differ */
    struct sampler *d = sampler_new(&set, N), *e = sampler_new(&set, N);
    same = 0;
    for (int i = 0; i < 100; i++) {
        memcpy(copy, logits, sizeof(copy));
        int32_t id = sampler_pick(d, copy, i);
        same += sampler_pick(e, copy, i) == id;
    }
    ck_assert_int_lt(same, 20);
    sampler_free(a);
    sampler_free(b);
    sampler_free(c);
    sampler_free(d);
    sampler_free(e);
    sampler_free(NULL);
}
END_TEST

/* ---- penalties -------------------------------------------------------------------------------------------- */

START_TEST(penalties)
{
    enum { N = 40 };
    float logits[N], before[N];
    struct engine_sampling set = plain();
    set.temperature = 0;
    set.repeat_penalty = 2;
    set.presence_penalty = 0.25f;
    set.frequency_penalty = 0.5f;
    struct sampler *s = sampler_new(&set, N);
    for (int i = 0; i < N; i++)
        logits[i] = before[i] = (float)(i - 20);
    sampler_accept(s, 39); /* falls out of the window again */
    for (int i = 0; i < 61; i++)
        sampler_accept(s, 1000); /* outside the vocabulary: ignored, but it fills the window */
    sampler_accept(s, 30);
    sampler_accept(s, 5);
    sampler_accept(s, 30);
    ck_assert_int_eq(sampler_pick(s, logits, 0), 39);
    for (int i = 0; i < N; i++) {
        float want = i == 30 ? 10 / 2.0f - (2 * 0.5f + 0.25f) : i == 5 ? -15 * 2.0f - 0.75f : before[i];
        ck_assert_msg(logits[i] == want, "logit %d is %g, not %g", i, (double)logits[i], (double)want);
    }
    sampler_accept(s, 39);
    memcpy(logits, before, sizeof(logits));
    ck_assert_int_eq(sampler_pick(s, logits, 1), 38); /* 19 / 2 - 0.75 is below 18 */
    sampler_free(s);
}
END_TEST

/* ---- log-probabilities -------------------------------------------------------------------------------------- */

START_TEST(logprobs)
{
    enum { N = 49152, TOP = 64 };
    float *logits = malloc(N * sizeof(*logits)), lp[TOP];
    struct item *v = malloc(N * sizeof(*v));
    int32_t ids[TOP];
    double sum = 0;
    ck_assert(logits && v);
    lcg = (uint32_t)_i;
    for (int i = 0; i < N; i++) {
        logits[i] = _i ? 4 * normal() : floorf(4 * normal());
        v[i] = (struct item){ logits[i], i };
    }
    qsort(v, N, sizeof(*v), cmp_item);
    for (int i = N - 1; i >= 0; i--)
        sum += exp(v[i].logit);
    ck_assert(fabs((double)sampler_lse(logits, N) - log(sum)) < 2e-6);
    for (int n = 0; n <= TOP; n += 16) {
        float own = sampler_logprobs(logits, N, 77, n, ids, lp);
        ck_assert(fabs((double)own - ((double)logits[77] - log(sum))) < 5e-6);
        for (int i = 0; i < n; i++) {
            ck_assert_int_eq(ids[i], v[i].id);
            ck_assert(fabs((double)lp[i] - (v[i].logit - log(sum))) < 5e-6);
        }
    }
    free(logits);
    free(v);
}
END_TEST

START_TEST(logprobs_odd)
{
    float logits[20], lp[20];
    int32_t ids[20];
    for (int i = 0; i < 20; i++)
        logits[i] = i == 7 ? 1 : i == 9 ? 0 : i % 2 ? -INFINITY : NAN;
    ck_assert(sampler_logprobs(logits, 20, 3, 4, ids, lp) == -1e30f);
    ck_assert(ids[0] == 7 && ids[1] == 9 && ids[2] == 0 && ids[3] == 1);
    ck_assert(fabsf(lp[0] + 0.31326169f) < 1e-6f && lp[2] == -1e30f && lp[3] == -1e30f);
    ck_assert(sampler_logprobs(logits, 20, -1, 0, NULL, NULL) == -1e30f);
    ck_assert(sampler_logprobs(logits, 20, 20, 0, NULL, NULL) == -1e30f);
    logits[7] = logits[9] = NAN;
    ck_assert(sampler_logprobs(logits, 20, 7, 20, ids, lp) == -1e30f);
    ck_assert(sampler_lse(logits, 20) == -1e30f);
    for (int i = 0; i < 20; i++)
        ck_assert(ids[i] == i && lp[i] == -1e30f);
    logits[5] = INFINITY;
    ck_assert(sampler_logprobs(logits, 20, 5, 1, ids, lp) == 0 && ids[0] == 5 && lp[0] == 0);
    for (int i = 0; i < 20; i++)
        logits[i] = -1e30f; /* tiny but equal: still a distribution */
    ck_assert(sampler_logprobs(logits, 20, 5, 1, ids, lp) <= -2.9f);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sampler");
    TCase *t = tcase_create("sampler");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, distribution, 0, (int)(sizeof(settings) / sizeof(settings[0])));
    tcase_add_loop_test(t, large, 0, 30);
    tcase_add_test(t, greedy);
    tcase_add_test(t, odd_logits);
    tcase_add_test(t, reproducible);
    tcase_add_test(t, penalties);
    tcase_add_loop_test(t, logprobs, 0, 3);
    tcase_add_test(t, logprobs_odd);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
