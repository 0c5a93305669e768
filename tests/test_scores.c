/* test_scores.c - prefill scores and kept sets of the real model, on every layer and head, against tests/data/scores (made with
 * transformers' eager attention in f32). f32 computing: within 1e-4 + 1e-3 relative, sets equal where the cut is no near tie. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model.h"
#include "engine/pages.h"
#include "tests/tsv.h"

#ifdef SKV_SANITIZED
#define SANITIZED true
#else
#define SANITIZED false
#endif

static const char *path;

/* The numbers of a .npy file (f4 or i4, C order); *n: how many. */
static void *npy(const char *prompt, const char *what, int *n)
{
    char name[512];
    unsigned char head[10];
    const char *src = getenv("top_srcdir");

    snprintf(name, sizeof name, "%s/tests/data/scores/%s.%s.npy", src != NULL ? src : ".", prompt, what);
    FILE *f = fopen(name, "rb");
    if (f == NULL || fread(head, 1, 10, f) != 10) {
        fprintf(stderr, "%s: not there\n", name);
        exit(99);
    }
    fseek(f, 0, SEEK_END);
    long bytes = ftell(f) - (10 + head[8] + 256 * head[9]);
    void *data = malloc((size_t)bytes + 1);
    fseek(f, 10 + head[8] + 256 * head[9], SEEK_SET);
    ck_assert_int_eq((int)fread(data, 1, (size_t)bytes, f), (int)bytes);
    fclose(f);
    *n = (int)(bytes / 4);
    return data;
}

struct bed {
    struct model m;
    const struct ops *ops;
    void *be;
    struct ops_kv *kv;
    int n, *ids, per_head;
};

static void bed_init(struct bed *b, const char *prompt, bool f32)
{
    struct skv_error err;
    struct ops_config c = { .n_threads = 2, .compute_f32 = f32, .kv_dtype = f32 ? KERN_KV_F32 : KERN_KV_BF16, .max_lanes = 1,
                            .max_rows = OPS_TILE, .max_pages = 300 };

    b->ids = npy(prompt, "ids", &b->n);
    ck_assert_msg(model_open(&b->m, path, NULL, 0, &err) == 0, "%s", err.msg);
    b->ops = &ops_cpu;
    b->be = b->ops->open(&c, &b->m.src, &err);
    ck_assert_msg(b->be != NULL, "%s", err.msg);
    const struct ops_dims *d = &b->m.src.dims;
    b->per_head = (int)pages_for(b->n);
    b->kv = b->ops->kv_init(b->be, (uint32_t)(d->n_layer * d->n_kv * b->per_head), &err);
    ck_assert_msg(b->kv != NULL, "%s", err.msg);
    for (int i = 0; i < d->n_layer * d->n_kv; i++)
        for (int k = 0; k < b->per_head; k++)
            b->kv->table[(size_t)i * b->kv->max_pages + k] = (uint32_t)(i * b->per_head + k);
}

static void bed_fini(struct bed *b)
{
    b->ops->close(b->be);
    model_close(&b->m);
    free(b->ids);
}

/* One layer over all tiles, with the last alpha queries scored. */
static void layer(struct bed *b, int l, int alpha, float *x)
{
    const struct ops_dims *d = &b->m.src.dims;

    for (int h = 0; h < d->n_kv; h++)
        b->kv->len[l * d->n_kv + h] = b->n;
    b->ops->score_begin(b->be, 0, b->n);
    for (int from = 0; from < b->n; from += OPS_TILE) {
        int rows = b->n - from < OPS_TILE ? b->n - from : OPS_TILE;
        int scored = b->n - alpha > from ? b->n - alpha - from : 0;
        struct ops_seg seg = { .lane = 0, .n_row = rows, .pos0 = from, .slot0 = from, .score_from = scored < rows ? scored : rows };
        struct ops_pass pass = { .n_row = rows, .n_seg = 1, .token = b->ids + from, .seg = &seg };
        float *xt = x + (size_t)from * d->d_model;
        if (l == 0)
            b->ops->embed(b->be, &pass, xt);
        b->ops->attn_in(b->be, l, &pass, xt, NULL);
        b->ops->attn_prefill(b->be, l, &pass);
        b->ops->attn_out_mlp(b->be, l, &pass, xt);
    }
}

static int stored_index(const char *prompt, int l)
{
    static const int few[4] = { 0, 3, 15, 29 };

    if (strcmp(prompt, "p2000") != 0)
        return l;
    for (int i = 0; i < 4; i++)
        if (few[i] == l)
            return i;
    return -1;
}

static void scores(const char *prompt, int alpha, bool f32, double *worst)
{
    struct bed b;
    struct skv_error err;
    char what[32];
    int n_want;

    bed_init(&b, prompt, f32);
    const struct ops_dims *d = &b.m.src.dims;
    float *x = b.ops->state_new(b.be, b.n, &err), *got = malloc((size_t)d->n_kv * b.n * sizeof *got);
    snprintf(what, sizeof what, "gqa.a%d", alpha);
    float *want = npy(prompt, what, &n_want);
    for (int l = 0; l < d->n_layer; l++) {
        layer(&b, l, alpha, x);
        int at = stored_index(prompt, l);
        if (at < 0)
            continue;
        b.ops->score_read(b.be, 0, b.n, got);
        const float *w = want + (size_t)at * d->n_kv * b.n;
        for (int i = 0; i < d->n_kv * b.n; i++) {
            double e = fabs((double)got[i] - w[i]), tol = 1e-4 + 1e-3 * fabs(w[i]);
            if (e / tol > *worst)
                *worst = e / tol;
            ck_assert_msg(!f32 || e <= tol, "%s layer %d head %d position %d: %g, not %g", prompt, l, i / b.n, i % b.n,
                          (double)got[i], (double)w[i]);
        }
    }
    b.ops->state_free(b.be, x);
    free(want);
    free(got);
    bed_fini(&b);
}

START_TEST(scores_f32)
{
    static const struct {
        const char *prompt;
        int alpha;
    } set[] = { { "p300", 8 }, { "p300", 32 }, { "p300", 64 }, { "p300", 256 }, { "p2000", 32 }, { "p2000", 256 } };
    double worst = 0;

    scores(set[_i].prompt, set[_i].alpha, true, &worst);
    printf("%s alpha %d: worst error %.2f of the tolerance\n", set[_i].prompt, set[_i].alpha, worst);
}
END_TEST

/* Kept sets: the window's last alpha positions and the best of the rest after pooling. */
static void kept(const char *prompt, int alpha, const char *pool, bool f32)
{
    struct bed b;
    struct skv_error err;
    char what[32];
    int n_want, n_cut, near = 0, wrong = 0;
    double overlap = 1, mean = 0;

    bed_init(&b, prompt, f32);
    const struct ops_dims *d = &b.m.src.dims;
    float *x = b.ops->state_new(b.be, b.n, &err), *score = malloc((size_t)b.n * sizeof *score);
    int32_t *pos = malloc((size_t)b.n * sizeof *pos);
    snprintf(what, sizeof what, "kept.a%d.%s", alpha, pool);
    int32_t *want = npy(prompt, what, &n_want);
    snprintf(what, sizeof what, "cut.a%d.%s", alpha, pool);
    float *cut = npy(prompt, what, &n_cut);
    int n_set = n_cut / 2, keep = n_want / n_set;
    struct kern_rule rule = { .budget = keep, .recent = alpha, .pool = pool[0] == 'a' ? 7 : pool[0] == 'm' ? 5 : 1,
                              .pool_kind = pool[0] == 'm' ? KERN_POOL_MAX : KERN_POOL_AVG, .pool_to = b.n - alpha,
                              .use_score = true, .head_floor = 1, .decay = 1 };
    for (int l = 0; l < d->n_layer; l++) {
        layer(&b, l, alpha, x);
        int at = stored_index(prompt, l);
        b.ops->select(b.be, 0, l, &rule, alpha, NULL);
        for (int h = 0; at >= 0 && h < d->n_kv; h++) {
            int set = at * d->n_kv + h, same = 0, len = b.kv->len[l * d->n_kv + h];
            ck_assert_int_eq(len, keep);
            b.ops->kv_read(b.be, 0, l, h, pos, score);
            for (int i = 0, k = 0; i < keep && k < keep;) {
                int w = want[set * keep + i];
                same += pos[k] == w;
                i += w <= pos[k];
                k += pos[k] <= w;
            }
            overlap = fmin(overlap, (double)same / keep);
            mean += (double)same / keep / n_set;
            bool tie = fabs(cut[2 * set] - cut[2 * set + 1]) <= 1e-3 * fabs(cut[2 * set]);
            near += tie;
            wrong += same != keep && !tie;
        }
    }
    printf("%s alpha %d %s %s: %d sets of %d, %d near ties, %d others differ, worst overlap %.3f, mean %.4f\n", prompt, alpha, pool,
           f32 ? "f32" : "default", n_set, keep, near, wrong, overlap, mean);
    ck_assert(!f32 || wrong == 0);
    /* Pooling by the maximum makes ties the rule: one rounding moves five positions. */
    ck_assert(overlap >= (f32 ? 0.95 : pool[0] == 'm' ? 0.90 : 0.93));
    ck_assert(mean >= 0.98);
    b.ops->state_free(b.be, x);
    free(score);
    free(pos);
    free(want);
    free(cut);
    bed_fini(&b);
}

static const struct {
    const char *prompt;
    int alpha;
    const char *pool;
} sets[] = { { "p300", 32, "nopool" }, { "p300", 32, "avg7" },   { "p300", 32, "max5" },
             { "p300", 64, "avg7" },   { "p2000", 32, "nopool" }, { "p2000", 256, "avg7" } };

START_TEST(kept_f32)
{
    kept(sets[_i].prompt, sets[_i].alpha, sets[_i].pool, true);
}
END_TEST

START_TEST(kept_default)
{
    kept(sets[_i].prompt, sets[_i].alpha, sets[_i].pool, false);
}
END_TEST

int main(int argc, char **argv)
{
    path = tsv_model_path();
    if (path == NULL)
        return 77;
    if (SANITIZED) {
        printf("skipped: a sanitizer makes the real model too slow; the tiny models' tests cover the code\n");
        return 77;
    }
    Suite *s = suite_create("scores");
    TCase *c = tcase_create("scores");
    int n = (int)(sizeof sets / sizeof *sets);

    tcase_set_timeout(c, 0);
    bool all = argc > 1 && strcmp(argv[1], "long") == 0; /* also the 2000-token prompt in f32 */
    tcase_add_loop_test(c, scores_f32, 0, all ? 6 : 4);
    tcase_add_loop_test(c, kept_f32, 0, all ? n : n - 2);
    tcase_add_loop_test(c, kept_default, 0, n);
    suite_add_tcase(s, c);
    SRunner *sr = srunner_create(s);
    srunner_set_fork_status(sr, CK_NOFORK);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed == 0 ? 0 : 1;
}
