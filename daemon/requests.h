/* requests.h - the requests in flight: msgids of clients on one side, ids of the engine on the other.
 *
 * A request is in its client's list until it is answered or the client is gone, and in the table by engine id until the
 * engine has said END; whatever it took from the quotas is given back then.
 */
#ifndef SKVD_DAEMON_REQUESTS_H
#define SKVD_DAEMON_REQUESTS_H

#include "daemon/server.h"
#include "protocol/args.h"

struct request {
    TAILQ_ENTRY(request) link; /* of its client */
    struct request *next_id;   /* of its bucket */
    struct server *srv;
    struct client *c;          /* NULL: gone, or none was waiting */
    struct user *user;         /* NULL: not counted */
    const struct method *method;
    uint64_t id;               /* the engine's; 0: it has ended */
    uint32_t msgid;
    uint32_t uid;
    pid_t pid;
    uint64_t conn;
    int64_t prompt_bytes, started_ms;
    bool stream, notify_progress;
    const char *gone;          /* why the client does not wait any more */
    uint64_t sequence;         /* kill, cancel */
    struct event *timer;       /* status: answered without the engine after a while */
    struct request *parent;    /* set: one of several for one answer */
    int pending;
    const struct option_row *option; /* of such a one: the setting, and what it was before */
    int64_t old;
    struct skv_error failed;   /* set: the first failure */
    uint64_t applied, restart, refused; /* reload: bits of config_options */
};

/* One message from a client: answers it, or puts a request in flight. bad_utf8: it has a string that is not UTF-8. */
void requests_message(struct client *c, const struct wire_msg *m, bool bad_utf8);

/* What the engine has to say; returns when there is no more, or after a fair share (then true). */
bool requests_events(struct server *s);

/* The client is gone: cancel all of its requests. why: for the log, a literal. */
void requests_orphan(struct client *c, const char *why);
void requests_pause(struct client *c, bool on);

/* For admin.c: put a query to the engine in flight (r->method and client already set by the caller's message). Takes er.
 * NULL with *err. c NULL: nobody waits for the answer. */
struct request *requests_submit(struct server *s, struct client *c, uint32_t msgid, const struct method *m,
                                struct engine_request *er, struct skv_error *err);
/* Answer r's client; r stays in flight until the engine's END. */
void requests_answered(struct request *r);
/* A request without an engine id is over. */
void requests_end(struct request *r);
/* An empty request of a client, in its list; NULL: no memory. */
struct request *requests_new(struct server *s, struct client *c, uint32_t msgid, const struct method *m);

#endif
