/* methods.h - every method of the protocol and every argument of each: one row a field.
 *
 * The rows are what decodes a request (args.h), what `skvctl` and the tests read to know which arguments exist, and what
 * a test holds skvd-protocol(7) against.
 */
#ifndef SKVD_PROTOCOL_METHODS_H
#define SKVD_PROTOCOL_METHODS_H

#include <stdbool.h>
#include <stddef.h>

enum method_id {
    METHOD_HELLO,
    METHOD_GENERATE,
    METHOD_SCORE,
    METHOD_CANCEL,
    METHOD_TOKENIZE,
    METHOD_DETOKENIZE,
    METHOD_APPLY_TEMPLATE,
    METHOD_STATUS,
    METHOD_SEQUENCES,
    METHOD_KV,
    METHOD_KEPT,
    METHOD_SET,
    METHOD_GET,
    METHOD_DRAIN,
    METHOD_RESUME,
    METHOD_SHUTDOWN,
    METHOD_KILL,
    METHOD_RELOAD,
    METHOD_SUBSCRIBE,
    METHOD_COUNT
};

enum field_type {
    FIELD_BOOL,     /* bool */
    FIELD_INT,      /* int, min..max */
    FIELD_INT64,    /* int64_t, min..max */
    FIELD_UINT64,   /* uint64_t, with a bool at off_set that says it was given */
    FIELD_FLOAT,    /* float, min..max */
    FIELD_TEXT,     /* struct args_str: any UTF-8; min..max bytes */
    FIELD_NAME,     /* char *: min..max bytes, no NUL or control characters */
    FIELD_CHOICE,   /* int: index into choices */
    FIELD_TEXTS,    /* struct args_texts: min..max strings of 1..1024 bytes */
    FIELD_TOKENS,   /* struct args_tokens */
    FIELD_TOKEN_LISTS, /* struct args_token_lists: an array of arrays, min..max token ids in all */
    FIELD_TEXT_OR_TOKENS, /* struct args_str at off, struct args_tokens at off_set */
    FIELD_MESSAGES, /* struct args_messages */
    FIELD_RANGES,   /* struct args_ranges: min..max of them */
    FIELD_MAP,      /* fields of `sub`, in the same struct args */
};

struct field {
    const char *name;
    enum field_type type;
    bool required;
    size_t off, off_set;
    double min, max;
    double dflt;        /* numbers, booleans, choices */
    const char *dflt_doc; /* the default as the man page has it; NULL: none */
    const char *unit;     /* NULL: none */
    const char *const *choices; /* NULL-ended */
    const struct field *sub;    /* ended by a row without a name */
    const char *doc;
};

struct method {
    const char *name;
    enum method_id id;
    bool admin;
    bool any_args;              /* set: names are settings, not fields */
    const struct field *fields; /* ended by a row without a name */
    const char *doc;
};

extern const struct method method_table[METHOD_COUNT];

/* NULL: no such method. name need not be NUL-terminated. */
const struct method *method_find(const char *name, size_t len);

/* The nearest of the names that `next` gives (NULL ends), if it is near enough to be a typo; NULL otherwise. */
const char *method_nearest(const char *name, size_t len, const char *(*next)(void *arg), void *arg);

#endif
