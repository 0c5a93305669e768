/* attn_rig.h - a CPU backend without a model: KV pool, workers and the attention half, for tests and benches. */
#ifndef SKVD_TESTS_ATTN_RIG_H
#define SKVD_TESTS_ATTN_RIG_H

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

struct rig {
    struct cpu c;
    uint32_t next_page; /* pages are dealt out in a scrambled order */
    uint64_t seed;
};

struct rig_shape {
    enum kern_kv_dtype dtype;
    int head_dim, n_kv, g, n_layer, lanes, max_slots, max_rows, threads;
};

static inline float rig_uniform(uint64_t *seed) /* [-1, 1) */
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*seed >> 32) * 0x1p-31f;
}

static inline float rig_normal(uint64_t *seed) /* about N(0, 1): the sum of 12 uniforms */
{
    float f = 0;
    for (int i = 0; i < 12; i++)
        f += rig_uniform(seed);
    return f * 0.5f;
}

/* Exits on failure: a test that can't have its memory says nothing. */
static inline void rig_init(struct rig *r, const struct kern_isa *isa, const struct rig_shape *s)
{
    struct skv_error err = { 0 };
    struct cpu *c = &r->c;
    int max_pages = (s->max_slots + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS;
    uint32_t n_pages = (uint32_t)(s->lanes * s->n_layer * s->n_kv * max_pages);

    memset(r, 0, sizeof *r);
    r->seed = 1;
    c->g = s->g;
    c->isa = isa;
    c->d.n_layer = s->n_layer;
    c->d.n_head = s->n_kv * s->g;
    c->d.n_kv = s->n_kv;
    c->d.head_dim = s->head_dim;
    c->d.max_context = s->max_slots;
    c->d.attn_scale = 1 / sqrtf((float)s->head_dim);
    c->cfg.n_threads = s->threads;
    c->cfg.kv_dtype = s->dtype;
    c->cfg.max_lanes = s->lanes;
    c->cfg.max_rows = s->max_rows;
    c->cfg.max_pages = max_pages;
    c->workers = workers_new(s->threads, &err);
    c->qkv_width = (c->d.n_head + 2 * c->d.n_kv) * c->d.head_dim;
    c->qkv = calloc((size_t)s->max_rows * c->qkv_width, sizeof *c->qkv);
    c->att = calloc((size_t)s->max_rows * c->d.n_head * c->d.head_dim, sizeof *c->att);
    if (!c->workers || !c->qkv || !c->att || cpu_attn_init(c, &err) || !cpu_kv_init(c, n_pages, &err))
        exit(99);
    for (size_t i = 0; i < n_pages; i++) /* a stride that is prime to n_pages or nearly so: order means nothing */
        c->kv.table[i] = (uint32_t)(i * 7919 % n_pages);
    if (n_pages % 7919 == 0)
        exit(99);
}

static inline void rig_fini(struct rig *r)
{
    cpu_attn_fini(&r->c);
    cpu_kv_fini(&r->c);
    workers_free(r->c.workers);
    free(r->c.qkv);
    free(r->c.att);
}

/* q, k, v of a row as a function of (lane, position) alone. */
static inline void rig_row(struct rig *r, int row, int lane, int pos)
{
    uint64_t seed = (uint64_t)lane * 1000003 + (uint64_t)pos * 7 + 12345;
    float *x = r->c.qkv + (size_t)row * r->c.qkv_width;
    for (int i = 0; i < 8; i++)
        rig_uniform(&seed);
    for (int i = 0; i < r->c.qkv_width; i++)
        x[i] = rig_normal(&seed);
}

static inline void rig_set_len(struct rig *r, int lane, int layer, int len)
{
    for (int h = 0; h < r->c.d.n_kv; h++)
        r->c.kv.len[cpu_kv_index(&r->c, lane, layer, h)] = len;
}

/* Prefill positions [pos0, pos0 + n) of a lane as one pass; rows from score_from (a position) on are scored. */
static inline void rig_prefill(struct rig *r, int lane, int layer, int pos0, int n, int score_from)
{
    struct ops_seg seg = { .lane = lane, .n_row = n, .pos0 = pos0, .slot0 = pos0, .score_from = score_from - pos0 };
    struct ops_pass pass = { .n_row = n, .n_seg = 1, .seg = &seg };
    for (int i = 0; i < n; i++)
        rig_row(r, i, lane, pos0 + i);
    rig_set_len(r, lane, layer, pos0 + n);
    cpu_kv_store(&r->c, layer, &pass, NULL);
    cpu_attn_prefill(&r->c, layer, &pass);
}

#endif
