/* random_model.c - see random_model.h. The file format is the GGUF specification, version 3. */
#include "tests/random_model.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/blocks.h"
#include "tests/random_model_vocab.h"

#define ALIGN 32
#define SQRT12 3.4641016f /* 1 / the deviation of a uniform number in [0, 1) */

void random_model_default(struct random_model *m)
{
    *m = (struct random_model){
        .arch = "llama", .layers = 2, .width = 64, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 128,
        .context = 2048, .vocab = 512, .type = "Q8_0", .tied = true, .tokenizer = "gpt2", .pre = "smollm",
        .rope_base = 10000.0f, .norm_eps = 1e-5f, .seed = 1,
    };
}

int random_model_preset(struct random_model *m, const char *name)
{
    random_model_default(m);
    if (strcmp(name, "tiny") == 0)
        return 0;
    if (strcmp(name, "tiny-gqa") == 0) { /* the default model's head shape; widths that every block type divides */
        m->layers = 4;
        m->width = 256;
        m->heads = 12;
        m->kv_heads = 4;
        m->head_dim = 64;
        m->ffn = 512;
        m->vocab = 1024;
        m->context = 8192;
        m->type = "Q4_1";
        m->embed_type = "Q8_0";
        return 0;
    }
    if (strcmp(name, "llama-3.2-1b") == 0) {
        m->layers = 16;
        m->width = 2048;
        m->heads = 32;
        m->kv_heads = 8;
        m->head_dim = 64;
        m->ffn = 8192;
        m->vocab = 128256;
        m->context = 131072;
        m->type = "Q4_K";
        m->embed_type = "Q6_K";
        m->pre = "llama-bpe";
        m->rope_base = 500000.0f;
        m->rope_freqs = true;
        return 0;
    }
    return -1;
}

/* ---- random blocks ----------------------------------------------------------------------------------- */

struct rng {
    uint64_t s;
};

/* splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t rng_next(struct rng *r)
{
    uint64_t z = r->s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void rng_fill(struct rng *r, unsigned char *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t v = rng_next(r);
        memcpy(p, &v, 8);
    }
    if (n) {
        uint64_t v = rng_next(r);
        memcpy(p, &v, n);
    }
}

/* Uniform with the given deviation, mean 0. */
static float rng_f32(struct rng *r, float dev)
{
    return ((float)(rng_next(r) >> 40) * 0x1p-24f - 0.5f) * SQRT12 * dev;
}

static void put_f16(unsigned char *p, float f)
{
    uint16_t h = kern_f32_to_f16(f);
    memcpy(p, &h, 2);
}

/* A block scale: between 0.7 and 1.3 of d, either sign (so that codes that are not centred have no mean). */
static float rng_scale(struct rng *r, float d, bool either_sign)
{
    uint64_t v = rng_next(r);
    float f = d * (0.7f + 0.6f * ((float)(v >> 40) * 0x1p-24f));
    return either_sign && (v & 1) ? -f : f;
}

/* 12 bytes that hold eight 6-bit scales and eight 6-bit minima, each minimum equal to its scale (>= 32). */
static void put_k_scales(struct rng *r, unsigned char *p)
{
    unsigned char s[8];
    rng_fill(r, s, sizeof s);
    for (int j = 0; j < 8; j++)
        s[j] = 32 | (s[j] & 31);
    for (int j = 0; j < 4; j++) {
        p[j] = (unsigned char)(s[j] | (s[j + 4] >> 4) << 6);
        p[j + 4] = (unsigned char)(s[j] | (s[j + 4] >> 4) << 6);
        p[j + 8] = (unsigned char)((s[j + 4] & 15) | (s[j + 4] & 15) << 4);
    }
}

/* One block of weights with deviation `dev`: codes uniform over their range, the scale to match. */
static void put_block(struct rng *r, int type, unsigned char *p, float dev)
{
    const size_t n = kern_type_block_bytes(type);
    const float d4 = dev * SQRT12 / 16, d5 = dev * SQRT12 / 32;
    float s;
    switch (type) {
    case KERN_Q4_0:
        rng_fill(r, p + 2, n - 2);
        put_f16(p, rng_scale(r, d4, true));
        break;
    case KERN_Q4_1:
        rng_fill(r, p + 4, n - 4);
        put_f16(p, s = rng_scale(r, d4, true));
        put_f16(p + 2, -7.5f * s);
        break;
    case KERN_Q5_0:
        rng_fill(r, p + 2, n - 2);
        put_f16(p, rng_scale(r, d5, true));
        break;
    case KERN_Q5_1:
        rng_fill(r, p + 4, n - 4);
        put_f16(p, s = rng_scale(r, d5, true));
        put_f16(p + 2, -15.5f * s);
        break;
    case KERN_Q8_0:
        rng_fill(r, p + 2, n - 2);
        put_f16(p, rng_scale(r, dev * SQRT12 / 256, true));
        break;
    case KERN_Q4_K:
    case KERN_Q5_K: /* d, dmin, scales[12], codes; a mean scale code is 47.5 */
        rng_fill(r, p + 16, n - 16);
        s = rng_scale(r, (type == KERN_Q4_K ? d4 : d5) / 47.5f, true);
        put_f16(p, s);
        put_f16(p + 2, s * (type == KERN_Q4_K ? 7.5f : 15.5f));
        put_k_scales(r, p + 4);
        break;
    case KERN_Q6_K: /* ql[128], qh[64], int8 scales[16], d */
        rng_fill(r, p, n - 2);
        put_f16(p + n - 2, rng_scale(r, dev * SQRT12 / 64 / 73.9f, false));
        break;
    case KERN_F16:
        put_f16(p, rng_f32(r, dev));
        break;
    case KERN_BF16: {
        uint16_t h = kern_f32_to_bf16(rng_f32(r, dev));
        memcpy(p, &h, 2);
        break;
    }
    default: {
        float f = rng_f32(r, dev);
        memcpy(p, &f, 4);
    }
    }
}

/* ---- tensors ------------------------------------------------------------------------------------------ */

struct tensor {
    char name[64];
    int type;
    int64_t rows, cols; /* rows 0: one dimension */
    float mean, dev;    /* mean: f32 tensors only */
    uint64_t offset, bytes;
};

struct tensors {
    struct tensor *t;
    int n, cap;
    uint64_t bytes;
};

static int type_by_name(const char *name)
{
    static const int all[] = {KERN_F32,  KERN_F16,  KERN_BF16, KERN_Q8_0, KERN_Q4_0, KERN_Q4_1,
                              KERN_Q5_0, KERN_Q5_1, KERN_Q4_K, KERN_Q5_K, KERN_Q6_K};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(kern_type_name(all[i]), name) == 0)
            return all[i];
    return -1;
}

static int add(struct tensors *l, const char *name, int layer, const char *type, int64_t rows, int64_t cols, float mean,
               float dev, struct skv_error *err)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->t = realloc(l->t, (size_t)l->cap * sizeof *l->t);
        if (!l->t)
            abort(); /* a test tool: nothing to save */
    }
    struct tensor *t = &l->t[l->n++];
    *t = (struct tensor){.rows = rows, .cols = cols, .mean = mean, .dev = dev, .offset = l->bytes};
    if (layer >= 0)
        snprintf(t->name, sizeof t->name, "blk.%d.%s", layer, name);
    else
        snprintf(t->name, sizeof t->name, "%s", name);
    t->type = type_by_name(type);
    if (t->type < 0)
        return skv_fail(err, SKV_BAD_CONFIG, "type '%s': F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K or Q6_K", type);
    if (cols % kern_type_block(t->type))
        return skv_fail(err, SKV_BAD_CONFIG, "%s: rows of %lld weights are no multiple of %s's block of %d", t->name,
                        (long long)cols, type, kern_type_block(t->type));
    t->bytes = kern_row_bytes(t->type, cols) * (uint64_t)(rows ? rows : 1);
    l->bytes += (t->bytes + ALIGN - 1) / ALIGN * ALIGN;
    return 0;
}

static int add_vector(struct tensors *l, const char *name, int layer, int64_t n, float mean, struct skv_error *err)
{
    return add(l, name, layer, "F32", 0, n, mean, 0.1f, err);
}

static int add_layer(struct tensors *l, const struct random_model *m, int i, struct skv_error *err)
{
    const int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim, w = m->width, f = m->ffn;
    const float in = 1 / sqrtf((float)w), into = 1 / sqrtf(2.0f * (float)m->layers); /* of the residual stream */
    const char *t = m->type;
    int rc = 0;
    rc |= add_vector(l, "attn_norm.weight", i, w, 1, err);
    rc |= add(l, "attn_q.weight", i, t, q, w, 0, 1.4f * in, err);
    rc |= add(l, "attn_k.weight", i, t, kv, w, 0, 1.4f * in, err);
    rc |= add(l, "attn_v.weight", i, t, kv, w, 0, in, err);
    rc |= add(l, "attn_output.weight", i, t, w, q, 0, into / sqrtf((float)q), err);
    rc |= add_vector(l, "ffn_norm.weight", i, w, 1, err);
    rc |= add(l, "ffn_gate.weight", i, t, f, w, 0, in, err);
    rc |= add(l, "ffn_up.weight", i, t, f, w, 0, in, err);
    rc |= add(l, "ffn_down.weight", i, t, w, f, 0, into / sqrtf((float)f), err);
    if (strcmp(m->arch, "qwen2") == 0) {
        rc |= add_vector(l, "attn_q.bias", i, q, 0, err);
        rc |= add_vector(l, "attn_k.bias", i, kv, 0, err);
        rc |= add_vector(l, "attn_v.bias", i, kv, 0, err);
    }
    if (strcmp(m->arch, "qwen3") == 0) {
        rc |= add_vector(l, "attn_q_norm.weight", i, m->head_dim, 1.4f, err);
        rc |= add_vector(l, "attn_k_norm.weight", i, m->head_dim, 1.4f, err);
    }
    return rc;
}

static int list_tensors(struct tensors *l, const struct random_model *m, int vocab, struct skv_error *err)
{
    const char *et = m->embed_type ? m->embed_type : m->type;
    const float dev = 3 / sqrtf((float)m->width);
    int rc = add(l, "token_embd.weight", -1, et, vocab, m->width, 0, dev, err);
    rc |= add_vector(l, "output_norm.weight", -1, m->width, 1, err);
    if (!m->tied)
        rc |= add(l, "output.weight", -1, et, vocab, m->width, 0, dev, err);
    if (m->rope_freqs)
        rc |= add(l, "rope_freqs.weight", -1, "F32", 0, m->head_dim / 2, 0, 0, err);
    for (int i = 0; i < m->layers; i++)
        rc |= add_layer(l, m, i, err);
    return rc;
}

/* Llama 3.1: short wavelengths stay, long ones are divided by 32, those between go over smoothly. */
static float rope_divisor(const struct random_model *m, int64_t i)
{
    const float factor = 32, low = 1, high = 4, old_context = 8192;
    float wavelen = 6.2831853f * powf(m->rope_base, 2.0f * (float)i / (float)m->head_dim);
    if (wavelen < old_context / high)
        return 1;
    if (wavelen > old_context / low)
        return factor;
    float smooth = (old_context / wavelen - low) / (high - low);
    return 1 / ((1 - smooth) / factor + smooth);
}

static int write_tensor(FILE *f, const struct random_model *m, const struct tensor *t)
{
    static const unsigned char zero[ALIGN];
    struct rng r = {.s = m->seed};
    for (const char *c = t->name; *c; c++) /* a tensor's weights depend on its name, not on its neighbours */
        r.s = (r.s ^ (unsigned char)*c) * 0x100000001b3u;
    const size_t row = kern_row_bytes(t->type, t->cols), bb = kern_type_block_bytes(t->type);
    unsigned char *buf = malloc(row);
    int rc = buf ? 0 : -1;
    for (int64_t i = 0; rc == 0 && i < (t->rows ? t->rows : 1); i++) {
        for (size_t at = 0; at < row; at += bb)
            put_block(&r, t->type, buf + at, t->dev);
        if (t->rows == 0) {
            float *v = (float *)(void *)buf;
            for (int64_t j = 0; j < t->cols; j++)
                v[j] = strcmp(t->name, "rope_freqs.weight") == 0 ? rope_divisor(m, j) : v[j] + t->mean;
        }
        rc = fwrite(buf, row, 1, f) == 1 ? 0 : -1;
    }
    size_t pad = (size_t)(-t->bytes % ALIGN);
    if (rc == 0 && pad)
        rc = fwrite(zero, pad, 1, f) == 1 ? 0 : -1;
    free(buf);
    return rc;
}

/* ---- the file ------------------------------------------------------------------------------------------ */

static void put_shape(struct meta *b, const struct random_model *m)
{
    char key[96];
    const struct {
        const char *name;
        int v;
    } num[] = {{"context_length", m->context},
               {"embedding_length", m->width},
               {"block_count", m->layers},
               {"feed_forward_length", m->ffn},
               {"attention.head_count", m->heads},
               {"attention.head_count_kv", m->kv_heads},
               {"attention.key_length", m->head_dim},
               {"attention.value_length", m->head_dim},
               {"rope.dimension_count", m->head_dim}};
    meta_str(b, "general.architecture", m->arch);
    meta_str(b, "general.name", "random");
    meta_u32(b, "general.alignment", ALIGN);
    for (size_t i = 0; i < sizeof num / sizeof *num; i++) {
        snprintf(key, sizeof key, "%s.%s", m->arch, num[i].name);
        meta_u32(b, key, (uint32_t)num[i].v);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", m->arch);
    meta_f32(b, key, m->norm_eps);
    snprintf(key, sizeof key, "%s.rope.freq_base", m->arch);
    meta_f32(b, key, m->rope_base);
}

static void put_directory(struct meta *b, const struct tensors *l)
{
    for (int i = 0; i < l->n; i++) {
        const struct tensor *t = &l->t[i];
        uint64_t len = strlen(t->name), dim[2] = {(uint64_t)t->cols, (uint64_t)t->rows};
        uint32_t n_dim = t->rows ? 2 : 1, type = (uint32_t)t->type;
        meta_bytes(b, &len, 8);
        meta_bytes(b, t->name, len);
        meta_bytes(b, &n_dim, 4);
        meta_bytes(b, dim, n_dim * 8);
        meta_bytes(b, &type, 4);
        meta_bytes(b, &t->offset, 8);
    }
}

static int write_file(FILE *f, const struct random_model *m, struct meta *meta, const struct tensors *l)
{
    static const unsigned char zero[ALIGN];
    struct meta head = {0};
    uint32_t version = 3;
    uint64_t n_tensor = (uint64_t)l->n;
    meta_bytes(&head, "GGUF", 4);
    meta_bytes(&head, &version, 4);
    meta_bytes(&head, &n_tensor, 8);
    meta_bytes(&head, &meta->n, 8);
    meta_bytes(&head, meta->data, meta->len);
    put_directory(&head, l);
    meta_bytes(&head, zero, -head.len % ALIGN);
    int rc = fwrite(head.data, head.len, 1, f) == 1 ? 0 : -1;
    free(head.data);
    for (int i = 0; rc == 0 && i < l->n; i++)
        rc = write_tensor(f, m, &l->t[i]);
    return rc;
}

static int check_shape(const struct random_model *m, struct skv_error *err)
{
    if (strcmp(m->arch, "llama") != 0 && strcmp(m->arch, "qwen2") != 0 && strcmp(m->arch, "qwen3") != 0)
        return skv_fail(err, SKV_BAD_CONFIG, "arch '%s': llama, qwen2 or qwen3", m->arch);
    if (m->layers < 1 || m->width < 1 || m->heads < 1 || m->kv_heads < 1 || m->head_dim < 2 || m->ffn < 1 || m->context < 1)
        return skv_fail(err, SKV_BAD_CONFIG, "every size must be at least 1");
    if (m->heads % m->kv_heads || m->head_dim % 2)
        return skv_fail(err, SKV_BAD_CONFIG, "heads must be a multiple of kv-heads, head-dim even");
    return 0;
}

int random_model_write(const struct random_model *m, const char *path, struct skv_error *err)
{
    struct meta meta = {0};
    struct tensors list = {0};
    char tmp[4096];
    int vocab = m->vocab, rc;
    if (check_shape(m, err) < 0)
        return -1;
    put_shape(&meta, m);
    rc = m->vocab_from ? vocab_copy(&meta, m->vocab_from, &vocab, err) : vocab_make(&meta, m, err);
    if (rc == 0)
        rc = list_tensors(&list, m, vocab, err);
    snprintf(tmp, sizeof tmp, "%s.%ld.tmp", path, (long)getpid());
    FILE *f = rc == 0 ? fopen(tmp, "wb") : NULL;
    if (rc == 0 && !f)
        rc = skv_fail(err, SKV_IO, "%s: %s", tmp, strerror(errno));
    if (f) {
        rc = write_file(f, m, &meta, &list);
        if (fclose(f) != 0 || rc < 0 || rename(tmp, path) != 0) {
            rc = skv_fail(err, SKV_IO, "%s: %s", path, strerror(errno));
            unlink(tmp);
        }
    }
    free(meta.data);
    free(list.t);
    return rc;
}
