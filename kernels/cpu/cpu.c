/* cpu.c - the CPU backend: opening, closing, and its table of operations. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check(const struct ops_config *cfg, const struct ops_dims *d, struct skv_error *err)
{
    if (d->n_layer < 1 || d->d_model < 1 || d->n_kv < 1 || d->n_head < d->n_kv || d->n_head % d->n_kv != 0 ||
        d->head_dim < 2 || d->n_ffn < 1 || d->n_vocab < 1 || d->rot_dim < 0 || d->rot_dim % 2 != 0 ||
        d->rot_dim > d->head_dim || d->max_context < 1)
        return skv_fail(err, SKV_BAD_MODEL, "the model's dimensions don't fit together");
    if (cfg->compute_f32 != (cfg->kv_dtype == KERN_KV_F32))
        return skv_fail(err, SKV_BAD_CONFIG, "exact f32 computation and an f32 KV cache go together");
    if (cfg->max_rows < 1 || cfg->max_lanes < 1 || cfg->max_pages < 1)
        return skv_fail(err, SKV_BAD_CONFIG, "rows, lanes and pages must be at least 1");
    return 0;
}

static void cpu_close(void *be)
{
    struct cpu *c = be;
    if (!c)
        return;
    cpu_kv_fini(c);
    cpu_attn_fini(c);
    cpu_linear_fini(c);
    cpu_weights_free(c);
    workers_free(c->workers);
    free(c);
}

static void *cpu_open(const struct ops_config *cfg, const struct ops_model_src *src, struct skv_error *err)
{
    if (check(cfg, &src->dims, err) < 0)
        return NULL;
    struct cpu *c = calloc(1, sizeof *c);
    if (!c) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the CPU backend");
        return NULL;
    }
    c->d = src->dims;
    c->cfg = *cfg;
    c->g = c->d.n_head / c->d.n_kv;
    c->qkv_width = (c->d.n_head + 2 * c->d.n_kv) * c->d.head_dim;
    if (!(c->isa = kern_isa_get(cfg->isa, err)) || !(c->workers = workers_new(cfg->n_threads, err)) ||
        cpu_weights_load(c, src, err) < 0 || cpu_linear_init(c, err) < 0 || cpu_attn_init(c, err) < 0) {
        cpu_close(c);
        return NULL;
    }
    return c;
}

static void cpu_info(void *be, size_t *weight_bytes, size_t *work_bytes, char *text, size_t text_size)
{
    const struct cpu *c = be;
    *weight_bytes = cpu_weights_bytes(c);
    *work_bytes = cpu_linear_bytes(c) + cpu_attn_bytes(c);
    if (text_size)
        snprintf(text, text_size, "cpu %s, %d threads, %s, %.1f MiB of weights, %.1f MiB of workspace", c->isa->name,
                 workers_count(c->workers), c->cfg.compute_f32 ? "exact f32 on the mapped file" : "repacked weights",
                 (double)*weight_bytes / 1048576, (double)*work_bytes / 1048576);
}

/* A state carries its size in the 64 bytes before it. */
#define STATE_HEADER 64

static float *cpu_state_new(void *be, int n_row, struct skv_error *err)
{
    const struct cpu *c = be;
    size_t bytes = STATE_HEADER + (size_t)n_row * c->d.d_model * sizeof(float);
    unsigned char *p = cpu_map(bytes, err);
    if (!p)
        return NULL;
    memcpy(p, &bytes, sizeof bytes);
    return (float *)(p + STATE_HEADER);
}

static void cpu_state_free(void *be, float *state)
{
    (void)be;
    if (!state)
        return;
    unsigned char *p = (unsigned char *)state - STATE_HEADER;
    size_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    cpu_unmap(p, bytes);
}

static void cpu_state_thin(void *be, float *state, const int32_t *row, int n)
{
    const struct cpu *c = be;
    size_t d = (size_t)c->d.d_model;

    for (int i = 0; i < n; i++)
        if (row[i] != i)
            memcpy(state + i * d, state + row[i] * d, d * sizeof *state);
}

struct host_job {
    void (*fn)(void *arg, int i);
    void *arg;
};

static void host_item(void *arg, int item, int worker)
{
    const struct host_job *j = arg;
    (void)worker;
    j->fn(j->arg, item);
}

static void cpu_host_for(void *be, int n, void (*fn)(void *arg, int i), void *arg)
{
    struct cpu *c = be;
    struct host_job j = { fn, arg };
    workers_run(c->workers, n, host_item, &j);
}

const struct ops ops_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .info = cpu_info,
    .kv_init = cpu_kv_init,
    .page_clear = cpu_page_clear,
    .kv_read = cpu_kv_read,
    .state_new = cpu_state_new,
    .state_free = cpu_state_free,
    .state_thin = cpu_state_thin,
    .embed = cpu_embed,
    .attn_in = cpu_attn_in,
    .attn_prefill = cpu_attn_prefill,
    .attn_decode = cpu_attn_decode,
    .attn_out_mlp = cpu_attn_out_mlp,
    .score_begin = cpu_score_begin,
    .select = cpu_select,
    .score_read = cpu_score_read,
    .logits = cpu_logits,
    .host_for = cpu_host_for,
};
