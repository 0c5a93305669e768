#include "daemon/quotas.h"

#include <stdlib.h>

#include "daemon/client.h"

#define BUFFER_FREE  (256 * 1024) /* of a connection: enough to ask and to be told */
#define QUERIES_MORE 64 /* who has used up his requests can still ask for the status */

static struct user **slot_of(struct quotas *q, uint32_t uid)
{
    struct user **p = &q->bucket[uid % USER_BUCKETS];

    while (*p != NULL && (*p)->uid != uid)
        p = &(*p)->next;
    return p;
}

static struct user *user_get(struct quotas *q, uint32_t uid)
{
    struct user **p = slot_of(q, uid);

    if (*p == NULL) {
        *p = calloc(1, sizeof **p);
        if (*p != NULL)
            (*p)->uid = uid;
    }
    return *p;
}

/* A user with nothing in use is forgotten. */
static void user_drop_if_idle(struct quotas *q, struct user *u)
{
    struct user **p;

    if (u->connections > 0 || u->requests > 0)
        return;
    p = slot_of(q, u->uid);
    *p = u->next;
    free(u);
}

int quotas_retry_ms(const struct server *s)
{
    struct engine_stats st;
    double ms;

    engine_stats(s->engine, &st);
    /* A place is free when one of those that run has finished: a guess from the mean step, within sane bounds. */
    ms = st.step_ms_mean * 16.0 * (1.0 + (double)st.waiting / (st.running > 0 ? st.running : 1));
    return ms < 100 ? 100 : ms > 10000 ? 10000 : (int)ms;
}

static int refuse(const struct server *s, struct skv_error *err, const char *what, long long have, const char *setting)
{
    skv_fail(err, SKV_OVERLOADED, "%s (%lld, limited by %s): try again later", what, have, setting);
    err->retry_after_ms = quotas_retry_ms(s);
    return -1;
}

int quotas_connect(struct server *s, struct client *c, struct skv_error *err)
{
    struct quotas *q = &s->quotas;
    const struct config *cfg = &s->cfg;
    struct user *u;

    /* Administrators get in when all places are taken, or nobody could look what is wrong. */
    if (q->connections >= cfg->max_connections + (c->admin ? 16 : 0))
        return refuse(s, err, "too many connections", q->connections, "max-connections");
    u = user_get(q, c->uid);
    if (u == NULL)
        return skv_fail(err, SKV_OVERLOADED, "no memory for another connection");
    if (u->connections >= cfg->max_connections_per_user + (c->admin ? 16 : 0)) {
        refuse(s, err, "too many connections of this user", u->connections, "max-connections-per-user");
        user_drop_if_idle(q, u);
        return -1;
    }
    u->connections++;
    q->connections++;
    c->user = u;
    return 0;
}

void quotas_disconnect(struct server *s, struct client *c)
{
    if (c->user == NULL)
        return;
    c->user->connections--;
    c->user->busy -= c->busy;
    c->busy = false;
    c->user->buffered -= c->buffered;
    s->quotas.buffered -= c->buffered;
    c->buffered = 0;
    s->quotas.connections--;
    user_drop_if_idle(&s->quotas, c->user);
    c->user = NULL;
}

static int64_t held(const struct client *c)
{
    return (int64_t)c->in_cap + c->out_bytes;
}

int quotas_may_buffer(const struct server *s, const struct client *c, size_t more, struct skv_error *err)
{
    const struct config *cfg = &s->cfg;
    int64_t then = held(c) + (int64_t)more, d = then - c->buffered;
    int64_t least = 2 * cfg->frame_limit; /* the largest message can always be read */
    int64_t per_user = cfg->max_buffer_per_user > least ? cfg->max_buffer_per_user : least;
    int64_t all = cfg->max_buffer > least ? cfg->max_buffer : least;

    if (c->user == NULL || then <= BUFFER_FREE) /* it was dropped; it is small */
        return 0;
    if (c->user->buffered + d > per_user)
        return refuse(s, err, "too many bytes of unfinished messages and waiting output of this user", c->user->buffered + d,
                      "max-buffer-per-user");
    if (s->quotas.buffered + d > all)
        return refuse(s, err, "too many bytes of unfinished messages and waiting output", s->quotas.buffered + d, "max-buffer");
    return 0;
}

void quotas_buffered(struct server *s, struct client *c)
{
    int64_t d = held(c) - c->buffered;

    if (c->user == NULL) /* it was dropped */
        return;
    c->user->buffered += d;
    s->quotas.buffered += d;
    c->buffered += d;
}

/* The largest prompt that any limit lets through. */
static int64_t prompt_most(const struct config *cfg)
{
    int64_t n = cfg->max_prompt < cfg->max_prompt_per_user ? cfg->max_prompt : cfg->max_prompt_per_user;

    return n < cfg->max_prompt_per_connection ? n : cfg->max_prompt_per_connection;
}

int quotas_begin(struct server *s, struct client *c, int64_t bytes, bool generates, struct user **user,
                 struct skv_error *err)
{
    struct quotas *q = &s->quotas;
    const struct config *cfg = &s->cfg;
    struct user *u = c->user;
    int more = generates ? 0 : QUERIES_MORE;

    if (bytes > prompt_most(cfg))
        return skv_fail(err, SKV_TOO_LARGE, "the prompt counts as %lld bytes, more than max-prompt, max-prompt-per-user or "
                        "max-prompt-per-connection ever allow (%lld)", (long long)bytes, (long long)prompt_most(cfg));
    if (c->n_requests >= cfg->max_requests_per_connection + more)
        return refuse(s, err, "too many requests in flight on this connection", c->n_requests,
                      "max-requests-per-connection");
    if (u->requests >= cfg->max_requests_per_user + more)
        return refuse(s, err, "too many requests in flight of this user", u->requests, "max-requests-per-user");
    if (q->requests >= cfg->max_requests + more)
        return refuse(s, err, "too many requests in flight", q->requests, "max-requests");
    if (c->prompt_bytes + bytes > cfg->max_prompt_per_connection)
        return refuse(s, err, "the prompts in flight on this connection are too large", c->prompt_bytes + bytes,
                      "max-prompt-per-connection");
    if (u->prompt_bytes + bytes > cfg->max_prompt_per_user)
        return refuse(s, err, "the prompts in flight of this user are too large", u->prompt_bytes + bytes,
                      "max-prompt-per-user");
    if (q->prompt_bytes + bytes > cfg->max_prompt)
        return refuse(s, err, "the prompts in flight are too large", q->prompt_bytes + bytes, "max-prompt");
    u->requests++;
    u->prompt_bytes += bytes;
    c->prompt_bytes += bytes;
    q->requests++;
    q->prompt_bytes += bytes;
    *user = u;
    return 0;
}

void quotas_end(struct server *s, struct user *u, int64_t bytes)
{
    u->requests--;
    u->prompt_bytes -= bytes;
    s->quotas.requests--;
    s->quotas.prompt_bytes -= bytes;
    user_drop_if_idle(&s->quotas, u);
}
