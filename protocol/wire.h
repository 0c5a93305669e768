/* wire.h - MessagePack-RPC messages: writing them, and reading a complete frame.
 *
 * Writing: a struct wire_buf grows as it is written to and remembers the first failure (no memory, or a size above
 * its limit), so a writer checks once, at the end. Reading: wire_parse turns one frame that scan.h has passed into a
 * tree of values; the tree refers to the frame's bytes, which must stay until wire_msg_fini.
 *
 * Threads: none of this is shared.
 */
#ifndef SKVD_PROTOCOL_WIRE_H
#define SKVD_PROTOCOL_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol/error.h"

/* ---- writing --------------------------------------------------------------------------------------- */

struct wire_buf {
    uint8_t *p;
    size_t len, cap;
    bool failed; /* no memory: what is in p is not a whole message */
};

void wire_buf_init(struct wire_buf *b);
void wire_buf_fini(struct wire_buf *b);
void wire_buf_clear(struct wire_buf *b); /* empty again, failure forgotten, memory kept unless it is much */

void wire_nil(struct wire_buf *b);
void wire_bool(struct wire_buf *b, bool v);
void wire_int(struct wire_buf *b, int64_t v);
void wire_uint(struct wire_buf *b, uint64_t v);
void wire_double(struct wire_buf *b, double v); /* NaN and infinities become nil: no reader trips over them */
void wire_str(struct wire_buf *b, const char *s);
void wire_strn(struct wire_buf *b, const char *s, size_t n); /* must be UTF-8 */
void wire_array(struct wire_buf *b, uint32_t n);              /* n elements follow */
void wire_map(struct wire_buf *b, uint32_t n);                /* n pairs of key and value follow */

/* A key and its value. */
void wire_kv_bool(struct wire_buf *b, const char *key, bool v);
void wire_kv_int(struct wire_buf *b, const char *key, int64_t v);
void wire_kv_double(struct wire_buf *b, const char *key, double v);
void wire_kv_str(struct wire_buf *b, const char *key, const char *v);
void wire_kv_strn(struct wire_buf *b, const char *key, const char *v, size_t n);
void wire_ints(struct wire_buf *b, const int32_t *v, int n); /* an array of int */

/* The fixed beginnings; the rest of the message must follow. */
void wire_request(struct wire_buf *b, uint32_t msgid, const char *method);  /* params follow: see wire_params */
void wire_params(struct wire_buf *b, uint32_t n_args);                      /* [{n_args pairs follow}] */
void wire_response(struct wire_buf *b, uint32_t msgid);                     /* no error; the result follows */
void wire_response_error(struct wire_buf *b, uint32_t msgid, const struct skv_error *err); /* complete */
/* An error of which n_more pairs follow, and then a nil. */
void wire_response_error_more(struct wire_buf *b, uint32_t msgid, const struct skv_error *err, uint32_t n_more);
void wire_notify(struct wire_buf *b, const char *method); /* an array of params follows */
void wire_notify_error(struct wire_buf *b, const struct skv_error *err); /* complete: "error" [{code, message}] */

/* ---- reading --------------------------------------------------------------------------------------- */

enum wire_type {
    WIRE_NIL,
    WIRE_BOOL,
    WIRE_INT,
    WIRE_FLOAT,
    WIRE_STR,
    WIRE_BIN,
    WIRE_ARRAY,
    WIRE_MAP,
    WIRE_EXT
};

struct wire_value; /* part of a message; lives as long as it */

enum wire_type wire_type(const struct wire_value *v); /* NULL: WIRE_NIL */
const char *wire_type_name(enum wire_type t);
bool wire_is_map(const struct wire_value *v);

/* False, and *out untouched, where the value is of another type or does not fit. A float without a fraction is an
 * integer and an integer is a float: languages with one kind of number send either. */
bool wire_get_bool(const struct wire_value *v, bool *out);
bool wire_get_int(const struct wire_value *v, int64_t *out);
bool wire_get_uint(const struct wire_value *v, uint64_t *out);
bool wire_get_double(const struct wire_value *v, double *out);
bool wire_get_str(const struct wire_value *v, const char **s, size_t *n); /* not NUL-terminated */

uint32_t wire_count(const struct wire_value *v); /* elements or pairs; 0 for anything else */
const struct wire_value *wire_at(const struct wire_value *array, uint32_t i);
const struct wire_value *wire_key(const struct wire_value *map, uint32_t i);
const struct wire_value *wire_val(const struct wire_value *map, uint32_t i);
const struct wire_value *wire_find(const struct wire_value *map, const char *key); /* NULL: not there */
bool wire_str_is(const struct wire_value *v, const char *s);

enum wire_kind { WIRE_REQUEST = 0, WIRE_RESPONSE = 1, WIRE_NOTIFICATION = 2 };

struct wire_msg {
    enum wire_kind kind;
    uint32_t msgid;     /* requests and responses */
    const char *method; /* requests and notifications; not NUL-terminated */
    size_t method_len;
    const struct wire_value *params;         /* requests and notifications: an array */
    const struct wire_value *error, *result; /* responses; error NULL: none */
    void *tree;
};

/* Read one frame. -1 with BAD_REQUEST: not a message of MessagePack-RPC, NO_MEMORY. The frame must have passed the scan. */
int wire_parse(const uint8_t *frame, size_t n, struct wire_msg *out, struct skv_error *err);
void wire_msg_fini(struct wire_msg *m);

#endif
