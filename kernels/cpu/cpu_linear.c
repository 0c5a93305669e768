/* cpu_linear.c - the linear half of a pass: embeddings, norms, Q K V, output projection, gated MLP, logits.
 *
 * A product is cut into items of a few panels by a block of rows; a thread computes an item's accumulators in its
 * own scratch and an epilogue puts them where they belong (stored with a bias, added to the residual, or gated and
 * quantised for the next product). Every value is computed from its row alone in a fixed order, so neither the cut
 * nor the number of threads shows in the results.
 */
#include "kernels/cpu/cpu_weights.h"

#include "kernels/blocks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROW_BLOCK    128   /* rows of an item at most: 32 KiB of accumulators for the gated product */
#define ITEM_BYTES   12288 /* weights of an item at least: what one core reads in half a microsecond */
#define ROWS_INLINE  2     /* row work of so few rows isn't worth waking anyone for */
#define ROWS_ITEM    8     /* rows of an item of row work at most */
#define ROPE_AHEAD   256   /* positions added to the table at a time */
#define VALUE_ROWS   64    /* slots that cpu_value_norm takes at a time */
#define GATED_PANELS 2     /* panels of a gated item: one 32-input group of the next product */

struct cpu_linear_work {
    struct kern_input x;   /* [max_rows] normed hidden states */
    struct kern_input att; /* [max_rows] attention's output */
    struct kern_input ffn; /* [max_rows] gated MLP's inside */
    struct kern_input val; /* [threads * VALUE_ROWS] value rows of cpu_value_norm */
    int32_t *pos;          /* [max_rows] position of each row of the pass */
    float *tmp;            /* [max_rows][d_model] before a post-norm; NULL when the model has none */
    float *rope;           /* [max_context][2 * rot_dim], see kern_linear_fns.rope */
    size_t rope_bytes;
    int rope_n;            /* positions that are filled in */
    float *inv_freq;       /* [rot_dim / 2] */
    unsigned char *scratch; /* [threads][scratch_each] */
    size_t scratch_each, mul_bytes, scratch_bytes;
    unsigned char *inputs; /* the four inputs' arrays */
    size_t input_bytes, tmp_bytes;
};

/* --- set up --------------------------------------------------------------------------------------------- */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Lay out an input's arrays at *at (or only count, base NULL). */
static void input_place(struct kern_input *a, unsigned need, int rows, int cols, unsigned char *base, size_t *at)
{
    a->n_group = (cols + KERN_GROUP - 1) / KERN_GROUP;
    size_t groups = (size_t)rows * a->n_group, n = groups * KERN_GROUP;
    const struct {
        unsigned need;
        void **to;
        size_t bytes;
    } array[] = {
        { KERN_NEED_Q8, (void **)&a->q8, n },        { KERN_NEED_Q8, (void **)&a->scale, groups * 16 },
        { KERN_NEED_Q16, (void **)&a->q16, n * 2 },  { KERN_NEED_F32, (void **)&a->f32, n * 4 },
        { KERN_NEED_BF16, (void **)&a->bf16, n * 2 },
    };
    for (size_t i = 0; i < sizeof array / sizeof array[0]; i++)
        if (need & array[i].need) {
            if (base)
                *array[i].to = base + *at;
            *at += round_up(array[i].bytes, 64);
        }
}

struct needs {
    unsigned x, att, ffn;
    size_t scratch; /* largest of any product */
    bool post;      /* some layer has a norm after its product */
};

static void needs_mat(const struct cpu *c, const struct cpu_mat *m, unsigned *need, size_t *scratch)
{
    size_t s = cpu_mat_scratch(c, m);
    *need |= cpu_mat_need(c, m);
    if (s > *scratch)
        *scratch = s;
}

static void needs_get(const struct cpu *c, struct needs *n)
{
    *n = (struct needs){ 0 };
    for (int i = 0; i < c->d.n_layer; i++) {
        const struct cpu_layer *y = &c->w->layer[i];
        needs_mat(c, &y->wq, &n->x, &n->scratch);
        needs_mat(c, &y->wk, &n->x, &n->scratch);
        needs_mat(c, &y->wv, &n->x, &n->scratch);
        needs_mat(c, &y->w_gate, &n->x, &n->scratch);
        needs_mat(c, &y->w_up, &n->x, &n->scratch);
        needs_mat(c, &y->wo, &n->att, &n->scratch);
        needs_mat(c, &y->w_down, &n->ffn, &n->scratch);
        n->post |= y->post_attn_norm || y->post_ffn_norm;
    }
    needs_mat(c, &c->w->output, &n->x, &n->scratch);
}

static void place_inputs(const struct cpu *c, struct cpu_linear_work *l, const struct needs *n, size_t *at)
{
    int rows = c->cfg.max_rows, q = c->d.n_head * c->d.head_dim;
    int v = c->d.head_dim % KERN_GROUP == 0 ? c->d.head_dim : q;
    input_place(&l->x, n->x, rows, c->d.d_model, l->inputs, at);
    input_place(&l->att, n->att, rows, q, l->inputs, at);
    input_place(&l->ffn, n->ffn, rows, c->d.n_ffn, l->inputs, at);
    input_place(&l->val, n->att, workers_count(c->workers) * VALUE_ROWS, v, l->inputs, at);
}

/* Frequencies as transformers computes them: in f32, divided by the model's factors. */
static void rope_init(const struct cpu *c, struct cpu_linear_work *l)
{
    for (int i = 0; i < c->d.rot_dim / 2; i++) {
        double f = pow((double)c->d.rope_base, -2.0 * i / c->d.rot_dim);
        l->inv_freq[i] = (float)f / (c->d.rope_freqs ? c->d.rope_freqs[i] : 1.0f);
    }
}

int cpu_linear_init(struct cpu *c, struct skv_error *err)
{
    struct cpu_linear_work *l = c->lw = calloc(1, sizeof *l);
    if (!l)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the CPU backend");
    struct needs n;
    needs_get(c, &n);
    size_t rows = (size_t)c->cfg.max_rows;
    place_inputs(c, l, &n, &l->input_bytes);
    l->tmp_bytes = n.post ? rows * c->d.d_model * sizeof(float) : 0;
    l->rope_bytes = (size_t)c->d.max_context * 2 * c->d.rot_dim * sizeof(float);
    l->mul_bytes = round_up(n.scratch, 64);
    size_t rows_bytes = 2 * round_up((size_t)c->d.d_model, 32) * sizeof(float);
    size_t tiles = (size_t)2 * GATED_PANELS * ROW_BLOCK * KERN_PANEL * sizeof(float);
    /* 4 KiB + 64 apart so that the threads' tiles don't fall on the same cache sets */
    l->scratch_each = round_up(l->mul_bytes + (tiles > rows_bytes ? tiles : rows_bytes), 4096) + 4160;
    l->scratch_each = round_up(l->scratch_each, 64);
    l->scratch_bytes = l->scratch_each * (size_t)workers_count(c->workers);
    l->pos = calloc(rows, sizeof *l->pos);
    l->inv_freq = calloc((size_t)c->d.rot_dim / 2 + 1, sizeof *l->inv_freq);
    if (!l->pos || !l->inv_freq)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the CPU backend");
    if (!(l->inputs = cpu_map(l->input_bytes, err)) || !(l->scratch = cpu_map(l->scratch_bytes, err)) ||
        !(l->rope = cpu_map(l->rope_bytes, err)) || (n.post && !(l->tmp = cpu_map(l->tmp_bytes, err))) ||
        !(c->qkv = cpu_map(rows * c->qkv_width * sizeof(float), err)) ||
        !(c->att = cpu_map(rows * c->d.n_head * c->d.head_dim * sizeof(float), err)))
        return -1;
    size_t at = 0;
    place_inputs(c, l, &n, &at);
    rope_init(c, l);
    return 0;
}

void cpu_linear_fini(struct cpu *c)
{
    struct cpu_linear_work *l = c->lw;
    if (!l)
        return;
    size_t rows = (size_t)c->cfg.max_rows;
    cpu_unmap(l->inputs, l->input_bytes);
    cpu_unmap(l->scratch, l->scratch_bytes);
    cpu_unmap(l->rope, l->rope_bytes);
    cpu_unmap(l->tmp, l->tmp_bytes);
    cpu_unmap(c->qkv, rows * c->qkv_width * sizeof(float));
    cpu_unmap(c->att, rows * c->d.n_head * c->d.head_dim * sizeof(float));
    free(l->pos);
    free(l->inv_freq);
    free(l);
    c->lw = NULL;
    c->qkv = c->att = NULL;
}

size_t cpu_linear_bytes(const struct cpu *c)
{
    const struct cpu_linear_work *l = c->lw;
    size_t rows = (size_t)c->cfg.max_rows;
    return l->input_bytes + l->scratch_bytes + l->tmp_bytes + l->rope_bytes +
           rows * (c->qkv_width + c->d.n_head * c->d.head_dim) * sizeof(float);
}

static unsigned char *scratch_of(const struct cpu *c, int worker)
{
    return c->lw->scratch + (size_t)worker * c->lw->scratch_each;
}

static float *tiles_of(const struct cpu *c, int worker)
{
    return (float *)(scratch_of(c, worker) + c->lw->mul_bytes);
}

/* --- work on rows ------------------------------------------------------------------------------------------ */

struct row_job {
    struct cpu *c;
    void (*fn)(const struct row_job *j, int row, int worker);
    int n_row, per_item;
    int layer;
    const float *x;         /* [n_row][d_model] */
    float *out;             /* [n_row][d_model] */
    const float *norm;      /* [d_model] */
    struct kern_input *in;
    const struct ops_pass *pass;
    const int32_t *pick;    /* rows of x, or NULL: all in order */
};

static void row_item(void *arg, int item, int worker)
{
    const struct row_job *j = arg;
    int end = (item + 1) * j->per_item;
    for (int r = item * j->per_item; r < end && r < j->n_row; r++)
        j->fn(j, r, worker);
}

static void rows_run(struct row_job *j)
{
    j->per_item = j->n_row <= ROWS_INLINE ? j->n_row : cpu_rows_item(j->c, j->n_row, ROWS_ITEM);
    if (j->n_row > 0)
        workers_run_shares(j->c->workers, (j->n_row + j->per_item - 1) / j->per_item, row_item, j);
}

static void row_norm_quant(const struct row_job *j, int row, int worker)
{
    const struct cpu *c = j->c;
    float *y = tiles_of(c, worker);
    int n = c->d.d_model;
    c->isa->lin.rmsnorm(j->x + (size_t)(j->pick ? j->pick[row] : row) * n, j->norm, c->d.norm_eps, n, y);
    c->isa->lin.act_set(j->in, row, y, n);
}

static void row_quant_att(const struct row_job *j, int row, int worker)
{
    const struct cpu *c = j->c;
    int n = c->d.n_head * c->d.head_dim;
    (void)worker;
    c->isa->lin.act_set(j->in, row, c->att + (size_t)row * n, n);
}

static void row_post_norm(const struct row_job *j, int row, int worker)
{
    const struct cpu *c = j->c;
    int n = c->d.d_model;
    const float *y = j->x + (size_t)row * n;
    float *normed = tiles_of(c, worker), *out = j->out + (size_t)row * n;
    c->isa->lin.rmsnorm(y, j->norm, c->d.norm_eps, n, normed);
    for (int i = 0; i < n; i++)
        out[i] += normed[i];
}

/* Per-head norms and RoPE on the row's Q and K heads. */
static void row_heads(const struct row_job *j, int row, int worker)
{
    const struct cpu *c = j->c;
    const struct cpu_layer *y = &c->w->layer[j->layer];
    const float *table = c->lw->rope + (size_t)c->lw->pos[row] * 2 * c->d.rot_dim;
    float *head = c->qkv + (size_t)row * c->qkv_width;
    (void)worker;
    for (int h = 0; h < c->d.n_head + c->d.n_kv; h++, head += c->d.head_dim) {
        const float *norm = h < c->d.n_head ? y->q_norm : y->k_norm;
        if (norm)
            c->isa->lin.rmsnorm(head, norm, c->d.norm_eps, c->d.head_dim, head);
        c->isa->lin.rope(c->d.rope, table, c->d.rot_dim, head);
    }
}

static void row_embed(const struct row_job *j, int row, int worker)
{
    const struct cpu *c = j->c;
    const struct kern_tensor *e = &c->w->embed;
    float *x = j->out + (size_t)row * c->d.d_model;
    (void)worker;
    kern_dequant(e->type, (const unsigned char *)e->data + (size_t)j->pass->token[row] * kern_row_bytes(e->type, e->cols),
                 x, e->cols);
    if (c->d.embed_scale != 1.0f)
        for (int i = 0; i < c->d.d_model; i++)
            x[i] *= c->d.embed_scale;
}

/* --- products ------------------------------------------------------------------------------------------------ */

enum epilogue { EP_STORE, EP_ADD, EP_GATED };

struct mul_job {
    struct cpu *c;
    enum epilogue ep;
    const struct cpu_mat *mat[3]; /* STORE, ADD: side by side in the output. GATED: gate, up */
    const float *bias[3];
    int n_mat;
    const struct kern_input *in;
    int n_row;
    float *out; /* STORE, ADD: [n_row][ld] */
    size_t ld;
    struct kern_input *next; /* GATED: gets act(gate) * up */
    /* the cut: per block of rows, n_chunk items of `chunk` units */
    int n_unit, chunk, n_chunk, row_block;
};

/* A panel that hangs over the matrix's last row: its real outputs only. */
static void put_part(const struct mul_job *j, const float *acc, const float *bias, int n, int n_row, float *out)
{
    for (int r = 0; r < n_row; r++)
        for (int i = 0; i < n; i++) {
            float v = acc[r * KERN_PANEL + i] + (bias ? bias[i] : 0);
            out[r * j->ld + i] = j->ep == EP_ADD ? out[r * j->ld + i] + v : v;
        }
}

static void unit_plain(const struct mul_job *j, int unit, int row0, int n_row, int worker)
{
    const struct cpu *c = j->c;
    float *acc = tiles_of(c, worker), *out = j->out + (size_t)row0 * j->ld;
    int k = 0;
    while (unit >= j->mat[k]->p.n_panel) {
        unit -= j->mat[k]->p.n_panel;
        out += j->mat[k++]->p.rows;
    }
    cpu_mat_mul(c, j->mat[k], unit, 0, j->in, row0, n_row, acc, scratch_of(c, worker));
    int at = unit * KERN_PANEL;
    int64_t left = j->mat[k]->p.rows - at;
    const float *bias = j->bias[k] ? j->bias[k] + at : NULL;
    if (left < KERN_PANEL)
        put_part(j, acc, bias, (int)left, n_row, out + at);
    else if (j->ep == EP_ADD)
        c->isa->lin.add(acc, n_row, out + at, j->ld);
    else
        c->isa->lin.store(acc, bias, n_row, out + at, j->ld);
}

/* One group of 32 of the MLP's inside: two panels of gate and of up. */
static void unit_gated(const struct mul_job *j, int unit, int row0, int n_row, int worker)
{
    const struct cpu *c = j->c;
    const size_t tile = (size_t)ROW_BLOCK * KERN_PANEL;
    float *gate = tiles_of(c, worker), *up = gate + GATED_PANELS * tile;
    for (int k = 0; k < GATED_PANELS; k++) {
        int panel = unit * GATED_PANELS + k;
        if (panel < j->mat[0]->p.n_panel) {
            cpu_mat_mul(c, j->mat[0], panel, 0, j->in, row0, n_row, gate + k * tile, scratch_of(c, worker));
            cpu_mat_mul(c, j->mat[1], panel, 0, j->in, row0, n_row, up + k * tile, scratch_of(c, worker));
        } else {
            memset(gate + k * tile, 0, (size_t)n_row * KERN_PANEL * sizeof(float));
            memset(up + k * tile, 0, (size_t)n_row * KERN_PANEL * sizeof(float));
        }
    }
    for (int r = 0; r < n_row; r++) {
        float h[KERN_GROUP];
        for (int k = 0; k < GATED_PANELS; k++)
            c->isa->lin.gated(c->d.act, gate + k * tile + r * KERN_PANEL, up + k * tile + r * KERN_PANEL, KERN_PANEL,
                              h + k * KERN_PANEL);
        c->isa->lin.act_set_group(j->next, row0 + r, unit, h);
    }
}

static void mul_item(void *arg, int item, int worker)
{
    const struct mul_job *j = arg;
    int row0 = item / j->n_chunk * j->row_block, k = item % j->n_chunk;
    int n_row = j->n_row - row0 < j->row_block ? j->n_row - row0 : j->row_block;
    for (int u = k * j->chunk; u < (k + 1) * j->chunk && u < j->n_unit; u++) {
        if (j->ep == EP_GATED)
            unit_gated(j, u, row0, n_row, worker);
        else
            unit_plain(j, u, row0, n_row, worker);
    }
}

/* Small items even out who is late. With many threads and few panels the rows are cut as well. */
static void mul_run(struct mul_job *j)
{
    int threads = workers_count(j->c->workers);
    size_t unit_bytes = j->mat[0]->p.panel_bytes;
    j->n_unit = 0;
    if (j->ep == EP_GATED) {
        j->n_unit = j->next->n_group;
        unit_bytes *= 2 * GATED_PANELS;
    } else {
        for (int k = 0; k < j->n_mat; k++)
            j->n_unit += j->mat[k]->p.n_panel;
    }
    int most = j->n_unit / (threads * 4), want = (int)((ITEM_BYTES + unit_bytes - 1) / unit_bytes);
    j->chunk = want < most ? want : most > 0 ? most : 1;
    j->n_chunk = (j->n_unit + j->chunk - 1) / j->chunk;
    int blocks = (threads * 4 + j->n_chunk - 1) / j->n_chunk, least = (j->n_row + ROW_BLOCK - 1) / ROW_BLOCK;
    if (blocks > j->n_row / 32)
        blocks = j->n_row / 32;
    if (blocks < least)
        blocks = least;
    j->row_block = (j->n_row + blocks - 1) / blocks;
    blocks = (j->n_row + j->row_block - 1) / j->row_block;
    workers_run_shares(j->c->workers, j->n_chunk * blocks, mul_item, j);
}

/* --- the operations -------------------------------------------------------------------------------------------- */

void cpu_embed(void *be, const struct ops_pass *pass, float *x)
{
    struct row_job j = { .c = be, .fn = row_embed, .n_row = pass->n_row, .out = x, .pass = pass };
    rows_run(&j);
}

/* Positions of the pass's rows, and the rotary table up to the largest. */
static void rope_prepare(struct cpu *c, const struct ops_pass *pass)
{
    struct cpu_linear_work *l = c->lw;
    int top = 0, rot = c->d.rot_dim;
    for (int s = 0; s < pass->n_seg; s++) {
        const struct ops_seg *g = &pass->seg[s];
        for (int r = 0; r < g->n_row; r++)
            l->pos[g->row0 + r] = ops_seg_pos(g, g->row0 + r);
        if (g->n_row > 0 && ops_seg_pos(g, g->row0 + g->n_row - 1) >= top)
            top = ops_seg_pos(g, g->row0 + g->n_row - 1) + 1;
    }
    if (top <= l->rope_n)
        return;
    top = (top + ROPE_AHEAD - 1) / ROPE_AHEAD * ROPE_AHEAD;
    if (top > c->d.max_context)
        top = c->d.max_context;
    for (int p = l->rope_n; p < top; p++) {
        float *t = l->rope + (size_t)p * 2 * rot;
        for (int i = 0; i < rot / 2; i++) {
            float angle = (float)p * l->inv_freq[i];
            float co = (float)cos((double)angle), si = (float)sin((double)angle);
            if (c->d.rope == KERN_ROPE_INTERLEAVED) {
                t[2 * i] = t[2 * i + 1] = co;
                t[rot + 2 * i] = -si;
                t[rot + 2 * i + 1] = si;
            } else {
                t[i] = co;
                t[rot + i] = si;
            }
        }
    }
    l->rope_n = top;
}

void cpu_attn_in(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot)
{
    struct cpu *c = be;
    const struct cpu_layer *y = &c->w->layer[layer];
    rope_prepare(c, pass);
    struct row_job norm = { .c = c, .fn = row_norm_quant, .n_row = pass->n_row, .x = x, .norm = y->attn_norm,
                            .in = &c->lw->x };
    rows_run(&norm);
    struct mul_job qkv = { .c = c, .ep = EP_STORE, .mat = { &y->wq, &y->wk, &y->wv }, .bias = { y->bq, y->bk, y->bv },
                           .n_mat = 3, .in = &c->lw->x, .n_row = pass->n_row, .out = c->qkv,
                           .ld = (size_t)c->qkv_width };
    mul_run(&qkv);
    struct row_job heads = { .c = c, .fn = row_heads, .n_row = pass->n_row, .layer = layer };
    rows_run(&heads);
    cpu_kv_store(c, layer, pass, slot);
}

/* x += m * in, through the post-norm where there is one. */
static void mul_residual(struct cpu *c, const struct cpu_mat *m, const struct kern_input *in, int n_row,
                         const float *post, float *x)
{
    struct mul_job j = { .c = c, .ep = post ? EP_STORE : EP_ADD, .mat = { m }, .n_mat = 1, .in = in, .n_row = n_row,
                         .out = post ? c->lw->tmp : x, .ld = (size_t)c->d.d_model };
    mul_run(&j);
    if (!post)
        return;
    struct row_job add = { .c = c, .fn = row_post_norm, .n_row = n_row, .x = c->lw->tmp, .out = x, .norm = post };
    rows_run(&add);
}

void cpu_attn_out_mlp(void *be, int layer, const struct ops_pass *pass, float *x)
{
    struct cpu *c = be;
    struct cpu_linear_work *l = c->lw;
    const struct cpu_layer *y = &c->w->layer[layer];
    int n = pass->n_row;
    struct row_job quant = { .c = c, .fn = row_quant_att, .n_row = n, .in = &l->att };
    rows_run(&quant);
    mul_residual(c, &y->wo, &l->att, n, y->post_attn_norm, x);
    struct row_job norm = { .c = c, .fn = row_norm_quant, .n_row = n, .x = x, .norm = y->ffn_norm, .in = &l->x };
    rows_run(&norm);
    struct mul_job gated = { .c = c, .ep = EP_GATED, .mat = { &y->w_gate, &y->w_up }, .n_mat = 2, .in = &l->x,
                             .n_row = n, .next = &l->ffn };
    mul_run(&gated);
    mul_residual(c, &y->w_down, &l->ffn, n, y->post_ffn_norm, x);
}

void cpu_logits(void *be, const float *x, const int32_t *row, int n, float *logits)
{
    struct cpu *c = be;
    for (int at = 0; at < n; at += c->cfg.max_rows) {
        int k = n - at < c->cfg.max_rows ? n - at : c->cfg.max_rows;
        struct row_job norm = { .c = c, .fn = row_norm_quant, .n_row = k, .x = x, .norm = c->w->out_norm,
                                .in = &c->lw->x, .pick = row + at };
        rows_run(&norm);
        struct mul_job out = { .c = c, .ep = EP_STORE, .mat = { &c->w->output }, .n_mat = 1, .in = &c->lw->x,
                               .n_row = k, .out = logits + (size_t)at * c->d.n_vocab, .ld = (size_t)c->d.n_vocab };
        mul_run(&out);
    }
}

/* --- value norms ------------------------------------------------------------------------------------------------ */

/* Rows of the worker's own part of `val` = n_row value rows as the input of query head h: the head's groups of Wo's
 * inputs when heads are whole groups, else the full width with zeros elsewhere. Returns the first group. */
static int value_input(struct cpu *c, int h, const float *v, int row0, int n_row)
{
    struct kern_input *in = &c->lw->val;
    int hd = c->d.head_dim;
    if (hd % KERN_GROUP == 0) {
        for (int r = 0; r < n_row && h % c->g == 0; r++) /* the same for all heads of the group */
            c->isa->lin.act_set(in, row0 + r, v + (size_t)r * hd, hd);
        return h * hd / KERN_GROUP;
    }
    for (int r = 0; r < n_row; r++)
        for (int g = 0; g < in->n_group; g++) {
            float x[KERN_GROUP] = { 0 };
            for (int i = 0; i < KERN_GROUP; i++) {
                int d = g * KERN_GROUP + i - h * hd;
                if (d >= 0 && d < hd)
                    x[i] = v[(size_t)r * hd + d];
            }
            c->isa->lin.act_set_group(in, row0 + r, g, x);
        }
    return 0;
}

static void value_rows(struct cpu *c, int layer, int kv_head, const float *v, int n_row, float *out, int worker)
{
    const struct cpu_mat *wo = &c->w->layer[layer].wo;
    float *acc = tiles_of(c, worker), *sum = acc + VALUE_ROWS * KERN_PANEL;
    int row0 = worker * VALUE_ROWS;
    memset(sum, 0, (size_t)n_row * KERN_PANEL * sizeof *sum);
    for (int h = kv_head * c->g; h < (kv_head + 1) * c->g; h++) {
        int g0 = value_input(c, h, v, row0, n_row);
        for (int p = 0; p < wo->p.n_panel; p++) {
            cpu_mat_mul(c, wo, p, g0, &c->lw->val, row0, n_row, acc, scratch_of(c, worker));
            for (int i = 0; i < n_row * KERN_PANEL; i++)
                sum[i] += fabsf(acc[i]);
        }
    }
    for (int r = 0; r < n_row; r++) {
        float t = 0;
        for (int i = 0; i < KERN_PANEL; i++)
            t += sum[r * KERN_PANEL + i];
        out[r] = t / (float)c->g;
    }
}

void cpu_value_norm(struct cpu *c, int layer, int kv_head, const float *v, int n, float *out, int worker)
{
    for (int at = 0; at < n; at += VALUE_ROWS) {
        int k = n - at < VALUE_ROWS ? n - at : VALUE_ROWS;
        value_rows(c, layer, kv_head, v + (size_t)at * c->d.head_dim, k, out + at, worker);
    }
}
