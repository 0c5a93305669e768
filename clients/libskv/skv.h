/* skv.h - libskv: talk to skvd, the local language-model daemon, from C.
 *
 * One `struct skv` is one connection. Any number of requests may be in flight on it. Two ways to use it:
 *
 * Blocking: skv_connect, then skv_call (or skv_generate, skv_tokenize, ...); each returns when its answer is there.
 *
 * Event-driven: start requests with skv_start and give the connection to your own loop: poll skv_fd() for
 * reading while skv_want_read() and for writing while skv_want_write(), and call skv_dispatch() when it is ready.
 * Callbacks run inside skv_dispatch (and inside the blocking calls), never elsewhere and never in another thread.
 *
 * Threads: a connection belongs to one thread at a time; different connections are independent.
 * From a callback you may start, cancel and read; you may not block (skv_call, skv_wait), dispatch or close.
 *
 * Errors: a function that fails returns -1 or NULL and fills *err when err is not NULL: a code (the wire's codes,
 * protocol/error.h) and a sentence for people. Nothing here prints, exits, or raises SIGPIPE.
 *
 * What a daemon sends is bounded before it is believed: frame size, nesting and the number of values.
 */
#ifndef SKV_H
#define SKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol/error.h"

#ifdef __cplusplus
extern "C" {
#endif

struct skv;       /* a connection */
struct skv_args;  /* the arguments of a request while they are put together */
struct skv_value; /* a value inside an answer; belongs to what it came from */
struct skv_reply; /* an answer: a result, or an error */

/* ---- connections ------------------------------------------------------------------------------------- */

/* The socket that is used when a program names none: $SKVD_SOCKET, else /run/skvd.sock for root and
 * $XDG_RUNTIME_DIR/skvd.sock for others (/run/user/UID/skvd.sock without that variable). Writes at most size bytes with
 * the NUL; -1 when it does not fit. */
int skv_default_path(char *buf, size_t size);

/* Connect to the daemon at path (NULL: skv_default_path). NULL with SKV_NO_DAEMON when nobody answers there; the message
 * names the path. */
struct skv *skv_connect(const char *path, struct skv_error *err);

/* Use a connected stream socket. The descriptor is taken over: skv_close closes it, and so does a failure. */
struct skv *skv_attach(int take_fd, struct skv_error *err);

/* Every request still open ends with SKV_CANCELLED (its `done` is called), then the connection is freed. NULL is fine. */
void skv_close(struct skv *c);

/* Blocking calls give up with SKV_IO when the daemon sends nothing for so long. 0, the default: wait for ever. */
void skv_set_timeout(struct skv *c, int ms);

/* Largest frame taken from the daemon, in bytes (default 64 MiB). A larger one ends the connection. */
void skv_set_frame_limit(struct skv *c, size_t bytes);

/* ---- event-driven use -------------------------------------------------------------------------------- */

int skv_fd(const struct skv *c);
bool skv_want_read(const struct skv *c);  /* false once the connection has failed */
bool skv_want_write(const struct skv *c); /* bytes are waiting for room in the socket */

/* Read and write what can be without waiting and run callbacks. 0: go on; -1: the connection is over (every open
 * request has been ended with the same error); what is left is skv_close. */
int skv_dispatch(struct skv *c, struct skv_error *err);

/* Wait until the socket is ready, or timeout_ms (-1: no limit), then dispatch. 1: dispatched; 0: time is up or a signal
 * came; -1: the connection is over. */
int skv_wait(struct skv *c, int timeout_ms, struct skv_error *err);

/* ---- requests ------------------------------------------------------------------------------------------ */

/* What is told about a request. Both may be NULL. */
struct skv_handler {
    /* A notification that belongs to this request: method "token" (v: {i, token, text, ...}) or "progress". v lives
     * until the callback returns. */
    void (*note)(struct skv *c, int64_t msgid, const char *method, const struct skv_value *v, void *arg);
    /* Exactly once, last. The reply is yours: skv_reply_free. */
    void (*done)(struct skv *c, int64_t msgid, struct skv_reply *take_reply, void *arg);
};

/* Start a request. args (NULL: none) is taken over, also on failure. Returns its msgid (>= 0), or -1: then `done` is
 * not called. The handler is copied. */
int64_t skv_start(struct skv *c, const char *method, struct skv_args *take_args, const struct skv_handler *h, void *arg,
                  struct skv_error *err);

/* Ask the daemon to end a request of this connection. The request itself still ends through its `done`, usually
 * with SKV_CANCELLED and what there was until then. */
int skv_cancel(struct skv *c, int64_t msgid, struct skv_error *err);

/* Requests that have not ended. */
size_t skv_in_flight(const struct skv *c);

/* Notifications that belong to no request ("event", after `subscribe`; "error", before the daemon hangs up). */
void skv_on_event(struct skv *c, void (*fn)(struct skv *c, const char *method, const struct skv_value *v, void *arg), void *arg);

/* Blocking: send a request and wait for its answer. args is taken over. 0: *reply is a result; free it. -1: *err says
 * why; when the daemon refused or ended it, *reply is set too (an error may carry fields, such as the text until
 * then), else NULL. reply may be NULL. */
int skv_call(struct skv *c, const char *method, struct skv_args *take_args, struct skv_reply **reply, struct skv_error *err);

/* Blocking generate: each piece of text goes to on_text (valid UTF-8, not NUL-terminated; NULL: none) as it comes.
 * A false from it cancels the request. The rest as skv_call. */
int skv_generate(struct skv *c, struct skv_args *take_args, bool (*on_text)(const char *s, size_t len, void *arg), void *arg,
                 struct skv_reply **reply, struct skv_error *err);

/* Blocking: text to tokens. special: parse control tokens such as <|im_start|>; bos: put the model's first.
 * *tokens is malloc'd. Returns their number, or -1. */
long skv_tokenize(struct skv *c, const char *text, size_t len, bool special, bool bos, int32_t **tokens, struct skv_error *err);

/* Blocking: tokens to text, malloc'd and NUL-terminated (len, if not NULL, counts without it). */
char *skv_detokenize(struct skv *c, const int32_t *tokens, size_t n, size_t *len, struct skv_error *err);

/* ---- arguments ------------------------------------------------------------------------------------------ */

/* A map of named arguments. name is NULL inside an array. Failures (memory, wrong nesting, a string that is no UTF-8)
 * are kept and come out of the call that sends it, so that a chain needs one check. NULL in: ignored. */
struct skv_args *skv_args_new(void);
void skv_args_free(struct skv_args *a);
void skv_arg_nil(struct skv_args *a, const char *name);
void skv_arg_bool(struct skv_args *a, const char *name, bool v);
void skv_arg_int(struct skv_args *a, const char *name, int64_t v);
void skv_arg_num(struct skv_args *a, const char *name, double v);
void skv_arg_str(struct skv_args *a, const char *name, const char *s);
void skv_arg_strn(struct skv_args *a, const char *name, const char *s, size_t len);
void skv_arg_tokens(struct skv_args *a, const char *name, const int32_t *tokens, size_t n);
void skv_arg_value(struct skv_args *a, const char *name, const struct skv_value *v); /* a copy */
void skv_arg_array(struct skv_args *a, const char *name); /* open an array or a map ... */
void skv_arg_map(struct skv_args *a, const char *name);
void skv_arg_end(struct skv_args *a); /* ... and close it */

/* ---- answers -------------------------------------------------------------------------------------------- */

void skv_reply_free(struct skv_reply *r);
/* NULL for a result; else why the request ended. */
const struct skv_error *skv_reply_error(const struct skv_reply *r);
/* The result (NULL for an error without one). */
const struct skv_value *skv_reply_value(const struct skv_reply *r);
/* The error's map {code, message, ...} as it was sent (NULL for a result). */
const struct skv_value *skv_reply_detail(const struct skv_reply *r);

enum skv_type { SKV_NIL = 0, SKV_BOOL, SKV_INT, SKV_NUM, SKV_STR, SKV_BIN, SKV_ARRAY, SKV_MAP, SKV_EXT };

/* All take NULL as nil, so that look-ups chain: skv_int(skv_get(skv_get(v, "timing"), "total_ms"), 0). */
enum skv_type skv_type(const struct skv_value *v);
size_t skv_len(const struct skv_value *v);                            /* elements, pairs or bytes; else 0 */
const struct skv_value *skv_at(const struct skv_value *v, size_t i);  /* array element, or value of a map's pair */
const struct skv_value *skv_key(const struct skv_value *v, size_t i); /* key of a map's pair */
const struct skv_value *skv_get(const struct skv_value *v, const char *name); /* value of a key; NULL: not there */
bool skv_bool(const struct skv_value *v, bool otherwise);
int64_t skv_int(const struct skv_value *v, int64_t otherwise); /* a number without a fraction; unsigned ones are capped */
double skv_num(const struct skv_value *v, double otherwise);
/* Bytes of a string, not NUL-terminated; "" with *len 0 when it is none. */
const char *skv_str(const struct skv_value *v, size_t *len);
/* Is it the string s? */
bool skv_str_is(const struct skv_value *v, const char *s);

#ifdef __cplusplus
}
#endif
#endif
