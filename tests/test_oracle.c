/* test_oracle.c - every policy over random models, prompts, budgets, windows, smoothings and pins: what the engine keeps after the prompt
 * and after decoding, its tokens and their log-probabilities, against the oracle's (oracle.h). With f32 computing they are equal
 * but for near ties, which the oracle names; by default kept sets overlap, with either cache.
 *
 * Usage: test_oracle [ROUNDS [SEED]] */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/engine_client.h"
#include "tests/oracle.h"
#include "tests/random_model.h"

#define STEPS 40
#define MARGIN 1e-3 /* between the two best logits: closer than this, f32 may choose the other */

static char dir[] = "/tmp/skvd-oracle-XXXXXX";
static char path[64];
#ifdef SKV_SANITIZED
static int rounds = 1;
#else
static int rounds = 3;
#endif
static uint64_t seed0 = 1;

static const char *const policies[] = { "full", "streaming", "snapkv", "pyramid", "h2o", "tova", "article", "sparse" };
enum { POLICIES = sizeof policies / sizeof *policies };

static int dice(uint64_t *seed, int lo, int hi)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return lo + (int)((*seed >> 33) % (uint64_t)(hi - lo + 1));
}

static void random_weights(uint64_t *seed)
{
    struct random_model m;
    struct skv_error err;
    static const int shapes[4][3] = { { 4, 2, 16 }, { 6, 2, 32 }, { 3, 1, 24 }, { 8, 4, 16 } };
    const int *shape = shapes[dice(seed, 0, 3)];

    random_model_default(&m);
    m.layers = dice(seed, 2, 4);
    m.heads = shape[0];
    m.kv_heads = shape[1];
    m.head_dim = shape[2];
    m.type = "F32";
    m.seed = *seed;
    if (random_model_write(&m, path, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        exit(99);
    }
}

static void random_policy(uint64_t *seed, const char *name, int n, struct oracle_policy *p)
{
    *p = (struct oracle_policy){ .name = name, .sink = dice(seed, 0, 6), .recent = dice(seed, 1, 40) };
    p->budget = p->sink + p->recent + dice(seed, 8, n / 2);
    p->budget = p->budget < 16 ? 16 : p->budget;
    p->alpha = strcmp(name, "h2o") == 0 ? 0 : dice(seed, 1, 40);
    p->pool = 1 + 2 * dice(seed, 0, 5);
    if (strcmp(name, "sparse") == 0 && dice(seed, 0, 2) > 0)
        p->pool = 0;
    p->max_pool = dice(seed, 0, 1);
    p->full_layers = dice(seed, 0, 1);
    if (dice(seed, 0, 2) == 0) {
        p->n_pin = 2;
        p->pin[0].from = dice(seed, 0, n / 4);
        p->pin[0].to = p->pin[0].from + dice(seed, 1, 10);
        p->pin[1].from = p->pin[0].to + dice(seed, 0, n / 4);
        p->pin[1].to = p->pin[1].from + dice(seed, 1, 10);
    }
}

static struct engine_request *request(const struct oracle_policy *p, const int32_t *ids, int n, int n_token, const char *session)
{
    struct engine_request *q = client_generate(ids, n, n_token);

    client_set_kv(q, p->name, p->budget);
    if (strcmp(p->name, "full") == 0)
        q->kv.budget = -1;
    q->kv.sink = p->sink;
    q->kv.recent = p->recent;
    q->kv.alpha = p->alpha == 0 ? -1 : p->alpha;
    q->kv.pool = p->pool == 0 ? -1 : p->pool;
    q->kv.pool_kind = p->pool == 0 ? -1 : p->max_pool;
    q->kv.full_layers = p->full_layers;
    if (strcmp(p->name, "full") == 0)
        q->kv.sink = q->kv.recent = -1;
    q->pin = malloc(ORACLE_PIN * sizeof *q->pin);
    for (int i = 0; i < p->n_pin; i++)
        q->pin[i] = (struct engine_range){ p->pin[i].from, p->pin[i].to };
    q->n_pin = p->n_pin;
    q->session = strdup(session);
    q->logprobs = 1;
    return q;
}

struct tally {
    int heads, equal, ties, tokens, sure, runs, ends, evicted;
    double worst_lp, overlap, worst_overlap;
};

static double overlap(const struct engine_kept_head *a, const struct oracle_head *b)
{
    int same = 0;

    for (int i = 0, k = 0; i < a->n && k < b->n;) {
        int32_t x = a->pos[i], y = b->pos[k];
        same += x == y;
        i += x <= y;
        k += y <= x;
    }
    return b->n > 0 ? (double)same / b->n : 1;
}

static void compare_sets(struct engine *e, const char *session, const struct oracle_run *r, const struct oracle_head *want,
                         const bool *tie, bool exact, struct tally *t, const char *what)
{
    struct client_reply *k = client_kept(e, session);

    ck_assert_int_eq(k->answer->kept_layers * k->answer->kept_heads, r->n_layer * r->n_kv);
    for (int h = 0; h < r->n_layer * r->n_kv; h++) {
        const struct engine_kept_head *got = &k->answer->kept[h];
        double share = overlap(got, &want[h]);
        ck_assert_msg(got->n == want[h].n, "%s: layer %d head %d holds %d, not %d", what, h / r->n_kv, h % r->n_kv, got->n, want[h].n);
        t->heads++;
        t->equal += share == 1;
        t->ties += tie != NULL && tie[h];
        t->overlap += share;
        t->worst_overlap = fmin(t->worst_overlap, share);
        ck_assert_msg(!exact || share == 1 || (tie != NULL && tie[h]), "%s: layer %d head %d keeps other positions (%.3f the same)", what,
                      h / r->n_kv, h % r->n_kv, share);
    }
    client_reply_free(k);
}

static void compare_run(struct engine *e, const struct oracle_policy *p, const int32_t *ids, int n, const struct oracle_run *r,
                        struct tally *t, const char *what)
{
    struct client_reply *a = client_call(e, request(p, ids, n, STEPS, "run"));
    int same = 0;

    ck_assert_msg(a->code == SKV_OK, "%s: %s", what, a->message);
    while (same < r->sure && a->result->tokens[same] == r->token[same]) {
        double off = fabs(r->logprob[same] - (double)a->lp[same]);
        t->worst_lp = fmax(t->worst_lp, off);
        ck_assert_msg(off < 2e-4, "%s: token %d: log-probability %g, not %g", what, same, (double)a->lp[same], r->logprob[same]);
        same++;
    }
    ck_assert_msg(same == r->sure || r->margin[same] < MARGIN, "%s: token %d is %d, not %d, by a margin of %g", what, same,
                  a->result->tokens[same], r->token[same], r->margin[same]);
    t->tokens += same;
    t->sure += r->sure;
    t->runs++;
    if (same == STEPS && r->end_sure) {
        compare_sets(e, "run", r, r->end, NULL, true, t, what);
        t->ends++;
        t->evicted += r->evicted;
    }
    client_reply_free(a);
}

static void one(struct engine *e, const struct model *m, uint64_t *seed, const char *name, int cut, struct tally *t)
{
    struct oracle_policy p;
    int32_t ids[400];
    char what[160];
    int n = dice(seed, 48, cut);

    for (int i = 0; i < n; i++)
        ids[i] = dice(seed, 3, 350);
    random_policy(seed, name, n, &p);
    snprintf(what, sizeof what, "%s n %d budget %d sink %d recent %d alpha %d pool %d%s full %d pins %d", name, n, p.budget, p.sink,
             p.recent, p.alpha, p.pool, p.max_pool ? " max" : "", p.full_layers, p.n_pin);
    struct oracle_run *r = oracle_generate(m, &p, ids, n, STEPS);
    struct client_reply *a = client_call(e, request(&p, ids, n, 0, "prompt"));
    ck_assert_msg(a->code == SKV_OK, "%s: %s", what, a->message);
    client_reply_free(a);
    compare_sets(e, "prompt", r, r->prefill, r->prefill_tie, true, t, what);
    compare_run(e, &p, ids, n, r, t, what);
    oracle_free(r);
}

static struct engine *start(bool f32, const char *dtype)
{
    struct engine_config c = client_config(path);

    c.compute_f32 = f32;
    c.kv.dtype = dtype;
    return client_start(&c);
}

START_TEST(exact)
{
    struct tally t = { .worst_overlap = 1 };

    for (int round = 0; round < rounds; round++) {
        uint64_t seed = seed0 * 1000 + (uint64_t)round * 100 + (uint64_t)_i;
        struct skv_error err;
        struct model m;
        random_weights(&seed);
        ck_assert_msg(model_open(&m, path, NULL, 0, &err) == 0, "%s", err.msg);
        for (int k = 0; k < 3; k++) {
            struct engine *e = start(true, NULL);
            one(e, &m, &seed, policies[_i], k == 0 ? 90 : 330, &t);
            engine_free(e);
        }
        model_close(&m);
    }
    printf("%-9s f32: %d runs, %d of %d kept sets equal, %d near ties; %d of %d tokens equal, worst log-probability %.1g; %d ends "
           "compared after %d evictions\n", policies[_i], t.runs, t.equal, t.heads, t.ties, t.tokens, t.sure, t.worst_lp, t.ends, t.evicted);
    ck_assert(t.ends > 0 && t.tokens > t.runs * STEPS / 4);
    ck_assert(_i == 0 || t.evicted > 0);
}
END_TEST

/* Default computing rounds activations and the cache: sets overlap. */
START_TEST(rounded)
{
    const char *dtype = _i % 2 ? "int8" : "bf16", *name = policies[_i / 2];
    struct tally t = { .worst_overlap = 1 };
    uint64_t seed = seed0 * 1000 + 777 + (uint64_t)(_i / 2);
    struct skv_error err;
    struct model m;

    random_weights(&seed);
    ck_assert_msg(model_open(&m, path, NULL, 0, &err) == 0, "%s", err.msg);
    struct engine *e = start(false, dtype);
    for (int k = 0; k < 4; k++) {
        struct oracle_policy p;
        int32_t ids[400];
        char session[16];
        int n = dice(&seed, 200, 330);
        for (int i = 0; i < n; i++)
            ids[i] = dice(&seed, 3, 350);
        random_policy(&seed, name, n, &p);
        snprintf(session, sizeof session, "s%d", k);
        struct oracle_run *r = oracle_generate(&m, &p, ids, n, 1);
        struct client_reply *a = client_call(e, request(&p, ids, n, 0, session));
        ck_assert_msg(a->code == SKV_OK, "%s: %s", name, a->message);
        client_reply_free(a);
        compare_sets(e, session, r, r->prefill, r->prefill_tie, false, &t, name);
        oracle_free(r);
    }
    engine_free(e);
    model_close(&m);
    printf("%-9s %s: kept after the prompt: mean %.4f, worst head %.3f the same\n", name, dtype, t.overlap / t.heads, t.worst_overlap);
    ck_assert(t.overlap / t.heads >= 0.97);
    ck_assert(t.worst_overlap >= 0.85);
}
END_TEST

int main(int argc, char **argv)
{
    Suite *s = suite_create("oracle");
    TCase *c = tcase_create("oracle");

    if (argc > 1)
        rounds = atoi(argv[1]);
    if (argc > 2)
        seed0 = strtoull(argv[2], NULL, 10);
    if (mkdtemp(dir) == NULL)
        return 99;
    snprintf(path, sizeof path, "%s/tiny.gguf", dir);
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, exact, 0, POLICIES);
    tcase_add_loop_test(c, rounded, 0, 2 * POLICIES);
    suite_add_tcase(s, c);
    SRunner *sr = srunner_create(s);
    srunner_set_fork_status(sr, CK_NOFORK);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    unlink(path);
    rmdir(dir);
    return failed == 0 ? 0 : 1;
}
