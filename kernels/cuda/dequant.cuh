// dequant.cuh - GGUF blocks to numbers, eight weights at a time.
//
// A unit is a quarter of 32 consecutive weights: sub-block `b32` of a row, quarter `q`, the weights
// 32 b32 + 4 q + {0..3} and 32 b32 + 16 + 4 q + {0..3}. This split fits formats whose low nibbles hold the
// first 16 weights and whose high nibbles hold the other 16, and costs the others nothing.
#ifndef SKVD_KERNELS_CUDA_DEQUANT_CUH
#define SKVD_KERNELS_CUDA_DEQUANT_CUH

#include "kernels/cuda/compat.cuh"

extern "C" {
#include "kernels/blocks.h"
}

// Block sizes put some fields at odd multiples of 2: 16-bit loads are aligned everywhere.
__device__ __forceinline__ unsigned ld_u16(const unsigned char *p)
{
    return *reinterpret_cast<const unsigned short *>(p);
}

__device__ __forceinline__ unsigned ld_u32(const unsigned char *p)
{
    return ld_u16(p) | ld_u16(p + 2) << 16;
}

__device__ __forceinline__ float ld_f16(const unsigned char *p)
{
    return f16_bits_to_f32((unsigned short)ld_u16(p));
}

__device__ __forceinline__ int byte_of(unsigned w, int i)
{
    return (int)(w >> (8 * i) & 0xff);
}

// Scale and minimum of sub-block j of a Q4_K / Q5_K block: 6 bits each, packed in 12 bytes.
__device__ __forceinline__ void k_scale_min(const unsigned char *s, int j, int &scale, int &min)
{
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

template <int TYPE> struct deq; // deq<TYPE>::unit(row, b32, q, w)

template <> struct deq<KERN_F32> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const float *p = reinterpret_cast<const float *>(row) + 32 * b32 + 4 * q;
        for (int i = 0; i < 4; i++) {
            w[i] = p[i];
            w[4 + i] = p[16 + i];
        }
    }
};

template <> struct deq<KERN_F16> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned short *p = reinterpret_cast<const unsigned short *>(row) + 32 * b32 + 4 * q;
        for (int i = 0; i < 4; i++) {
            w[i] = f16_bits_to_f32(p[i]);
            w[4 + i] = f16_bits_to_f32(p[16 + i]);
        }
    }
};

template <> struct deq<KERN_BF16> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned short *p = reinterpret_cast<const unsigned short *>(row) + 32 * b32 + 4 * q;
        for (int i = 0; i < 4; i++) {
            w[i] = bf16_lo(p[i]);
            w[4 + i] = bf16_lo(p[16 + i]);
        }
    }
};

template <> struct deq<KERN_Q4_0> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)b32 * 18;
        float d = ld_f16(b);
        unsigned v = ld_u32(b + 2 + 4 * q);
        for (int i = 0; i < 4; i++) {
            w[i] = d * (float)((byte_of(v, i) & 15) - 8);
            w[4 + i] = d * (float)((byte_of(v, i) >> 4) - 8);
        }
    }
};

template <> struct deq<KERN_Q4_1> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)b32 * 20;
        float d = ld_f16(b), m = ld_f16(b + 2);
        unsigned v = ld_u32(b + 4 + 4 * q);
        for (int i = 0; i < 4; i++) {
            w[i] = d * (float)(byte_of(v, i) & 15) + m;
            w[4 + i] = d * (float)(byte_of(v, i) >> 4) + m;
        }
    }
};

template <> struct deq<KERN_Q5_0> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)b32 * 22;
        float d = ld_f16(b);
        unsigned high = ld_u32(b + 2), v = ld_u32(b + 6 + 4 * q);
        for (int i = 0; i < 4; i++) {
            int lo = (byte_of(v, i) & 15) | (int)(high >> (4 * q + i) & 1) << 4;
            int hi = (byte_of(v, i) >> 4) | (int)(high >> (16 + 4 * q + i) & 1) << 4;
            w[i] = d * (float)(lo - 16);
            w[4 + i] = d * (float)(hi - 16);
        }
    }
};

template <> struct deq<KERN_Q5_1> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)b32 * 24;
        float d = ld_f16(b), m = ld_f16(b + 2);
        unsigned high = ld_u32(b + 4), v = ld_u32(b + 8 + 4 * q);
        for (int i = 0; i < 4; i++) {
            int lo = (byte_of(v, i) & 15) | (int)(high >> (4 * q + i) & 1) << 4;
            int hi = (byte_of(v, i) >> 4) | (int)(high >> (16 + 4 * q + i) & 1) << 4;
            w[i] = d * (float)lo + m;
            w[4 + i] = d * (float)hi + m;
        }
    }
};

template <> struct deq<KERN_Q8_0> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)b32 * 34;
        float d = ld_f16(b);
        unsigned lo = ld_u32(b + 2 + 4 * q), hi = ld_u32(b + 18 + 4 * q);
        for (int i = 0; i < 4; i++) {
            w[i] = d * (float)(signed char)byte_of(lo, i);
            w[4 + i] = d * (float)(signed char)byte_of(hi, i);
        }
    }
};

template <> struct deq<KERN_Q4_K> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)(b32 >> 3) * 144;
        int j = b32 & 7, scale, min, shift = (j & 1) * 4;
        k_scale_min(b + 4, j, scale, min);
        float d = ld_f16(b) * (float)scale, m = ld_f16(b + 2) * (float)min;
        const unsigned char *qs = b + 16 + (j >> 1) * 32 + 4 * q;
        unsigned lo = ld_u32(qs), hi = ld_u32(qs + 16);
        for (int i = 0; i < 4; i++) {
            w[i] = d * (float)(byte_of(lo, i) >> shift & 15) - m;
            w[4 + i] = d * (float)(byte_of(hi, i) >> shift & 15) - m;
        }
    }
};

template <> struct deq<KERN_Q5_K> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)(b32 >> 3) * 176;
        int j = b32 & 7, scale, min, shift = (j & 1) * 4;
        k_scale_min(b + 4, j, scale, min);
        float d = ld_f16(b) * (float)scale, m = ld_f16(b + 2) * (float)min;
        const unsigned char *qh = b + 16 + 4 * q, *qs = b + 48 + (j >> 1) * 32 + 4 * q;
        unsigned lo = ld_u32(qs), hi = ld_u32(qs + 16), hlo = ld_u32(qh), hhi = ld_u32(qh + 16);
        for (int i = 0; i < 4; i++) {
            int a = (byte_of(lo, i) >> shift & 15) | (byte_of(hlo, i) >> j & 1) << 4;
            int c = (byte_of(hi, i) >> shift & 15) | (byte_of(hhi, i) >> j & 1) << 4;
            w[i] = d * (float)a - m;
            w[4 + i] = d * (float)c - m;
        }
    }
};

template <> struct deq<KERN_Q6_K> {
    static __device__ __forceinline__ void unit(const unsigned char *row, int b32, int q, float w[8])
    {
        const unsigned char *b = row + (size_t)(b32 >> 3) * 210;
        int half = b32 >> 2 & 1, part = b32 & 3;
        const signed char *scales = reinterpret_cast<const signed char *>(b + 192) + half * 8 + part * 2;
        float d = ld_f16(b + 208), d0 = d * (float)scales[0], d1 = d * (float)scales[1];
        const unsigned char *ql = b + half * 64 + (part & 1) * 32 + 4 * q, *qh = b + 128 + half * 32 + 4 * q;
        unsigned lo = ld_u32(ql), hi = ld_u32(ql + 16), hlo = ld_u32(qh), hhi = ld_u32(qh + 16);
        int nib = (part >> 1) * 4, two = part * 2;
        for (int i = 0; i < 4; i++) {
            int a = (byte_of(lo, i) >> nib & 15) | (byte_of(hlo, i) >> two & 3) << 4;
            int c = (byte_of(hi, i) >> nib & 15) | (byte_of(hhi, i) >> two & 3) << 4;
            w[i] = d0 * (float)(a - 32);
            w[4 + i] = d1 * (float)(c - 32);
        }
    }
};

// Where a unit's two groups of four start in the row.
__device__ __forceinline__ int unit_first(int b32, int q)
{
    return 32 * b32 + 4 * q;
}

// out [rows][cols] bf16 = the weights. One thread a unit.
template <int TYPE>
__global__ void __launch_bounds__(256)
    dequant_bf16(const unsigned char *src, size_t row_bytes, int rows, int cols, unsigned short *out)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int units = cols / 8;
    if (i >= (size_t)rows * units)
        return;
    int r = (int)(i / units), u = (int)(i % units);
    float w[8];
    deq<TYPE>::unit(src + (size_t)r * row_bytes, u >> 2, u & 3, w);
    unsigned *o = reinterpret_cast<unsigned *>(out + (size_t)r * cols + unit_first(u >> 2, u & 3));
    o[0] = bf16_pack(w[0], w[1]);
    o[1] = bf16_pack(w[2], w[3]);
    o[8] = bf16_pack(w[4], w[5]);
    o[9] = bf16_pack(w[6], w[7]);
}

// x [n_row][cols] = scale * row token[r] of the table. One block a row.
template <int TYPE>
__global__ void __launch_bounds__(128)
    embed_rows(const unsigned char *src, size_t row_bytes, int cols, const int32_t *token, float scale, float *x)
{
    int r = blockIdx.x;
    const unsigned char *row = src + (size_t)token[r] * row_bytes;
    for (int u = threadIdx.x; u < cols / 8; u += blockDim.x) {
        float w[8];
        deq<TYPE>::unit(row, u >> 2, u & 3, w);
        float *o = x + (size_t)r * cols + unit_first(u >> 2, u & 3);
        for (int i = 0; i < 4; i++) {
            o[i] = scale * w[i];
            o[16 + i] = scale * w[4 + i];
        }
    }
}

#endif
