/* bench_attn.c - the attention half: prefill's two passes, decode over pages that no cache holds, selection. */
#include "tests/bench.h"

#include <stdio.h>

#include "kernels/cpu/cpu_attn.h"
#include "tests/attn_rig.h"

#define TILE 256 /* rows of a prefill pass */

struct attn_shape {
    const char *name;
    int heads, kv, head_dim;
};

static const struct attn_shape shapes[] = { { "9/3 x 64", 9, 3, 64 }, { "32/8 x 64", 32, 8, 64 }, { "32/8 x 128", 32, 8, 128 } };

struct attn_bench {
    struct rig r;
    int n, alpha, lanes, layer; /* slots, scored rows, decoding lanes; the layer whose turn it is */
    struct kern_rule *rule;     /* [lanes] */
};

static enum bench_limit product_limit(const struct bench *b, enum kern_kv_dtype dtype)
{
    return dtype != KERN_KV_F32 && strcmp(b->isa->name, "avx512") == 0 ? BENCH_BF16 : BENCH_F32;
}

/* ---- prefill ----------------------------------------------------------------------------------------------- */

/* Pass 1 of a whole prompt, one layer. */
static void rows_call(void *arg)
{
    struct attn_bench *a = arg;
    for (int pos = 0; pos < a->n; pos += TILE) {
        struct ops_seg seg = { .n_row = TILE, .pos0 = pos, .slot0 = pos, .score_from = TILE };
        struct ops_pass pass = { .n_row = TILE, .n_seg = 1, .seg = &seg };
        cpu_attn_rows(&a->r.c, 0, &pass);
    }
}

/* Pass 2 of its last tile. */
static void score_call(void *arg)
{
    struct attn_bench *a = arg;
    int pos = a->n - TILE;
    struct ops_seg seg = { .n_row = TILE, .pos0 = pos, .slot0 = pos, .score_from = TILE - a->alpha };
    struct ops_pass pass = { .n_row = TILE, .n_seg = 1, .seg = &seg };
    cpu_attn_score(&a->r.c, 0, &pass);
}

static void store_call(void *arg)
{
    struct attn_bench *a = arg;
    struct ops_seg seg = { .n_row = TILE };
    struct ops_pass pass = { .n_row = TILE, .n_seg = 1, .seg = &seg };
    cpu_kv_store(&a->r.c, 0, &pass, NULL);
}

/* The share of pass 2, as a row of its own. */
static void print_share(struct bench *b, const char *shape, int alpha, double share)
{
    if (b->json)
        printf(",\n  {\"op\": \"attn score share\", \"shape\": \"%s\", \"alpha\": %d, \"of_attention\": %.4f}", shape,
               alpha, share);
    else
        printf("%-24s %-34s    alpha %d: %.2f %% of this layer's prefill attention\n", "attn score share", shape, alpha,
               100 * share);
}

static void bench_prefill(struct bench *b, const struct attn_shape *m, enum kern_kv_dtype dtype, int n)
{
    static const int alphas[] = { 32, 256 };
    struct rig_shape shape = { dtype, m->head_dim, m->kv, m->heads / m->kv, 1, 1, n, TILE, b->threads };
    struct attn_bench a = { .n = n };
    char text[64];

    rig_init(&a.r, b->isa, &shape);
    cpu_score_begin(&a.r.c, 0, n);
    for (int pos = 0; pos < n; pos += TILE)
        rig_prefill(&a.r, 0, 0, pos, TILE, n);
    snprintf(text, sizeof text, "%s, %s, %d", m->name, kern_kv_dtype_name(dtype), n);
    double work = 4.0 * m->heads * m->head_dim * ((double)n * (n + 1) / 2);
    double rows = bench_run(b, "attn prefill", text, work, product_limit(b, dtype), true, rows_call, &a);
    for (int i = 0; i < 2; i++) {
        a.alpha = alphas[i];
        snprintf(text, sizeof text, "%s, %s, %d of %d", m->name, kern_kv_dtype_name(dtype), a.alpha, n);
        work = 2.0 * m->heads * m->head_dim * (double)a.alpha * (n - a.alpha / 2.0);
        double score = bench_run(b, "attn score", text, work, product_limit(b, dtype), true, score_call, &a);
        if (rows > 0 && score > 0)
            print_share(b, text, a.alpha, score / rows);
    }
    snprintf(text, sizeof text, "%s, %s, %d rows", m->name, kern_kv_dtype_name(dtype), TILE);
    bench_run(b, "kv store", text, 0, BENCH_NONE, true, store_call, &a);
    rig_fini(&a.r);
}

/* ---- decode ------------------------------------------------------------------------------------------------- */

/* A step of one layer; the layers take turns. */
static void decode_call(void *arg)
{
    struct attn_bench *a = arg;
    struct ops_seg seg[32];
    struct ops_pass pass = { .n_row = a->lanes, .n_seg = a->lanes, .seg = seg };
    for (int i = 0; i < a->lanes; i++)
        seg[i] = (struct ops_seg){ .lane = i, .row0 = i, .n_row = 1, .pos0 = a->n };
    cpu_attn_decode(&a->r.c, a->layer, &pass, a->rule);
    a->layer = (a->layer + 1) % a->r.c.d.n_layer;
}

static void bench_decode(struct bench *b, const struct attn_shape *m, enum kern_kv_dtype dtype, int lanes, int n)
{
    /* Past any cache: at least 256 MB of pages. */
    double layer_bytes = (double)lanes * m->kv * n * m->head_dim * (dtype == KERN_KV_F32 ? 8 : dtype == KERN_KV_BF16 ? 4 : 2);
    int layers = 1 + (int)(256e6 / layer_bytes);
    struct rig_shape shape = { dtype, m->head_dim, m->kv, m->heads / m->kv, layers, lanes, n, lanes, b->threads };
    struct attn_bench a = { .n = n, .lanes = lanes };
    char text[64];

    rig_init(&a.r, b->isa, &shape);
    struct cpu *c = &a.r.c;
    a.rule = calloc((size_t)lanes, sizeof *a.rule);
    for (int i = 0; i < lanes; i++) {
        a.rule[i] = (struct kern_rule){ .budget = n, .sink = 4, .recent = 32, .decay = 1, .weight = 1 };
        rig_row(&a.r, i, i, n);
    }
    for (int i = 0; i < lanes * layers * m->kv; i++)
        c->kv.len[i] = c->kv.cap[i] = n;
    for (uint32_t i = 0; i < c->kv.n_pages; i++)
        for (int j = 0; j < KERN_PAGE_SLOTS; j++) {
            unsigned char *page = cpu_page(c, i);
            b->isa->att.store(&c->kv.page, page, j, c->qkv + (j % 8), c->qkv + (j + 1) % 8);
            ((int32_t *)(page + c->kv.page.pos))[j] = (int32_t)(i % (uint32_t)(n / KERN_PAGE_SLOTS + 1)) * KERN_PAGE_SLOTS + j;
        }
    snprintf(text, sizeof text, "%s, %s, %d x %d", m->name, kern_kv_dtype_name(dtype), lanes, n);
    double work = (double)lanes * m->kv * n * (double)kern_page_slot_bytes(&c->kv.page);
    bench_run(b, "attn decode, scores", text, work, BENCH_MEMORY, true, decode_call, &a);
    for (int i = 0; i < lanes; i++)
        a.rule[i].weight = 0;
    for (int i = 0; i < lanes * layers * m->kv; i++)
        c->kv.cap[i] = INT32_MAX;
    bench_run(b, "attn decode", text, work, BENCH_MEMORY, true, decode_call, &a);
    free(a.rule);
    rig_fini(&a.r);
}

/* ---- selection ----------------------------------------------------------------------------------------------- */

static void select_call(void *arg)
{
    struct attn_bench *a = arg;
    for (int h = 0; h < a->r.c.d.n_kv; h++)
        a->r.c.kv.len[h] = a->n;
    cpu_select(&a->r.c, 0, 0, a->rule, 16, NULL);
}

static void bench_select(struct bench *b, const struct attn_shape *m, int n, float head_floor)
{
    struct rig_shape shape = { KERN_KV_BF16, m->head_dim, m->kv, m->heads / m->kv, 1, 1, n, TILE, b->threads };
    struct kern_rule rule = { .budget = n / 10, .sink = 4, .recent = 16, .pool = 21, .pool_to = n - 16, .use_score = true,
                              .head_floor = head_floor };
    struct attn_bench a = { .n = n, .rule = &rule };
    char text[64];

    rig_init(&a.r, b->isa, &shape);
    for (int pos = 0; pos < n; pos += TILE)
        rig_prefill(&a.r, 0, 0, pos, TILE, n);
    for (int h = 0; h < m->kv; h++)
        for (int i = 0; i < n; i++)
            cpu_score_row(&a.r.c, 0, h)[i] = fabsf(rig_normal(&a.r.seed));
    snprintf(text, sizeof text, "%s, %d of %d, floor %.1f", m->name, rule.budget, n, head_floor);
    bench_run(b, "select", text, 0, BENCH_NONE, true, select_call, &a);
    rig_fini(&a.r);
}

void bench_attn(struct bench *b)
{
    if (bench_wants(b, "attn prefill") || bench_wants(b, "attn score") || bench_wants(b, "kv store"))
        for (int i = 0; i < 3; i++)
            for (int t = 0; t < KERN_KV_DTYPES; t++) {
                if (i > 0 && t != KERN_KV_BF16)
                    continue;
                bench_prefill(b, &shapes[i], t, 512);
                bench_prefill(b, &shapes[i], t, 4096);
            }
    if (bench_wants(b, "attn decode"))
        for (int i = 0; i < 3; i++)
            for (int t = 0; t < KERN_KV_DTYPES; t++) {
                bench_decode(b, &shapes[i], t, 1, 4096);
                if (i == 0) {
                    bench_decode(b, &shapes[i], t, 20, 4096);
                    bench_decode(b, &shapes[i], t, 20, 512);
                }
            }
    if (bench_wants(b, "select")) {
        bench_select(b, &shapes[0], 4096, 1);
        bench_select(b, &shapes[0], 8192, 0.2f);
    }
}
