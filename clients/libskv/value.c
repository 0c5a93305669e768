/* value.c - reading answers. A struct skv_value is a struct wire_value under its public name. */
#include "config.h"

#include "clients/libskv/internal.h"

#include <stdlib.h>
#include <string.h>

static const struct wire_value *in(const struct skv_value *v)
{
    return (const struct wire_value *)v;
}

const struct skv_value *value_of(const struct wire_value *v)
{
    return (const struct skv_value *)v;
}

enum skv_type skv_type(const struct skv_value *v)
{
    static const enum skv_type types[] = {
        [WIRE_NIL] = SKV_NIL, [WIRE_BOOL] = SKV_BOOL, [WIRE_INT] = SKV_INT,     [WIRE_FLOAT] = SKV_NUM, [WIRE_STR] = SKV_STR,
        [WIRE_BIN] = SKV_BIN, [WIRE_ARRAY] = SKV_ARRAY, [WIRE_MAP] = SKV_MAP, [WIRE_EXT] = SKV_EXT,
    };
    return types[wire_type(in(v))];
}

size_t skv_len(const struct skv_value *v)
{
    const char *s;
    size_t n = 0;
    if (wire_get_str(in(v), &s, &n))
        return n;
    return wire_count(in(v));
}

const struct skv_value *skv_at(const struct skv_value *v, size_t i)
{
    if (i >= wire_count(in(v)))
        return NULL;
    return value_of(skv_type(v) == SKV_MAP ? wire_val(in(v), (uint32_t)i) : wire_at(in(v), (uint32_t)i));
}

const struct skv_value *skv_key(const struct skv_value *v, size_t i)
{
    return skv_type(v) == SKV_MAP && i < wire_count(in(v)) ? value_of(wire_key(in(v), (uint32_t)i)) : NULL;
}

const struct skv_value *skv_get(const struct skv_value *v, const char *name)
{
    return skv_type(v) == SKV_MAP ? value_of(wire_find(in(v), name)) : NULL;
}

bool skv_bool(const struct skv_value *v, bool otherwise)
{
    wire_get_bool(in(v), &otherwise);
    return otherwise;
}

int64_t skv_int(const struct skv_value *v, int64_t otherwise)
{
    uint64_t u;
    if (!wire_get_int(in(v), &otherwise) && wire_get_uint(in(v), &u))
        return INT64_MAX;
    return otherwise;
}

double skv_num(const struct skv_value *v, double otherwise)
{
    wire_get_double(in(v), &otherwise);
    return otherwise;
}

const char *skv_str(const struct skv_value *v, size_t *len)
{
    const char *s = "";
    size_t n = 0;
    if (!wire_get_str(in(v), &s, &n) || n == 0)
        s = "";
    if (len != NULL)
        *len = n;
    return s;
}

bool skv_str_is(const struct skv_value *v, const char *s)
{
    return wire_str_is(in(v), s);
}

/* ---- replies ---- */

/* When there is no memory for a reply there is still this one. */
static struct skv_reply no_memory_reply = {
    .err = { SKV_NO_MEMORY, 0, "no memory for the daemon's answer" }, .failed = true, .is_static = true
};

static void reply_set_error(struct skv_reply *r, const struct skv_value *v)
{
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

struct skv_reply *reply_new(const unsigned char *frame, size_t len)
{
    struct skv_reply *r = calloc(1, sizeof *r + len);
    struct skv_error err;

    if (r == NULL)
        return &no_memory_reply;
    if (len == 0)
        return r;
    memcpy(r->bytes, frame, len); /* the values refer to these */
    if (wire_parse(r->bytes, len, &r->msg, &err) < 0) {
        free(r);
        return &no_memory_reply; /* the frame was parsed before: nothing else can be wrong with it */
    }
    r->value = value_of(r->msg.result);
    if (r->msg.error != NULL)
        reply_set_error(r, value_of(r->msg.error));
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

void skv_reply_free(struct skv_reply *r)
{
    if (r == NULL || r->is_static)
        return;
    if (r->msg.tree != NULL)
        wire_msg_fini(&r->msg);
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
