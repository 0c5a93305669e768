/* sim.c - the sim backend's table of operations; see sim.h. */
#include "kernels/sim/sim.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void sim_close(void *be)
{
    struct sim *s = be;

    if (s == NULL)
        return;
    sim_kv_free(s);
    free(s->kv.table);
    free(s->kv.len);
    free(s->kv.cap);
    free(s->kv.victim);
    free(s->row);
    free(s->att);
    free(s);
}

static void *sim_open(const struct ops_config *cfg, const struct ops_model_src *src, struct skv_error *err)
{
    const char *device = cfg->device != NULL ? cfg->device : sim_device_at(0)->name;
    struct sim *s;

    if (src->dims.n_kv > 256 || src->dims.d_model < 2) {
        skv_fail(err, SKV_BAD_MODEL, "the sim backend takes models of at most 256 KV heads");
        return NULL;
    }
    if (sim_device_find(device) == NULL) {
        char list[256];
        size_t n = 0;
        for (int i = 0; sim_device_at(i) != NULL && n < sizeof list; i++)
            n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i > 0 ? ", " : "", sim_device_at(i)->name);
        skv_fail(err, SKV_BAD_CONFIG, "there are no figures for a device \"%s\"; there are for %s", device, list);
        return NULL;
    }
    s = calloc(1, sizeof *s);
    if (s != NULL) {
        s->d = src->dims;
        s->cfg = *cfg;
        s->src = src;
        s->dev = sim_device_find(device);
        s->g = s->d.n_head / s->d.n_kv;
        s->weight_bytes = sim_weight_bytes(src);
        s->max_slots = cfg->max_pages * KERN_PAGE_SLOTS;
        s->row = calloc((size_t)cfg->max_rows, sizeof *s->row);
        s->att = calloc((size_t)cfg->max_rows, sizeof *s->att);
        atomic_init(&s->ns, 1000000); /* not 0: a time of 0 is none */
    }
    if (s == NULL || s->row == NULL || s->att == NULL) {
        sim_close(s);
        skv_fail(err, SKV_NO_MEMORY, "no memory for the sim backend");
        return NULL;
    }
    return s;
}

static void sim_info(void *be, size_t *weight_bytes, size_t *work_bytes, char *text, size_t text_size)
{
    const struct sim *s = be;

    *weight_bytes = (size_t)s->weight_bytes;
    *work_bytes = 0;
    if (text_size > 0)
        snprintf(text, text_size, "a model of %s: no token is real, %.1f MiB of weights", s->dev->title,
                 s->weight_bytes / 1048576);
}

/* ---- KV ----------------------------------------------------------------------------------------------------------- */

static struct ops_kv *sim_kv_init(void *be, uint32_t n_pages, struct skv_error *err)
{
    struct sim *s = be;
    size_t n = (size_t)s->cfg.max_lanes * s->d.n_layer * s->d.n_kv;

    kern_page_layout_init(&s->kv.page, s->cfg.kv_dtype, s->d.head_dim);
    s->kv.n_pages = n_pages;
    s->kv.max_pages = s->cfg.max_pages;
    s->kv.table = calloc(n * (size_t)s->cfg.max_pages, sizeof *s->kv.table);
    s->kv.len = calloc(n, sizeof *s->kv.len);
    s->kv.cap = calloc(n, sizeof *s->kv.cap);
    s->kv.victim = calloc(n, sizeof *s->kv.victim);
    if (s->kv.table == NULL || s->kv.len == NULL || s->kv.cap == NULL || s->kv.victim == NULL) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the page tables of %d lanes", s->cfg.max_lanes);
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        s->kv.cap[i] = INT32_MAX;
        s->kv.victim[i] = -1;
    }
    return s->cfg.slot_values && sim_kv_values(s, err) < 0 ? NULL : &s->kv;
}

static void sim_page_clear(void *be, const uint32_t *pages, int n)
{
    struct sim *s = be;

    for (int i = 0; s->value != NULL && i < n; i++) {
        size_t k = (size_t)pages[i] * KERN_PAGE_SLOTS;
        memset(s->value + k, 0, KERN_PAGE_SLOTS * sizeof *s->value);
        memset(s->pos + k, 0, KERN_PAGE_SLOTS * sizeof *s->pos);
        memset(s->score + k, 0, KERN_PAGE_SLOTS * sizeof *s->score);
    }
}

/* Without slot values nothing is known of positions. Heads then keep runs that overlap by four fifths with their neighbours', so that
 * a prompt gets thinner by about as much as in a real model of three heads (docs/quality.md). */
static void sim_kv_read(void *be, int lane, int layer, int head, int32_t *pos, float *score)
{
    const struct sim *s = be;
    size_t at = sim_index(s, lane, layer, head);

    for (int i = 0; i < s->kv.len[at]; i++) {
        size_t k = (size_t)s->kv.table[at * s->kv.max_pages + i / KERN_PAGE_SLOTS] * KERN_PAGE_SLOTS + i % KERN_PAGE_SLOTS;
        pos[i] = s->value != NULL ? s->pos[k] : (i + head * s->kv.len[at] / 5) % s->d.max_context;
        score[i] = s->value != NULL ? s->score[k] : 0;
    }
}

/* ---- hidden states: a row's hash lies in its first eight bytes --------------------------------------------------------- */

static float *sim_state_new(void *be, int n_row, struct skv_error *err)
{
    const struct sim *s = be;
    float *x = calloc((size_t)n_row * s->d.d_model, sizeof *x);

    if (x == NULL)
        skv_fail(err, SKV_NO_MEMORY, "no memory for %d hidden states", n_row);
    return x;
}

static void sim_state_free(void *be, float *state)
{
    (void)be;
    free(state);
}

static void sim_state_thin(void *be, float *state, const int32_t *row, int n)
{
    struct sim *s = be;
    size_t d = (size_t)s->d.d_model;

    for (int i = 0; i < n; i++)
        memmove(state + i * d, state + row[i] * d, d * sizeof *state);
    sim_cost_rows(s, n);
}

static uint64_t state_get(const struct sim *s, const float *x, int row)
{
    uint64_t h;

    memcpy(&h, x + (size_t)row * s->d.d_model, sizeof h);
    return h;
}

static void state_put(const struct sim *s, float *x, int row, uint64_t h)
{
    memcpy(x + (size_t)row * s->d.d_model, &h, sizeof h);
}

/* ---- the pass -------------------------------------------------------------------------------------------------------------- */

static void sim_embed(void *be, const struct ops_pass *pass, float *x)
{
    struct sim *s = be;

    for (int i = 0; i < pass->n_seg; i++) {
        const struct ops_seg *seg = &pass->seg[i];
        int last = seg->row0 + seg->n_row - 1;
        for (int r = s->value != NULL ? seg->row0 : last; r <= last; r++) /* without slot values only a last row is asked for */
            state_put(s, x, r, sim_mix((uint64_t)pass->token[r], (uint64_t)ops_seg_pos(seg, r)));
    }
    sim_cost_rows(s, pass->n_row);
}

static void sim_attn_in(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot)
{
    struct sim *s = be;

    assert(pass->n_row <= s->cfg.max_rows);
    if (s->value != NULL) {
        for (int r = 0; r < pass->n_row; r++) {
            s->row[r] = state_get(s, x, r);
            s->att[r] = 0;
        }
        sim_kv_store(s, layer, pass, slot);
    }
    s->decode = slot != NULL;
    sim_cost_attn_in(s, layer, pass->n_row);
}

static void sim_attn_prefill(void *be, int layer, const struct ops_pass *pass)
{
    struct sim *s = be;

    if (s->value != NULL)
        sim_kv_attn_prefill(s, layer, pass);
    sim_cost_attn_prefill(s, layer, pass);
}

static void sim_attn_decode(void *be, int layer, const struct ops_pass *pass, const struct kern_rule *rule)
{
    struct sim *s = be;

    sim_cost_attn_decode(s, layer, pass, rule);
    if (s->value != NULL) {
        sim_kv_attn_decode(s, layer, pass, rule);
        return;
    }
    for (int i = 0; i < pass->n_seg; i++)
        for (int h = 0; h < s->d.n_kv; h++) {
            size_t at = sim_index(s, pass->seg[i].lane, layer, h);
            if (s->kv.len[at] >= s->kv.cap[at])
                s->kv.victim[at] = pass->seg[i].pos0 % s->kv.len[at];
        }
}

static void sim_attn_out_mlp(void *be, int layer, const struct ops_pass *pass, float *x)
{
    struct sim *s = be;

    if (s->value != NULL)
        for (int i = 0; i < pass->n_seg; i++)
            for (int r = pass->seg[i].row0; r < pass->seg[i].row0 + pass->seg[i].n_row; r++)
                state_put(s, x, r, sim_mix(s->row[r], s->att[r]));
    sim_cost_attn_out_mlp(s, layer, pass->n_row);
}

static void sim_score_begin(void *be, int lane, int n_slot)
{
    struct sim *s = be;

    assert(n_slot <= s->max_slots);
    for (int h = 0; s->value != NULL && h < s->d.n_kv; h++)
        memset(s->score_row + ((size_t)lane * s->d.n_kv + h) * s->max_slots, 0, (size_t)n_slot * sizeof *s->score_row);
}

static void sim_score_read(void *be, int lane, int n_slot, float *out)
{
    const struct sim *s = be;

    for (int h = 0; h < s->d.n_kv; h++)
        for (int i = 0; i < n_slot; i++)
            out[(size_t)h * n_slot + i] = s->value != NULL ? s->score_row[((size_t)lane * s->d.n_kv + h) * s->max_slots + i] : 0;
}

/* As on the CPU: a layer that is at its budget, or a head above it, stays as it is; others may grow to it. */
static void set_caps(struct sim *s, int lane, int layer, const struct kern_rule *rule)
{
    bool shared = rule->use_score && rule->head_floor < 1;
    int64_t total = 0;

    for (int h = 0; h < s->d.n_kv; h++)
        total += s->kv.len[sim_index(s, lane, layer, h)];
    for (int h = 0; h < s->d.n_kv; h++) {
        size_t at = sim_index(s, lane, layer, h);
        bool full = shared && total >= (int64_t)rule->budget * s->d.n_kv;
        s->kv.cap[at] = rule->budget == 0                                ? INT32_MAX
                        : full || s->kv.len[at] > rule->budget ? s->kv.len[at]
                                                               : rule->budget;
        s->kv.victim[at] = -1;
    }
}

static void sim_select(void *be, int lane, int layer, const struct kern_rule *rule, int n_query, float *kept_mass)
{
    struct sim *s = be;

    (void)n_query;
    sim_cost_select(s, lane, layer, rule);
    if (rule->budget > 0 && s->value != NULL)
        sim_kv_select(s, lane, layer, rule, kept_mass);
    for (int h = 0; s->value == NULL && rule->budget > 0 && h < s->d.n_kv; h++) {
        int32_t *len = &s->kv.len[sim_index(s, lane, layer, h)], n = *len < rule->budget ? *len : rule->budget;
        if (kept_mass != NULL)
            kept_mass[h] = (float)n / (float)(*len > 0 ? *len : 1);
        *len = n;
    }
    set_caps(s, lane, layer, rule);
}

/* A token is a printable character most of the time, now and then any byte, and once in 64 the end token. */
static int32_t scripted_token(uint64_t h, int n_vocab)
{
    int32_t token = h % 64 == 0 ? n_vocab - 1 : h >> 8 & 15 ? 32 + (int32_t)((h >> 16) % 95) : (int32_t)(h >> 16 & 255);

    return token < n_vocab ? token : 0;
}

static void sim_logits(void *be, const float *x, const int32_t *row, int n, float *logits)
{
    struct sim *s = be;

    for (int i = 0; i < n; i++) {
        uint64_t h = sim_mix(state_get(s, x, row[i]), 2), h2 = sim_mix(h, 3);
        float *out = logits + (size_t)i * s->d.n_vocab;
        memset(out, 0, (size_t)s->d.n_vocab * sizeof *out);
        out[h2 % (uint64_t)s->d.n_vocab] = 3;
        out[scripted_token(h, s->d.n_vocab)] = 6;
    }
    sim_cost_logits(s, n);
}

static void sim_host_for(void *be, int n, void (*fn)(void *arg, int i), void *arg)
{
    for (int i = 0; i < n; i++)
        fn(arg, i);
    sim_cost_host(be, n);
}

static int64_t sim_now_us(void *be)
{
    struct sim *s = be;

    return atomic_load_explicit(&s->ns, memory_order_relaxed) / 1000;
}

static void sim_idle(void *be, int64_t us)
{
    struct sim *s = be;

    atomic_fetch_add_explicit(&s->ns, us * 1000, memory_order_relaxed);
}

const struct ops ops_sim = {
    .name = "sim",
    .open = sim_open,
    .close = sim_close,
    .info = sim_info,
    .kv_init = sim_kv_init,
    .page_clear = sim_page_clear,
    .kv_read = sim_kv_read,
    .state_new = sim_state_new,
    .state_free = sim_state_free,
    .state_thin = sim_state_thin,
    .embed = sim_embed,
    .attn_in = sim_attn_in,
    .attn_prefill = sim_attn_prefill,
    .attn_decode = sim_attn_decode,
    .attn_out_mlp = sim_attn_out_mlp,
    .score_begin = sim_score_begin,
    .select = sim_select,
    .score_read = sim_score_read,
    .logits = sim_logits,
    .host_for = sim_host_for,
    .now_us = sim_now_us,
    .idle = sim_idle,
};
