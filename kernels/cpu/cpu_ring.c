/* cpu_ring.c - the last queries of decoding lanes, and the scores that they give in a burst.
 *
 * A policy that decides by a window of queries needs no score in most steps. Each step leaves its queries, after RoPE, in a ring of its
 * (lane, layer, KV head) with the maximum and the sum of their softmax; when the rule says so, all of them pass over the kept
 * slots by prefill's pass 2: a block of keys stays, the queries go by in the order of their steps. With maximum and sum
 * remembered, the probabilities are those that each query had, also where what it saw has been evicted since; a slot that was written
 * after a query's step is above its position, and gets nothing from it.
 */
#include <assert.h>
#include <string.h>

#include "kernels/cpu/cpu_attn.h"

#define SLOTS  KERN_PAGE_SLOTS
#define UNSEEN (-1e30f) /* a logit whose probability is nothing; finite, as every ISA wants it */

/* One head's ring, as views of its memory. */
struct ring {
    float *q;     /* [OPS_RING][g][head_dim] */
    float *m;     /* [OPS_RING][g], units of log2 */
    float *inv_l; /* [OPS_RING][g] */
    int32_t *pos; /* [OPS_RING] */
};

static size_t ring_bytes(const struct cpu *c)
{
    size_t place = (size_t)c->g * (c->d.head_dim + 2) * sizeof(float) + sizeof(int32_t);

    return (OPS_RING * place + 63) & ~(size_t)63;
}

int cpu_ring_init(struct cpu *c)
{
    size_t n = (size_t)c->cfg.max_lanes * c->d.n_layer * c->d.n_kv;

    c->aw->ring_bytes = ring_bytes(c);
    c->aw->ring = cpu_attn_alloc(c->aw, n, c->aw->ring_bytes);
    return c->aw->ring != NULL ? 0 : -1;
}

static struct ring ring_at(const struct cpu *c, int layer, int lane, int head)
{
    float *f = (float *)(c->aw->ring + cpu_kv_index(c, lane, layer, head) * c->aw->ring_bytes);
    float *m = f + (size_t)OPS_RING * c->g * c->d.head_dim, *l = m + OPS_RING * c->g;

    return (struct ring){ f, m, l, (int32_t *)(l + OPS_RING * c->g) };
}

void cpu_ring_put(struct cpu *c, const struct kern_rule *rule, int layer, const struct ops_seg *seg, int head, const float *m,
                  const float *inv_l)
{
    struct ring r = ring_at(c, layer, seg->lane, head);
    size_t group = (size_t)c->g * c->d.head_dim;
    int at = rule->ring_at;

    assert(rule->ring <= OPS_RING && at < rule->ring);
    memcpy(r.q + (size_t)at * group, c->qkv + (size_t)seg->row0 * c->qkv_width + head * group, group * sizeof(float));
    memcpy(r.m + at * c->g, m, (size_t)c->g * sizeof *m);
    memcpy(r.inv_l + at * c->g, inv_l, (size_t)c->g * sizeof *inv_l);
    r.pos[at] = seg->pos0;
}

/* The ring's packed row i (row = query * g + j, the oldest query first): its place and head of the group. */
static int row_place(const struct kern_rule *rule, int g, int i)
{
    return (rule->ring_at + 1 + i / g) % rule->ring;
}

/* Rows [row0, row0 + n) of the ring into w->q, with their m, 1 / l and positions. */
static void pack_rows(const struct cpu *c, const struct kern_attn_form *form, const struct kern_rule *rule, const struct ring *r,
                      int row0, int n, struct attn_scratch *w, float *m, float *inv_l, int32_t *pos)
{
    for (int i = 0; i < n; i++) {
        int place = row_place(rule, c->g, row0 + i), j = (row0 + i) % c->g;
        form->pack_q(r->q + ((size_t)place * c->g + j) * c->d.head_dim, c->d.head_dim, c->aw->hd, c->d.attn_scale * CPU_LOG2_E,
                     w->q + i * KERN_ATTN_Q_BYTES(c->aw->hd));
        m[i] = r->m[place * c->g + j];
        inv_l[i] = r->inv_l[place * c->g + j];
        pos[i] = r->pos[place];
    }
}

/* Slots of the block that some query of the ring does not see, for being written later. They are few: at most one a step. */
static int late_slots(const struct cpu *c, const uint32_t *table, int n_slot, int32_t oldest, int32_t *late, int32_t *late_pos)
{
    int n = 0;

    for (int i = 0; i < n_slot; i++) {
        int32_t pos = ((const int32_t *)(cpu_page(c, table[i / SLOTS]) + c->kv.page.pos))[i % SLOTS];
        late[n] = i;
        late_pos[n] = pos;
        n += pos > oldest;
    }
    return n;
}

/* acc [KERN_ATTN_BLOCK] += the probabilities that the ring's rows give the block of n_slot slots at table. */
static void block_score(const struct cpu *c, const struct kern_rule *rule, const struct ring *ring, const uint32_t *table, int n_slot,
                        struct attn_scratch *w, float *acc)
{
    const struct kern_attn_form *form = &c->isa->att.prefill[c->kv.page.dtype];
    int32_t late[KERN_ATTN_BLOCK], late_pos[KERN_ATTN_BLOCK], pos[KERN_ATTN_TILE], seen[KERN_ATTN_TILE];
    float m[KERN_ATTN_TILE], inv_l[KERN_ATTN_TILE];
    struct kern_attn_block b;
    int n_row = rule->ring * c->g, n;

    int n_late = late_slots(c, table, n_slot, ring->pos[row_place(rule, c->g, 0)], late, late_pos);
    cpu_attn_block(c, form, table, 0, n_slot, NULL, w->panel, &b);
    for (int r = 0; r < n_row; r += n) {
        n = n_row - r < KERN_ATTN_TILE ? n_row - r : KERN_ATTN_TILE;
        pack_rows(c, form, rule, ring, r, n, w, m, inv_l, pos);
        form->qk(&b, w->q, n, w->s);
        for (int i = 0; i < n; i++) {
            seen[i] = n_slot;
            for (int k = 0; k < n_late; k++)
                if (late_pos[k] > pos[i])
                    w->s[i * KERN_ATTN_BLOCK + late[k]] = UNSEEN;
        }
        c->isa->att.colsum(w->s, n, b.n_page * SLOTS, seen, m, inv_l, acc);
    }
}

void cpu_ring_score(struct cpu *c, const struct kern_rule *rule, int layer, const struct ops_seg *seg, int head,
                    struct attn_scratch *w)
{
    struct ring ring = ring_at(c, layer, seg->lane, head);
    size_t at = cpu_kv_index(c, seg->lane, layer, head);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages;
    int len = c->kv.len[at];

    for (int slot0 = 0; slot0 < len; slot0 += KERN_ATTN_BLOCK) {
        int n = len - slot0 < KERN_ATTN_BLOCK ? len - slot0 : KERN_ATTN_BLOCK;
        float acc[KERN_ATTN_BLOCK] = { 0 };
        block_score(c, rule, &ring, table + slot0 / SLOTS, n, w, acc);
        for (int i = 0; i < n; i++) {
            float *score = (float *)(cpu_page(c, table[(slot0 + i) / SLOTS]) + c->kv.page.score) + (slot0 + i) % SLOTS;
            *score = rule->decay * *score + rule->weight * (acc[i] * (1.0f / c->g));
        }
    }
}
