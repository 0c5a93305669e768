/* avx512/v16.h - 16 floats as one vector, for isa_rows.h. */
#ifndef SKVD_KERNELS_AVX512_V16_H
#define SKVD_KERNELS_AVX512_V16_H

#include <immintrin.h>
#include <stdint.h>

typedef __m512 v16;

static inline v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void v16_store(float *p, v16 a)
{
    _mm512_storeu_ps(p, a);
}
static inline v16 v16_set1(float f)
{
    return _mm512_set1_ps(f);
}
static inline v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}
static inline v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}
static inline v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}
static inline v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}
static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}
static inline v16 v16_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}
static inline v16 v16_abs(v16 a)
{
    return _mm512_abs_ps(a);
}
static inline v16 v16_pow2(v16 n)
{
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}
static inline v16 v16_swap(v16 a)
{
    return _mm512_castsi512_ps(_mm512_shuffle_epi32(_mm512_castps_si512(a), (_MM_PERM_ENUM)0xb1));
}
static inline __m256 v16_half(v16 a, int hi)
{
    __m512d d = _mm512_castps_pd(a);
    return _mm256_castpd_ps(hi ? _mm512_extractf64x4_pd(d, 1) : _mm512_castpd512_pd256(d));
}
static inline float v16_hsum(v16 a)
{
    __m256 s = _mm256_add_ps(v16_half(a, 0), v16_half(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float v16_hmax(v16 a)
{
    __m256 s = _mm256_max_ps(v16_half(a, 0), v16_half(a, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline void v16_store_i8(int8_t *p, v16 a)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
static inline void v16_store_i16(int16_t *p, v16 a)
{
    __m256i w = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a));
    w = _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(w, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)p, w);
}

#endif
