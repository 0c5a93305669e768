/* avx2/linear.c - products of packed weights with AVX2, FMA and F16C.
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
#include <immintrin.h>

#include "kernels/avx2/v16.h"
#include "kernels/isa_rows.h"

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

typedef void tile_fn(const struct source *s, const struct tile *t, int n_group, float *out);
#define TILE_FN(kind, R, name, how)                                                                               \
    static void tile_##kind##_##R##_##name(const struct source *s, const struct tile *t, int n_group, float *out) \
    {                                                                                                             \
        TILE_##kind(R, how);                                                                                      \
    }
#define TILE_q4(R, how) tile_packed(s, t, n_group, out, R, 4, how, PLAIN)
#define TILE_q4w(R, how) tile_packed(s, t, n_group, out, R, 4, how, WHOLE)
#define TILE_k4(R, how) tile_packed(s, t, n_group, out, R, 4, how, SUPER)
#define TILE_q5(R, how) tile_packed(s, t, n_group, out, R, 5, how, PLAIN)
#define TILE_k5(R, how) tile_packed(s, t, n_group, out, R, 5, how, SUPER)
#define TILE_k6(R, how) tile_packed(s, t, n_group, out, R, 6, how, SUPER)
#define TILE_q8(R, how) tile_wide(s, t, n_group, out, R, how)
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
TILE_KIND(q4)
TILE_KIND(q4w)
TILE_KIND(k4)
TILE_KIND(q5)
TILE_KIND(k5)
TILE_KIND(k6)
TILE_KIND(q8)
enum kind { Q4, Q4_WHOLE, K4, Q5, K5, K6, Q8, KINDS };
static tile_fn *const tiles[KINDS][3][TILE] = { TILES(q4), TILES(q4w), TILES(k4), TILES(q5), TILES(k5), TILES(k6), TILES(q8) };
static const enum kind plain_kind[] = { [KERN_P4] = Q4, [KERN_P5] = Q5, [KERN_P8] = Q8 };
static const enum kind super_kind[] = { [KERN_P4] = K4, [KERN_P5] = K5, [KERN_P6] = K6 };

/* D and M of the groups g0 .. as floats. */
static void head_get(const struct kern_packed *w, const unsigned char *head, int g0, int n_group, float *to)
{
    for (int g = g0 & -KERN_SUPER; g < g0 + n_group; g += KERN_SUPER, to += 2 * KERN_PANEL)
        for (int i = 0; i < (w->has_m ? 2 : 1) * KERN_PANEL; i += 8)
            _mm256_store_ps(to + i, half8(kern_head_d(w, head, g) + i));
}

/* Rows in tiles as even as can be: one of a row or two costs nearly as much as a full one. */
static void mul_quant(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                      int n_row, float *acc, void *scratch)
{
    enum kind kind = w->super ? super_kind[w->form] : plain_kind[w->form];
    const unsigned char *head = kern_panel_head(w, panel);
    size_t per = (size_t)(KERN_GROUP / w->group), n_scale = (size_t)a->n_group * per * KERN_PANEL;
    size_t d_bytes = w->super ? 1 : sizeof(uint16_t);
    const unsigned char *group = kern_panel_at(w, panel, g0);
    struct source s = { .u = kern_group_q(w, group), .scales = group, .step = w->group_bytes, .zero = (float)-w->zero,
                        .m = w->has_m ? per * KERN_PANEL * d_bytes : 0, .super0 = g0 % KERN_SUPER, .bytes = scratch };
    s.sd = (float *)(s.bytes + (size_t)a->n_group * BYTES);
    s.sm = s.sd + n_scale;
    s.head = s.sm + n_scale;
    if (w->super)
        head_get(w, head, g0, a->n_group, s.head);
    if (kind == Q4) {
        memcpy(&s.unit, head, sizeof s.unit);
        if (s.unit != 0 && n_row > 2) /* for a row or two the integers cost more than they save */
            kind = Q4_WHOLE;
    }
    s.next = group + w->panel_bytes;
    s.next_step = w->group_bytes;
    int left = (n_row + TILE - 1) / TILE;
    enum how how = left == 1 ? DIRECT : FIRST;
    for (int r = 0, n; r < n_row; r += n, left--) {
        struct tile t = tile_at(a, row0 + r);
        n = (n_row - r + left - 1) / left;
        tiles[kind][how][n - 1](&s, &t, a->n_group, acc + (size_t)r * KERN_PANEL);
        if (how == LATER)
            s.next = NULL;
        how = LATER;
    }
}

/* --- float forms --------------------------------------------------------------------------------- */

/* Vector h of the weights of input 2 * pair + odd. */
INLINE __m256 float_weight(const unsigned char *p, enum kern_form form, size_t pair, const int odd, int h)
{
    size_t i = 2 * pair + odd;
    if (form == KERN_PF32)
        return _mm256_load_ps((const float *)p + i * KERN_PANEL + 8 * h);
    if (form == KERN_PF16)
        return half8((const uint16_t *)p + i * KERN_PANEL + 8 * h);
    __m256i x = _mm256_load_si256((const __m256i *)(p + pair * 4 * KERN_PANEL + 32 * h));
    x = odd ? _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)) : _mm256_slli_epi32(x, 16);
    return _mm256_castsi256_ps(x);
}

/* acc += a pair's weights times the inputs of R rows. */
INLINE void float_step(__m256 (*acc)[2], const unsigned char *p, enum kern_form form, const float *x, size_t ld,
                       size_t pair, const int R)
{
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
        __m256 w0 = float_weight(p, form, pair, odd, 0), w1 = float_weight(p, form, pair, odd, 1);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            __m256 b = _mm256_set1_ps(x[r * ld + 2 * pair + odd]);
            acc[r][0] = _mm256_fmadd_ps(w0, b, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(w1, b, acc[r][1]);
        }
    }
}

/* An output is the sum over the first half of every group's inputs plus that over the second halves, for any number of
 * rows: so that a few rows needn't wait for their own sums. */
#define HALF_PAIRS (KERN_GROUP / 4)

INLINE void float_half(__m256 (*acc)[2], const unsigned char *p, enum kern_form form, const float *x, size_t ld,
                       size_t pair, const int R)
{
#pragma GCC unroll 8
    for (size_t i = 0; i < HALF_PAIRS; i++)
        float_step(acc, p, form, x, ld, pair + i, R);
}

INLINE void float_store(float *out, __m256 (*acc)[2], const int R, const bool add)
{
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++, out += 8)
            _mm256_store_ps(out, add ? _mm256_add_ps(_mm256_load_ps(out), acc[r][h]) : acc[r][h]);
}

INLINE void tile_float(const unsigned char *p, enum kern_form form, const float *x, size_t n, float *out, const int R)
{
    for (int part = 0; part < 2; part++) {
        __m256 acc[6][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
            acc[r][0] = acc[r][1] = _mm256_setzero_ps();
        for (size_t i = part ? HALF_PAIRS : 0; i < n / 2; i += 2 * HALF_PAIRS)
            float_half(acc, p, form, x, n, i, R);
        float_store(out, acc, R, part == 1);
    }
}

/* Few rows: both halves at once. */
INLINE void tile_float_few(const unsigned char *p, enum kern_form form, const float *x, size_t n, float *out,
                           const int R)
{
    __m256 a[3][2], b[3][2];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
        a[r][0] = a[r][1] = b[r][0] = b[r][1] = _mm256_setzero_ps();
    for (size_t i = 0; i < n / 2; i += 2 * HALF_PAIRS) {
        float_half(a, p, form, x, n, i, R);
        float_half(b, p, form, x, n, i + HALF_PAIRS, R);
    }
    float_store(out, a, R, false);
    float_store(out, b, R, true);
}

INLINE void mul_float(const unsigned char *p, enum kern_form form, const float *x, int n_group, int n_row,
                      float *acc)
{
    size_t n = (size_t)n_group * KERN_GROUP;
    int r = 0;
    for (; r + 6 <= n_row; r += 6)
        tile_float(p, form, x + r * n, n, acc + (size_t)r * KERN_PANEL, 6);
    for (; r + 3 <= n_row; r += 3)
        tile_float_few(p, form, x + r * n, n, acc + (size_t)r * KERN_PANEL, 3);
    if (r + 2 == n_row)
        tile_float_few(p, form, x + r * n, n, acc + (size_t)r * KERN_PANEL, 2);
    else if (r < n_row)
        tile_float_few(p, form, x + r * n, n, acc + (size_t)r * KERN_PANEL, 1);
}

static void avx2_mul(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0, int n_row,
                     float *acc, void *scratch)
{
    if (kern_form_quant(w->form)) {
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
