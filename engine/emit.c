/* emit.c - what goes out: tokens, progress, ends. Payloads belong to the receiver. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/core.h"

/* For want of memory a token or a progress may be lost (and logged); an END never is: its node was made with the request. */
static struct event_mail *event_new(struct engine *e, enum engine_ev_type type, uint64_t id)
{
    struct event_mail *m = calloc(1, sizeof *m);

    if (m == NULL) {
        core_log(e, 3, "no memory for an event of request %llu", (unsigned long long)id);
        return NULL;
    }
    m->ev.type = type;
    m->ev.id = id;
    m->ev.t_us = core_now_us(e);
    return m;
}

static struct event_mail *end_take(struct engine *e, struct engine_request *req, uint64_t id)
{
    struct event_mail *m = req->priv;

    req->priv = NULL;
    m->ev.type = ENGINE_EV_END;
    m->ev.id = id;
    m->ev.t_us = core_now_us(e);
    return m;
}

static struct engine_text text_copy(const char *s, size_t len)
{
    struct engine_text t = { NULL, 0 };

    if (s != NULL && (t.s = malloc(len + 1)) != NULL) {
        memcpy(t.s, s, len);
        t.s[len] = '\0';
        t.len = len;
    }
    return t;
}

/* A single token's text for a list of alternatives: bad bytes are replaced. */
static struct engine_text token_text(struct engine *e, int32_t id)
{
    size_t len;
    const char *s = tok_bytes(e->model.tok, id, true, &len);
    struct engine_text t = { malloc(3 * len + 1), 0 };

    if (t.s != NULL) {
        t.len = utf8_sanitize(s, len, t.s);
        t.s[t.len] = '\0';
    }
    return t;
}

static struct engine_top *top_list(struct engine *e, const int32_t *id, const float *lp, int n)
{
    struct engine_top *top = calloc((size_t)n, sizeof *top);

    for (int i = 0; top != NULL && i < n; i++)
        top[i] = (struct engine_top){ id[i], lp[i], token_text(e, id[i]) };
    return top;
}

void emit_score_top(struct engine *e, struct seq *s)
{
    for (int i = 0; i < s->n_top; i++)
        s->cont_top[s->n_answer * s->req->logprobs + i] =
            (struct engine_top){ s->top_id[i], s->top_lp[i], token_text(e, s->top_id[i]) };
}

void emit_token(struct engine *e, struct seq *s, int i, int32_t token, size_t from, size_t len)
{
    struct event_mail *m = event_new(e, ENGINE_EV_TOKEN, s->request);

    if (m == NULL)
        return;
    m->ev.i = i;
    m->ev.token = token;
    m->ev.text = text_copy(len > 0 ? s->text.out + from : "", len);
    if (s->req->logprobs > 0) {
        m->ev.has_logprob = true;
        m->ev.logprob = s->next_lp;
        m->ev.top = top_list(e, s->top_id, s->top_lp, s->n_top);
        m->ev.n_top = m->ev.top != NULL ? s->n_top : 0;
    }
    mailbox_push(&e->events, &m->mail);
}

void emit_progress(struct engine *e, struct seq *s, enum engine_phase phase, int done, int total)
{
    struct event_mail *m;
    int64_t now = core_now_us(e);

    if (!s->req->progress || (done < total && now - s->t_progress < 50000))
        return;
    s->t_progress = now;
    m = event_new(e, ENGINE_EV_PROGRESS, s->request);
    if (m == NULL)
        return;
    m->ev.phase = phase;
    m->ev.done = done;
    m->ev.total = total;
    mailbox_push(&e->events, &m->mail);
}

static double ms(int64_t from, int64_t to)
{
    return from != 0 && to > from ? (double)(to - from) * 1e-3 : 0;
}

static void result_kv(struct engine *e, const struct seq *s, struct engine_result *r)
{
    const struct ops_dims *d = &e->model.src.dims;
    size_t slot_bytes = kern_page_slot_bytes(&e->kv->page);

    snprintf(r->policy, sizeof r->policy, "%s", s->has_plan ? s->plan.policy->name : e->policy->name);
    r->slots_full = (int64_t)s->n_kv * d->n_layer * d->n_kv;
    r->kv_bytes_full_cache = r->slots_full * (int64_t)slot_bytes;
    if (s->lane < 0)
        return;
    for (size_t i = core_head(e, s->lane, 0, 0); i < core_head(e, s->lane + 1, 0, 0); i++)
        r->slots_kept += e->kv->len[i] - (e->kv->victim[i] >= 0);
    r->kv_bytes = pages_lane_held(e->pages, s->lane) * (int64_t)e->kv->page.bytes;
}

static void result_score(struct seq *s, struct engine_result *r)
{
    r->tokens = s->cont.id;
    r->n_tokens = s->n_answer;
    r->logprobs = s->cont_lp;
    r->score_argmax = s->cont_best;
    r->cand_lp = s->cand_lp;
    r->cand_from = s->req->cand_from;
    r->n_cand_from = s->req->n_cand_from;
    r->sum = s->cont_sum;
    r->top = s->cont_top;
    r->n_top = s->cont_top != NULL ? s->req->logprobs : 0;
    s->cont.id = NULL;
    s->cont_lp = NULL;
    s->cand_lp = NULL;
    s->req->cand_from = NULL;
    s->cont_best = NULL;
    s->cont_top = NULL;
}

static void result_text(struct seq *s, struct engine_result *r)
{
    r->text = s->text.out != NULL ? (struct engine_text){ s->text.out, s->text.out_len } : text_copy("", 0);
    s->text.out = NULL;
    r->n_tokens = s->n_answer;
    if (s->n_answer > 0 && (r->tokens = malloc((size_t)s->n_answer * sizeof *r->tokens)) != NULL)
        memcpy(r->tokens, s->tokens.id + s->n_prompt, (size_t)s->n_answer * sizeof *r->tokens);
    if (r->tokens == NULL)
        r->n_tokens = 0;
}

static struct engine_result *result_new(struct engine *e, struct seq *s, enum engine_finish finish, int stop)
{
    struct engine_result *r = calloc(1, sizeof *r);
    int64_t now = core_now_us(e);

    if (r == NULL)
        return NULL;
    if (s->req->kind == ENGINE_SCORE)
        result_score(s, r);
    else
        result_text(s, r);
    r->finish = finish;
    if (stop >= 0)
        r->stop = text_copy(s->req->stop[stop].s, s->req->stop[stop].len);
    r->prompt_tokens = s->n_prompt > s->prompt_from ? s->n_prompt - s->prompt_from : s->tokens.n - s->prompt_from;
    r->cached_tokens = s->n_cached;
    r->completion_tokens = s->n_answer;
    r->queued_ms = ms(s->t_submit, s->t_prefill != 0 ? s->t_prefill : now);
    r->prefill_ms = ms(s->t_prefill, s->t_first);
    r->ttft_ms = ms(s->t_submit, s->t_first);
    r->decode_ms = ms(s->t_first, s->t_last);
    r->total_ms = ms(s->t_submit, now);
    result_kv(e, s, r);
    return r;
}

void emit_end(struct engine *e, struct seq *s, enum skv_code code, const char *message, enum engine_finish finish, int stop)
{
    struct event_mail *m = end_take(e, s->req, s->request);

    m->ev.code = code;
    if (message != NULL)
        m->ev.message = strdup(message);
    if (s->req->kind == ENGINE_GENERATE || s->req->kind == ENGINE_SCORE) {
        m->ev.result = result_new(e, s, finish, stop);
        if (m->ev.result == NULL && code == SKV_OK)
            m->ev.code = SKV_INTERNAL;
    }
    mailbox_push(&e->events, &m->mail);
}

void emit_answer(struct engine *e, struct engine_request *req, uint64_t id, struct engine_answer *take)
{
    struct event_mail *m = end_take(e, req, id);

    m->ev.answer = take;
    m->ev.code = take != NULL ? SKV_OK : SKV_INTERNAL;
    mailbox_push(&e->events, &m->mail);
}

void emit_error(struct engine *e, struct engine_request *req, uint64_t id, const struct skv_error *err)
{
    struct event_mail *m = end_take(e, req, id);

    m->ev.code = err->code;
    m->ev.retry_after_ms = err->retry_after_ms;
    m->ev.message = strdup(err->msg);
    mailbox_push(&e->events, &m->mail);
}
