/* engine.c - the public face (engine.h): start and stop, commands in, events out. */
#include "engine/engine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/core.h"
#include "engine/step.h"

int64_t core_now_us(const struct engine *e)
{
    struct timespec t;

    if (e->ops->now_us != NULL)
        return e->ops->now_us(e->be);
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void core_log(struct engine *e, int level, const char *fmt, ...)
{
    char msg[512];
    va_list ap;

    if (e->cfg.log == NULL)
        return;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    e->cfg.log(e->cfg.log_arg, level, msg);
}

int core_batch(const struct engine *e)
{
    return e->cfg.max_batch;
}

void engine_config_default(struct engine_config *cfg)
{
    *cfg = (struct engine_config){
        .backend = "auto", .tp = 1, .max_sequences = 128, .max_batch = 64, .queue_len = 256, .step_ms = 60, .session_idle_s = 1800,
        .kv = { "sparse", -1, -1, -1, -1, -1, -1, -1, NULL },
    };
}

struct engine *engine_new(const struct engine_config *cfg, struct skv_error *err)
{
    struct engine *e = calloc(1, sizeof *e);

    if (e == NULL) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the engine");
        return NULL;
    }
    e->cfg = *cfg;
    e->commands.fd = e->events.fd = -1;
    TAILQ_INIT(&e->seqs);
    users_init(&e->users);
    stats_init(&e->stats);
    atomic_init(&e->next_id, 1);
    if (mailbox_init(&e->commands, err) < 0 || mailbox_init(&e->events, err) < 0 || init_run(e, err) < 0) {
        engine_free(e);
        return NULL;
    }
    return e;
}

bool engine_follows(const struct engine_config *cfg)
{
    const struct ops *ops = ops_find(cfg->backend != NULL ? cfg->backend : "auto");

    return ops != NULL && ops->process_rank != NULL && ops->process_rank() > 0;
}

int engine_follow(const struct engine_config *cfg, struct skv_error *err)
{
    struct engine *e = calloc(1, sizeof *e);

    if (e == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the engine");
    e->cfg = *cfg;
    e->commands.fd = e->events.fd = -1;
    TAILQ_INIT(&e->seqs);
    int rc = init_follow(e, err);
    init_undo(e);
    free(e);
    return rc;
}

bool core_failed(struct engine *e)
{
    if (atomic_load_explicit(&e->dead, memory_order_relaxed))
        return true;
    const char *why = e->ops->failed != NULL ? e->ops->failed(e->be) : NULL;
    if (why == NULL)
        return false;
    snprintf(e->why, sizeof e->why, "%s", why);
    core_log(e, 3, "the device failed, every request ends: %s", why);
    atomic_store_explicit(&e->dead, true, memory_order_release);
    return true;
}

bool engine_failed(const struct engine *e, char *why, size_t size)
{
    if (!atomic_load_explicit(&e->dead, memory_order_acquire))
        return false;
    snprintf(why, size, "%s", e->why);
    return true;
}

struct engine *engine_start(const struct engine_config *cfg, struct skv_error *err)
{
    struct engine *e = engine_new(cfg, err);

    if (e == NULL)
        return NULL;
    int r = pthread_create(&e->thread, NULL, step_thread, e);
    if (r != 0) {
        skv_fail(err, SKV_NO_MEMORY, "the engine's thread: %s", strerror(r));
        engine_free(e);
        return NULL;
    }
    e->thread_started = true;
    return e;
}

static int push_command(struct engine *e, enum cmd_type type, uint64_t id)
{
    struct cmd *c = calloc(1, sizeof *c);

    if (c == NULL)
        return -1;
    c->type = type;
    c->id = id;
    mailbox_push(&e->commands, &c->mail);
    return 0;
}

void engine_stop(struct engine *e)
{
    if (!e->thread_started)
        return;
    atomic_store(&e->draining, true);
    atomic_store(&e->stop_asked, true);
    if (push_command(e, CMD_STOP, 0) < 0)
        core_log(e, 4, "stopping at the end of the step");
    pthread_join(e->thread, NULL);
    e->thread_started = false;
}

static void free_events(struct mail *m)
{
    while (m != NULL) {
        struct event_mail *em = (struct event_mail *)m;
        m = m->next;
        engine_event_fini(&em->ev);
        free(em);
    }
}

void engine_free(struct engine *e)
{
    if (e == NULL)
        return;
    engine_stop(e);
    for (struct mail *m = mailbox_take(&e->commands), *next; m != NULL; m = next) {
        next = m->next;
        engine_request_free(((struct cmd *)m)->req);
        free(m);
    }
    free_events(e->taken_events);
    free_events(mailbox_take(&e->events));
    init_undo(e);
    mailbox_fini(&e->commands);
    mailbox_fini(&e->events);
    users_fini(&e->users);
    free(e);
}

void engine_model_info(const struct engine *e, struct engine_model_info *out)
{
    const struct ops_dims *d = &e->model.src.dims;

    *out = (struct engine_model_info){
        .name = e->model.name,
        .arch = e->model.arch,
        .chat_template = e->model.chat != NULL ? chat_name(e->model.chat) : "none",
        .context = d->max_context,
        .vocab = d->n_vocab,
        .layers = d->n_layer,
        .heads = d->n_head,
        .kv_heads = d->n_kv,
        .backend = e->ops->name,
    };
    memcpy(out->detail, e->detail, sizeof out->detail);
}

/* A guess at when there is room again: the time that the running ones took on average, at least half a second. */
static int retry_after_ms(const struct engine *e)
{
    struct engine_stats s;

    stats_read(&e->stats, &s);
    double each = s.finished > 0 ? (s.sum_ttft_s + s.sum_itl_s) * 1000 / (double)s.finished : 1000;
    return each < 500 ? 500 : each > 60000 ? 60000 : (int)each;
}

int engine_submit(struct engine *e, struct engine_request *take, uint64_t *id, struct skv_error *err)
{
    struct cmd *c;
    int share = e->cfg.queue_len - e->cfg.queue_len / 4;
    bool work = take->kind == ENGINE_GENERATE || take->kind == ENGINE_SCORE;

    if (work && atomic_load(&e->draining))
        return skv_fail(err, SKV_DRAINING, "the server is finishing what runs and takes no new work");
    if (work && atomic_load_explicit(&e->dead, memory_order_acquire))
        return skv_fail(err, SKV_INTERNAL, "the device failed: %s", e->why);
    /* Nobody can take all places: the last quarter is for those who have fewer waiting. */
    bool full = atomic_load(&e->queued) >= e->cfg.queue_len;
    if (full || users_waiting(&e->users, take->uid) >= share) {
        if (full)
            skv_fail(err, SKV_OVERLOADED, "%d requests are waiting already, as many as the queue takes (queue-length decides)",
                     e->cfg.queue_len);
        else
            skv_fail(err, SKV_OVERLOADED, "%d requests of this user are waiting already, his share of the queue (queue-length "
                     "decides)", share);
        if (err != NULL)
            err->retry_after_ms = retry_after_ms(e);
        return -1;
    }
    c = calloc(1, sizeof *c);
    if (take->priv == NULL)
        take->priv = calloc(1, sizeof(struct event_mail));
    if (c == NULL || take->priv == NULL || !users_wait(&e->users, take->uid)) {
        free(c);
        return skv_fail(err, SKV_INTERNAL, "no memory for another request");
    }
    c->type = CMD_SUBMIT;
    c->id = *id = atomic_fetch_add(&e->next_id, 1);
    c->req = take;
    c->t_submit = core_now_us(e);
    atomic_fetch_add(&e->queued, 1);
    mailbox_push(&e->commands, &c->mail);
    return 0;
}

void engine_cancel(struct engine *e, uint64_t id)
{
    if (push_command(e, CMD_CANCEL, id) < 0)
        core_log(e, 4, "no memory to cancel request %llu", (unsigned long long)id);
}

void engine_kill(struct engine *e, uint64_t sequence)
{
    if (push_command(e, CMD_KILL, sequence) < 0)
        core_log(e, 4, "no memory to end sequence %llu", (unsigned long long)sequence);
}

void engine_pause(struct engine *e, uint64_t id)
{
    if (push_command(e, CMD_PAUSE, id) < 0)
        core_log(e, 4, "no memory to pause request %llu", (unsigned long long)id);
}

void engine_resume(struct engine *e, uint64_t id)
{
    if (push_command(e, CMD_RESUME, id) < 0)
        core_log(e, 4, "no memory to resume request %llu", (unsigned long long)id);
}

void engine_drain(struct engine *e, bool on)
{
    atomic_store(&e->draining, on);
}

bool engine_draining(const struct engine *e)
{
    return atomic_load(&e->draining);
}

int engine_event_fd(const struct engine *e)
{
    return e->events.fd;
}

int engine_events(struct engine *e, struct engine_event *out, int max)
{
    int n = 0;

    while (n < max) {
        if (e->taken_events == NULL && (e->taken_events = mailbox_take(&e->events)) == NULL)
            break;
        struct event_mail *m = (struct event_mail *)e->taken_events;
        e->taken_events = m->mail.next;
        out[n++] = m->ev;
        free(m);
    }
    /* More than max: the descriptor was cleared when they were taken, so it must be set again. */
    if (e->taken_events != NULL)
        mailbox_signal(&e->events);
    return n;
}

void engine_stats(const struct engine *e, struct engine_stats *out)
{
    stats_read(&e->stats, out);
}
