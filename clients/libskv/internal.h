/* internal.h - what libskv's files share. Names without skv_ are not exported. */
#ifndef SKVD_CLIENTS_LIBSKV_INTERNAL_H
#define SKVD_CLIENTS_LIBSKV_INTERNAL_H

#include "clients/libskv/skv.h"
#include "protocol/wire.h"

struct skv_reply {
    struct wire_msg msg;
    struct skv_error err;
    const struct skv_value *value, *detail; /* inside msg */
    bool failed, is_static;
    unsigned char bytes[];
};

const struct skv_value *value_of(const struct wire_value *v);

/* A reply that owns a copy of one complete response, scanned and parsed before; len 0: an empty one. Never NULL. */
struct skv_reply *reply_new(const unsigned char *frame, size_t len);
struct skv_reply *reply_failed(enum skv_code code, const char *msg);

#define ARGS_DEPTH 14 /* below the daemon's default of 16 levels, of which a request has two of its own */

struct skv_args {
    struct wire_buf buf;
    struct {
        size_t at;      /* of the count to be filled in */
        uint32_t count; /* values or pairs so far */
        bool map;
    } level[ARGS_DEPTH];
    int depth;
    const char *failed; /* the first failure, a sentence */
    enum skv_code code;
};

/* The map's bytes, complete; NULL with *err after a failure. */
const unsigned char *args_bytes(struct skv_args *a, size_t *len, struct skv_error *err);

#endif
