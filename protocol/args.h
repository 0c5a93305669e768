/* args.h - the arguments of a request, checked and in C types.
 *
 * One struct serves all methods, as engine_request does; what a method does not take keeps its default. Everything that
 * is allocated belongs to the struct (args_fini) until its pointer is taken over and set to NULL.
 */
#ifndef SKVD_PROTOCOL_ARGS_H
#define SKVD_PROTOCOL_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol/error.h"
#include "protocol/methods.h"
#include "protocol/wire.h"

struct args_str {
    char *s; /* NULL: not given; NUL-terminated beyond len, and may hold NULs within */
    size_t len;
};

struct args_texts {
    struct args_str *v;
    int n;
};

struct args_tokens {
    int32_t *v; /* NULL with n -1: not given */
    int n;
};

/* Lists one after the other: the i-th is v[from[i]] up to v[from[i + 1]]. */
struct args_token_lists {
    int32_t *v;
    int *from; /* [n + 1]; NULL: not given */
    int n;
};

struct args_message {
    struct args_str role, content;
};

struct args_messages {
    struct args_message *v;
    int n; /* -1: not given */
};

struct args_range {
    int32_t from, to;
};

struct args_ranges {
    struct args_range *v;
    int n;
};

struct args_kv {
    char *policy, *dtype;                                        /* NULL: not given */
    int budget, sink, recent, alpha, pool, pool_kind, full_layers; /* -1: not given */
};

struct args_setting {
    char *name;
    char *value; /* as text: what the config file would have */
};

struct args {
    /* generate, score */
    struct args_str prompt;
    struct args_messages messages;
    struct args_tokens tokens;
    bool stream, progress, ignore_eos, raw, pin_system;
    int max_tokens, top_k, logprobs, priority;
    float temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    bool seed_set;
    struct args_texts stop;
    char *session;
    int64_t deadline_ms; /* 0: none */
    struct args_kv kv;
    struct args_ranges pin;
    struct args_str cont_text;
    struct args_tokens cont_tokens;
    bool refeed;
    struct args_token_lists candidates;
    /* the small ones */
    struct args_str text;
    bool special, bos, add_generation_prompt;
    uint64_t msgid, sequence;
    bool msgid_set, sequence_set;
    int64_t grace_ms; /* -1: not given */
    char *client, *version;
    struct args_texts topics;
    struct args_setting *settings;
    int n_settings;
};

/* Decode params (an array of at most one map) for a method. -1 with BAD_REQUEST: the message names the argument and says
 * what is allowed; NO_MEMORY. *out is always initialised and args_fini is always right. */
int args_decode(const struct method *m, const struct wire_value *params, struct args *out, struct skv_error *err);
void args_fini(struct args *a);

#endif
