/* attn_vec.h - what the AVX2 attention kernels share. */
#ifndef SKVD_KERNELS_AVX2_ATTN_VEC_H
#define SKVD_KERNELS_AVX2_ATTN_VEC_H

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/isa_attn.h"

#define SLOTS  KERN_PAGE_SLOTS
#define INLINE static inline __attribute__((always_inline))

/* The start of 2^x: x = n + r with r in [-1/2, 1/2]; n as bits to add to the exponent. Below -126 it is -126: nothing beside
 * the 1 that a row's largest p is. */
INLINE __m256 exp2_split(__m256 x, __m256i *n)
{
    const __m256 magic = _mm256_set1_ps(0x1.8p23f); /* adding it rounds to an integer in the low bits */
    x = _mm256_max_ps(x, _mm256_set1_ps(-126.0f));
    __m256 t = _mm256_add_ps(x, magic);
    *n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_sub_ps(x, _mm256_sub_ps(t, magic));
}

/* 2^x for x <= 126: a polynomial of degree 5 for 2^r with 2^0 = 1 exactly (least largest relative error, 9.2e-8). */
INLINE __m256 exp2_v8(__m256 x)
{
    __m256i n;
    __m256 r = exp2_split(x, &n), p = _mm256_set1_ps(1.3264727087e-03f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.6715126491e-03f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.5507337436e-02f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.4022242085e-01f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.9314697760e-01f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}

/* The same with degree 4: 2.9e-6, for what is rounded to 16 bits afterwards. */
INLINE __m256 exp2_v8_short(__m256 x)
{
    __m256i n;
    __m256 r = exp2_split(x, &n), p = _mm256_set1_ps(9.5828529933e-03f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.5906424743e-02f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.4024098613e-01f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.9312419339e-01f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n));
}

/* Keeps the compiler from hoisting the loads and products of the rows to come above this one's sums: with 12 accumulators
 * there are no registers for them, and what it spills costs more than the products. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

INLINE float exp2_f32(float x)
{
    return _mm256_cvtss_f32(exp2_v8(_mm256_set1_ps(x)));
}

/* All ones in the lanes of the 8 slots from `at` on that a row which sees `seen` slots sees. */
INLINE __m256 seen_mask(int seen, int at)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(seen - at), lane));
}

/* q[d .. d + 8), zero from n on. */
INLINE __m256 load_to(const float *q, int d, int n)
{
    return d + 8 <= n ? _mm256_loadu_ps(q + d)
                      : _mm256_maskload_ps(q + d, _mm256_castps_si256(seen_mask(n, d)));
}

INLINE float sum_v8(__m256 x)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

INLINE float max_v8(__m256 x)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

INLINE float min_v8(__m256 x)
{
    __m128 a = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_min_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_min_ss(a, _mm_movehdup_ps(a)));
}

/* A hint for one line of a page two ahead, into L2: all of it gets asked for while this page is worked on. (Measured on Zen 4: a
 * third faster than one page ahead into L1, whose few miss buffers hold the loads up.) */
INLINE void prefetch_line(const void *next, size_t at)
{
    _mm_prefetch((const char *)next + at, _MM_HINT_T1);
}

/* The start of an online softmax step for one row that sees n > 0 of the block's slots: m := max(m, row maximum),
 * alpha = 2^(old m - new m), 0 for a first block. */
INLINE void rescale_row(const float *s, int n, float *m, float *alpha)
{
    __m256 a = _mm256_set1_ps(-INFINITY), b = a;
    int j = 0;
    for (; j + 16 <= n; j += 16) {
        a = _mm256_max_ps(a, _mm256_load_ps(s + j));
        b = _mm256_max_ps(b, _mm256_load_ps(s + j + 8));
    }
    for (; j < n; j += 8)
        a = _mm256_max_ps(a, _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), _mm256_load_ps(s + j), seen_mask(n, j)));
    float old = *m, max = max_v8(_mm256_max_ps(a, b));
    *m = max > old ? max : old;
    *alpha = old == -INFINITY ? 0 : exp2_f32(old - *m);
}

/* attn_decode.c: overrides decode's 16-bit and int8 forms; the f32 form's softmax stays. */
void kern_attn_avx2_decode(struct kern_attn_fns *f);
/* attn_int16.c: prefill's 16-bit and int8 forms. */
void kern_attn_avx2_int16(struct kern_attn_fns *f);

#endif
