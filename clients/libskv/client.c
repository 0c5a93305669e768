/* client.c - a connection: bytes in and out, requests in flight, notifications to their owners. */
#include "config.h"

#include "clients/libskv/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "protocol/scan.h"

#define FRAME_LIMIT (64u * 1024 * 1024)
#define NODES (8u * 1024 * 1024) /* values in one frame: 24 bytes each once decoded; `kept` of a large model needs some */
#define READ_CHUNK (64u * 1024)
#define READ_ROUNDS 16 /* chunks taken in one dispatch: others in the caller's loop have their turn */
#define HASH 256

struct pending {
    struct pending *next;
    int64_t id;
    struct skv_handler h;
    void *arg;
};

struct buf {
    unsigned char *p;
    size_t start, end, size;
};

struct skv {
    int fd;
    bool failed, in_callback, hung_up, write_failed;
    int timeout_ms;
    size_t frame_limit;
    struct skv_error err; /* why it failed, or what the daemon said before hanging up */
    bool told;            /* err holds the daemon's own words */
    struct buf in, out;
    struct scan scan;
    size_t scanned; /* bytes of the frame at in.start that the scan has seen */
    char text[SKV_ERROR_MSG];
    struct pending *pending[HASH];
    size_t n_pending;
    uint32_t next_id;
    void (*on_event)(struct skv *, const char *, const struct skv_value *, void *);
    void *event_arg;
};

/* ---- buffers ---- */

/* Room for n more bytes after end. */
static bool buf_reserve(struct buf *b, size_t n)
{
    size_t used = b->end - b->start, size = b->size;
    unsigned char *p;

    if (b->size - b->end >= n)
        return true;
    if (b->start > 0)
        memmove(b->p, b->p + b->start, used);
    b->start = 0;
    b->end = used;
    if (b->size - used >= n)
        return true;
    if (n > SIZE_MAX / 2 - used)
        return false;
    while (size < used + n)
        size = size < 4096 ? 4096 : size * 2;
    p = realloc(b->p, size);
    if (p == NULL)
        return false;
    b->p = p;
    b->size = size;
    return true;
}

/* Into room that was reserved. */
static void buf_put(struct buf *b, const unsigned char *s, size_t n)
{
    if (n > 0)
        memcpy(b->p + b->end, s, n);
    b->end += n;
}

/* After a large frame the buffer is given back rather than kept for the connection's life. */
static void buf_emptied(struct buf *b)
{
    b->start = b->end = 0;
    if (b->size > 16 * READ_CHUNK) {
        free(b->p);
        b->p = NULL;
        b->size = 0;
    }
}

/* ---- connecting ---- */

static void start_frame(struct skv *c)
{
    const struct scan_limits lim = { c->frame_limit, SCAN_DEPTH_CAP, NODES };
    scan_init(&c->scan, &lim);
    c->scanned = 0;
}

int skv_default_path(char *buf, size_t size)
{
    const char *s = getenv("SKVD_SOCKET"), *dir = getenv("XDG_RUNTIME_DIR");
    int n;

    if (s != NULL && *s != '\0')
        n = snprintf(buf, size, "%s", s);
    else if (geteuid() == 0)
        n = snprintf(buf, size, "/run/skvd.sock");
    else if (dir != NULL && *dir != '\0')
        n = snprintf(buf, size, "%s/skvd.sock", dir);
    else
        n = snprintf(buf, size, "/run/user/%u/skvd.sock", (unsigned)geteuid());
    return n < 0 || (size_t)n >= size ? -1 : 0;
}

struct skv *skv_attach(int take_fd, struct skv_error *err)
{
    struct skv *c = calloc(1, sizeof *c);
    int flags = fcntl(take_fd, F_GETFL);

    if (c == NULL || flags < 0 || fcntl(take_fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        skv_fail(err, c == NULL ? SKV_NO_MEMORY : SKV_IO, "can't use descriptor %d: %s", take_fd, strerror(errno));
        if (take_fd >= 0)
            close(take_fd);
        free(c);
        return NULL;
    }
    c->fd = take_fd;
    c->frame_limit = FRAME_LIMIT;
    start_frame(c);
    return c;
}

struct skv *skv_connect(const char *path, struct skv_error *err)
{
    struct sockaddr_un sa = { .sun_family = AF_UNIX };
    char dflt[sizeof sa.sun_path];
    int fd;

    if (path == NULL) {
        if (skv_default_path(dflt, sizeof dflt) < 0) {
            skv_fail(err, SKV_NO_DAEMON, "the default socket path is longer than %zu bytes", sizeof dflt - 1);
            return NULL;
        }
        path = dflt;
    }
    if (strlen(path) >= sizeof sa.sun_path) {
        skv_fail(err, SKV_NO_DAEMON, "%s: a socket's path may have %zu bytes at most", path, sizeof sa.sun_path - 1);
        return NULL;
    }
    memcpy(sa.sun_path, path, strlen(path) + 1);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        skv_fail(err, SKV_IO, "socket: %s", strerror(errno));
        return NULL;
    }
    if (connect(fd, (struct sockaddr *)&sa, sizeof sa) < 0) {
        skv_fail(err, errno == EACCES ? SKV_FORBIDDEN : SKV_NO_DAEMON, "no daemon at %s: %s", path, strerror(errno));
        close(fd);
        return NULL;
    }
    return skv_attach(fd, err);
}

void skv_set_timeout(struct skv *c, int ms)
{
    c->timeout_ms = ms;
}

void skv_set_frame_limit(struct skv *c, size_t bytes)
{
    c->frame_limit = bytes;
    if (c->scanned == 0)
        start_frame(c);
}

void skv_on_event(struct skv *c, void (*fn)(struct skv *, const char *, const struct skv_value *, void *), void *arg)
{
    c->on_event = fn;
    c->event_arg = arg;
}

/* ---- requests in flight ---- */

static struct pending *pending_find(const struct skv *c, int64_t id)
{
    struct pending *p = id < 0 ? NULL : c->pending[id % HASH];
    while (p != NULL && p->id != id)
        p = p->next;
    return p;
}

static struct pending *pending_take(struct skv *c, int64_t id)
{
    struct pending **pp, *p;
    if (id < 0)
        return NULL;
    pp = &c->pending[id % HASH];
    while (*pp != NULL && (*pp)->id != id)
        pp = &(*pp)->next;
    p = *pp;
    if (p != NULL) {
        *pp = p->next;
        c->n_pending--;
    }
    return p;
}

static void pending_end(struct skv *c, struct pending *p, struct skv_reply *take_reply)
{
    c->in_callback = true;
    if (p->h.done != NULL)
        p->h.done(c, p->id, take_reply, p->arg);
    else
        skv_reply_free(take_reply);
    c->in_callback = false;
    free(p);
}

/* The connection is over: everyone hears the same reason. */
static void end_all(struct skv *c, enum skv_code code)
{
    for (int i = 0; i < HASH; i++)
        while (c->pending[i] != NULL)
            pending_end(c, pending_take(c, c->pending[i]->id), reply_failed(code, c->err.msg));
}

static int conn_fail(struct skv *c, enum skv_code code, const char *msg)
{
    if (!c->failed) {
        c->failed = true;
        if (!c->told)
            skv_fail(&c->err, code, "%s", msg);
        end_all(c, c->err.code);
    }
    return -1;
}

void skv_close(struct skv *c)
{
    if (c == NULL)
        return;
    if (!c->failed)
        skv_fail(&c->err, SKV_CANCELLED, "the connection was closed by this program");
    c->failed = true;
    end_all(c, c->err.code);
    close(c->fd);
    free(c->in.p);
    free(c->out.p);
    free(c);
}

size_t skv_in_flight(const struct skv *c)
{
    return c->n_pending;
}

/* ---- bytes ---- */

int skv_fd(const struct skv *c)
{
    return c->fd;
}

bool skv_want_read(const struct skv *c)
{
    return !c->failed;
}

bool skv_want_write(const struct skv *c)
{
    return !c->failed && c->out.end > c->out.start;
}

/* A failed write is not the end: the daemon's reason may still wait to be read before the end of the stream. */
static void flush_out(struct skv *c)
{
    while (c->out.end > c->out.start) {
        ssize_t n = send(c->fd, c->out.p + c->out.start, c->out.end - c->out.start, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) {
            c->write_failed = true;
            break;
        }
        c->out.start += (size_t)n;
    }
    buf_emptied(&c->out);
}

static void got_notification(struct skv *c, const struct wire_msg *m)
{
    const struct skv_value *params = value_of(m->params), *first = skv_at(params, 0);
    struct pending *p = skv_type(first) == SKV_INT ? pending_find(c, skv_int(first, -1)) : NULL;
    char name[64];
    size_t len;
    const char *s;

    if (m->method_len >= sizeof name)
        return;
    memcpy(name, m->method, m->method_len);
    name[m->method_len] = '\0';
    c->in_callback = true;
    if (p != NULL) {
        if (p->h.note != NULL)
            p->h.note(c, p->id, name, skv_at(params, 1), p->arg);
    } else if (skv_type(first) != SKV_INT) { /* else of a request that has ended */
        if (strcmp(name, "error") == 0 && skv_type(first) == SKV_MAP) {
            s = skv_str(skv_get(first, "message"), &len);
            skv_fail(&c->err, SKV_BAD_REQUEST, "%.*s", (int)(len < SKV_ERROR_MSG ? len : SKV_ERROR_MSG), s);
            c->told = true;
        }
        if (c->on_event != NULL)
            c->on_event(c, name, skv_len(params) == 1 ? first : params, c->event_arg);
    }
    c->in_callback = false;
}

/* One whole frame that the scan has passed. -1: the connection is over. */
static int got_frame(struct skv *c, const unsigned char *frame, size_t len)
{
    struct wire_msg m;
    struct skv_error err;
    struct pending *p;
    int rc = 0;

    if (wire_parse(frame, len, &m, &err) < 0)
        return conn_fail(c, err.code == SKV_NO_MEMORY ? SKV_NO_MEMORY : SKV_IO, err.msg);
    if (m.kind == WIRE_NOTIFICATION)
        got_notification(c, &m);
    else if (m.kind == WIRE_RESPONSE) {
        p = pending_take(c, m.msgid);
        if (p != NULL) /* else one that was given up */
            pending_end(c, p, reply_new(frame, len));
    } else
        rc = conn_fail(c, SKV_IO, "the daemon sent a request, which only clients do");
    wire_msg_fini(&m);
    return rc;
}

/* The scan speaks of a peer; here that is the daemon. */
static const char *fail_text(struct skv *c, const char *why)
{
    snprintf(c->text, sizeof c->text, "what came from the daemon's socket can't be followed: %.400s", why);
    return c->text;
}

/* Handle every whole frame in the buffer. */
static int parse_in(struct skv *c)
{
    while (c->in.end > c->in.start) {
        unsigned char *frame = c->in.p + c->in.start;
        size_t used = 0, len;
        struct skv_error err;
        enum scan_status r = scan_feed(&c->scan, frame + c->scanned, c->in.end - c->in.start - c->scanned, &used, &err);

        if (r == SCAN_FAIL)
            return conn_fail(c, SKV_IO, fail_text(c, err.msg));
        len = c->scanned += used;
        if (r == SCAN_MORE)
            return 0;
        start_frame(c);
        if (got_frame(c, frame, len) < 0)
            return -1;
        c->in.start += len;
    }
    buf_emptied(&c->in);
    return 0;
}

static int read_in(struct skv *c)
{
    for (int i = 0; i < READ_ROUNDS; i++) {
        ssize_t n;
        if (!buf_reserve(&c->in, READ_CHUNK))
            return conn_fail(c, SKV_NO_MEMORY, "no memory for what the daemon sends");
        n = recv(c->fd, c->in.p + c->in.end, c->in.size - c->in.end, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0)
            return conn_fail(c, SKV_IO, strerror(errno));
        if (n == 0)
            return conn_fail(c, SKV_IO, "the daemon closed the connection");
        c->in.end += (size_t)n;
        if (parse_in(c) < 0)
            return -1;
    }
    return 0;
}

static int in_callback(struct skv_error *err)
{
    return skv_fail(err, SKV_BAD_REQUEST, "a callback may not block or dispatch");
}

int skv_dispatch(struct skv *c, struct skv_error *err)
{
    if (c->in_callback)
        return in_callback(err);
    if (!c->failed) {
        flush_out(c);
        if (read_in(c) == 0) {
            flush_out(c); /* what callbacks have started */
            return 0;
        }
    }
    return skv_fail(err, c->err.code, "%s", c->err.msg);
}

/* As skv_wait; *interrupted tells a signal from a timeout. */
static int wait_once(struct skv *c, int timeout_ms, bool *interrupted, struct skv_error *err)
{
    struct pollfd p = { .fd = c->fd, .events = POLLIN };
    int n;

    if (c->in_callback)
        return in_callback(err);
    if (skv_want_write(c))
        p.events |= POLLOUT;
    n = c->failed ? 1 : poll(&p, 1, timeout_ms);
    *interrupted = n < 0 && errno == EINTR;
    if (n < 0 && !*interrupted)
        return skv_fail(err, SKV_IO, "poll: %s", strerror(errno));
    if (n <= 0)
        return 0;
    return skv_dispatch(c, err) < 0 ? -1 : 1;
}

int skv_wait(struct skv *c, int timeout_ms, struct skv_error *err)
{
    bool interrupted;
    return wait_once(c, timeout_ms, &interrupted, err);
}

/* ---- calls ---- */

static int64_t pick_id(struct skv *c)
{
    do
        c->next_id = (c->next_id + 1) & 0x7fffffff;
    while (pending_find(c, c->next_id) != NULL);
    return c->next_id;
}

/* [0, id, method, [args]] behind what waits already; nothing of it stays there when it fails. */
static int put_request(struct skv *c, int64_t id, const char *method, struct skv_args *args, struct skv_error *err)
{
    size_t len = 0;
    const unsigned char *bytes = args == NULL ? NULL : args_bytes(args, &len, err);
    struct wire_buf head;
    int rc = -1;

    if (args != NULL && bytes == NULL)
        return -1;
    wire_buf_init(&head);
    wire_request(&head, (uint32_t)id, method);
    wire_array(&head, args != NULL);
    if (!head.failed && buf_reserve(&c->out, head.len + len)) {
        buf_put(&c->out, head.p, head.len);
        buf_put(&c->out, bytes, len);
        rc = 0;
    } else
        skv_fail(err, SKV_NO_MEMORY, "no memory for a request");
    wire_buf_fini(&head);
    return rc;
}

int64_t skv_start(struct skv *c, const char *method, struct skv_args *take_args, const struct skv_handler *h, void *arg,
                  struct skv_error *err)
{
    struct pending *p = NULL;
    int64_t id;

    if (c->failed) {
        skv_fail(err, c->err.code, "%s", c->err.msg);
        goto fail;
    }
    p = calloc(1, sizeof *p);
    if (p == NULL) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for a request");
        goto fail;
    }
    id = pick_id(c);
    if (put_request(c, id, method, take_args, err) < 0)
        goto fail;
    skv_args_free(take_args);
    p->id = id;
    if (h != NULL)
        p->h = *h;
    p->arg = arg;
    p->next = c->pending[id % HASH];
    c->pending[id % HASH] = p;
    c->n_pending++;
    if (!c->in_callback && !c->write_failed)
        flush_out(c);
    return id;
fail:
    skv_args_free(take_args);
    free(p);
    return -1;
}

int skv_cancel(struct skv *c, int64_t msgid, struct skv_error *err)
{
    struct skv_args *a = skv_args_new();
    if (a == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a request");
    skv_arg_int(a, "msgid", msgid);
    return skv_start(c, "cancel", a, NULL, NULL, err) < 0 ? -1 : 0;
}

/* A blocking call in progress. */
struct call {
    struct skv_reply *reply;
    bool (*on_text)(const char *, size_t, void *);
    void *arg;
    bool stopped;
};

static void call_done(struct skv *c, int64_t id, struct skv_reply *take_reply, void *arg)
{
    (void)c;
    (void)id;
    ((struct call *)arg)->reply = take_reply;
}

static void call_note(struct skv *c, int64_t id, const char *method, const struct skv_value *v, void *arg)
{
    struct call *k = arg;
    size_t len;
    const char *s = skv_str(skv_get(v, "text"), &len);

    if (k->on_text == NULL || k->stopped || strcmp(method, "token") != 0 || len == 0)
        return;
    if (!k->on_text(s, len, k->arg)) {
        k->stopped = true;
        skv_cancel(c, id, NULL); /* no memory for that: the answer then runs to its end, unheard */
    }
}

static int call_wait(struct skv *c, int64_t id, struct call *k, struct skv_reply **reply, struct skv_error *err)
{
    const struct skv_error *e;

    while (k->reply == NULL) {
        bool interrupted = false;
        int n = wait_once(c, c->timeout_ms > 0 ? c->timeout_ms : -1, &interrupted, err);
        if (n < 0 && k->reply == NULL) {
            free(pending_take(c, id));
            return -1;
        }
        if (n == 0 && !interrupted && c->timeout_ms > 0) {
            free(pending_take(c, id));
            return skv_fail(err, SKV_IO, "the daemon has sent nothing for %d ms", c->timeout_ms);
        }
    }
    e = skv_reply_error(k->reply);
    if (e != NULL && err != NULL)
        *err = *e;
    if (reply != NULL)
        *reply = k->reply;
    else
        skv_reply_free(k->reply);
    return e != NULL ? -1 : 0;
}

static int call_run(struct skv *c, const char *method, struct skv_args *take_args, struct call *k,
                    struct skv_reply **reply, struct skv_error *err)
{
    static const struct skv_handler h = { call_note, call_done };
    int64_t id;

    if (reply != NULL)
        *reply = NULL;
    if (c->in_callback) {
        skv_args_free(take_args);
        return in_callback(err);
    }
    id = skv_start(c, method, take_args, &h, k, err);
    return id < 0 ? -1 : call_wait(c, id, k, reply, err);
}

int skv_call(struct skv *c, const char *method, struct skv_args *take_args, struct skv_reply **reply, struct skv_error *err)
{
    struct call k = { 0 };
    return call_run(c, method, take_args, &k, reply, err);
}

int skv_generate(struct skv *c, struct skv_args *take_args, bool (*on_text)(const char *, size_t, void *), void *arg,
                 struct skv_reply **reply, struct skv_error *err)
{
    struct call k = { .on_text = on_text, .arg = arg };
    return call_run(c, "generate", take_args, &k, reply, err);
}
