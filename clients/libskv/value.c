/* value.c - reading answers. A struct skv_value is a msgpack_object under another name, so that programs need no
 * MessagePack headers. */
#include "config.h"

#include "clients/libskv/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const msgpack_object *obj(const struct skv_value *v)
{
    return (const msgpack_object *)v;
}

static const struct skv_value *val(const msgpack_object *o)
{
    return (const struct skv_value *)o;
}

enum skv_type skv_type(const struct skv_value *v)
{
    if (v == NULL)
        return SKV_NIL;
    switch (obj(v)->type) {
    case MSGPACK_OBJECT_NIL:
        return SKV_NIL;
    case MSGPACK_OBJECT_BOOLEAN:
        return SKV_BOOL;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return SKV_INT;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return SKV_NUM;
    case MSGPACK_OBJECT_STR:
        return SKV_STR;
    case MSGPACK_OBJECT_BIN:
        return SKV_BIN;
    case MSGPACK_OBJECT_ARRAY:
        return SKV_ARRAY;
    case MSGPACK_OBJECT_MAP:
        return SKV_MAP;
    case MSGPACK_OBJECT_EXT:
        break;
    }
    return SKV_EXT;
}

size_t skv_len(const struct skv_value *v)
{
    switch (skv_type(v)) {
    case SKV_STR:
        return obj(v)->via.str.size;
    case SKV_BIN:
        return obj(v)->via.bin.size;
    case SKV_ARRAY:
        return obj(v)->via.array.size;
    case SKV_MAP:
        return obj(v)->via.map.size;
    default:
        return 0;
    }
}

const struct skv_value *skv_at(const struct skv_value *v, size_t i)
{
    if (i >= skv_len(v))
        return NULL;
    if (skv_type(v) == SKV_ARRAY)
        return val(&obj(v)->via.array.ptr[i]);
    if (skv_type(v) == SKV_MAP)
        return val(&obj(v)->via.map.ptr[i].val);
    return NULL;
}

const struct skv_value *skv_key(const struct skv_value *v, size_t i)
{
    if (skv_type(v) != SKV_MAP || i >= skv_len(v))
        return NULL;
    return val(&obj(v)->via.map.ptr[i].key);
}

const struct skv_value *skv_get(const struct skv_value *v, const char *name)
{
    size_t n = skv_type(v) == SKV_MAP ? skv_len(v) : 0;
    for (size_t i = 0; i < n; i++)
        if (skv_str_is(skv_key(v, i), name))
            return skv_at(v, i);
    return NULL;
}

bool skv_bool(const struct skv_value *v, bool otherwise)
{
    return skv_type(v) == SKV_BOOL ? obj(v)->via.boolean : otherwise;
}

int64_t skv_int(const struct skv_value *v, int64_t otherwise)
{
    double d;
    switch (v == NULL ? MSGPACK_OBJECT_NIL : obj(v)->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return obj(v)->via.u64 > INT64_MAX ? INT64_MAX : (int64_t)obj(v)->via.u64;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return obj(v)->via.i64;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        d = obj(v)->via.f64;
        if (d == floor(d) && fabs(d) < 9e15)
            return (int64_t)d;
        return otherwise;
    default:
        return otherwise;
    }
}

double skv_num(const struct skv_value *v, double otherwise)
{
    switch (v == NULL ? MSGPACK_OBJECT_NIL : obj(v)->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        return (double)obj(v)->via.u64;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return (double)obj(v)->via.i64;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return obj(v)->via.f64;
    default:
        return otherwise;
    }
}

const char *skv_str(const struct skv_value *v, size_t *len)
{
    size_t n = skv_type(v) == SKV_STR ? skv_len(v) : 0;
    if (len != NULL)
        *len = n;
    return n > 0 ? obj(v)->via.str.ptr : "";
}

bool skv_str_is(const struct skv_value *v, const char *s)
{
    size_t len, want = strlen(s);
    const char *have = skv_str(v, &len);
    return skv_type(v) == SKV_STR && len == want && memcmp(have, s, len) == 0;
}

/* ---- replies ---- */

/* When there is no memory for a reply there is still this one. */
static struct skv_reply no_memory_reply = {
    .err = { SKV_NO_MEMORY, 0, "no memory for the daemon's answer" }, .failed = true, .is_static = true
};

struct skv_reply *reply_new(const unsigned char *frame, size_t len)
{
    struct skv_reply *r = calloc(1, sizeof *r + len);
    size_t off = 0;

    if (r == NULL)
        return &no_memory_reply;
    msgpack_unpacked_init(&r->up);
    if (len == 0)
        return r;
    memcpy(r->bytes, frame, len); /* strings of the unpacked value point in here */
    if (msgpack_unpack_next(&r->up, (const char *)r->bytes, len, &off) != MSGPACK_UNPACK_SUCCESS) {
        skv_reply_free(r);
        return &no_memory_reply; /* the scan has said that the bytes are good */
    }
    return r;
}

struct skv_reply *reply_failed(enum skv_code code, const char *msg)
{
    struct skv_reply *r = reply_new(NULL, 0);
    if (!r->is_static) {
        r->failed = true;
        skv_fail(&r->err, code, "%s", msg);
    }
    return r;
}

void reply_set_error(struct skv_reply *r, const msgpack_object *e)
{
    const struct skv_value *v = val(e);
    char code[32];
    size_t len;
    const char *s = skv_str(skv_get(v, "code"), &len);

    r->failed = true;
    r->detail = v;
    if (len >= sizeof code)
        len = sizeof code - 1;
    memcpy(code, s, len);
    code[len] = '\0';
    s = skv_str(skv_get(v, "message"), &len);
    if (skv_type(v) == SKV_STR) /* not ours, but what other MessagePack-RPC servers send */
        s = skv_str(v, &len);
    skv_fail(&r->err, skv_code_from_name(code), "%.*s", (int)(len < SKV_ERROR_MSG ? len : SKV_ERROR_MSG), s);
    r->err.retry_after_ms = (int)skv_int(skv_get(v, "retry_after_ms"), 0);
}

void skv_reply_free(struct skv_reply *r)
{
    if (r == NULL || r->is_static)
        return;
    msgpack_unpacked_destroy(&r->up);
    free(r);
}

const struct skv_error *skv_reply_error(const struct skv_reply *r)
{
    return r != NULL && r->failed ? &r->err : NULL;
}

const struct skv_value *skv_reply_value(const struct skv_reply *r)
{
    return r != NULL ? r->value : NULL;
}

const struct skv_value *skv_reply_detail(const struct skv_reply *r)
{
    return r != NULL ? r->detail : NULL;
}
