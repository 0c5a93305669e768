/* client.h - one connection: its frames in, its queue out, its requests.
 *
 * Input is scanned as it arrives and never held beyond one frame's limit. Output waits in the client's own queue and is
 * pulled when the socket has room: above output-high its sequences pause, below output-low they go on, and a reader that
 * takes nothing for reader-timeout, or lets output-limit pile up, is dropped with a reason.
 *
 * A dropped client is only marked, its memory is freed from the loop: never inside a callback of its own.
 */
#ifndef SKVD_DAEMON_CLIENT_H
#define SKVD_DAEMON_CLIENT_H

#include "daemon/server.h"
#include "protocol/scan.h"

struct chunk;

struct client {
    TAILQ_ENTRY(client) link;
    struct server *srv;
    uint64_t id; /* in the log */
    int fd;
    uint32_t uid;
    gid_t gid;
    pid_t pid;
    bool admin;
    struct user *user;
    char name[64]; /* by hello */

    struct event *rd, *wr;
    struct scan scan;
    uint8_t *in;
    size_t in_len, in_cap, in_seen; /* in_seen: bytes of the first frame that the scan has looked at */
    int64_t frame_since_ms;         /* the first frame has been incomplete since; 0: there is none */
    int64_t active_ms;              /* last sign of life */

    struct chunk *out_first, *out_last;
    int64_t out_bytes;
    int64_t buffered;     /* of in_cap and out_bytes, what the quotas know */
    int64_t out_since_ms; /* output has waited without any progress since */
    bool busy;            /* its last turn was a whole one */
    bool paused;          /* its sequences are */
    int64_t paused_since_ms;
    bool eof;             /* it sends no more, but may read */
    bool closing;         /* to be closed once the output is out */
    bool dead;

    struct request_list requests;
    int n_requests;
    int64_t prompt_bytes; /* of them */
    unsigned topics; /* of admin.h */
};

/* Takes the descriptor. NULL (and the descriptor is the caller's still) when it can't be served, *err says why. */
struct client *client_new(struct server *s, int fd, struct skv_error *err);

/* Queue what b holds; nothing once the client is dead. A b that failed drops the client: its stream would be broken. */
void client_send(struct client *c, const struct wire_buf *b);
void client_wire_error(const struct server *s, const struct skv_error *err, struct skv_error *out);
void client_send_error(struct client *c, uint32_t msgid, const struct skv_error *err);

/* A fault of the stream: one notification, then the end. */
void client_fault(struct client *c, const struct skv_error *err);
/* Close it when its output is out. */
void client_finish(struct client *c);
/* End it now: its requests are cancelled. */
void client_drop(struct client *c, enum drop_kind kind, const char *why);

/* Close a connection's descriptor so that the peer can still read what was sent. */
void client_close_fd(int fd);

/* The daemon itself was held up for ms: that time is not the client's. */
void client_excuse(struct client *c, int64_t ms);
/* Once in a while: what has timed out? */
void client_sweep(struct client *c, int64_t now);
/* Free those that were dropped. */
void client_reap(struct server *s);
/* Write what the sockets take, for at most ms. */
void client_flush_all(struct server *s, int ms);
/* A request of it ended: is there more to do? */
void client_request_done(struct client *c);

#endif
