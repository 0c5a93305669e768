#include "daemon/server.h"

#include <event2/event.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/admin.h"
#include "daemon/client.h"
#include "daemon/listener.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/quotas.h"
#include "daemon/requests.h"

#define SWEEP_MS     100
#define TICK_MS      1000 /* events of subscribers, the layers' figures */
#define LATE_MS      1000 /* a sweep that comes this much too late: we were held up, and nobody else is to blame */
#define FLUSH_MS     1000 /* final frames have this long to go out */
#define STOP_ALARM_S 10   /* an engine that doesn't come to its next step for so long when told to stop at once */
#define CALLBACKS_A_TURN 32

int64_t now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/* ---- the engine's side ----------------------------------------------------------------------------- */

static void on_engine(evutil_socket_t fd, short what, void *arg)
{
    struct server *s = arg;

    (void)fd;
    (void)what;
    if (requests_events(s))
        event_active(s->engine_ev, EV_READ, 0); /* more: but first the others' turn */
    if (s->state == SERVER_STOPPING && s->n_requests == 0)
        event_base_loopbreak(s->base);
}

static void on_reap(evutil_socket_t fd, short what, void *arg)
{
    (void)fd;
    (void)what;
    client_reap(arg);
}

void server_reap_soon(struct server *s)
{
    event_active(s->reap_ev, EV_TIMEOUT, 0);
}

/* ---- life ------------------------------------------------------------------------------------------ */

void server_drain(struct server *s, bool on)
{
    s->state = on ? SERVER_DRAINING : SERVER_SERVING;
    engine_drain(s->engine, on);
    notify_send(on ? "STATUS=draining" : "STATUS=serving");
}

void server_shutdown(struct server *s, int64_t grace_ms, const char *why)
{
    if (s->state == SERVER_STOPPING) {
        s->drain_until_ms = now_ms();
        log_line(LOG_INFO, "stop reason=\"%s\" at-once requests=%d", why, s->n_requests);
        event_base_loopbreak(s->base);
        return;
    }
    log_line(LOG_INFO, "stop reason=\"%s\" grace_ms=%lld requests=%d", why, (long long)grace_ms, s->n_requests);
    server_drain(s, true);
    s->state = SERVER_STOPPING;
    s->drain_until_ms = now_ms() + grace_ms;
    listener_stop(s->listener);
    notify_send("STOPPING=1\nSTATUS=finishing %d requests", s->n_requests);
    if (s->n_requests == 0)
        event_base_loopbreak(s->base);
}

static void on_term(evutil_socket_t sig, short what, void *arg)
{
    struct server *s = arg;

    (void)what;
    server_shutdown(s, s->cfg.drain_timeout_ms, sig == SIGTERM ? "SIGTERM" : "SIGINT");
}

static void on_hup(evutil_socket_t sig, short what, void *arg)
{
    struct skv_error err;

    (void)sig;
    (void)what;
    admin_reload(arg, NULL, 0, &err);
}

/* ---- time ------------------------------------------------------------------------------------------ */

static void watch_engine(struct server *s, int64_t now)
{
    static int64_t told;
    struct engine_stats st;
    char why[256];
    bool stuck;

    if (!s->failed && engine_failed(s->engine, why, sizeof why)) {
        s->failed = true;
        notify_send("STATUS=the device failed: %s\nERRNO=5", why);
        server_shutdown(s, FLUSH_MS, "the device failed");
    }
    engine_stats(s->engine, &st);
    stuck = st.step_age_ms > s->cfg.step_limit_ms;
    if (stuck && !s->stuck) {
        log_line(LOG_ERR, "engine stuck step_age_ms=%lld limit_ms=%lld", (long long)st.step_age_ms,
                 (long long)s->cfg.step_limit_ms);
        notify_send("STATUS=stuck: the last step is %lld ms old", (long long)st.step_age_ms);
    } else if (!stuck && s->stuck) {
        log_line(LOG_WARNING, "engine goes on");
        notify_send("STATUS=serving");
    }
    s->stuck = stuck;
    if (notify_watchdog_ms() > 0 && !stuck && now - told >= notify_watchdog_ms()) {
        notify_send("WATCHDOG=1");
        told = now;
    }
}

/* Ask what each layer does. Nobody waits: the answer goes to metrics. */
static void poll_engine(struct server *s, enum engine_kind kind)
{
    struct engine_request *er = engine_request_new(kind);
    struct skv_error err;

    if (er == NULL)
        return;
    er->all_uids = true;
    requests_submit(s, NULL, 0, NULL, er, &err);
}

static void on_sweep(evutil_socket_t fd, short what, void *arg)
{
    struct server *s = arg;
    int64_t now = now_ms();
    struct client *c, *next;

    int64_t late = s->swept_ms != 0 ? now - s->swept_ms - SWEEP_MS : 0;

    (void)fd;
    (void)what;
    s->swept_ms = now;
    for (c = TAILQ_FIRST(&s->clients); c != NULL; c = next) {
        next = TAILQ_NEXT(c, link);
        if (late > LATE_MS)
            client_excuse(c, late);
        client_sweep(c, now);
    }
    watch_engine(s, now);
    if (now - s->ticked_ms >= TICK_MS) {
        s->ticked_ms = now;
        if (s->metrics != NULL && !s->stuck)
            poll_engine(s, ENGINE_KV);
        admin_event_tick(s);
    }
    if (s->state == SERVER_STOPPING && (s->n_requests == 0 || now >= s->drain_until_ms))
        event_base_loopbreak(s->base);
}

/* ---- the whole ------------------------------------------------------------------------------------- */

static struct event *add(struct server *s, evutil_socket_t fd, short what, event_callback_fn fn)
{
    struct event *ev = event_new(s->base, fd, what, fn, s);

    if (ev != NULL && fd >= 0 && event_add(ev, NULL) != 0) {
        event_free(ev);
        return NULL;
    }
    return ev;
}

/* What one callback makes active again (a client with frames left, the engine with events left) comes after the others' sockets:
 * they are asked every so many callbacks. Without that, clients that send without end would have the loop to themselves. */
static struct event_base *new_base(void)
{
    struct event_config *cfg = event_config_new();
    struct event_base *base = NULL;

    if (cfg != NULL && event_config_set_max_dispatch_interval(cfg, NULL, CALLBACKS_A_TURN, 0) == 0)
        base = event_base_new_with_config(cfg);
    if (base != NULL && event_base_priority_init(base, LOOP_PRIORITIES) != 0) {
        event_base_free(base);
        base = NULL;
    }
    if (cfg != NULL)
        event_config_free(cfg);
    return base;
}

int server_init(struct server *s, struct skv_error *err)
{
    struct timeval sweep = { 0, SWEEP_MS * 1000 };

    TAILQ_INIT(&s->clients);
    TAILQ_INIT(&s->dead);
    wire_buf_init(&s->out);
    s->started_ms = now_ms();
    s->base = new_base();
    if (s->base == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the event loop");
    s->engine_ev = add(s, engine_event_fd(s->engine), EV_READ | EV_PERSIST, on_engine);
    s->reap_ev = add(s, -1, 0, on_reap);
    s->sweep_ev = add(s, -1, EV_PERSIST, on_sweep);
    s->term_ev = add(s, SIGTERM, EV_SIGNAL | EV_PERSIST, on_term);
    s->int_ev = add(s, SIGINT, EV_SIGNAL | EV_PERSIST, on_term);
    s->hup_ev = add(s, SIGHUP, EV_SIGNAL | EV_PERSIST, on_hup);
    if (s->engine_ev == NULL || s->reap_ev == NULL || s->sweep_ev == NULL || s->term_ev == NULL || s->int_ev == NULL ||
        s->hup_ev == NULL || event_add(s->sweep_ev, &sweep) != 0)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the event loop");
    return 0;
}

static void stop_alarm(int sig)
{
    static const char msg[] = "skvd: the engine did not come to the end of its step; stopped without it\n";

    (void)sig;
    if (write(STDERR_FILENO, msg, sizeof msg - 1) < 0)
        _exit(1);
    _exit(1);
}

int server_run(struct server *s)
{
    struct client *c;

    event_base_dispatch(s->base);
    /* What still runs is cancelled, and everybody who waits gets his final frame. */
    signal(SIGALRM, stop_alarm);
    alarm(STOP_ALARM_S);
    engine_stop(s->engine);
    while (requests_events(s))
        ;
    alarm(0);
    client_flush_all(s, FLUSH_MS);
    while ((c = TAILQ_FIRST(&s->clients)) != NULL)
        client_drop(c, DROP_SHUTDOWN, "skvd stops");
    client_reap(s);
    log_line(LOG_INFO, "stopped");
    return s->failed ? 1 : 0;
}

void server_fini(struct server *s)
{
    struct event *ev[] = { s->engine_ev, s->reap_ev, s->sweep_ev, s->term_ev, s->int_ev, s->hup_ev };

    for (size_t i = 0; i < sizeof ev / sizeof *ev; i++)
        if (ev[i] != NULL)
            event_free(ev[i]);
    wire_buf_fini(&s->out);
    if (s->base != NULL)
        event_base_free(s->base);
    for (int i = 0; i < USER_BUCKETS; i++)
        while (s->quotas.bucket[i] != NULL) {
            struct user *u = s->quotas.bucket[i];

            s->quotas.bucket[i] = u->next;
            free(u);
        }
}
