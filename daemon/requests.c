#include "daemon/requests.h"

#include <event2/event.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/admin.h"
#include "daemon/client.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "daemon/quotas.h"
#include "daemon/reply.h"

#define EVENTS_A_TAKE  64
#define TAKES_A_TURN   16
#define MESSAGE_BYTES  96  /* of a message with nothing in it: its struct and two strings */
#define STATUS_WAIT_MS 500 /* then status answers without the engine: a stuck one must show */

/* ---- the table ------------------------------------------------------------------------------------- */

static struct request **id_slot(struct server *s, uint64_t id)
{
    struct request **p = &s->by_id[id % REQUEST_BUCKETS];

    while (*p != NULL && (*p)->id != id)
        p = &(*p)->next_id;
    return p;
}

static struct request *by_msgid(struct client *c, uint32_t msgid)
{
    struct request *r;

    TAILQ_FOREACH(r, &c->requests, link)
        if (r->msgid == msgid)
            return r;
    return NULL;
}

struct request *requests_new(struct server *s, struct client *c, uint32_t msgid, const struct method *m)
{
    struct request *r = calloc(1, sizeof *r);

    if (r == NULL)
        return NULL;
    r->srv = s;
    r->method = m;
    r->msgid = msgid;
    r->started_ms = now_ms();
    if (c != NULL) {
        r->c = c;
        r->uid = c->uid;
        r->pid = c->pid;
        r->conn = c->id;
        TAILQ_INSERT_TAIL(&c->requests, r, link);
        c->n_requests++;
    }
    return r;
}

static void detach(struct request *r)
{
    struct client *c = r->c;

    if (c == NULL)
        return;
    TAILQ_REMOVE(&c->requests, r, link);
    c->n_requests--;
    c->prompt_bytes -= r->prompt_bytes;
    r->c = NULL;
    if (!c->dead)
        client_request_done(c);
}

void requests_answered(struct request *r)
{
    if (r->timer != NULL) {
        event_free(r->timer);
        r->timer = NULL;
    }
    detach(r);
}

void requests_end(struct request *r)
{
    requests_answered(r);
    if (r->user != NULL)
        quotas_end(r->srv, r->user, r->prompt_bytes);
    free(r);
}

static int put_in_flight(struct request *r, struct engine_request *er, struct skv_error *err)
{
    struct server *s = r->srv;

    if (engine_submit(s->engine, er, &r->id, err) != 0) {
        engine_request_free(er);
        r->id = 0;
        if (err->code == SKV_OVERLOADED && err->retry_after_ms <= 0)
            err->retry_after_ms = quotas_retry_ms(s);
        return -1;
    }
    r->next_id = s->by_id[r->id % REQUEST_BUCKETS];
    s->by_id[r->id % REQUEST_BUCKETS] = r;
    s->n_requests++;
    return 0;
}

struct request *requests_submit(struct server *s, struct client *c, uint32_t msgid, const struct method *m,
                                struct engine_request *er, struct skv_error *err)
{
    struct request *r = requests_new(s, c, msgid, m);

    if (r == NULL) {
        engine_request_free(er);
        skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
        return NULL;
    }
    if (put_in_flight(r, er, err) != 0) {
        requests_end(r);
        return NULL;
    }
    return r;
}

/* ---- requests in ----------------------------------------------------------------------------------- */

static struct engine_text take_text(struct args_str *t)
{
    struct engine_text e = { t->s, t->len };

    t->s = NULL;
    return e;
}

static int take_messages(struct engine_request *er, struct args *a, struct skv_error *err)
{
    if (a->messages.n < 0)
        return 0;
    er->messages = calloc((size_t)a->messages.n + 1, sizeof *er->messages);
    if (er->messages == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the messages");
    for (int i = 0; i < a->messages.n; i++) {
        er->messages[i].role = take_text(&a->messages.v[i].role);
        er->messages[i].content = take_text(&a->messages.v[i].content);
    }
    er->n_messages = a->messages.n;
    return 0;
}

static void take_tokens(struct args_tokens *from, int32_t **to, int *n)
{
    *to = from->v;
    *n = from->n;
    from->v = NULL;
}

static int take_stop(struct engine_request *er, struct args *a, struct skv_error *err)
{
    if (a->stop.n == 0)
        return 0;
    er->stop = calloc((size_t)a->stop.n, sizeof *er->stop);
    if (er->stop == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the stop strings");
    for (int i = 0; i < a->stop.n; i++)
        er->stop[i] = take_text(&a->stop.v[i]);
    er->n_stop = a->stop.n;
    return 0;
}

static int take_pin(struct engine_request *er, struct args *a, struct skv_error *err)
{
    if (a->pin.n == 0)
        return 0;
    er->pin = calloc((size_t)a->pin.n, sizeof *er->pin);
    if (er->pin == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the pinned ranges");
    for (int i = 0; i < a->pin.n; i++)
        er->pin[i] = (struct engine_range){ a->pin.v[i].from, a->pin.v[i].to };
    er->n_pin = a->pin.n;
    return 0;
}

static void take_kv(struct engine_request *er, struct args *a)
{
    er->kv.policy = a->kv.policy;
    er->kv.dtype = a->kv.dtype;
    a->kv.policy = a->kv.dtype = NULL;
    er->kv.budget = a->kv.budget;
    er->kv.sink = a->kv.sink;
    er->kv.recent = a->kv.recent;
    er->kv.alpha = a->kv.alpha;
    er->kv.pool = a->kv.pool;
    er->kv.pool_kind = a->kv.pool_kind;
    er->kv.full_layers = a->kv.full_layers;
}

static void take_sampling(struct engine_request *er, const struct args *a)
{
    er->sampling.temperature = a->temperature;
    er->sampling.top_k = a->top_k;
    er->sampling.top_p = a->top_p;
    er->sampling.min_p = a->min_p;
    er->sampling.repeat_penalty = a->repeat_penalty;
    er->sampling.presence_penalty = a->presence_penalty;
    er->sampling.frequency_penalty = a->frequency_penalty;
    er->sampling.seed = a->seed;
    er->sampling.seed_set = a->seed_set;
}

/* What the arguments weigh, for the quotas: about the memory that they take while the request waits. */
static int64_t weigh(const struct args *a)
{
    int64_t n = (int64_t)a->prompt.len + (int64_t)a->text.len + (int64_t)a->cont_text.len;

    n += MESSAGE_BYTES * (int64_t)(a->messages.n > 0 ? a->messages.n : 0);
    for (int i = 0; i < a->messages.n; i++)
        n += (int64_t)a->messages.v[i].content.len + (int64_t)a->messages.v[i].role.len;
    n += 4 * (int64_t)(a->tokens.n > 0 ? a->tokens.n : 0);
    n += 4 * (int64_t)(a->cont_tokens.n > 0 ? a->cont_tokens.n : 0);
    n += 4 * (int64_t)(a->candidates.from != NULL ? a->candidates.from[a->candidates.n] + a->candidates.n : 0);
    return n;
}

static int check_vocab(const struct server *s, const char *what, const struct args_tokens *t, struct skv_error *err)
{
    for (int i = 0; i < t->n; i++)
        if (t->v[i] >= s->model.vocab)
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] is %d, the model's tokens are 0 to %d", what, i, t->v[i],
                            s->model.vocab - 1);
    return 0;
}

static int64_t deadline(const struct server *s, const struct args *a)
{
    int64_t most = s->cfg.max_deadline_ms;

    return most > 0 && (a->deadline_ms == 0 || a->deadline_ms > most) ? most : a->deadline_ms;
}

static const enum engine_kind kind_of[METHOD_COUNT] = {
    [METHOD_GENERATE] = ENGINE_GENERATE,   [METHOD_SCORE] = ENGINE_SCORE,
    [METHOD_TOKENIZE] = ENGINE_TOKENIZE,   [METHOD_DETOKENIZE] = ENGINE_DETOKENIZE,
    [METHOD_APPLY_TEMPLATE] = ENGINE_APPLY_TEMPLATE, [METHOD_STATUS] = ENGINE_SEQUENCES,
    [METHOD_SEQUENCES] = ENGINE_SEQUENCES, [METHOD_KV] = ENGINE_KV,
    [METHOD_KEPT] = ENGINE_KEPT,
};

/* An engine request from arguments, which it empties. NULL with *err. */
static struct engine_request *to_engine(const struct server *s, const struct client *c, const struct method *m,
                                        struct args *a, struct skv_error *err)
{
    struct engine_request *er;

    if (check_vocab(s, "tokens", &a->tokens, err) != 0 || check_vocab(s, "continuation", &a->cont_tokens, err) != 0)
        return NULL;
    er = engine_request_new(kind_of[m->id]);
    if (er == NULL) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
        return NULL;
    }
    er->uid = c->uid;
    er->conn = c->id;
    er->pid = c->pid;
    if (m->id == METHOD_GENERATE || m->id == METHOD_SCORE) {
        er->raw = a->raw;
        take_kv(er, a);
        er->deadline_ms = deadline(s, a);
        er->priority = a->priority;
        er->logprobs = a->logprobs;
    }
    if (m->id == METHOD_GENERATE) {
        take_sampling(er, a);
        er->progress = a->progress;
        er->max_tokens = a->max_tokens;
        er->ignore_eos = a->ignore_eos;
        er->session = a->session;
        a->session = NULL;
        er->pin_system = a->pin_system;
    } else if (m->id == METHOD_SCORE) {
        er->refeed = a->refeed;
        er->cand = a->candidates.v;
        er->cand_from = a->candidates.from;
        er->n_cand_from = a->candidates.n;
        memset(&a->candidates, 0, sizeof a->candidates);
        er->has_cont_text = a->cont_text.s != NULL;
        er->cont_text = take_text(&a->cont_text);
        take_tokens(&a->cont_tokens, &er->cont_tokens, &er->n_cont_tokens);
    } else if (m->id == METHOD_TOKENIZE) {
        er->special = a->special;
        er->bos = a->bos;
        a->prompt = a->text;
        a->text.s = NULL;
    }
    er->has_text = a->prompt.s != NULL;
    er->text = take_text(&a->prompt);
    take_tokens(&a->tokens, &er->tokens, &er->n_tokens);
    er->add_generation_prompt = m->id == METHOD_APPLY_TEMPLATE ? a->add_generation_prompt : true;
    er->all_uids = m->id == METHOD_SEQUENCES;
    er->sequence = a->sequence;
    if (take_messages(er, a, err) != 0 || take_stop(er, a, err) != 0 || take_pin(er, a, err) != 0) {
        engine_request_free(er);
        return NULL;
    }
    return er;
}

static void status_late(evutil_socket_t fd, short what, void *arg)
{
    struct request *r = arg;
    struct client *c = r->c;

    (void)fd;
    (void)what;
    if (c == NULL)
        return;
    wire_buf_clear(&r->srv->out);
    reply_status(&r->srv->out, r->msgid, r->srv, NULL);
    requests_answered(r);
    client_send(c, &r->srv->out);
}

static void status_timer(struct request *r)
{
    struct timeval tv = { 0, STATUS_WAIT_MS * 1000 };

    r->timer = event_new(r->srv->base, -1, 0, status_late, r);
    if (r->timer != NULL)
        event_add(r->timer, &tv);
}

/* A method that the engine answers. */
static int engine_method(struct client *c, uint32_t msgid, const struct method *m, struct args *a, struct skv_error *err)
{
    struct server *s = c->srv;
    bool work = m->id == METHOD_GENERATE || m->id == METHOD_SCORE;
    int64_t bytes = weigh(a);
    struct engine_request *er;
    struct request *r;
    struct user *user;

    if (work && s->state != SERVER_SERVING)
        return skv_fail(err, SKV_DRAINING, "skvd takes no new work: it is %s",
                        s->state == SERVER_STOPPING ? "shutting down" : "being drained by its administrator");
    er = to_engine(s, c, m, a, err);
    if (er == NULL)
        return -1;
    if (quotas_begin(s, c, bytes, work, &user, err) != 0) {
        engine_request_free(er);
        return -1;
    }
    r = requests_submit(s, c, msgid, m, er, err);
    if (r == NULL) {
        quotas_end(s, user, bytes);
        c->prompt_bytes -= bytes;
        if (m->id == METHOD_STATUS) { /* it says how things stand, always */
            wire_buf_clear(&s->out);
            reply_status(&s->out, msgid, s, NULL);
            client_send(c, &s->out);
            return 0;
        }
        return -1;
    }
    r->user = user;
    r->prompt_bytes = bytes;
    r->stream = a->stream;
    r->notify_progress = a->progress;
    if (m->id == METHOD_STATUS)
        status_timer(r);
    if (work)
        admin_event_sequence(s, true, r, NULL, NULL);
    return 0;
}

/* By sequence: the engine's list of this user's is asked for first, and what is in it is ended (admin_end_sequence). */
static int cancel_sequence(struct client *c, uint32_t msgid, const struct method *m, const struct args *a,
                           struct skv_error *err)
{
    struct engine_request *er = engine_request_new(ENGINE_SEQUENCES);
    struct request *r;
    struct user *user;

    if (er == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
    er->uid = c->uid;
    if (quotas_begin(c->srv, c, 0, false, &user, err) != 0) {
        engine_request_free(er);
        return -1;
    }
    r = requests_submit(c->srv, c, msgid, m, er, err);
    if (r == NULL) {
        quotas_end(c->srv, user, 0);
        return -1;
    }
    r->user = user;
    r->sequence = a->sequence;
    return 0;
}

static bool cancel(struct client *c, const struct args *a)
{
    struct request *r = a->msgid_set && a->msgid <= UINT32_MAX ? by_msgid(c, (uint32_t)a->msgid) : NULL;

    if (r == NULL || r->id == 0)
        return false;
    engine_cancel(c->srv->engine, r->id);
    return true;
}

static void hello(struct client *c, uint32_t msgid, const struct args *a)
{
    struct wire_buf *b = &c->srv->out;

    if (a->client != NULL)
        snprintf(c->name, sizeof c->name, "%.40s%s%.20s", a->client, a->version != NULL ? "/" : "",
                 a->version != NULL ? a->version : "");
    wire_buf_clear(b);
    reply_hello(b, msgid, c->srv, c->uid, c->admin);
    client_send(c, b);
}

static const char *next_method(void *arg)
{
    int *i = arg;

    return *i < METHOD_COUNT ? method_table[(*i)++].name : NULL;
}

static int find_method(const struct client *c, const struct wire_msg *m, const struct method **out, struct skv_error *err)
{
    char name[40];
    const char *near;
    int i = 0;

    *out = method_find(m->method, m->method_len);
    if (*out != NULL) {
        if ((*out)->admin && !c->admin)
            return skv_fail(err, SKV_FORBIDDEN,
                            "%s is for administrators: root, the daemon's own user and members of the admin group",
                            (*out)->name);
        return 0;
    }
    snprintf(name, sizeof name, "%.*s", (int)(m->method_len < sizeof name ? m->method_len : sizeof name), m->method);
    if (!scan_utf8_valid(name, strlen(name)))
        name[0] = '\0';
    near = method_nearest(m->method, m->method_len, next_method, &i);
    if (near != NULL)
        return skv_fail(err, SKV_UNKNOWN_METHOD, "there is no method '%s'; did you mean '%s'?", name, near);
    return skv_fail(err, SKV_UNKNOWN_METHOD, "there is no method '%s' (skvd-protocol(7) lists them)", name);
}

static int dispatch(struct client *c, uint32_t msgid, const struct method *m, struct args *a, struct skv_error *err)
{
    switch (m->id) {
    case METHOD_HELLO:
        hello(c, msgid, a);
        return 0;
    case METHOD_CANCEL: {
        if (a->msgid_set == a->sequence_set)
            return skv_fail(err, SKV_BAD_REQUEST, "cancel takes exactly one of msgid and sequence");
        if (a->sequence_set)
            return cancel_sequence(c, msgid, m, a, err);
        bool done = cancel(c, a);

        wire_buf_clear(&c->srv->out);
        reply_flag(&c->srv->out, msgid, "cancelled", done);
        client_send(c, &c->srv->out);
        return 0;
    }
    case METHOD_GENERATE:
    case METHOD_SCORE:
    case METHOD_TOKENIZE:
    case METHOD_DETOKENIZE:
    case METHOD_APPLY_TEMPLATE:
    case METHOD_STATUS:
    case METHOD_SEQUENCES:
    case METHOD_KV:
    case METHOD_KEPT:
        return engine_method(c, msgid, m, a, err);
    default:
        admin_method(c, msgid, m, a);
        return 0;
    }
}

static void one_request(struct client *c, const struct wire_msg *m, bool bad_utf8)
{
    const struct method *method = NULL;
    struct skv_error err;
    struct args a;
    int rc;

    if (by_msgid(c, m->msgid) != NULL)
        rc = skv_fail(&err, SKV_BAD_REQUEST, "msgid %u is in flight already: each of a connection's requests needs its own",
                      m->msgid);
    else if (bad_utf8)
        rc = skv_fail(&err, SKV_BAD_REQUEST, "a string of the request is not valid UTF-8");
    else
        rc = find_method(c, m, &method, &err);
    if (rc == 0) {
        rc = args_decode(method, m->params, &a, &err);
        if (rc == 0)
            rc = dispatch(c, m->msgid, method, &a, &err);
        args_fini(&a);
    }
    if (rc != 0) {
        c->srv->counters.errors[err.code]++;
        log_line(err.code == SKV_INTERNAL ? LOG_WARNING : LOG_DEBUG, "refuse conn=%llu uid=%u method=%s msgid=%u code=%s",
                 (unsigned long long)c->id, c->uid, method != NULL ? method->name : "?", m->msgid, skv_code_name(err.code));
        client_send_error(c, m->msgid, &err);
    }
}

void requests_message(struct client *c, const struct wire_msg *m, bool bad_utf8)
{
    if (m->kind == WIRE_REQUEST) {
        one_request(c, m, bad_utf8);
    } else if (m->kind == WIRE_NOTIFICATION && method_find(m->method, m->method_len) == &method_table[METHOD_CANCEL]) {
        /* Nobody waits for an answer, but to cancel is worth doing all the same. Other notifications mean nothing here. */
        struct skv_error err;
        struct args a;

        if (args_decode(&method_table[METHOD_CANCEL], m->params, &a, &err) == 0)
            cancel(c, &a);
        args_fini(&a);
    }
}

void requests_orphan(struct client *c, const char *why)
{
    struct request *r, *next;

    for (r = TAILQ_FIRST(&c->requests); r != NULL; r = next) {
        next = TAILQ_NEXT(r, link);
        r->gone = why;
        if (r->timer != NULL) {
            event_free(r->timer);
            r->timer = NULL;
        }
        TAILQ_REMOVE(&c->requests, r, link);
        c->n_requests--;
        r->c = NULL;
        if (r->id != 0)
            engine_cancel(c->srv->engine, r->id);
    }
}

void requests_pause(struct client *c, bool on)
{
    struct request *r;

    TAILQ_FOREACH(r, &c->requests, link)
        if (r->stream && r->method->id == METHOD_GENERATE) {
            if (on)
                engine_pause(c->srv->engine, r->id);
            else
                engine_resume(c->srv->engine, r->id);
        }
}

/* ---- events out ------------------------------------------------------------------------------------ */

static void log_end(const struct request *r, const struct engine_event *ev, const char *reason)
{
    const struct engine_result *res = ev->result;
    bool work = r->method->id == METHOD_GENERATE || r->method->id == METHOD_SCORE;
    char detail[200];
    int level = ev->code == SKV_INTERNAL ? LOG_ERR : work ? LOG_INFO : LOG_DEBUG;

    if (level > log_level())
        return;
    /* A request that is refused costs its sender next to nothing: such lines are limited, or they fill the disk. */
    if (work && level == LOG_INFO && ev->code != SKV_OK && (res == NULL || res->completion_tokens == 0) && !log_allowed())
        return;
    if (res != NULL)
        log_line(level, "request method=%s uid=%u pid=%d conn=%llu msgid=%u id=%llu reason=%s prompt=%d cached=%d out=%d "
                 "queued_ms=%.1f ttft_ms=%.1f total_ms=%.1f policy=%.15s kv_bytes=%lld",
                 r->method->name, r->uid, (int)r->pid, (unsigned long long)r->conn, r->msgid, (unsigned long long)r->id,
                 reason, res->prompt_tokens, res->cached_tokens, res->completion_tokens, res->queued_ms, res->ttft_ms,
                 res->total_ms, res->policy, (long long)res->kv_bytes);
    else
        log_line(level, "request method=%s uid=%u pid=%d conn=%llu msgid=%u id=%llu reason=%s total_ms=%lld detail=%s",
                 r->method->name, r->uid, (int)r->pid, (unsigned long long)r->conn, r->msgid, (unsigned long long)r->id,
                 reason, (long long)(now_ms() - r->started_ms),
                 log_value(ev->message != NULL ? ev->message : "", detail, sizeof detail));
}

/* One of several commands of one `set` or `reload` is done. */
static void child_done(struct request *child, const struct engine_event *ev)
{
    struct request *p = child->parent;

    if (ev->code != SKV_OK) { /* the engine knows better what it can do */
        config_set_number(&child->srv->cfg, child->option, child->old);
        admin_refused(p, child->option, ev->code, ev->message);
    }
    if (--p->pending == 0)
        admin_settings_done(p);
}

static const char *end_reason(const struct request *r, const struct engine_event *ev)
{
    if (r->gone != NULL)
        return r->gone;
    if (ev->code != SKV_OK)
        return skv_code_name(ev->code);
    return ev->result != NULL && r->method->id == METHOD_GENERATE ? reply_finish_name(ev->result->finish) : "ok";
}

static void request_ended(struct request *r, const struct engine_event *ev)
{
    struct server *s = r->srv;
    struct client *c = r->c;
    struct request **slot = id_slot(s, r->id);

    *slot = r->next_id;
    s->n_requests--;
    if (r->parent != NULL) {
        child_done(r, ev);
    } else if (r->method == NULL) {
        if (ev->answer != NULL && ev->answer->kind == ENGINE_KV)
            metrics_kv(&ev->answer->kv);
    } else if (r->method->id == METHOD_KILL || r->method->id == METHOD_CANCEL) {
        admin_end_sequence(r, ev->answer);
    } else {
        const char *reason = end_reason(r, ev);

        log_end(r, ev, reason);
        metrics_request_end(s, r->method, reason);
        if (ev->code != SKV_OK)
            s->counters.errors[ev->code]++;
        if (r->method->id == METHOD_GENERATE || r->method->id == METHOD_SCORE)
            admin_event_sequence(s, false, r, reason, ev->result);
        if (c != NULL) {
            wire_buf_clear(&s->out);
            reply_answer(&s->out, r, ev);
        }
        requests_answered(r);
        if (c != NULL)
            client_send(c, &s->out);
    }
    r->id = 0;
    requests_end(r);
}

static void one_event(struct server *s, const struct engine_event *ev)
{
    struct request *r = *id_slot(s, ev->id);

    if (r == NULL)
        return;
    if (ev->type == ENGINE_EV_END) {
        request_ended(r, ev);
        return;
    }
    if (r->c == NULL || r->c->dead)
        return;
    if (ev->type == ENGINE_EV_TOKEN && r->stream) {
        wire_buf_clear(&s->out);
        reply_token(&s->out, r->msgid, ev);
        client_send(r->c, &s->out);
    } else if (ev->type == ENGINE_EV_PROGRESS && r->notify_progress) {
        wire_buf_clear(&s->out);
        reply_progress(&s->out, r->msgid, ev);
        client_send(r->c, &s->out);
    }
}

bool requests_events(struct server *s)
{
    struct engine_event ev[EVENTS_A_TAKE];

    for (int turn = 0; turn < TAKES_A_TURN; turn++) {
        int n = engine_events(s->engine, ev, EVENTS_A_TAKE);

        for (int i = 0; i < n; i++) {
            one_event(s, &ev[i]);
            engine_event_fini(&ev[i]);
        }
        if (n < EVENTS_A_TAKE)
            return false;
    }
    return true;
}
