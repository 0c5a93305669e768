#include "daemon/listener.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/client.h"
#include "daemon/log.h"
#include "daemon/notify.h"

#define BACKLOG          1024
#define ACCEPTS_A_TURN   32
#define FDS_MAX          8
#define REST_MS          200 /* accept nobody for this long when descriptors have run out */
#define DIR_LOCK_WAIT_MS 2000

struct listener {
    struct server *srv;
    int fd[FDS_MAX], n;
    struct event *ev[FDS_MAX], *rest_ev;
    int spare; /* given up to accept and turn away one more when there are no descriptors left */
    bool inherited, resting;
    char path[sizeof ((struct sockaddr_un *)0)->sun_path];
    dev_t dev;
    ino_t ino;
};

static char raw_path[sizeof ((struct sockaddr_un *)0)->sun_path];

const char *listener_path(const struct config *cfg, char *buf, size_t size, struct skv_error *err)
{
    const char *env = getenv("SKVD_SOCKET"), *dir = getenv("XDG_RUNTIME_DIR");
    int n;

    if (cfg->socket != NULL && *cfg->socket != '\0')
        n = snprintf(buf, size, "%s", cfg->socket);
    else if (env != NULL && *env != '\0')
        n = snprintf(buf, size, "%s", env);
    else if (getuid() == 0)
        n = snprintf(buf, size, "/run/skvd.sock");
    else if (dir != NULL && *dir != '\0')
        n = snprintf(buf, size, "%s/skvd.sock", dir);
    else {
        skv_fail(err, SKV_BAD_CONFIG, "there is no place for the socket: give --socket, or set SKVD_SOCKET or XDG_RUNTIME_DIR");
        return NULL;
    }
    if (n < 0 || (size_t)n >= size) {
        skv_fail(err, SKV_BAD_CONFIG, "the socket's path has %d bytes, a Unix socket's path can have %zu", n, size - 1);
        return NULL;
    }
    return buf;
}

/* Hold the directory while the path is looked at and taken. -1: go on without (a directory that can't be read). */
static int lock_directory(const char *path)
{
    char copy[sizeof raw_path];
    int fd;

    snprintf(copy, sizeof copy, "%s", path);
    fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int waited = 0; fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && waited < DIR_LOCK_WAIT_MS; waited += 20)
        poll(NULL, 0, 20);
    return fd;
}

/* 0: the path is free now. */
static int clear_path(const char *path, const struct sockaddr_un *sa, struct skv_error *err)
{
    struct stat st;
    int fd, rc, e;

    if (lstat(path, &st) != 0)
        return errno == ENOENT ? 0 : skv_fail(err, SKV_BAD_CONFIG, "socket %s: %s", path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return skv_fail(err, SKV_BAD_CONFIG, "%s exists and is not a socket: move it away, or give another --socket", path);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return skv_fail(err, SKV_IO, "socket: %s", strerror(errno));
    rc = connect(fd, (const struct sockaddr *)sa, sizeof *sa);
    e = errno;
    close(fd);
    if (rc == 0 || e == EAGAIN || e == EINPROGRESS) /* EAGAIN: alive, with a full backlog */
        return skv_fail(err, SKV_SOCKET_TAKEN, "a daemon is alive on %s", path);
    if (e != ECONNREFUSED)
        return skv_fail(err, SKV_BAD_CONFIG, "socket %s: %s", path, strerror(e));
    if (unlink(path) != 0)
        return skv_fail(err, SKV_BAD_CONFIG, "the stale socket %s can't be removed: %s", path, strerror(errno));
    return 0;
}

static int set_access(const char *path, int mode, const char *group, struct skv_error *err)
{
    if (group != NULL && *group != '\0') {
        const struct group *g = getgrnam(group);

        if (g == NULL)
            return skv_fail(err, SKV_BAD_CONFIG, "socket-group: there is no group '%.64s'", group);
        if (chown(path, (uid_t)-1, g->gr_gid) != 0)
            return skv_fail(err, SKV_BAD_CONFIG, "socket-group %.64s for %s: %s", group, path, strerror(errno));
    }
    if (chmod(path, (mode_t)mode) != 0)
        return skv_fail(err, SKV_BAD_CONFIG, "socket-mode for %s: %s", path, strerror(errno));
    return 0;
}

int listener_bind_unix(const char *path, int mode, const char *group, struct skv_error *err)
{
    struct sockaddr_un sa = { .sun_family = AF_UNIX };
    int fd = -1, lock;
    mode_t old;

    if (strlen(path) >= sizeof sa.sun_path)
        return skv_fail(err, SKV_BAD_CONFIG, "the socket's path has %zu bytes, a Unix socket's path can have %zu", strlen(path),
                        sizeof sa.sun_path - 1);
    memcpy(sa.sun_path, path, strlen(path) + 1);
    lock = lock_directory(path);
    if (clear_path(path, &sa, err) == 0) {
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        old = umask(0177); /* nobody comes in before mode and group are right */
        if (fd >= 0 && bind(fd, (struct sockaddr *)&sa, sizeof sa) != 0) {
            skv_fail(err, SKV_BAD_CONFIG, "socket %s: %s", path, strerror(errno));
            close(fd);
            fd = -1;
        } else if (fd >= 0 && (set_access(path, mode, group, err) != 0 ||
                               (listen(fd, BACKLOG) != 0 && skv_fail(err, SKV_IO, "listen: %s", strerror(errno)) != 0))) {
            unlink(path);
            close(fd);
            fd = -1;
        } else if (fd < 0) {
            skv_fail(err, SKV_IO, "socket: %s", strerror(errno));
        }
        umask(old);
    }
    if (lock >= 0)
        close(lock);
    return fd;
}

struct listener *listener_open(const struct config *cfg, struct skv_error *err)
{
    struct listener *l = calloc(1, sizeof *l);
    struct sockaddr_un sa;
    socklen_t len = sizeof sa;
    struct stat st;
    int first, n;

    if (l == NULL) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the socket");
        return NULL;
    }
    l->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    first = notify_listen_fds(&n);
    if (n > 0) {
        l->inherited = true;
        for (int i = 0; i < n && i < FDS_MAX; i++) {
            fcntl(first + i, F_SETFL, fcntl(first + i, F_GETFL) | O_NONBLOCK);
            l->fd[l->n++] = first + i;
        }
        snprintf(l->path, sizeof l->path, "systemd");
        if (getsockname(l->fd[0], (struct sockaddr *)&sa, &len) == 0 && sa.sun_family == AF_UNIX && sa.sun_path[0] == '/')
            snprintf(l->path, sizeof l->path, "%s", sa.sun_path);
        return l;
    }
    if (listener_path(cfg, l->path, sizeof l->path, err) == NULL ||
        (l->fd[0] = listener_bind_unix(l->path, cfg->socket_mode, cfg->socket_group, err)) < 0) {
        listener_free(l);
        return NULL;
    }
    l->n = 1;
    if (lstat(l->path, &st) == 0) {
        l->dev = st.st_dev;
        l->ino = st.st_ino;
        memcpy(raw_path, l->path, sizeof raw_path);
    }
    return l;
}

const char *listener_name(const struct listener *l)
{
    return l->path;
}

void listener_unlink_raw(void)
{
    if (raw_path[0] != '\0')
        unlink(raw_path);
}

/* ---- accepting ------------------------------------------------------------------------------------- */

static void rest_over(evutil_socket_t fd, short what, void *arg)
{
    struct listener *l = arg;

    (void)fd;
    (void)what;
    l->resting = false;
    for (int i = 0; i < l->n; i++)
        if (l->ev[i] != NULL)
            event_add(l->ev[i], NULL);
}

/* Level-triggered accept events would come back at full speed as long as somebody waits. */
static void rest(struct listener *l)
{
    struct timeval tv = { 0, REST_MS * 1000 };

    if (l->resting)
        return;
    l->resting = true;
    for (int i = 0; i < l->n; i++)
        event_del(l->ev[i]);
    event_add(l->rest_ev, &tv);
}

/* Tell why and close. The socket's buffer is empty, so the one message fits or nobody listens. */
static void turn_away(struct server *s, int fd, const struct skv_error *err)
{
    s->counters.refused++;
    wire_buf_clear(&s->out);
    wire_notify_error(&s->out, err);
    if (!s->out.failed)
        send(fd, s->out.p, s->out.len, MSG_NOSIGNAL | MSG_DONTWAIT);
    client_close_fd(fd);
}

static void out_of_descriptors(struct listener *l, int listen_fd, int e)
{
    struct skv_error err;
    int fd;

    log_line(LOG_WARNING, "accept failed error=\"%s\" rest_ms=%d", strerror(e), REST_MS);
    if (l->spare >= 0) {
        close(l->spare);
        fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            skv_fail(&err, SKV_OVERLOADED, "skvd has no descriptors left for another connection: try again later");
            err.retry_after_ms = 1000;
            turn_away(l->srv, fd, &err);
        }
        l->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    rest(l);
}

static void on_accept(evutil_socket_t fd, short what, void *arg)
{
    struct listener *l = arg;
    struct server *s = l->srv;

    (void)what;
    if (l->spare < 0)
        l->spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < ACCEPTS_A_TURN; i++) {
        int c = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct skv_error err;

        if (c < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
                out_of_descriptors(l, fd, errno);
            return; /* EAGAIN: all are in; ECONNABORTED and the like: on to the next event */
        }
        s->counters.accepted++;
        if (client_new(s, c, &err) == NULL) {
            if (log_allowed())
                log_line(LOG_INFO, "refuse-connection code=%s detail=\"%s\"", skv_code_name(err.code), err.msg);
            turn_away(s, c, &err);
        }
    }
}

int listener_start(struct listener *l, struct server *s, struct skv_error *err)
{
    l->srv = s;
    l->rest_ev = event_new(s->base, -1, 0, rest_over, l);
    if (l->rest_ev == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the event loop");
    for (int i = 0; i < l->n; i++) {
        l->ev[i] = event_new(s->base, l->fd[i], EV_READ | EV_PERSIST, on_accept, l);
        if (l->ev[i] == NULL || event_add(l->ev[i], NULL) != 0)
            return skv_fail(err, SKV_NO_MEMORY, "no memory for the event loop");
    }
    return 0;
}

void listener_stop(struct listener *l)
{
    struct stat st;

    if (l->rest_ev != NULL)
        event_free(l->rest_ev);
    l->rest_ev = NULL;
    for (int i = 0; i < l->n; i++) {
        if (l->ev[i] != NULL)
            event_free(l->ev[i]);
        l->ev[i] = NULL;
        close(l->fd[i]);
    }
    /* Only what we made, and only if it is still there: another daemon may own the path by now. */
    if (!l->inherited && l->n > 0 && lstat(l->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        unlink(l->path);
    raw_path[0] = '\0';
    l->n = 0;
}

void listener_free(struct listener *l)
{
    if (l == NULL)
        return;
    listener_stop(l);
    if (l->spare >= 0)
        close(l->spare);
    free(l);
}
