#include "daemon/metrics.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/client.h"
#include "daemon/listener.h"

#define TEXT_BYTES   (256 * 1024)
#define REASONS_MAX  24
#define HTTP_SECONDS 10
#define HTTP_HEADER_BYTES 8192
#define HTTP_MOST    16  /* connections */
#define HTTP_NEXT_MS 1
#define HTTP_REST_MS 200
#define LAYERS_MAX   256

struct metrics {
    struct evhttp *http;
    struct evconnlistener *listener;
    struct event *accept_ev; /* let the next ones in */
    struct bufferevent *open[HTTP_MOST]; /* with a reference of ours each, the oldest first */
    int n_open;
    int fd;
    char path[108];
    char reason[REASONS_MAX][24]; /* literals of ours, copied; the table never gets more of them */
    int64_t count[REASONS_MAX];
    int n_reasons;
    struct engine_kv_layer layer[LAYERS_MAX];
    int n_layers;
};

/* Counted from the start, whether or not anybody asks. */
static struct metrics counted = { .fd = -1 };

void metrics_request_end(struct server *s, const struct method *m, const char *reason)
{
    struct metrics *t = &counted;
    int i = 0;

    (void)s;
    if (m->id != METHOD_GENERATE)
        return;
    while (i < t->n_reasons && strcmp(t->reason[i], reason) != 0)
        i++;
    if (i == REASONS_MAX)
        return;
    if (i == t->n_reasons)
        snprintf(t->reason[t->n_reasons++], sizeof t->reason[0], "%s", reason);
    t->count[i]++;
}

/* evhttp tells nobody how many connections it has, and takes as many as there are descriptors. So we hold a reference to the
 * buffer of each: one that evhttp has freed has no callbacks any more. It closes its descriptor when we let it go, not before, as
 * its events are still there. */
static void forget_closed(struct metrics *t)
{
    int n = 0;

    for (int i = 0; i < t->n_open; i++) {
        void *arg = NULL;

        bufferevent_getcb(t->open[i], NULL, NULL, NULL, &arg);
        if (arg != NULL)
            t->open[n++] = t->open[i];
        else
            bufferevent_decref(t->open[i]);
    }
    t->n_open = n;
}

void metrics_kv(const struct engine_kv_info *kv)
{
    forget_closed(&counted);
    counted.n_layers = kv->n_layers < LAYERS_MAX ? kv->n_layers : LAYERS_MAX;
    for (int i = 0; i < counted.n_layers; i++)
        counted.layer[i] = kv->layer[i];
}

/* ---- the text -------------------------------------------------------------------------------------- */

struct text {
    char *p;
    size_t len, size;
};

static void put(struct text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void put(struct text *t, const char *fmt, ...)
{
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(t->p + t->len, t->size - t->len, fmt, ap);
    va_end(ap);
    if (n > 0)
        t->len = (size_t)n < t->size - t->len ? t->len + (size_t)n : t->size - 1;
}

static void head(struct text *t, const char *name, const char *type, const char *help)
{
    put(t, "# HELP skvd_%s %s\n# TYPE skvd_%s %s\n", name, help, name, type);
}

static void one(struct text *t, const char *name, const char *type, const char *help, double v)
{
    head(t, name, type, help);
    put(t, "skvd_%s %.17g\n", name, v);
}

static void histogram(struct text *t, const char *name, const char *help, const int64_t *bucket, double sum)
{
    int64_t n = 0;

    head(t, name, "histogram", help);
    for (int i = 0; i < ENGINE_HIST; i++) {
        n += bucket[i];
        put(t, "skvd_%s_bucket{le=\"%g\"} %lld\n", name, engine_hist_bounds[i], (long long)n);
    }
    n += bucket[ENGINE_HIST];
    put(t, "skvd_%s_bucket{le=\"+Inf\"} %lld\n", name, (long long)n);
    put(t, "skvd_%s_sum %.9g\nskvd_%s_count %lld\n", name, sum, name, (long long)n);
}

static void engine_part(struct text *t, const struct engine_stats *st)
{
    double total = st->pages_total > 0 ? (double)st->pages_total : 1;

    one(t, "num_requests_running", "gauge", "Sequences that run.", st->running);
    one(t, "num_requests_waiting", "gauge", "Requests that wait for a place.", st->waiting);
    one(t, "num_idle_sessions", "gauge", "Sessions whose KV cache is kept between requests.", st->idle_sessions);
    one(t, "kv_cache_usage_perc", "gauge", "Used share of the KV pages, 0 to 1.", (double)st->pages_used / total);
    one(t, "kv_pages", "gauge", "KV pages in the pool.", (double)st->pages_total);
    one(t, "kv_pages_used", "gauge", "KV pages in use.", (double)st->pages_used);
    one(t, "prompt_tokens_total", "counter", "Tokens read.", (double)st->tokens_in);
    one(t, "generation_tokens_total", "counter", "Tokens generated.", (double)st->tokens_out);
    histogram(t, "time_to_first_token_seconds", "From a request's arrival to its first token.", st->hist_ttft, st->sum_ttft_s);
    histogram(t, "inter_token_latency_seconds", "Between two tokens of a sequence.", st->hist_itl, st->sum_itl_s);
    histogram(t, "request_queue_time_seconds", "From a request's arrival to its first step.", st->hist_queue, st->sum_queue_s);
    one(t, "evicted_slots_total", "counter", "KV pairs that were evicted or never kept.", (double)st->evicted);
    one(t, "kv_bytes_saved", "gauge", "Bytes that a full cache would hold for the present sequences beyond what is held.",
        (double)st->bytes_saved);
    if (st->kept_mass >= 0)
        one(t, "kept_attention_mass", "gauge", "Share of the attention that falls on kept KV pairs, measured at sparsify.",
            st->kept_mass);
    one(t, "steps_total", "counter", "Iterations of the engine.", (double)st->steps);
    one(t, "step_seconds_mean", "gauge", "Mean time of an iteration.", st->step_ms_mean / 1e3);
    one(t, "step_age_seconds", "gauge", "Since the last iteration began or ended; 0 when idle.", (double)st->step_age_ms / 1e3);
}

/* A full cache would hold the same in each layer, so what it would hold in one is a layer's share of held and saved. */
static void layer_part(struct text *t, const struct engine_stats *st)
{
    double held = 0, full;

    if (counted.n_layers == 0)
        return;
    for (int i = 0; i < counted.n_layers; i++)
        held += (double)counted.layer[i].bytes;
    full = (held + (double)(st->bytes_saved > 0 ? st->bytes_saved : 0)) / counted.n_layers;
    head(t, "layer_kv_bytes", "gauge", "KV bytes held, by layer.");
    for (int i = 0; i < counted.n_layers; i++)
        put(t, "skvd_layer_kv_bytes{layer=\"%d\"} %lld\n", i, (long long)counted.layer[i].bytes);
    head(t, "layer_evicted_slots_total", "counter", "KV pairs evicted or never kept, by layer.");
    for (int i = 0; i < counted.n_layers; i++)
        put(t, "skvd_layer_evicted_slots_total{layer=\"%d\"} %lld\n", i, (long long)counted.layer[i].evicted);
    head(t, "layer_kept_ratio", "gauge", "Share of a full cache's bytes that is held, by layer; 1 while there is nothing to hold.");
    for (int i = 0; i < counted.n_layers; i++)
        put(t, "skvd_layer_kept_ratio{layer=\"%d\"} %.6g\n", i, full > 0 ? (double)counted.layer[i].bytes / full : 1.0);
    head(t, "layer_kept_attention_mass", "gauge", "Share of the attention that falls on kept KV pairs, by layer, where measured.");
    for (int i = 0; i < counted.n_layers; i++)
        if (counted.layer[i].kept_mass >= 0)
            put(t, "skvd_layer_kept_attention_mass{layer=\"%d\"} %.6g\n", i, counted.layer[i].kept_mass);
}

static void daemon_part(struct text *t, const struct server *s)
{
    static const char *const drops[DROP_KINDS] = { "disconnect", "fault", "slow", "timeout", "shutdown", "memory" };

    head(t, "request_success_total", "counter", "Requests to generate that ended, by reason.");
    for (int i = 0; i < counted.n_reasons; i++)
        put(t, "skvd_request_success_total{finished_reason=\"%s\"} %lld\n", counted.reason[i], (long long)counted.count[i]);
    head(t, "errors_total", "counter", "Error answers, by code.");
    for (int i = 1; i < SKV_CODE_COUNT; i++)
        put(t, "skvd_errors_total{code=\"%s\"} %lld\n", skv_code_name((enum skv_code)i), (long long)s->counters.errors[i]);
    one(t, "connections", "gauge", "Connections.", s->n_clients);
    one(t, "requests_in_flight", "gauge", "Requests in flight, queries too.", s->quotas.requests);
    one(t, "prompt_bytes_in_flight", "gauge", "Bytes of the prompts in flight.", (double)s->quotas.prompt_bytes);
    one(t, "connections_total", "counter", "Connections accepted.", (double)s->counters.accepted);
    one(t, "messages_total", "counter", "Messages received.", (double)s->counters.frames);
    one(t, "connections_refused_total", "counter", "Connections turned away.", (double)s->counters.refused);
    head(t, "connections_closed_total", "counter", "Connections that ended, by reason.");
    for (int i = 0; i < DROP_KINDS; i++)
        put(t, "skvd_connections_closed_total{reason=\"%s\"} %lld\n", drops[i], (long long)s->counters.dropped[i]);
    one(t, "reader_pauses_total", "counter", "Times that a slow reader's sequences were paused.", (double)s->counters.pauses);
    one(t, "draining", "gauge", "1 while no new work is taken.", s->state != SERVER_SERVING);
    one(t, "engine_stuck", "gauge", "1 while the last iteration is older than step-limit.", s->stuck);
}

size_t metrics_text(const struct server *s, char *buf, size_t size)
{
    struct text t = { buf, 0, size };
    struct engine_stats st;

    engine_stats(s->engine, &st);
    head(&t, "build_info", "gauge", "The version.");
    put(&t, "skvd_build_info{version=\"%s\"} 1\n", PACKAGE_VERSION);
    engine_part(&t, &st);
    layer_part(&t, &st);
    daemon_part(&t, s);
    return t.len;
}

/* ---- HTTP ------------------------------------------------------------------------------------------ */

static void on_metrics(struct evhttp_request *req, void *arg)
{
    struct evbuffer *out = evbuffer_new();
    char *text = malloc(TEXT_BYTES);

    if (out == NULL || text == NULL) {
        evhttp_send_error(req, HTTP_SERVUNAVAIL, "no memory");
    } else {
        evhttp_add_header(evhttp_request_get_output_headers(req), "Content-Type", "text/plain; version=0.0.4; charset=utf-8");
        evbuffer_add(out, text, metrics_text(arg, text, TEXT_BYTES));
        evhttp_send_reply(req, HTTP_OK, "OK", out);
    }
    if (out != NULL)
        evbuffer_free(out);
    free(text);
}

static void let_in_later(struct metrics *t, int ms)
{
    struct timeval tv = { 0, ms * 1000 };

    if (event_add(t->accept_ev, &tv) == 0)
        evconnlistener_disable(t->listener);
}

static void let_in(evutil_socket_t fd, short what, void *arg)
{
    struct metrics *t = arg;

    (void)fd;
    (void)what;
    forget_closed(t);
    if (t->n_open < HTTP_MOST || event_add(t->accept_ev, &(struct timeval){ 0, HTTP_NEXT_MS * 1000 }) != 0)
        evconnlistener_enable(t->listener);
}

/* The buffer of a new connection. The last that there is room for makes the oldest end, and the next one waits for that: who
 * opens connections and says nothing keeps nobody out. */
static struct bufferevent *on_connection(struct event_base *base, void *arg)
{
    struct metrics *t = arg;
    struct bufferevent *bev = bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);

    forget_closed(t);
    if (bev == NULL || t->n_open == HTTP_MOST)
        return bev;
    bufferevent_setwatermark(bev, EV_READ, 0, 2 * HTTP_HEADER_BYTES); /* also when evhttp has done with it */
    bufferevent_incref(bev);
    t->open[t->n_open++] = bev;
    if (t->n_open == HTTP_MOST) {
        shutdown(bufferevent_getfd(t->open[0]), SHUT_RDWR);
        let_in_later(t, HTTP_NEXT_MS);
    }
    return bev;
}

/* No descriptors: asked at once, accept would say so again. */
static void on_accept_error(struct evconnlistener *l, void *arg)
{
    (void)l;
    (void)arg; /* evhttp's */
    let_in_later(&counted, HTTP_REST_MS);
}

static int bind_loopback(const char *spec, struct skv_error *err)
{
    const char *colon = strrchr(spec, ':');
    struct sockaddr_in sa = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    char *end;
    long port = colon != NULL ? strtol(colon + 1, &end, 10) : 0;
    int fd, on = 1;

    if (colon == NULL || colon - spec != 9 || strncmp(spec, "127.0.0.1", 9) != 0 || *end != '\0' || port < 1 || port > 65535)
        return skv_fail(err, SKV_BAD_CONFIG, "metrics: '%.64s' is neither unix:PATH nor 127.0.0.1:PORT", spec);
    sa.sin_port = htons((uint16_t)port);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, (struct sockaddr *)&sa, sizeof sa) != 0 || listen(fd, 64) != 0) {
        skv_fail(err, SKV_BAD_CONFIG, "metrics %s: %s", spec, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

int metrics_bind(const struct config *cfg, struct skv_error *err)
{
    err->code = SKV_OK;
    if (cfg->metrics == NULL || *cfg->metrics == '\0')
        return -1;
    if (strncmp(cfg->metrics, "unix:", 5) == 0) {
        int fd = listener_bind_unix(cfg->metrics + 5, cfg->socket_mode, cfg->socket_group, err);

        if (fd >= 0)
            snprintf(counted.path, sizeof counted.path, "%s", cfg->metrics + 5);
        return fd;
    }
    return bind_loopback(cfg->metrics, err);
}

int metrics_start(struct server *s, int fd, struct skv_error *err)
{
    struct evhttp *http = evhttp_new(s->base);
    struct evhttp_bound_socket *bound = NULL;

    counted.accept_ev = event_new(s->base, -1, 0, let_in, &counted);
    if (http != NULL && counted.accept_ev != NULL)
        bound = evhttp_accept_socket_with_handle(http, fd);
    if (bound == NULL) {
        if (http != NULL)
            evhttp_free(http);
        if (counted.accept_ev != NULL)
            event_free(counted.accept_ev);
        close(fd);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the metrics' listener");
    }
    counted.listener = evhttp_bound_socket_get_listener(bound);
    evconnlistener_set_error_cb(counted.listener, on_accept_error);
    evhttp_set_bevcb(http, on_connection, &counted);
    evhttp_set_allowed_methods(http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD);
    evhttp_set_max_headers_size(http, HTTP_HEADER_BYTES);
    evhttp_set_max_body_size(http, 0);
    evhttp_set_timeout(http, HTTP_SECONDS);
    evhttp_set_cb(http, "/metrics", on_metrics, s);
    counted.http = http;
    s->metrics = &counted;
    return 0;
}

void metrics_stop(struct server *s)
{
    if (s->metrics != NULL) {
        evhttp_free(s->metrics->http);
        event_free(s->metrics->accept_ev);
        forget_closed(s->metrics);
    }
    if (counted.path[0] != '\0')
        unlink(counted.path);
    s->metrics = NULL;
}
