#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "protocol/scan.h"

#define LINE_MAX_BYTES 2048 /* below PIPE_BUF: a pipe that says it has room takes a whole line */

#define STRANGER_LINES 50   /* a second */

static enum log_target target = LOG_TO_STDERR;
static _Atomic int log_fd = STDERR_FILENO;
static _Atomic int max_level = LOG_INFO;
static _Atomic long lost, lost_told;
static char *log_path;
static bool to_journal;

static const char *level_name(int level)
{
    if (level <= LOG_ERR)
        return "error";
    if (level == LOG_WARNING)
        return "warning";
    return level == LOG_DEBUG ? "debug" : "info";
}

static int open_file(const char *path)
{
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0640);
}

/* systemd names the device and inode of the stream that leads to its journal. */
static bool is_journal(int fd)
{
    const char *stream = getenv("JOURNAL_STREAM");
    struct stat st;
    char id[64];

    if (stream == NULL || fstat(fd, &st) != 0)
        return false;
    snprintf(id, sizeof id, "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    return strcmp(id, stream) == 0;
}

int log_open(const char *file, struct skv_error *err)
{
    int fd;

    if (file == NULL || *file == '\0') {
        to_journal = is_journal(STDERR_FILENO);
        return 0;
    }
    if (strcmp(file, "syslog") == 0) {
        openlog("skvd", LOG_PID | LOG_NDELAY, LOG_DAEMON);
        target = LOG_TO_SYSLOG;
        return 0;
    }
    fd = open_file(file);
    if (fd < 0)
        return skv_fail(err, SKV_BAD_CONFIG, "log-file %s: %s", file, strerror(errno));
    log_path = strdup(file);
    if (log_path == NULL) {
        close(fd);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the log");
    }
    log_fd = fd;
    target = LOG_TO_FILE;
    return 0;
}

void log_reopen(void)
{
    int fd, old = log_fd;

    if (target != LOG_TO_FILE)
        return;
    fd = open_file(log_path);
    if (fd < 0) {
        log_line(LOG_WARNING, "log-reopen failed error=\"%s\"", strerror(errno));
        return;
    }
    /* Over the old number: another thread may be about to write to it. */
    if (dup3(fd, old, O_CLOEXEC) < 0)
        log_line(LOG_WARNING, "log-reopen failed error=\"%s\"", strerror(errno));
    close(fd);
}

void log_set_level(int level)
{
    max_level = level;
}

int log_level(void)
{
    return max_level;
}

long log_lost(void)
{
    return lost;
}

/* True when the whole line went out. */
static int put_line(const char *s, size_t n)
{
    struct pollfd p = { .fd = log_fd, .events = POLLOUT };
    ssize_t w;

    /* Standard error may be a pipe or a terminal that is shared, so it isn't ours to make non-blocking. */
    if (poll(&p, 1, 0) != 1 || !(p.revents & POLLOUT))
        return 0;
    do {
        w = write(log_fd, s, n);
    } while (w < 0 && errno == EINTR);
    return w == (ssize_t)n;
}

static size_t prefix(char *buf, size_t size, int level)
{
    struct timespec ts;
    struct tm tm;
    size_t n = 0;

    if (to_journal)
        n = (size_t)snprintf(buf, size, "<%d>", level); /* it takes this off, as the line's priority */
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    n += strftime(buf + n, size - n, "%Y-%m-%dT%H:%M:%S", &tm);
    n += (size_t)snprintf(buf + n, size - n, ".%03ldZ %s ", ts.tv_nsec / 1000000, level_name(level));
    return n;
}

static void tell_lost(void)
{
    long now = lost, before = lost_told;
    char line[160];
    size_t n;

    if (now == before)
        return;
    n = prefix(line, sizeof line, LOG_WARNING);
    n += (size_t)snprintf(line + n, sizeof line - n, "log-lost lines=%ld\n", now - before);
    if (put_line(line, n))
        atomic_compare_exchange_strong(&lost_told, &before, now);
}

/* How many bytes at s are one character that does no harm to a line or a terminal. 0: they are none. */
static size_t harmless(const char *s)
{
    uint32_t cp;
    int n = scan_utf8_next(s, strnlen(s, 4), &cp);

    return n < 0 || scan_utf8_control(cp) || scan_utf8_moves(cp) ? 0 : (size_t)n;
}

/* What comes from outside may be cut anywhere: a line that is not UTF-8 would be hidden by who shows the journal. */
static void make_plain(char *s)
{
    while (*s != '\0') {
        size_t n = harmless(s);

        if (n == 0)
            *s = '?';
        s += n > 0 ? n : 1;
    }
}

void log_line(int level, const char *fmt, ...)
{
    char line[LINE_MAX_BYTES];
    size_t n = 0;
    int saved = errno, m;
    va_list ap;

    if (level > max_level)
        return;
    if (target != LOG_TO_SYSLOG)
        n = prefix(line, sizeof line, level);
    va_start(ap, fmt);
    m = vsnprintf(line + n, sizeof line - n - 1, fmt, ap);
    va_end(ap);
    if (m > 0)
        make_plain(line + n);
    n += m < 0 ? 0 : (size_t)m;
    if (n > sizeof line - 2)
        n = sizeof line - 2;
    if (target == LOG_TO_SYSLOG) {
        syslog(level, "%s", line);
    } else {
        line[n++] = '\n';
        tell_lost();
        if (!put_line(line, n))
            atomic_fetch_add(&lost, 1);
    }
    errno = saved;
}

bool log_allowed(void)
{
    static time_t second;
    static int n;
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &ts);
    if (ts.tv_sec != second) {
        second = ts.tv_sec;
        n = 0;
    }
    if (n++ < STRANGER_LINES)
        return true;
    atomic_fetch_add(&lost, 1);
    return false;
}

const char *log_value(const char *s, char *buf, size_t size)
{
    size_t n = 0;
    int quote = *s == '\0' || strpbrk(s, " =\"") != NULL;

    if (size < 8)
        return "";
    if (quote)
        buf[n++] = '"';
    for (; *s != '\0' && n < size - 3; s++) {
        unsigned char c = (unsigned char)*s;

        if (c == '"')
            c = '\'';
        buf[n++] = c == '\\' ? '?' : (char)c;
    }
    if (quote)
        buf[n++] = '"';
    buf[n] = '\0';
    return buf;
}
