/* blocks.h - GGUF tensor types: sizes and exact dequantisation.
 *
 * Formats from the GGUF/GGML specification. Dequantisation here is the definition: f32 results equal the
 * published formulas bit for bit.
 */
#ifndef SKVD_KERNELS_BLOCKS_H
#define SKVD_KERNELS_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Numbers as in the file format. */
enum kern_gguf_type {
    KERN_F32 = 0,
    KERN_F16 = 1,
    KERN_Q4_0 = 2,
    KERN_Q4_1 = 3,
    KERN_Q5_0 = 6,
    KERN_Q5_1 = 7,
    KERN_Q8_0 = 8,
    KERN_Q4_K = 12,
    KERN_Q5_K = 13,
    KERN_Q6_K = 14,
    KERN_BF16 = 30,
};

bool kern_type_known(int type);
const char *kern_type_name(int type); /* "Q4_1"; "?" for one that is not known */
int kern_type_block(int type);        /* weights in a block: 1, 32 or 256 */
size_t kern_type_block_bytes(int type);
/* Bytes of a row of `cols` weights; cols must be a multiple of the block. */
size_t kern_row_bytes(int type, int64_t cols);

/* A group of 32 weights of a quantised type, taken apart: w[j] = d[j / 16] * (q[j] - zero) + m, with `zero` of the
 * type and m only where the type has a minimum. d[0] == d[1] except in Q6_K. */
struct kern_group {
    uint8_t q[32];
    float d[2];
    float m;
    /* K types only: d[k] = super_d * sc[k], m = -(super_m * mn), f16 of 256 weights times integers */
    uint16_t super_d, super_m;
    int8_t sc[2];
    uint8_t mn;
};
void kern_group_get(int type, const void *row, int64_t group, struct kern_group *g);
int kern_type_zero(int type);     /* 0 for types with a minimum and for floats */
bool kern_type_has_min(int type);

/* out[0..n) = the n weights at src; n a multiple of the block. */
void kern_dequant(int type, const void *src, float *out, int64_t n);

float kern_f16_to_f32(uint16_t h);
uint16_t kern_f32_to_f16(float f);
static inline float kern_bf16_to_f32(uint16_t h)
{
    union { uint32_t u; float f; } v = { .u = (uint32_t)h << 16 };
    return v.f;
}
/* Round to nearest even; NaN stays NaN. */
static inline uint16_t kern_f32_to_bf16(float f)
{
    union { float f; uint32_t u; } v = { .f = f };
    if ((v.u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((v.u >> 16) | 0x40);
    return (uint16_t)((v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16);
}

#endif
