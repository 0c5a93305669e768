/* server.h - what the daemon's modules share: the event loop's world.
 *
 * Everything here belongs to the loop thread. The engine is reached by ids only (engine/engine.h).
 */
#ifndef SKVD_DAEMON_SERVER_H
#define SKVD_DAEMON_SERVER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "daemon/config.h"
#include "engine/engine.h"
#include "protocol/error.h"
#include "protocol/wire.h"

struct event;
struct event_base;
struct evhttp;
struct client;
struct request;
struct listener;
struct metrics;

TAILQ_HEAD(client_list, client);
TAILQ_HEAD(request_list, request);

#define REQUEST_BUCKETS 4096
#define USER_BUCKETS    256

/* What one user has in use. */
struct user {
    struct user *next;
    uint32_t uid;
    int connections, requests;
    int busy; /* connections whose last turn was a whole one */
    int64_t prompt_bytes, buffered;
};

struct quotas {
    struct user *bucket[USER_BUCKETS];
    int connections, requests;
    int64_t prompt_bytes, buffered;
};

enum drop_kind { DROP_DISCONNECT, DROP_FAULT, DROP_SLOW, DROP_TIMEOUT, DROP_SHUTDOWN, DROP_MEMORY, DROP_KINDS };

struct counters {
    int64_t accepted, refused, frames;
    int64_t dropped[DROP_KINDS];
    int64_t errors[SKV_CODE_COUNT]; /* requests that ended with it */
    int64_t pauses;
};

/* Of the loop's events; libevent gives the middle one to all of which nothing is said. */
enum { LOOP_NORMAL = 1, LOOP_LATER, LOOP_PRIORITIES };

enum server_state { SERVER_SERVING, SERVER_DRAINING, SERVER_STOPPING };

struct server {
    struct event_base *base;
    struct engine *engine;
    struct engine_model_info model;
    struct config cfg;
    struct config_args *args;
    gid_t admin_gid;
    bool have_admin_gid;

    struct listener *listener;
    struct client_list clients, dead;
    int n_clients;
    uint64_t next_client;
    struct request *by_id[REQUEST_BUCKETS];
    int n_requests;
    struct quotas quotas;
    struct counters counters;
    int subscribers;

    struct event *engine_ev, *reap_ev, *sweep_ev, *term_ev, *int_ev, *hup_ev;
    struct metrics *metrics;
    enum server_state state;
    int64_t drain_until_ms; /* monotonic */
    int64_t started_ms;
    bool failed;            /* the engine's device is lost: nothing to do but end */
    bool stuck;             /* the engine's last step is older than step-limit */
    struct wire_buf out;    /* scratch for one message */
    int64_t last_evicted, last_steps;
    int64_t ticked_ms, swept_ms;
};

int64_t now_ms(void); /* monotonic */

/* server.c: the loop. */
int server_init(struct server *s, struct skv_error *err); /* base, events; the engine and listener are set by then */
int server_run(struct server *s);                         /* until the end; the exit status */
void server_fini(struct server *s);
void server_drain(struct server *s, bool on);
void server_shutdown(struct server *s, int64_t grace_ms, const char *why); /* drain, then stop */
void server_reap_soon(struct server *s);

#endif
