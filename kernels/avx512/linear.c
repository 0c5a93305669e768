/* avx512/linear.c - products of packed weights with AVX-512 and VNNI.
 *
 * vpdpbusd multiplies u8 weights by s8 activations and adds four products into 32 bits, exactly: one vector of the
 * panel against one broadcast of four activations. A tile is one panel by up to TILE rows, its sums and
 * accumulators in registers (12 rows: 12 + 12 of 32). A scale costs each row a conversion and three operations.
 */
#include <immintrin.h>

#include "kernels/avx512/linear.h"
#include "kernels/avx512/v16.h"
#include "kernels/isa_rows.h"

#define INLINE static inline __attribute__((always_inline))
#define TILE   12
#define AHEAD  2048 /* bytes: how far single rows prefetch their weights */

/* Where a tile reads its activations: row 0, and the distances of rows. */
struct tile {
    const int8_t *q8;
    const float *scale;
    size_t ld_q, ld_s;
};

/* A pointer that the compiler takes as it is: rows are then addressed from one in three by base + {0, 1, 2} * ld,
 * instead of twelve pointers for which there are no registers. */
#define KEEP_POINTER(p) __asm__("" : "+r"(p))

INLINE struct tile tile_at(const struct kern_input *a, int row)
{
    size_t n = (size_t)a->n_group;
    return (struct tile){
        .q8 = a->q8 + (size_t)row * n * KERN_GROUP,
        .scale = a->scale + (size_t)row * n * 4,
        .ld_q = n * KERN_GROUP,
        .ld_s = n * 4,
    };
}

INLINE __m512i quad(const int8_t *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

INLINE __m512 half16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

INLINE __m512 scale_acc(__m512 acc, __m512i i, __m512 dw, __m512 mw, float da, float sa)
{
    acc = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(i), dw), _mm512_set1_ps(da), acc);
    return _mm512_fmadd_ps(_mm512_set1_ps(sa), mw, acc);
}

/* The tile's scales: those of its first group, and the distance of groups. */
struct scales {
    const unsigned char *d;
    size_t step, m; /* m: from d */
    bool has_m;
    __m512 zero;
};

INLINE struct scales scales_at(const struct kern_packed *w, const unsigned char *group)
{
    return (struct scales){
        .d = group + w->q_bytes,
        .step = w->group_bytes,
        .m = (size_t)(KERN_GROUP / w->group) * KERN_PANEL * sizeof(uint16_t),
        .has_m = w->has_m,
        .zero = _mm512_set1_ps((float)-w->zero),
    };
}

INLINE __m512 scale_m(const struct scales *s, const unsigned char *d, __m512 dw)
{
    return s->has_m ? half16((const uint16_t *)(d + s->m)) : _mm512_mul_ps(dw, s->zero);
}

/* The panel that follows in memory, brought into L2 group by group while this one is computed: a pass over few rows
 * waits for nothing but memory. NULL: not again. */
struct ahead {
    const uint8_t *panel;
    size_t step; /* from group to group */
};

INLINE void ahead_fetch(const struct ahead *a, int g)
{
    if (a->panel)
        for (size_t i = 0; i < a->step; i += 64)
            _mm_prefetch((const char *)a->panel + (size_t)g * a->step + i, _MM_HINT_T1);
}

/* u: [8][64] bytes a group, `step` from group to group; `per` scales in a group: 1, or 2 with 16-input scales. */
INLINE void tile_bytes(const uint8_t *u, size_t step, const struct scales *sc, const struct tile *t,
                       const struct ahead *next, int n_group, float *out, const int R, const int per)
{
    const unsigned char *d = sc->d;
    __m512 acc[TILE];
    const int8_t *q[TILE / 3];
    const float *f[TILE / 3];
    size_t ld_q = t->ld_q, ld_s = t->ld_s;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; i++) {
        q[i] = t->q8 + 3 * i * ld_q;
        f[i] = t->scale + 3 * i * ld_s;
    }
    for (int g = 0; g < n_group; g++, u += step, d += sc->step) {
        ahead_fetch(next, g);
#pragma GCC unroll 4
        for (int i = 0; i < (R + 2) / 3; i++) {
            KEEP_POINTER(q[i]);
            KEEP_POINTER(f[i]);
        }
#pragma GCC unroll 2
        for (int h = 0; h < per; h++) {
            __m512i sum[TILE];
#pragma GCC unroll 8
            for (int v = 0; v < 8 / per; v++) {
                __m512i w = _mm512_loadu_si512(u + 64 * (4 * h + v));
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
                    sum[r] = _mm512_dpbusd_epi32(v ? sum[r] : _mm512_setzero_si512(), w,
                                                 quad(q[r / 3] + r % 3 * ld_q + 16 * h + 4 * v));
            }
            const unsigned char *dh = d + (size_t)h * KERN_PANEL * sizeof(uint16_t);
            __m512 dw = half16((const uint16_t *)dh), mw = scale_m(sc, dh, dw);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const float *s = f[r / 3] + r % 3 * ld_s;
                acc[r] = scale_acc(acc[r], sum[r], dw, mw, s[0], s[per == 1 ? 1 : 2 + h]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < (R + 2) / 3; i++) {
            q[i] += KERN_GROUP;
            f[i] += 4;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        _mm512_store_ps(out + r * KERN_PANEL, acc[r]);
}

/* A few rows straight from a P4 panel: nibbles are unpacked in registers. */
INLINE void tile_nibbles(const uint8_t *u, const struct scales *sc, const struct tile *t, int n_group, float *out,
                         const int R)
{
    const unsigned char *d = sc->d;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 acc[4];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (int k = 0; k < n_group; k++, u += sc->step, d += sc->step) {
        __m512i sum[4][2];
        for (int i = 0; i < 320; i += 64)
            _mm_prefetch((const char *)u + AHEAD + i, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m512i x = _mm512_loadu_si512(u + 64 * v);
            __m512i lo = _mm512_and_si512(x, nibble), hi = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const int8_t *q = t->q8 + r * t->ld_q + k * KERN_GROUP + 4 * v;
                sum[r][0] = _mm512_dpbusd_epi32(v ? sum[r][0] : _mm512_setzero_si512(), lo, quad(q));
                sum[r][1] = _mm512_dpbusd_epi32(v ? sum[r][1] : _mm512_setzero_si512(), hi, quad(q + 16));
            }
        }
        __m512 dw = half16((const uint16_t *)d), mw = scale_m(sc, d, dw);
        for (int r = 0; r < R; r++)
            acc[r] = scale_acc(acc[r], _mm512_add_epi32(sum[r][0], sum[r][1]), dw, mw, t->scale[r * t->ld_s + 4 * k],
                               t->scale[r * t->ld_s + 4 * k + 1]);
    }
    for (int r = 0; r < R; r++)
        _mm512_store_ps(out + r * KERN_PANEL, acc[r]);
}

/* P4 groups, `step` apart, to bytes [n_group][8][64]. */
static void unpack_p4(const uint8_t *q, size_t step, int n_group, uint8_t *u)
{
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int g = 0; g < n_group; g++, q += step, u += 512)
        for (int v = 0; v < 256; v += 64) {
            __m512i x = _mm512_loadu_si512(q + v);
            _mm512_store_si512(u + v, _mm512_and_si512(x, nibble));
            _mm512_store_si512(u + 256 + v, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
        }
}

typedef void tile_fn(const uint8_t *u, size_t step, const struct scales *sc, const struct tile *t,
                     const struct ahead *next, int n_group, float *out);
typedef void nibbles_fn(const uint8_t *u, const struct scales *sc, const struct tile *t, int n_group, float *out);

#define TILE_BYTES(R, per)                                                                                         \
    static void tile_##per##_##R(const uint8_t *u, size_t step, const struct scales *sc, const struct tile *t,     \
                                 const struct ahead *next, int n_group, float *out)                                \
    {                                                                                                              \
        tile_bytes(u, step, sc, t, next, n_group, out, R, per);                                                    \
    }
#define TILE_NIBBLES(R)                                                                                               \
    static void nibbles_##R(const uint8_t *u, const struct scales *sc, const struct tile *t, int n_group, float *out) \
    {                                                                                                                 \
        tile_nibbles(u, sc, t, n_group, out, R);                                                                      \
    }
#define TILE_ALL(per)                                                                                    \
    TILE_BYTES(1, per) TILE_BYTES(2, per) TILE_BYTES(3, per) TILE_BYTES(4, per) TILE_BYTES(5, per)       \
    TILE_BYTES(6, per) TILE_BYTES(7, per) TILE_BYTES(8, per) TILE_BYTES(9, per) TILE_BYTES(10, per)      \
    TILE_BYTES(11, per) TILE_BYTES(12, per)
TILE_ALL(1)
TILE_ALL(2)
TILE_NIBBLES(1)
TILE_NIBBLES(2)
TILE_NIBBLES(3)
TILE_NIBBLES(4)

#define TILE_ROW(q)                                                                                            \
    {                                                                                                          \
        tile_##q##_1, tile_##q##_2, tile_##q##_3, tile_##q##_4, tile_##q##_5, tile_##q##_6, tile_##q##_7,      \
            tile_##q##_8, tile_##q##_9, tile_##q##_10, tile_##q##_11, tile_##q##_12                            \
    }
static tile_fn *const tiles[2][TILE] = { TILE_ROW(1), TILE_ROW(2) };
static nibbles_fn *const nibbles[4] = { nibbles_1, nibbles_2, nibbles_3, nibbles_4 };

static void mul_quant(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                      int n_row, float *acc, void *scratch)
{
    int per = KERN_GROUP / w->group;
    const uint8_t *u = kern_panel_at(w, panel, g0);
    struct scales sc = scales_at(w, u);
    size_t step = w->group_bytes;
    if (w->form == KERN_P4) {
        if (n_row <= 4) {
            struct tile t = tile_at(a, row0);
            nibbles[n_row - 1](u, &sc, &t, a->n_group, acc);
            return;
        }
        unpack_p4(u, step, a->n_group, scratch);
        u = scratch;
        step = 512;
    }
    /* n_row in equal tiles: 13 rows are 7 + 6, not 12 + 1 */
    int n_tile = (n_row + TILE - 1) / TILE;
    struct ahead next = { kern_panel_at(w, panel, g0) + w->panel_bytes, w->group_bytes };
    for (int i = 0, r = 0; i < n_tile; i++, next.panel = NULL) {
        int n = (n_row - r + n_tile - i - 1) / (n_tile - i);
        struct tile t = tile_at(a, row0 + r);
        tiles[per - 1][n - 1](u, step, &sc, &t, &next, a->n_group, acc + (size_t)r * KERN_PANEL);
        r += n;
    }
}

/* --- float forms --------------------------------------------------------------------------------- */

INLINE __m512 float_weight(const unsigned char *p, enum kern_form form, size_t i)
{
    if (form == KERN_PF32)
        return _mm512_load_ps((const float *)p + i * KERN_PANEL);
    if (form == KERN_PF16)
        return half16((const uint16_t *)p + i * KERN_PANEL);
    __m512i x = _mm512_load_si512(p + (i / 2) * 4 * KERN_PANEL);
    x = i & 1 ? _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(x, 16);
    return _mm512_castsi512_ps(x);
}

/* Even and odd inputs in sums of their own, so that a single row isn't held up by one chain. */
INLINE void tile_float(const unsigned char *p, enum kern_form form, const float *x, size_t ld, int n, float *out,
                       const int R)
{
    __m512 acc[8][2];
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int i = 0; i < n; i += 2) {
        __m512 w0 = float_weight(p, form, (size_t)i), w1 = float_weight(p, form, (size_t)i + 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            acc[r][0] = _mm512_fmadd_ps(w0, _mm512_set1_ps(x[r * ld + i]), acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(w1, _mm512_set1_ps(x[r * ld + i + 1]), acc[r][1]);
        }
    }
    for (int r = 0; r < R; r++)
        _mm512_store_ps(out + r * KERN_PANEL, _mm512_add_ps(acc[r][0], acc[r][1]));
}

INLINE void mul_float(const unsigned char *p, enum kern_form form, const float *x, int n_group, int n_row,
                      float *acc)
{
    size_t ld = (size_t)n_group * KERN_GROUP;
    int n = n_group * KERN_GROUP, r = 0;
    for (; r + 8 <= n_row; r += 8)
        tile_float(p, form, x + r * ld, ld, n, acc + (size_t)r * KERN_PANEL, 8);
    for (; r + 3 <= n_row; r += 3)
        tile_float(p, form, x + r * ld, ld, n, acc + (size_t)r * KERN_PANEL, 3);
    for (; r < n_row; r++)
        tile_float(p, form, x + r * ld, ld, n, acc + (size_t)r * KERN_PANEL, 1);
}

static void avx512_mul(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                       int n_row, float *acc, void *scratch)
{
    if (w->form == KERN_P4 || w->form == KERN_P8) {
        mul_quant(w, panel, g0, a, row0, n_row, acc, scratch);
        return;
    }
    const unsigned char *p = kern_panel_at(w, panel, g0);
    const float *x = a->f32 + (size_t)row0 * a->n_group * KERN_GROUP;
    if (w->form == KERN_PF32)
        mul_float(p, KERN_PF32, x, a->n_group, n_row, acc);
    else if (w->form == KERN_PF16)
        mul_float(p, KERN_PF16, x, a->n_group, n_row, acc);
    else
        mul_float(p, KERN_PBF16, x, a->n_group, n_row, acc);
}

static void avx512_mul_bf16(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                            int n_row, float *acc, void *scratch)
{
    if (w->form == KERN_PBF16)
        kern_mul_pbf16_avx512bf16(w, panel, g0, a, row0, n_row, acc);
    else
        avx512_mul(w, panel, g0, a, row0, n_row, acc, scratch);
}

/* --- exact f32 ------------------------------------------------------------------------------------ */

INLINE void tile_dot(const float *w, int ldw, const float *x, int ldx, int n, float *out, int ldo, const int W,
                     const int X)
{
    v16 s[4][4];
    for (int i = 0; i < X; i++)
        for (int j = 0; j < W; j++)
            s[i][j] = v16_set1(0);
    for (int k = 0; k < n; k += 16)
#pragma GCC unroll 4
        for (int i = 0; i < X; i++)
#pragma GCC unroll 4
            for (int j = 0; j < W; j++)
                s[i][j] = v16_fma(v16_load(w + (size_t)j * ldw + k), v16_load(x + (size_t)i * ldx + k), s[i][j]);
    for (int i = 0; i < X; i++)
        for (int j = 0; j < W; j++)
            out[(size_t)i * ldo + j] = v16_hsum(s[i][j]);
}

static void avx512_dot_f32(const float *w, int ldw, int n_w, const float *x, int ldx, int n_x, int n, float *out,
                           int ldo)
{
    int j = 0;
    for (; j + 4 <= n_w; j += 4) {
        const float *wj = w + (size_t)j * ldw;
        int i = 0;
        for (; i + 4 <= n_x; i += 4)
            tile_dot(wj, ldw, x + (size_t)i * ldx, ldx, n, out + (size_t)i * ldo + j, ldo, 4, 4);
        for (; i < n_x; i++)
            tile_dot(wj, ldw, x + (size_t)i * ldx, ldx, n, out + (size_t)i * ldo + j, ldo, 4, 1);
    }
    for (; j < n_w; j++)
        for (int i = 0; i < n_x; i++)
            tile_dot(w + (size_t)j * ldw, ldw, x + (size_t)i * ldx, ldx, n, out + (size_t)i * ldo + j, ldo, 1, 1);
}

void kern_linear_avx512(struct kern_linear_fns *f)
{
    rows_fill(f);
    f->mul = avx512_mul;
    f->dot_f32 = avx512_dot_f32;
    f->need[KERN_P8] = KERN_NEED_Q8; /* VNNI has no use for AVX2's 16-bit copy */
    if (__builtin_cpu_supports("avx512bf16")) {
        f->mul = avx512_mul_bf16;
        f->need[KERN_PBF16] = KERN_NEED_BF16;
    }
}
