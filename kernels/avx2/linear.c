/* avx2/linear.c - products of packed weights with AVX2, FMA and F16C.
 *
 * Without VNNI the cheap integer product is vpmaddubsw: u8 x s8, neighbours added, saturating to 16 bits. Small q
 * leave room to add several of them before widening: with |a| <= 127 a pair is at most 2 * 127 * q_max, so 8 pairs
 * fit for q <= 15, 4 for q <= 31, 2 for q <= 63. q up to 255 would saturate at once and goes through vpmaddwd on 16-bit
 * values. Whatever the way, the integer sums are exact, so the results equal scalar's bit for bit.
 *
 * A tile is one panel (16 outputs: two vectors of 8) by up to TILE rows. Weights are loaded once a tile and
 * activations broadcast from memory.
 */
#include <immintrin.h>

#include "kernels/avx2/v16.h"
#include "kernels/isa_rows.h"

#define TILE   4    /* rows of a tile */
#define AHEAD  2048 /* bytes: how far a single row prefetches its weights */
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

/* d and m of n_group groups in f32: sd, sm [n_group][per][16]. */
static void scales_f32(const struct kern_packed *w, const uint8_t *group, int n_group, float *sd, float *sm)
{
    int n = KERN_GROUP / w->group * KERN_PANEL;
    __m256 zero = _mm256_set1_ps((float)-w->zero);
    for (int g = 0; g < n_group; g++, group += w->group_bytes, sd += n, sm += n) {
        const uint16_t *d = kern_group_d(w, group, 0), *m = kern_group_m(w, group, 0);
        for (int i = 0; i < n; i += 8) {
            __m256 vd = half8(d + i);
            _mm256_store_ps(sd + i, vd);
            _mm256_store_ps(sm + i, w->has_m ? half8(m + i) : _mm256_mul_ps(vd, zero));
        }
    }
}

INLINE void tile_store(float *out, __m256 (*acc)[2], const int R)
{
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        _mm256_store_ps(out + r * KERN_PANEL, acc[r][0]);
        _mm256_store_ps(out + r * KERN_PANEL + 8, acc[r][1]);
    }
}

/* acc = fma(i * d_w, d_a, acc), fma(s_a, m_w, acc) for a row's two vectors. */
INLINE void scale_acc(__m256 acc[2], const __m256i i[2], const float *sd, const float *sm, float da, float sa)
{
    __m256 vd = _mm256_set1_ps(da), vs = _mm256_set1_ps(sa);
    for (int h = 0; h < 2; h++) {
        __m256 t = _mm256_mul_ps(_mm256_cvtepi32_ps(i[h]), _mm256_load_ps(sd + 8 * h));
        acc[h] = _mm256_fmadd_ps(t, vd, acc[h]);
        acc[h] = _mm256_fmadd_ps(vs, _mm256_load_ps(sm + 8 * h), acc[h]);
    }
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

/* u: [8][64] bytes a group, `step` from group to group. R rows; `per` scales in a group: 1, or 2 with 16-input scales; `run` vpmaddubsw results
 * added in 16 bits. */
INLINE void tile_bytes(const uint8_t *u, size_t step, const float *sd, const float *sm, const struct tile *t,
                       const struct ahead *next, int n_group, float *out, const int R, const int per, const int run)
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int runs = 8 / per / run; /* a checked division in the loop's head would keep gcc's sanitizers from unrolling it */
    __m256 acc[TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int g = 0; g < n_group; g++, u += step) {
        ahead_fetch(next, g);
#pragma GCC unroll 2
        for (int s = 0; s < per; s++, sd += KERN_PANEL, sm += KERN_PANEL) {
            __m256i sum[TILE][2];
#pragma GCC unroll 4
            for (int c = 0; c < runs; c++) {
                __m256i p[TILE][2];
#pragma GCC unroll 8
                for (int v = 0; v < run; v++) {
                    const uint8_t *at = u + 64 * (s * 4 + c * run + v);
                    __m256i w0 = _mm256_load_si256((const __m256i *)at);
                    __m256i w1 = _mm256_load_si256((const __m256i *)(at + 32));
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        __m256i b = quad(t->q8 + r * t->ld_q + g * KERN_GROUP + 16 * s + 4 * (c * run + v));
                        __m256i x0 = _mm256_maddubs_epi16(w0, b), x1 = _mm256_maddubs_epi16(w1, b);
                        p[r][0] = v ? _mm256_add_epi16(p[r][0], x0) : x0;
                        p[r][1] = v ? _mm256_add_epi16(p[r][1], x1) : x1;
                        KEEP(p[r][0]);
                        KEEP(p[r][1]);
                    }
                }
#pragma GCC unroll 6
                for (int r = 0; r < R; r++)
                    for (int h = 0; h < 2; h++) {
                        __m256i x = _mm256_madd_epi16(p[r][h], ones);
                        sum[r][h] = c ? _mm256_add_epi32(sum[r][h], x) : x;
                    }
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const float *f = t->scale + r * t->ld_s + 4 * g;
                scale_acc(acc[r], sum[r], sd, sm, f[0], f[per == 1 ? 1 : 2 + s]);
            }
        }
    }
    tile_store(out, acc, R);
}

/* q up to 255: even and odd bytes as 16-bit values against activations in the order 0 2 1 3. */
INLINE void tile_wide(const uint8_t *u, size_t step, const float *sd, const float *sm, const struct tile *t,
                      const struct ahead *next, int n_group, float *out, const int R)
{
    const __m256i low = _mm256_set1_epi16(0xff);
    __m256 acc[TILE][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int k = 0; k < n_group; k++, u += step) {
        __m256i sum[TILE][2];
        ahead_fetch(next, k);
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            __m256i w0 = _mm256_load_si256((const __m256i *)(u + 64 * v));
            __m256i w1 = _mm256_load_si256((const __m256i *)(u + 64 * v + 32));
            __m256i e0 = _mm256_and_si256(w0, low), o0 = _mm256_srli_epi16(w0, 8);
            __m256i e1 = _mm256_and_si256(w1, low), o1 = _mm256_srli_epi16(w1, 8);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const int16_t *x = t->q16 + r * t->ld_q + (k * 8 + v) * 4;
                __m256i be = pair16(x), bo = pair16(x + 2);
                __m256i p0 = _mm256_madd_epi16(e0, be), p1 = _mm256_madd_epi16(e1, be);
                sum[r][0] = v ? _mm256_add_epi32(sum[r][0], p0) : p0;
                sum[r][1] = v ? _mm256_add_epi32(sum[r][1], p1) : p1;
                sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(o0, bo));
                sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(o1, bo));
                KEEP(sum[r][0]);
                KEEP(sum[r][1]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const float *f = t->scale + r * t->ld_s + 4 * k;
            scale_acc(acc[r], sum[r], sd + k * KERN_PANEL, sm + k * KERN_PANEL, f[0], f[1]);
        }
    }
    tile_store(out, acc, R);
}

/* One row straight from a P4 panel: nibbles are unpacked in registers. */
static void row_p4(const struct kern_packed *w, int panel, int g0, const struct tile *t, int n_group, float *out)
{
    const uint8_t *u = kern_panel_at(w, panel, g0);
    const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
    const __m256 zero = _mm256_set1_ps((float)-w->zero);
    __m256 acc[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    for (int k = 0; k < n_group; k++, u += w->group_bytes) {
        const uint16_t *d = kern_group_d(w, u, 0), *m = kern_group_m(w, u, 0);
        __m256i p[2][2];
        for (int i = 0; i < 320; i += 64)
            _mm_prefetch((const char *)u + AHEAD + i, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m256i lo = quad(t->q8 + k * KERN_GROUP + 4 * v), hi = quad(t->q8 + k * KERN_GROUP + 16 + 4 * v);
            for (int h = 0; h < 2; h++) {
                __m256i x = _mm256_load_si256((const __m256i *)(u + 64 * v + 32 * h));
                __m256i a = _mm256_maddubs_epi16(_mm256_and_si256(x, nibble), lo);
                __m256i b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(x, 4), nibble), hi);
                p[0][h] = v ? _mm256_add_epi16(p[0][h], a) : a;
                p[1][h] = v ? _mm256_add_epi16(p[1][h], b) : b;
            }
        }
        __m256 da = _mm256_set1_ps(t->scale[4 * k]), sa = _mm256_set1_ps(t->scale[4 * k + 1]);
        for (int h = 0; h < 2; h++) {
            __m256i i = _mm256_madd_epi16(_mm256_add_epi16(p[0][h], p[1][h]), ones);
            __m256 dw = half8(d + 8 * h), mw = w->has_m ? half8(m + 8 * h) : _mm256_mul_ps(dw, zero);
            acc[h] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(i), dw), da, acc[h]);
            acc[h] = _mm256_fmadd_ps(sa, mw, acc[h]);
        }
    }
    _mm256_store_ps(out, acc[0]);
    _mm256_store_ps(out + 8, acc[1]);
}

/* P4 groups, `step` apart, to bytes [n_group][8][64]. */
static void unpack_p4(const uint8_t *q, size_t step, int n_group, uint8_t *u)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int g = 0; g < n_group; g++, q += step, u += 512)
        for (int v = 0; v < 256; v += 32) {
            __m256i x = _mm256_load_si256((const __m256i *)(q + v));
            _mm256_store_si256((__m256i *)(u + v), _mm256_and_si256(x, nibble));
            _mm256_store_si256((__m256i *)(u + 256 + v), _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble));
        }
}

#define TILE_ARGS                                                                                        \
    const uint8_t *u, size_t step, const float *sd, const float *sm, const struct tile *t,               \
        const struct ahead *next, int n_group, float *out
typedef void tile_fn(TILE_ARGS);
#define TILE_BYTES(bits, R, per, run)                                    \
    static void tile_q##bits##_##R(TILE_ARGS)                            \
    {                                                                    \
        tile_bytes(u, step, sd, sm, t, next, n_group, out, R, per, run); \
    }
#define TILE_WIDE(R)                                          \
    static void tile_q8_##R(TILE_ARGS)                        \
    {                                                         \
        tile_wide(u, step, sd, sm, t, next, n_group, out, R); \
    }
TILE_BYTES(4, 1, 1, 8)
TILE_BYTES(4, 2, 1, 8)
TILE_BYTES(4, 3, 1, 8)
TILE_BYTES(4, 4, 1, 8)
TILE_BYTES(5, 1, 1, 4)
TILE_BYTES(5, 2, 1, 4)
TILE_BYTES(5, 3, 1, 4)
TILE_BYTES(5, 4, 1, 4)
TILE_BYTES(6, 1, 2, 2)
TILE_BYTES(6, 2, 2, 2)
TILE_BYTES(6, 3, 2, 2)
TILE_BYTES(6, 4, 2, 2)
TILE_WIDE(1)
TILE_WIDE(2)
TILE_WIDE(3)
TILE_WIDE(4)

static tile_fn *const tiles[4][TILE] = {
    { tile_q4_1, tile_q4_2, tile_q4_3, tile_q4_4 },
    { tile_q5_1, tile_q5_2, tile_q5_3, tile_q5_4 },
    { tile_q6_1, tile_q6_2, tile_q6_3, tile_q6_4 },
    { tile_q8_1, tile_q8_2, tile_q8_3, tile_q8_4 },
};

static void mul_quant(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                      int n_row, float *acc, void *scratch)
{
    int kind = w->q_max <= 15 ? 0 : w->q_max <= 31 ? 1 : w->q_max <= 63 ? 2 : 3;
    size_t n_scale = (size_t)a->n_group * (size_t)(KERN_GROUP / w->group), step = w->group_bytes;
    const uint8_t *u = kern_panel_at(w, panel, g0);
    float *sd = scratch, *sm = sd + n_scale * KERN_PANEL;
    if (w->form == KERN_P4 && n_row == 1) {
        struct tile t = tile_at(a, row0);
        row_p4(w, panel, g0, &t, a->n_group, acc);
        return;
    }
    scales_f32(w, u, a->n_group, sd, sm);
    if (w->form == KERN_P4) {
        uint8_t *bytes = (uint8_t *)(sm + n_scale * KERN_PANEL);
        unpack_p4(u, step, a->n_group, bytes);
        u = bytes;
        step = 512;
    }
    struct ahead next = { kern_panel_at(w, panel, g0) + w->panel_bytes, w->group_bytes };
    for (int r = 0; r < n_row; r += TILE, next.panel = NULL) {
        int n = n_row - r < TILE ? n_row - r : TILE;
        struct tile t = tile_at(a, row0 + r);
        tiles[kind][n - 1](u, step, sd, sm, &t, &next, a->n_group, acc + (size_t)r * KERN_PANEL);
    }
}

/* --- float forms --------------------------------------------------------------------------------- */

/* The two vectors of weights of input i. For bf16, of inputs i and i + 1 of a pair: `odd` picks. */
INLINE __m256 float_weight(const unsigned char *p, enum kern_form form, size_t i, int h)
{
    if (form == KERN_PF32)
        return _mm256_load_ps((const float *)p + i * KERN_PANEL + 8 * h);
    if (form == KERN_PF16)
        return half8((const uint16_t *)p + i * KERN_PANEL + 8 * h);
    __m256i x = _mm256_load_si256((const __m256i *)(p + (i / 2) * 4 * KERN_PANEL + 32 * h));
    x = i & 1 ? _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)) : _mm256_slli_epi32(x, 16);
    return _mm256_castsi256_ps(x);
}

INLINE void tile_float(const unsigned char *p, enum kern_form form, const float *x, size_t ld, int n, float *out,
                       const int R)
{
    __m256 acc[6][2];
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            __m256 w0 = float_weight(p, form, (size_t)i + odd, 0), w1 = float_weight(p, form, (size_t)i + odd, 1);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                __m256 b = _mm256_set1_ps(x[r * ld + i + odd]);
                acc[r][0] = _mm256_fmadd_ps(w0, b, acc[r][0]);
                acc[r][1] = _mm256_fmadd_ps(w1, b, acc[r][1]);
            }
        }
    for (int r = 0; r < R; r++) {
        _mm256_store_ps(out + r * KERN_PANEL, acc[r][0]);
        _mm256_store_ps(out + r * KERN_PANEL + 8, acc[r][1]);
    }
}

INLINE void mul_float(const unsigned char *p, enum kern_form form, const float *x, int n_group, int n_row,
                      float *acc)
{
    size_t ld = (size_t)n_group * KERN_GROUP;
    int n = n_group * KERN_GROUP, r = 0;
    for (; r + 6 <= n_row; r += 6)
        tile_float(p, form, x + r * ld, ld, n, acc + (size_t)r * KERN_PANEL, 6);
    for (; r + 3 <= n_row; r += 3)
        tile_float(p, form, x + r * ld, ld, n, acc + (size_t)r * KERN_PANEL, 3);
    for (; r < n_row; r++)
        tile_float(p, form, x + r * ld, ld, n, acc + (size_t)r * KERN_PANEL, 1);
}

static void avx2_mul(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0, int n_row,
                     float *acc, void *scratch)
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

/* --- exact f32 ------------------------------------------------------------------------------------ */

INLINE void tile_dot(const float *w, int ldw, const float *x, int ldx, int n, float *out, int ldo, const int W,
                     const int X)
{
    v16 s[3][2];
    for (int i = 0; i < X; i++)
        for (int j = 0; j < W; j++)
            s[i][j] = v16_set1(0);
    for (int k = 0; k < n; k += 16)
#pragma GCC unroll 3
        for (int i = 0; i < X; i++)
#pragma GCC unroll 2
            for (int j = 0; j < W; j++)
                s[i][j] = v16_fma(v16_load(w + (size_t)j * ldw + k), v16_load(x + (size_t)i * ldx + k), s[i][j]);
    for (int i = 0; i < X; i++)
        for (int j = 0; j < W; j++)
            out[(size_t)i * ldo + j] = v16_hsum(s[i][j]);
}

static void avx2_dot_f32(const float *w, int ldw, int n_w, const float *x, int ldx, int n_x, int n, float *out,
                         int ldo)
{
    for (int j = 0; j < n_w; j += 2) {
        const float *wj = w + (size_t)j * ldw;
        bool two = j + 1 < n_w;
        int i = 0;
        for (; two && i + 3 <= n_x; i += 3)
            tile_dot(wj, ldw, x + (size_t)i * ldx, ldx, n, out + (size_t)i * ldo + j, ldo, 2, 3);
        for (; i < n_x; i++)
            if (two)
                tile_dot(wj, ldw, x + (size_t)i * ldx, ldx, n, out + (size_t)i * ldo + j, ldo, 2, 1);
            else
                tile_dot(wj, ldw, x + (size_t)i * ldx, ldx, n, out + (size_t)i * ldo + j, ldo, 1, 1);
    }
}

void kern_linear_avx2(struct kern_linear_fns *f)
{
    rows_fill(f);
    f->mul = avx2_mul;
    f->dot_f32 = avx2_dot_f32;
    f->need[KERN_P8] |= KERN_NEED_Q16;
}
