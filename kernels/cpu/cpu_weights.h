/* cpu_weights.h - a model's weights as the CPU backend holds them; between cpu_weights.c and cpu_linear.c. */
#ifndef SKVD_KERNELS_CPU_CPU_WEIGHTS_H
#define SKVD_KERNELS_CPU_CPU_WEIGHTS_H

#include "kernels/cpu/cpu.h"

/* A weight matrix: repacked, or (compute_f32) left in the mapped file: then p only gives the shape. */
struct cpu_mat {
    struct kern_packed p;
    struct kern_tensor src;
};

struct cpu_layer {
    struct cpu_mat wq, wk, wv, wo, w_gate, w_up, w_down;
    /* f32 vectors; NULL when the model has none. Biases are padded with zeros to whole panels. */
    float *attn_norm, *ffn_norm, *bq, *bk, *bv, *q_norm, *k_norm, *post_attn_norm, *post_ffn_norm;
};

struct cpu_weights {
    struct cpu_layer *layer; /* [n_layer] */
    struct cpu_mat output;
    struct kern_tensor embed; /* in the mapped file */
    float *out_norm;
    unsigned char *arena; /* all packed matrices */
    size_t arena_bytes;
    float *vectors; /* all f32 vectors */
    size_t vector_bytes;
};

/* The copies of its input that a product with `m` reads: enum kern_act_need. */
unsigned cpu_mat_need(const struct cpu *c, const struct cpu_mat *m);
/* Scratch bytes per thread of cpu_mat_mul. */
size_t cpu_mat_scratch(const struct cpu *c, const struct cpu_mat *m);
/* kern_linear_fns.mul, for packed and for mapped weights. */
void cpu_mat_mul(const struct cpu *c, const struct cpu_mat *m, int panel, int g0, const struct kern_input *a,
                 int row0, int n_row, float *acc, void *scratch);

#endif
