/* error.h - the one error space of skvd.
 *
 * The only header that every folder may include: it depends on nothing. Codes are few and the same on
 * the wire, in libskv, in the Python module and (mapped by skv_error_exit) in exit statuses; the text is
 * for people and names the limit that was hit and the setting behind it.
 */
#ifndef SKVD_PROTOCOL_ERROR_H
#define SKVD_PROTOCOL_ERROR_H

enum skv_code {
    SKV_OK = 0,
    SKV_BAD_REQUEST,
    SKV_UNKNOWN_METHOD,
    SKV_TOO_LARGE,
    SKV_CONTEXT_OVERFLOW,
    SKV_OVERLOADED, /* carries retry_after_ms on the wire */
    SKV_CANCELLED,
    SKV_DEADLINE,
    SKV_FORBIDDEN,
    SKV_DRAINING,
    SKV_NOT_FOUND,
    SKV_INTERNAL,
    /* Not sent by a daemon: what a local program can run into. */
    SKV_NO_MEMORY,
    SKV_BAD_MODEL,
    SKV_BAD_CONFIG,
    SKV_SOCKET_TAKEN,
    SKV_NO_DAEMON,
    SKV_IO,
    SKV_CODE_COUNT
};

#define SKV_ERROR_MSG 512

/* Filled by a function that fails (returns -1 or NULL); untouched on success. */
struct skv_error {
    enum skv_code code;
    int retry_after_ms; /* SKV_OVERLOADED only */
    char msg[SKV_ERROR_MSG];
};

/* Set *err (NULL is allowed) and return -1, so that a caller can write `return skv_fail(err, ...)`. */
int skv_fail(struct skv_error *err, enum skv_code code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The code's name on the wire ("bad_request"); never NULL. */
const char *skv_code_name(enum skv_code code);

/* The code of a wire name; SKV_INTERNAL for one that is not known. */
enum skv_code skv_code_from_name(const char *name);

#endif
