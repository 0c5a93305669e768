/* attn_vec.h - what the AVX-512 attention kernels share. */
#ifndef SKVD_KERNELS_AVX512_ATTN_VEC_H
#define SKVD_KERNELS_AVX512_ATTN_VEC_H

#include <immintrin.h>
#include <math.h>

#include "kernels/isa_attn.h"

#define SLOTS  KERN_PAGE_SLOTS
#define INLINE static inline __attribute__((always_inline))

/* 2^x: x = n + r, r in [-1/2, 1/2], a polynomial of degree 5 for 2^r with 2^0 = 1 exactly (least largest relative error,
 * 9.2e-8), then n into the exponent; below -149 it is 0. x must be finite. */
INLINE __m512 exp2_v16(__m512 x)
{
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.3264727087e-03f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6715126491e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5507337436e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022242085e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314697760e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* The lanes of the 16 slots from `at` on that a row which sees `seen` slots sees. */
INLINE __mmask16 seen_mask(int seen, int at)
{
    int n = seen - at;
    return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

/* A hint for one line of a page two ahead, into L2: all of it gets asked for while this page is worked on. (Measured on Zen 4: a
 * third faster than one page ahead into L1, whose few miss buffers hold the loads up.) */
INLINE void prefetch_line(const unsigned char *next, size_t at)
{
    _mm_prefetch((const char *)next + at, _MM_HINT_T1);
}

/* Row maxima of s over what each row sees, -INFINITY where that is nothing. One lane a row. */
INLINE __m512 row_max_v16(const float *s, int n_row, int n_slot, const int32_t *seen)
{
    _Alignas(64) float max[16];
    for (int r = 0; r < n_row; r++) {
        const float *sr = s + r * KERN_ATTN_BLOCK;
        __m512 a = _mm512_set1_ps(-INFINITY), b = a;
        int n = seen[r] < n_slot ? seen[r] : n_slot, j = 0;
        for (; j + 32 <= n; j += 32) {
            a = _mm512_max_ps(a, _mm512_loadu_ps(sr + j));
            b = _mm512_max_ps(b, _mm512_loadu_ps(sr + j + 16));
        }
        for (; j < n; j += 16)
            a = _mm512_mask_max_ps(a, seen_mask(n, j), a, _mm512_loadu_ps(sr + j));
        max[r] = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    }
    return _mm512_load_ps(max);
}

/* m := max(m, the rows' maxima), alpha = 2^(old m - new m), 0 for a first block; l := l * alpha. */
INLINE void rescale_rows(const float *s, int n_row, int n_slot, const int32_t *seen, float *m, float *l, float *alpha)
{
    __mmask16 rows = (__mmask16)((1u << n_row) - 1);
    __m512 old = _mm512_maskz_loadu_ps(rows, m);
    __m512 new = _mm512_max_ps(old, row_max_v16(s, n_row, n_slot, seen));
    __mmask16 had = _mm512_mask_cmp_ps_mask(rows, old, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
    __m512 a = exp2_v16(_mm512_maskz_sub_ps(had, old, new));
    a = _mm512_maskz_mov_ps(had, a);
    _mm512_mask_storeu_ps(m, rows, new);
    _mm512_mask_storeu_ps(alpha, rows, a);
    _mm512_mask_storeu_ps(l, rows, _mm512_mul_ps(a, _mm512_maskz_loadu_ps(rows, l)));
}

/* attn_bf16.c (compiled with BF16): both passes' 16-bit form, prefill's int8 form, store. */
void kern_attn_avx512_bf16(struct kern_attn_fns *f);
/* attn_int8.c: decode's int8 form; needs the f32 form. */
void kern_attn_avx512_int8(struct kern_attn_fns *f);

#endif
