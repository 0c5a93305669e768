/* isa_rows.h - row functions, written once over vectors of 16 floats.
 *
 * Included by each ISA's linear.c after it has defined `v16` and its few operations; every ISA then computes the
 * same operations in the same order, so the results are equal bit for bit:
 *   v16_load v16_store v16_set1 v16_add v16_sub v16_mul v16_div v16_fma (a * b + c, one rounding) v16_max v16_min
 *   v16_abs v16_pow2 (2^n for integral n in [-126, 127]) v16_swap (neighbours exchanged)
 *   v16_hsum (folded by halves: 8 + 8, 4 + 4, ...) v16_hmax v16_store_i8 (integral values) v16_store_i16 (of each
 *   4 in the order 0 2 1 3)
 */
#ifndef SKVD_KERNELS_ISA_ROWS_H
#define SKVD_KERNELS_ISA_ROWS_H

#include "kernels/blocks.h"
#include "kernels/isa_linear.h"
#include "kernels/ops.h"

#include <math.h>
#include <string.h>

/* Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even, for |x| < 2^22. */
static inline v16 rows_round(v16 x)
{
    v16 magic = v16_set1(12582912.0f);
    return v16_sub(v16_add(x, magic), magic);
}

/* e^x to about 1 ulp: x = n ln2 + r with |r| <= ln2 / 2, ln2 in two parts (Cody and Waite), and the Taylor
 * polynomial of degree 7 of e^r, whose remainder is below 2^-27. Clamped to where the result is normal. */
static inline v16 rows_exp(v16 x)
{
    x = v16_min(v16_max(x, v16_set1(-87.0f)), v16_set1(88.0f));
    v16 n = rows_round(v16_mul(x, v16_set1(1.44269504f)));
    v16 r = v16_fma(n, v16_set1(-0.693359375f), x);
    r = v16_fma(n, v16_set1(2.12194440e-4f), r);
    v16 p = v16_set1(1.0f / 5040);
    p = v16_fma(p, r, v16_set1(1.0f / 720));
    p = v16_fma(p, r, v16_set1(1.0f / 120));
    p = v16_fma(p, r, v16_set1(1.0f / 24));
    p = v16_fma(p, r, v16_set1(1.0f / 6));
    p = v16_fma(p, r, v16_set1(0.5f));
    p = v16_fma(p, r, v16_set1(1.0f));
    p = v16_fma(p, r, v16_set1(1.0f));
    return v16_mul(p, v16_pow2(n));
}

static void rows_rmsnorm(const float *x, const float *w, float eps, int n, float *out)
{
    v16 sum = v16_set1(0);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 v = v16_load(x + i);
        sum = v16_fma(v, v, sum);
    }
    float t = v16_hsum(sum);
    for (int j = i; j < n; j++)
        t += x[j] * x[j];
    float scale = 1.0f / sqrtf(t / (float)n + eps);
    v16 vs = v16_set1(scale);
    for (i = 0; i + 16 <= n; i += 16)
        v16_store(out + i, v16_mul(v16_mul(v16_load(x + i), vs), v16_load(w + i)));
    for (; i < n; i++)
        out[i] = x[i] * scale * w[i];
}

static void rows_gated(int act, const float *gate, const float *up, int n, float *h)
{
    v16 one = v16_set1(1.0f);
    for (int i = 0; i < n; i += 16) {
        v16 g = v16_load(gate + i), y;
        if (act == KERN_ACT_SILU) { /* g / (1 + e^-g) */
            y = v16_div(g, v16_add(one, rows_exp(v16_sub(v16_set1(0), g))));
        } else { /* g/2 (1 + tanh u) = g (1 - 1 / (e^2u + 1)), u = sqrt(2/pi) (g + 0.044715 g^3) */
            v16 u = v16_mul(v16_mul(v16_set1(1.59576912f), g),
                            v16_fma(v16_mul(v16_set1(0.044715f), g), g, one));
            y = v16_mul(g, v16_sub(one, v16_div(one, v16_add(rows_exp(u), one))));
        }
        v16_store(h + i, v16_mul(y, v16_load(up + i)));
    }
}

/* Quantise 32 floats: q = round(x * 127 / absmax). */
static inline void rows_quant_group(struct kern_input *a, int r, int group, const float *x)
{
    size_t g = (size_t)r * a->n_group + group, at = g * KERN_GROUP;
    v16 x0 = v16_load(x), x1 = v16_load(x + 16);
    float top = v16_hmax(v16_max(v16_abs(x0), v16_abs(x1)));
    float inv = top > 1e-30f ? 127.0f / top : 0.0f, d = top > 1e-30f ? top / 127.0f : 0.0f;
    v16 q0 = rows_round(v16_mul(x0, v16_set1(inv))), q1 = rows_round(v16_mul(x1, v16_set1(inv)));
    v16_store_i8(a->q8 + at, q0);
    v16_store_i8(a->q8 + at + 16, q1);
    if (a->q16) {
        v16_store_i16(a->q16 + at, q0);
        v16_store_i16(a->q16 + at + 16, q1);
    }
    float s0 = v16_hsum(q0), s1 = v16_hsum(q1);
    float *scale = a->scale + 4 * g;
    scale[0] = d;
    scale[1] = d * (s0 + s1);
    scale[2] = d * s0;
    scale[3] = d * s1;
}

static void rows_act_set_group(struct kern_input *a, int r, int group, const float *x)
{
    size_t at = ((size_t)r * a->n_group + group) * KERN_GROUP;
    if (a->q8)
        rows_quant_group(a, r, group, x);
    if (a->f32)
        memcpy(a->f32 + at, x, KERN_GROUP * sizeof *x);
    if (a->bf16)
        for (int j = 0; j < KERN_GROUP; j++)
            a->bf16[at + j] = kern_f32_to_bf16(x[j]);
}

static void rows_act_set(struct kern_input *a, int r, const float *x, int n)
{
    int g = 0;
    for (; (g + 1) * KERN_GROUP <= n; g++)
        rows_act_set_group(a, r, g, x + g * KERN_GROUP);
    for (; g < a->n_group; g++) {
        float tail[KERN_GROUP] = { 0 };
        for (int j = 0; g * KERN_GROUP + j < n; j++)
            tail[j] = x[g * KERN_GROUP + j];
        rows_act_set_group(a, r, g, tail);
    }
}

/* See isa_linear.h: rope. */
static void rows_rope(int layout, const float *table, int rot, float *x)
{
    int i = 0;
    if (layout == KERN_ROPE_INTERLEAVED) {
        const float *c = table, *s = table + rot;
        for (; i + 16 <= rot; i += 16) {
            v16 v = v16_load(x + i);
            v16_store(x + i, v16_add(v16_mul(v, v16_load(c + i)), v16_mul(v16_swap(v), v16_load(s + i))));
        }
        for (; i < rot; i += 2) {
            float a = x[i], b = x[i + 1];
            x[i] = a * c[i] + b * s[i];
            x[i + 1] = b * c[i + 1] + a * s[i + 1];
        }
        return;
    }
    int half = rot / 2;
    const float *c = table, *s = table + rot;
    for (; i + 16 <= half; i += 16) {
        v16 a = v16_load(x + i), b = v16_load(x + half + i), vc = v16_load(c + i), vs = v16_load(s + i);
        v16_store(x + i, v16_sub(v16_mul(a, vc), v16_mul(b, vs)));
        v16_store(x + half + i, v16_add(v16_mul(b, vc), v16_mul(a, vs)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * c[i] - b * s[i];
        x[half + i] = b * c[i] + a * s[i];
    }
}

static void rows_store(const float *acc, const float *bias, int n_row, float *out, size_t ld)
{
    for (int r = 0; r < n_row; r++) {
        v16 v = v16_load(acc + (size_t)r * KERN_PANEL);
        v16_store(out + (size_t)r * ld, bias ? v16_add(v, v16_load(bias)) : v);
    }
}

static void rows_add(const float *acc, int n_row, float *out, size_t ld)
{
    for (int r = 0; r < n_row; r++)
        v16_store(out + (size_t)r * ld, v16_add(v16_load(out + (size_t)r * ld), v16_load(acc + (size_t)r * KERN_PANEL)));
}

static void rows_fill(struct kern_linear_fns *f)
{
    f->act_set = rows_act_set;
    f->act_set_group = rows_act_set_group;
    f->rmsnorm = rows_rmsnorm;
    f->gated = rows_gated;
    f->rope = rows_rope;
    f->store = rows_store;
    f->add = rows_add;
}

#endif
