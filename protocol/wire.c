#include "protocol/wire.h"

#include <math.h>
#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#define KEEP_BYTES (1 << 20) /* a cleared buffer holds no more: one large answer is not paid for ever after */

/* ---- writing --------------------------------------------------------------------------------------- */

void wire_buf_init(struct wire_buf *b)
{
    memset(b, 0, sizeof *b);
}

void wire_buf_fini(struct wire_buf *b)
{
    free(b->p);
    wire_buf_init(b);
}

void wire_buf_clear(struct wire_buf *b)
{
    if (b->cap > KEEP_BYTES)
        wire_buf_fini(b);
    b->len = 0;
    b->failed = false;
}

/* msgpack-c's writer callback. */
static int buf_put(void *arg, const char *p, size_t n)
{
    struct wire_buf *b = arg;

    if (b->failed)
        return -1;
    if (n > b->cap - b->len) {
        size_t cap = b->cap != 0 ? b->cap : 256;
        uint8_t *q;

        while (cap - b->len < n) {
            if (cap > SIZE_MAX / 2) {
                b->failed = true;
                return -1;
            }
            cap *= 2;
        }
        q = realloc(b->p, cap);
        if (q == NULL) {
            b->failed = true;
            return -1;
        }
        b->p = q;
        b->cap = cap;
    }
    memcpy(b->p + b->len, p, n);
    b->len += n;
    return 0;
}

static msgpack_packer packer(struct wire_buf *b)
{
    msgpack_packer pk;

    msgpack_packer_init(&pk, b, buf_put);
    return pk;
}

void wire_nil(struct wire_buf *b)
{
    msgpack_packer pk = packer(b);

    msgpack_pack_nil(&pk);
}

void wire_bool(struct wire_buf *b, bool v)
{
    msgpack_packer pk = packer(b);

    if (v)
        msgpack_pack_true(&pk);
    else
        msgpack_pack_false(&pk);
}

void wire_int(struct wire_buf *b, int64_t v)
{
    msgpack_packer pk = packer(b);

    msgpack_pack_int64(&pk, v);
}

void wire_uint(struct wire_buf *b, uint64_t v)
{
    msgpack_packer pk = packer(b);

    msgpack_pack_uint64(&pk, v);
}

void wire_double(struct wire_buf *b, double v)
{
    msgpack_packer pk = packer(b);

    if (isfinite(v))
        msgpack_pack_double(&pk, v);
    else
        msgpack_pack_nil(&pk);
}

void wire_strn(struct wire_buf *b, const char *s, size_t n)
{
    msgpack_packer pk = packer(b);

    if (n > UINT32_MAX) {
        b->failed = true;
        return;
    }
    msgpack_pack_str(&pk, n);
    msgpack_pack_str_body(&pk, n > 0 ? s : "", n);
}

void wire_str(struct wire_buf *b, const char *s)
{
    wire_strn(b, s, strlen(s));
}

void wire_array(struct wire_buf *b, uint32_t n)
{
    msgpack_packer pk = packer(b);

    msgpack_pack_array(&pk, n);
}

void wire_map(struct wire_buf *b, uint32_t n)
{
    msgpack_packer pk = packer(b);

    msgpack_pack_map(&pk, n);
}

void wire_kv_bool(struct wire_buf *b, const char *key, bool v)
{
    wire_str(b, key);
    wire_bool(b, v);
}

void wire_kv_int(struct wire_buf *b, const char *key, int64_t v)
{
    wire_str(b, key);
    wire_int(b, v);
}

void wire_kv_double(struct wire_buf *b, const char *key, double v)
{
    wire_str(b, key);
    wire_double(b, v);
}

void wire_kv_str(struct wire_buf *b, const char *key, const char *v)
{
    wire_str(b, key);
    wire_str(b, v);
}

void wire_kv_strn(struct wire_buf *b, const char *key, const char *v, size_t n)
{
    wire_str(b, key);
    wire_strn(b, v, n);
}

struct block {
    size_t len;
    char p[4096];
};

static int block_put(void *arg, const char *p, size_t n)
{
    struct block *k = arg;

    memcpy(k->p + k->len, p, n);
    k->len += n;
    return 0;
}

/* Many at a time: an answer of millions of tokens is written while everybody else waits for the loop. */
void wire_ints(struct wire_buf *b, const int32_t *v, int n)
{
    struct block k = { .len = 0 };
    msgpack_packer pk;

    wire_array(b, n > 0 ? (uint32_t)n : 0);
    msgpack_packer_init(&pk, &k, block_put);
    for (int i = 0; i < n; i++) {
        msgpack_pack_int32(&pk, v[i]);
        if (k.len > sizeof k.p - 5 || i == n - 1) { /* an int32 takes 5 bytes at most */
            buf_put(b, k.p, k.len);
            k.len = 0;
        }
    }
}

void wire_request(struct wire_buf *b, uint32_t msgid, const char *method)
{
    wire_array(b, 4);
    wire_int(b, WIRE_REQUEST);
    wire_uint(b, msgid);
    wire_str(b, method);
}

void wire_params(struct wire_buf *b, uint32_t n_args)
{
    wire_array(b, 1);
    wire_map(b, n_args);
}

void wire_response(struct wire_buf *b, uint32_t msgid)
{
    wire_array(b, 4);
    wire_int(b, WIRE_RESPONSE);
    wire_uint(b, msgid);
    wire_nil(b);
}

static void error_map(struct wire_buf *b, const struct skv_error *err, uint32_t n_more)
{
    bool retry = err->code == SKV_OVERLOADED;

    wire_map(b, 2 + (retry ? 1 : 0) + n_more);
    wire_kv_str(b, "code", skv_code_name(err->code));
    wire_kv_str(b, "message", err->msg);
    if (retry)
        wire_kv_int(b, "retry_after_ms", err->retry_after_ms);
}

void wire_response_error_more(struct wire_buf *b, uint32_t msgid, const struct skv_error *err, uint32_t n_more)
{
    wire_array(b, 4);
    wire_int(b, WIRE_RESPONSE);
    wire_uint(b, msgid);
    error_map(b, err, n_more);
}

void wire_response_error(struct wire_buf *b, uint32_t msgid, const struct skv_error *err)
{
    wire_response_error_more(b, msgid, err, 0);
    wire_nil(b);
}

void wire_notify(struct wire_buf *b, const char *method)
{
    wire_array(b, 3);
    wire_int(b, WIRE_NOTIFICATION);
    wire_str(b, method);
}

void wire_notify_error(struct wire_buf *b, const struct skv_error *err)
{
    wire_notify(b, "error");
    wire_array(b, 1);
    error_map(b, err, 0);
}

/* ---- reading --------------------------------------------------------------------------------------- */

/* A wire_value is msgpack-c's object under a name of ours, so that its header stays in this folder. */
static const msgpack_object *obj(const struct wire_value *v)
{
    return (const msgpack_object *)(const void *)v;
}

static const struct wire_value *val(const msgpack_object *o)
{
    return (const struct wire_value *)(const void *)o;
}

enum wire_type wire_type(const struct wire_value *v)
{
    if (v == NULL)
        return WIRE_NIL;
    switch (obj(v)->type) {
    case MSGPACK_OBJECT_BOOLEAN:
        return WIRE_BOOL;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return WIRE_INT;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return WIRE_FLOAT;
    case MSGPACK_OBJECT_STR:
        return WIRE_STR;
    case MSGPACK_OBJECT_BIN:
        return WIRE_BIN;
    case MSGPACK_OBJECT_ARRAY:
        return WIRE_ARRAY;
    case MSGPACK_OBJECT_MAP:
        return WIRE_MAP;
    case MSGPACK_OBJECT_EXT:
        return WIRE_EXT;
    default:
        return WIRE_NIL;
    }
}

const char *wire_type_name(enum wire_type t)
{
    static const char *const names[] = {
        [WIRE_NIL] = "nil", [WIRE_BOOL] = "a boolean", [WIRE_INT] = "an integer", [WIRE_FLOAT] = "a float",
        [WIRE_STR] = "a string", [WIRE_BIN] = "binary data", [WIRE_ARRAY] = "an array", [WIRE_MAP] = "a map",
        [WIRE_EXT] = "an extension type",
    };

    return names[t];
}

bool wire_is_map(const struct wire_value *v)
{
    return wire_type(v) == WIRE_MAP;
}

bool wire_get_bool(const struct wire_value *v, bool *out)
{
    if (wire_type(v) != WIRE_BOOL)
        return false;
    *out = obj(v)->via.boolean;
    return true;
}

bool wire_get_int(const struct wire_value *v, int64_t *out)
{
    const msgpack_object *o = obj(v);

    if (wire_type(v) == WIRE_FLOAT) {
        double f = o->via.f64;

        if (!(f >= -9007199254740992.0 && f <= 9007199254740992.0) || f != floor(f))
            return false;
        *out = (int64_t)f;
        return true;
    }
    if (wire_type(v) != WIRE_INT)
        return false;
    if (o->type == MSGPACK_OBJECT_POSITIVE_INTEGER && o->via.u64 > INT64_MAX)
        return false;
    *out = o->via.i64;
    return true;
}

bool wire_get_uint(const struct wire_value *v, uint64_t *out)
{
    int64_t i;

    if (v != NULL && obj(v)->type == MSGPACK_OBJECT_POSITIVE_INTEGER) {
        *out = obj(v)->via.u64;
        return true;
    }
    if (!wire_get_int(v, &i) || i < 0)
        return false;
    *out = (uint64_t)i;
    return true;
}

bool wire_get_double(const struct wire_value *v, double *out)
{
    const msgpack_object *o = obj(v);

    if (wire_type(v) == WIRE_FLOAT)
        *out = o->via.f64;
    else if (wire_type(v) != WIRE_INT)
        return false;
    else if (o->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        *out = (double)o->via.u64;
    else
        *out = (double)o->via.i64;
    return true;
}

bool wire_get_str(const struct wire_value *v, const char **s, size_t *n)
{
    if (wire_type(v) != WIRE_STR)
        return false;
    *s = obj(v)->via.str.ptr;
    *n = obj(v)->via.str.size;
    return true;
}

uint32_t wire_count(const struct wire_value *v)
{
    switch (wire_type(v)) {
    case WIRE_ARRAY:
        return obj(v)->via.array.size;
    case WIRE_MAP:
        return obj(v)->via.map.size;
    default:
        return 0;
    }
}

const struct wire_value *wire_at(const struct wire_value *array, uint32_t i)
{
    if (wire_type(array) != WIRE_ARRAY || i >= obj(array)->via.array.size)
        return NULL;
    return val(&obj(array)->via.array.ptr[i]);
}

const struct wire_value *wire_key(const struct wire_value *map, uint32_t i)
{
    if (wire_type(map) != WIRE_MAP || i >= obj(map)->via.map.size)
        return NULL;
    return val(&obj(map)->via.map.ptr[i].key);
}

const struct wire_value *wire_val(const struct wire_value *map, uint32_t i)
{
    if (wire_type(map) != WIRE_MAP || i >= obj(map)->via.map.size)
        return NULL;
    return val(&obj(map)->via.map.ptr[i].val);
}

bool wire_str_is(const struct wire_value *v, const char *s)
{
    const char *p;
    size_t n;

    return wire_get_str(v, &p, &n) && n == strlen(s) && memcmp(p, s, n) == 0;
}

const struct wire_value *wire_find(const struct wire_value *map, const char *key)
{
    uint32_t n = wire_type(map) == WIRE_MAP ? wire_count(map) : 0;

    for (uint32_t i = 0; i < n; i++)
        if (wire_str_is(wire_key(map, i), key))
            return wire_val(map, i);
    return NULL;
}

static int bad_shape(struct skv_error *err, const char *what)
{
    return skv_fail(err, SKV_BAD_REQUEST, "the stream is not MessagePack-RPC: %s", what);
}

static int parse_shape(const struct wire_value *root, struct wire_msg *m, struct skv_error *err)
{
    uint32_t n = wire_count(root);
    int64_t kind;
    uint64_t msgid = 0;
    const struct wire_value *method;

    if (wire_type(root) != WIRE_ARRAY || !wire_get_int(wire_at(root, 0), &kind) || kind < 0 || kind > 2)
        return bad_shape(err, "a message begins with 0 (request), 1 (response) or 2 (notification)");
    m->kind = (enum wire_kind)kind;
    if (n != (m->kind == WIRE_NOTIFICATION ? 3u : 4u))
        return bad_shape(err, "requests and responses have 4 elements, notifications 3");
    if (m->kind != WIRE_NOTIFICATION) {
        if (!wire_get_uint(wire_at(root, 1), &msgid) || msgid > UINT32_MAX)
            return bad_shape(err, "a msgid is an integer from 0 to 4294967295");
        m->msgid = (uint32_t)msgid;
    }
    if (m->kind == WIRE_RESPONSE) {
        m->error = wire_at(root, 2);
        if (wire_type(m->error) == WIRE_NIL)
            m->error = NULL;
        m->result = wire_at(root, 3);
        return 0;
    }
    method = wire_at(root, n - 2);
    if (!wire_get_str(method, &m->method, &m->method_len))
        return bad_shape(err, "a method is a string");
    m->params = wire_at(root, n - 1);
    if (wire_type(m->params) != WIRE_ARRAY)
        return bad_shape(err, "params is an array, [{arguments by name}] or []");
    return 0;
}

int wire_parse(const uint8_t *frame, size_t n, struct wire_msg *out, struct skv_error *err)
{
    msgpack_unpacked *u = malloc(sizeof *u);
    size_t off = 0;
    msgpack_unpack_return r;

    memset(out, 0, sizeof *out);
    if (u == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a message of %zu bytes", n);
    msgpack_unpacked_init(u);
    r = msgpack_unpack_next(u, (const char *)frame, n, &off);
    out->tree = u;
    if (r == MSGPACK_UNPACK_NOMEM_ERROR) {
        wire_msg_fini(out);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a message of %zu bytes", n);
    }
    if (r != MSGPACK_UNPACK_SUCCESS || off != n) {
        wire_msg_fini(out);
        return bad_shape(err, "the frame is not one MessagePack value");
    }
    if (parse_shape(val(&u->data), out, err) != 0) {
        wire_msg_fini(out);
        return -1;
    }
    return 0;
}

void wire_msg_fini(struct wire_msg *m)
{
    msgpack_unpacked *u = m->tree;

    if (u != NULL) {
        msgpack_unpacked_destroy(u);
        free(u);
    }
    memset(m, 0, sizeof *m);
}
