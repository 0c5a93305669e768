#include "daemon/fault.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

/* glibc's own names for what ours stand in front of. */
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);

static _Atomic long left; /* allocations until the one that fails; 0: not armed */

void fault_arm(const char *env)
{
    const char *s = getenv(env);
    long n = s != NULL ? strtol(s, NULL, 10) : 0;

    if (n > 0)
        left = n;
}

static _Atomic bool held;

void fault_hold(bool on)
{
    held = on;
}

static int fails(void)
{
    static const char msg[] = "fault-injected\n";

    if (held || left <= 0 || atomic_fetch_sub(&left, 1) != 1)
        return 0;
    if (write(STDERR_FILENO, msg, sizeof msg - 1) < 0)
        return 1;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n)
{
    return fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return fails() ? NULL : __libc_realloc(p, n);
}
