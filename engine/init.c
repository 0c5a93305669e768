/* init.c - phase 1: model, weights and workspace placed, the rest becomes the pool, the layer plan is made and said. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/preset.h"
#include "engine/step.h"
#include "engine/thin.h"

#define KV_SHARE 0.4 /* of the memory that is free after loading, when kv_memory is not given */

static int64_t memory_available(void)
{
    char line[128];
    long long kib = -1;
    FILE *f = fopen("/proc/meminfo", "r");

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1)
            break;
    if (f != NULL)
        fclose(f);
    if (kib < 0)
        kib = (long long)sysconf(_SC_AVPHYS_PAGES) * (sysconf(_SC_PAGESIZE) / 1024);
    return kib * 1024;
}

static int check_config(struct engine *e, struct skv_error *err)
{
    struct engine_config *c = &e->cfg;
    const struct {
        const char *name;
        int value, lo, hi;
    } range[] = {
        { "threads", c->threads, 0, 1024 },
        { "max_sequences", c->max_sequences, 1, 4096 },
        { "max_batch", c->max_batch, 1, DECODE_BATCH_MAX },
        { "queue_len", c->queue_len, 1, 1 << 20 },
        { "step_ms", c->step_ms, 1, 10000 },
    };

    for (size_t i = 0; i < sizeof range / sizeof *range; i++)
        if (range[i].value < range[i].lo || range[i].value > range[i].hi)
            return skv_fail(err, SKV_BAD_CONFIG, "%s is %d; it must be from %d to %d", range[i].name, range[i].value,
                            range[i].lo, range[i].hi);
    if (c->max_batch > c->max_sequences)
        c->max_batch = c->max_sequences;
    if (c->threads == 0)
        c->threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (c->threads < 1)
        c->threads = 1;
    e->batch_cap = c->max_batch;
    return 0;
}

static int choose_dtype(struct engine *e, enum kern_kv_dtype *dtype, struct skv_error *err)
{
    const char *want = e->cfg.kv.dtype;

    *dtype = e->cfg.compute_f32 ? KERN_KV_F32 : KERN_KV_BF16;
    for (int d = 0; want != NULL && d < KERN_KV_DTYPES; d++)
        if (strcmp(want, kern_kv_dtype_name((enum kern_kv_dtype)d)) == 0) {
            *dtype = (enum kern_kv_dtype)d;
            want = NULL;
        }
    if (want != NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "kv-dtype \"%s\" is neither bf16 nor int8 (f32 comes with --compute f32)", want);
    if (e->cfg.compute_f32 != (*dtype == KERN_KV_F32))
        return skv_fail(err, SKV_BAD_CONFIG, "kv-dtype %s does not go with --compute %s: f32 computing and an f32 KV cache belong together",
                        kern_kv_dtype_name(*dtype), e->cfg.compute_f32 ? "f32" : "auto");
    e->dtype = kern_kv_dtype_name(*dtype);
    return 0;
}

static int open_backend(struct engine *e, enum kern_kv_dtype dtype, struct skv_error *err)
{
    struct ops_config oc = {
        .n_threads = e->cfg.threads,
        .isa = e->cfg.isa,
        .compute_f32 = e->cfg.compute_f32,
        .kv_dtype = dtype,
        .tp = e->cfg.tp,
        .tp_exact = e->cfg.tp_exact,
        .device = e->cfg.device,
        .slot_values = e->cfg.slot_values,
        .max_lanes = e->cfg.max_sequences,
        .max_rows = e->cfg.max_batch > OPS_TILE ? e->cfg.max_batch : OPS_TILE,
        /* a continued session's kept slots and its new prompt are in one table for a moment */
        .max_pages = (int)pages_for(e->model.src.dims.max_context) * 2 + 1,
    };

    e->ops = ops_find(e->cfg.backend != NULL ? e->cfg.backend : "auto");
    if (e->ops == NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "backend \"%s\" is not in this build; cpu is", e->cfg.backend);
    if (e->cfg.tp > 1 && strncmp(e->ops->name, "cuda", 4) != 0)
        return skv_fail(err, SKV_BAD_CONFIG, "tp %d: only the cuda backend shares a model over devices, and %s is what computes",
                        e->cfg.tp, e->ops->name);
    if (e->cfg.tp_exact && strncmp(e->ops->name, "cuda", 4) != 0)
        return skv_fail(err, SKV_BAD_CONFIG, "tp-exact: only the cuda backend shares a model over devices, and %s is what computes",
                        e->ops->name);
    e->be = e->ops->open(&oc, &e->model.src, err);
    if (e->be == NULL)
        return -1;
    if (!e->cfg.compute_f32)
        gguf_dontneed(e->model.gguf);
    e->ops->info(e->be, &e->weight_bytes, &e->work_bytes, e->detail, sizeof e->detail);
    return 0;
}

static int resolve_plan(struct engine *e, struct skv_error *err)
{
    const char *name = e->cfg.kv.policy != NULL ? e->cfg.kv.policy : "sparse";

    e->policy = policy_find(name);
    if (e->policy == NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "kv-policy \"%s\" is none of %s", name, policy_names());
    if (policy_resolve(e->policy, &e->cfg.kv, e->model.src.dims.max_context, &e->params, SKV_BAD_CONFIG, err) < 0 ||
        thin_resolve(e->cfg.thin, &e->model.src.dims, e->thin, err) < 0)
        return -1;
    if (e->policy->thins)
        memcpy(e->params.thin, e->thin, sizeof e->thin);
    return kvplan_init(&e->plan, e->policy, &e->params, NULL, 0, &e->model.src.dims, err);
}

/* The most that all lanes could use; more would never be touched. */
static int64_t useful_pages(const struct engine *e)
{
    const struct ops_dims *d = &e->model.src.dims;

    return (int64_t)e->cfg.max_sequences * d->n_layer * d->n_kv * pages_for(d->max_context);
}

/* Pages beside kv_memory for a stranger's first request, so that kv_memory is what one user may fill. Where all that there is was
 * taken, there are none beside it: the room is kept free in it. */
static int64_t reserve_beside(const struct engine *e, int64_t n)
{
    int64_t most = useful_pages(e) < UINT32_MAX - 1 ? useful_pages(e) : UINT32_MAX - 1, reserve = core_reserve(e, n);

    if (e->cfg.kv_memory <= 0)
        return 0;
    return n + reserve < most ? reserve : most - n;
}

static int take_pool(struct engine *e, enum kern_kv_dtype dtype, struct skv_error *err)
{
    const struct ops_dims *d = &e->model.src.dims;
    struct kern_page_layout page;
    int64_t bytes = e->cfg.kv_memory, n;

    kern_page_layout_init(&page, dtype, d->head_dim);
    if (bytes <= 0)
        bytes = e->ops->pool_room != NULL ? (int64_t)e->ops->pool_room(e->be) : (int64_t)((double)memory_available() * KV_SHARE);
    n = bytes / (int64_t)page.bytes;
    if (n > useful_pages(e))
        n = useful_pages(e);
    int64_t longest = kvplan_longest(&e->plan, n, d->max_context), least = kvplan_pages(&e->plan, KERN_PAGE_SLOTS);
    if (longest < KERN_PAGE_SLOTS)
        return skv_fail(err, SKV_NO_MEMORY,
                        "KV memory of %lld KiB is %lld pages; even %d tokens need %lld pages (%lld KiB) in %d layers: raise "
                        "--kv-memory",
                        (long long)(bytes / 1024), (long long)n, KERN_PAGE_SLOTS, (long long)least,
                        (long long)(least * (int64_t)page.bytes / 1024), d->n_layer);
    if (n > UINT32_MAX - 1)
        n = UINT32_MAX - 1;
    e->reserve_pages = reserve_beside(e, n);
    e->kv = e->ops->kv_init(e->be, (uint32_t)(n + e->reserve_pages), err);
    if (e->kv == NULL)
        return -1;
    e->pages = pages_new(e->ops, e->be, e->kv, d, e->cfg.max_sequences, err);
    if (e->pages == NULL)
        return -1;
    atomic_store(&e->stats.pages_total, n + e->reserve_pages);
    if (longest < d->max_context)
        core_log(e, 4, "KV memory of %lld MiB holds sequences of up to %lld tokens; the context is %d", (long long)(bytes >> 20),
                 (long long)longest, d->max_context);
    return 0;
}

/* One step's flat arrays. */
static int take_arrays(struct engine *e, struct skv_error *err)
{
    const struct ops_dims *d = &e->model.src.dims;
    size_t batch = (size_t)e->batch_cap, rows = batch > OPS_TILE ? batch : OPS_TILE;
    size_t segs = batch > PREFILL_PACK ? batch : PREFILL_PACK, picks = segs;

    e->seg = calloc(segs, sizeof *e->seg);
    e->row_seq = calloc(batch, sizeof *e->row_seq);
    e->ahead_seq = calloc(batch, sizeof *e->ahead_seq);
    e->row_token = calloc(rows, sizeof *e->row_token);
    e->row_index = calloc(batch, sizeof *e->row_index);
    e->slot = calloc((size_t)d->n_layer * batch * d->n_kv, sizeof *e->slot);
    e->rule = calloc(batch, sizeof *e->rule);
    e->logits = calloc(picks * (size_t)d->n_vocab, sizeof *e->logits);
    e->pick = calloc(picks, sizeof *e->pick);
    e->logits_copy = calloc(picks * (size_t)d->n_vocab, sizeof *e->logits_copy);
    e->kept_mass = calloc((size_t)d->n_kv, sizeof *e->kept_mass);
    e->layer_evicted = calloc((size_t)d->n_layer, sizeof *e->layer_evicted);
    e->layer_dropped = calloc((size_t)d->n_layer, sizeof *e->layer_dropped);
    e->layer_mass = calloc((size_t)d->n_layer, sizeof *e->layer_mass);
    e->thin_pos = calloc((size_t)d->max_context, sizeof *e->thin_pos);
    e->thin_row = calloc((size_t)d->max_context, sizeof *e->thin_row);
    e->thin_score = calloc((size_t)d->max_context, sizeof *e->thin_score);
    e->thin_mark = calloc((size_t)d->max_context, sizeof *e->thin_mark);
    if (!e->seg || !e->row_seq || !e->ahead_seq || !e->row_token || !e->row_index || !e->slot || !e->rule || !e->logits ||
        !e->logits_copy || !e->pick || !e->kept_mass || !e->layer_evicted || !e->layer_dropped || !e->layer_mass || !e->thin_pos || !e->thin_row ||
        !e->thin_score || !e->thin_mark)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a step of %zu sequences", batch);
    for (int l = 0; l < d->n_layer; l++)
        e->layer_mass[l] = -1;
    e->x = e->ops->state_new(e->be, e->batch_cap, err);
    return e->x != NULL ? 0 : -1;
}

static void log_plan(struct engine *e)
{
    const struct ops_dims *d = &e->model.src.dims;
    struct policy_params p = policy_full.defaults;
    int64_t total = core_pages(e);
    struct kvplan full;
    int n_full = 0;

    for (int l = 0; l < d->n_layer; l++)
        n_full += e->plan.budget[l] == 0;
    core_log(e, 6, "model %s: %s, %d layers, %d query and %d KV heads of %d, context %d; %s", e->model.name, e->model.arch,
             d->n_layer, d->n_head, d->n_kv, d->head_dim, d->max_context, e->detail);
    core_log(e, 6, "KV plan: policy %s, %d of %d layers full, budget %d slots a head elsewhere, sink %d, recent %d, cache %s; pool %lld pages of %zu bytes (%lld MiB)",
             e->policy->name, n_full, d->n_layer, e->params.budget, e->params.sink, e->params.recent, e->dtype,
             (long long)total, e->kv->page.bytes, (long long)(total * (int64_t)e->kv->page.bytes >> 20));
    if (kvplan_init(&full, &policy_full, &p, NULL, 0, d, NULL) < 0)
        return;
    for (int n = 1024; n <= d->max_context && n <= 1 << 17; n *= 2)
        core_log(e, 6, "KV plan: sequences of %d tokens that fit: %lld (a full cache: %lld)", n,
                 (long long)kvplan_fit(&e->plan, total, n), (long long)kvplan_fit(&full, total, n));
    kvplan_fini(&full);
}

/* The model's file, or a preset without weights. */
static int open_model(struct engine *e, struct skv_error *err)
{
    if (e->cfg.model == NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "no model: name a GGUF file with --model");
    if (preset_named(e->cfg.model)) {
        if (e->cfg.backend == NULL || strcmp(e->cfg.backend, "sim") != 0)
            return skv_fail(err, SKV_BAD_CONFIG, "%s has no weights: only the sim backend runs it", e->cfg.model);
        if (preset_open(&e->model, e->cfg.model, e->cfg.context, err) < 0)
            return -1;
    } else if (model_open(&e->model, e->cfg.model, e->cfg.chat_template, e->cfg.context, err) < 0) {
        return -1;
    }
    return 0;
}

int init_run(struct engine *e, struct skv_error *err)
{
    enum kern_kv_dtype dtype;

    if (check_config(e, err) < 0 || choose_dtype(e, &dtype, err) < 0 || open_model(e, err) < 0)
        return -1;
    if (e->model.chat == NULL)
        core_log(e, 4, "%s", e->model.chat_error.msg);
    if (resolve_plan(e, err) < 0 || open_backend(e, dtype, err) < 0 || take_pool(e, dtype, err) < 0 || take_arrays(e, err) < 0)
        return -1;
    log_plan(e);
    return 0;
}

int init_follow(struct engine *e, struct skv_error *err)
{
    enum kern_kv_dtype dtype;

    if (check_config(e, err) < 0 || choose_dtype(e, &dtype, err) < 0 || open_model(e, err) < 0 || open_backend(e, dtype, err) < 0)
        return -1;
    core_log(e, 6, "follows rank 0: %s", e->detail);
    return e->ops->follow(e->be, err);
}

void init_undo(struct engine *e)
{
    struct seq *s;

    while ((s = TAILQ_FIRST(&e->seqs)) != NULL)
        sched_forget(e, s);
    if (e->be != NULL && e->x != NULL)
        e->ops->state_free(e->be, e->x);
    free(e->seg);
    free(e->row_seq);
    free(e->ahead_seq);
    free(e->row_token);
    free(e->row_index);
    free(e->slot);
    free(e->rule);
    free(e->logits);
    free(e->logits_copy);
    free(e->pick);
    free(e->kept_mass);
    free(e->layer_evicted);
    free(e->layer_dropped);
    free(e->layer_mass);
    free(e->thin_pos);
    free(e->thin_row);
    free(e->thin_score);
    free(e->thin_mark);
    pages_free(e->pages);
    if (e->be != NULL)
        e->ops->close(e->be);
    kvplan_fini(&e->plan);
    model_close(&e->model);
}
