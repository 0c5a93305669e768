/* sched_rig.c - see sched_rig.h. */
#include "tests/sched_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS_MAX 2000000

static void *must(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(99);
    }
    return p;
}

void rig_config(struct engine_config *cfg)
{
    engine_config_default(cfg);
    cfg->backend = "sim";
    cfg->model = "preset:tiny";
    cfg->slot_values = true;
    cfg->threads = 1;
    cfg->context = 2048;
    cfg->kv_memory = (int64_t)64 << 20;
    cfg->max_sequences = 16;
    cfg->max_batch = 8;
}

void rig_start(struct rig *r, const struct engine_config *cfg)
{
    struct skv_error err;

    memset(r, 0, sizeof *r);
    r->e = engine_new(cfg, &err);
    if (r->e == NULL) {
        fprintf(stderr, "engine_new: %s: %s\n", skv_code_name(err.code), err.msg);
        exit(99);
    }
}

int64_t rig_pages_needed(const char *policy, int budget, int n)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.kv.policy = policy;
    cfg.kv.budget = budget;
    rig_start(&r, &cfg);
    int64_t need = kvplan_pages(&r.e->plan, n) + kvplan_transient(&r.e->plan, n);
    rig_stop(&r);
    return need;
}

size_t rig_page_bytes(void)
{
    struct kern_page_layout pl;

    kern_page_layout_init(&pl, KERN_KV_BF16, 16); /* preset tiny */
    return pl.bytes;
}

int64_t rig_now(const struct rig *r)
{
    return core_now_us(r->e);
}

void rig_idle(struct rig *r, int64_t us)
{
    if (us > 0)
        r->e->ops->idle(r->e->be, us);
}

uint32_t rig_rand(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

int rig_range(uint64_t *state, int lo, int hi)
{
    return lo + (int)(rig_rand(state) % (uint32_t)(hi - lo + 1));
}

struct engine_request *rig_generate(int n, uint32_t seed, int max_tokens)
{
    struct engine_request *q = must(engine_request_new(ENGINE_GENERATE));
    uint64_t x = seed * 2654435761u + 12345;

    q->tokens = must(malloc(((size_t)n + 1) * sizeof *q->tokens));
    q->n_tokens = n;
    for (int i = 0; i < n; i++)
        q->tokens[i] = rig_range(&x, 0, 255);
    q->max_tokens = max_tokens;
    q->sampling.temperature = 0;
    q->ignore_eos = true;
    q->progress = true;
    return q;
}

int rig_submit(struct rig *r, struct engine_request *take)
{
    struct skv_error err;
    struct rig_req *q;

    if (r->n == r->cap) {
        r->cap = r->cap > 0 ? 2 * r->cap : 64;
        r->req = must(realloc(r->req, (size_t)r->cap * sizeof *r->req));
    }
    q = &r->req[r->n];
    memset(q, 0, sizeof *q);
    q->last_i = -1;
    q->t_submit = rig_now(r);
    if (engine_submit(r->e, take, &q->id, &err) < 0) {
        engine_request_free(take);
        q->id = 0;
        q->n_end = 1;
        q->code = err.code;
        snprintf(q->message, sizeof q->message, "%.255s", err.msg);
    }
    return r->n++;
}

bool rig_ended(const struct rig *r, int i)
{
    return r->req[i].n_end > 0;
}

#define WRONG(r, ...)                                           \
    do {                                                        \
        if ((r)->wrong[0] == '\0')                              \
            snprintf((r)->wrong, sizeof (r)->wrong, __VA_ARGS__); \
    } while (0)

/* ---- events -------------------------------------------------------------------------------------------------- */

static void token(struct rig *r, struct rig_req *q, const struct engine_event *ev)
{
    if (ev->i != q->last_i + 1)
        WRONG(r, "request %llu: token %d after token %d", (unsigned long long)q->id, ev->i, q->last_i);
    q->last_i = ev->i;
    if (q->n_token == 0) {
        q->t_first = ev->t_us;
        q->order = ++r->n_first;
    } else if (ev->t_us - q->t_last > q->worst_gap) {
        q->worst_gap = ev->t_us - q->t_last;
    }
    q->t_last = ev->t_us;
    q->token = must(realloc(q->token, ((size_t)q->n_token + 1) * sizeof *q->token));
    q->token[q->n_token++] = ev->token;
}

static void progress(struct rig *r, struct rig_req *q, const struct engine_event *ev)
{
    if (ev->phase != ENGINE_PREFILL)
        return;
    if (ev->done < q->done || ev->done > ev->total)
        WRONG(r, "request %llu: progress went from %d to %d of %d", (unsigned long long)q->id, q->done, ev->done, ev->total);
    q->done = ev->done;
}

static void end(struct rig *r, struct rig_req *q, const struct engine_event *ev)
{
    if (q->n_end++ > 0)
        WRONG(r, "request %llu ended twice", (unsigned long long)q->id);
    q->code = ev->code;
    q->t_end = ev->t_us;
    if (ev->message != NULL)
        snprintf(q->message, sizeof q->message, "%.255s", ev->message);
    if (ev->result == NULL)
        return;
    q->queued_ms = ev->result->queued_ms;
    q->ttft_ms = ev->result->ttft_ms;
    q->prompt_tokens = ev->result->prompt_tokens;
    q->completion_tokens = ev->result->completion_tokens;
    q->t_start = q->t_submit + (int64_t)(q->queued_ms * 1000);
}

static void take_events(struct rig *r)
{
    struct engine_event ev[64];
    int n;

    while ((n = engine_events(r->e, ev, 64)) > 0)
        for (int k = 0; k < n; k++) {
            int i = 0;
            while (i < r->n && r->req[i].id != ev[k].id)
                i++;
            if (i == r->n)
                WRONG(r, "an event of a request %llu that nobody made", (unsigned long long)ev[k].id);
            else if (r->req[i].n_end > 0)
                WRONG(r, "request %llu: an event after its end", (unsigned long long)ev[k].id);
            if (i < r->n && ev[k].type == ENGINE_EV_TOKEN)
                token(r, &r->req[i], &ev[k]);
            else if (i < r->n && ev[k].type == ENGINE_EV_PROGRESS)
                progress(r, &r->req[i], &ev[k]);
            else if (i < r->n)
                end(r, &r->req[i], &ev[k]);
            engine_event_fini(&ev[k]);
        }
}

/* ---- what must always hold --------------------------------------------------------------------------------------- */

/* A refed prompt's last pair is taken back until its first step puts it in again. */
static int refed(const struct seq *s)
{
    return s->req != NULL && s->req->kind == ENGINE_SCORE && s->req->refeed;
}

/* One sequence's lengths against its plan: nothing above the cap, no head of a sparse layer above what the layer may have. */
static void check_lengths(struct rig *r, const struct seq *s)
{
    const struct ops_dims *d = &r->e->model.src.dims;
    int again = refed(s);

    for (int l = 0; l < d->n_layer; l++) {
        int64_t sum = 0, budget = s->plan.budget[l];
        for (int h = 0; h < d->n_kv; h++) {
            size_t i = core_head(r->e, s->lane, l, h);
            sum += r->e->kv->len[i];
            if (r->e->kv->len[i] > r->e->kv->cap[i])
                WRONG(r, "sequence %llu layer %d head %d: %d slots, cap %d", (unsigned long long)s->id, l, h,
                      r->e->kv->len[i], r->e->kv->cap[i]);
            if (budget == 0 && r->e->kv->len[i] != s->n_kv)
                WRONG(r, "sequence %llu: full layer %d holds %d of %d positions", (unsigned long long)s->id, l,
                      r->e->kv->len[i], s->n_kv);
        }
        if (budget != 0 && sum > d->n_kv * (budget + 1))
            WRONG(r, "sequence %llu layer %d: %lld slots in %d heads, budget %lld", (unsigned long long)s->id, l,
                  (long long)sum, d->n_kv, (long long)budget);
        if (budget != 0 && s->n_kv > budget && sum < d->n_kv * (budget - again))
            WRONG(r, "sequence %llu layer %d: only %lld slots of a budget of %lld in %d heads", (unsigned long long)s->id, l,
                  (long long)sum, (long long)budget, d->n_kv);
    }
}

static void check_seq(struct rig *r, const struct seq *s, int64_t *reserved)
{
    int64_t held = s->lane >= 0 ? pages_lane_held(r->e->pages, s->lane) : 0;

    *reserved += s->reserved;
    if (s->lane < 0 && s->reserved != 0)
        WRONG(r, "sequence %llu: pages promised without a lane", (unsigned long long)s->id);
    if (held > s->reserved + (s->state == SEQ_PREFILL ? s->transient : 0))
        WRONG(r, "sequence %llu (%s): holds %lld pages, promised %lld, transient %lld", (unsigned long long)s->id,
              seq_state_name(s), (long long)held, (long long)s->reserved, (long long)s->transient);
    if (s->has_plan && (s->state == SEQ_DECODE || s->state == SEQ_IDLE)) {
        int ahead = s->state == SEQ_DECODE && r->e->ops->collect != NULL; /* the next pair's pages are there */
        int64_t may = kvplan_pages(&s->plan, s->n_kv + refed(s) + ahead);
        if (held > may)
            WRONG(r, "sequence %llu: holds %lld pages at %d positions, its plan says %lld", (unsigned long long)s->id,
                  (long long)held, s->n_kv, (long long)may);
        check_lengths(r, s);
    }
}

static void check_state(struct rig *r)
{
    const char *bad = pages_check(r->e->pages);
    int64_t reserved = 0;
    int active = 0, waiting = 0;
    const struct seq *s;

    if (bad != NULL)
        WRONG(r, "pages: %s", bad);
    TAILQ_FOREACH(s, &r->e->seqs, link) {
        check_seq(r, s, &reserved);
        active += seq_active(s);
        waiting += s->state == SEQ_TEXT || s->state == SEQ_WAITING;
    }
    if (reserved != pages_reserved(r->e->pages))
        WRONG(r, "sequences have %lld pages promised, the pool says %lld", (long long)reserved,
              (long long)pages_reserved(r->e->pages));
    if (reserved > pages_total(r->e->pages))
        WRONG(r, "%lld pages promised of %lld", (long long)reserved, (long long)pages_total(r->e->pages));
    if (active > core_batch(r->e))
        WRONG(r, "%d sequences are active, max_batch is %d", active, core_batch(r->e));
    if (waiting != atomic_load(&r->e->queued))
        WRONG(r, "%d requests wait, the counter says %d", waiting, atomic_load(&r->e->queued));
}

bool rig_step(struct rig *r, int *wait_ms)
{
    int64_t t = rig_now(r);
    bool more = step_once(r->e, wait_ms);

    r->steps++;
    if (rig_now(r) - t > r->worst_step)
        r->worst_step = rig_now(r) - t;
    take_events(r);
    check_state(r);
    return more;
}

static bool all_ended(const struct rig *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->req[i].n_end == 0)
            return false;
    return true;
}

void rig_run(struct rig *r)
{
    while (!all_ended(r) && r->wrong[0] == '\0') {
        int ms = -1;
        bool more = rig_step(r, &ms);
        if (more || all_ended(r))
            continue;
        if (ms < 0)
            WRONG(r, "nothing moves, and requests are open");
        rig_idle(r, (int64_t)ms * 1000);
        if (r->steps > STEPS_MAX)
            WRONG(r, "no end after %d steps", STEPS_MAX);
    }
}

void rig_run_tokens(struct rig *r, int i, int n)
{
    while (r->req[i].n_token < n && r->req[i].n_end == 0 && r->wrong[0] == '\0') {
        int ms = -1;
        bool more = rig_step(r, &ms);
        if (more || r->req[i].n_end > 0)
            continue;
        if (ms < 0)
            WRONG(r, "nothing moves, and request %d has %d tokens", i, r->req[i].n_token);
        rig_idle(r, (int64_t)ms * 1000);
    }
}

void rig_stop(struct rig *r)
{
    struct seq *s;

    step_end(r->e);
    take_events(r);
    for (int i = 0; i < r->n; i++)
        if (r->req[i].n_end != 1)
            WRONG(r, "request %llu ended %d times", (unsigned long long)r->req[i].id, r->req[i].n_end);
    TAILQ_FOREACH(s, &r->e->seqs, link)
        WRONG(r, "sequence %llu is left", (unsigned long long)s->id);
    if (pages_used(r->e->pages) != 0 || pages_reserved(r->e->pages) != 0)
        WRONG(r, "%lld pages are left, %lld promised", (long long)pages_used(r->e->pages), (long long)pages_reserved(r->e->pages));
    engine_free(r->e);
    for (int i = 0; i < r->n; i++)
        free(r->req[i].token);
    free(r->req);
    r->req = NULL;
    r->e = NULL;
}
