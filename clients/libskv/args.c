/* args.c - putting arguments together. Counts of containers are not known in advance: each gets the 5-byte header
 * with 32 bits of count, filled in when it is closed. */
#include "config.h"

#include "clients/libskv/internal.h"

#include <stdlib.h>
#include <string.h>

bool text_is_utf8(const char *s, size_t len)
{
    const unsigned char *p = (const unsigned char *)s, *end = p + len;

    while (p < end) {
        unsigned char b = *p++;
        unsigned more = b < 0x80 ? 0 : b < 0xe0 ? 1 : b < 0xf0 ? 2 : 3;
        if (b < 0x80)
            continue;
        if (b < 0xc2 || b > 0xf4 || (size_t)(end - p) < more)
            return false;
        if ((b == 0xe0 && *p < 0xa0) || (b == 0xed && *p > 0x9f) || (b == 0xf0 && *p < 0x90) || (b == 0xf4 && *p > 0x8f))
            return false;
        for (; more > 0; more--)
            if ((*p++ & 0xc0) != 0x80)
                return false;
    }
    return true;
}

static void args_fail(struct skv_args *a, enum skv_code code, const char *why)
{
    if (a->failed == NULL) {
        a->failed = why;
        a->code = code;
    }
}

static void open_level(struct skv_args *a, bool map)
{
    static const char head[2][5] = { { (char)0xdd, 0, 0, 0, 0 }, { (char)0xdf, 0, 0, 0, 0 } };

    if (a->depth == (int)(sizeof a->level / sizeof a->level[0])) {
        args_fail(a, SKV_BAD_REQUEST, "arguments are nested deeper than 16 levels");
        return;
    }
    a->level[a->depth].at = a->buf.size + 1;
    a->level[a->depth].count = 0;
    a->level[a->depth].map = map;
    if (msgpack_sbuffer_write(&a->buf, head[map], 5) != 0) {
        args_fail(a, SKV_NO_MEMORY, "no memory for the arguments");
        return;
    }
    a->depth++;
}

static void close_level(struct skv_args *a)
{
    uint32_t n;
    char *p;

    a->depth--;
    n = a->level[a->depth].count;
    p = a->buf.data + a->level[a->depth].at;
    p[0] = (char)(n >> 24);
    p[1] = (char)(n >> 16);
    p[2] = (char)(n >> 8);
    p[3] = (char)n;
}

struct skv_args *skv_args_new(void)
{
    struct skv_args *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    msgpack_sbuffer_init(&a->buf);
    msgpack_packer_init(&a->pk, &a->buf, msgpack_sbuffer_write);
    open_level(a, true);
    return a;
}

void skv_args_free(struct skv_args *a)
{
    if (a == NULL)
        return;
    msgpack_sbuffer_destroy(&a->buf);
    free(a);
}

const char *args_bytes(struct skv_args *a, size_t *len, struct skv_error *err)
{
    if (a->failed == NULL && a->depth > 1)
        args_fail(a, SKV_BAD_REQUEST, "an array or a map of the arguments was not closed");
    if (a->failed != NULL) {
        skv_fail(err, a->code, "%s", a->failed);
        return NULL;
    }
    if (a->depth == 1)
        close_level(a);
    *len = a->buf.size;
    return a->buf.data;
}

static bool pack_str(struct skv_args *a, const char *s, size_t len)
{
    if (len > UINT32_MAX) {
        args_fail(a, SKV_TOO_LARGE, "a string of 4 GiB or more");
        return false;
    }
    if (!text_is_utf8(s, len)) {
        args_fail(a, SKV_BAD_REQUEST, "a string that is not valid UTF-8");
        return false;
    }
    if (msgpack_pack_str(&a->pk, len) != 0 || msgpack_pack_str_body(&a->pk, s, len) != 0) {
        args_fail(a, SKV_NO_MEMORY, "no memory for the arguments");
        return false;
    }
    return true;
}

/* Before every value: its name, its place in the count. False: leave it. */
static bool begin_value(struct skv_args *a, const char *name)
{
    if (a == NULL || a->failed != NULL)
        return false;
    if (a->depth == 0 || a->level[a->depth - 1].map != (name != NULL)) {
        args_fail(a, SKV_BAD_REQUEST, "an argument without a name in a map, or with one in an array");
        return false;
    }
    a->level[a->depth - 1].count++;
    return name == NULL || pack_str(a, name, strlen(name));
}

static void packed(struct skv_args *a, int rc)
{
    if (rc != 0)
        args_fail(a, SKV_NO_MEMORY, "no memory for the arguments");
}

void skv_arg_nil(struct skv_args *a, const char *name)
{
    if (begin_value(a, name))
        packed(a, msgpack_pack_nil(&a->pk));
}

void skv_arg_bool(struct skv_args *a, const char *name, bool v)
{
    if (begin_value(a, name))
        packed(a, v ? msgpack_pack_true(&a->pk) : msgpack_pack_false(&a->pk));
}

void skv_arg_int(struct skv_args *a, const char *name, int64_t v)
{
    if (begin_value(a, name))
        packed(a, msgpack_pack_int64(&a->pk, v));
}

void skv_arg_num(struct skv_args *a, const char *name, double v)
{
    if (begin_value(a, name))
        packed(a, msgpack_pack_double(&a->pk, v));
}

void skv_arg_strn(struct skv_args *a, const char *name, const char *s, size_t len)
{
    if (begin_value(a, name))
        pack_str(a, s, len);
}

void skv_arg_str(struct skv_args *a, const char *name, const char *s)
{
    skv_arg_strn(a, name, s, strlen(s));
}

void skv_arg_tokens(struct skv_args *a, const char *name, const int32_t *tokens, size_t n)
{
    if (!begin_value(a, name))
        return;
    if (n > UINT32_MAX) {
        args_fail(a, SKV_TOO_LARGE, "more tokens than an array can hold");
        return;
    }
    packed(a, msgpack_pack_array(&a->pk, n));
    for (size_t i = 0; i < n && a->failed == NULL; i++)
        packed(a, msgpack_pack_int32(&a->pk, tokens[i]));
}

void skv_arg_value(struct skv_args *a, const char *name, const struct skv_value *v)
{
    if (v == NULL)
        skv_arg_nil(a, name);
    else if (begin_value(a, name))
        packed(a, msgpack_pack_object(&a->pk, *(const msgpack_object *)v));
}

void skv_arg_array(struct skv_args *a, const char *name)
{
    if (begin_value(a, name))
        open_level(a, false);
}

void skv_arg_map(struct skv_args *a, const char *name)
{
    if (begin_value(a, name))
        open_level(a, true);
}

void skv_arg_end(struct skv_args *a)
{
    if (a == NULL || a->failed != NULL)
        return;
    if (a->depth <= 1)
        args_fail(a, SKV_BAD_REQUEST, "an end of arguments that closes nothing");
    else
        close_level(a);
}
