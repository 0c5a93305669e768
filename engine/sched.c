/* sched.c - a request's life around its run: checks and what it must reserve, sessions, ends, time. Whose turn it is:
 * admit.c. */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/thin.h"

struct seq *sched_find_request(struct engine *e, uint64_t request)
{
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->request == request && request != 0) /* an idle session serves none */
            return s;
    return NULL;
}

struct seq *sched_find_sequence(struct engine *e, uint64_t id)
{
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->id == id)
            return s;
    return NULL;
}

struct seq *sched_find_session(struct engine *e, uint32_t uid, const char *name)
{
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->uid == uid && s->session[0] != '\0' && strcmp(s->session, name) == 0)
            return s;
    return NULL;
}

/* ---- sessions that were dropped ---------------------------------------------------------------- */

/* Where the next one is noted: a free entry, else the oldest of the user that has most of them. */
static struct lost_session *lost_entry(struct engine *e)
{
    struct lost_session *victim = NULL;
    int most = 0;

    for (int i = 0; i < LOST_SESSIONS; i++) {
        struct lost_session *l = &e->lost[i];
        int n = 0;
        if (l->at == 0)
            return l;
        for (int k = 0; k < LOST_SESSIONS; k++)
            n += e->lost[k].uid == l->uid;
        if (n > most || (n == most && l->at < victim->at)) {
            victim = l;
            most = n;
        }
    }
    return victim;
}

void sched_remember_lost(struct engine *e, const struct seq *s)
{
    struct lost_session *l = lost_entry(e);

    l->at = ++e->lost_at;
    l->uid = s->uid;
    memcpy(l->name, s->session, sizeof l->name);
}

bool sched_session_lost(struct engine *e, uint32_t uid, const char *name)
{
    bool found = false;

    for (int i = 0; i < LOST_SESSIONS; i++)
        if (e->lost[i].at != 0 && e->lost[i].uid == uid && strcmp(e->lost[i].name, name) == 0) {
            e->lost[i].at = 0; /* said once */
            found = true;
        }
    return found;
}

static void release(struct engine *e, struct seq *s)
{
    if (s->lane >= 0)
        pages_lane_put(e->pages, s->lane);
    s->lane = -1;
    pages_unreserve(e->pages, s->reserved);
    s->reserved = 0;
}

void sched_forget(struct engine *e, struct seq *s)
{
    TAILQ_REMOVE(&e->seqs, s, link);
    users_leave(&e->users, s->user);
    seq_free(s);
}

static void drop(struct engine *e, struct seq *s)
{
    release(e, s);
    sched_forget(e, s);
}

void sched_drop_session(struct engine *e, struct seq *s, bool lost)
{
    assert(s->state == SEQ_IDLE);
    if (lost)
        sched_remember_lost(e, s);
    core_log(e, 6, "session ended uid=%u tokens=%d name=\"%s\"", s->uid, s->n_kv, s->session);
    drop(e, s);
}

/* ---- ends ------------------------------------------------------------------------------------------ */

/* The request is over and its event is out: keep the sequence as an idle session, or let it go. */
static void settle(struct engine *e, struct seq *s, bool kv_whole)
{
    if (s->state == SEQ_TEXT || s->state == SEQ_WAITING)
        core_waited(e, s->uid);
    if (s->session[0] == '\0' || s->n_kv == 0 || !kv_whole) {
        if (s->session[0] != '\0' && s->n_kv > 0)
            sched_remember_lost(e, s);
        drop(e, s);
        return;
    }
    if (s->state == SEQ_TEXT || s->state == SEQ_WAITING || s->state == SEQ_READY)
        s->tokens.n = s->n_before;
    /* Keep promised what is held; the next request reserves what it needs beyond. */
    int64_t held = pages_lane_held(e->pages, s->lane);
    if (s->reserved > held) {
        pages_unreserve(e->pages, s->reserved - held);
        s->reserved = held;
    }
    seq_end_request(s);
    s->t_idle = core_now_us(e);
}

void sched_finish(struct engine *e, struct seq *s, enum engine_finish finish, int stop)
{
    if (s->state == SEQ_DECODE)
        decode_give_back(e, s);
    emit_end(e, s, SKV_OK, NULL, finish, stop);
    atomic_fetch_add_explicit(&e->stats.finished, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&e->stats.reason[finish], 1, memory_order_relaxed);
    settle(e, s, true);
}

void sched_fail(struct engine *e, struct seq *s, enum skv_code code, const char *fmt, ...)
{
    char msg[SKV_ERROR_MSG];
    bool in_prefill = s->state == SEQ_PREFILL;
    size_t from, len;
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    if (in_prefill)
        prefill_leave(e, s);
    if (s->state == SEQ_DECODE)
        decode_give_back(e, s);
    if (s->state == SEQ_DECODE && s->req->kind == ENGINE_GENERATE)
        seq_text_cut(s, true, &from, &len); /* what was held back belongs to the text that there is */
    emit_end(e, s, code, msg, ENGINE_FINISH_LENGTH, -1);
    atomic_fetch_add_explicit(code == SKV_CANCELLED ? &e->stats.cancelled : &e->stats.failed, 1, memory_order_relaxed);
    settle(e, s, !in_prefill);
}

/* ---- entering the queue ------------------------------------------------------------------------------- */

static int pin_ranges(struct seq *s, struct kern_range **out, struct skv_error *err)
{
    const struct engine_request *r = s->req;
    int n = 0, from = 0;

    *out = malloc(((size_t)r->n_pin + 1) * sizeof **out);
    if (*out == NULL)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    if (r->pin_system && s->system_to > s->n_before)
        (*out)[n++] = (struct kern_range){ 0, from = s->system_to };
    for (int i = 0; i < r->n_pin; i++) {
        if (r->pin[i].from < 0 || r->pin[i].to <= r->pin[i].from || r->pin[i].to > s->tokens.n ||
            (i > 0 && r->pin[i].from < r->pin[i - 1].to)) {
            skv_fail(err, SKV_BAD_REQUEST,
                     "pin[%d] is [%d, %d]; ranges must be ascending, not overlap, and lie in the prompt's %d tokens", i,
                     r->pin[i].from, r->pin[i].to, s->tokens.n);
            free(*out);
            *out = NULL;
            return -1;
        }
        if (r->pin[i].to > from) /* what the system turn covers already is cut off */
            (*out)[n++] = (struct kern_range){ r->pin[i].from > from ? r->pin[i].from : from, r->pin[i].to };
    }
    return n;
}

static bool kv_asked(const struct engine_kv_options *o)
{
    return o->policy != NULL || o->budget != -1 || o->sink != -1 || o->recent != -1 || o->alpha != -1 || o->pool != -1 ||
           o->pool_kind != -1 || o->full_layers != -1;
}

static int make_plan(struct engine *e, struct seq *s, struct skv_error *err)
{
    const struct engine_kv_options *o = &s->req->kv;
    const struct policy *policy = e->policy;
    struct policy_params params = e->params;
    struct kern_range *pin = NULL;
    int n_pin;

    if (o->dtype != NULL && strcmp(o->dtype, e->dtype) != 0)
        return skv_fail(err, SKV_BAD_REQUEST, "kv.dtype \"%s\": this server's KV cache is %s (its --kv-dtype decides)", o->dtype,
                        e->dtype);
    if (o->policy != NULL && (policy = policy_find(o->policy)) == NULL)
        return skv_fail(err, SKV_BAD_REQUEST, "kv.policy \"%s\" is none of %s", o->policy, policy_names());
    if (kv_asked(o)) {
        struct policy base = *policy;
        if (policy == e->policy)
            base.defaults = e->params;
        if (policy_resolve(&base, o, e->model.src.dims.max_context, &params, SKV_BAD_REQUEST, err) < 0)
            return -1;
    }
    memset(params.thin, 0, sizeof params.thin);
    if (policy->thins)
        memcpy(params.thin, e->thin, sizeof params.thin);
    n_pin = pin_ranges(s, &pin, err);
    if (n_pin < 0)
        return -1;
    params.first_prompt = s->tokens.n;
    int r = kvplan_init(&s->plan, policy, &params, pin, n_pin, &e->model.src.dims, err);
    free(pin);
    s->has_plan = r == 0;
    return r;
}

static int check_session_plan(const struct seq *s, struct skv_error *err)
{
    if (kv_asked(&s->req->kv) || s->req->n_pin > 0)
        return skv_fail(err, SKV_BAD_REQUEST,
                        "session \"%s\" began with policy %s; kv and pin can be given with its first request only", s->session,
                        s->plan.policy->name);
    return 0;
}

/* Lengths, limits, and what must be reserved. */
static int check_size(struct engine *e, struct seq *s, struct skv_error *err)
{
    int context = e->model.src.dims.max_context, n_new = s->tokens.n - s->n_kv;
    int answer = s->req->kind == ENGINE_SCORE ? s->cont.n : s->req->max_tokens;

    if (n_new < 1)
        return skv_fail(err, SKV_BAD_REQUEST, "the prompt is empty: there is nothing to continue from");
    if (s->req->kind == ENGINE_SCORE && s->cont.n < 1)
        return skv_fail(err, SKV_BAD_REQUEST, "the continuation is empty: there is nothing to score");
    if (s->tokens.n > context)
        return skv_fail(err, SKV_CONTEXT_OVERFLOW, "the prompt has %d tokens%s; the context is %d tokens (--context decides)",
                        s->tokens.n, s->n_kv > 0 ? " with its session's" : "", context);
    s->n_prompt = s->tokens.n;
    /* The last token of an answer needs no KV, so it may lie at the position after the last. */
    s->at_context = answer > context - s->n_prompt + 1;
    s->n_max = s->at_context ? context - s->n_prompt + 1 : answer;
    if (s->req->kind == ENGINE_SCORE && s->at_context)
        return skv_fail(err, SKV_CONTEXT_OVERFLOW, "prompt and continuation have %d tokens; the context is %d tokens",
                        s->n_prompt + answer, context);
    return 0;
}

int64_t sched_wanted_pages(const struct engine *e, const struct seq *s)
{
    int64_t n = (int64_t)s->n_prompt + s->n_max, context = e->model.src.dims.max_context;

    return kvplan_pages(&s->plan, n < context ? n : context);
}

static int64_t wanted_transient(const struct seq *s)
{
    int64_t past = s->n_kv, most = kvplan_max_budget(&s->plan) + 1;

    if (past > most)
        past = most * s->plan.n_kv < s->n_kv ? most * s->plan.n_kv : past; /* heads that compete may differ */
    return kvplan_transient(&s->plan, past + s->n_prompt - s->n_kv);
}

/* All memory that the answer's tokens and choices need is taken here, so that a running sequence takes none. */
static int take_memory(struct engine *e, struct seq *s, struct skv_error *err)
{
    const struct engine_request *r = s->req;
    struct engine_sampling sampling = r->sampling;
    int cap = s->n_prompt + s->n_max + 1;
    int32_t *p = realloc(s->tokens.id, (size_t)cap * sizeof *p);

    if (p != NULL) {
        s->tokens.id = p;
        s->tokens.cap = cap;
    }
    if (s->slot0 == NULL)
        s->slot0 = malloc(2 * (size_t)e->model.src.dims.n_kv * sizeof *s->slot0);
    bool thin = thin_wanted(s);
    if (thin)
        s->row_pos = malloc((size_t)(s->n_prompt - s->n_kv) * sizeof *s->row_pos);
    if (!sampling.seed_set)
        sampling.seed = (uint64_t)core_now_us(e) * 0x9e3779b97f4a7c15u ^ s->request;
    if (r->kind == ENGINE_GENERATE)
        s->sampler = sampler_new(&sampling, e->model.src.dims.n_vocab);
    if (p == NULL || s->slot0 == NULL || (thin && s->row_pos == NULL) || (r->kind == ENGINE_GENERATE && s->sampler == NULL))
        return skv_fail(err, SKV_INTERNAL, "no memory for a sequence of %d tokens", cap);
    for (int i = s->n_prompt > 64 ? s->n_prompt - 64 : 0; s->sampler != NULL && i < s->n_prompt; i++)
        sampler_accept(s->sampler, s->tokens.id[i]);
    return 0;
}

/* What one limit of KV memory is for. */
struct kv_limit {
    int64_t most; /* bytes; 0: no limit */
    bool conn;    /* for a connection, not for a user */
    const char *whose, *one, *setting;
};

static bool shares(const struct kv_limit *l, const struct seq *a, const struct seq *b)
{
    return a->uid == b->uid && (!l->conn || a->conn == b->conn);
}

/* The least recently used idle session that counts as s does. */
static struct seq *oldest_session(struct engine *e, const struct kv_limit *l, const struct seq *of)
{
    struct seq *s, *oldest = NULL;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->state == SEQ_IDLE && shares(l, s, of) && (oldest == NULL || s->t_idle < oldest->t_idle))
            oldest = s;
    return oldest;
}

/* Pages promised to those that count as `without` does, and to those of them that wait, without it; *idle: of that, what idle
 * sessions hold. */
static int64_t promised_to(const struct engine *e, const struct kv_limit *l, const struct seq *without, int64_t *idle)
{
    const struct seq *s;
    int64_t sum = 0;

    *idle = 0;
    TAILQ_FOREACH(s, &e->seqs, link) {
        if (!shares(l, s, without) || s == without)
            continue;
        int64_t more = s->state == SEQ_WAITING ? sched_wanted_pages(e, s) : 0;
        sum += more > s->reserved ? more : s->reserved;
        *idle += s->state == SEQ_IDLE ? s->reserved : 0;
    }
    return sum;
}

/* What is admitted never grows beyond a limit, so it is looked at once, here. Their own idle sessions make room. */
static int check_share(struct engine *e, const struct kv_limit *l, struct seq *s, struct skv_error *err)
{
    int64_t page = (int64_t)e->kv->page.bytes, most = l->most / page, need, held, idle;

    if (l->most <= 0)
        return 0;
    need = sched_wanted_pages(e, s);
    held = promised_to(e, l, s, &idle);
    if (need > most)
        return skv_fail(err, SKV_TOO_LARGE, "%d prompt and %d answer tokens need %lld bytes of KV memory, one %s may have %lld "
                        "(%s decides)", s->n_prompt, s->n_max, (long long)(need * page), l->one, (long long)l->most, l->setting);
    if (held - idle + need > most)
        return skv_fail(err, SKV_OVERLOADED, "%s requests need %lld bytes of KV memory already, this one %lld, and one "
                        "%s may have %lld (%s decides): try again later", l->whose, (long long)((held - idle) * page),
                        (long long)(need * page), l->one, (long long)l->most, l->setting);
    while (held + need > most) {
        struct seq *oldest = oldest_session(e, l, s);
        assert(oldest != NULL); /* all idle ones together are enough */
        held -= oldest->reserved;
        sched_drop_session(e, oldest, true);
    }
    return 0;
}

static int check_shares(struct engine *e, struct seq *s, struct skv_error *err)
{
    const struct kv_limit of_conn = { e->cfg.max_kv_connection, true, "this connection's", "connection", "max-kv-per-connection" };
    const struct kv_limit of_user = { e->cfg.max_kv_user, false, "this user's", "user", "max-kv-per-user" };

    return check_share(e, &of_conn, s, err) < 0 ? -1 : check_share(e, &of_user, s, err);
}

void sched_enqueue(struct engine *e, struct seq *s)
{
    struct skv_error err;
    int64_t need, total = core_pages(e);
    double kib = (double)e->kv->page.bytes / 1024;

    if (check_size(e, s, &err) < 0 || (s->has_plan ? check_session_plan(s, &err) : make_plan(e, s, &err)) < 0 ||
        take_memory(e, s, &err) < 0) {
        sched_fail(e, s, err.code, "%s", err.msg);
        return;
    }
    s->transient = wanted_transient(s);
    need = sched_wanted_pages(e, s) + s->transient;
    if (need > total) {
        sched_fail(e, s, SKV_TOO_LARGE,
                   "%d prompt and %d answer tokens need %.0f KiB of KV memory under policy %s; there are %.0f KiB "
                   "(--kv-memory decides; a shorter prompt, a smaller max_tokens or kv.budget needs less)",
                   s->n_prompt, s->n_max, (double)need * kib, s->plan.policy->name, (double)total * kib);
        return;
    }
    if (check_shares(e, s, &err) < 0) {
        sched_fail(e, s, err.code, "%s", err.msg);
        return;
    }
    s->state = SEQ_WAITING;
}

/* ---- time ------------------------------------------------------------------------------------------------- */

static void sooner(int64_t at, int64_t now, int *ms)
{
    int64_t left = (at - now + 999) / 1000;

    if (left < 0)
        left = 0;
    if (*ms < 0 || left < *ms)
        *ms = left > 3600000 ? 3600000 : (int)left;
}

int sched_expire(struct engine *e)
{
    int64_t now = core_now_us(e), idle_us = (int64_t)e->cfg.session_idle_s * 1000000;
    struct seq *s, *next;
    int ms = -1;

    for (s = TAILQ_FIRST(&e->seqs); s != NULL; s = next) {
        next = TAILQ_NEXT(s, link);
        if (s->request != 0 && s->deadline != 0 && now >= s->deadline)
            sched_fail(e, s, SKV_DEADLINE, "not finished within the %lld ms that deadline_ms allows",
                       (long long)s->req->deadline_ms);
        else if (s->request != 0 && s->deadline != 0)
            sooner(s->deadline, now, &ms);
        else if (s->state == SEQ_IDLE && idle_us > 0 && now - s->t_idle >= idle_us)
            sched_drop_session(e, s, true);
        else if (s->state == SEQ_IDLE && idle_us > 0)
            sooner(s->t_idle + idle_us, now, &ms);
    }
    return ms;
}
