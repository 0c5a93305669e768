/* gguf.c - opening a GGUF file and looking things up in it. Parsing and its checks are in gguf_read.c. */
#include "config.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/gguf_int.h"
#include "engine/tokenizer.h"

static const struct {
    const char *name;
    size_t size;
} types[GGUF_T_COUNT] = {
    [GGUF_T_U8] = { "u8", 1 },       [GGUF_T_I8] = { "i8", 1 },     [GGUF_T_U16] = { "u16", 2 },
    [GGUF_T_I16] = { "i16", 2 },     [GGUF_T_U32] = { "u32", 4 },   [GGUF_T_I32] = { "i32", 4 },
    [GGUF_T_F32] = { "f32", 4 },     [GGUF_T_BOOL] = { "bool", 1 }, [GGUF_T_STR] = { "string", 0 },
    [GGUF_T_ARR] = { "array", 0 },   [GGUF_T_U64] = { "u64", 8 },   [GGUF_T_I64] = { "i64", 8 },
    [GGUF_T_F64] = { "f64", 8 },
};

size_t gguf_type_size(int type)
{
    return type >= 0 && type < GGUF_T_COUNT ? types[type].size : 0;
}

const char *gguf_type_name(int type)
{
    return type >= 0 && type < GGUF_T_COUNT ? types[type].name : "?";
}

int gguf_fail(const struct gguf *g, struct skv_error *err, const char *fmt, ...)
{
    char what[SKV_ERROR_MSG];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    return skv_fail(err, SKV_BAD_MODEL, "%s: %s", g->name, what);
}

/* ---- opening -------------------------------------------------------------------------------------------- */

static struct gguf *open_bytes(const void *data, size_t size, bool mapped, const char *name,
                               struct skv_error *err)
{
    struct gguf *g = calloc(1, sizeof(*g));
    char *copy = strdup(name);
    if (!g || !copy) {
        free(g);
        free(copy);
        if (mapped)
            munmap((void *)data, size);
        skv_fail(err, SKV_NO_MEMORY, "no memory to open %s", name);
        return NULL;
    }
    g->base = data;
    g->size = size;
    g->mapped = mapped;
    g->name = copy;
    if (gguf_parse(g, err)) {
        gguf_close(g);
        return NULL;
    }
    return g;
}

struct gguf *gguf_open_mem(const void *data, size_t size, const char *name, struct skv_error *err)
{
    return open_bytes(data, size, false, name, err);
}

struct gguf *gguf_open(const char *path, struct skv_error *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hold us up */
    if (fd < 0) {
        skv_fail(err, SKV_BAD_MODEL, "%s: %s", path, strerror(errno));
        return NULL;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size == 0) {
        skv_fail(err, SKV_BAD_MODEL, "%s: %s", path,
                 S_ISREG(st.st_mode) ? "the file is empty" : "not a regular file");
        close(fd);
        return NULL;
    }
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    int why = errno;
    close(fd);
    if (p == MAP_FAILED) {
        skv_fail(err, why == ENOMEM ? SKV_NO_MEMORY : SKV_BAD_MODEL, "%s: cannot be mapped: %s", path,
                 strerror(why));
        return NULL;
    }
    return open_bytes(p, (size_t)st.st_size, true, path, err);
}

void gguf_close(struct gguf *g)
{
    if (!g)
        return;
    for (size_t i = 0; g->kv && i < g->n_kv; i++)
        free((void *)g->kv[i].arr.str);
    free(g->kv);
    free(g->kv_sorted);
    free(g->tensor);
    free(g->tensor_sorted);
    free(g->names);
    free(g->name);
    if (g->mapped)
        munmap((void *)g->base, g->size);
    free(g);
}

void gguf_dontneed(struct gguf *g)
{
    /* Advice only: the pages come back from the file when they are read again. */
    if (g->mapped)
        madvise((void *)g->base, g->size, MADV_DONTNEED);
}

size_t gguf_size(const struct gguf *g)
{
    return g->size;
}

const void *gguf_base(const struct gguf *g)
{
    return g->base;
}

/* ---- metadata ------------------------------------------------------------------------------------------- */

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key, size_t len)
{
    size_t lo = 0, hi = g->n_kv;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct gguf_kv *kv = &g->kv[g->kv_sorted[mid]];
        int d = memcmp(kv->key.s, key, kv->key.len < len ? kv->key.len : len);
        if (d == 0 && kv->key.len == len)
            return kv;
        if (d < 0 || (d == 0 && kv->key.len < len))
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

static int mistyped(const struct gguf *g, const struct gguf_kv *kv, const char *want,
                    struct skv_error *err)
{
    bool arr = kv->type == GGUF_T_ARR;
    return gguf_fail(g, err, "key %.*s is %s%s, not %s", (int)kv->key.len, kv->key.s,
                     arr ? "an array of " : "of type ",
                     gguf_type_name(arr ? kv->arr.type : kv->type), want);
}

/* The low 8 bytes and whether the value is negative, of an integer type; false for others. */
static bool int_value(int type, const unsigned char *p, int64_t *out, bool *huge)
{
    *huge = false;
    switch (type) {
    case GGUF_T_U8:
        *out = p[0];
        return true;
    case GGUF_T_I8:
        *out = (int8_t)p[0];
        return true;
    case GGUF_T_U16:
    case GGUF_T_I16: {
        uint16_t v;
        memcpy(&v, p, 2);
        *out = type == GGUF_T_I16 ? (int16_t)v : v;
        return true;
    }
    case GGUF_T_U32:
    case GGUF_T_I32: {
        uint32_t v;
        memcpy(&v, p, 4);
        *out = type == GGUF_T_I32 ? (int64_t)(int32_t)v : (int64_t)v;
        return true;
    }
    case GGUF_T_U64:
    case GGUF_T_I64: {
        uint64_t v;
        memcpy(&v, p, 8);
        *huge = type == GGUF_T_U64 && v > INT64_MAX;
        *out = (int64_t)v;
        return true;
    }
    default:
        return false;
    }
}

int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, struct skv_error *err)
{
    const struct gguf_kv *kv = gguf_find(g, key, strlen(key));
    int64_t v;
    bool huge;
    if (!kv)
        return 0;
    if (!kv->data || !int_value(kv->type, kv->data, &v, &huge))
        return mistyped(g, kv, "an integer", err);
    if (huge || v < 0 || v > UINT32_MAX)
        return gguf_fail(g, err, "key %s: its value does not fit in 32 bits without a sign", key);
    *out = (uint32_t)v;
    return 1;
}

int gguf_get_f32(const struct gguf *g, const char *key, float *out, struct skv_error *err)
{
    const struct gguf_kv *kv = gguf_find(g, key, strlen(key));
    double d;
    float f;
    if (!kv)
        return 0;
    if (kv->type == GGUF_T_F64) {
        memcpy(&d, kv->data, 8);
        f = (float)d;
    } else if (kv->type == GGUF_T_F32) {
        memcpy(&f, kv->data, 4);
    } else {
        return mistyped(g, kv, "f32", err);
    }
    if (!isfinite(f))
        return gguf_fail(g, err, "key %s is not a finite number", key);
    *out = f;
    return 1;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct skv_error *err)
{
    const struct gguf_kv *kv = gguf_find(g, key, strlen(key));
    if (!kv)
        return 0;
    if (kv->type != GGUF_T_BOOL)
        return mistyped(g, kv, "bool", err);
    *out = *kv->data;
    return 1;
}

int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct skv_error *err)
{
    const struct gguf_kv *kv = gguf_find(g, key, strlen(key));
    size_t bad;
    if (!kv)
        return 0;
    if (kv->type != GGUF_T_STR)
        return mistyped(g, kv, "a string", err);
    if (!utf8_valid(kv->str.s, kv->str.len, &bad))
        return gguf_fail(g, err, "key %s: its string is not UTF-8 at byte %zu", key, bad);
    if (memchr(kv->str.s, 0, kv->str.len))
        return gguf_fail(g, err, "key %s: its string has a NUL byte", key);
    *out = kv->str;
    return 1;
}

static bool arr_type_fits(int have, int want)
{
    return have == want || want == GGUF_T_ARR || (want == GGUF_T_I32 && have == GGUF_T_U32);
}

int gguf_get_arr(const struct gguf *g, const char *key, int type, struct gguf_arr *out,
                 struct skv_error *err)
{
    const struct gguf_kv *kv = gguf_find(g, key, strlen(key));
    char want[32];
    if (!kv)
        return 0;
    if (kv->type != GGUF_T_ARR || !arr_type_fits(kv->arr.type, type)) {
        snprintf(want, sizeof(want), "an array of %s", type == GGUF_T_ARR ? "values" : gguf_type_name(type));
        return mistyped(g, kv, want, err);
    }
    *out = kv->arr;
    return 1;
}

float gguf_arr_f32(const struct gguf_arr *a, size_t i)
{
    float f;
    memcpy(&f, a->data + i * 4, 4);
    return f;
}

int32_t gguf_arr_i32(const struct gguf_arr *a, size_t i)
{
    int32_t v;
    memcpy(&v, a->data + i * 4, 4);
    return v;
}

/* ---- tensors -------------------------------------------------------------------------------------------- */

int gguf_tensor(const struct gguf *g, const char *name, struct kern_tensor *out)
{
    size_t lo = 0, hi = g->n_tensor;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct gguf_tensor_info *t = &g->tensor[g->tensor_sorted[mid]];
        int d = strcmp(t->name, name);
        if (d == 0) {
            *out = (struct kern_tensor){ g->base + g->data_off + t->offset, t->type, t->rows, t->cols };
            return 1;
        }
        if (d < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return 0;
}

int gguf_n_tensors(const struct gguf *g)
{
    return (int)g->n_tensor;
}

const char *gguf_tensor_name(const struct gguf *g, int i)
{
    return i >= 0 && (size_t)i < g->n_tensor ? g->tensor[i].name : NULL;
}
