/* avx2/linear_tile.h - tiles of packed, quantised weights with AVX2, FMA and F16C; between linear.c and linear_k.c.
 *
 * Without VNNI the cheap integer product is vpmaddubsw: u8 x s8, neighbours added, saturating to 16 bits. Small q
 * leave room to add several of them before widening: with |a| <= 127 a pair is at most 2 * 127 * q_max, so 8 pairs
 * fit for q <= 15, 4 for q <= 31, 2 for q <= 63. q up to 255 would saturate at once and goes through vpmaddwd on 16-bit
 * values. Whatever the way, the integer sums are exact, so the results equal scalar's bit for bit.
 *
 * What limits a tile are the multiplications, two a cycle whatever their kind: of a row's 24 a group, 16 are of q. The
 * product that adds a pair of 16-bit sums has a factor free, which saves 2: the integer scale of a K type; or d itself where
 * a panel has a `unit`: the sums are at most 8 * 30 * 127 each, so a pair times 2^15 fits 32 bits, and it is rounded to f32
 * once, as i * d is.
 *
 * A tile is one panel (16 outputs: two vectors of 8) by up to TILE rows. Weights are loaded once a tile and
 * activations broadcast from memory.
 */
#ifndef SKVD_KERNELS_AVX2_LINEAR_TILE_H
#define SKVD_KERNELS_AVX2_LINEAR_TILE_H

#include <immintrin.h>
#include <string.h>

#include "kernels/isa_linear.h"

#define TILE   6    /* most rows of a tile */
#define BYTES  512 /* a group unpacked: 32 inputs of 16 outputs */
#define INLINE static inline __attribute__((always_inline))

/* Keeps a running sum a running sum: compilers reorder long integer additions into trees, whose leaves then don't fit
 * the 16 registers. */
#define KEEP(v) __asm__("" : "+x"(v))

/* Where a tile reads its activations: row 0, and the distances of rows. */
struct tile {
    const int8_t *q8;
    const int16_t *q16;
    const float *scale;
    size_t ld_q, ld_s;
};

INLINE struct tile tile_at(const struct kern_input *a, int row)
{
    size_t n = (size_t)a->n_group;
    return (struct tile){
        .q8 = a->q8 + (size_t)row * n * KERN_GROUP,
        .q16 = a->q16 ? a->q16 + (size_t)row * n * KERN_GROUP : NULL,
        .scale = a->scale + (size_t)row * n * 4,
        .ld_q = n * KERN_GROUP,
        .ld_s = n * 4,
    };
}

INLINE __m256i quad(const int8_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

INLINE __m256i pair16(const int16_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

INLINE __m256 half8(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE void tile_store(float *out, __m256 (*acc)[2], const int R)
{
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        _mm256_store_ps(out + r * KERN_PANEL, acc[r][0]);
        _mm256_store_ps(out + r * KERN_PANEL + 8, acc[r][1]);
    }
}

/* How i becomes part of an output. PLAIN: times d. WHOLE: times d in the panel's unit, in integers. SUPER: times a K type's
 * sc, in integers, into a sum of its own. */
enum scaling { PLAIN, WHOLE, SUPER };

/* Of the forms with 4, 5 and 6 bits: scales in a group, and vpmaddubsw results that fit 16 bits. */
#define PER(bits) ((bits) == 6 ? 2 : 1)
#define RUN(bits) (128 >> (bits))
/* Of the K types only Q6_K has no m. */
#define SUPER_M(bits) ((bits) != 6)

/* A scale's integers i of a row into its two vectors. */
INLINE void scale_acc(__m256 acc[2], __m256 super[2], const __m256i i[2], const float *dw, const float *mw, float da,
                      float sa, const enum scaling scaling, const bool super_m)
{
    __m256 vd = _mm256_set1_ps(da), vs = _mm256_set1_ps(sa);
    for (int h = 0; h < 2; h++) {
        __m256 t = _mm256_cvtepi32_ps(i[h]), mh = _mm256_load_ps(mw + 8 * h);
        if (scaling == SUPER) {
            super[h] = _mm256_fmadd_ps(t, vd, super[h]);
            if (!super_m) {
                super[h] = _mm256_fmadd_ps(vs, mh, super[h]);
                continue;
            }
        } else {
            if (scaling == PLAIN)
                t = _mm256_mul_ps(t, _mm256_load_ps(dw + 8 * h));
            acc[h] = _mm256_fmadd_ps(t, vd, acc[h]);
        }
        acc[h] = _mm256_fmadd_ps(vs, mh, acc[h]);
    }
}

/* How a tile takes its panel's weights. DIRECT: as they lie in memory, a single stream that the hardware prefetches better
 * than any instruction. FIRST: the same, and it leaves the scales and bytes unpacked for the tiles that follow:
 * beside products that costs less than a pass of its own. LATER: what FIRST left. */
enum how { DIRECT, FIRST, LATER };

struct source {
    const uint8_t *u; /* first group's q */
    const uint8_t *scales; /* and its scales */
    size_t step;      /* from group to group */
    size_t m;         /* bytes from a group's scales to its m (of a K type: mn); 0: there is none */
    float zero;       /* m = d * zero then */
    float unit;       /* of the panel, or 0 */
    int super0;       /* groups before the first that share D and M with it */
    float *head;      /* of a K type: D [16], M [16] for every 256 inputs */
    float *sd, *sm;   /* unpacked: [group][per][16] */
    uint8_t *bytes;   /* q of P4, P5, P6 unpacked: [group][512] */
    const uint8_t *next; /* the panel that follows in memory, or NULL: to be brought into L2 while this one is computed, */
    size_t next_step;    /* so many bytes of it with each group */
};

INLINE void next_fetch(const struct source *s, int g)
{
    if (s->next)
        for (size_t i = 0; i < s->next_step; i += 64)
            _mm_prefetch((const char *)s->next + (size_t)g * s->next_step + i, _MM_HINT_T1);
}

/* Integers as pairs of 16 bits, for vpmaddwd. */
INLINE __m256 twice16(__m256i x)
{
    return _mm256_castsi256_ps(_mm256_blend_epi16(x, _mm256_slli_epi32(x, 16), 0xaa));
}

/* Scale k (0 .. per - 1) of a group's, as they lie in memory at x, to sd [16], sm [16], in the panel's unit if WHOLE; where i
 * is multiplied in integers, sd holds pairs of 16 bits. head: the group's D and M. */
INLINE void scale_get(const struct source *s, const uint8_t *x, int k, const float *head, float *sd, float *sm,
                      const enum scaling scaling, const bool super_m)
{
    const __m256 unit = _mm256_set1_ps(s->unit), zero = _mm256_set1_ps(s->zero);
    for (int i = 0; i < KERN_PANEL; i += 8) {
        size_t at = (size_t)(k * KERN_PANEL + i);
        __m256 d, m;
        if (scaling == SUPER) {
            __m256i sc = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(x + at)));
            d = twice16(sc);
            if (super_m) {
                __m256i mn = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(x + s->m + at)));
                m = _mm256_mul_ps(_mm256_cvtepi32_ps(mn), _mm256_load_ps(head + KERN_PANEL + i));
            } else {
                m = _mm256_mul_ps(_mm256_cvtepi32_ps(sc), zero);
            }
        } else {
            at *= sizeof(uint16_t);
            d = half8((const uint16_t *)(x + at));
            m = s->m ? half8((const uint16_t *)(x + s->m + at)) : _mm256_mul_ps(d, zero);
            if (scaling == WHOLE) {
                d = twice16(_mm256_cvtps_epi32(_mm256_mul_ps(d, unit)));
                m = _mm256_mul_ps(m, unit);
            }
        }
        _mm256_store_ps(sd + i, d);
        _mm256_store_ps(sm + i, m);
    }
}

/* Half h of vector v of a group's bytes: inputs 4 * v .. of outputs 8 * h .. */
INLINE __m256i bytes_get(const uint8_t *u, int v, int h)
{
    return _mm256_load_si256((const __m256i *)(u + 64 * v + 32 * h));
}

/* The same of a P4 (bits 4), P5 or P6 group. */
INLINE __m256i packed_get(const uint8_t *u, int v, int h, const int bits)
{
    if (bits == 6) {
        const __m256i upper = _mm256_set1_epi8((char)0xc0);
        int third = 3 * (v / 4);
        if (v % 4 < 3)
            return _mm256_and_si256(bytes_get(u, third + v % 4, h), _mm256_set1_epi8(63));
        __m256i x = _mm256_srli_epi16(_mm256_and_si256(bytes_get(u, third, h), upper), 2);
        x = _mm256_srli_epi16(_mm256_or_si256(x, _mm256_and_si256(bytes_get(u, third + 1, h), upper)), 2);
        return _mm256_srli_epi16(_mm256_or_si256(x, _mm256_and_si256(bytes_get(u, third + 2, h), upper)), 2);
    }
    __m256i x = bytes_get(u, v % 4, h);
    x = _mm256_and_si256(v < 4 ? x : _mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
    if (bits == 4)
        return x;
    __m256i y = bytes_get(u, 4, h); /* bit v to bit 4 */
    y = v < 4 ? _mm256_slli_epi16(y, 4 - v) : _mm256_srli_epi16(y, v - 4);
    return _mm256_or_si256(x, _mm256_and_si256(y, _mm256_set1_epi8(0x10)));
}

/* The group's products of scale k with R rows, exact, in 32 bits; times the scale where `by` is not NULL. */
INLINE void group_sums(const struct source *s, const struct tile *t, const uint8_t *u, int g, int k, const float *by,
                       __m256i (*sum)[2], const int R, const int bits, const enum how how)
{
    const int run = RUN(bits), runs = 8 / PER(bits) / run; /* a checked division in the loop's head would keep gcc's sanitizers from unrolling it */
#pragma GCC unroll 2
    for (int c = 0; c < runs; c++) {
        __m256i p[TILE][2];
#pragma GCC unroll 8
        for (int i = 0; i < run; i++) {
            const int v = k * 4 + c * run + i;
            __m256i w[2];
            for (int h = 0; h < 2; h++) {
                w[h] = how == LATER ? bytes_get(u, v, h) : packed_get(u, v, h, bits);
                if (how == FIRST)
                    _mm256_store_si256((__m256i *)(s->bytes + (size_t)g * BYTES + 64 * v + 32 * h), w[h]);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                __m256i b = quad(t->q8 + r * t->ld_q + g * KERN_GROUP + 4 * v);
                __m256i x0 = _mm256_maddubs_epi16(w[0], b), x1 = _mm256_maddubs_epi16(w[1], b);
                p[r][0] = i ? _mm256_add_epi16(p[r][0], x0) : x0;
                p[r][1] = i ? _mm256_add_epi16(p[r][1], x1) : x1;
                KEEP(p[r][0]);
                KEEP(p[r][1]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) {
                __m256i f = by ? _mm256_load_si256((const __m256i *)(by + 8 * h)) : _mm256_set1_epi16(1);
                __m256i x = _mm256_madd_epi16(p[r][h], f);
                sum[r][h] = c ? _mm256_add_epi32(sum[r][h], x) : x;
            }
    }
}

/* R rows of P4, P5 or P6. */
INLINE void tile_packed(const struct source *s, const struct tile *t, int n_group, float *out, const int R, const int bits,
                         const enum how how, const enum scaling scaling)
{
    const bool super_m = SUPER_M(bits);
    const int per = PER(bits);
    const uint8_t *u = how == LATER ? s->bytes : s->u, *x = s->scales;
    const size_t step = how == LATER ? BYTES : s->step;
    const float *head = s->head;
    __m256 acc[TILE][2], super[TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = super[r][0] = super[r][1] = _mm256_setzero_ps();
    for (int g = 0, left = KERN_SUPER - s->super0; g < n_group; g++, u += step, x += s->step) {
        if (how == LATER)
            next_fetch(s, g);
#pragma GCC unroll 2
        for (int k = 0; k < per; k++) {
            _Alignas(32) float dm[2 * KERN_PANEL];
            size_t at = (size_t)(g * per + k) * KERN_PANEL;
            float *dw = how == DIRECT ? dm : s->sd + at, *mw = how == DIRECT ? dm + KERN_PANEL : s->sm + at;
            __m256i sum[TILE][2];
            if (how == FIRST || (how == DIRECT && scaling != PLAIN))
                scale_get(s, x, k, head, dw, mw, scaling, super_m);
            group_sums(s, t, u, g, k, scaling == PLAIN ? NULL : dw, sum, R, bits, how);
            if (how == DIRECT && scaling == PLAIN) /* earlier they would take registers from the products */
                scale_get(s, x, k, head, dw, mw, scaling, super_m);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const float *f = t->scale + r * t->ld_s + 4 * g;
                scale_acc(acc[r], super[r], sum[r], dw, mw, f[0], f[per == 1 ? 1 : 2 + k], scaling, super_m);
            }
        }
        if (scaling == SUPER && (--left == 0 || g == n_group - 1)) {
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
                for (int h = 0; h < 2; h++) {
                    acc[r][h] = _mm256_fmadd_ps(super[r][h], _mm256_load_ps(head + 8 * h), acc[r][h]);
                    super[r][h] = _mm256_setzero_ps();
                }
            head += 2 * KERN_PANEL;
            left = KERN_SUPER;
        }
    }
    if (scaling == WHOLE)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++)
                acc[r][h] = _mm256_mul_ps(acc[r][h], _mm256_set1_ps(1 / s->unit));
    tile_store(out, acc, R);
}

/* sum += a vector's even (or odd) bytes, as 16-bit values, times those of R rows from x on, ld apart. */
INLINE void wide_add(__m256i (*sum)[2], __m256i w0, __m256i w1, const int16_t *x, size_t ld, const int R, const bool first)
{
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        __m256i b = pair16(x + r * ld);
        __m256i p0 = _mm256_madd_epi16(w0, b), p1 = _mm256_madd_epi16(w1, b);
        sum[r][0] = first ? p0 : _mm256_add_epi32(sum[r][0], p0);
        sum[r][1] = first ? p1 : _mm256_add_epi32(sum[r][1], p1);
        KEEP(sum[r][0]);
        KEEP(sum[r][1]);
    }
}

/* q up to 255: even, then odd bytes as 16-bit values against activations in the order 0 2 1 3. One after the other, so that
 * weights and sums of six rows fit the registers. */
INLINE void tile_wide(const struct source *s, const struct tile *t, int n_group, float *out, const int R, const enum how how)
{
    const __m256i low = _mm256_set1_epi16(0xff);
    const uint8_t *u = s->u;
    __m256 acc[TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int g = 0; g < n_group; g++, u += s->step) {
        if (how == LATER)
            next_fetch(s, g);
        __m256i sum[TILE][2];
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            const int16_t *x = t->q16 + (g * 8 + v) * 4;
            wide_add(sum, _mm256_and_si256(bytes_get(u, v, 0), low), _mm256_and_si256(bytes_get(u, v, 1), low), x, t->ld_q, R, v == 0);
            wide_add(sum, _mm256_srli_epi16(bytes_get(u, v, 0), 8), _mm256_srli_epi16(bytes_get(u, v, 1), 8), x + 2, t->ld_q, R, false);
        }
        _Alignas(32) float dm[2 * KERN_PANEL];
        size_t at = (size_t)g * KERN_PANEL;
        float *dw = how == DIRECT ? dm : s->sd + at, *mw = how == DIRECT ? dm + KERN_PANEL : s->sm + at;
        if (how != LATER)
            scale_get(s, s->scales + (size_t)g * s->step, 0, NULL, dw, mw, PLAIN, false);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const float *f = t->scale + r * t->ld_s + 4 * g;
            scale_acc(acc[r], NULL, sum[r], dw, mw, f[0], f[1], PLAIN, false);
        }
    }
    tile_store(out, acc, R);
}

/* A panel times the rows at t: the sums of n_group groups to out [rows][16]. */
typedef void tile_fn(const struct source *s, const struct tile *t, int n_group, float *out);
/* The tiles of K types, of P4, P5 and P6 by how and rows - 1; NULL where mul_quant asks for none. In a file of their own: unrolled
 * as they are, they take as long to compile as all others. */
extern tile_fn *const kern_tiles_k_avx2[3][3][TILE];

#define TILE_FN(kind, R, name, how)                                                                               \
    static void tile_##kind##_##R##_##name(const struct source *s, const struct tile *t, int n_group, float *out) \
    {                                                                                                             \
        TILE_##kind(R, how);                                                                                      \
    }
/* The row counts that mul_quant asks for: where there are several tiles, 4 or more in the first, 3 or more in others. */
#define TILE_KIND(kind)                                                                      \
    TILE_FN(kind, 1, direct, DIRECT)                                                         \
    TILE_FN(kind, 2, direct, DIRECT)                                                         \
    TILE_FN(kind, 3, direct, DIRECT)                                                         \
    TILE_FN(kind, 4, direct, DIRECT)                                                         \
    TILE_FN(kind, 5, direct, DIRECT)                                                         \
    TILE_FN(kind, 6, direct, DIRECT)                                                         \
    TILE_FN(kind, 4, first, FIRST)                                                           \
    TILE_FN(kind, 5, first, FIRST)                                                           \
    TILE_FN(kind, 6, first, FIRST)                                                           \
    TILE_FN(kind, 3, later, LATER)                                                           \
    TILE_FN(kind, 4, later, LATER)                                                           \
    TILE_FN(kind, 5, later, LATER)                                                           \
    TILE_FN(kind, 6, later, LATER)
#define TILES(kind)                                                                                      \
    {                                                                                                    \
        { tile_##kind##_1_direct, tile_##kind##_2_direct, tile_##kind##_3_direct, tile_##kind##_4_direct, \
          tile_##kind##_5_direct, tile_##kind##_6_direct },                                              \
        { NULL, NULL, NULL, tile_##kind##_4_first, tile_##kind##_5_first, tile_##kind##_6_first },        \
        { NULL, NULL, tile_##kind##_3_later, tile_##kind##_4_later, tile_##kind##_5_later, tile_##kind##_6_later } \
    }

#endif
