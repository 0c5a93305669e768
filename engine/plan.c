/* plan.c - see plan.h. */
#include "engine/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/preset.h"
#include "engine/step.h"
#include "kernels/sim/sim.h"

#define WORKSPACE ((int64_t)512 << 20) /* context of the driver, buffers of a pass, a tile of dequantised weights */

struct client {
    uint64_t id;
    int sent;
    int64_t t_submit, t_last; /* t_last 0: no token yet */
};

/* One figure a token or a request, with the time it belongs to. */
struct sample {
    int64_t at;
    double ms;
};
struct samples {
    struct sample *v;
    int n;
};

struct load {
    const struct plan_ask *ask;
    struct engine *e;
    struct client *client;
    int clients, open;
    struct samples gap, ttft;
    int64_t *token_at; /* [clients * rounds * output] */
    int n_token;
};

void plan_ask_default(struct plan_ask *ask)
{
    *ask = (struct plan_ask){ .device = "rtx4090", .input = 4000, .output = 500, .share = 0.9, .step_ms = 60, .rounds = 4 };
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

static const char *model_path(const struct plan_ask *ask, char *buf, size_t size)
{
    size_t len = strlen(ask->model);

    if (preset_named(ask->model) || (len > 5 && strcmp(ask->model + len - 5, ".gguf") == 0))
        return ask->model;
    snprintf(buf, size, "preset:%s", ask->model);
    return buf;
}

static int open_model(const struct plan_ask *ask, struct model *m, struct skv_error *err)
{
    char buf[160];
    const char *path = model_path(ask, buf, sizeof buf);

    return preset_named(path) ? preset_open(m, path, 0, err) : model_open(m, path, NULL, 0, err);
}

int64_t plan_kv_memory(const struct plan_ask *ask, struct skv_error *err)
{
    const struct sim_device *d = sim_device_find(ask->device);
    struct model m;

    if (ask->kv_memory > 0)
        return ask->kv_memory;
    if (d == NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "there are no figures for a device \"%s\"", ask->device);
    if (open_model(ask, &m, err) < 0)
        return -1;
    int64_t weights = (int64_t)sim_weight_bytes(&m.src), left = (int64_t)((double)d->memory * ask->share) - weights - WORKSPACE;
    model_close(&m);
    if (left <= 0)
        return skv_fail(err, SKV_NO_MEMORY, "%s has %.1f GiB, of which %.0f %% may be used; the weights of %s alone are %.1f GiB",
                        d->title, (double)d->memory / (1 << 30), ask->share * 100, ask->model, (double)weights / (1 << 30));
    return left;
}

/* ---- the load ------------------------------------------------------------------------------------------------ */

static int submit(struct load *l, int i, struct skv_error *err)
{
    struct engine_request *q = engine_request_new(ENGINE_GENERATE);
    struct client *c = &l->client[i];
    uint64_t x = (uint64_t)i * 1000 + (uint64_t)c->sent;

    if (q == NULL || (q->tokens = malloc((size_t)l->ask->input * sizeof *q->tokens)) == NULL) {
        engine_request_free(q);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a request");
    }
    q->n_tokens = l->ask->input;
    for (int k = 0; k < q->n_tokens; k++)
        q->tokens[k] = (int32_t)(sim_mix(x, (uint64_t)k) % 200);
    q->max_tokens = l->ask->output;
    q->sampling.temperature = 0;
    q->ignore_eos = true;
    if (engine_submit(l->e, q, &c->id, err) < 0) {
        engine_request_free(q);
        return -1;
    }
    c->sent++;
    c->t_submit = core_now_us(l->e);
    c->t_last = 0;
    return 0;
}

static void add(struct samples *s, int64_t at, int64_t us)
{
    s->v[s->n++] = (struct sample){ at, (double)us * 1e-3 };
}

static int on_event(struct load *l, struct engine_event *ev, struct skv_error *err)
{
    int i = 0;

    while (i < l->clients && l->client[i].id != ev->id)
        i++;
    if (i == l->clients)
        return 0;
    struct client *c = &l->client[i];
    if (ev->type == ENGINE_EV_TOKEN) {
        if (c->t_last == 0)
            add(&l->ttft, ev->t_us, ev->t_us - c->t_submit);
        else
            add(&l->gap, ev->t_us, ev->t_us - c->t_last);
        c->t_last = ev->t_us;
        l->token_at[l->n_token++] = ev->t_us;
        return 0;
    }
    if (ev->type != ENGINE_EV_END)
        return 0;
    if (ev->code != SKV_OK)
        return skv_fail(err, ev->code, "%s", ev->message != NULL ? ev->message : "a request failed");
    if (c->sent < l->ask->rounds)
        return submit(l, i, err);
    c->id = 0;
    l->open--;
    return 0;
}

static int take_events(struct load *l, struct skv_error *err)
{
    struct engine_event ev[64];
    int n, r = 0;

    while ((n = engine_events(l->e, ev, 64)) > 0)
        for (int k = 0; k < n; k++) {
            if (r == 0)
                r = on_event(l, &ev[k], err);
            engine_event_fini(&ev[k]);
        }
    return r;
}

static int count_running(const struct engine *e)
{
    const struct seq *s;
    int n = 0;

    TAILQ_FOREACH(s, &e->seqs, link)
        n += seq_active(s);
    return n;
}

static int run(struct load *l, struct plan_row *row, struct skv_error *err)
{
    for (int i = 0; i < l->clients; i++)
        if (submit(l, i, err) < 0)
            return -1;
    l->open = l->clients;
    while (l->open > 0) {
        int ms, running;
        bool more = step_once(l->e, &ms);
        if ((running = count_running(l->e)) > row->running)
            row->running = running;
        if (take_events(l, err) < 0)
            return -1;
        if (!more && l->open > 0 && ms < 0 && !mailbox_any(&l->e->commands))
            return skv_fail(err, SKV_INTERNAL, "the load came to a standstill");
    }
    return 0;
}

/* ---- figures --------------------------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Quantiles of what lies in [from, to]. */
static int quantiles(const struct samples *s, int64_t from, int64_t to, double *p50, double *p99)
{
    double *v = malloc(((size_t)s->n + 1) * sizeof *v);
    int n = 0;

    if (v == NULL)
        return -1;
    for (int i = 0; i < s->n; i++)
        if (s->v[i].at >= from && s->v[i].at <= to)
            v[n++] = s->v[i].ms;
    qsort(v, (size_t)n, sizeof *v, ascending);
    *p50 = n > 0 ? v[(n - 1) / 2] : 0;
    *p99 = n > 0 ? v[(int)(0.99 * (n - 1))] : 0;
    free(v);
    return 0;
}

static int figures(const struct load *l, struct plan_row *row, int64_t t0, struct skv_error *err)
{
    int64_t t1 = core_now_us(l->e), from = t0 + (t1 - t0) / 4, to = t1 - (t1 - t0) / 4;
    int n = 0;

    for (int i = 0; i < l->n_token; i++)
        n += l->token_at[i] > from && l->token_at[i] <= to;
    row->tokens_per_s = n / ((double)(to - from) * 1e-6);
    if (quantiles(&l->gap, from, to, &row->gap_p50_ms, &row->gap_p99_ms) < 0 ||
        quantiles(&l->ttft, from, to, &row->ttft_p50_ms, &row->ttft_p99_ms) < 0)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the figures");
    return 0;
}

static void tell(const struct plan_ask *ask, const struct engine *e, struct plan_facts *f)
{
    const struct sim_device *d = sim_device_find(ask->device);

    memset(f, 0, sizeof *f);
    snprintf(f->model, sizeof f->model, "%s", e->model.name);
    snprintf(f->device, sizeof f->device, "%s", d->title);
    snprintf(f->policy, sizeof f->policy, "%s", e->policy->name);
    f->weight_bytes = (int64_t)e->weight_bytes;
    f->kv_bytes = e->cfg.kv_memory; /* the engine's pool is no larger than its lanes can use */
    f->fit = (int)kvplan_fit(&e->plan, f->kv_bytes / (int64_t)e->kv->page.bytes, ask->input + ask->output);
    f->layers = e->model.src.dims.n_layer;
    for (int i = 0; i < f->layers; i++)
        f->full_layers += e->plan.budget[i] == 0;
    f->budget = f->full_layers < f->layers ? e->params.budget : 0;
}

static int check(const struct plan_ask *ask, int clients, struct skv_error *err)
{
    if (ask->input < 1 || ask->output < 1 || ask->input > 1 << 20 || ask->output > 1 << 20)
        return skv_fail(err, SKV_BAD_CONFIG, "input and output must be from 1 to 1048576 tokens");
    if (clients < 1 || clients > DECODE_BATCH_MAX)
        return skv_fail(err, SKV_BAD_CONFIG, "the number of clients must be from 1 to %d", DECODE_BATCH_MAX);
    if (ask->rounds < 1 || ask->rounds > 1000)
        return skv_fail(err, SKV_BAD_CONFIG, "rounds must be from 1 to 1000");
    return 0;
}

int plan_run(const struct plan_ask *ask, const struct engine_kv_options *kv, int clients, struct plan_facts *facts,
             struct plan_row *row, struct skv_error *err)
{
    struct load l = { .ask = ask, .clients = clients };
    size_t requests = (size_t)clients * (size_t)ask->rounds;
    struct engine_config cfg;
    char buf[160];
    int r = -1;

    memset(row, 0, sizeof *row);
    row->clients = clients;
    if (check(ask, clients, err) < 0)
        return -1;
    engine_config_default(&cfg);
    cfg.model = model_path(ask, buf, sizeof buf);
    cfg.backend = "sim";
    cfg.device = ask->device;
    cfg.kv = *kv;
    cfg.kv.dtype = ask->kv_dtype;
    cfg.context = (ask->input + ask->output + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS * KERN_PAGE_SLOTS;
    cfg.max_sequences = cfg.max_batch = clients;
    cfg.queue_len = 2 * clients;
    cfg.step_ms = ask->step_ms;
    cfg.kv_memory = plan_kv_memory(ask, err);
    if (cfg.kv_memory < 0 || (l.e = engine_new(&cfg, err)) == NULL)
        return -1;
    l.client = calloc((size_t)clients, sizeof *l.client);
    l.gap.v = calloc(requests * (size_t)ask->output, sizeof *l.gap.v);
    l.ttft.v = calloc(requests, sizeof *l.ttft.v);
    l.token_at = calloc(requests * (size_t)ask->output, sizeof *l.token_at);
    int64_t t0 = core_now_us(l.e);
    if (l.client == NULL || l.gap.v == NULL || l.ttft.v == NULL || l.token_at == NULL)
        skv_fail(err, SKV_NO_MEMORY, "no memory for a load of %zu requests", requests);
    else if (run(&l, row, err) == 0)
        r = figures(&l, row, t0, err);
    if (r == 0 && facts != NULL)
        tell(ask, l.e, facts);
    free(l.client);
    free(l.gap.v);
    free(l.ttft.v);
    free(l.token_at);
    engine_free(l.e);
    return r;
}
