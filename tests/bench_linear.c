/* bench_linear.c - the linear half: products of packed weights on one thread, then the backend's operations with all
 * threads on random models of real shapes. */
#include "tests/bench.h"

#include "kernels/ops.h"
#include "tests/linear_rig.h"

/* --- one thread, weights and inputs in cache ------------------------------------------------------------ */

struct mul_bench {
    const struct kern_isa *isa;
    struct kern_packed p;
    struct kern_input in;
    int rows;
    float *acc;
    void *scratch;
};

static void mul_call(void *arg)
{
    struct mul_bench *m = arg;
    for (int i = 0; i < m->p.n_panel; i++)
        m->isa->lin.mul(&m->p, i, 0, &m->in, 0, m->rows, m->acc, m->scratch);
}

static enum bench_limit limit_of(int type)
{
    return type == KERN_BF16 ? BENCH_BF16 : kern_type_block(type) == 1 ? BENCH_F32 : type == KERN_Q8_0 ? BENCH_DOT8 : BENCH_INT8;
}

static void bench_mul(struct bench *b, int type, int rows, int cols)
{
    static const int batch[] = { 1, 2, 4, 8, 20, 64, 256 };
    struct kern_tensor t = lrig_tensor(type, rows, cols, 1);
    struct mul_bench m = { .isa = b->isa, .p = lrig_pack(&t), .in = lrig_input(256, cols) };
    float *x = lrig_floats((size_t)256 * (size_t)cols, 1, 2);
    for (int r = 0; r < 256; r++)
        b->isa->lin.act_set(&m.in, r, x + (size_t)r * (size_t)cols, cols);
    m.acc = lrig_alloc(256 * 64);
    m.scratch = lrig_alloc(kern_mul_scratch(&m.p));
    for (size_t i = 0; i < sizeof batch / sizeof batch[0]; i++) {
        char name[64], shape[64];
        snprintf(name, sizeof name, "mul %s", kern_type_name(type));
        snprintf(shape, sizeof shape, "%d x %d x %d", batch[i], cols, rows);
        m.rows = batch[i];
        bench_run(b, name, shape, 2.0 * rows * cols * batch[i], limit_of(type), false, mul_call, &m);
    }
    free((void *)t.data);
    free(m.p.data);
    free(x);
    free(m.acc);
    free(m.scratch);
    lrig_input_free(&m.in);
}

/* --- row functions ----------------------------------------------------------------------------------------- */

struct rows_bench {
    const struct kern_isa *isa;
    struct kern_input in;
    float *x, *w, *y;
    int n;
};

static void norm_call(void *arg)
{
    struct rows_bench *r = arg;
    r->isa->lin.rmsnorm(r->x, r->w, 1e-5f, r->n, r->y);
    r->isa->lin.act_set(&r->in, 0, r->y, r->n);
}

static void gated_call(void *arg)
{
    struct rows_bench *r = arg;
    r->isa->lin.gated(KERN_ACT_SILU, r->x, r->w, r->n, r->y);
}

static void bench_rows(struct bench *b, int n)
{
    struct rows_bench r = { .isa = b->isa, .in = lrig_input(1, n), .n = n };
    char shape[32];
    r.x = lrig_floats((size_t)n, 4, 1);
    r.w = lrig_floats((size_t)n, 1, 2);
    r.y = lrig_alloc((size_t)n * 4);
    free(r.in.f32);
    free(r.in.bf16);
    r.in.f32 = NULL;
    r.in.bf16 = NULL;
    snprintf(shape, sizeof shape, "%d", n);
    bench_run(b, "rows norm + quantise", shape, 4.0 * n, BENCH_NONE, false, norm_call, &r);
    bench_run(b, "rows silu", shape, 4.0 * n, BENCH_NONE, false, gated_call, &r);
    lrig_input_free(&r.in);
    free(r.x);
    free(r.w);
    free(r.y);
}

/* --- the backend's operations ---------------------------------------------------------------------------------- */

struct model_shape {
    const char *name;
    int layers, width, heads, kv, head_dim, ffn, vocab;
    int type, out_type;
};

/* Enough layers that the weights don't stay in any cache. */
static const struct model_shape models[] = {
    { "135M Q4_1", 30, 576, 9, 3, 64, 1536, 49152, KERN_Q4_1, KERN_Q8_0 },
    { "135M Q8_0", 30, 576, 9, 3, 64, 1536, 49152, KERN_Q8_0, KERN_Q8_0 },
    { "1B Q4_K", 4, 2048, 32, 8, 64, 8192, 128256, KERN_Q4_K, KERN_Q6_K },
    { "1B Q8_0", 4, 2048, 32, 8, 64, 8192, 128256, KERN_Q8_0, KERN_Q8_0 },
    { "1B BF16", 2, 2048, 32, 8, 64, 8192, 128256, KERN_BF16, KERN_BF16 },
};

struct op_bench {
    const struct model_shape *m;
    void *be;
    int rows;
    float *x, *logits;
    int32_t *row, *slot;
    struct ops_seg *seg;
};

static void qkv_call(void *arg)
{
    struct op_bench *o = arg;
    struct ops_pass pass = { .n_row = o->rows, .n_seg = o->rows, .seg = o->seg };
    for (int i = 0; i < o->m->layers; i++)
        ops_cpu.attn_in(o->be, i, &pass, o->x, o->slot);
}

static void mlp_call(void *arg)
{
    struct op_bench *o = arg;
    struct ops_pass pass = { .n_row = o->rows, .n_seg = o->rows, .seg = o->seg };
    for (int i = 0; i < o->m->layers; i++)
        ops_cpu.attn_out_mlp(o->be, i, &pass, o->x);
}

static void logits_call(void *arg)
{
    struct op_bench *o = arg;
    ops_cpu.logits(o->be, o->x, o->row, o->rows, o->logits);
}

static double bytes_of(int type, double weights)
{
    return weights * (double)kern_type_block_bytes(type) / kern_type_block(type);
}

#define BENCH_ROWS 256

static void bench_ops(struct bench *b, const struct model_shape *m, struct op_bench *o)
{
    static const int batch[] = { 1, 4, 16, 32, 256 };
    double kv = (double)m->kv * m->head_dim, q = (double)m->heads * m->head_dim;
    double w_qkv = m->width * (q + 2 * kv) * m->layers;
    double w_mlp = (m->width * q + 3.0 * m->width * m->ffn) * m->layers, w_out = (double)m->width * m->vocab;
    for (size_t i = 0; i < sizeof batch / sizeof batch[0]; i++) {
        char shape[64];
        bool memory = batch[i] == 1;
        o->rows = batch[i];
        snprintf(shape, sizeof shape, "%s, %d rows, %d layers", m->name, o->rows, m->layers);
        bench_run(b, "attn_in", shape, memory ? bytes_of(m->type, w_qkv) : 2 * w_qkv * o->rows,
                  memory ? BENCH_MEMORY : limit_of(m->type), true, qkv_call, o);
        bench_run(b, "attn_out_mlp", shape, memory ? bytes_of(m->type, w_mlp) : 2 * w_mlp * o->rows,
                  memory ? BENCH_MEMORY : limit_of(m->type), true, mlp_call, o);
        snprintf(shape, sizeof shape, "%s, %d rows", m->name, o->rows);
        if (o->rows <= 32)
            bench_run(b, "logits", shape, memory ? bytes_of(m->out_type, w_out) : 2 * w_out * o->rows,
                      memory ? BENCH_MEMORY : limit_of(m->out_type), true, logits_call, o);
    }
}

static void bench_model(struct bench *b, const struct model_shape *m)
{
    int kv = m->kv * m->head_dim, q = m->heads * m->head_dim;
    struct ops_layer_src layer = {
        .attn_norm = lrig_tensor(KERN_F32, 1, m->width, 1), .wq = lrig_tensor(m->type, q, m->width, 2),
        .wk = lrig_tensor(m->type, kv, m->width, 3),        .wv = lrig_tensor(m->type, kv, m->width, 4),
        .wo = lrig_tensor(m->type, m->width, q, 5),         .w_gate = lrig_tensor(m->type, m->ffn, m->width, 6),
        .w_up = lrig_tensor(m->type, m->ffn, m->width, 7),  .w_down = lrig_tensor(m->type, m->width, m->ffn, 8),
    };
    layer.ffn_norm = layer.attn_norm;
    struct kern_tensor out = lrig_tensor(m->out_type, m->vocab, m->width, 9);
    struct ops_layer_src *layers = malloc((size_t)m->layers * sizeof *layers);
    for (int i = 0; i < m->layers; i++)
        layers[i] = layer;
    struct ops_model_src src = {
        .dims = { .n_layer = m->layers, .d_model = m->width, .n_head = m->heads, .n_kv = m->kv,
                  .head_dim = m->head_dim, .n_ffn = m->ffn, .n_vocab = m->vocab, .rot_dim = m->head_dim,
                  .max_context = 4096, .norm_eps = 1e-5f, .attn_scale = 0.125f, .rope_base = 10000.0f,
                  .embed_scale = 1.0f },
        .embed = out, .output = out, .out_norm = layer.attn_norm, .layer = layers,
    };
    struct ops_config cfg = { .n_threads = b->threads, .isa = b->isa->name, .kv_dtype = KERN_KV_BF16,
                              .max_lanes = BENCH_ROWS, .max_rows = BENCH_ROWS, .max_pages = 1 };
    struct skv_error err;
    struct op_bench o = { .m = m };
    if (!(o.be = ops_cpu.open(&cfg, &src, &err))) {
        fprintf(stderr, "bench_linear: %s\n", err.msg);
        exit(1);
    }
    struct ops_kv *pool = ops_cpu.kv_init(o.be, (uint32_t)m->kv * BENCH_ROWS, &err);
    if (!pool)
        exit(1);
    o.x = lrig_alloc((size_t)BENCH_ROWS * (size_t)m->width * 4);
    o.logits = lrig_alloc((size_t)32 * (size_t)m->vocab * 4);
    o.row = lrig_alloc(BENCH_ROWS * sizeof *o.row);
    o.slot = lrig_alloc((size_t)BENCH_ROWS * (size_t)m->kv * sizeof *o.slot);
    o.seg = lrig_alloc(BENCH_ROWS * sizeof *o.seg);
    for (int r = 0; r < BENCH_ROWS; r++) {
        o.row[r] = r;
        o.seg[r] = (struct ops_seg){ .lane = r, .row0 = r, .n_row = 1, .pos0 = r };
        for (int i = 0; i < m->layers * m->kv; i++) /* all layers of a lane share pages: only the writes count */
            pool->table[((size_t)r * (size_t)m->layers * (size_t)m->kv + (size_t)i) * (size_t)pool->max_pages] =
                (uint32_t)(r * m->kv + i % m->kv);
    }
    bench_ops(b, m, &o);
    ops_cpu.close(o.be);
    const struct kern_tensor *all[] = { &layer.attn_norm, &layer.wq, &layer.wk, &layer.wv, &layer.wo,
                                        &layer.w_gate, &layer.w_up, &layer.w_down, &out };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free((void *)all[i]->data);
    free(layers);
    free(o.x);
    free(o.logits);
    free(o.row);
    free(o.slot);
    free(o.seg);
}

void bench_linear(struct bench *b)
{
    static const int types[] = { KERN_Q4_1, KERN_Q4_K, KERN_Q5_1, KERN_Q6_K, KERN_Q8_0, KERN_BF16, KERN_F16, KERN_F32 };
    if (bench_wants(b, "mul"))
        for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
            bench_mul(b, types[i], 64, kern_type_block(types[i]) == 256 ? 512 : 576);
    if (bench_wants(b, "rows")) {
        bench_rows(b, 576);
        bench_rows(b, 2048);
    }
    if (bench_wants(b, "attn_in") || bench_wants(b, "attn_out_mlp") || bench_wants(b, "logits"))
        for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
            bench_model(b, &models[i]);
}
