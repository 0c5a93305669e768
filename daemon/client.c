#include "daemon/client.h"

#include <errno.h>
#include <event2/event.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/admin.h"
#include "daemon/log.h"
#include "daemon/quotas.h"
#include "daemon/requests.h"

#define READ_BYTES     65536  /* one read */
#define READ_ROUNDS    4      /* reads of one client before the others have their turn */
#define FRAMES_A_TURN  64     /* likewise */
#define BUSY_OF_USER   4      /* so many of a user's connections may take whole turns and not be put off */
#define CHUNK_BYTES    16384
#define KEEP_IN_BYTES  16384  /* an idle connection holds no more than this for input */
#define IOV            16
#define FAULT_LINGER_MS 2000
#define CLOSE_READS     64
#define PAUSED_FACTOR   10 /* a paused sequence holds memory: one that reads, but hardly, may do so this often reader-timeout */

struct chunk {
    struct chunk *next;
    size_t off, len, cap;
    uint8_t data[];
};

static const char *const drop_names[DROP_KINDS] = { "disconnect", "fault", "slow", "timeout", "shutdown", "memory" };

static void on_read(evutil_socket_t fd, short what, void *arg);
static void on_write(evutil_socket_t fd, short what, void *arg);

/* ---- birth and death ------------------------------------------------------------------------------- */

static int peer_credentials(struct client *c, struct skv_error *err)
{
    struct ucred cred;
    socklen_t n = sizeof cred;

    if (getsockopt(c->fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) != 0)
        return skv_fail(err, SKV_IO, "no credentials of the peer: %s", strerror(errno));
    c->uid = cred.uid;
    c->gid = cred.gid;
    c->pid = cred.pid;
    c->admin = admin_is(c->srv, c->fd, cred.uid, cred.gid);
    return 0;
}

static void scan_start(struct client *c)
{
    struct scan_limits lim = { (size_t)c->srv->cfg.frame_limit, (unsigned)c->srv->cfg.nesting_limit, SCAN_NODES_DEFAULT };

    scan_init(&c->scan, &lim);
    c->in_seen = 0;
}

static void client_free(struct client *c)
{
    if (c->rd != NULL)
        event_free(c->rd);
    if (c->wr != NULL)
        event_free(c->wr);
    if (c->fd >= 0)
        close(c->fd);
    while (c->out_first != NULL) {
        struct chunk *k = c->out_first;

        c->out_first = k->next;
        free(k);
    }
    free(c->in);
    free(c);
}

struct client *client_new(struct server *s, int fd, struct skv_error *err)
{
    struct client *c = calloc(1, sizeof *c);

    if (c == NULL) {
        skv_fail(err, SKV_OVERLOADED, "no memory for another connection");
        return NULL;
    }
    c->srv = s;
    c->fd = fd;
    c->id = ++s->next_client;
    TAILQ_INIT(&c->requests);
    scan_start(c);
    c->active_ms = now_ms();
    c->rd = event_new(s->base, fd, EV_READ | EV_PERSIST, on_read, c);
    c->wr = event_new(s->base, fd, EV_WRITE, on_write, c);
    if (c->rd == NULL || c->wr == NULL)
        skv_fail(err, SKV_OVERLOADED, "no memory for another connection");
    else if (peer_credentials(c, err) == 0 && quotas_connect(s, c, err) == 0) {
        if (event_add(c->rd, NULL) == 0) {
            TAILQ_INSERT_TAIL(&s->clients, c, link);
            s->n_clients++;
            log_line(LOG_DEBUG, "connect conn=%llu uid=%u pid=%d", (unsigned long long)c->id, c->uid, (int)c->pid);
            return c;
        }
        skv_fail(err, SKV_OVERLOADED, "no memory for another connection");
        quotas_disconnect(s, c);
    }
    c->fd = -1; /* the caller's still */
    client_free(c);
    return NULL;
}

void client_close_fd(int fd)
{
    char junk[16384];

    /* Closing with input unread makes the kernel reset the peer, who may not have read our last word yet. */
    for (int i = 0; i < CLOSE_READS && recv(fd, junk, sizeof junk, MSG_DONTWAIT) > 0; i++)
        ;
    close(fd);
}

void client_drop(struct client *c, enum drop_kind kind, const char *why)
{
    struct server *s = c->srv;
    char name[96];

    if (c->dead)
        return;
    c->dead = true;
    s->counters.dropped[kind]++;
    if (kind == DROP_DISCONNECT || log_allowed())
        log_line(kind == DROP_DISCONNECT ? LOG_DEBUG : LOG_INFO,
                 "close conn=%llu uid=%u pid=%d client=%s reason=%s requests=%d detail=\"%s\"", (unsigned long long)c->id,
                 c->uid, (int)c->pid, log_value(c->name, name, sizeof name), drop_names[kind], c->n_requests, why);
    event_del(c->rd);
    event_del(c->wr);
    requests_orphan(c, drop_names[kind]);
    if (c->topics != 0)
        s->subscribers--;
    quotas_disconnect(s, c);
    /* The number is free for the next accept at once; the memory waits until no callback of ours is on the stack. */
    client_close_fd(c->fd);
    c->fd = -1;
    TAILQ_REMOVE(&s->clients, c, link);
    s->n_clients--;
    TAILQ_INSERT_TAIL(&s->dead, c, link);
    server_reap_soon(s);
}

void client_reap(struct server *s)
{
    struct client *c;

    while ((c = TAILQ_FIRST(&s->dead)) != NULL) {
        TAILQ_REMOVE(&s->dead, c, link);
        client_free(c);
    }
}

/* ---- output ---------------------------------------------------------------------------------------- */

static void pause_all(struct client *c, bool on)
{
    c->paused = on;
    c->paused_since_ms = now_ms();
    c->srv->counters.pauses += on;
    log_line(LOG_DEBUG, "%s conn=%llu uid=%u waiting=%lld", on ? "pause" : "unpause", (unsigned long long)c->id, c->uid,
             (long long)c->out_bytes);
    requests_pause(c, on);
}

static int enqueue(struct client *c, const uint8_t *p, size_t n)
{
    struct chunk *k = c->out_last;

    if (k != NULL && k->cap - k->len >= n) {
        memcpy(k->data + k->len, p, n);
        k->len += n;
        return 0;
    }
    k = malloc(sizeof *k + (n > CHUNK_BYTES ? n : CHUNK_BYTES));
    if (k == NULL)
        return -1;
    k->next = NULL;
    k->off = 0;
    k->cap = n > CHUNK_BYTES ? n : CHUNK_BYTES;
    k->len = n;
    memcpy(k->data, p, n);
    if (c->out_last != NULL)
        c->out_last->next = k;
    else
        c->out_first = k;
    c->out_last = k;
    return 0;
}

void client_send(struct client *c, const struct wire_buf *b)
{
    const struct config *cfg = &c->srv->cfg;
    struct skv_error err;

    if (c->dead || c->closing)
        return;
    /* One message larger than the limit is fine: it was asked for. What counts is what is there already. */
    if (c->out_bytes > cfg->output_limit) {
        client_drop(c, DROP_SLOW, "more output waits than output-limit allows");
        return;
    }
    if (!b->failed && quotas_may_buffer(c->srv, c, b->len, &err) != 0) {
        client_drop(c, DROP_SLOW, err.msg);
        return;
    }
    if (b->failed || enqueue(c, b->p, b->len) != 0) {
        client_drop(c, DROP_MEMORY, "no memory for its output");
        return;
    }
    if (c->out_bytes == 0) {
        c->out_since_ms = now_ms();
        event_active(c->wr, EV_WRITE, 0); /* after this callback: what else it queues goes out with it */
    }
    c->out_bytes += (int64_t)b->len;
    quotas_buffered(c->srv, c);
    if (!c->paused && c->out_bytes > cfg->output_high)
        pause_all(c, true);
}

/* The codes of the wire only. Want of memory passes: it is told as what a client knows how to handle. */
void client_wire_error(const struct server *s, const struct skv_error *err, struct skv_error *out)
{
    *out = *err;
    if (err->code == SKV_NO_MEMORY)
        out->code = SKV_OVERLOADED;
    else if (err->code > SKV_INTERNAL)
        out->code = SKV_INTERNAL;
    if (out->code == SKV_OVERLOADED && out->retry_after_ms <= 0)
        out->retry_after_ms = quotas_retry_ms(s);
}

void client_send_error(struct client *c, uint32_t msgid, const struct skv_error *err)
{
    struct wire_buf *b = &c->srv->out;
    struct skv_error e;

    client_wire_error(c->srv, err, &e);
    wire_buf_clear(b);
    wire_response_error(b, msgid, &e);
    client_send(c, b);
}

static void out_consume(struct client *c, size_t n)
{
    c->out_bytes -= (int64_t)n;
    quotas_buffered(c->srv, c);
    while (n > 0) {
        struct chunk *k = c->out_first;
        size_t m = k->len - k->off < n ? k->len - k->off : n;

        k->off += m;
        n -= m;
        if (k->off < k->len)
            return;
        c->out_first = k->next;
        if (c->out_first == NULL)
            c->out_last = NULL;
        free(k);
    }
}

/* Write what the socket takes. 0: it is full or all is out; -1: the client was dropped. */
static int flush(struct client *c)
{
    while (c->out_first != NULL) {
        struct iovec iov[IOV];
        struct msghdr m = { .msg_iov = iov };
        ssize_t w;

        for (struct chunk *k = c->out_first; k != NULL && m.msg_iovlen < IOV; k = k->next)
            iov[m.msg_iovlen++] = (struct iovec){ k->data + k->off, k->len - k->off };
        w = sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (w < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
                return 0;
            client_drop(c, DROP_DISCONNECT, "closed by the peer");
            return -1;
        }
        if (w > 0)
            c->out_since_ms = now_ms();
        out_consume(c, (size_t)w);
    }
    return 0;
}

/* Half closed by the peer, nothing in flight and all said: that is the end. */
static bool is_over(const struct client *c)
{
    return c->out_bytes == 0 && (c->closing || (c->eof && c->n_requests == 0));
}

static void on_write(evutil_socket_t fd, short what, void *arg)
{
    struct client *c = arg;

    (void)fd;
    (void)what;
    if (c->dead || flush(c) != 0)
        return;
    if (c->out_first != NULL)
        event_add(c->wr, NULL);
    if (c->paused && c->out_bytes <= c->srv->cfg.output_low) {
        pause_all(c, false);
        if (!c->eof && !c->closing) {
            event_add(c->rd, NULL);
            if (c->in_len > 0)
                event_active(c->rd, EV_READ, 0); /* frames may be waiting in our own buffer */
        }
    }
    if (is_over(c))
        client_drop(c, c->closing ? DROP_FAULT : DROP_DISCONNECT, c->closing ? "closed after a fault" : "done");
}

void client_flush_all(struct server *s, int ms)
{
    int64_t until = now_ms() + ms;
    struct client *c, *next;
    bool left = true;

    while (left) {
        left = false;
        for (c = TAILQ_FIRST(&s->clients); c != NULL; c = next) {
            next = TAILQ_NEXT(c, link);
            if (c->out_first != NULL && flush(c) == 0 && c->out_first != NULL)
                left = true;
        }
        if (!left || now_ms() >= until)
            return;
        poll(NULL, 0, 10);
    }
}

/* ---- input ----------------------------------------------------------------------------------------- */

void client_finish(struct client *c)
{
    if (c->dead || c->closing)
        return;
    c->closing = true;
    c->out_since_ms = now_ms();
    event_del(c->rd);
    if (c->out_bytes == 0)
        event_active(c->wr, EV_WRITE, 0);
}

static void free_input(struct client *c)
{
    free(c->in);
    c->in = NULL;
    c->in_len = c->in_cap = 0;
    quotas_buffered(c->srv, c);
}

void client_fault(struct client *c, const struct skv_error *err)
{
    struct wire_buf *b = &c->srv->out;
    char msg[320];

    if (c->dead || c->closing)
        return;
    if (log_allowed())
        log_line(LOG_INFO, "fault conn=%llu uid=%u pid=%d code=%s detail=%s", (unsigned long long)c->id, c->uid,
                 (int)c->pid, skv_code_name(err->code), log_value(err->msg, msg, sizeof msg));
    /* What it had in flight can't be told from what it meant: all of it ends, and what it has sent is not looked at again. */
    requests_orphan(c, "fault");
    free_input(c);
    wire_buf_clear(b);
    wire_notify_error(b, err);
    client_send(c, b);
    client_finish(c);
}

/* 0, or -1 with *err. */
static int grow_input(struct client *c, struct skv_error *err)
{
    size_t cap = c->in_cap != 0 ? c->in_cap : 4096;
    uint8_t *p;

    if (c->in_cap - c->in_len >= 2048)
        return 0;
    /* Doubling what has really arrived: a declared length alone takes nothing. */
    while (cap - c->in_len < 2048)
        cap *= 2;
    if (quotas_may_buffer(c->srv, c, cap - c->in_cap, err) != 0)
        return -1;
    p = realloc(c->in, cap);
    if (p == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for its input");
    c->in = p;
    c->in_cap = cap;
    quotas_buffered(c->srv, c);
    return 0;
}

/* One complete frame: n bytes of the buffer, from `at` on. */
static void one_frame(struct client *c, size_t at, size_t n)
{
    struct wire_msg m;
    struct skv_error err;

    c->srv->counters.frames++;
    if (wire_parse(c->in + at, n, &m, &err) != 0) {
        if (err.code == SKV_NO_MEMORY)
            client_drop(c, DROP_MEMORY, "no memory to read its message");
        else
            client_fault(c, &err);
        return;
    }
    requests_message(c, &m, c->scan.bad_utf8);
    wire_msg_fini(&m);
}

/* The first n bytes have been dealt with: what is left moves to the front, once for all frames of a turn. */
static void in_consume(struct client *c, size_t n)
{
    if (n > 0)
        memmove(c->in, c->in + n, c->in_len - n);
    c->in_len -= n;
    if (c->in_len > 0) {
        if (c->frame_since_ms == 0)
            c->frame_since_ms = now_ms();
        return;
    }
    c->frame_since_ms = 0;
    if (c->in_cap > KEEP_IN_BYTES)
        free_input(c);
}

/* Take the frames that are complete; stops when the client is paused, dead or has had its turn. True: it has had its turn with
 * bytes left. */
static bool take_frames(struct client *c)
{
    size_t at = 0; /* where the first frame begins */
    int frames = 0;

    while (!c->dead && !c->closing && !c->paused && at + c->in_seen < c->in_len && frames < FRAMES_A_TURN) {
        struct skv_error err;
        size_t used;
        enum scan_status st = scan_feed(&c->scan, c->in + at + c->in_seen, c->in_len - at - c->in_seen, &used, &err);

        if (st == SCAN_FAIL) {
            client_fault(c, &err);
            return false;
        }
        c->in_seen += used;
        if (st == SCAN_MORE)
            break;
        one_frame(c, at, c->in_seen);
        if (c->dead || c->closing)
            return false;
        at += c->in_seen;
        scan_start(c);
        c->frame_since_ms = 0;
        frames++;
    }
    in_consume(c, at);
    return frames == FRAMES_A_TURN && c->in_len > 0;
}

/* The peer has closed its end. It may still read: then its requests go on. */
static void at_eof(struct client *c)
{
    struct pollfd p = { .fd = c->fd, .events = 0 };

    if (poll(&p, 1, 0) == 1 && (p.revents & (POLLHUP | POLLERR))) {
        client_drop(c, DROP_DISCONNECT, "closed by the peer");
        return;
    }
    c->eof = true;
    event_del(c->rd);
    if (is_over(c))
        client_drop(c, DROP_DISCONNECT, "closed by the peer");
}

/* One turn: what is left from the last, then what has arrived, up to a bound. True: it took all of its turn. */
static bool read_turn(struct client *c)
{
    if (take_frames(c))
        return true;
    for (int i = 0; i < READ_ROUNDS && !c->dead && !c->closing && !c->eof; i++) {
        struct skv_error err;
        size_t n;
        ssize_t r;

        if (c->paused) { /* it doesn't read, so we don't either */
            event_del(c->rd);
            return false;
        }
        if (grow_input(c, &err) != 0) {
            if (err.code == SKV_NO_MEMORY)
                client_drop(c, DROP_MEMORY, err.msg);
            else
                client_fault(c, &err);
            return false;
        }
        n = c->in_cap - c->in_len < READ_BYTES ? c->in_cap - c->in_len : READ_BYTES;
        r = recv(c->fd, c->in + c->in_len, n, MSG_DONTWAIT);
        if (r < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
                client_drop(c, DROP_DISCONNECT, strerror(errno));
            return false;
        }
        if (r == 0) {
            at_eof(c);
            return false;
        }
        c->in_len += (size_t)r;
        if (take_frames(c))
            return true;
        if ((size_t)r < n)
            return false;
    }
    return !c->dead && !c->closing && !c->eof;
}

/* A user's connections that take all of their turns are many: the next turn of this one comes when nobody else wants one. Few are
 * never put off, or somebody's many small messages could keep another's long one waiting. */
static void note_turn(struct client *c, bool all)
{
    if (c->user == NULL) /* it was dropped */
        return;
    c->user->busy += all - c->busy;
    c->busy = all;
    event_priority_set(c->rd, all && c->user->busy > BUSY_OF_USER ? LOOP_LATER : LOOP_NORMAL);
}

static void on_read(evutil_socket_t fd, short what, void *arg)
{
    struct client *c = arg;
    bool all;

    (void)fd;
    (void)what;
    if (c->dead || c->closing)
        return;
    c->active_ms = now_ms();
    all = read_turn(c);
    note_turn(c, all);
    if (all)
        event_active(c->rd, EV_READ, 0); /* frames may be waiting in our own buffer */
}

/* ---- time ------------------------------------------------------------------------------------------ */

void client_request_done(struct client *c)
{
    c->active_ms = now_ms();
    if (c->eof && is_over(c))
        event_active(c->wr, EV_WRITE, 0);
}

void client_excuse(struct client *c, int64_t ms)
{
    c->active_ms += ms;
    c->out_since_ms += ms;
    c->paused_since_ms += ms;
    if (c->frame_since_ms != 0)
        c->frame_since_ms += ms;
}

void client_sweep(struct client *c, int64_t now)
{
    const struct config *cfg = &c->srv->cfg;
    int64_t linger = c->closing ? FAULT_LINGER_MS : cfg->reader_timeout_ms;

    if (c->eof || c->paused) { /* nobody reads from it, so nobody hears that it went away */
        struct pollfd p = { .fd = c->fd, .events = 0 };

        if (poll(&p, 1, 0) == 1 && (p.revents & (POLLHUP | POLLERR))) {
            client_drop(c, DROP_DISCONNECT, "closed by the peer");
            return;
        }
    }
    if ((c->out_bytes > 0 || c->closing) && now - c->out_since_ms > linger) {
        client_drop(c, DROP_SLOW, "it read nothing for reader-timeout");
        return;
    }
    if (c->paused && now - c->paused_since_ms > PAUSED_FACTOR * cfg->reader_timeout_ms) {
        client_drop(c, DROP_SLOW, "it read too slowly for ten times reader-timeout");
        return;
    }
    if (cfg->frame_timeout_ms > 0 && c->frame_since_ms > 0 && !c->paused && !c->closing &&
        now - c->frame_since_ms > cfg->frame_timeout_ms) {
        struct skv_error err;

        skv_fail(&err, SKV_BAD_REQUEST, "a message was begun %lld ms ago and is not complete (frame-timeout)",
                 (long long)(now - c->frame_since_ms));
        client_fault(c, &err);
        return;
    }
    if (cfg->idle_timeout_ms > 0 && c->n_requests == 0 && c->out_bytes == 0 && c->topics == 0 && !c->closing &&
        now - c->active_ms > cfg->idle_timeout_ms)
        client_drop(c, DROP_TIMEOUT, "idle for idle-timeout");
}
