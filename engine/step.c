/* step.c - one iteration after another: commands, texts, admission, a token for each running sequence, a slice of prefill. */
#include "engine/step.h"

#include <stdlib.h>
#include <time.h>

static void count(struct engine *e)
{
    int running = 0, waiting = 0, idle = 0;
    int64_t saved = 0, slots = 0, positions = 0;
    const struct ops_dims *d = &e->model.src.dims;
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link) {
        running += seq_running(s);
        waiting += s->state == SEQ_TEXT || s->state == SEQ_WAITING;
        idle += s->state == SEQ_IDLE;
        if (s->lane >= 0) {
            positions += (int64_t)s->n_kv * d->n_layer * d->n_kv;
            slots += pages_lane_held(e->pages, s->lane) * KERN_PAGE_SLOTS;
        }
    }
    saved = positions > slots ? (positions - slots) * (int64_t)kern_page_slot_bytes(&e->kv->page) : 0;
    double mass = 0;
    int n_mass = 0;
    for (int l = 0; l < d->n_layer; l++)
        if (e->layer_mass[l] >= 0) {
            mass += e->layer_mass[l];
            n_mass++;
        }
    atomic_store_explicit(&e->stats.running, running, memory_order_relaxed);
    atomic_store_explicit(&e->stats.waiting, waiting, memory_order_relaxed);
    atomic_store_explicit(&e->stats.idle_sessions, idle, memory_order_relaxed);
    atomic_store_explicit(&e->stats.pages_used, pages_used(e->pages), memory_order_relaxed);
    atomic_store_explicit(&e->stats.bytes_saved, saved, memory_order_relaxed);
    if (e->ops->steps != NULL) {
        int64_t graph, plain;
        e->ops->steps(e->be, &graph, &plain);
        atomic_store_explicit(&e->stats.steps_graph, graph, memory_order_relaxed);
        atomic_store_explicit(&e->stats.steps_plain, plain, memory_order_relaxed);
    }
    atomic_store_explicit(&e->stats.mass_ppm, n_mass > 0 ? (int)(mass / n_mass * 1e6) : -1, memory_order_relaxed);
}

static void check_pages(struct engine *e)
{
#if !defined(NDEBUG) && defined(SKV_SANITIZED)
    const char *wrong = pages_check(e->pages);
    if (wrong != NULL) {
        core_log(e, 0, "page pool: %s", wrong);
        abort();
    }
#else
    (void)e;
#endif
}

/* The backend has failed for good: nobody's answer can go on. */
static void end_all(struct engine *e)
{
    struct seq *s, *next;

    for (s = TAILQ_FIRST(&e->seqs); s != NULL; s = next) {
        next = TAILQ_NEXT(s, link);
        if (s->state == SEQ_IDLE)
            continue;
        s->session[0] = '\0'; /* what its slots hold is not known */
        sched_fail(e, s, SKV_INTERNAL, "the device failed: %s", e->why);
    }
    while ((s = TAILQ_FIRST(&e->seqs)) != NULL)
        sched_drop_session(e, s, true);
}

/* Decode first, so that running sequences keep their pace; prompts get what step_ms leaves, at least one unit. */
static bool step(struct engine *e)
{
    int64_t deadline = core_now_us(e) + (int64_t)e->cfg.step_ms * 1000;
    bool any = false;

    if (!decode_pending(e) && !prefill_pending(e))
        return false;
    stats_step_begin(&e->stats);
    any = decode_step(e) > 0;
    any = (!core_failed(e) && prefill_slice(e, deadline)) || any;
    for (int l = 0; l < e->model.src.dims.n_layer; l++)
        if (e->layer_dropped[l] != e->layer_evicted[l]) {
            atomic_fetch_add_explicit(&e->stats.evicted, e->layer_evicted[l] - e->layer_dropped[l], memory_order_relaxed);
            e->layer_dropped[l] = e->layer_evicted[l];
        }
    stats_step_end(&e->stats);
    check_pages(e);
    return any;
}

void step_end(struct engine *e)
{
    struct seq *s;

    command_run_all(e);
    while ((s = TAILQ_FIRST(&e->seqs)) != NULL) {
        if (s->state == SEQ_IDLE) {
            sched_drop_session(e, s, false);
            continue;
        }
        s->session[0] = '\0';
        sched_fail(e, s, SKV_CANCELLED, "the server is stopping");
    }
    count(e);
}

bool step_once(struct engine *e, int *wait_ms)
{
    command_run_all(e);
    if (e->stopping)
        return false;
    /* Where a step follows whose device leaves this thread time, texts and admission are done in that time. */
    if (!decode_ahead(e))
        text_run(e);
    *wait_ms = sched_expire(e);
    if (!decode_ahead(e))
        sched_admit(e);
    bool worked = !core_failed(e) && step(e);
    if (core_failed(e))
        end_all(e);
    count(e);
    return worked || text_pending(e);
}

static void wait_for_work(struct engine *e, int ms)
{
    struct timespec from, to;

    stats_idle(&e->stats);
    clock_gettime(CLOCK_MONOTONIC, &from);
    mailbox_wait(&e->commands, ms);
    if (e->ops->idle == NULL)
        return;
    clock_gettime(CLOCK_MONOTONIC, &to);
    e->ops->idle(e->be, (int64_t)(to.tv_sec - from.tv_sec) * 1000000 + (to.tv_nsec - from.tv_nsec) / 1000);
}

void *step_thread(void *arg)
{
    struct engine *e = arg;
    int ms = -1;

    while (!e->stopping && !atomic_load_explicit(&e->stop_asked, memory_order_relaxed))
        if (!step_once(e, &ms) && !e->stopping)
            wait_for_work(e, ms);
    step_end(e);
    return NULL;
}
