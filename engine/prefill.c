/* prefill.c - layered prefill: prompts go layer by layer over all their tokens, a unit (one tile of one layer) at a time.
 *
 * So the last queries see the whole prompt when a layer is scored, only one sparse layer of full prompt KV exists at a time, a
 * layer's weights are read once a tile, and the time until the next decode step is bounded by a unit. How the units
 * fall into steps changes nothing in the results: tiles are cut at multiples of OPS_TILE of the prompt itself.
 *
 * A long prompt may get thinner on its way up (thin.h).
 */
#include <assert.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/thin.h"

#define MASS_WEIGHT 0.05 /* of the latest prompt in the running mean */
#define TAIL_MAX 12 /* no known template's header is longer */

/* Tokens of the prompt. */
static int prompt_rows(const struct seq *s)
{
    return s->n_prompt - s->n_kv;
}

/* Those that the layer in hand sees. */
static int seq_rows(const struct seq *s)
{
    return s->thinned ? s->n_row : prompt_rows(s);
}

/* ---- groups ------------------------------------------------------------------------------------- */

/* What groups at work may borrow together. */
static int64_t loans(const struct engine *e)
{
    int64_t sum = 0;

    for (const struct prefill_group *g = e->group; g < e->group + PREFILL_GROUPS; g++)
        for (int i = 0; g->active && i < g->n_seq; i++)
            sum += g->seq[i] != NULL ? g->seq[i]->transient : 0;
    return sum;
}

/* May a group that borrows `loan` pages start now, beside the others? */
static bool loan_fits(struct engine *e, int64_t loan)
{
    return pages_reserved(e->pages) + loans(e) + loan <= pages_total(e->pages);
}

static void group_add(struct prefill_group *g, struct seq *s)
{
    g->seq[g->n_seq] = s;
    g->row0[g->n_seq++] = g->n_row;
    g->n_row += seq_rows(s);
}

static bool any_group(const struct engine *e)
{
    for (int k = 0; k < PREFILL_GROUPS; k++)
        if (e->group[k].active)
            return true;
    return false;
}

static bool in_group(const struct prefill_group *g, const struct seq *s)
{
    for (int i = 0; i < g->n_seq; i++)
        if (g->seq[i] == s)
            return true;
    return false;
}

/* Every user's sequences whose prompt has begun. */
static void count_begun(const struct engine *e)
{
    const struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        s->user->begun = 0;
    TAILQ_FOREACH(s, &e->seqs, link)
        s->user->begun += s->state == SEQ_PREFILL || s->state == SEQ_DECODE;
}

static bool ready(const struct seq *s)
{
    return s->state == SEQ_READY && !s->paused && !s->resting;
}

/* The next READY sequence of at most `rows` rows that is not in the group: in the order of admission, so of the uid with
 * the fewest at work, then by priority, then arrival. */
static struct seq *best_ready(const struct engine *e, const struct prefill_group *g, int rows)
{
    struct seq *s, *best = NULL;
    int best_begun = 0;

    count_begun(e);
    TAILQ_FOREACH(s, &e->seqs, link) {
        if (!ready(s) || seq_rows(s) > rows || in_group(g, s))
            continue;
        int begun = s->user->begun;
        if (best == NULL || begun < best_begun || (begun == best_begun && s->req->priority > best->req->priority)) {
            best = s;
            best_begun = begun;
        }
    }
    return best;
}

/* Start a group with the READY sequence whose turn it is, of at most `rows` rows; a short prompt brings others along, up to a tile.
 * The first is not passed over when its loan has to wait for another group's end, or it might wait for ever. */
static bool group_start(struct engine *e, struct prefill_group *g, int rows)
{
    struct skv_error err;
    struct seq *s;
    int64_t loan = 0, now = core_now_us(e);

    memset(g, 0, sizeof *g);
    s = best_ready(e, g, rows);
    while (s != NULL && loan_fits(e, loan + s->transient)) {
        loan += s->transient;
        group_add(g, s);
        s = g->n_row < OPS_TILE && g->n_seq < PREFILL_PACK ? best_ready(e, g, OPS_TILE - g->n_row) : NULL;
    }
    if (g->n_seq == 0)
        return false;
    g->x = e->ops->state_new(e->be, g->n_row, &err);
    if (g->x == NULL) {
        for (int i = 0; i < g->n_seq && !any_group(e); i++)
            sched_fail(e, g->seq[i], SKV_INTERNAL, "%s", err.msg);
        memset(g, 0, sizeof *g); /* beside others it can wait for their end */
        return false;
    }
    g->active = true;
    g->n_tile = (g->n_row + OPS_TILE - 1) / OPS_TILE;
    for (int i = 0; i < g->n_seq; i++) {
        s = g->seq[i];
        s->state = SEQ_PREFILL;
        s->t_prefill = now;
        stats_hist_add(&e->stats.queue, now - s->t_submit);
    }
    return true;
}

static void group_end(struct engine *e, struct prefill_group *g)
{
    e->ops->state_free(e->be, g->x);
    memset(g, 0, sizeof *g);
}

void prefill_leave(struct engine *e, struct seq *s)
{
    for (int k = 0; k < PREFILL_GROUPS; k++) {
        struct prefill_group *g = &e->group[k];
        int left = 0;
        for (int i = 0; i < g->n_seq; i++) {
            if (g->seq[i] == s)
                g->seq[i] = NULL;
            left += g->seq[i] != NULL;
        }
        if (g->active && left == 0)
            group_end(e, g);
    }
}

/* ---- one layer of one sequence ------------------------------------------------------------------- */

/* A chat's prompt ends with the template's own words (the assistant's header): how many tokens. Known of messages; in a prompt
 * that is a chat's text, counted from the last token that ends a turn. 0 where no turn ended just before. */
static int tail_tokens(const struct engine *e, const struct seq *s)
{
    int n = s->n_prompt;

    if (s->tail_from >= 0)
        return n - s->tail_from;
    for (int k = 1; k <= TAIL_MAX && k <= prompt_rows(s); k++)
        if (tok_is_eog(e->model.tok, s->tokens.id[n - k]))
            return k;
    return 0;
}

/* Before the layer's first tile: slots for the prompt, and what will be scored. */
static void layer_begin(struct engine *e, struct seq *s, int layer)
{
    int n_kv = e->model.src.dims.n_kv, rows = seq_rows(s), most = 0;
    struct kern_rule *rule = &s->plan.rule[layer];

    for (int h = 0; h < n_kv; h++) {
        size_t i = core_head(e, s->lane, layer, h);
        s->slot0[h] = e->kv->len[i];
        pages_grow(e->pages, s->lane, layer, h, s->slot0[h] + rows);
        e->kv->len[i] = s->slot0[h] + rows;
        if (e->kv->len[i] > most)
            most = e->kv->len[i];
    }
    s->score_query = 0;
    if (rule->budget == 0)
        return;
    struct policy_prompt prompt = { .n_slot = most, .n_new = rows,
                                    .n_last = s->last_from >= 0 ? s->n_prompt - s->last_from : 0,
                                    .n_tail = tail_tokens(e, s) };
    s->score_query = s->plan.policy->choose(&s->plan.params, &prompt, rule);
    if (rule->pool_to < 0)
        rule->pool_to = 0;
    if (s->score_query > 0)
        e->ops->score_begin(e->be, s->lane, most);
}

/* A prompt's share of the score that its kept slots hold, the mean over the heads, goes into the layer's running mean. */
static void note_mass(struct engine *e, int layer)
{
    int n_kv = e->model.src.dims.n_kv;
    double mass = 0, *m = &e->layer_mass[layer];

    for (int h = 0; h < n_kv; h++)
        mass += (double)e->kept_mass[h] / n_kv;
    *m = *m < 0 ? mass : *m * (1 - MASS_WEIGHT) + mass * MASS_WEIGHT;
}

/* After the layer's last tile, phase 3: choose, gather, free the rest. */
static void layer_end(struct engine *e, struct seq *s, int layer)
{
    struct kern_rule *rule = &s->plan.rule[layer];
    int n_kv = e->model.src.dims.n_kv, before = 0, after = 0;
    bool whole = true;

    if (rule->budget == 0)
        return;
    for (int h = 0; h < n_kv; h++) {
        int len = e->kv->len[core_head(e, s->lane, layer, h)];
        before += len;
        whole = whole && len <= rule->budget;
    }
    if (rule->use_score || !whole)
        e->ops->select(e->be, s->lane, layer, rule, s->score_query, e->kept_mass);
    for (int h = 0; h < n_kv; h++) {
        size_t i = core_head(e, s->lane, layer, h);
        after += e->kv->len[i];
        pages_trim(e->pages, s->lane, layer, h, e->kv->len[i]);
        /* One slot above what is kept: the new pair is there while the step's victim is chosen. */
        e->kv->cap[i] = (whole ? rule->budget : e->kv->len[i]) + 1;
        e->kv->victim[i] = -1;
    }
    if (rule->use_score && !whole)
        note_mass(e, layer);
    e->layer_evicted[layer] += before - after;
    s->plan.policy->update(&s->plan.params, rule);
}

/* ---- units -------------------------------------------------------------------------------------------- */

/* The segments of one tile. A tile is a run of rows of one long sequence, or several short ones whole. */
static int tile_segments(struct engine *e, struct prefill_group *g, int row_from, int row_to)
{
    int n = 0;

    for (int i = 0; i < g->n_seq; i++) {
        struct seq *s = g->seq[i];
        if (s == NULL)
            continue;
        int first = g->row0[i], last = first + seq_rows(s);
        int from = first > row_from ? first : row_from, to = last < row_to ? last : row_to;
        if (from >= to)
            continue;
        int done = from - first;
        int32_t *slot0 = s->slot0 + e->model.src.dims.n_kv; /* second half: this tile's */
        for (int h = 0; h < e->model.src.dims.n_kv; h++)
            slot0[h] = s->slot0[h] + done;
        int32_t *pos = s->thinned ? s->row_pos + done : NULL;
        int scored = last - s->score_query > from ? last - s->score_query : from;
        e->seg[n++] = (struct ops_seg){ .lane = s->lane, .row0 = from - row_from, .n_row = to - from,
                                        .pos0 = s->n_kv + done, .pos = pos, .slot0 = slot0[0], .head_slot0 = slot0,
                                        .score_from = s->score_query > 0 ? scored - row_from : to - row_from };
    }
    return n;
}

static void tile_tokens(struct engine *e, const struct prefill_group *g, int row_from, int row_to)
{
    memset(e->row_token, 0, (size_t)(row_to - row_from) * sizeof *e->row_token);
    for (int i = 0; i < g->n_seq; i++) {
        const struct seq *s = g->seq[i];
        for (int r = row_from; s != NULL && r < row_to; r++)
            if (r >= g->row0[i] && r < g->row0[i] + seq_rows(s))
                e->row_token[r - row_from] = s->tokens.id[s->n_kv + r - g->row0[i]];
    }
}

static void unit_forward(struct engine *e, struct prefill_group *g)
{
    int from = g->tile * OPS_TILE, to = from + OPS_TILE < g->n_row ? from + OPS_TILE : g->n_row;
    float *x = g->x + (size_t)from * e->model.src.dims.d_model;
    struct ops_pass pass = { .n_row = to - from, .token = e->row_token, .seg = e->seg };

    if (g->layer == 0)
        tile_tokens(e, g, from, to);
    pass.n_seg = tile_segments(e, g, from, to);
    if (g->layer == 0)
        e->ops->embed(e->be, &pass, x);
    e->ops->attn_in(e->be, g->layer, &pass, x, NULL);
    e->ops->attn_prefill(e->be, g->layer, &pass);
    e->ops->attn_out_mlp(e->be, g->layer, &pass, x);
}

static void group_progress(struct engine *e, struct prefill_group *g)
{
    int64_t done = (int64_t)g->layer * g->n_tile + g->tile, all = (int64_t)e->model.src.dims.n_layer * g->n_tile;

    for (int i = 0; i < g->n_seq; i++)
        if (g->seq[i] != NULL)
            emit_progress(e, g->seq[i], ENGINE_PREFILL, (int)(done * prompt_rows(g->seq[i]) / all), prompt_rows(g->seq[i]));
}

/* All layers are done: the sequences of a group begin their answers. */
static void group_finish(struct engine *e, struct prefill_group *g)
{
    struct seq *done[PREFILL_PACK];
    int32_t row[PREFILL_PACK];
    int n = 0;

    group_progress(e, g);
    for (int i = 0; i < g->n_seq; i++) {
        struct seq *s = g->seq[i];
        if (s == NULL)
            continue;
        row[n] = g->row0[i] + seq_rows(s) - 1;
        done[n++] = s;
        stats_tokens(&e->stats, prompt_rows(s), 0);
    }
    /* From here on they are not part of the group: an end must not look for it. */
    float *x = g->x;
    g->n_seq = 0;
    g->active = false;
    g->x = NULL;
    for (int i = 0; i < n; i++) {
        done[i]->n_kv = done[i]->n_prompt;
        done[i]->state = SEQ_DECODE;
    }
    decode_first(e, done, row, n, x);
    e->ops->state_free(e->be, x);
}

static void unit_run(struct engine *e, struct prefill_group *g)
{
    if (g->tile == 0)
        for (int i = 0; i < g->n_seq; i++)
            if (g->seq[i] != NULL)
                layer_begin(e, g->seq[i], g->layer);
    unit_forward(e, g);
    if (core_failed(e))
        return;
    if (++g->tile == g->n_tile) {
        for (int i = 0; i < g->n_seq; i++)
            if (g->seq[i] != NULL)
                layer_end(e, g->seq[i], g->layer);
        g->tile = 0;
        g->layer++;
        thin_group(e, g, g->layer);
    }
    if (g->layer == e->model.src.dims.n_layer)
        group_finish(e, g);
    else
        group_progress(e, g);
}

static bool any_ready(const struct engine *e, int rows)
{
    const struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (ready(s) && seq_rows(s) <= rows)
            return true;
    return false;
}

bool prefill_pending(const struct engine *e)
{
    return any_group(e) || any_ready(e, INT_MAX);
}

/* Is the next READY one of a user who has nothing at work? */
static bool newcomer_ready(const struct engine *e, const struct prefill_group *g)
{
    const struct seq *s = best_ready(e, g, INT_MAX);

    return s != NULL && s->user->begun == 0;
}

/* Which group is next. Short prompts overtake a long one, and a user's first, long or not, does not wait for another user's long
 * one; each group at work gets as many units. */
static struct prefill_group *next_group(struct engine *e)
{
    struct prefill_group *first = &e->group[0], *overtaking = &e->group[1], *beside = &e->group[2];

    if (!first->active && any_ready(e, INT_MAX))
        group_start(e, first, INT_MAX);
    if (first->active && first->n_tile > 1 && !overtaking->active && any_ready(e, OPS_TILE))
        group_start(e, overtaking, OPS_TILE);
    if (first->active && first->n_tile > 1 && !beside->active && newcomer_ready(e, beside))
        group_start(e, beside, INT_MAX);
    for (int k = 0; k < PREFILL_GROUPS; k++) {
        e->group_turn = (e->group_turn + 1) % PREFILL_GROUPS;
        if (e->group[e->group_turn].active)
            return &e->group[e->group_turn];
    }
    return NULL;
}

bool prefill_slice(struct engine *e, int64_t deadline_us)
{
    bool any = false;

    do {
        struct prefill_group *g = next_group(e);
        if (g == NULL)
            return any;
        unit_run(e, g);
        any = true;
    } while (!core_failed(e) && core_now_us(e) < deadline_us);
    return any;
}
