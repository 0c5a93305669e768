/* gguf_build.c - see gguf_build.h */
#include "config.h"

#include <stdlib.h>
#include <string.h>

#include "tests/gguf_build.h"

void gb_raw(struct gb_buf *b, const void *p, size_t n)
{
    if (n > b->cap - b->len) {
        b->cap = (b->len + n) * 2;
        b->p = realloc(b->p, b->cap);
        if (!b->p)
            abort();
    }
    if (n)
        memcpy(b->p + b->len, p, n);
    b->len += n;
}

void gb_u32(struct gb_buf *b, uint32_t v)
{
    gb_raw(b, &v, 4);
}

void gb_u64(struct gb_buf *b, uint64_t v)
{
    gb_raw(b, &v, 8);
}

void gb_str(struct gb_buf *b, const char *s, size_t len)
{
    gb_u64(b, len);
    gb_raw(b, s, len);
}

void gb_init(struct gb *b)
{
    memset(b, 0, sizeof(*b));
    memcpy(b->magic, "GGUF", 4);
    b->version = 3;
    b->alignment = 32;
}

void gb_free(struct gb *b)
{
    free(b->kv.p);
    free(b->info.p);
    free(b->data.p);
}

void gb_key(struct gb *b, const char *key, uint32_t type)
{
    gb_str(&b->kv, key, strlen(key));
    gb_u32(&b->kv, type);
    b->n_kv++;
}

void gb_kv_u32(struct gb *b, const char *key, uint32_t v)
{
    gb_key(b, key, GB_U32);
    gb_u32(&b->kv, v);
}

void gb_kv_f32(struct gb *b, const char *key, float v)
{
    gb_key(b, key, GB_F32);
    gb_raw(&b->kv, &v, 4);
}

void gb_kv_bool(struct gb *b, const char *key, int v)
{
    unsigned char c = (unsigned char)v;
    gb_key(b, key, GB_BOOL);
    gb_raw(&b->kv, &c, 1);
}

void gb_kv_str(struct gb *b, const char *key, const char *s)
{
    gb_key(b, key, GB_STR);
    gb_str(&b->kv, s, strlen(s));
}

void gb_kv_arr(struct gb *b, const char *key, uint32_t type, uint64_t n)
{
    gb_key(b, key, GB_ARR);
    gb_u32(&b->kv, type);
    gb_u64(&b->kv, n);
}

void gb_tensor(struct gb *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset)
{
    gb_str(&b->info, name, strlen(name));
    gb_u32(&b->info, n_dims);
    for (uint32_t i = 0; i < n_dims && i < 8; i++)
        gb_u64(&b->info, dims[i]);
    gb_u32(&b->info, type);
    gb_u64(&b->info, offset);
    b->n_tensor++;
}

unsigned char *gb_finish(const struct gb *b, size_t *len)
{
    static const unsigned char zero[4096];
    struct gb_buf f = { 0 };
    gb_raw(&f, b->magic, 4);
    gb_u32(&f, b->version);
    gb_u64(&f, b->lie ? b->say_tensor : b->n_tensor);
    gb_u64(&f, b->lie ? b->say_kv : b->n_kv);
    gb_raw(&f, b->kv.p, b->kv.len);
    gb_raw(&f, b->info.p, b->info.len);
    if (b->data.len)
        gb_raw(&f, zero, (b->alignment - f.len % b->alignment) % b->alignment);
    gb_raw(&f, b->data.p, b->data.len);
    unsigned char *exact = malloc(f.len ? f.len : 1);
    if (!exact)
        abort();
    memcpy(exact, f.p, f.len);
    *len = f.len;
    free(f.p);
    return exact;
}

void gb_vocab_add(struct gb_vocab *v, const char *s, size_t len, int32_t type, float score)
{
    gb_str(&v->tokens, s, len);
    gb_raw(&v->types, &type, 4);
    gb_raw(&v->scores, &score, 4);
    v->n++;
}

void gb_vocab_merge(struct gb_vocab *v, const char *s, size_t len)
{
    gb_str(&v->merges, s, len);
    v->n_merges++;
}

void gb_vocab_bytes(struct gb_vocab *v)
{
    unsigned next = 256;
    for (unsigned b = 0; b < 256; b++) {
        unsigned c = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae ? b : next++;
        char s[2] = { (char)c, 0 };
        if (c >= 0x80) {
            s[0] = (char)(0xc0 | c >> 6);
            s[1] = (char)(0x80 | (c & 0x3f));
        }
        gb_vocab_add(v, s, c >= 0x80 ? 2 : 1, 1, 0);
    }
}

void gb_vocab_put(struct gb *b, const struct gb_vocab *v, const char *model, const char *pre)
{
    gb_kv_str(b, "tokenizer.ggml.model", model);
    if (pre)
        gb_kv_str(b, "tokenizer.ggml.pre", pre);
    gb_kv_arr(b, "tokenizer.ggml.tokens", GB_STR, v->n);
    gb_raw(&b->kv, v->tokens.p, v->tokens.len);
    gb_kv_arr(b, "tokenizer.ggml.token_type", GB_I32, v->n);
    gb_raw(&b->kv, v->types.p, v->types.len);
    if (strcmp(model, "gpt2")) {
        gb_kv_arr(b, "tokenizer.ggml.scores", GB_F32, v->n);
        gb_raw(&b->kv, v->scores.p, v->scores.len);
    } else {
        gb_kv_arr(b, "tokenizer.ggml.merges", GB_STR, v->n_merges);
        gb_raw(&b->kv, v->merges.p, v->merges.len);
    }
}

void gb_vocab_free(struct gb_vocab *v)
{
    free(v->tokens.p);
    free(v->types.p);
    free(v->scores.p);
    free(v->merges.p);
}
