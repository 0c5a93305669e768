#include "daemon/reply.h"

#include <string.h>
#include <unistd.h>

#include "daemon/client.h"
#include "daemon/requests.h"

static void text(struct wire_buf *b, const struct engine_text *t)
{
    wire_strn(b, t->s, t->len);
}

static void kv_text(struct wire_buf *b, const char *key, const struct engine_text *t)
{
    wire_str(b, key);
    text(b, t);
}

const char *reply_finish_name(enum engine_finish f)
{
    static const char *const names[] = {
        [ENGINE_FINISH_STOP] = "stop", [ENGINE_FINISH_LENGTH] = "length", [ENGINE_FINISH_EOS] = "eos"
    };

    return names[f];
}

static void top_list(struct wire_buf *b, const struct engine_top *top, int n)
{
    wire_array(b, (uint32_t)n);
    for (int i = 0; i < n; i++) {
        wire_array(b, 3);
        wire_int(b, top[i].token);
        text(b, &top[i].text);
        wire_double(b, (double)top[i].logprob);
    }
}

void reply_token(struct wire_buf *b, uint32_t msgid, const struct engine_event *ev)
{
    wire_notify(b, "token");
    wire_array(b, 2);
    wire_uint(b, msgid);
    wire_map(b, 3 + (ev->has_logprob ? 1 : 0) + (ev->n_top > 0 ? 1 : 0));
    wire_kv_int(b, "i", ev->i);
    wire_kv_int(b, "token", ev->token);
    kv_text(b, "text", &ev->text);
    if (ev->has_logprob)
        wire_kv_double(b, "logprob", (double)ev->logprob);
    if (ev->n_top > 0) {
        wire_str(b, "top");
        top_list(b, ev->top, ev->n_top);
    }
}

void reply_progress(struct wire_buf *b, uint32_t msgid, const struct engine_event *ev)
{
    wire_notify(b, "progress");
    wire_array(b, 2);
    wire_uint(b, msgid);
    wire_map(b, 3);
    wire_kv_str(b, "phase", ev->phase == ENGINE_QUEUED ? "queued" : "prefill");
    wire_kv_int(b, "done", ev->done);
    wire_kv_int(b, "total", ev->total);
}

/* The pairs of a result that hold for a request which did not finish, too. */
#define PARTIAL_PAIRS 7

static void partial(struct wire_buf *b, const struct engine_result *r)
{
    kv_text(b, "text", &r->text);
    wire_str(b, "tokens");
    wire_ints(b, r->tokens, r->n_tokens);
    wire_kv_int(b, "prompt_tokens", r->prompt_tokens);
    wire_kv_int(b, "cached_tokens", r->cached_tokens);
    wire_kv_int(b, "completion_tokens", r->completion_tokens);
    wire_str(b, "timing");
    wire_map(b, 5);
    wire_kv_double(b, "queued_ms", r->queued_ms);
    wire_kv_double(b, "prefill_ms", r->prefill_ms);
    wire_kv_double(b, "ttft_ms", r->ttft_ms);
    wire_kv_double(b, "decode_ms", r->decode_ms);
    wire_kv_double(b, "total_ms", r->total_ms);
    wire_str(b, "kv");
    wire_map(b, 5);
    wire_kv_strn(b, "policy", r->policy, strnlen(r->policy, sizeof r->policy));
    wire_kv_int(b, "slots_full", r->slots_full);
    wire_kv_int(b, "slots_kept", r->slots_kept);
    wire_kv_int(b, "bytes", r->kv_bytes);
    wire_kv_int(b, "bytes_full_cache", r->kv_bytes_full_cache);
}

static void generated(struct wire_buf *b, uint32_t msgid, const struct engine_result *r)
{
    wire_response(b, msgid);
    wire_map(b, PARTIAL_PAIRS + 1 + (r->stop.s != NULL ? 1 : 0));
    partial(b, r);
    wire_kv_str(b, "finish", reply_finish_name(r->finish));
    if (r->stop.s != NULL)
        kv_text(b, "stop", &r->stop);
}

static void floats(struct wire_buf *b, const float *v, int n)
{
    wire_array(b, n > 0 ? (uint32_t)n : 0);
    for (int i = 0; i < n; i++)
        wire_double(b, (double)v[i]);
}

static void scored(struct wire_buf *b, uint32_t msgid, const struct engine_result *r)
{
    wire_response(b, msgid);
    wire_map(b, 5 + (r->score_argmax != NULL) + (r->n_top > 0) + (r->cand_lp != NULL));
    wire_str(b, "tokens");
    wire_ints(b, r->tokens, r->n_tokens);
    wire_str(b, "logprobs");
    floats(b, r->logprobs, r->logprobs != NULL ? r->n_tokens : 0);
    wire_kv_double(b, "sum", r->sum);
    wire_kv_int(b, "prompt_tokens", r->prompt_tokens);
    wire_str(b, "kv");
    wire_map(b, 3);
    wire_kv_strn(b, "policy", r->policy, strnlen(r->policy, sizeof r->policy));
    wire_kv_int(b, "slots_full", r->slots_full);
    wire_kv_int(b, "slots_kept", r->slots_kept);
    if (r->score_argmax != NULL) {
        wire_str(b, "argmax");
        wire_ints(b, r->score_argmax, r->n_tokens);
    }
    if (r->n_top > 0) {
        wire_str(b, "top");
        wire_array(b, (uint32_t)r->n_tokens);
        for (int i = 0; i < r->n_tokens; i++)
            top_list(b, r->top + (size_t)i * (size_t)r->n_top, r->n_top);
    }
    if (r->cand_lp != NULL) {
        wire_str(b, "candidates");
        wire_array(b, (uint32_t)r->n_cand_from);
        for (int i = 0; i < r->n_cand_from; i++)
            floats(b, r->cand_lp + r->cand_from[i], r->cand_from[i + 1] - r->cand_from[i]);
    }
}

static void failed(struct wire_buf *b, uint32_t msgid, const struct skv_error *err, const struct engine_result *r)
{
    if (r == NULL) {
        wire_response_error(b, msgid, err);
        return;
    }
    wire_response_error_more(b, msgid, err, PARTIAL_PAIRS);
    partial(b, r);
    wire_nil(b);
}

void reply_hello(struct wire_buf *b, uint32_t msgid, const struct server *s, uint32_t uid, bool admin)
{
    const struct engine_model_info *m = &s->model;

    wire_response(b, msgid);
    wire_map(b, 6);
    wire_kv_str(b, "server", "skvd");
    wire_kv_str(b, "version", PACKAGE_VERSION);
    wire_kv_int(b, "protocol", 1);
    wire_str(b, "model");
    wire_map(b, 10);
    wire_kv_str(b, "name", m->name != NULL ? m->name : "");
    wire_kv_str(b, "arch", m->arch != NULL ? m->arch : "");
    wire_kv_int(b, "context", m->context);
    wire_kv_int(b, "vocab", m->vocab);
    wire_kv_int(b, "layers", m->layers);
    wire_kv_int(b, "heads", m->heads);
    wire_kv_int(b, "kv_heads", m->kv_heads);
    wire_kv_str(b, "chat_template", m->chat_template != NULL ? m->chat_template : "");
    wire_kv_str(b, "backend", m->backend != NULL ? m->backend : "");
    wire_kv_str(b, "detail", m->detail);
    wire_kv_int(b, "uid", uid);
    wire_kv_bool(b, "admin", admin);
}

static void sequence_list(struct wire_buf *b, const struct engine_answer *a)
{
    wire_str(b, "sequences");
    wire_array(b, a != NULL ? (uint32_t)a->n_seq : 0);
    for (int i = 0; a != NULL && i < a->n_seq; i++) {
        const struct engine_seq_info *q = &a->seq[i];

        wire_map(b, 10);
        wire_str(b, "id");
        wire_uint(b, q->id);
        wire_kv_int(b, "uid", q->uid);
        wire_kv_int(b, "pid", q->pid);
        wire_str(b, "session");
        if (q->session[0] != '\0')
            wire_strn(b, q->session, strnlen(q->session, sizeof q->session));
        else
            wire_nil(b);
        wire_kv_str(b, "state", q->state != NULL ? q->state : "");
        wire_kv_int(b, "prompt_tokens", q->prompt_tokens);
        wire_kv_int(b, "completion_tokens", q->completion_tokens);
        wire_kv_int(b, "age_ms", q->age_ms);
        wire_kv_int(b, "kv_bytes", q->kv_bytes);
        wire_kv_strn(b, "policy", q->policy, strnlen(q->policy, sizeof q->policy));
    }
}

static void sequences(struct wire_buf *b, uint32_t msgid, const struct engine_answer *a)
{
    wire_response(b, msgid);
    wire_map(b, 1);
    sequence_list(b, a);
}

static const char *state_name(const struct server *s)
{
    if (s->state == SERVER_STOPPING)
        return "stopping";
    if (s->state == SERVER_DRAINING || engine_draining(s->engine))
        return "draining";
    return s->stuck ? "stuck" : "serving";
}

void reply_status(struct wire_buf *b, uint32_t msgid, const struct server *s, const struct engine_answer *a)
{
    struct engine_stats st;

    engine_stats(s->engine, &st);
    wire_response(b, msgid);
    wire_map(b, st.steps_graph >= 0 ? 32 : 29);
    wire_kv_str(b, "version", PACKAGE_VERSION);
    wire_kv_str(b, "backend", s->model.backend != NULL ? s->model.backend : "");
    wire_kv_str(b, "state", state_name(s));
    wire_kv_int(b, "uptime_ms", now_ms() - s->started_ms);
    wire_kv_int(b, "running", st.running);
    wire_kv_int(b, "waiting", st.waiting);
    wire_kv_int(b, "idle_sessions", st.idle_sessions);
    wire_kv_int(b, "finished", st.finished);
    wire_kv_int(b, "failed", st.failed);
    wire_kv_int(b, "cancelled", st.cancelled);
    wire_kv_int(b, "tokens_in", st.tokens_in);
    wire_kv_int(b, "tokens_out", st.tokens_out);
    wire_kv_double(b, "tokens_in_per_s", st.in_per_s);
    wire_kv_double(b, "tokens_out_per_s", st.out_per_s);
    wire_kv_int(b, "pages_total", st.pages_total);
    wire_kv_int(b, "pages_used", st.pages_used);
    wire_kv_int(b, "pages_free", st.pages_free);
    wire_kv_int(b, "evicted", st.evicted);
    wire_kv_int(b, "bytes_saved", st.bytes_saved);
    wire_str(b, "kept_mass");
    if (st.kept_mass >= 0)
        wire_double(b, st.kept_mass);
    else
        wire_nil(b);
    wire_kv_int(b, "steps", st.steps);
    wire_kv_int(b, "step_age_ms", st.step_age_ms);
    wire_kv_double(b, "step_ms_last", st.step_ms_last);
    wire_kv_double(b, "step_ms_mean", st.step_ms_mean);
    if (st.steps_graph >= 0) { /* a GPU's */
        wire_kv_int(b, "steps_graph", st.steps_graph);
        wire_kv_int(b, "steps_plain", st.steps_plain);
        wire_kv_int(b, "steps_ahead", st.steps_ahead);
    }
    wire_kv_int(b, "connections", s->n_clients);
    wire_kv_int(b, "requests", s->quotas.requests);
    wire_kv_int(b, "pid", getpid());
    wire_kv_bool(b, "answered", a != NULL); /* false: the engine did not, in time */
    sequence_list(b, a);
}

static void kv(struct wire_buf *b, uint32_t msgid, const struct engine_answer *a)
{
    const struct engine_kv_info *k = &a->kv;

    wire_response(b, msgid);
    wire_map(b, 11);
    wire_kv_int(b, "pages_total", k->pages_total);
    wire_kv_int(b, "pages_used", k->pages_used);
    wire_kv_int(b, "pages_free", k->pages_free);
    wire_kv_int(b, "page_bytes", k->page_bytes);
    wire_kv_int(b, "slots_per_page", k->slots_per_page);
    wire_kv_strn(b, "dtype", k->dtype, strnlen(k->dtype, sizeof k->dtype));
    wire_kv_int(b, "token_bytes_full", k->token_bytes_full);
    wire_kv_int(b, "fit_context", k->fit_context);
    wire_kv_int(b, "fit_plan", k->fit_plan);
    wire_kv_int(b, "fit_full", k->fit_full);
    wire_str(b, "layers");
    wire_array(b, (uint32_t)k->n_layers);
    for (int i = 0; i < k->n_layers; i++) {
        const struct engine_kv_layer *l = &k->layer[i];

        wire_map(b, 9);
        wire_kv_strn(b, "policy", l->policy, strnlen(l->policy, sizeof l->policy));
        wire_kv_int(b, "budget", l->budget);
        wire_kv_int(b, "sink", l->sink);
        wire_kv_int(b, "recent", l->recent);
        wire_kv_int(b, "pages", l->pages);
        wire_kv_int(b, "bytes", l->bytes);
        wire_kv_int(b, "slots", l->slots);
        wire_kv_int(b, "evicted", l->evicted);
        wire_str(b, "kept_mass");
        if (l->kept_mass >= 0)
            wire_double(b, l->kept_mass);
        else
            wire_nil(b);
    }
}

static void kept(struct wire_buf *b, uint32_t msgid, const struct engine_answer *a)
{
    wire_response(b, msgid);
    wire_map(b, 2);
    wire_kv_int(b, "n", a->kept_n);
    wire_str(b, "layers");
    wire_array(b, (uint32_t)a->kept_layers);
    for (int l = 0; l < a->kept_layers; l++) {
        wire_map(b, 2);
        wire_kv_strn(b, "policy", a->kept_policy[l], strnlen(a->kept_policy[l], sizeof a->kept_policy[l]));
        wire_str(b, "heads");
        wire_array(b, (uint32_t)a->kept_heads);
        for (int h = 0; h < a->kept_heads; h++) {
            const struct engine_kept_head *k = &a->kept[l * a->kept_heads + h];

            wire_map(b, 2);
            wire_str(b, "positions");
            wire_ints(b, k->pos, k->n);
            wire_str(b, "scores");
            floats(b, k->score, k->score != NULL ? k->n : 0);
        }
    }
}

/* Tokens of a detokenize or template, as the methods give them. */
static void answer_text(struct wire_buf *b, const struct request *r, const struct engine_answer *a)
{
    bool with_text = r->method->id != METHOD_TOKENIZE, with_tokens = r->method->id != METHOD_DETOKENIZE;

    wire_response(b, r->msgid);
    wire_map(b, (uint32_t)with_text + with_tokens);
    if (with_text)
        wire_kv_strn(b, "text", a->text.s, a->text.len);
    if (with_tokens) {
        wire_str(b, "tokens");
        wire_ints(b, a->tokens, a->n_tokens);
    }
}

void reply_answer(struct wire_buf *b, const struct request *r, const struct engine_event *ev)
{
    struct skv_error err, e;

    if (ev->code != SKV_OK) {
        skv_fail(&e, ev->code, "%s", ev->message != NULL ? ev->message : skv_code_name(ev->code));
        e.retry_after_ms = ev->retry_after_ms;
        client_wire_error(r->srv, &e, &err);
        failed(b, r->msgid, &err, ev->result);
    } else if (r->method->id == METHOD_GENERATE && ev->result != NULL) {
        generated(b, r->msgid, ev->result);
    } else if (r->method->id == METHOD_SCORE && ev->result != NULL) {
        scored(b, r->msgid, ev->result);
    } else if (r->method->id == METHOD_STATUS) {
        reply_status(b, r->msgid, r->srv, ev->answer);
    } else if (ev->answer == NULL) {
        skv_fail(&err, SKV_INTERNAL, "the engine gave no answer to %s", r->method->name);
        wire_response_error(b, r->msgid, &err);
    } else if (r->method->id == METHOD_SEQUENCES) {
        sequences(b, r->msgid, ev->answer);
    } else if (r->method->id == METHOD_KV) {
        kv(b, r->msgid, ev->answer);
    } else if (r->method->id == METHOD_KEPT) {
        kept(b, r->msgid, ev->answer);
    } else {
        answer_text(b, r, ev->answer);
    }
}

/* A setting on the wire: a number where it is one, else text; nil where the engine chooses. */
static void setting(struct wire_buf *b, const struct config *c, const struct option_row *o)
{
    char v[1024];
    double d;

    wire_str(b, o->name);
    if (o->type == OPTION_BOOL)
        wire_bool(b, config_number(c, o, &d) && d != 0);
    else if (config_number(c, o, &d))
        wire_int(b, (int64_t)d);
    else if (*config_get(c, o, v, sizeof v) != '\0')
        wire_str(b, v);
    else
        wire_nil(b);
}

void reply_settings(struct wire_buf *b, uint32_t msgid, const struct server *s)
{
    uint32_t n = 0;

    for (int i = 0; i < config_n_options; i++)
        n += (config_options[i].where & OPTION_FILE) != 0;
    wire_response(b, msgid);
    wire_map(b, n);
    for (int i = 0; i < config_n_options; i++)
        if (config_options[i].where & OPTION_FILE)
            setting(b, &s->cfg, &config_options[i]);
}

void reply_flag(struct wire_buf *b, uint32_t msgid, const char *key, bool value)
{
    wire_response(b, msgid);
    wire_map(b, 1);
    wire_kv_bool(b, key, value);
}
