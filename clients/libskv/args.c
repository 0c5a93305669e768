/* args.c - putting arguments together. Counts of containers are not known in advance: each gets the 5-byte header
 * with 32 bits of count, filled in when it is closed. */
#include "config.h"

#include "clients/libskv/internal.h"

#include <stdlib.h>
#include <string.h>

#include "protocol/scan.h"

static const char no_memory[] = "no memory for the arguments";

static void args_fail(struct skv_args *a, enum skv_code code, const char *why)
{
    if (a->failed == NULL) {
        a->failed = why;
        a->code = code;
    }
}

static void open_level(struct skv_args *a, bool map)
{
    if (a->depth == ARGS_DEPTH) {
        args_fail(a, SKV_BAD_REQUEST, "arguments are nested too deep");
        return;
    }
    a->level[a->depth].at = a->buf.len + 1;
    a->level[a->depth].count = 0;
    a->level[a->depth].map = map;
    if (map) /* the largest count takes the longest header */
        wire_map(&a->buf, UINT32_MAX);
    else
        wire_array(&a->buf, UINT32_MAX);
    if (a->buf.failed)
        args_fail(a, SKV_NO_MEMORY, no_memory);
    else
        a->depth++;
}

static void close_level(struct skv_args *a)
{
    uint32_t n = a->level[--a->depth].count;
    uint8_t *p = a->buf.p + a->level[a->depth].at;

    p[0] = (uint8_t)(n >> 24);
    p[1] = (uint8_t)(n >> 16);
    p[2] = (uint8_t)(n >> 8);
    p[3] = (uint8_t)n;
}

struct skv_args *skv_args_new(void)
{
    struct skv_args *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    wire_buf_init(&a->buf);
    open_level(a, true);
    return a;
}

void skv_args_free(struct skv_args *a)
{
    if (a == NULL)
        return;
    wire_buf_fini(&a->buf);
    free(a);
}

const unsigned char *args_bytes(struct skv_args *a, size_t *len, struct skv_error *err)
{
    if (a->failed == NULL && a->buf.failed)
        args_fail(a, SKV_NO_MEMORY, no_memory);
    if (a->failed == NULL && a->depth > 1)
        args_fail(a, SKV_BAD_REQUEST, "an array or a map of the arguments was not closed");
    if (a->failed != NULL) {
        skv_fail(err, a->code, "%s", a->failed);
        return NULL;
    }
    if (a->depth == 1)
        close_level(a);
    *len = a->buf.len;
    return a->buf.p;
}

static bool put_str(struct skv_args *a, const char *s, size_t len)
{
    if (len > UINT32_MAX)
        args_fail(a, SKV_TOO_LARGE, "a string of 4 GiB or more");
    else if (!scan_utf8_valid(s, len))
        args_fail(a, SKV_BAD_REQUEST, "a string that is not valid UTF-8");
    else
        wire_strn(&a->buf, s, len);
    return a->failed == NULL;
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
    return name == NULL || put_str(a, name, strlen(name));
}

void skv_arg_nil(struct skv_args *a, const char *name)
{
    if (begin_value(a, name))
        wire_nil(&a->buf);
}

void skv_arg_bool(struct skv_args *a, const char *name, bool v)
{
    if (begin_value(a, name))
        wire_bool(&a->buf, v);
}

void skv_arg_int(struct skv_args *a, const char *name, int64_t v)
{
    if (begin_value(a, name))
        wire_int(&a->buf, v);
}

void skv_arg_num(struct skv_args *a, const char *name, double v)
{
    if (begin_value(a, name))
        wire_double(&a->buf, v);
}

void skv_arg_strn(struct skv_args *a, const char *name, const char *s, size_t len)
{
    if (begin_value(a, name))
        put_str(a, s, len);
}

void skv_arg_str(struct skv_args *a, const char *name, const char *s)
{
    skv_arg_strn(a, name, s, strlen(s));
}

void skv_arg_tokens(struct skv_args *a, const char *name, const int32_t *tokens, size_t n)
{
    if (!begin_value(a, name))
        return;
    if (n > INT32_MAX)
        args_fail(a, SKV_TOO_LARGE, "more tokens than an array can hold");
    else
        wire_ints(&a->buf, tokens, (int)n);
}

void skv_arg_value(struct skv_args *a, const char *name, const struct skv_value *v)
{
    size_t len;
    const char *s;

    switch (skv_type(v)) {
    case SKV_NIL:
        skv_arg_nil(a, name);
        break;
    case SKV_BOOL:
        skv_arg_bool(a, name, skv_bool(v, false));
        break;
    case SKV_INT:
        skv_arg_int(a, name, skv_int(v, 0));
        break;
    case SKV_NUM:
        skv_arg_num(a, name, skv_num(v, 0));
        break;
    case SKV_STR:
        s = skv_str(v, &len);
        skv_arg_strn(a, name, s, len);
        break;
    case SKV_ARRAY:
        skv_arg_array(a, name);
        for (size_t i = 0; i < skv_len(v); i++)
            skv_arg_value(a, NULL, skv_at(v, i));
        skv_arg_end(a);
        break;
    case SKV_MAP:
        skv_arg_map(a, name);
        for (size_t i = 0; i < skv_len(v) && a != NULL; i++) {
            s = skv_str(skv_key(v, i), &len);
            a->level[a->depth - 1].count++;
            if (a->failed == NULL && put_str(a, s, len)) {
                a->level[a->depth - 1].map = false; /* the name is there already */
                a->level[a->depth - 1].count--;
                skv_arg_value(a, NULL, skv_at(v, i));
                a->level[a->depth - 1].map = true;
            }
        }
        skv_arg_end(a);
        break;
    default:
        if (a != NULL)
            args_fail(a, SKV_BAD_REQUEST, "a value of a type that requests don't have");
    }
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
