/* test_reference.c - the engine against what independent code computed with the same model (tests/data/logits.tsv, evict.tsv).
 *
 * Log-probabilities are compared: logit - logsumexp. Tolerances, from the data's makers: f32 computing 2e-3 (4e-3 here: two
 * logits are subtracted), default computing (int8 activations) 2.0 a value, 0.5 root mean square, mean KL 0.006. Greedy texts
 * are equal up to the first step whose margin says that rounding may decide.
 *
 * Usage: test_reference [long]: without `long` only short prompts are run (in f32 up to 300 tokens, else up to 1100), and one of the
 * eviction prompts in f32, so that the test takes a minute; `long` runs everything there is.
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine_client.h"
#include "tests/tsv.h"

#ifdef SKV_SANITIZED
#define SANITIZED true
#else
#define SANITIZED false
#endif

#define GREEDY_F32_MARGIN 0.01
#define GREEDY_INT8_MARGIN 1.0

static const char *model;
static int f32_limit = 300, default_limit = 1100, evict_f32_limit = 500, evict_limit = 1000;
static int new_tokens = 24;

static float *numbers(const struct tsv_field *f, int *n)
{
    float *v = malloc((f->len / 2 + 2) * sizeof *v);
    char *p = f->s, *end;

    ck_assert_ptr_nonnull(v);
    for (*n = 0; (end = p, v[*n] = strtof(p, &end), end != p); p = end)
        ++*n;
    return v;
}

static struct engine *start(bool f32, const char *dtype)
{
    struct engine_config c;

    engine_config_default(&c);
    c.model = model;
    c.compute_f32 = f32;
    c.kv.dtype = dtype;
    c.kv.policy = "full";
    c.kv_memory = (int64_t)1 << 30;
    c.max_sequences = 16;
    c.max_batch = 8;
    return client_start(&c);
}

struct errors {
    double worst, square, kl, kl_worst;
    int n, rows, greedy, greedy_row;
};

/* One step's alternatives against expected logits: differences of log-probabilities, and the KL over the listed tokens. */
static void compare_top(const struct engine_event *ev, const struct tsv_field *ids, const struct tsv_field *logits,
                        const struct tsv_field *lse, struct errors *err)
{
    int n, m;
    int32_t *id = tsv_ids(ids, &n);
    float *want = numbers(logits, &m);
    double total = atof(lse->s), kl = 0;

    ck_assert_int_eq(n, m);
    for (int i = 0; i < n; i++) {
        double lp = want[i] - total, got = NAN;
        for (int k = 0; k < ev->n_top; k++)
            if (ev->top[k].token == id[i])
                got = ev->top[k].logprob;
        if (isnan(got)) /* fell out of the top: only among the weakest, in default computing */
            continue;
        err->worst = fmax(err->worst, fabs(lp - got));
        err->square += (lp - got) * (lp - got);
        err->n++;
        kl += exp(lp) * (lp - got);
    }
    err->kl += kl;
    err->kl_worst = fmax(err->kl_worst, kl);
    err->rows++;
    free(id);
    free(want);
}

/* Tokens that agree before the first step with a margin below `margin` at which they part. */
static void compare_greedy(const struct client_reply *r, const struct tsv_field *ids, const struct tsv_field *margins, double margin,
                           struct errors *err, const char *name)
{
    int n, m;
    int32_t *want = tsv_ids(ids, &n);
    float *mg = numbers(margins, &m);

    for (int i = 0; i < n && i < r->result->n_tokens; i++) {
        if (r->result->tokens[i] == want[i]) {
            err->greedy++;
            continue;
        }
        ck_assert_msg(mg[i] < margin, "%s: token %d is %d, not %d, where the margin is %g", name, i, r->result->tokens[i], want[i],
                      (double)mg[i]);
        break;
    }
    free(want);
    free(mg);
}

static void run_logits(struct engine *e, int limit, double margin, struct errors *err)
{
    struct tsv *t = tsv_read("logits.tsv");

    for (int i = 0; i < t->n; i++) {
        struct tsv_field *f = t->row[i].f;
        int n;
        int32_t *ids = tsv_ids(&f[1], &n);
        if (n <= limit) {
            struct engine_request *q = client_generate(ids, n, new_tokens);
            q->logprobs = 64;
            struct client_reply *r = client_call(e, q);
            ck_assert_msg(r->code == SKV_OK, "%s: %s", f[0].s, r->message);
            compare_top(&r->token[0], &f[2], &f[3], &f[4], err);
            compare_greedy(r, &f[5], &f[6], margin, err, f[0].s);
            client_reply_free(r);
        }
        free(ids);
    }
    tsv_free(t);
}

static void report(const char *what, const struct errors *e)
{
    printf("%s: %d prompts, worst log-probability %.2g, root mean square %.2g, KL mean %.2g worst %.2g, %d greedy tokens equal\n",
           what, e->rows, e->worst, sqrt(e->square / e->n), e->kl / e->rows, e->kl_worst, e->greedy);
    fflush(stdout);
}

START_TEST(logits_f32)
{
    struct engine *e = start(true, NULL);
    struct errors err = { 0 };

    run_logits(e, f32_limit, GREEDY_F32_MARGIN, &err);
    report("f32", &err);
    ck_assert(err.rows > 10);
    ck_assert(err.worst < 4e-3);
    ck_assert(err.kl_worst < 2e-5); /* over the listed tokens only: first order in the error */
    engine_free(e);
}
END_TEST

START_TEST(logits_default)
{
    struct engine *e = start(false, NULL);
    struct errors err = { 0 };

    run_logits(e, default_limit, GREEDY_INT8_MARGIN, &err);
    report("default", &err);
    ck_assert(err.worst < 2.0);
    ck_assert(sqrt(err.square / err.n) < 0.5);
    ck_assert(err.kl / err.rows < 0.006);
    ck_assert(err.kl_worst < 0.15);
    engine_free(e);
}
END_TEST

START_TEST(logits_int8_cache)
{
    struct engine *e = start(false, "int8");
    struct errors err = { 0 };

    run_logits(e, default_limit, GREEDY_INT8_MARGIN, &err);
    report("default, int8 cache", &err);
    ck_assert(err.worst < 2.0);
    ck_assert(sqrt(err.square / err.n) < 0.5);
    ck_assert(err.kl / err.rows < 0.02);
    engine_free(e);
}
END_TEST

/* ---- eviction ---------------------------------------------------------------------------------------- */

static struct engine_request *article(const int32_t *ids, int n, int budget, int pool, int max_tokens, const char *session)
{
    struct engine_request *q = client_generate(ids, n, max_tokens);

    client_set_kv(q, budget == 0 ? "full" : "article", budget == 0 ? -1 : budget);
    if (budget != 0) {
        q->kv.alpha = q->kv.recent = 32;
        q->kv.sink = 4;
        q->kv.full_layers = 3;
        q->kv.pool = pool == 0 ? 1 : pool;
        q->kv.pool_kind = 1;
    }
    q->session = strdup(session);
    q->logprobs = 32;
    return q;
}

struct overlap {
    double worst, sum;
    int n, swapped;
};

static void compare_kept(const struct engine_kept_head *h, const struct tsv_field *want, struct overlap *o)
{
    int n, same = 0;
    int32_t *pos = tsv_ids(want, &n);

    ck_assert_int_eq(h->n, n);
    for (int i = 0, k = 0; i < n && k < h->n;)
        if (pos[i] == h->pos[k]) {
            same++;
            i++;
            k++;
        } else if (pos[i] < h->pos[k]) {
            i++;
        } else {
            k++;
        }
    double share = n > 0 ? (double)same / n : 1;
    o->swapped += n - same;
    if (o->n == 0 || share < o->worst)
        o->worst = share;
    o->sum += share;
    o->n++;
    free(pos);
}

/* Is some choice here closer than rounding? Then a swapped position is no error. */
static bool near_tie(const struct tsv_field *cut, const struct tsv_field *evicted)
{
    int n, m;
    float *c = numbers(cut, &n), *v = evicted != NULL ? numbers(evicted, &m) : NULL;
    bool near = n == 2 && fabs(c[0] - c[1]) < 1e-3 * fabs(c[0]);

    for (int i = 0; v != NULL && i + 2 < m; i += 3)
        near = near || fabs(v[i + 2] - v[i + 1]) < 1e-3 * fabs(v[i + 1]);
    free(c);
    free(v);
    return near;
}

static void kept_of(struct engine *e, const char *session, const struct tsv_field *l3, const struct tsv_field *l15, struct overlap *o,
                    int swapped[2])
{
    struct client_reply *k = client_kept(e, session);
    int before = o->swapped;

    compare_kept(&k->answer->kept[3 * k->answer->kept_heads + 0], l3, o);
    swapped[0] = o->swapped - before;
    before = o->swapped;
    compare_kept(&k->answer->kept[15 * k->answer->kept_heads + 2], l15, o);
    swapped[1] = o->swapped - before;
    client_reply_free(k);
}

struct evict_run {
    struct errors err;
    struct overlap prefill, end;
};

static void evict_row(struct engine *e, const struct tsv_field *f, const int32_t *ids, int n, bool exact, struct evict_run *run)
{
    int budget = atoi(f[1].s), pool = atoi(f[2].s), swapped[2] = { 0, 0 };
    char name[64];
    static const int probe[] = { 0, 1, 8, 47 };

    snprintf(name, sizeof name, "%s-%d-%d", f[0].s, budget, pool);
    struct client_reply *r = client_call(e, article(ids, n, budget, pool, 0, name));
    ck_assert_msg(r->code == SKV_OK, "%s: %s", name, r->message);
    client_reply_free(r);
    if (budget > 0) {
        kept_of(e, name, &f[18], &f[22], &run->prefill, swapped);
        for (int i = 0; exact && i < 2; i++)
            ck_assert_msg(swapped[i] == 0 || (swapped[i] == 1 && near_tie(&f[19 + 4 * i], NULL)), "%s: %d positions differ after prefill",
                          name, swapped[i]);
    }
    strcat(name, "-run");
    r = client_call(e, article(ids, n, budget, pool, 49, name));
    ck_assert_msg(r->code == SKV_OK, "%s: %s", name, r->message);
    int32_t *want = NULL;
    int n_want, same = 0;
    want = tsv_ids(&f[4], &n_want);
    while (same < n_want && r->result->tokens[same] == want[same])
        same++;
    compare_greedy(r, &f[4], &f[5], exact ? GREEDY_F32_MARGIN : GREEDY_INT8_MARGIN, &run->err, name);
    for (int i = 0; i < 4; i++)
        if (probe[i] <= same && probe[i] < 48)
            compare_top(&r->token[probe[i]], &f[6 + 3 * i], &f[7 + 3 * i], &f[8 + 3 * i], &run->err);
    if (budget > 0 && same == n_want) {
        kept_of(e, name, &f[20], &f[24], &run->end, swapped);
        for (int i = 0; exact && i < 2; i++)
            ck_assert_msg(swapped[i] == 0 || near_tie(&f[19 + 4 * i], &f[21 + 4 * i]), "%s: %d positions differ at the end", name,
                          swapped[i]);
    }
    free(want);
    client_reply_free(r);
}

static void run_evict(struct engine *e, int limit, bool exact, struct evict_run *run)
{
    struct tsv *t = tsv_read("evict.tsv");
    int32_t *ids = NULL;
    int n = 0;

    for (int i = 0; i < t->n; i++) {
        struct tsv_field *f = t->row[i].f;
        ck_assert_int_eq(t->row[i].n, 26);
        if (f[3].len > 0) {
            free(ids);
            ids = tsv_ids(&f[3], &n);
        }
        if (n <= limit)
            evict_row(e, f, ids, n, exact, run);
    }
    free(ids);
    tsv_free(t);
}

static void report_evict(const char *what, const struct evict_run *r)
{
    report(what, &r->err);
    printf("%s: kept after prefill: worst head %.2f %%, mean %.2f %%; at the end of %d runs of equal text: worst %.2f %%, mean %.2f %%\n", what,
           100 * r->prefill.worst, 100 * r->prefill.sum / r->prefill.n, r->end.n / 2, 100 * r->end.worst,
           r->end.n > 0 ? 100 * r->end.sum / r->end.n : 0);
    fflush(stdout);
}

START_TEST(evict_f32)
{
    struct engine *e = start(true, NULL);
    struct evict_run run = { 0 };

    run_evict(e, evict_f32_limit, true, &run);
    report_evict("evict f32", &run);
    ck_assert(run.err.rows > 10);
    ck_assert(run.err.worst < 1e-2);
    engine_free(e);
}
END_TEST

START_TEST(evict_default)
{
    struct engine *e = start(false, NULL);
    struct evict_run run = { 0 };

    run_evict(e, evict_limit, false, &run);
    report_evict("evict default", &run);
    ck_assert(run.prefill.worst >= 0.95);
    ck_assert(run.prefill.sum / run.prefill.n >= 0.98);
    ck_assert(run.end.n == 0 || run.end.worst >= 0.93);
    ck_assert(run.err.worst < 2.0);
    engine_free(e);
}
END_TEST

int main(int argc, char **argv)
{
    model = tsv_model_path();
    if (model == NULL)
        return 77;
    if (SANITIZED) {
        printf("skipped: a sanitizer makes the real model too slow; the tiny models' tests cover the code\n");
        return 77;
    }
    Suite *s = suite_create("reference");
    TCase *c = tcase_create("reference");
    SRunner *sr;

    if (argc > 1 && strcmp(argv[1], "long") == 0)
        f32_limit = default_limit = evict_f32_limit = evict_limit = 1 << 20;
    if (f32_limit > 1000)
        new_tokens = 64;
    tcase_set_timeout(c, 0);
    tcase_add_test(c, logits_f32);
    tcase_add_test(c, logits_default);
    tcase_add_test(c, logits_int8_cache);
    tcase_add_test(c, evict_f32);
    tcase_add_test(c, evict_default);
    suite_add_tcase(s, c);
    sr = srunner_create(s);
    srunner_set_fork_status(sr, CK_NOFORK);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed == 0 ? 0 : 1;
}
