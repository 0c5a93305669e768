/* test_llama.c - what rounding costs, against what it costs llama.cpp on the same weights
 * (tests/data/llama.bin, written by tests/tools/llama_logits.c): KL to f32 arithmetic and
 * perplexity of default computing must be no worse than llama.cpp's with its defaults, and little
 * worse with the int8 cache than llama.cpp's with its q8_0 cache.
 *
 * The KL is that of the f32 model's likeliest tokens and one class of all others, for both programs
 * alike. Both are means over positions where either program may have luck; "no worse" is: not by
 * more than two standard errors of the paired difference.
 */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine_client.h"
#include "tests/tsv.h"

#define TOP       16
#define COLUMNS   3 /* f32; llama.cpp with its f16 cache; with its q8_0 cache */
#define MAX_TEXTS 8
#define STRIDE    40 /* prefill is asked at each so many positions: every one is a prompt of its own \
                      */

struct place {
    int32_t id[TOP];
    double lp[COLUMNS][TOP], next[COLUMNS];
};

struct text {
    int n;
    int32_t *ids;
    struct place *at; /* [n - 1] */
};

static const char *model;
static struct text texts[MAX_TEXTS];
static int n_texts;

/* ---- the data
 * --------------------------------------------------------------------------------------- */

static unsigned get16(FILE *f)
{
    int a = fgetc(f), b = fgetc(f);
    ck_assert_msg(b != EOF, "llama.bin: cut off");
    return (unsigned)a | (unsigned)b << 8;
}

static double get_lp(FILE *f)
{
    return -(double)get16(f) / 2000;
}

static void read_text(FILE *f, struct text *t)
{
    t->n = (int)get16(f);
    ck_assert_uint_eq(get16(f), 0);
    t->ids = calloc((size_t)t->n, sizeof *t->ids);
    t->at = calloc((size_t)t->n, sizeof *t->at);
    ck_assert(t->n >= 2 && t->ids != NULL && t->at != NULL);
    for (int i = 0; i < t->n; i++)
        t->ids[i] = (int32_t)get16(f);
    for (int i = 0; i + 1 < t->n; i++) {
        struct place *p = &t->at[i];
        for (int k = 0; k < TOP; k++) {
            p->id[k] = (int32_t)get16(f);
            for (int c = 0; c < COLUMNS; c++)
                p->lp[c][k] = get_lp(f);
        }
        for (int c = 0; c < COLUMNS; c++)
            p->next[c] = get_lp(f);
    }
}

static void read_data(void)
{
    const char *src = getenv("srcdir");
    char path[1024], magic[4];

    snprintf(path, sizeof path, "%s/tests/data/llama.bin", src != NULL ? src : ".");
    FILE *f = fopen(path, "rb");
    ck_assert_msg(f != NULL, "%s is not there", path);
    ck_assert(fread(magic, 1, 4, f) == 4 && memcmp(magic, "llm1", 4) == 0);
    n_texts = (int)get16(f);
    ck_assert(get16(f) == 0 && n_texts > 0 && n_texts <= MAX_TEXTS);
    for (int i = 0; i < n_texts; i++)
        read_text(f, &texts[i]);
    ck_assert(fgetc(f) == EOF);
    fclose(f);
}

/* ---- the measure
 * -------------------------------------------------------------------------------------- */

struct sum {
    double sum, squares, most;
};

struct cost {
    int n, column;
    double nll_f32;
    struct sum kl[2], nll[2], kl_more,
        nll_more; /* of skvd and llama.cpp; of the first minus the second */
};

static void sum_add(struct sum *s, double v)
{
    s->sum += v;
    s->squares += v * v;
    s->most = fmax(s->most, v);
}

static double kl_of(const struct place *p, const double *lp)
{
    double rest_p = 1, rest_q = 1, kl = 0;

    for (int k = 0; k < TOP; k++) {
        rest_p -= exp(p->lp[0][k]);
        rest_q -= exp(lp[k]);
        kl += exp(p->lp[0][k]) * (p->lp[0][k] - lp[k]);
    }
    if (rest_p > 1e-4 && rest_q > 1e-4) /* what is stored is rounded: less than that says nothing */
        kl += rest_p * log(rest_p / rest_q);
    return kl;
}

static void add(struct cost *c, const struct place *p, const double *lp, double next)
{
    double kl[2] = { kl_of(p, lp), kl_of(p, p->lp[c->column]) },
           nll[2] = { -next, -p->next[c->column] };

    for (int i = 0; i < 2; i++) {
        sum_add(&c->kl[i], kl[i]);
        sum_add(&c->nll[i], nll[i]);
    }
    sum_add(&c->kl_more, kl[0] - kl[1]);
    sum_add(&c->nll_more, nll[0] - nll[1]);
    c->nll_f32 -= p->next[0];
    c->n++;
}

/* Mean in units of its standard error. */
static double errors_of(const struct sum *s, int n)
{
    double mean = s->sum / n, var = s->squares / n - mean * mean;

    return mean / sqrt(var / n + 1e-30);
}

static void print(const char *what, const struct cost *c)
{
    for (int i = 0; i < 2; i++)
        printf(
            "%-20s %-9s  KL mean %.5f, largest %.3f; perplexity %.4f, of f32 %.4f (%d positions)\n",
            what, i == 0 ? "skvd" : "llama.cpp", c->kl[i].sum / c->n, c->kl[i].most,
            exp(c->nll[i].sum / c->n), exp(c->nll_f32 / c->n), c->n);
    printf("%-20s skvd's KL is more by %+.1f standard errors, its log-perplexity by %+.1f\n", what,
           errors_of(&c->kl_more, c->n), errors_of(&c->nll_more, c->n));
    fflush(stdout);
}

static void judge(const char *what, const struct cost *c)
{
    print(what, c);
    ck_assert_msg(errors_of(&c->kl_more, c->n) <= 2, "%s: the KL is worse than llama.cpp's", what);
    ck_assert_msg(errors_of(&c->nll_more, c->n) <= 2,
                  "%s: the perplexity is worse than llama.cpp's", what);
}

/* ---- the engine
 * ------------------------------------------------------------------------------------------ */

static struct engine *start(bool f32, const char *dtype)
{
    struct engine_config c;

    engine_config_default(&c);
    c.model = model;
    c.compute_f32 = f32;
    c.kv.dtype = dtype;
    c.kv.policy = "full";
    c.kv_memory = (int64_t)256 << 20;
    return client_start(&c);
}

/* Score tokens [from, to) of a text after those before; the candidates are the stored ones and the
 * next token. */
static struct engine_request *score(const struct text *t, int from, int to)
{
    struct engine_request *q = engine_request_new(ENGINE_SCORE);
    int n = to - from;

    q->tokens = malloc((size_t)from * sizeof *q->tokens);
    memcpy(q->tokens, t->ids, (size_t)from * sizeof *q->tokens);
    q->n_tokens = from;
    q->cont_tokens = malloc((size_t)n * sizeof *q->cont_tokens);
    memcpy(q->cont_tokens, t->ids + from, (size_t)n * sizeof *q->cont_tokens);
    q->n_cont_tokens = n;
    q->cand = malloc((size_t)n * TOP * sizeof *q->cand);
    q->cand_from = malloc(((size_t)n + 1) * sizeof *q->cand_from);
    q->n_cand_from = n;
    for (int i = 0; i < n; i++) {
        q->cand_from[i] = i * TOP;
        memcpy(q->cand + (size_t)i * TOP, t->at[from - 1 + i].id, sizeof t->at->id);
    }
    q->cand_from[n] = n * TOP;
    return q;
}

static void take(const struct client_reply *r, const struct text *t, int from, struct cost *c)
{
    double lp[TOP];

    ck_assert_msg(r->code == SKV_OK, "%s", r->message);
    for (int i = 0; i < r->result->n_tokens; i++) {
        for (int k = 0; k < TOP; k++)
            lp[k] = r->result->cand_lp[i * TOP + k];
        add(c, &t->at[from - 1 + i], lp, r->result->logprobs[i]);
    }
}

/* Every position, token by token: the decode path. */
static void decode_cost(struct engine *e, int limit, struct cost *c)
{
    struct engine_request *q[MAX_TEXTS];
    struct client_reply *r[MAX_TEXTS];

    for (int i = 0; i < n_texts; i++)
        q[i] = score(&texts[i], 1, texts[i].n < limit ? texts[i].n : limit);
    client_call_all(e, q, n_texts, r);
    for (int i = 0; i < n_texts; i++) {
        take(r[i], &texts[i], 1, c);
        client_reply_free(r[i]);
    }
}

/* The position after prompts of many lengths. */
static void prefill_cost(struct engine *e, struct cost *c)
{
    for (int i = 0; i < n_texts; i++)
        for (int n = STRIDE; n < texts[i].n; n += STRIDE) {
            struct client_reply *r = client_call(e, score(&texts[i], n, n + 1));
            take(r, &texts[i], n, c);
            client_reply_free(r);
        }
}

/* The stored f32 figures are right for this model: exact computing gives the same. */
START_TEST(exact)
{
    struct engine *e = start(true, NULL);
    struct cost c = { .column = 1 };

    decode_cost(e, 40, &c);
    print("f32", &c);
    ck_assert(c.kl[0].sum / c.n < 1e-5);
    ck_assert(fabs(c.nll[0].sum - c.nll_f32) / c.n < 1e-3);
    ck_assert(c.kl[1].sum / c.n > 1e-4);
    engine_free(e);
}
END_TEST

START_TEST(default_cache)
{
    struct engine *e = start(false, NULL);
    struct cost decode = { .column = 1 }, prefill = { .column = 1 };

    decode_cost(e, 1 << 20, &decode);
    prefill_cost(e, &prefill);
    engine_free(e);
    judge("decode", &decode);
    judge("prefill", &prefill);
}
END_TEST

/* One scale a slot, where q8_0 has one for 32 values: a little more is its price, and no more than
 * a quarter. */
START_TEST(int8_cache)
{
    struct engine *e = start(false, "int8");
    struct cost c = { .column = 2 };

    decode_cost(e, 400, &c);
    engine_free(e);
    print("decode, int8 cache", &c);
    ck_assert(c.kl[0].sum <= 1.25 * c.kl[1].sum);
    ck_assert(exp((c.nll[0].sum - c.nll_f32) / c.n) < 1.02);
}
END_TEST

int main(void)
{
    model = tsv_model_path();
    if (model == NULL)
        return 77;
#ifdef SKV_SANITIZED
    printf("skipped: a sanitizer makes the real model too slow; the tiny models' tests cover the "
           "code\n");
    return 77;
#endif
    Suite *s = suite_create("llama");
    TCase *c = tcase_create("llama");
    tcase_set_timeout(c, 0);
    tcase_add_unchecked_fixture(c, read_data, NULL);
    tcase_add_test(c, exact);
    tcase_add_test(c, default_cache);
    tcase_add_test(c, int8_cache);
    suite_add_tcase(s, c);
    SRunner *sr = srunner_create(s);
    srunner_set_fork_status(sr, CK_NOFORK);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed == 0 ? 0 : 1;
}
