/* cpu.h - the CPU backend's inside: one struct, shared by the files of kernels/cpu. */
#ifndef SKVD_KERNELS_CPU_CPU_H
#define SKVD_KERNELS_CPU_CPU_H

#include "kernels/isa.h"
#include "kernels/ops.h"
#include "kernels/workers.h"

struct cpu {
    struct ops_dims d;
    struct ops_config cfg;
    const struct kern_isa *isa;
    struct workers *workers;
    int g; /* query heads per KV head */

    /* weights: owned by cpu_weights.c, cpu_weights.h. The mapped file behind ops_model_src.embed is read as long
     * as the backend lives; all other tensors only while it opens, unless compute_f32. */
    struct cpu_weights *w;

    /* KV: owned by cpu_kv.c */
    struct ops_kv kv;
    unsigned char *pool;     /* [n_pages][page.bytes], 64-byte aligned */

    /* one pass's scratch; rows as in the pass */
    int qkv_width;           /* (n_head + 2 n_kv) * head_dim */
    float *qkv;              /* [max_rows][q heads | k heads | v heads] after norms and RoPE */
    float *att;              /* [max_rows][n_head * head_dim], what attention gives */

    /* attention and selection scratch: owned by cpu_attn.c / cpu_select.c */
    struct cpu_attn_work *aw;
    /* linear scratch: owned by cpu_linear.c */
    struct cpu_linear_work *lw;
};

static inline unsigned char *cpu_page(const struct cpu *c, uint32_t page)
{
    return c->pool + (size_t)page * c->kv.page.bytes;
}

static inline size_t cpu_kv_index(const struct cpu *c, int lane, int layer, int head)
{
    return ((size_t)lane * c->d.n_layer + layer) * c->d.n_kv + head;
}

/* Rows of a work item, `most` at most: several items a thread, so that a step's few rows come out even. */
static inline int cpu_rows_item(const struct cpu *c, int n_row, int most)
{
    int items = 4 * workers_count(c->workers), rows = (n_row + items - 1) / items;
    return rows < most ? rows : most;
}

/* --- cpu_map.c: big allocations, 64-byte aligned, zeroed, in huge pages where the system has them --- */
void *cpu_map(size_t bytes, struct skv_error *err); /* NULL with *err */
void cpu_unmap(void *p, size_t bytes);              /* p may be NULL */

/* --- cpu_kv.c --- */
struct ops_kv *cpu_kv_init(void *be, uint32_t n_pages, struct skv_error *err);
void cpu_kv_fini(struct cpu *c);
void cpu_page_clear(void *be, const uint32_t *pages, int n);
void cpu_kv_read(void *be, int lane, int layer, int head, int32_t *pos, float *score);
/* Write the pass's K and V (c->qkv, after RoPE) to their slots; see ops.attn_in for `slot`. */
void cpu_kv_store(struct cpu *c, int layer, const struct ops_pass *pass, const int32_t *slot);

/* --- cpu_attn.c --- */
int cpu_attn_init(struct cpu *c, struct skv_error *err);
void cpu_attn_fini(struct cpu *c);
size_t cpu_attn_bytes(const struct cpu *c);
void cpu_attn_prefill(void *be, int layer, const struct ops_pass *pass);
void cpu_attn_decode(void *be, int layer, const struct ops_pass *pass, const struct kern_rule *rule);
void cpu_score_begin(void *be, int lane, int n_slot);
void cpu_score_read(void *be, int lane, int n_slot, float *out);

/* --- cpu_select.c --- */
void cpu_select(void *be, int lane, int layer, const struct kern_rule *rule, int n_query, float *kept_mass);

/* --- cpu_linear.c: the value norm of CriticalKV needs the output projection --- */
/* out[j] = mean over the group's query heads h of || Wo_h v_j ||_1 for n slots; v [n][head_dim] f32. Single-threaded,
 * with the scratch of `worker`: to be called inside a workers_run item with its worker (0 outside of one). */
void cpu_value_norm(struct cpu *c, int layer, int kv_head, const float *v, int n, float *out, int worker);

/* --- cpu_linear.c --- */
int cpu_linear_init(struct cpu *c, struct skv_error *err);
void cpu_linear_fini(struct cpu *c);
size_t cpu_linear_bytes(const struct cpu *c);
void cpu_embed(void *be, const struct ops_pass *pass, float *x);
void cpu_attn_in(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot);
void cpu_attn_out_mlp(void *be, int layer, const struct ops_pass *pass, float *x);
void cpu_logits(void *be, const float *x, const int32_t *row, int n, float *logits);

/* --- cpu_weights.c --- */
int cpu_weights_load(struct cpu *c, const struct ops_model_src *src, struct skv_error *err);
void cpu_weights_free(struct cpu *c);
size_t cpu_weights_bytes(const struct cpu *c);

#endif
