/* avx512/linear.c - products of packed weights with AVX-512 and VNNI.
 *
 * vpdpbusd multiplies u8 weights by s8 activations and adds four products into 32 bits, exactly: one vector of the
 * panel against one broadcast of four activations. A tile is one panel by up to TILE rows, its sums and
 * accumulators in registers (12 rows: 12 + 12 of 32; 8 of a K type, which has two accumulators). A scale costs each row a
 * conversion and three operations. A few rows take P4, P5 and P6 as they lie in memory; for more they are unpacked once.
 */
#include <immintrin.h>

#include "kernels/avx512/linear.h"
#include "kernels/avx512/v16.h"
#include "kernels/isa_rows.h"

#define INLINE static inline __attribute__((always_inline))
#define TILE   12
#define TILE_K 8    /* of a K type */
#define DIRECT 4    /* most rows for which q is unpacked in registers */
#define BYTES  512  /* a group unpacked: 32 inputs of 16 outputs */
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

/* Where a tile reads its panel's weights and scales. */
struct source {
    const uint8_t *u; /* first group's q, as they lie in memory or unpacked */
    size_t u_step;
    const unsigned char *d; /* first group's scales */
    size_t d_step, m;       /* m: from d to m (of a K type: to mn) */
    bool has_m;
    float zero; /* without m: m = d * zero */
    int super0; /* of a K type: groups before the first that share D and M with it, */
    const uint16_t *head; /* and their D and M */
    size_t head_step;     /* in halves, to those of the next 256 inputs */
};

/* A scale of a group: what i and s_a are multiplied by. */
struct scale {
    __m512 d, m;
};

INLINE __m512 ints16(__m128i bytes, bool is_signed)
{
    return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

/* Scale k of the group whose scales are at d; m16: the M of its 256 inputs. */
INLINE struct scale scale_get(const struct source *s, const unsigned char *d, int k, __m512 m16, const bool super)
{
    const unsigned char *dk = d + (size_t)k * KERN_PANEL * (super ? 1 : sizeof(uint16_t));
    struct scale x = { .d = super ? ints16(_mm_loadu_si128((const __m128i *)dk), true) : half16((const uint16_t *)dk) };
    if (!s->has_m)
        x.m = _mm512_mul_ps(x.d, _mm512_set1_ps(s->zero));
    else if (super)
        x.m = _mm512_mul_ps(ints16(_mm_loadu_si128((const __m128i *)(d + s->m)), false), m16);
    else
        x.m = half16((const uint16_t *)(d + s->m));
    return x;
}

/* t += i * d * d_a: (float)i * sc is exact for a K type, as i * sc is. */
INLINE __m512 scale_add(__m512 t, __m512i i, __m512 d, float da)
{
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(i), d), _mm512_set1_ps(da), t);
}

/* Vector v of a group's bytes, from bytes (bits 8) or P4, P5, P6. */
INLINE __m512i bytes_get(const uint8_t *u, int v, const int bits)
{
    if (bits == 8)
        return _mm512_loadu_si512(u + 64 * v);
    if (bits == 6) {
        const __m512i upper = _mm512_set1_epi8((char)0xc0);
        const uint8_t *third = u + 3 * 64 * (v / 4);
        if (v % 4 < 3)
            return _mm512_and_si512(_mm512_loadu_si512(third + 64 * (v % 4)), _mm512_set1_epi8(63));
        __m512i x = _mm512_srli_epi16(_mm512_and_si512(_mm512_loadu_si512(third), upper), 2);
        x = _mm512_srli_epi16(_mm512_or_si512(x, _mm512_and_si512(_mm512_loadu_si512(third + 64), upper)), 2);
        return _mm512_srli_epi16(_mm512_or_si512(x, _mm512_and_si512(_mm512_loadu_si512(third + 128), upper)), 2);
    }
    __m512i x = _mm512_loadu_si512(u + 64 * (v % 4));
    x = _mm512_and_si512(v < 4 ? x : _mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
    if (bits == 4)
        return x;
    __m512i y = _mm512_loadu_si512(u + 256); /* bit v to bit 4 */
    y = v < 4 ? _mm512_slli_epi16(y, (unsigned)(4 - v)) : _mm512_srli_epi16(y, (unsigned)(v - 4));
    return _mm512_or_si512(x, _mm512_and_si512(y, _mm512_set1_epi8(0x10)));
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

/* R rows; `per` scales in a group: 1, or 2 with 16-input scales; q in bytes or `bits` bits as P4, P5, P6. super_m: a K
 * type has m in acc, not in its sum of 256 inputs. */
INLINE void tile_mul(const struct source *s, const struct tile *t, const struct ahead *next, int n_group, float *out,
                     const int R, const int per, const int bits, const bool super, const bool super_m)
{
    const uint8_t *u = s->u;
    const unsigned char *d = s->d;
    const uint16_t *head = s->head;
    __m512 acc[TILE], part[TILE], m16 = _mm512_setzero_ps();
    const int8_t *q[TILE / 3];
    const float *f[TILE / 3];
    size_t ld_q = t->ld_q, ld_s = t->ld_s;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        acc[r] = part[r] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < (R + 2) / 3; i++) {
        q[i] = t->q8 + 3 * i * ld_q;
        f[i] = t->scale + 3 * i * ld_s;
    }
    if (super && super_m)
        m16 = half16(head + KERN_PANEL);
    for (int g = 0, left = KERN_SUPER - s->super0; g < n_group; g++, u += s->u_step, d += s->d_step) {
        if (bits == 8)
            ahead_fetch(next, g);
        else
            for (size_t i = 0; i < s->u_step; i += 64)
                _mm_prefetch((const char *)u + AHEAD + i, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int i = 0; i < (R + 2) / 3; i++) {
            KEEP_POINTER(q[i]);
            KEEP_POINTER(f[i]);
        }
#pragma GCC unroll 2
        for (int k = 0; k < per; k++) {
            __m512i sum[TILE];
#pragma GCC unroll 8
            for (int v = 0; v < 8 / per; v++) {
                __m512i w = bytes_get(u, 4 * k + v, bits);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
                    sum[r] = _mm512_dpbusd_epi32(v ? sum[r] : _mm512_setzero_si512(), w,
                                                 quad(q[r / 3] + r % 3 * ld_q + 16 * k + 4 * v));
            }
            struct scale x = scale_get(s, d, k, m16, super);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const float *a = f[r / 3] + r % 3 * ld_s;
                __m512 sa = _mm512_set1_ps(a[per == 1 ? 1 : 2 + k]);
                __m512 *i_to = super ? &part[r] : &acc[r], *m_to = super && !super_m ? &part[r] : &acc[r];
                *i_to = scale_add(*i_to, sum[r], x.d, a[0]);
                *m_to = _mm512_fmadd_ps(sa, x.m, *m_to);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < (R + 2) / 3; i++) {
            q[i] += KERN_GROUP;
            f[i] += 4;
        }
        if (super && (--left == 0 || g == n_group - 1)) {
            __m512 d16 = half16(head);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                acc[r] = _mm512_fmadd_ps(part[r], d16, acc[r]);
                part[r] = _mm512_setzero_ps();
            }
            head += s->head_step;
            left = KERN_SUPER;
            if (super_m && g < n_group - 1)
                m16 = half16(head + KERN_PANEL);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        _mm512_store_ps(out + r * KERN_PANEL, acc[r]);
}

/* P4, P5 or P6 groups to bytes [n_group][8][64]. */
INLINE void unpack(const uint8_t *q, size_t step, int n_group, uint8_t *u, const int bits)
{
    for (int g = 0; g < n_group; g++, q += step, u += BYTES)
        for (int v = 0; v < 8; v++)
            _mm512_store_si512(u + 64 * v, bytes_get(q, v, bits));
}

typedef void tile_fn(const struct source *s, const struct tile *t, const struct ahead *next, int n_group, float *out);
#define TILE_FN(kind, R)                                                                                              \
    static void kind##_##R(const struct source *s, const struct tile *t, const struct ahead *next, int n_group, float *out) \
    {                                                                                                                 \
        tile_mul(s, t, next, n_group, out, R, kind##_ARGS);                                                                  \
    }
/* per, bits, super, super_m */
#define bytes_plain_ARGS 1, 8, false, false
#define bytes_m_ARGS 1, 8, true, true
#define bytes_k6_ARGS 2, 8, true, false
#define plain_4_ARGS 1, 4, false, false
#define plain_5_ARGS 1, 5, false, false
#define super_4_ARGS 1, 4, true, true
#define super_5_ARGS 1, 5, true, true
#define super_6_ARGS 2, 6, true, false
#define ROWS_4(kind)  TILE_FN(kind, 1) TILE_FN(kind, 2) TILE_FN(kind, 3) TILE_FN(kind, 4)
#define ROWS_8(kind)  ROWS_4(kind) TILE_FN(kind, 5) TILE_FN(kind, 6) TILE_FN(kind, 7) TILE_FN(kind, 8)
#define ROWS_12(kind) ROWS_8(kind) TILE_FN(kind, 9) TILE_FN(kind, 10) TILE_FN(kind, 11) TILE_FN(kind, 12)
ROWS_12(bytes_plain)
ROWS_8(bytes_m)
ROWS_8(bytes_k6)
ROWS_4(plain_4)
ROWS_4(plain_5)
ROWS_4(super_4)
ROWS_4(super_5)
ROWS_4(super_6)

#define LIST_4(kind)  kind##_1, kind##_2, kind##_3, kind##_4
#define LIST_8(kind)  LIST_4(kind), kind##_5, kind##_6, kind##_7, kind##_8
#define LIST_12(kind) LIST_8(kind), kind##_9, kind##_10, kind##_11, kind##_12
/* [form]: of a few rows directly (NULL: bytes already), of more from bytes. */
struct kind {
    tile_fn *direct[DIRECT], *bytes[TILE];
};
static const struct kind plain_kind[] = {
    [KERN_P4] = { { LIST_4(plain_4) }, { LIST_12(bytes_plain) } },
    [KERN_P5] = { { LIST_4(plain_5) }, { LIST_12(bytes_plain) } },
    [KERN_P8] = { { NULL }, { LIST_12(bytes_plain) } },
};
static const struct kind super_kind[] = {
    [KERN_P4] = { { LIST_4(super_4) }, { LIST_8(bytes_m) } },
    [KERN_P5] = { { LIST_4(super_5) }, { LIST_8(bytes_m) } },
    [KERN_P6] = { { LIST_4(super_6) }, { LIST_8(bytes_k6) } },
};

static void mul_quant(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                      int n_row, float *acc, void *scratch)
{
    const struct kind *kind = (w->super ? super_kind : plain_kind) + w->form;
    const unsigned char *group = kern_panel_at(w, panel, g0);
    struct source s = {
        .u = kern_group_q(w, group), .u_step = w->group_bytes, .d = group, .d_step = w->group_bytes, .has_m = w->has_m,
        .m = (size_t)(KERN_GROUP / w->group) * KERN_PANEL * (w->super ? 1 : sizeof(uint16_t)), .zero = (float)-w->zero,
        .super0 = g0 % KERN_SUPER, .head = w->super ? kern_head_d(w, kern_panel_head(w, panel), g0) : NULL,
        .head_step = KERN_PANEL * (w->has_m ? 2 : 1),
    };
    if (kind->direct[0] && n_row <= DIRECT) {
        struct tile t = tile_at(a, row0);
        kind->direct[n_row - 1](&s, &t, NULL, a->n_group, acc);
        return;
    }
    if (w->form != KERN_P8) {
        if (w->form == KERN_P4)
            unpack(s.u, s.u_step, a->n_group, scratch, 4);
        else if (w->form == KERN_P5)
            unpack(s.u, s.u_step, a->n_group, scratch, 5);
        else
            unpack(s.u, s.u_step, a->n_group, scratch, 6);
        s.u = scratch;
        s.u_step = BYTES;
    }
    /* n_row in equal tiles: 13 rows are 7 + 6, not 12 + 1 */
    int most = w->super ? TILE_K : TILE, n_tile = (n_row + most - 1) / most;
    struct ahead next = { group + w->panel_bytes, w->group_bytes };
    for (int i = 0, r = 0; i < n_tile; i++, next.panel = NULL) {
        int n = (n_row - r + n_tile - i - 1) / (n_tile - i);
        struct tile t = tile_at(a, row0 + r);
        kind->bytes[n - 1](&s, &t, &next, a->n_group, acc + (size_t)r * KERN_PANEL);
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
