/* gguf_int.h - what gguf_read.c (parsing) and gguf.c (opening, lookup) share. Private to them. */
#ifndef SKVD_ENGINE_GGUF_INT_H
#define SKVD_ENGINE_GGUF_INT_H

#include "engine/gguf.h"

/* Value types of the file format that gguf.h does not name. */
enum {
    GGUF_T_U8 = 0,
    GGUF_T_I8 = 1,
    GGUF_T_U16 = 2,
    GGUF_T_I16 = 3,
    GGUF_T_U32 = 4,
    GGUF_T_BOOL = 7,
    GGUF_T_U64 = 10,
    GGUF_T_I64 = 11,
    GGUF_T_F64 = 12,
    GGUF_T_COUNT
};

struct gguf_kv {
    struct gguf_str key;
    int type;                  /* of the value; GGUF_T_ARR: the element type is in arr */
    const unsigned char *data; /* a scalar's bytes */
    struct gguf_str str;       /* a string's */
    struct gguf_arr arr;       /* arr.str is owned (malloc'd) */
};

struct gguf_tensor_info {
    const char *name; /* in gguf.names, NUL-terminated */
    int type;
    int64_t rows, cols;
    uint64_t offset, size; /* in the data part, bytes */
};

struct gguf {
    const unsigned char *base;
    size_t size;
    bool mapped;
    char *name; /* for messages */
    struct gguf_kv *kv;
    size_t n_kv;
    uint32_t *kv_sorted; /* indices by key */
    struct gguf_tensor_info *tensor;
    size_t n_tensor;
    uint32_t *tensor_sorted; /* indices by name */
    char *names;
    uint32_t alignment;
    size_t data_off;
};

/* Bytes of a fixed-size value type, 0 for strings, arrays and types that do not exist. */
size_t gguf_type_size(int type);
const char *gguf_type_name(int type);

/* SKV_BAD_MODEL with the file's name in front. Returns -1. */
int gguf_fail(const struct gguf *g, struct skv_error *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Fill g from g->base[0..size). -1 with *err; what was taken is freed by gguf_close either way. */
int gguf_parse(struct gguf *g, struct skv_error *err);

/* The pair of that key, or NULL. */
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key, size_t len);

#endif
