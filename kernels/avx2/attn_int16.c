/* attn_int16.c - prefill attention in AVX2 for 16-bit and int8 pages: products of 16-bit integers (VPMADDWD gives twice the
 * products of an FMA), sums in 32 bits, everything between in f32.
 *
 * q and bf16 keys are scaled so that their norm is 2^15 - 1: by Cauchy-Schwarz no dot product leaves 31 bits, whatever
 * the head's size, and an element keeps about 15 - log2(hd)/2 bits below the vector's typical one. int8 keys are
 * exact. p times its value's scale is rounded to 13 bits below what it can be at most in its row IN ITS PAIR OF PAGES (a
 * pair of small probabilities beside a sink's large one loses nothing), bf16 values to 12 bits below their slot's
 * largest, int8 values are exact: 64 slots of such products fit 31 bits, and a pair's sum goes on in f32 times what
 * was divided out.
 *
 * A pair (64 slots, counted from the block's start) is worked on as a whole: q k, softmax, p v. Its K and V, the rows'
 * logits and their outputs stay in L1 meanwhile.
 */
#include "kernels/avx2/attn_vec.h"

#define NORM  32767.0f
#define P_MAX 8191.0f
#define V_MAX 4095.0f /* 64 * 8191 * 4095 < 2^31 */

#define PAIR  (2 * SLOTS) /* slots of a pair of pages */
#define COLS  16          /* slots of a K tile, columns of a V tile: two vectors of products */
#define ROWS  KERN_ATTN_ROWS

/* ---- panels ------------------------------------------------------------------------------------------------------- */

/* What a pair's panels hold before K16 [4][hd/2][16 slots][2] and V16 [hd/16][32][16 columns][2].
 *
 * p16 = p * v_scale / (the largest v_scale so far) * P_MAX: "so far", because what a row gets must not depend on slots
 * that it does not see. */
struct pair {
    float k_scale[PAIR], v_scale[PAIR];
    float up[PAIR], down[PAIR]; /* P_MAX / largest of v_scale[0..j], and its inverse */
    float p_scale[PAIR];        /* v_scale[j] * up[last]: for rows that see the whole pair */
};

INLINE unsigned char *pair_k(const void *panel)
{
    return (unsigned char *)(uintptr_t)panel + sizeof(struct pair);
}

INLINE unsigned char *pair_v(const void *panel, int hd)
{
    return pair_k(panel) + (size_t)hd * PAIR * 2;
}

INLINE size_t pair_bytes(int hd)
{
    return sizeof(struct pair) + (size_t)hd * PAIR * 4;
}

INLINE struct pair *pair_of(const void *panels, int i, int hd)
{
    return (struct pair *)((char *)(uintptr_t)panels + (size_t)i * pair_bytes(hd));
}

static size_t block_bytes(int hd)
{
    return KERN_ATTN_PAGES / 2 * pair_bytes(hd);
}

/* The order of 8 pairs of slots in V16, which is the one that VPACKSSDW leaves p16 in. */
INLINE int pair_order(int j)
{
    return (j & ~7) | (j & 1) | (j & 2) << 1 | (j & 4) >> 1;
}

INLINE __m256 even_bf16(__m256i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

INLINE __m256 odd_bf16(__m256i x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}

/* bf16 pairs times scale, as pairs of int16. */
INLINE __m256i round_pairs(__m256i x, __m256 even_scale, __m256 odd_scale)
{
    __m256i even = _mm256_cvtps_epi32(_mm256_mul_ps(even_bf16(x), even_scale));
    __m256i odd = _mm256_cvtps_epi32(_mm256_mul_ps(odd_bf16(x), odd_scale));
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
}

/* The tables over the pair's slots, once `half` (0 or 1) of v_scale is there; the other half of a pair that begins counts as
 * zero. */
static void put_v_scale(struct pair *t, int half)
{
    if (half == 0)
        memset(t->v_scale + SLOTS, 0, SLOTS * sizeof(float));
    float largest = 1e-30f;
    for (int j = 0; j < PAIR; j++) {
        largest = t->v_scale[j] > largest ? t->v_scale[j] : largest;
        t->up[j] = P_MAX / largest;
        t->down[j] = largest / P_MAX;
    }
    for (int j = 0; j < PAIR; j++)
        t->p_scale[j] = t->v_scale[j] * t->up[PAIR - 1];
}

static void panel_k_bf16(const __m256i *k, int hd, int half, struct pair *t)
{
    int n = hd / 2 * SLOTS / 8; /* vectors of 8 pairs */
    __m256 inv[4], sum[4];
    __m256i *to = (__m256i *)pair_k(t) + half * n;

    for (int j = 0; j < 4; j++)
        sum[j] = _mm256_setzero_ps();
    for (int i = 0; i < n; i += 4)
        for (int j = 0; j < 4; j++) {
            __m256i x = _mm256_load_si256(k + i + j);
            sum[j] = _mm256_fmadd_ps(even_bf16(x), even_bf16(x), sum[j]);
            sum[j] = _mm256_fmadd_ps(odd_bf16(x), odd_bf16(x), sum[j]);
        }
    for (int j = 0; j < 4; j++) {
        __m256 norm = _mm256_max_ps(_mm256_sqrt_ps(sum[j]), _mm256_set1_ps(1e-30f));
        inv[j] = _mm256_div_ps(_mm256_set1_ps(NORM), norm);
        _mm256_store_ps(t->k_scale + half * SLOTS + j * 8, _mm256_div_ps(norm, _mm256_set1_ps(NORM)));
    }
    for (int i = 0; i < n / 4; i++)
        for (int j = 0; j < 4; j++)
            _mm256_store_si256(to + j / 2 * (n / 2) + i * 2 + j % 2,
                               round_pairs(_mm256_load_si256(k + i * 4 + j), inv[j], inv[j]));
}

static void panel_v_bf16(const __m256i *v, int hd, int half, struct pair *t)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256i *to = (__m256i *)pair_v(t, hd);
    float *v_scale = t->v_scale + half * SLOTS;

    for (int j = 0; j < SLOTS / 2; j++, v += hd / 8) {
        __m256 even = _mm256_setzero_ps(), odd = even;
        for (int i = 0; i < hd / 8; i++) {
            __m256i x = _mm256_load_si256(v + i);
            even = _mm256_max_ps(even, _mm256_and_ps(even_bf16(x), magnitude));
            odd = _mm256_max_ps(odd, _mm256_and_ps(odd_bf16(x), magnitude));
        }
        float e = max_v8(even), o = max_v8(odd);
        v_scale[2 * j] = e / V_MAX;
        v_scale[2 * j + 1] = o / V_MAX;
        even = _mm256_set1_ps(e > 1e-30f ? V_MAX / e : 0);
        odd = _mm256_set1_ps(o > 1e-30f ? V_MAX / o : 0);
        int at = 2 * pair_order(half * SLOTS / 2 + j);
        for (int i = 0; i < hd / 8; i++)
            _mm256_store_si256(to + i / 2 * PAIR + at + i % 2, round_pairs(_mm256_load_si256(v + i), even, odd));
    }
}

static void panel_bf16(const struct kern_page_layout *pl, const unsigned char *page, int i, void *panels)
{
    struct pair *t = pair_of(panels, i / 2, pl->hd);
    panel_k_bf16((const __m256i *)(page + pl->k), pl->hd, i % 2, t);
    panel_v_bf16((const __m256i *)(page + pl->v), pl->hd, i % 2, t);
    put_v_scale(t, i % 2);
}

static void panel_int8(const struct kern_page_layout *pl, const unsigned char *page, int i_page, void *panels)
{
    struct pair *t = pair_of(panels, i_page / 2, pl->hd);
    int half = i_page % 2;
    const unsigned char *k = page + pl->k, *v = page + pl->v;
    size_t tile = (size_t)pl->hd * COLS * 2;
    unsigned char *k16 = pair_k(t) + 2 * half * tile, *v16 = pair_v(t, pl->hd);
    const __m256i offset = _mm256_set1_epi8((char)0x80);

    /* A dword holds 4 dimensions of a slot: two pairs. */
    for (int d = 0; d < pl->hd / 4; d++)
        for (int j = 0; j < 4; j++) {
            __m256i x = _mm256_load_si256((const __m256i *)(k + d * SLOTS * 4 + j * 32));
            x = _mm256_xor_si256(x, offset);
            __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8); /* 0 2, 1 3 */
            unsigned char *to = k16 + j / 2 * tile + (size_t)d * 4 * COLS * 2 + j % 2 * 32;
            _mm256_store_si256((__m256i *)to, _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa));
            _mm256_store_si256((__m256i *)(to + COLS * 4), _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa));
        }
    for (int j = 0; j < SLOTS; j += 2) {
        unsigned char *to = v16 + (size_t)pair_order((half * SLOTS + j) / 2) * COLS * 4;
        for (int d = 0; d < pl->hd; d += 8) {
            __m128i a = _mm_loadl_epi64((const __m128i *)(v + j * pl->hd + d));
            __m128i b = _mm_loadl_epi64((const __m128i *)(v + (j + 1) * pl->hd + d));
            __m256i x = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
            _mm256_store_si256((__m256i *)(to + (size_t)(d / 16) * PAIR * COLS * 2 + d % 16 * 4), x);
        }
    }
    memcpy(t->k_scale + half * SLOTS, page + pl->k_scale, SLOTS * sizeof(float));
    memcpy(t->v_scale + half * SLOTS, page + pl->v_scale, SLOTS * sizeof(float));
    put_v_scale(t, half);
}

/* ---- s = q k ------------------------------------------------------------------------------------------------------ */

/* hd int16, then what turns their products with keys into logits once those are scaled. */
static void pack_q(const float *q, int head_dim, int hd, float scale, void *out)
{
    __m256 sum[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    int16_t *to = out;

    for (int d = 0; d < hd; d += 16)
        for (int i = 0; i < 2; i++) {
            __m256 x = load_to(q, d + 8 * i, head_dim);
            sum[i] = _mm256_fmadd_ps(x, x, sum[i]);
        }
    float norm = sqrtf(sum_v8(_mm256_add_ps(sum[0], sum[1])));
    __m256 inv = _mm256_set1_ps(norm > 0 ? NORM / norm : 0);
    for (int d = 0; d < hd; d += 16) {
        __m256i x = _mm256_cvtps_epi32(_mm256_mul_ps(load_to(q, d, head_dim), inv));
        __m256i y = _mm256_cvtps_epi32(_mm256_mul_ps(load_to(q, d + 8, head_dim), inv));
        x = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, y), _MM_SHUFFLE(3, 1, 2, 0));
        _mm256_store_si256((__m256i *)(to + d), x);
    }
    *(float *)(to + hd) = norm / NORM * scale;
}

/* n_row rows (6 at most) against the 16 slots of a K tile; rows of s are `stride` floats apart. */
INLINE void qk_tile(const unsigned char *k, const float *k_scale, const int hd, const char *q, const int n_row, float *s,
                    const int stride)
{
    const size_t q_bytes = KERN_ATTN_Q_BYTES(hd);
    __m256i acc[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int d = 0; d < hd / 2; d++) {
        __m256i x0 = _mm256_load_si256((const __m256i *)(k + d * 64));
        __m256i x1 = _mm256_load_si256((const __m256i *)(k + d * 64 + 32));
#pragma GCC unroll 6
        for (int r = 0; r < n_row; r++) {
            __m256i w = _mm256_set1_epi32(((const int32_t *)(q + r * q_bytes))[d]);
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w, x0));
            IN_REGISTER(acc[r][0]);
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w, x1));
            IN_REGISTER(acc[r][1]);
        }
    }
    __m256 k0 = _mm256_load_ps(k_scale), k1 = _mm256_load_ps(k_scale + 8);
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++) {
        __m256 scale = _mm256_broadcast_ss((const float *)(q + r * q_bytes + (size_t)hd * 2));
        _mm256_store_ps(s + r * stride, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][0]), _mm256_mul_ps(scale, k0)));
        _mm256_store_ps(s + r * stride + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][1]), _mm256_mul_ps(scale, k1)));
    }
}

/* The first `n` slots of a pair, rounded up to a tile. */
INLINE void qk_pair(const struct pair *t, int hd, int n, const char *q, const int n_row, float *s, const int stride)
{
    for (int j = 0; j < n && j < PAIR; j += COLS) {
        const unsigned char *k = pair_k(t) + (size_t)j * hd * 2;
        if (hd == 64) /* a constant lets the compiler unroll, and address rows without registers */
            qk_tile(k, t->k_scale + j, 64, q, n_row, s + j, stride);
        else if (hd == 128)
            qk_tile(k, t->k_scale + j, 128, q, n_row, s + j, stride);
        else
            qk_tile(k, t->k_scale + j, hd, q, n_row, s + j, stride);
    }
}

/* A function for each number of rows that the registers take; the rest is theirs. */
#define QK_ROWS(n)                                                                                                   \
    static void qk_rows_##n(const struct pair *t, int hd, int slots, const char *q, float *s, int stride)            \
    {                                                                                                                \
        if (stride == PAIR)                                                                                          \
            qk_pair(t, hd, slots, q, n, s, PAIR);                                                                    \
        else                                                                                                         \
            qk_pair(t, hd, slots, q, n, s, KERN_ATTN_BLOCK);                                                         \
    }
QK_ROWS(1)
QK_ROWS(2)
QK_ROWS(3)
QK_ROWS(4)
QK_ROWS(5)
QK_ROWS(6)

static void qk_rows(const struct pair *t, int hd, int slots, const char *q, int n_row, float *s, int stride)
{
    static void (*const rows[])(const struct pair *, int, int, const char *, float *, int) = { qk_rows_1, qk_rows_2,
                                                                                               qk_rows_3, qk_rows_4,
                                                                                               qk_rows_5, qk_rows_6 };
    rows[n_row - 1](t, hd, slots, q, s, stride);
}

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

static void qk(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    for (int r = 0; r < n_row; r += 6)
        for (int i = 0; i < b->n_page; i += 2)
            qk_rows(pair_of(b->k[0], i / 2, b->hd), b->hd, (b->n_page - i) * SLOTS, (const char *)q + r * KERN_ATTN_Q_BYTES(b->hd),
                    min_int(n_row - r, 6), s + r * KERN_ATTN_BLOCK + i * SLOTS, KERN_ATTN_BLOCK);
}

/* ---- p ------------------------------------------------------------------------------------------------------------- */

/* What a tile of rows is in the middle of. */
struct tile {
    float s[ROWS][PAIR];
    int16_t p[ROWS][PAIR];
    _Alignas(32) float max[ROWS], share[ROWS], alpha[ROWS]; /* see softmax_8 */
};

/* The maxima of 8 vectors, one a lane. */
INLINE __m256 max_of_8(const __m256 *x)
{
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_max_ps(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 2; i++) { /* lanes 0-3: x0 x1 x2 x3 of the low half, 4-7 of the high half */
        __m256 lo = _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], _MM_SHUFFLE(1, 0, 1, 0));
        __m256 hi = _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], _MM_SHUFFLE(3, 2, 3, 2));
        b[i] = _mm256_max_ps(lo, hi);
    }
    return _mm256_max_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

/* Their sums. */
INLINE __m256 sum_of_8(const __m256 *x)
{
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_hadd_ps(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        b[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

/* The larger of each lane over the slots that a row sees, n of the pair's. */
INLINE __m256 row_max(const float *s, int n)
{
    const __m256 none = _mm256_set1_ps(-INFINITY);
    __m256 a, b;
    if (n >= PAIR) {
        a = _mm256_max_ps(_mm256_load_ps(s), _mm256_load_ps(s + 16));
        b = _mm256_max_ps(_mm256_load_ps(s + 8), _mm256_load_ps(s + 24));
        a = _mm256_max_ps(a, _mm256_max_ps(_mm256_load_ps(s + 32), _mm256_load_ps(s + 48)));
        b = _mm256_max_ps(b, _mm256_max_ps(_mm256_load_ps(s + 40), _mm256_load_ps(s + 56)));
        return _mm256_max_ps(a, b);
    }
    a = none;
    for (int j = 0; j < n; j += 8)
        a = _mm256_max_ps(a, _mm256_blendv_ps(none, _mm256_load_ps(s + j), seen_mask(n, j)));
    return a;
}

/* 8 floats and 8 more to int16, in the order of pair_order. */
INLINE void put_p16(__m256 e0, __m256 e1, int16_t *p)
{
    _mm256_store_si256((__m256i *)p, _mm256_packs_epi32(_mm256_cvtps_epi32(e0), _mm256_cvtps_epi32(e1)));
}

/* p16 of a row relative to its maximum in the pair; returns the vector sum of 2^(s - max). */
INLINE __m256 row_p16(const float *s, float max, const struct pair *t, int16_t *p)
{
    __m256 m = _mm256_set1_ps(max), sum[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
#pragma GCC unroll 4
    for (int j = 0; j < PAIR; j += 16) {
        __m256 e0 = exp2_v8_short(_mm256_sub_ps(_mm256_load_ps(s + j), m));
        __m256 e1 = exp2_v8_short(_mm256_sub_ps(_mm256_load_ps(s + j + 8), m));
        sum[0] = _mm256_add_ps(sum[0], e0);
        sum[1] = _mm256_add_ps(sum[1], e1);
        put_p16(_mm256_mul_ps(e0, _mm256_load_ps(t->p_scale + j)), _mm256_mul_ps(e1, _mm256_load_ps(t->p_scale + j + 8)),
                p + j);
    }
    return _mm256_add_ps(sum[0], sum[1]);
}

/* The same when it sees the first n < 64 slots. What it does not see has no part in it. */
static __m256 row_p16_part(const float *s, int n, float max, const struct pair *t, int16_t *p)
{
    __m256 m = _mm256_set1_ps(max), sum[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    __m256 up = _mm256_set1_ps(n > 0 ? t->up[n - 1] : 0);
    for (int j = 0; j < PAIR; j += 16) {
        __m256 e[2] = { _mm256_setzero_ps(), _mm256_setzero_ps() };
        for (int i = 0; i < 2 && j + 8 * i < n; i++) {
            int at = j + 8 * i;
            __m256 x = exp2_v8_short(_mm256_sub_ps(_mm256_load_ps(s + at), m));
            x = _mm256_and_ps(x, seen_mask(n, at));
            sum[i] = _mm256_add_ps(sum[i], x);
            e[i] = _mm256_mul_ps(x, _mm256_mul_ps(_mm256_load_ps(t->v_scale + at), up));
        }
        put_p16(e[0], e[1], p + j);
    }
    return _mm256_add_ps(sum[0], sum[1]);
}

/* Row r's, and that of the 7 after it: what a unit of p16 is worth beside the pair's largest p. */
INLINE __m256 p16_unit(const struct pair *t, int r, int n_row, const int32_t *seen)
{
    _Alignas(32) float unit[8];
    if (seen[r] >= PAIR) /* and so the rows after it */
        return _mm256_set1_ps(t->down[PAIR - 1]);
    for (int i = 0; i < 8; i++) {
        int n = min_int(seen[min_int(r + i, n_row - 1)], PAIR);
        unit[i] = n > 0 ? t->down[n - 1] : 0;
    }
    return _mm256_load_ps(unit);
}

/* 8 rows from row r on; those past the last repeat it. Row i sees seen[i] slots of the pair. Writes p16, what a row's products
 * with it are to be multiplied by (share), and what everything before is (alpha); returns for which rows that isn't 1. */
INLINE unsigned softmax_8(struct tile *w, const struct pair *t, int r, int n_row, const int32_t *seen, float *m, float *l)
{
    __m256 x[8];
    for (int i = 0; i < 8; i++) {
        int k = min_int(r + i, n_row - 1);
        x[i] = row_max(w->s[k], seen[k]);
    }
    __m256 max = max_of_8(x), old = _mm256_load_ps(m + r), now = _mm256_max_ps(old, max);
    _mm256_store_ps(w->max + r, max);
    for (int i = 0; i < 8; i++) {
        int k = min_int(r + i, n_row - 1);
        x[i] = seen[k] >= PAIR ? row_p16(w->s[k], w->max[r + i], t, w->p[k])
                               : row_p16_part(w->s[k], seen[k], w->max[r + i], t, w->p[k]);
    }
    /* Both clamp what is -INFINITY, or NaN when nothing was seen yet: a tiny factor of zero then. */
    __m256 share = exp2_v8(_mm256_sub_ps(max, now)), alpha = exp2_v8(_mm256_sub_ps(old, now));
    _mm256_store_ps(m + r, now);
    _mm256_store_ps(l + r, _mm256_fmadd_ps(sum_of_8(x), share, _mm256_mul_ps(_mm256_load_ps(l + r), alpha)));
    _mm256_store_ps(w->alpha + r, alpha);
    _mm256_store_ps(w->share + r, _mm256_mul_ps(share, p16_unit(t, r, n_row, seen)));
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(now, old, _CMP_GT_OQ)) << r;
}

/* ---- o = o alpha + p v ---------------------------------------------------------------------------------------------- */

/* n_row rows and 16 columns over the first n_pair pairs of slots: the integer sums go to o times their rows' scales. */
INLINE void pv_tile(const unsigned char *v, int n_pair, const int16_t *p, const float *scale, const int n_row, float *o,
                    int hd)
{
    __m256i acc[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (const int16_t *end = p + 2 * n_pair; p < end;) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++, p += 2, v += COLS * 4) {
            __m256i x0 = _mm256_load_si256((const __m256i *)v), x1 = _mm256_load_si256((const __m256i *)(v + 32));
#pragma GCC unroll 6
            for (int r = 0; r < n_row; r++) {
                __m256i w = _mm256_set1_epi32(*(const int32_t *)(p + r * PAIR));
                acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w, x0));
                IN_REGISTER(acc[r][0]);
                acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w, x1));
                IN_REGISTER(acc[r][1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++) {
        __m256 f = _mm256_broadcast_ss(scale + r);
        float *or = o + r * hd;
        _mm256_storeu_ps(or, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][0]), f, _mm256_loadu_ps(or)));
        _mm256_storeu_ps(or + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][1]), f, _mm256_loadu_ps(or + 8)));
    }
}

#define PV_ROWS(n)                                                                                                     \
    static void pv_rows_##n(const struct pair *t, int hd, int n_pair, const int16_t *p, const float *scale, float *o)  \
    {                                                                                                                  \
        const unsigned char *v = pair_v(t, hd);                                                                        \
        for (int d = 0; d < hd; d += COLS, v += PAIR * COLS * 2)                                                       \
            pv_tile(v, n_pair, p, scale, n, o + d, hd);                                                                \
    }
PV_ROWS(1)
PV_ROWS(2)
PV_ROWS(3)
PV_ROWS(4)
PV_ROWS(5)
PV_ROWS(6)

/* `slots`: what the last of the rows sees of the pair. */
static void pv_rows(const struct pair *t, int hd, int slots, const int16_t *p, const float *scale, int n_row, float *o)
{
    static void (*const rows[])(const struct pair *, int, int, const int16_t *, const float *, float *) = {
        pv_rows_1, pv_rows_2, pv_rows_3, pv_rows_4, pv_rows_5, pv_rows_6
    };
    int n = min_int(slots, PAIR);
    rows[n_row - 1](t, hd, (n + COLS - 1) / COLS * (COLS / 2), p, scale, o);
}

/* ---- all of it ------------------------------------------------------------------------------------------------------- */

/* The rows whose bit is set, times their alpha. */
static void rescale(unsigned rows, const float *alpha, int hd, float *o)
{
    for (; rows; rows &= rows - 1) {
        int r = __builtin_ctz(rows);
        __m256 a = _mm256_set1_ps(alpha[r]);
        for (int d = 0; d < hd; d += 8)
            _mm256_storeu_ps(o + r * hd + d, _mm256_mul_ps(_mm256_loadu_ps(o + r * hd + d), a));
    }
}

/* seen[r]: what row r sees from the pair's start; not less than the row before it. m, l: as vectors of 8. */
static void attend_pair(struct tile *w, const struct pair *t, int hd, const char *q, int n_row, const int32_t *seen, float *m,
                        float *l, float *o)
{
    unsigned grew = 0;

    for (int r = 0, n; r < n_row; r += n) {
        n = min_int(n_row - r, 6);
        qk_rows(t, hd, seen[r + n - 1], q + r * KERN_ATTN_Q_BYTES(hd), n, w->s[r], PAIR);
    }
    for (int r = 0; r < n_row; r += 8)
        grew |= softmax_8(w, t, r, n_row, seen, m, l);
    rescale(grew & ((1u << n_row) - 1), w->alpha, hd, o);
    for (int r = 0, n; r < n_row; r += n) {
        n = min_int(n_row - r, 6);
        pv_rows(t, hd, seen[r + n - 1], w->p[r], w->share + r, n, o + r * hd);
    }
}

static void attend(const struct kern_attn_block *b, const void *q, int n_row, const int32_t *seen, float *m, float *l,
                   float *o, void *work)
{
    _Alignas(32) float vm[ROWS], vl[ROWS];
    int32_t left[ROWS];

    for (int r = 0; r < ROWS; r++) {
        vm[r] = m[min_int(r, n_row - 1)];
        vl[r] = l[min_int(r, n_row - 1)];
    }
    memcpy(left, seen, (size_t)n_row * sizeof *left);
    for (int i = 0; 2 * i < b->n_page && left[n_row - 1] > 0; i++) {
        attend_pair(work, pair_of(b->k[0], i, b->hd), b->hd, q, n_row, left, vm, vl, o);
        for (int r = 0; r < n_row; r++)
            left[r] -= PAIR;
    }
    memcpy(m, vm, (size_t)n_row * sizeof *m);
    memcpy(l, vl, (size_t)n_row * sizeof *l);
}

void kern_attn_avx2_int16(struct kern_attn_fns *f)
{
    const struct kern_attn_form form = { .panel = panel_bf16, .block_bytes = block_bytes, .pack_q = pack_q, .qk = qk, .attend = attend };
    _Static_assert(sizeof(struct tile) <= KERN_ATTN_WORK_BYTES, "room for a tile");
    _Static_assert(sizeof(struct pair) + 16 * PAIR * 4 <= 2 * KERN_ATTN_PANEL_BYTES(16), "room for a pair");
    _Static_assert(sizeof(struct pair) % 64 == 0, "aligned tiles");
    f->prefill[KERN_KV_BF16] = f->prefill[KERN_KV_INT8] = form;
    f->prefill[KERN_KV_INT8].panel = panel_int8;
}
