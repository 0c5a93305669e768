/* gguf_build.h - tests: GGUF files put together in memory, good ones and, by raw bytes, bad ones. */
#ifndef SKVD_TESTS_GGUF_BUILD_H
#define SKVD_TESTS_GGUF_BUILD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gb_buf {
    unsigned char *p;
    size_t len, cap;
};

/* Value types of the format. */
enum { GB_U8, GB_I8, GB_U16, GB_I16, GB_U32, GB_I32, GB_F32, GB_BOOL, GB_STR, GB_ARR, GB_U64, GB_I64, GB_F64 };

struct gb {
    struct gb_buf kv, info, data;
    uint64_t n_kv, n_tensor;
    /* what the header says; set by gb_init, to be changed for bad files */
    char magic[4];
    uint32_t version;
    uint32_t alignment; /* of the data part: a power of two */
    bool lie; /* say the counts below in place of the true ones */
    uint64_t say_kv, say_tensor;
};

void gb_init(struct gb *b);
void gb_free(struct gb *b);

void gb_raw(struct gb_buf *b, const void *p, size_t n);
void gb_u32(struct gb_buf *b, uint32_t v);
void gb_u64(struct gb_buf *b, uint64_t v);
void gb_str(struct gb_buf *b, const char *s, size_t len);

/* Key and type, the value's bytes to be written to b->kv by the caller. */
void gb_key(struct gb *b, const char *key, uint32_t type);
void gb_kv_u32(struct gb *b, const char *key, uint32_t v);
void gb_kv_f32(struct gb *b, const char *key, float v);
void gb_kv_bool(struct gb *b, const char *key, int v);
void gb_kv_str(struct gb *b, const char *key, const char *s);
/* The head of an array; elements follow by the caller. */
void gb_kv_arr(struct gb *b, const char *key, uint32_t type, uint64_t n);

/* A tensor's entry; offset into the data part as it will be said. */
void gb_tensor(struct gb *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset);

/* The file; malloc'd, exactly *len bytes, so that a sanitizer sees every read past its end. */
unsigned char *gb_finish(const struct gb *b, size_t *len);

/* A vocabulary for tokenizer tests: tokens with types and scores, merges. */
struct gb_vocab {
    struct gb_buf tokens, types, scores, merges;
    uint64_t n, n_merges;
};
void gb_vocab_add(struct gb_vocab *v, const char *s, size_t len, int32_t type, float score);
void gb_vocab_merge(struct gb_vocab *v, const char *s, size_t len);
/* The 256 bytes as GPT-2 writes them, as normal tokens. */
void gb_vocab_bytes(struct gb_vocab *v);
/* tokenizer.ggml.* of it into b; pre may be NULL. */
void gb_vocab_put(struct gb *b, const struct gb_vocab *v, const char *model, const char *pre);
void gb_vocab_free(struct gb_vocab *v);

#endif
