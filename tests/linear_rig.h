/* linear_rig.h - random tensors, packed matrices and inputs for the tests and benches of the linear half. */
#ifndef SKVD_TESTS_LINEAR_RIG_H
#define SKVD_TESTS_LINEAR_RIG_H

#include "kernels/blocks.h"
#include "kernels/isa.h"
#include "kernels/pack.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LRIG_TYPES 11
static const int lrig_types[LRIG_TYPES] = { KERN_F32,  KERN_F16,  KERN_BF16, KERN_Q4_0, KERN_Q4_1, KERN_Q5_0,
                                          KERN_Q5_1, KERN_Q8_0, KERN_Q4_K, KERN_Q5_K, KERN_Q6_K };

static inline uint32_t lrig_next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

/* Even in [-1, 1). */
static inline float lrig_float(uint64_t *seed)
{
    return (float)lrig_next(seed) / 1073741824.0f - 1.0f;
}

static inline void *lrig_alloc(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!p)
        abort();
    memset(p, 0, (bytes + 127) / 64 * 64);
    return p;
}

static inline void lrig_put_half(unsigned char *p, float f)
{
    uint16_t h = kern_f32_to_f16(f);
    memcpy(p, &h, 2);
}

/* A random block: any bits for q, scales of the size of real ones. */
static inline void lrig_block(int type, unsigned char *b, uint64_t *seed)
{
    size_t bytes = kern_type_block_bytes(type);
    for (size_t i = 0; i < bytes; i++)
        b[i] = (unsigned char)lrig_next(seed);
    float f = lrig_float(seed), d = 0.002f + 0.01f * fabsf(lrig_float(seed));
    switch (type) {
    case KERN_F32:
        memcpy(b, &f, 4);
        break;
    case KERN_F16:
        lrig_put_half(b, f);
        break;
    case KERN_BF16: {
        uint16_t h = kern_f32_to_bf16(f);
        memcpy(b, &h, 2);
        break;
    }
    case KERN_Q6_K:
        lrig_put_half(b + 208, d / 64);
        break;
    case KERN_Q4_K:
    case KERN_Q5_K:
        lrig_put_half(b, d / 32);
        lrig_put_half(b + 2, d / 8);
        break;
    default:
        lrig_put_half(b, d);
        if (kern_type_has_min(type))
            lrig_put_half(b + 2, -8 * d * fabsf(f));
    }
}

static inline struct kern_tensor lrig_tensor(int type, int64_t rows, int64_t cols, uint64_t seed)
{
    struct kern_tensor t = { .type = type, .rows = rows, .cols = cols };
    size_t n = (size_t)rows * (size_t)(cols / kern_type_block(type)), each = kern_type_block_bytes(type);
    unsigned char *data = lrig_alloc(n * each);
    for (size_t i = 0; i < n; i++)
        lrig_block(type, data + i * each, &seed);
    t.data = data;
    return t;
}

static inline struct kern_packed lrig_pack(const struct kern_tensor *t)
{
    struct kern_packed p;
    kern_pack_shape(&p, t);
    p.data = lrig_alloc((size_t)p.n_panel * p.panel_bytes);
    for (int i = 0; i < p.n_panel; i++)
        kern_pack_panel(&p, t, i);
    return p;
}

/* Every copy of the activations, whether an ISA wants it or not. */
static inline struct kern_input lrig_input(int rows, int cols)
{
    struct kern_input a = { .n_group = (cols + 31) / 32 };
    size_t g = (size_t)rows * a.n_group;
    a.q8 = lrig_alloc(g * 32);
    a.q16 = lrig_alloc(g * 64);
    a.scale = lrig_alloc(g * 16);
    a.f32 = lrig_alloc(g * 128);
    a.bf16 = lrig_alloc(g * 64);
    return a;
}

static inline void lrig_input_free(struct kern_input *a)
{
    free(a->q8);
    free(a->q16);
    free(a->scale);
    free(a->f32);
    free(a->bf16);
}

static inline float *lrig_floats(size_t n, float scale, uint64_t seed)
{
    float *x = lrig_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = scale * lrig_float(&seed);
    return x;
}

#endif
