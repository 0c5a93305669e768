/* internal.h - what libskv's files share. Names without skv_ are not exported. */
#ifndef SKVD_CLIENTS_LIBSKV_INTERNAL_H
#define SKVD_CLIENTS_LIBSKV_INTERNAL_H

#include <msgpack.h>

#include "clients/libskv/skv.h"

struct skv_reply {
    msgpack_unpacked up;
    struct skv_error err;
    const struct skv_value *value, *detail; /* inside up */
    bool failed, is_static;
    unsigned char bytes[];
};

/* A reply that owns a copy of one complete, scanned frame; len 0: an empty one. Never NULL. */
struct skv_reply *reply_new(const unsigned char *frame, size_t len);
struct skv_reply *reply_failed(enum skv_code code, const char *msg);
/* The error element of a response, inside r->up. */
void reply_set_error(struct skv_reply *r, const msgpack_object *e);

struct skv_args {
    msgpack_sbuffer buf;
    msgpack_packer pk;
    struct {
        size_t at;      /* of the count to be patched */
        uint32_t count; /* values or pairs so far */
        bool map;
    } level[16];
    int depth;
    const char *failed; /* the first failure, a sentence */
    enum skv_code code;
};

/* The map's bytes, complete; NULL with *err after a failure. */
const char *args_bytes(struct skv_args *a, size_t *len, struct skv_error *err);

/* Is s well-formed UTF-8 (no surrogates, no overlong forms)? */
bool text_is_utf8(const char *s, size_t len);

#endif
