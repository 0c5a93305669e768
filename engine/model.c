/* model.c - see model.h. Key and tensor names: the GGUF specification. */
#include "engine/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/blocks.h"

struct arch {
    const char *name;
    enum kern_rope rope;
    bool qkv_bias, head_norm;
};

static const struct arch arch_table[] = {
    { "llama", KERN_ROPE_INTERLEAVED, false, false },
    { "qwen2", KERN_ROPE_HALF, true, false },
    { "qwen3", KERN_ROPE_HALF, false, true },
};

#define BAD(...) skv_fail(err, SKV_BAD_MODEL, __VA_ARGS__)

static const struct arch *find_arch(const struct gguf *g, char *name, size_t size, struct skv_error *err)
{
    struct gguf_str s;
    int r = gguf_get_str(g, "general.architecture", &s, err);

    if (r <= 0) {
        if (r == 0)
            BAD("the model has no general.architecture");
        return NULL;
    }
    snprintf(name, size, "%.*s", (int)(s.len < size ? s.len : size - 1), s.s);
    for (size_t i = 0; i < sizeof arch_table / sizeof *arch_table; i++)
        if (strcmp(arch_table[i].name, name) == 0)
            return &arch_table[i];
    BAD("architecture \"%s\" is not supported; skvd runs llama, qwen2 and qwen3", name);
    return NULL;
}

struct reader {
    const struct gguf *g;
    const char *arch;
    struct skv_error *err;
};

/* An integer hyperparameter in [lo, hi]; fallback < 0: it must be there. */
static int get_int(const struct reader *r, const char *suffix, int lo, int hi, int fallback, int *out)
{
    char key[96];
    uint32_t v;
    struct skv_error *err = r->err;

    snprintf(key, sizeof key, "%s.%s", r->arch, suffix);
    int found = gguf_get_u32(r->g, key, &v, err);
    if (found < 0)
        return -1;
    if (found == 0) {
        if (fallback < 0)
            return BAD("the model lacks %s", key);
        *out = fallback;
        return 0;
    }
    if (v < (uint32_t)lo || v > (uint32_t)hi)
        return BAD("%s is %u; it must be from %d to %d", key, v, lo, hi);
    *out = (int)v;
    return 0;
}

static int get_float(const struct reader *r, const char *suffix, float lo, float hi, float fallback, float *out)
{
    char key[96];
    struct skv_error *err = r->err;

    snprintf(key, sizeof key, "%s.%s", r->arch, suffix);
    int found = gguf_get_f32(r->g, key, out, err);
    if (found < 0)
        return -1;
    if (found == 0)
        *out = fallback;
    if (!(*out >= lo && *out <= hi))
        return BAD("%s is %g; it must be from %g to %g", key, (double)*out, (double)lo, (double)hi);
    return 0;
}

static int read_dims(const struct reader *r, const struct arch *arch, struct ops_dims *d)
{
    struct skv_error *err = r->err;
    int v_dim;

    if (get_int(r, "block_count", 1, 1024, -1, &d->n_layer) < 0 ||
        get_int(r, "embedding_length", 32, 1 << 17, -1, &d->d_model) < 0 ||
        get_int(r, "feed_forward_length", 32, 1 << 20, -1, &d->n_ffn) < 0 ||
        get_int(r, "attention.head_count", 1, 1024, -1, &d->n_head) < 0 ||
        get_int(r, "attention.head_count_kv", 1, 1024, d->n_head, &d->n_kv) < 0 ||
        get_int(r, "context_length", 1, 1 << 24, -1, &d->max_context) < 0)
        return -1;
    if (d->n_head % d->n_kv != 0)
        return BAD("%d query heads cannot share %d KV heads evenly", d->n_head, d->n_kv);
    int even = d->d_model % d->n_head == 0 ? d->d_model / d->n_head : -1;
    if (get_int(r, "attention.key_length", 2, 1024, even, &d->head_dim) < 0 ||
        get_int(r, "attention.value_length", 2, 1024, d->head_dim, &v_dim) < 0 ||
        get_int(r, "rope.dimension_count", 2, 1024, d->head_dim, &d->rot_dim) < 0)
        return -1;
    if (v_dim != d->head_dim)
        return BAD("keys of %d and values of %d are not supported: they must be the same size", d->head_dim, v_dim);
    if (d->head_dim % 2 != 0 || d->rot_dim % 2 != 0 || d->rot_dim > d->head_dim)
        return BAD("a head of %d with %d rotated dimensions cannot be: both even, rotated at most the head", d->head_dim,
                   d->rot_dim);
    if (get_float(r, "attention.layer_norm_rms_epsilon", 0, 1, 1e-5f, &d->norm_eps) < 0 ||
        get_float(r, "rope.freq_base", 1, 1e12f, 10000, &d->rope_base) < 0)
        return -1;
    d->attn_scale = 1 / sqrtf((float)d->head_dim);
    d->rope = arch->rope;
    d->act = KERN_ACT_SILU;
    d->embed_scale = 1;
    return 0;
}

/* rope.scaling.type other than none (Llama 3.1 brings its scaling as the tensor rope_freqs instead) is refused: results would
 * be silently wrong. */
static int check_rope_scaling(const struct reader *r)
{
    char key[96];
    struct gguf_str s;
    struct skv_error *err = r->err;

    snprintf(key, sizeof key, "%s.rope.scaling.type", r->arch);
    int found = gguf_get_str(r->g, key, &s, err);
    if (found < 0)
        return -1;
    if (found > 0 && !(s.len == 4 && memcmp(s.s, "none", 4) == 0))
        return BAD("%s \"%.*s\" is not supported; Llama 3.1 scaling (rope_freqs.weight) is", key, (int)s.len, s.s);
    return 0;
}

static int tensor(const struct gguf *g, const char *name, int64_t rows, int64_t cols, bool needed, bool f32_only,
                  struct kern_tensor *t, struct skv_error *err)
{
    if (gguf_tensor(g, name, t) == 0) {
        memset(t, 0, sizeof *t);
        return needed ? BAD("tensor %s is missing", name) : 0;
    }
    if (t->rows != rows || t->cols != cols)
        return BAD("tensor %s is %lld x %lld; the hyperparameters say %lld x %lld", name, (long long)t->rows,
                   (long long)t->cols, (long long)rows, (long long)cols);
    if (f32_only && t->type != KERN_F32)
        return BAD("tensor %s is %s; norms and biases must be F32", name, kern_type_name(t->type));
    if (!f32_only && cols % kern_type_block(t->type) != 0)
        return BAD("tensor %s has rows of %lld, no multiple of a %s block", name, (long long)cols, kern_type_name(t->type));
    return 0;
}

static int read_layer(const struct gguf *g, const struct ops_dims *d, const struct arch *arch, int l, struct ops_layer_src *s,
                      struct skv_error *err)
{
    int64_t q = (int64_t)d->n_head * d->head_dim, kv = (int64_t)d->n_kv * d->head_dim;
    const struct {
        const char *name;
        struct kern_tensor *t;
        int64_t rows, cols;
        bool needed, f32;
    } want[] = {
        { "attn_norm.weight", &s->attn_norm, 1, d->d_model, true, true },
        { "attn_q.weight", &s->wq, q, d->d_model, true, false },
        { "attn_k.weight", &s->wk, kv, d->d_model, true, false },
        { "attn_v.weight", &s->wv, kv, d->d_model, true, false },
        { "attn_output.weight", &s->wo, d->d_model, q, true, false },
        { "ffn_norm.weight", &s->ffn_norm, 1, d->d_model, true, true },
        { "ffn_gate.weight", &s->w_gate, d->n_ffn, d->d_model, true, false },
        { "ffn_up.weight", &s->w_up, d->n_ffn, d->d_model, true, false },
        { "ffn_down.weight", &s->w_down, d->d_model, d->n_ffn, true, false },
        { "attn_q.bias", &s->bq, 1, q, arch->qkv_bias, true },
        { "attn_k.bias", &s->bk, 1, kv, arch->qkv_bias, true },
        { "attn_v.bias", &s->bv, 1, kv, arch->qkv_bias, true },
        { "attn_q_norm.weight", &s->q_norm, 1, d->head_dim, arch->head_norm, true },
        { "attn_k_norm.weight", &s->k_norm, 1, d->head_dim, arch->head_norm, true },
    };

    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%d.%s", l, want[i].name);
        if (tensor(g, name, want[i].rows, want[i].cols, want[i].needed, want[i].f32, want[i].t, err) < 0)
            return -1;
    }
    return 0;
}

static int read_tensors(struct model *m, const struct arch *arch, struct skv_error *err)
{
    struct ops_dims *d = &m->src.dims;
    struct kern_tensor freqs;
    char next[64];

    d->n_vocab = tok_vocab(m->tok);
    if (tensor(m->gguf, "token_embd.weight", d->n_vocab, d->d_model, true, false, &m->src.embed, err) < 0 ||
        tensor(m->gguf, "output_norm.weight", 1, d->d_model, true, true, &m->src.out_norm, err) < 0 ||
        tensor(m->gguf, "output.weight", d->n_vocab, d->d_model, false, false, &m->src.output, err) < 0 ||
        tensor(m->gguf, "rope_freqs.weight", 1, d->rot_dim / 2, false, true, &freqs, err) < 0)
        return -1;
    if (m->src.output.data == NULL)
        m->src.output = m->src.embed;
    d->rope_freqs = freqs.data;
    m->layer = calloc((size_t)d->n_layer, sizeof *m->layer);
    if (m->layer == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %d layers", d->n_layer);
    for (int l = 0; l < d->n_layer; l++)
        if (read_layer(m->gguf, d, arch, l, &m->layer[l], err) < 0)
            return -1;
    m->src.layer = m->layer;
    snprintf(next, sizeof next, "blk.%d.attn_norm.weight", d->n_layer);
    if (gguf_tensor(m->gguf, next, &freqs) != 0)
        return BAD("the file has more layers than its block_count of %d says", d->n_layer);
    return 0;
}

static void read_name(struct model *m, const char *path)
{
    struct gguf_str s;
    const char *base = strrchr(path, '/');

    if (gguf_get_str(m->gguf, "general.name", &s, NULL) == 1 && s.len > 0)
        snprintf(m->name, sizeof m->name, "%.*s", (int)(s.len < 120 ? s.len : 120), s.s);
    else
        snprintf(m->name, sizeof m->name, "%.120s", base != NULL ? base + 1 : path);
    m->name[utf8_whole(m->name, strlen(m->name))] = '\0';
}

static int limit_context(struct ops_dims *d, int context, struct skv_error *err)
{
    if (context == 0)
        return 0;
    if (context < KERN_PAGE_SLOTS || context > d->max_context)
        return skv_fail(err, SKV_BAD_CONFIG, "context %d cannot be: this model takes from %d to %d positions", context,
                        KERN_PAGE_SLOTS, d->max_context);
    d->max_context = context;
    return 0;
}

int model_open(struct model *m, const char *path, const char *chat_template, int context, struct skv_error *err)
{
    const struct arch *arch;

    memset(m, 0, sizeof *m);
    m->gguf = gguf_open(path, err);
    if (m->gguf == NULL)
        return -1;
    arch = find_arch(m->gguf, m->arch, sizeof m->arch, err);
    struct reader r = { m->gguf, m->arch, err };
    if (arch == NULL || read_dims(&r, arch, &m->src.dims) < 0 || check_rope_scaling(&r) < 0)
        goto fail;
    m->tok = tok_new(m->gguf, err);
    if (m->tok == NULL || read_tensors(m, arch, err) < 0 || limit_context(&m->src.dims, context, err) < 0)
        goto fail;
    read_name(m, path);
    m->chat = chat_new(m->gguf, chat_template, &m->chat_error);
    if (m->chat == NULL && chat_template != NULL) {
        *err = m->chat_error;
        goto fail;
    }
    return 0;
fail:
    model_close(m);
    return -1;
}

void model_close(struct model *m)
{
    chat_free(m->chat);
    tok_free(m->tok);
    gguf_close(m->gguf);
    free(m->layer);
    free(m->bytes);
    memset(m, 0, sizeof *m);
}
