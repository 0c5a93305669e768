/* cpu_attn.h - what attention and selection share inside the CPU backend. */
#ifndef SKVD_KERNELS_CPU_CPU_ATTN_H
#define SKVD_KERNELS_CPU_CPU_ATTN_H

#include "kernels/cpu/cpu.h"

struct cpu_select_work; /* cpu_select.c */

struct attn_scratch; /* cpu_attn.c: one worker's */

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
};

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

/* Is the position one that a rule never evicts for its own sake (pins; ascending)? */
static inline bool cpu_pinned(const struct kern_rule *rule, int32_t pos)
{
    for (int i = 0; i < rule->n_pin && rule->pin[i].from <= pos; i++)
        if (pos < rule->pin[i].to)
            return true;
    return false;
}

/* 0, or -1: no memory. */
int cpu_select_init(struct cpu *c);
void cpu_select_fini(struct cpu *c);

#endif
