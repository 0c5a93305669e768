/* engine_client.c - see engine_client.h */
#include "tests/engine_client.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *must(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(99);
    }
    return p;
}

struct engine *client_start(const struct engine_config *cfg)
{
    struct skv_error err;
    struct engine *e = engine_start(cfg, &err);

    if (e == NULL) {
        fprintf(stderr, "engine_start: %s: %s\n", skv_code_name(err.code), err.msg);
        exit(99);
    }
    return e;
}

void client_reply_free(struct client_reply *r)
{
    struct engine_event ev = { .result = r->result, .answer = r->answer };

    engine_event_fini(&ev);
    for (int i = 0; i < r->n_events; i++)
        engine_event_fini(&r->token[i]);
    free(r->token);
    free(r->streamed);
    free(r->lp);
    free(r);
}

static void take_token(struct client_reply *r, struct engine_event *ev)
{
    r->token = must(realloc(r->token, (size_t)(r->n_events + 1) * sizeof *r->token));
    r->lp = must(realloc(r->lp, (size_t)(r->n_events + 1) * sizeof *r->lp));
    r->streamed = must(realloc(r->streamed, r->streamed_len + ev->text.len + 1));
    if (ev->text.len > 0)
        memcpy(r->streamed + r->streamed_len, ev->text.s, ev->text.len);
    r->streamed_len += ev->text.len;
    r->streamed[r->streamed_len] = '\0';
    r->lp[r->n_events] = ev->logprob;
    r->token[r->n_events++] = *ev;
}

static bool take_event(struct client_reply *r, struct engine_event *ev)
{
    switch (ev->type) {
    case ENGINE_EV_TOKEN:
        take_token(r, ev);
        return false;
    case ENGINE_EV_PROGRESS:
        r->n_progress++;
        r->done_last = ev->done;
        r->total_last = ev->total;
        return false;
    case ENGINE_EV_END:
        break;
    }
    r->code = ev->code;
    if (ev->message != NULL)
        snprintf(r->message, sizeof r->message, "%s", ev->message);
    r->result = ev->result;
    r->answer = ev->answer;
    ev->result = NULL;
    ev->answer = NULL;
    engine_event_fini(ev);
    return true;
}

void client_call_cancel(struct engine *e, struct engine_request **take, int n, struct client_reply **reply, int which, int after)
{
    uint64_t *id = must(calloc((size_t)n, sizeof *id));
    int open = 0;

    for (int i = 0; i < n; i++) {
        struct skv_error err;
        reply[i] = must(calloc(1, sizeof **reply));
        reply[i]->streamed = must(calloc(1, 1));
        if (engine_submit(e, take[i], &id[i], &err) < 0) {
            engine_request_free(take[i]);
            reply[i]->code = err.code;
            snprintf(reply[i]->message, sizeof reply[i]->message, "%s", err.msg);
            continue;
        }
        open++;
        if (i == which && after == 0)
            engine_cancel(e, id[i]);
    }
    while (open > 0) {
        struct pollfd p = { .fd = engine_event_fd(e), .events = POLLIN };
        struct engine_event ev[64];
        if (poll(&p, 1, 120000) == 0) {
            fprintf(stderr, "no event for two minutes\n");
            exit(99);
        }
        int k = engine_events(e, ev, 64);
        for (int j = 0; j < k; j++)
            for (int i = 0; i < n; i++)
                if (ev[j].id == id[i]) {
                    open -= take_event(reply[i], &ev[j]);
                    if (i == which && after > 0 && reply[i]->n_events == after)
                        engine_cancel(e, id[i]);
                    break;
                }
    }
    free(id);
}

void client_call_all(struct engine *e, struct engine_request **take, int n, struct client_reply **reply)
{
    client_call_cancel(e, take, n, reply, -1, -1);
}

struct client_reply *client_call(struct engine *e, struct engine_request *take)
{
    struct client_reply *r;

    client_call_all(e, &take, 1, &r);
    return r;
}

struct engine_config client_config(const char *model)
{
    struct engine_config c;

    engine_config_default(&c);
    c.model = model;
    c.threads = 2;
    c.kv_memory = 64 << 20;
    c.max_sequences = 64;
    c.max_batch = 32;
    c.kv.policy = "full";
    return c;
}

void client_prompt(int which, int n, int32_t *ids)
{
    uint32_t x = 2463534242u + 7919u * (uint32_t)which;

    for (int i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        ids[i] = 3 + (int32_t)(x % 350);
    }
}

struct engine_request *client_generate(const int32_t *ids, int n, int max_tokens)
{
    struct engine_request *r = must(engine_request_new(ENGINE_GENERATE));

    r->tokens = must(malloc((size_t)n * sizeof *ids + 1));
    memcpy(r->tokens, ids, (size_t)n * sizeof *ids);
    r->n_tokens = n;
    r->max_tokens = max_tokens;
    r->sampling.temperature = 0;
    r->ignore_eos = true;
    return r;
}

void client_set_kv(struct engine_request *r, const char *policy, int budget)
{
    r->kv.policy = must(strdup(policy));
    r->kv.budget = budget;
}

struct client_reply *client_kept(struct engine *e, const char *session)
{
    struct engine_request *q = must(engine_request_new(ENGINE_SEQUENCES));
    struct client_reply *r;
    uint64_t id = 0;

    q->all_uids = true;
    r = client_call(e, q);
    for (int i = 0; i < r->answer->n_seq; i++)
        if (strcmp(r->answer->seq[i].session, session) == 0)
            id = r->answer->seq[i].id;
    client_reply_free(r);
    q = must(engine_request_new(ENGINE_KEPT));
    q->sequence = id;
    r = client_call(e, q);
    if (r->code != SKV_OK) {
        fprintf(stderr, "kept: %s\n", r->message);
        exit(99);
    }
    return r;
}

int64_t client_pages_used(struct engine *e)
{
    struct engine_request *q = must(engine_request_new(ENGINE_KV));
    struct client_reply *r = client_call(e, q);
    int64_t used = r->answer->kv.pages_used;

    client_reply_free(r);
    return used;
}
