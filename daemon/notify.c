#include "daemon/notify.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define LISTEN_FDS_START 3

static int notify_fd = -1;
static int64_t watchdog_ms;

static long long env_number(const char *name)
{
    const char *s = getenv(name);
    char *end;
    long long v;

    if (s == NULL)
        return 0;
    v = strtoll(s, &end, 10);
    return *end == '\0' && v > 0 ? v : 0;
}

void notify_init(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un sa = { .sun_family = AF_UNIX };
    long long pid = env_number("WATCHDOG_PID");

    if (env_number("WATCHDOG_USEC") > 0 && (pid == 0 || pid == getpid()))
        watchdog_ms = env_number("WATCHDOG_USEC") / 2000;
    if (path != NULL && (*path == '/' || *path == '@') && strlen(path) < sizeof sa.sun_path) {
        size_t n = strlen(path);

        memcpy(sa.sun_path, path, n);
        if (*path == '@')
            sa.sun_path[0] = '\0';
        notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (notify_fd >= 0 &&
            connect(notify_fd, (struct sockaddr *)&sa, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (*path == '/'))) != 0) {
            close(notify_fd);
            notify_fd = -1;
        }
    }
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
}

void notify_send(const char *fmt, ...)
{
    char msg[512];
    va_list ap;
    int n;

    if (notify_fd < 0)
        return;
    va_start(ap, fmt);
    n = vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    if (n > 0)
        send(notify_fd, msg, (size_t)n < sizeof msg ? (size_t)n : sizeof msg - 1, MSG_NOSIGNAL);
}

int64_t notify_watchdog_ms(void)
{
    return notify_fd >= 0 ? watchdog_ms : 0;
}

int notify_listen_fds(int *n)
{
    long long count = env_number("LISTEN_FDS");

    *n = 0;
    if (count > 0 && count <= 64 && env_number("LISTEN_PID") == getpid()) {
        *n = (int)count;
        for (int i = 0; i < *n; i++)
            fcntl(LISTEN_FDS_START + i, F_SETFD, FD_CLOEXEC);
    }
    unsetenv("LISTEN_FDS");
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDNAMES");
    return LISTEN_FDS_START;
}
