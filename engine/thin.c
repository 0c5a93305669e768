/* thin.c - see thin.h. */
#include "engine/thin.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

/* Measured with tests/lab; by shape, since a file's name says nothing. */
static const struct {
    int n_layer, d_model, n_head, n_kv, n_vocab;
    struct policy_thin thin[POLICY_THIN];
} measured[] = {
    { 30, 576, 9, 3, 49152, { { 8, 2.65f }, { 15, 1.35f } } }, /* SmolLM2-135M */
};

static int parse(const char *setting, const struct ops_dims *d, struct policy_thin *out, struct skv_error *err)
{
    const char *p = setting;

    for (int i = 0; i < POLICY_THIN && *p != '\0'; i++) {
        int used = 0, least = i > 0 ? out[i - 1].layer + 1 : 1;
        if (sscanf(p, "%d:%f%n", &out[i].layer, &out[i].factor, &used) != 2 || (p[used] != '\0' && p[used] != ','))
            break;
        if (out[i].layer < least || out[i].layer >= d->n_layer)
            return skv_fail(err, SKV_BAD_CONFIG, "kv-thin \"%s\": layer %d; it must be from %d to %d here", setting, out[i].layer, least,
                            d->n_layer - 1);
        if (!(out[i].factor >= 1 && out[i].factor <= 100))
            return skv_fail(err, SKV_BAD_CONFIG, "kv-thin \"%s\": factor %g; it must be from 1 to 100", setting, (double)out[i].factor);
        p += used;
        if (*p == ',' && p[1] != '\0')
            p++;
    }
    if (*p != '\0' || p == setting)
        return skv_fail(err, SKV_BAD_CONFIG, "kv-thin \"%s\" is neither auto, off, nor LAYER:FACTOR (at most %d, separated by commas)",
                        setting, POLICY_THIN);
    return 0;
}

int thin_resolve(const char *setting, const struct ops_dims *d, struct policy_thin *out, struct skv_error *err)
{
    memset(out, 0, POLICY_THIN * sizeof *out);
    if (setting != NULL && strcmp(setting, "off") == 0)
        return 0;
    if (setting != NULL && strcmp(setting, "auto") != 0)
        return parse(setting, d, out, err);
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++)
        if (measured[i].n_layer == d->n_layer && measured[i].d_model == d->d_model && measured[i].n_head == d->n_head &&
            measured[i].n_kv == d->n_kv && measured[i].n_vocab == d->n_vocab)
            memcpy(out, measured[i].thin, sizeof measured[i].thin);
    return 0;
}

bool thin_wanted(const struct seq *s)
{
    return s->plan.params.thin[0].layer > 0 && s->n_prompt - s->n_kv > OPS_TILE;
}

static bool thins_at(const struct seq *s, int layer)
{
    for (int i = 0; s->row_pos != NULL && i < POLICY_THIN; i++)
        if (s->plan.params.thin[i].layer == layer)
            return true;
    return false;
}

/* Mark the positions that heads of `layer` hold. */
static void mark_kept(struct engine *e, const struct seq *s, int layer)
{
    memset(e->thin_mark, 0, (size_t)s->n_prompt * sizeof *e->thin_mark);
    for (int h = 0; h < e->model.src.dims.n_kv; h++) {
        int n = e->kv->len[core_head(e, s->lane, layer, h)];
        e->ops->kv_read(e->be, s->lane, layer, h, e->thin_pos, e->thin_score);
        for (int i = 0; i < n; i++)
            e->thin_mark[e->thin_pos[i]] = true;
    }
}

void thin_group(struct engine *e, struct prefill_group *g, int layer)
{
    struct seq *s = g->seq[0];

    if (s == NULL || !thins_at(s, layer))
        return;
    assert(g->n_seq == 1);
    mark_kept(e, s, layer - 1);
    /* The last queries go on whatever was kept: the layers above are scored by them. */
    int n = g->n_row, n_left = 0, last = s->score_query > s->plan.params.recent ? s->score_query : s->plan.params.recent;
    for (int r = 0; r < n; r++) {
        int pos = s->thinned ? s->row_pos[r] : s->n_kv + r;
        if (r < n - last && !e->thin_mark[pos])
            continue;
        s->row_pos[n_left] = pos;
        e->thin_row[n_left++] = r;
    }
    if (n_left == n && !s->thinned)
        return;
    e->ops->state_thin(e->be, g->x, e->thin_row, n_left);
    s->thinned = true;
    s->n_row = g->n_row = n_left;
    g->n_tile = (n_left + OPS_TILE - 1) / OPS_TILE;
}
