/* sim_kv.c - slots that hold values: what the sim backend's tokens depend on when it is asked to (sim.h). */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/sim/sim.h"

#define SLOTS KERN_PAGE_SLOTS

/* A slot that may stay, while a layer is sparsified. */
struct sim_pick {
    float score;
    int32_t pos, slot, head;
    bool keep;
};

static void *map(size_t n, size_t each)
{
    void *p = mmap(NULL, n * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return p != MAP_FAILED ? p : NULL;
}

static void unmap(void *p, size_t n, size_t each)
{
    if (p != NULL)
        munmap(p, n * each);
}

/* A decode step's query, kept for a burst. */
struct sim_query {
    uint64_t row;
    int32_t pos;
};

int sim_kv_values(struct sim *s, struct skv_error *err)
{
    size_t slots = (size_t)s->kv.n_pages * SLOTS;

    s->value = map(slots, sizeof *s->value);
    s->pos = map(slots, sizeof *s->pos);
    s->score = map(slots, sizeof *s->score);
    s->score_row = map((size_t)s->cfg.max_lanes * s->d.n_kv * s->max_slots, sizeof *s->score_row);
    s->pick = map((size_t)s->d.n_kv * s->max_slots, sizeof *s->pick);
    s->ring = map((size_t)s->cfg.max_lanes * s->d.n_layer * OPS_RING, sizeof *s->ring);
    if (s->value == NULL || s->pos == NULL || s->score == NULL || s->score_row == NULL || s->pick == NULL || s->ring == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the values of %zu slots", slots);
    return 0;
}

void sim_kv_free(struct sim *s)
{
    size_t slots = (size_t)s->kv.n_pages * SLOTS;

    unmap(s->value, slots, sizeof *s->value);
    unmap(s->pos, slots, sizeof *s->pos);
    unmap(s->score, slots, sizeof *s->score);
    unmap(s->score_row, (size_t)s->cfg.max_lanes * s->d.n_kv * s->max_slots, sizeof *s->score_row);
    unmap(s->pick, (size_t)s->d.n_kv * s->max_slots, sizeof *s->pick);
    unmap(s->ring, (size_t)s->cfg.max_lanes * s->d.n_layer * OPS_RING, sizeof *s->ring);
}

/* Where slot `slot` of a table is in the arrays. */
static size_t place(const struct sim *s, size_t at, int slot)
{
    assert(slot >= 0 && slot / SLOTS < s->kv.max_pages);
    uint32_t page = s->kv.table[at * s->kv.max_pages + slot / SLOTS];
    assert(page < s->kv.n_pages);
    return (size_t)page * SLOTS + slot % SLOTS;
}

static int own_slot(const struct ops_seg *seg, int head, int row)
{
    return (seg->head_slot0 != NULL ? seg->head_slot0[head] : seg->slot0) + (row - seg->row0);
}

static float *score_row(const struct sim *s, int lane, int head)
{
    return s->score_row + ((size_t)lane * s->d.n_kv + head) * s->max_slots;
}

/* How much attention a slot draws: a number in [0, 1) that only its value decides. */
static float pull(uint64_t value)
{
    return (float)(value >> 40) / 16777216.0f;
}

void sim_kv_store(struct sim *s, int layer, const struct ops_pass *pass, const int32_t *slot)
{
    for (int i = 0; i < pass->n_seg; i++) {
        const struct ops_seg *seg = &pass->seg[i];
        for (int r = seg->row0; r < seg->row0 + seg->n_row; r++)
            for (int h = 0; h < s->d.n_kv; h++) {
                size_t at = sim_index(s, seg->lane, layer, h);
                int to = slot != NULL ? slot[(size_t)r * s->d.n_kv + h] : own_slot(seg, h, r);
                if (to < 0) { /* a victim is used up by the row it is given to */
                    to = s->kv.victim[at];
                    s->kv.victim[at] = -1;
                }
                assert(to < s->kv.len[at]);
                size_t k = place(s, at, to);
                s->value[k] = sim_mix(s->row[r], (uint64_t)layer << 32 | (uint64_t)h) | 1;
                s->pos[k] = ops_seg_pos(seg, r);
                s->score[k] = 0;
            }
    }
}

/* What one head of one segment sees and, for the rows that are scored, what its slots get. */
static void prefill_head(struct sim *s, size_t at, const struct ops_seg *seg, int head)
{
    int first = own_slot(seg, head, seg->row0), n = first + seg->n_row;
    int from = seg->score_from > seg->row0 ? seg->score_from : seg->row0, scored = seg->row0 + seg->n_row - from;
    float *score = score_row(s, seg->lane, head);
    uint64_t sum = 0;

    for (int i = 0; i < n; i++) {
        uint64_t value = s->value[place(s, at, i)];
        assert(value != 0); /* a slot that nobody wrote is in use */
        sum += sim_mix(value, 1);
        if (i >= first)
            s->att[seg->row0 + i - first] += sim_mix(sum, (uint64_t)head);
        if (scored > 0) {
            int above = i - own_slot(seg, head, from);
            int rows = above > 0 ? scored - above : scored;
            score[i] += pull(value) * (float)rows;
        }
    }
}

void sim_kv_attn_prefill(struct sim *s, int layer, const struct ops_pass *pass)
{
    for (int i = 0; i < pass->n_seg; i++)
        for (int h = 0; h < s->d.n_kv; h++)
            prefill_head(s, sim_index(s, pass->seg[i].lane, layer, h), &pass->seg[i], h);
}

static bool is_pinned(const struct kern_rule *rule, int32_t pos)
{
    for (int i = 0; i < rule->n_pin; i++)
        if (pos >= rule->pin[i].from && pos < rule->pin[i].to)
            return true;
    return false;
}

static int32_t decode_victim(const struct sim *s, size_t at, const struct kern_rule *rule, int32_t newest)
{
    int32_t best = -1;
    size_t best_k = 0;

    for (int i = 0; i < s->kv.len[at]; i++) {
        size_t k = place(s, at, i);
        int32_t pos = s->pos[k];
        if (pos < rule->sink || pos > newest - rule->recent || is_pinned(rule, pos))
            continue;
        if (best >= 0 && (s->score[k] > s->score[best_k] || (s->score[k] == s->score[best_k] && pos > s->pos[best_k])))
            continue;
        best = i;
        best_k = k;
    }
    return best;
}

/* What a decode step adds to a slot's score: its own pull, or in a burst the pulls of the ring's queries that came after it. */
static void decode_score(struct sim *s, size_t k, const struct kern_rule *rule, const struct sim_query *ring, uint64_t row)
{
    float sum = 0;

    if (rule->ring == 0) {
        if (rule->weight != 0 || rule->decay != 1)
            s->score[k] = rule->decay * s->score[k] + rule->weight * pull(sim_mix(s->value[k], row));
        return;
    }
    if (!rule->burst)
        return;
    for (int i = 0; i < rule->ring; i++)
        if (s->pos[k] <= ring[i].pos)
            sum += pull(sim_mix(s->value[k], ring[i].row));
    s->score[k] = rule->decay * s->score[k] + rule->weight * sum;
}

static struct sim_query *ring_of(const struct sim *s, int lane, int layer)
{
    return s->ring + ((size_t)lane * s->d.n_layer + layer) * OPS_RING;
}

void sim_kv_attn_decode(struct sim *s, int layer, const struct ops_pass *pass, const struct kern_rule *rule)
{
    for (int i = 0; rule != NULL && i < pass->n_seg; i++)
        if (rule[i].ring > 0) {
            assert(rule[i].ring <= OPS_RING && rule[i].ring_at < rule[i].ring);
            ring_of(s, pass->seg[i].lane, layer)[rule[i].ring_at] =
                (struct sim_query){ s->row[pass->seg[i].row0], pass->seg[i].pos0 };
        }
    for (int i = 0; i < pass->n_seg; i++)
        for (int h = 0; h < s->d.n_kv; h++) {
            const struct ops_seg *seg = &pass->seg[i];
            size_t at = sim_index(s, seg->lane, layer, h);
            uint64_t sum = 0;
            assert(s->kv.len[at] > 0);
            for (int j = 0; j < s->kv.len[at]; j++) {
                size_t k = place(s, at, j);
                assert(s->value[k] != 0);
                sum += sim_mix(s->value[k], 1);
                if (rule != NULL)
                    decode_score(s, k, &rule[i], ring_of(s, seg->lane, layer), s->row[seg->row0]);
            }
            s->att[seg->row0] += sim_mix(sum, (uint64_t)h);
            if (rule != NULL && s->kv.len[at] >= s->kv.cap[at])
                s->kv.victim[at] = decode_victim(s, at, &rule[i], seg->pos0);
        }
}

/* ---- selection ------------------------------------------------------------------------------------------------- */

/* The best first; equal: the lower position, then the lower head. */
static int pick_compare(const void *a, const void *b)
{
    const struct sim_pick *x = a, *y = b;

    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    if (x->pos != y->pos)
        return x->pos < y->pos ? -1 : 1;
    return (x->head > y->head) - (x->head < y->head);
}

static int slot_compare(const void *a, const void *b)
{
    const struct sim_pick *x = a, *y = b;

    return (x->pos > y->pos) - (x->pos < y->pos);
}

/* A head's slots: the protected ones are kept at once; the rest come first in pick, best first. Returns how many those are. */
static int pick_head(struct sim *s, int lane, size_t at, int head, const struct kern_rule *rule, struct sim_pick *pick)
{
    const float *score = score_row(s, lane, head);
    int len = s->kv.len[at], n = 0, end = len;
    int32_t newest = 0;

    for (int i = 0; i < len; i++)
        if (s->pos[place(s, at, i)] > newest)
            newest = s->pos[place(s, at, i)];
    for (int i = 0; i < len; i++) {
        int32_t pos = s->pos[place(s, at, i)];
        struct sim_pick p = { rule->use_score ? score[i] : (float)pos, pos, i, head, false };
        p.keep = pos < rule->sink || pos > newest - rule->recent || is_pinned(rule, pos);
        pick[p.keep ? --end : n++] = p;
    }
    qsort(pick, (size_t)n, sizeof *pick, pick_compare);
    return n;
}

/* Each head's own share, then the best of all heads for what is left of the layer's budget. */
static void share(struct sim *s, const size_t *at, const int *n_cand, const struct kern_rule *rule)
{
    bool shared = rule->use_score && rule->head_floor < 1;
    int left = 0, next[256];

    for (int h = 0; h < s->d.n_kv; h++) {
        int safe = s->kv.len[at[h]] - n_cand[h], room = rule->budget > safe ? rule->budget - safe : 0;
        int own = shared ? (int)((float)room * rule->head_floor) : room;
        struct sim_pick *pick = s->pick + (size_t)h * s->max_slots;
        own = own < n_cand[h] ? own : n_cand[h];
        for (int i = 0; i < own; i++)
            pick[i].keep = true;
        next[h] = own;
        left += shared ? room - own : 0;
    }
    while (left-- > 0) {
        int best = -1;
        for (int h = 0; h < s->d.n_kv; h++)
            if (next[h] < n_cand[h] && (best < 0 || pick_compare(&s->pick[(size_t)h * s->max_slots + next[h]],
                                                                 &s->pick[(size_t)best * s->max_slots + next[best]]) < 0))
                best = h;
        if (best < 0)
            return;
        s->pick[(size_t)best * s->max_slots + next[best]++].keep = true;
    }
}

/* The kept to the front, positions ascending. Returns how many. */
static int gather(struct sim *s, size_t at, const struct kern_rule *rule, struct sim_pick *pick, int len, float *mass)
{
    double kept = 0, all = 0;
    int n = 0;

    for (int i = 0; i < len; i++) {
        all += (double)pick[i].score;
        kept += pick[i].keep ? (double)pick[i].score : 0;
        if (pick[i].keep)
            pick[n++] = pick[i];
    }
    qsort(pick, (size_t)n, sizeof *pick, slot_compare);
    uint64_t *value = malloc(((size_t)n + 1) * sizeof *value);
    assert(value != NULL);
    for (int i = 0; i < n; i++)
        value[i] = s->value[place(s, at, pick[i].slot)];
    for (int i = 0; i < n; i++) {
        size_t k = place(s, at, i);
        s->value[k] = value[i];
        s->pos[k] = pick[i].pos;
        s->score[k] = rule->use_score ? pick[i].score : 0;
    }
    free(value);
    if (mass != NULL)
        *mass = rule->use_score && all > 0 ? (float)(kept / all) : len > 0 ? (float)n / (float)len : 1;
    return n;
}

void sim_kv_select(struct sim *s, int lane, int layer, const struct kern_rule *rule, float *kept_mass)
{
    size_t at[256];
    int n_cand[256];

    assert(s->d.n_kv <= 256);
    for (int h = 0; h < s->d.n_kv; h++) {
        at[h] = sim_index(s, lane, layer, h);
        n_cand[h] = pick_head(s, lane, at[h], h, rule, s->pick + (size_t)h * s->max_slots);
    }
    share(s, at, n_cand, rule);
    for (int h = 0; h < s->d.n_kv; h++) {
        int n = gather(s, at[h], rule, s->pick + (size_t)h * s->max_slots, s->kv.len[at[h]],
                       kept_mass != NULL ? &kept_mass[h] : NULL);
        s->kv.len[at[h]] = n;
    }
}
