/* cpu_attn.h - what attention and selection share inside the CPU backend. */
#ifndef SKVD_KERNELS_CPU_CPU_ATTN_H
#define SKVD_KERNELS_CPU_CPU_ATTN_H

#include "kernels/cpu/cpu.h"

struct cpu_select_work; /* cpu_select.c */

#define CPU_LOG2_E 1.44269504088896340736f

/* One worker's scratch; everything 64-byte aligned. */
struct attn_scratch {
    unsigned char *panel; /* [KERN_ATTN_PAGES] */
    unsigned char *q;     /* [max(g, KERN_ATTN_TILE)] packed query rows: decode */
    unsigned char *p;     /* [KERN_ATTN_TILE], or what attend works with */
    float *s;             /* [KERN_ATTN_TILE][KERN_ATTN_BLOCK] */
    float *o;             /* [block rows][hd] */
    float *m, *l;         /* [block rows] */
};

struct cpu_panels; /* cpu_panels.c */

struct cpu_attn_work {
    int hd, max_slots;
    int block_q;                  /* queries of a task of this pass */
    size_t bytes;                 /* of all that is below */
    struct attn_scratch *scratch; /* [workers] */
    void *scratch_mem;
    unsigned char *q; /* prefill: [n_kv][max_rows * g] packed query rows */
    float *m, *inv_l; /* prefill: [n_kv][max_rows * g], m in units of log2 */
    float *score;     /* [max_lanes][n_kv][max_slots] */
    float *rec;       /* decode: [n_rec] split records */
    size_t rec_floats, n_rec;
    int *first;        /* [units + 1] first task of each unit */
    _Atomic int *left; /* [units] splits to go */
    struct cpu_select_work *select;
    unsigned char *ring; /* cpu_ring.c: [max_lanes][n_layer][n_kv] rings */
    size_t ring_bytes;   /* of one */
    struct cpu_panels *panels;
};

/* The unit of a task: the last u < n_unit with aw->first[u] <= item. */
int cpu_attn_unit(const struct cpu_attn_work *aw, int n_unit, int item);

/* The score row of (lane, head): [max_slots]. */
static inline float *cpu_score_row(const struct cpu *c, int lane, int head)
{
    return c->aw->score + ((size_t)lane * c->d.n_kv + head) * c->aw->max_slots;
}

/* The two passes of attn_prefill, apart for the bench: the second reads what the first left of the pass. */
void cpu_attn_rows(struct cpu *c, int layer, const struct ops_pass *pass);
void cpu_attn_score(struct cpu *c, int layer, const struct ops_pass *pass);

/* 64-byte aligned, counted in aw->bytes, untouched; freed with free(). NULL when there is none. */
void *cpu_attn_alloc(struct cpu_attn_work *aw, size_t n, size_t size);

/* --- cpu_panels.c: panels for all of a prefill pass --- */
int cpu_panels_init(struct cpu *c); /* 0, or -1: no memory */
void cpu_panels_fini(struct cpu *c);
size_t cpu_panels_block_bytes(const struct cpu *c); /* a block's, for who makes its own */
/* Make those of the pass's segments; false: there are none, each task makes its own. Uses aw->first. */
bool cpu_panels_make(struct cpu *c, int layer, const struct ops_pass *pass);
/* The panels of the block at slot0 of (segment of the pass, head), or NULL. */
const unsigned char *cpu_panels_at(const struct cpu *c, int seg, int head, int slot0);
/* Pages have changed otherwise than by a prefill's store. */
void cpu_panels_forget(struct cpu *c);

/* Is the position one that a rule never evicts for its own sake (pins; ascending)? */
static inline bool cpu_pinned(const struct kern_rule *rule, int32_t pos)
{
    for (int i = 0; i < rule->n_pin && rule->pin[i].from <= pos; i++)
        if (pos < rule->pin[i].to)
            return true;
    return false;
}

/* Set *b to the block of slots [slot0, slot0 + n) of a head: page pointers, or panels: those that are there (`made`), else,
 * made NULL, such as it makes in `panel`. */
void cpu_attn_block(const struct cpu *c, const struct kern_attn_form *form, const uint32_t *table, int slot0, int n,
                    const unsigned char *made, unsigned char *panel, struct kern_attn_block *b);

/* --- cpu_ring.c: the last queries of decoding lanes --- */
/* A lane's part is first touched when it decodes under a rule with a ring. 0, or -1: no memory. */
int cpu_ring_init(struct cpu *c);
/* Put the group of KV head `head` of a decode row into place rule->ring_at, with its maxima (in units of log2) and 1 / sums, [g] each. */
void cpu_ring_put(struct cpu *c, const struct kern_rule *rule, int layer, const struct ops_seg *seg, int head, const float *m,
                  const float *inv_l);
/* A burst: the scores of the head's slots from the ring that the row's queries filled up. */
void cpu_ring_score(struct cpu *c, const struct kern_rule *rule, int layer, const struct ops_seg *seg, int head,
                    struct attn_scratch *w);

/* 0, or -1: no memory. */
int cpu_select_init(struct cpu *c);
void cpu_select_fini(struct cpu *c);

#endif
