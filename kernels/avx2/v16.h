/* avx2/v16.h - 16 floats as two vectors of 8, for isa_rows.h. */
#ifndef SKVD_KERNELS_AVX2_V16_H
#define SKVD_KERNELS_AVX2_V16_H

#include <immintrin.h>
#include <stdint.h>

typedef struct {
    __m256 lo, hi;
} v16;

static inline v16 v16_load(const float *p)
{
    return (v16){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) };
}
static inline void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
static inline v16 v16_set1(float f)
{
    __m256 v = _mm256_set1_ps(f);
    return (v16){ v, v };
}
#define V16_BINARY(name, op)                                      \
    static inline v16 name(v16 a, v16 b)                          \
    {                                                             \
        return (v16){ op(a.lo, b.lo), op(a.hi, b.hi) };           \
    }
V16_BINARY(v16_add, _mm256_add_ps)
V16_BINARY(v16_sub, _mm256_sub_ps)
V16_BINARY(v16_mul, _mm256_mul_ps)
V16_BINARY(v16_div, _mm256_div_ps)
V16_BINARY(v16_max, _mm256_max_ps)
V16_BINARY(v16_min, _mm256_min_ps)
#undef V16_BINARY

static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    return (v16){ _mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi) };
}
static inline v16 v16_abs(v16 a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (v16){ _mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi) };
}
static inline __m256 v8_pow2(__m256 n)
{
    __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
static inline v16 v16_pow2(v16 n)
{
    return (v16){ v8_pow2(n.lo), v8_pow2(n.hi) };
}
static inline v16 v16_swap(v16 a)
{
    return (v16){ _mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1) };
}
static inline float v8_hsum(__m256 s)
{
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float v16_hsum(v16 a)
{
    return v8_hsum(_mm256_add_ps(a.lo, a.hi));
}
static inline float v16_hmax(v16 a)
{
    __m256 s = _mm256_max_ps(a.lo, a.hi);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
/* 16 integral floats as int16, in order. */
static inline __m256i v16_to_i16(v16 a)
{
    __m256i p = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    return _mm256_permute4x64_epi64(p, 0xd8);
}
static inline void v16_store_i8(int8_t *p, v16 a)
{
    __m256i w = v16_to_i16(a);
    __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    _mm_storeu_si128((__m128i *)p, b);
}
static inline void v16_store_i16(int16_t *p, v16 a)
{
    __m256i w = v16_to_i16(a);
    w = _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(w, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)p, w);
}

#endif
