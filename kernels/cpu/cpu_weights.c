/* cpu_weights.c - load: repack every matrix once into panels, and products with a matrix. */
#include "kernels/cpu/cpu_weights.h"

#include "kernels/blocks.h"
#include "kernels/pack.h"

#include <stdlib.h>
#include <string.h>

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* --- all matrices ---------------------------------------------------------------------------------------- */

/* The order of a layer's matrices in the list: wq wk wv wo gate up down. */
enum { UP = 5, LAYER_MATS = 7 };

struct load {
    struct cpu *c;
    struct skv_error *err;
    struct cpu_mat **mat; /* all matrices */
    int n_mat;
    size_t bytes;   /* of the arena */
    size_t floats;  /* in the vectors */
    int chunk;      /* panels an item */
    int *first;     /* [n_mat + 1] first item of each matrix */
};

static int add_mat(struct load *l, struct cpu_mat *m, const struct kern_tensor *t, const char *name, int64_t rows,
                   int64_t cols)
{
    if (!t->data || t->rows != rows || t->cols != cols || !kern_type_known(t->type) ||
        cols % kern_type_block(t->type) != 0)
        return skv_fail(l->err, SKV_BAD_MODEL, "%s: %lld x %lld of type %s, expected %lld x %lld", name,
                        (long long)t->rows, (long long)t->cols, kern_type_name(t->type), (long long)rows,
                        (long long)cols);
    m->src = *t;
    kern_pack_shape(&m->p, t);
    l->mat[l->n_mat++] = m;
    l->bytes += (size_t)m->p.n_panel * m->p.panel_bytes;
    return 0;
}

/* Room in `vectors` for n floats, padded to whole panels. */
static float *add_vector(struct load *l, const struct kern_tensor *t, int64_t n)
{
    if (!t->data)
        return NULL;
    float *to = l->c->w->vectors ? l->c->w->vectors + l->floats : NULL;
    l->floats += round_up((size_t)n, KERN_PANEL);
    if (to)
        kern_dequant(t->type, t->data, to, n);
    return to;
}

/* Called twice: to count, and (vectors allocated) to place. */
static void add_vectors(struct load *l, const struct ops_model_src *src)
{
    const struct ops_dims *d = &src->dims;
    l->floats = 0;
    l->c->w->out_norm = add_vector(l, &src->out_norm, d->d_model);
    for (int i = 0; i < d->n_layer; i++) {
        const struct ops_layer_src *s = &src->layer[i];
        struct cpu_layer *y = &l->c->w->layer[i];
        y->attn_norm = add_vector(l, &s->attn_norm, d->d_model);
        y->ffn_norm = add_vector(l, &s->ffn_norm, d->d_model);
        y->bq = add_vector(l, &s->bq, (int64_t)d->n_head * d->head_dim);
        y->bk = add_vector(l, &s->bk, (int64_t)d->n_kv * d->head_dim);
        y->bv = add_vector(l, &s->bv, (int64_t)d->n_kv * d->head_dim);
        y->q_norm = add_vector(l, &s->q_norm, d->head_dim);
        y->k_norm = add_vector(l, &s->k_norm, d->head_dim);
        y->post_attn_norm = add_vector(l, &s->post_attn_norm, d->d_model);
        y->post_ffn_norm = add_vector(l, &s->post_ffn_norm, d->d_model);
    }
}

static int add_mats(struct load *l, const struct ops_model_src *src)
{
    const struct ops_dims *d = &src->dims;
    int64_t q = (int64_t)d->n_head * d->head_dim, kv = (int64_t)d->n_kv * d->head_dim, m = d->d_model;
    for (int i = 0; i < d->n_layer; i++) {
        const struct ops_layer_src *s = &src->layer[i];
        struct cpu_layer *y = &l->c->w->layer[i];
        if (!s->attn_norm.data || !s->ffn_norm.data)
            return skv_fail(l->err, SKV_BAD_MODEL, "layer %d has no norms", i);
        if (add_mat(l, &y->wq, &s->wq, "attn_q", q, m) < 0 || add_mat(l, &y->wk, &s->wk, "attn_k", kv, m) < 0 ||
            add_mat(l, &y->wv, &s->wv, "attn_v", kv, m) < 0 ||
            add_mat(l, &y->wo, &s->wo, "attn_output", m, q) < 0 ||
            add_mat(l, &y->w_gate, &s->w_gate, "ffn_gate", d->n_ffn, m) < 0 ||
            add_mat(l, &y->w_up, &s->w_up, "ffn_up", d->n_ffn, m) < 0 ||
            add_mat(l, &y->w_down, &s->w_down, "ffn_down", m, d->n_ffn) < 0)
            return -1;
    }
    const struct kern_tensor *e = &src->embed;
    if (!e->data || e->rows != d->n_vocab || e->cols != m || !kern_type_known(e->type) || !src->out_norm.data)
        return skv_fail(l->err, SKV_BAD_MODEL, "the embedding or the last norm is missing or has a wrong shape");
    return add_mat(l, &l->c->w->output, &src->output, "output", d->n_vocab, m);
}

static void pack_item(void *arg, int item, int worker)
{
    const struct load *l = arg;
    int k = 0;
    (void)worker;
    while (item >= l->first[k + 1])
        k++;
    const struct cpu_mat *m = l->mat[k];
    int from = (item - l->first[k]) * l->chunk;
    for (int p = from; p < from + l->chunk && p < m->p.n_panel; p++)
        kern_pack_panel(&m->p, &m->src, p);
}

/* A gated item reads a panel of gate, then the same one of up: let them lie so. */
static void interleave(struct kern_packed *gate, struct kern_packed *up)
{
    if (gate->panel_bytes != up->panel_bytes || gate->n_panel != up->n_panel)
        return;
    up->data = gate->data + gate->panel_bytes;
    gate->stride = up->stride = 2 * gate->panel_bytes;
}

static int pack_all(struct load *l)
{
    struct cpu_weights *w = l->c->w;
    if (!(w->arena = cpu_map(l->bytes, l->err)))
        return -1;
    w->arena_bytes = l->bytes;
    l->chunk = 8;
    l->first = calloc((size_t)l->n_mat + 1, sizeof *l->first);
    if (!l->first)
        return skv_fail(l->err, SKV_NO_MEMORY, "no memory to load the weights");
    size_t at = 0;
    for (int i = 0; i < l->n_mat; i++) {
        struct kern_packed *p = &l->mat[i]->p;
        p->data = w->arena + at;
        at += (size_t)p->n_panel * p->panel_bytes;
        if (i % LAYER_MATS == UP)
            interleave(&l->mat[i - 1]->p, p);
        l->first[i + 1] = l->first[i] + (p->n_panel + l->chunk - 1) / l->chunk;
    }
    workers_run(l->c->workers, l->first[l->n_mat], pack_item, l);
    for (int i = 0; i < l->n_mat; i++)
        l->mat[i]->src.data = NULL; /* not read again */
    return 0;
}

int cpu_weights_load(struct cpu *c, const struct ops_model_src *src, struct skv_error *err)
{
    struct load l = { .c = c, .err = err };
    struct cpu_weights *w = c->w = calloc(1, sizeof *w);
    l.mat = calloc((size_t)c->d.n_layer * LAYER_MATS + 1, sizeof *l.mat);
    if (w)
        w->layer = calloc((size_t)c->d.n_layer, sizeof *w->layer);
    int rc = -1;
    if (!w || !w->layer || !l.mat) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the layer table");
        goto out;
    }
    if (add_mats(&l, src) < 0)
        goto out;
    w->embed = src->embed;
    add_vectors(&l, src);
    w->vector_bytes = l.floats * sizeof(float);
    if (!(w->vectors = cpu_map(w->vector_bytes, err)))
        goto out;
    add_vectors(&l, src);
    rc = c->cfg.compute_f32 ? 0 : pack_all(&l);
out:
    free(l.first);
    free(l.mat);
    return rc;
}

void cpu_weights_free(struct cpu *c)
{
    struct cpu_weights *w = c->w;
    if (!w)
        return;
    cpu_unmap(w->arena, w->arena_bytes);
    cpu_unmap(w->vectors, w->vector_bytes);
    free(w->layer);
    free(w);
    c->w = NULL;
}

size_t cpu_weights_bytes(const struct cpu *c)
{
    return c->w->arena_bytes + c->w->vector_bytes;
}

/* --- products ---------------------------------------------------------------------------------------------- */

#define F32_ROWS 4 /* weight rows dequantised at a time */

unsigned cpu_mat_need(const struct cpu *c, const struct cpu_mat *m)
{
    return c->cfg.compute_f32 ? KERN_NEED_F32 : c->isa->lin.need[m->p.form];
}

size_t cpu_mat_scratch(const struct cpu *c, const struct cpu_mat *m)
{
    if (c->cfg.compute_f32)
        return (size_t)m->p.n_group * KERN_GROUP * F32_ROWS * sizeof(float);
    return kern_mul_scratch(&m->p);
}

/* The exact product: rows of the mapped tensor as f32, against f32 inputs. */
static void mul_mapped(const struct cpu *c, const struct cpu_mat *m, int panel, int g0, const struct kern_input *a,
                       int row0, int n_row, float *acc, float *rows)
{
    int n = a->n_group * KERN_GROUP, ld = m->p.n_group * KERN_GROUP;
    size_t row_bytes = kern_row_bytes(m->src.type, m->src.cols);
    memset(rows, 0, (size_t)ld * F32_ROWS * sizeof *rows);
    for (int j = 0; j < KERN_PANEL; j += F32_ROWS) {
        for (int k = 0; k < F32_ROWS; k++) {
            int64_t row = (int64_t)panel * KERN_PANEL + j + k;
            if (row < m->p.rows)
                kern_dequant(m->src.type, (const unsigned char *)m->src.data + (size_t)row * row_bytes,
                             rows + (size_t)k * ld, m->src.cols);
        }
        c->isa->lin.dot_f32(rows + (size_t)g0 * KERN_GROUP, ld, F32_ROWS, a->f32 + (size_t)row0 * n, n, n_row, n,
                            acc + j, KERN_PANEL);
    }
}

void cpu_mat_mul(const struct cpu *c, const struct cpu_mat *m, int panel, int g0, const struct kern_input *a,
                 int row0, int n_row, float *acc, void *scratch)
{
    if (c->cfg.compute_f32)
        mul_mapped(c, m, panel, g0, a, row0, n_row, acc, scratch);
    else
        c->isa->lin.mul(&m->p, panel, g0, a, row0, n_row, acc, scratch);
}
