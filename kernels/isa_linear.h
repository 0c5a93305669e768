/* isa_linear.h - micro-kernels of the linear half: packed weights, quantised activations, rows of floats.
 *
 * PACKED WEIGHTS. A matrix [rows][cols] (outputs x inputs) is repacked once at load into panels of 16 output rows,
 * so that one vector holds the same inputs of 16 outputs and nothing is summed across a vector. Inputs are padded
 * to a multiple of 32 with weights that count as zero, outputs to a multiple of 16.
 *
 * Quantised forms: w = d * q + m with q unsigned, one d (and m) per output row and `group` inputs. A group of 32 inputs:
 *
 *   P4   q < 16: 4 vectors of 64 bytes; byte 4 * r + j of vector v holds input 4 * v + j of row r in its low nibble and
 *        input 16 + 4 * v + j in its high nibble
 *   P5   q < 32: the low four bits as P4, then one vector: bit v of byte 4 * r + j is the fifth bit of input 4 * v + j
 *   P6   q < 64: 6 vectors; the low six bits of byte 4 * r + j of vector 3 * k + i are input 16 * k + 4 * i + j (i < 3), its
 *        upper two are bits 2 * i and the next of input 16 * k + 12 + j
 *   P8   q < 256: 8 vectors of 64 bytes; byte 4 * r + j of vector v is input 4 * v + j of row r
 *
 * and before q its scales, per = 32 / group: d [per][16] f16 and, when has_m, m [16] f16. Of the K types (`super`) integers
 * instead, as in the file: sc [per][16] s8 and, when has_m, mn [16] u8, with d = D * sc and m = M * mn for a D and an M (f16)
 * per row and 256 inputs, both exact in f32. Without m, m = -zero * d (Q8_0: 128, Q4_0: 8, Q5_0: 16, Q6_K: 32).
 *
 * A panel is its head, then its groups one after another, a single stream to read. The head of a K type: D [16] and, when
 * has_m, M [16], for 256 inputs after the other. Of another P4: `unit`, f32, the power of two that makes whole numbers below
 * 2^15 of all its d, or 0 where none does. With it an integer product can apply d: i * (d * unit) rounds to f32 as i * d
 * does, scaled by unit. Groups are 32-byte aligned, panels 64.
 *
 * Float forms: PF32 f32 [cols][16]; PF16 f16 [cols][16]; PBF16 bf16 [cols/2][16][2].
 *
 * ACTIVATIONS are quantised once per input row: int8 per 32 inputs, d = absmax / 127, s = d * sum(q).
 *
 * THE NUMBER CONTRACT of `mul` for quantised forms, the same in every ISA and for every number of rows, bit for bit:
 * for each scale k in ascending order, with an exact integer dot i = sum q_w q_a,
 *     acc = fma((float)i * d_w, d_a, acc);  acc = fma(s_a, m_w, acc);
 * and for K types, where i * sc is below 2^24, hence exact too, with s = 0 at the first scale of 256 inputs
 *     s = fma((float)(i * sc), d_a, s);  with m: acc = fma(s_a, m_w, acc), without: s = fma(s_a, -zero * sc, s)
 * and acc = fma(s, D, acc) after the last of them (of the 256 inputs, or of the product).
 * For float forms the order is fixed per ISA: any number of rows gives the same bits, ISAs differ in rounding.
 */
#ifndef SKVD_KERNELS_ISA_LINEAR_H
#define SKVD_KERNELS_ISA_LINEAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KERN_PANEL 16 /* output rows of a panel */
#define KERN_GROUP 32 /* inputs that share an activation scale */
#define KERN_SUPER 8  /* groups that share D and M of a K type */

enum kern_form { KERN_P4 = 0, KERN_P5, KERN_P6, KERN_P8, KERN_PF32, KERN_PF16, KERN_PBF16, KERN_FORMS };

struct kern_packed {
    enum kern_form form;
    int64_t rows, cols; /* of the matrix, unpadded */
    int n_panel;        /* ceil(rows / 16) */
    int n_group;        /* ceil(cols / 32) */
    int group;          /* inputs per scale: 32, or 16 (Q6_K) */
    bool has_m;
    bool super;         /* a K type */
    int zero;           /* without m: m = -zero * d */
    size_t head_bytes;  /* of a panel before its groups */
    size_t scale_bytes; /* of a group's scales, before its q */
    size_t group_bytes; /* of a group with its scales */
    size_t panel_bytes; /* of a panel, a multiple of 64 */
    size_t stride;      /* from panel to panel: panel_bytes, or more where two matrices are interleaved */
    unsigned char *data; /* panel 0, 64-byte aligned */
};

/* Which copies of the activations a form needs. */
enum kern_act_need {
    KERN_NEED_Q8 = 1,   /* q8 and scale */
    KERN_NEED_Q16 = 2,  /* q16 beside q8 */
    KERN_NEED_F32 = 4,
    KERN_NEED_BF16 = 8,
};

/* Activation rows. A pointer is NULL when no weight needs that copy. Rows are 64-byte aligned. */
struct kern_input {
    int n_group;      /* 32-input groups of a row, padded with zeros */
    int8_t *q8;       /* [rows][n_group * 32] */
    int16_t *q16;     /* the same values; of each 4 inputs in the order 0 2 1 3 */
    float *scale;     /* [rows][n_group][4]: d, d * sum of the 32 q, d * sum of the first 16, of the last 16 */
    float *f32;       /* [rows][n_group * 32] */
    uint16_t *bf16;   /* [rows][n_group * 32] */
};

struct kern_linear_fns {
    unsigned need[KERN_FORMS]; /* enum kern_act_need, what `mul` reads for a form */

    /* One panel times n_row activation rows: acc[r][j] = sum over the weight's groups [g0, g0 + a->n_group) of
     * panel row j, against activation row row0 + r from its first group. acc [n_row][16], 64-byte aligned, is
     * written, not added to. scratch: at least kern_mul_scratch(w) bytes, 64-byte aligned, one per thread. */
    void (*mul)(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0, int n_row,
                float *acc, void *scratch);

    /* Row r of `a` = the n inputs of x in every copy that `a` has; the rest of the last group is zero. */
    void (*act_set)(struct kern_input *a, int r, const float *x, int n);
    /* One group of row r of `a` from 32 inputs (the fused MLP writes group by group). */
    void (*act_set_group)(struct kern_input *a, int r, int group, const float *x);

    /* out = x / sqrt(mean(x^2) + eps) * w, n values. Sum in 16 partial sums, folded by halves. out may be x. */
    void (*rmsnorm)(const float *x, const float *w, float eps, int n, float *out);
    /* h[i] = act(gate[i]) * up[i], n a multiple of 16. act: enum kern_act of ops.h. */
    void (*gated)(int act, const float *gate, const float *up, int n, float *h);

    /* Rotate the first `rot` values of one head. table: rot factors for the value itself, then rot for its partner:
     * INTERLEAVED cos twice per pair, then (-sin, sin); HALF cos [rot/2] and at +rot sin [rot/2]. */
    void (*rope)(int layout, const float *table, int rot, float *x);

    /* out[r * ld + j] = acc[r][j] (+ bias[j]), or += acc[r][j], for j in [0, 16). */
    void (*store)(const float *acc, const float *bias, int n_row, float *out, size_t ld);
    void (*add)(const float *acc, int n_row, float *out, size_t ld);

    /* Exact f32: out[i * ldo + j] = w[j] . x[i] for n_w weight rows [n_w][ldw] and n_x inputs [n_x][ldx], f32.
     * n a multiple of 16; rows are 64-byte aligned. 16 partial sums, folded by halves. */
    void (*dot_f32)(const float *w, int ldw, int n_w, const float *x, int ldx, int n_x, int n, float *out, int ldo);
};

/* Fill the entries that the ISA has; call scalar first, then upwards. Only on a CPU that has the ISA. */
void kern_linear_scalar(struct kern_linear_fns *f);
void kern_linear_avx2(struct kern_linear_fns *f);
void kern_linear_avx512(struct kern_linear_fns *f);

static inline bool kern_form_quant(enum kern_form f)
{
    return f <= KERN_P8;
}

static inline const unsigned char *kern_panel_head(const struct kern_packed *w, int panel)
{
    return w->data + (size_t)panel * w->stride;
}
/* Group g of a panel. */
static inline const unsigned char *kern_panel_at(const struct kern_packed *w, int panel, int g)
{
    return kern_panel_head(w, panel) + w->head_bytes + (size_t)g * w->group_bytes;
}
static inline const unsigned char *kern_group_q(const struct kern_packed *w, const unsigned char *group)
{
    return group + w->scale_bytes;
}
/* Scale k (0 .. per - 1) of a group, and its m: [16] f16 each; not for K types. */
static inline const uint16_t *kern_group_d(const unsigned char *group, int k)
{
    return (const uint16_t *)group + (size_t)k * KERN_PANEL;
}
static inline const uint16_t *kern_group_m(const struct kern_packed *w, const unsigned char *group)
{
    return kern_group_d(group, KERN_GROUP / w->group);
}
/* The same of K types: sc [16] and mn [16]. */
static inline const int8_t *kern_group_sc(const unsigned char *group, int k)
{
    return (const int8_t *)group + (size_t)k * KERN_PANEL;
}
static inline const uint8_t *kern_group_mn(const struct kern_packed *w, const unsigned char *group)
{
    return (const uint8_t *)kern_group_sc(group, KERN_GROUP / w->group);
}
/* D [16] of group g's 256 inputs in a K type's head, M [16] behind it. */
static inline const uint16_t *kern_head_d(const struct kern_packed *w, const unsigned char *head, int g)
{
    return (const uint16_t *)head + (size_t)(g / KERN_SUPER) * KERN_PANEL * (w->has_m ? 2 : 1);
}

/* Room for one panel unpacked: its q as bytes, its scales as two numbers of 32 bits, a K type's head in f32. */
static inline size_t kern_mul_scratch(const struct kern_packed *w)
{
    size_t n = (size_t)w->n_group, n_scale = n * (size_t)(KERN_GROUP / w->group), n_super = n / KERN_SUPER + 1;
    return n * KERN_GROUP * KERN_PANEL + 2 * (n_scale + n_super) * KERN_PANEL * sizeof(float);
}

#endif
