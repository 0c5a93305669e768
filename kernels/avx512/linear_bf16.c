/* avx512/linear_bf16.c - bf16 weights with vdpbf16ps: two inputs a step, f32 sums. For CPUs that have AVX512_BF16. */
#include <immintrin.h>
#include <string.h>

#include "kernels/avx512/linear.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 pair_product(__m512 acc, __m512i w, const uint16_t *x)
{
    int32_t v;
    memcpy(&v, x, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(v));
}

/* Even and odd pairs in sums of their own: a single row isn't held up by the latency of one chain. */
INLINE void tile(const unsigned char *p, const uint16_t *x, size_t ld, int n_group, float *out, const int R)
{
    __m512 acc[8][2];
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int i = 0; i < n_group * KERN_GROUP; i += 4, p += 128) {
        __m512i w0 = _mm512_load_si512(p), w1 = _mm512_load_si512(p + 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            acc[r][0] = pair_product(acc[r][0], w0, x + r * ld + i);
            acc[r][1] = pair_product(acc[r][1], w1, x + r * ld + i + 2);
        }
    }
    for (int r = 0; r < R; r++)
        _mm512_store_ps(out + r * KERN_PANEL, _mm512_add_ps(acc[r][0], acc[r][1]));
}

void kern_mul_pbf16_avx512bf16(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                               int n_row, float *acc)
{
    size_t ld = (size_t)a->n_group * KERN_GROUP;
    const unsigned char *p = kern_panel_at(w, panel, g0);
    const uint16_t *x = a->bf16 + (size_t)row0 * ld;
    int r = 0;
    for (; r + 8 <= n_row; r += 8)
        tile(p, x + r * ld, ld, a->n_group, acc + (size_t)r * KERN_PANEL, 8);
    for (; r + 4 <= n_row; r += 4)
        tile(p, x + r * ld, ld, a->n_group, acc + (size_t)r * KERN_PANEL, 4);
    for (; r < n_row; r++)
        tile(p, x + r * ld, ld, a->n_group, acc + (size_t)r * KERN_PANEL, 1);
}
