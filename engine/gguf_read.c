/* gguf_read.c - parsing a GGUF file's header, metadata and tensor table.
 *
 * The file is hostile until shown otherwise. One cursor reads it; every length is compared with the bytes that are
 * left (n > size - pos, never pos + n > size) before anything is taken for it, so memory is at most a small multiple
 * of the file's own bytes, and work is linear (duplicates are found by sorting).
 */
#include "config.h"

#include <stdlib.h>
#include <string.h>

#include "engine/gguf_int.h"
#include "engine/tokenizer.h"
#include "kernels/blocks.h"

/* The least bytes that a key-value pair and a tensor entry take: bounds on the declared counts. */
#define KV_MIN     (8 + 1 + 4 + 1)
#define TENSOR_MIN (8 + 1 + 4 + 8 + 4 + 8)
#define KEY_MAX    65535 /* the specification's */
#define TENSOR_NAME_MAX 128 /* real ones stay below 64 */
#define ALIGN_MAX  (1u << 20)

/* A cursor that latches its first fault: after it, reads give zeros. */
struct cursor {
    const struct gguf *g;
    size_t pos;
};

static size_t left(const struct cursor *c)
{
    return c->g->size - c->pos;
}

static const unsigned char *take(struct cursor *c, size_t n)
{
    if (n > left(c))
        return NULL;
    const unsigned char *p = c->g->base + c->pos;
    c->pos += n;
    return p;
}

static uint64_t le(const unsigned char *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static bool take_u32(struct cursor *c, uint32_t *out)
{
    const unsigned char *p = take(c, 4);
    if (p)
        *out = (uint32_t)le(p, 4);
    return p != NULL;
}

static bool take_u64(struct cursor *c, uint64_t *out)
{
    const unsigned char *p = take(c, 8);
    if (p)
        *out = le(p, 8);
    return p != NULL;
}

static bool take_str(struct cursor *c, struct gguf_str *out)
{
    uint64_t n;
    if (!take_u64(c, &n) || n > left(c))
        return false;
    out->s = (const char *)take(c, (size_t)n);
    out->len = (size_t)n;
    return true;
}

/* Keys and tensor names go into messages and comparisons: UTF-8 without control characters. */
static bool good_name(const struct gguf_str *s, size_t max)
{
    size_t bad;
    if (s->len == 0 || s->len > max || !utf8_valid(s->s, s->len, &bad))
        return false;
    for (size_t i = 0; i < s->len; i++)
        if ((unsigned char)s->s[i] < 0x20 || s->s[i] == 0x7f)
            return false;
    return true;
}

/* Keys are cut in messages, at a character. */
static int shown(const struct gguf_str *s)
{
    return (int)utf8_whole(s->s, s->len > 100 ? 100 : s->len);
}

static int cut(const struct gguf *g, struct skv_error *err, const char *what)
{
    return gguf_fail(g, err, "the file ends inside %s (%zu bytes)", what, g->size);
}

static int read_str_array(struct cursor *c, struct gguf_kv *kv, size_t n, struct skv_error *err)
{
    if (n > left(c) / 8)
        return gguf_fail(c->g, err, "key %.*s: an array of %zu strings does not fit in the file",
                         shown(&kv->key), kv->key.s, n);
    struct gguf_str *s = malloc((n ? n : 1) * sizeof(*s));
    if (!s)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %zu strings of the model file", n);
    kv->arr.str = s;
    for (size_t i = 0; i < n; i++)
        if (!take_str(c, &s[i]))
            return gguf_fail(c->g, err, "key %.*s: string %zu reaches past the end of the file",
                             shown(&kv->key), kv->key.s, i);
    return 0;
}

static int read_array(struct cursor *c, struct gguf_kv *kv, struct skv_error *err)
{
    uint32_t type;
    uint64_t n;
    if (!take_u32(c, &type) || !take_u64(c, &n))
        return cut(c->g, err, "an array's header");
    if (type == GGUF_T_ARR)
        return gguf_fail(c->g, err, "key %.*s: arrays of arrays are not supported", shown(&kv->key),
                         kv->key.s);
    if (type >= GGUF_T_COUNT)
        return gguf_fail(c->g, err, "key %.*s: unknown element type %u", shown(&kv->key), kv->key.s,
                         type);
    kv->arr.type = (int)type;
    if (n > left(c))
        return gguf_fail(c->g, err, "key %.*s: an array of %llu elements does not fit in the file",
                         shown(&kv->key), kv->key.s, (unsigned long long)n);
    kv->arr.n = (size_t)n;
    if (type == GGUF_T_STR)
        return read_str_array(c, kv, (size_t)n, err);
    size_t each = gguf_type_size((int)type);
    if (n > left(c) / each)
        return gguf_fail(c->g, err, "key %.*s: an array of %llu elements does not fit in the file",
                         shown(&kv->key), kv->key.s, (unsigned long long)n);
    kv->arr.data = take(c, (size_t)n * each);
    for (size_t i = 0; type == GGUF_T_BOOL && i < n; i++)
        if (kv->arr.data[i] > 1)
            return gguf_fail(c->g, err, "key %.*s: element %zu is %u, which is no boolean",
                             shown(&kv->key), kv->key.s, i, kv->arr.data[i]);
    return 0;
}

static int read_kv(struct cursor *c, struct gguf_kv *kv, size_t i, struct skv_error *err)
{
    uint32_t type;
    if (!take_str(c, &kv->key))
        return gguf_fail(c->g, err, "key %zu reaches past the end of the file", i);
    if (!good_name(&kv->key, KEY_MAX))
        return gguf_fail(c->g, err,
                         "key %zu is not a name: 1 to %d bytes of UTF-8 without control characters", i,
                         KEY_MAX);
    if (!take_u32(c, &type))
        return cut(c->g, err, "a key's type");
    kv->type = (int)type;
    if (type >= GGUF_T_COUNT)
        return gguf_fail(c->g, err, "key %.*s: unknown value type %u", shown(&kv->key), kv->key.s,
                         type);
    if (type == GGUF_T_ARR)
        return read_array(c, kv, err);
    if (type == GGUF_T_STR) {
        if (!take_str(c, &kv->str))
            return gguf_fail(c->g, err, "key %.*s: its string reaches past the end of the file",
                             shown(&kv->key), kv->key.s);
        return 0;
    }
    kv->data = take(c, gguf_type_size((int)type));
    if (!kv->data)
        return cut(c->g, err, "a key's value");
    if (type == GGUF_T_BOOL && *kv->data > 1)
        return gguf_fail(c->g, err, "key %.*s: its value is %u, which is no boolean", shown(&kv->key),
                         kv->key.s, *kv->data);
    return 0;
}

/* Rows and columns of 1 to 4 dimensions, each product checked. */
static int read_dims(struct cursor *c, struct gguf_tensor_info *t, struct skv_error *err)
{
    uint32_t n_dims;
    uint64_t d;
    if (!take_u32(c, &n_dims))
        return cut(c->g, err, "a tensor's entry");
    if (n_dims < 1 || n_dims > 4)
        return gguf_fail(c->g, err, "tensor %s: %u dimensions (1 to 4 are possible)", t->name, n_dims);
    t->rows = 1;
    t->cols = 1;
    for (uint32_t i = 0; i < n_dims; i++) {
        if (!take_u64(c, &d))
            return cut(c->g, err, "a tensor's dimensions");
        if (d == 0 || d > INT64_MAX)
            return gguf_fail(c->g, err, "tensor %s: dimension %u is %llu", t->name, i,
                             (unsigned long long)d);
        if (i == 0)
            t->cols = (int64_t)d;
        else if ((int64_t)d > INT64_MAX / t->rows)
            return gguf_fail(c->g, err, "tensor %s: the product of its dimensions is too large",
                             t->name);
        else
            t->rows *= (int64_t)d;
    }
    return 0;
}

static int read_tensor(struct cursor *c, struct gguf_tensor_info *t, char **names, size_t i,
                       struct skv_error *err)
{
    struct gguf_str name;
    uint32_t type;
    if (!take_str(c, &name))
        return gguf_fail(c->g, err, "the name of tensor %zu reaches past the end of the file", i);
    if (!good_name(&name, TENSOR_NAME_MAX))
        return gguf_fail(c->g, err,
                         "tensor %zu has no name of 1 to %d bytes of UTF-8 without control characters",
                         i, TENSOR_NAME_MAX);
    memcpy(*names, name.s, name.len);
    (*names)[name.len] = '\0';
    t->name = *names;
    *names += name.len + 1;
    if (read_dims(c, t, err))
        return -1;
    if (!take_u32(c, &type) || !take_u64(c, &t->offset))
        return cut(c->g, err, "a tensor's entry");
    if (type > INT32_MAX || !kern_type_known((int)type))
        return gguf_fail(c->g, err, "tensor %s: weights of type %u are not supported", t->name, type);
    t->type = (int)type;
    if (t->cols % kern_type_block(t->type))
        return gguf_fail(c->g, err, "tensor %s: rows of %lld weights are no multiple of %s's block of %d",
                         t->name, (long long)t->cols, kern_type_name(t->type),
                         kern_type_block(t->type));
    uint64_t blocks = (uint64_t)(t->cols / kern_type_block(t->type));
    uint64_t each = kern_type_block_bytes(t->type);
    if (blocks > c->g->size / each || (uint64_t)t->rows > c->g->size / (blocks * each))
        return gguf_fail(c->g, err, "tensor %s: [%lld][%lld] %s is larger than the file", t->name,
                         (long long)t->rows, (long long)t->cols, kern_type_name(t->type));
    t->size = (uint64_t)t->rows * blocks * each;
    return 0;
}

/* ---- after the walk: order, duplicates, places --------------------------------------------------------- */

static int cmp_bytes(const char *a, size_t an, const char *b, size_t bn)
{
    int d = memcmp(a, b, an < bn ? an : bn);
    return d ? d : (an > bn) - (an < bn);
}

/* qsort_r is GNU and BSD with different arguments, so what is sorted carries its key. */
struct sort_name {
    const char *s;
    size_t len;
    uint32_t i;
};

static int cmp_name(const void *a, const void *b)
{
    const struct sort_name *x = a, *y = b;
    int d = cmp_bytes(x->s, x->len, y->s, y->len);
    return d ? d : (x->i > y->i) - (x->i < y->i);
}

/* Indices in name order; NULL when out of memory; *dup = index of a second bearer of a name, or -1. */
static uint32_t *sort_names(struct sort_name *v, size_t n, int64_t *dup)
{
    uint32_t *order = malloc((n ? n : 1) * sizeof(*order));
    *dup = -1;
    if (!order)
        return NULL;
    qsort(v, n, sizeof(*v), cmp_name);
    for (size_t i = 0; i < n; i++) {
        order[i] = v[i].i;
        if (i && !cmp_bytes(v[i].s, v[i].len, v[i - 1].s, v[i - 1].len))
            *dup = v[i].i;
    }
    return order;
}

static int index_kv(struct gguf *g, struct skv_error *err)
{
    int64_t dup;
    struct sort_name *v = malloc((g->n_kv ? g->n_kv : 1) * sizeof(*v));
    if (!v)
        return skv_fail(err, SKV_NO_MEMORY, "no memory to read the model file");
    for (size_t i = 0; i < g->n_kv; i++)
        v[i] = (struct sort_name){ g->kv[i].key.s, g->kv[i].key.len, (uint32_t)i };
    g->kv_sorted = sort_names(v, g->n_kv, &dup);
    free(v);
    if (!g->kv_sorted)
        return skv_fail(err, SKV_NO_MEMORY, "no memory to read the model file");
    if (dup >= 0)
        return gguf_fail(g, err, "key %.*s appears twice", shown(&g->kv[dup].key), g->kv[dup].key.s);
    return 0;
}

static int index_tensors(struct gguf *g, struct skv_error *err)
{
    int64_t dup;
    struct sort_name *v = malloc((g->n_tensor ? g->n_tensor : 1) * sizeof(*v));
    if (!v)
        return skv_fail(err, SKV_NO_MEMORY, "no memory to read the model file");
    for (size_t i = 0; i < g->n_tensor; i++)
        v[i] = (struct sort_name){ g->tensor[i].name, strlen(g->tensor[i].name), (uint32_t)i };
    g->tensor_sorted = sort_names(v, g->n_tensor, &dup);
    free(v);
    if (!g->tensor_sorted)
        return skv_fail(err, SKV_NO_MEMORY, "no memory to read the model file");
    if (dup >= 0)
        return gguf_fail(g, err, "tensor %s appears twice", g->tensor[dup].name);
    return 0;
}

static int read_alignment(struct gguf *g, struct skv_error *err)
{
    static const char key[] = "general.alignment";
    const struct gguf_kv *kv = gguf_find(g, key, sizeof(key) - 1);
    g->alignment = 32;
    if (!kv)
        return 0;
    if (kv->type != GGUF_T_U32)
        return gguf_fail(g, err, "%s is of type %s, not u32", key, gguf_type_name(kv->type));
    uint32_t a = (uint32_t)le(kv->data, 4);
    if (a < 8 || a > ALIGN_MAX || (a & (a - 1)))
        return gguf_fail(g, err, "%s is %u, not a power of two from 8 to %u", key, a, ALIGN_MAX);
    g->alignment = a;
    return 0;
}

static int cmp_place(const void *a, const void *b)
{
    const struct gguf_tensor_info *x = *(const struct gguf_tensor_info *const *)a;
    const struct gguf_tensor_info *y = *(const struct gguf_tensor_info *const *)b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static int check_overlap(struct gguf *g, struct skv_error *err)
{
    const struct gguf_tensor_info **v = malloc((g->n_tensor ? g->n_tensor : 1) * sizeof(*v));
    int rc = 0;
    if (!v)
        return skv_fail(err, SKV_NO_MEMORY, "no memory to read the model file");
    for (size_t i = 0; i < g->n_tensor; i++)
        v[i] = &g->tensor[i];
    qsort(v, g->n_tensor, sizeof(*v), cmp_place);
    for (size_t i = 1; i < g->n_tensor && !rc; i++)
        if (v[i]->offset - v[i - 1]->offset < v[i - 1]->size)
            rc = gguf_fail(g, err, "tensors %s and %s overlap", v[i - 1]->name, v[i]->name);
    free(v);
    return rc;
}

/* The data part starts at the next multiple of the alignment; every tensor lies inside it. */
static int check_places(struct gguf *g, size_t pos, struct skv_error *err)
{
    size_t pad = (g->alignment - pos % g->alignment) % g->alignment;
    if (g->n_tensor && pad > g->size - pos)
        return cut(g, err, "the padding before the weights");
    g->data_off = g->n_tensor ? pos + pad : pos;
    uint64_t room = g->size - g->data_off;
    for (size_t i = 0; i < g->n_tensor; i++) {
        const struct gguf_tensor_info *t = &g->tensor[i];
        if (t->offset % g->alignment)
            return gguf_fail(g, err, "tensor %s: its offset %llu is no multiple of %u", t->name,
                             (unsigned long long)t->offset, g->alignment);
        if (t->offset > room || t->size > room - t->offset)
            return gguf_fail(g, err,
                             "tensor %s reaches past the end of the file (%zu bytes): is it cut short?",
                             t->name, g->size);
    }
    return check_overlap(g, err);
}

static int read_header(struct cursor *c, uint64_t *n_tensor, uint64_t *n_kv, struct skv_error *err)
{
    uint32_t version;
    const unsigned char *magic = take(c, 4);
    if (!magic)
        return gguf_fail(c->g, err, c->g->size ? "too short for a GGUF file" : "the file is empty");
    if (memcmp(magic, "GGUF", 4))
        return gguf_fail(c->g, err, "not a GGUF file (it does not begin with the letters GGUF)");
    if (!take_u32(c, &version))
        return cut(c->g, err, "the header");
    if (version != 2 && version != 3) {
        bool swapped = (version & 0xffff) == 0;
        return gguf_fail(c->g, err, swapped && version ? "a big-endian file (version field %#x): little-endian"
                                                         " ones are supported"
                                                       : "GGUF version %u; versions 2 and 3 are supported",
                         version);
    }
    if (!take_u64(c, n_tensor) || !take_u64(c, n_kv))
        return cut(c->g, err, "the header");
    if (*n_kv > left(c) / KV_MIN || *n_kv > INT32_MAX)
        return gguf_fail(c->g, err, "%llu keys do not fit in the file", (unsigned long long)*n_kv);
    if (*n_tensor > left(c) / TENSOR_MIN || *n_tensor > INT32_MAX)
        return gguf_fail(c->g, err, "%llu tensors do not fit in the file",
                         (unsigned long long)*n_tensor);
    return 0;
}

int gguf_parse(struct gguf *g, struct skv_error *err)
{
    struct cursor c = { .g = g };
    uint64_t n_tensor, n_kv;
    if (read_header(&c, &n_tensor, &n_kv, err))
        return -1;
    g->kv = calloc(n_kv ? n_kv : 1, sizeof(*g->kv));
    if (!g->kv)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %llu keys", (unsigned long long)n_kv);
    for (uint64_t i = 0; i < n_kv; i++) {
        g->n_kv = (size_t)i + 1; /* what is half read is freed too */
        if (read_kv(&c, &g->kv[i], (size_t)i, err))
            return -1;
    }
    if (index_kv(g, err) || read_alignment(g, err))
        return -1;

    /* Names are copied out with their NUL: the 8 bytes of length in the file pay for it. */
    size_t room = left(&c);
    if (room > n_tensor * (TENSOR_NAME_MAX + 1))
        room = n_tensor * (TENSOR_NAME_MAX + 1);
    g->tensor = calloc(n_tensor ? n_tensor : 1, sizeof(*g->tensor));
    g->names = malloc(room ? room : 1);
    if (!g->tensor || !g->names)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %llu tensors",
                        (unsigned long long)n_tensor);
    char *names = g->names;
    for (uint64_t i = 0; i < n_tensor; i++) {
        if (read_tensor(&c, &g->tensor[i], &names, (size_t)i, err))
            return -1;
        g->n_tensor = (size_t)i + 1;
    }
    return index_tensors(g, err) || check_places(g, c.pos, err) ? -1 : 0;
}
