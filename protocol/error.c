#include "protocol/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const code_names[SKV_CODE_COUNT] = {
    [SKV_OK] = "ok",
    [SKV_BAD_REQUEST] = "bad_request",
    [SKV_UNKNOWN_METHOD] = "unknown_method",
    [SKV_TOO_LARGE] = "too_large",
    [SKV_CONTEXT_OVERFLOW] = "context_overflow",
    [SKV_OVERLOADED] = "overloaded",
    [SKV_CANCELLED] = "cancelled",
    [SKV_DEADLINE] = "deadline",
    [SKV_FORBIDDEN] = "forbidden",
    [SKV_DRAINING] = "draining",
    [SKV_NOT_FOUND] = "not_found",
    [SKV_INTERNAL] = "internal",
    [SKV_NO_MEMORY] = "no_memory",
    [SKV_BAD_MODEL] = "bad_model",
    [SKV_BAD_CONFIG] = "bad_config",
    [SKV_SOCKET_TAKEN] = "socket_taken",
    [SKV_NO_DAEMON] = "no_daemon",
    [SKV_IO] = "io",
};

int skv_fail(struct skv_error *err, enum skv_code code, const char *fmt, ...)
{
    va_list ap;

    if (err == NULL)
        return -1;
    err->code = code;
    err->retry_after_ms = 0;
    va_start(ap, fmt);
    vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    return -1;
}

const char *skv_code_name(enum skv_code code)
{
    if ((unsigned)code >= SKV_CODE_COUNT)
        return "internal";
    return code_names[code];
}

enum skv_code skv_code_from_name(const char *name)
{
    for (int i = 0; i < SKV_CODE_COUNT; i++)
        if (strcmp(code_names[i], name) == 0)
            return (enum skv_code)i;
    return SKV_INTERNAL;
}
