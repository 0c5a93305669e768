/* attn_int16.c - prefill attention in AVX2 for 16-bit and int8 pages: products of 16-bit integers (VPMADDWD gives twice the
 * products of an FMA), sums in 32 bits, everything between in f32.
 *
 * q and bf16 keys are scaled so that their norm is 2^15 - 1: by Cauchy-Schwarz no dot product leaves 31 bits, whatever
 * the head's size, and an element keeps about 15 - log2(hd)/2 bits below the vector's typical one. int8 keys are
 * exact. p times its value's scale is rounded to 14 bits below what it can be at most in its row IN ITS PAGE (a page
 * of small probabilities beside a sink's large one loses nothing), bf16 values to 12 bits below their slot's
 * largest, int8 values are exact: 32 slots of such products fit 31 bits, and a page's sum goes on in f32 times what
 * was divided out.
 *
 * Panel: K16 [hd/2][32][2], k_scale [32] f32; V16 [16][hd][2], struct v_tail.
 */
#include "kernels/avx2/attn_vec.h"

#define NORM  32767.0f
#define P_MAX 16383.0f
#define V_MAX 4095.0f /* 32 * 16383 * 4095 < 2^31 */

/* What follows a panel's K16 or V16, and a row of 256 p16 or hd q16. */
INLINE float *after(const void *p, int hd)
{
    return (float *)((char *)(uintptr_t)p + (size_t)hd * SLOTS * 2);
}

INLINE float *row_page_scale(void *p_row)
{
    return (float *)((char *)p_row + KERN_ATTN_BLOCK * 2);
}

static void pack_q(const float *q, int head_dim, int hd, float scale, void *out)
{
    __m256 sum = _mm256_setzero_ps();
    int16_t *to = out;

    for (int d = 0; d < hd; d += 8)
        sum = _mm256_fmadd_ps(load_to(q, d, head_dim), load_to(q, d, head_dim), sum);
    float norm = sqrtf(sum_v8(sum));
    __m256 inv = _mm256_set1_ps(norm > 0 ? NORM / norm : 0);
    for (int d = 0; d < hd; d += 8) {
        __m256i x = _mm256_cvtps_epi32(_mm256_mul_ps(load_to(q, d, head_dim), inv));
        __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_store_si128((__m128i *)(to + d), w);
    }
    *(float *)(to + hd) = norm / NORM * scale;
}

/* ---- panels ------------------------------------------------------------------------------------------------------- */

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

/* A panel's tables over the slots of its page, behind V16. p16 = p * v_scale / (the largest v_scale so far) * P_MAX: "so
 * far", because what a row gets must not depend on slots that it does not see. */
struct v_tail {
    float v_scale[SLOTS];
    float up[SLOTS], down[SLOTS]; /* P_MAX / largest of v_scale[0..j], and its inverse */
    float p_scale[SLOTS];         /* v_scale[j] * up[last]: for rows that see the whole page */
};

static void put_v_scale(const float *v_scale, struct v_tail *tail)
{
    float largest = 1e-30f;
    for (int j = 0; j < SLOTS; j++) {
        largest = v_scale[j] > largest ? v_scale[j] : largest;
        tail->v_scale[j] = v_scale[j];
        tail->up[j] = P_MAX / largest;
        tail->down[j] = largest / P_MAX;
    }
    for (int j = 0; j < SLOTS; j++)
        tail->p_scale[j] = v_scale[j] * tail->up[SLOTS - 1];
}

static void panel_bf16(const struct kern_page_layout *pl, const unsigned char *page, void *panel)
{
    const __m256i *k = (const __m256i *)(page + pl->k), *v = (const __m256i *)(page + pl->v);
    __m256i *k16 = panel, *v16 = (__m256i *)((char *)panel + KERN_ATTN_PANEL_BYTES(pl->hd) / 2);
    int n = pl->hd / 2 * SLOTS / 8; /* vectors of 8 pairs in K, and in V */
    __m256 inv[4], sum[4];
    float v_scale[SLOTS];
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));

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
        _mm256_store_ps(after(panel, pl->hd) + j * 8, _mm256_div_ps(norm, _mm256_set1_ps(NORM)));
    }
    for (int i = 0; i < n; i += 4)
        for (int j = 0; j < 4; j++)
            _mm256_store_si256(k16 + i + j, round_pairs(_mm256_load_si256(k + i + j), inv[j], inv[j]));

    for (int j = 0; j < SLOTS / 2; j++, v += pl->hd / 8, v16 += pl->hd / 8) {
        __m256 even = _mm256_setzero_ps(), odd = even;
        for (int i = 0; i < pl->hd / 8; i++) {
            __m256i x = _mm256_load_si256(v + i);
            even = _mm256_max_ps(even, _mm256_and_ps(even_bf16(x), magnitude));
            odd = _mm256_max_ps(odd, _mm256_and_ps(odd_bf16(x), magnitude));
        }
        float e = max_v8(even), o = max_v8(odd);
        v_scale[2 * j] = e / V_MAX;
        v_scale[2 * j + 1] = o / V_MAX;
        even = _mm256_set1_ps(e > 1e-30f ? V_MAX / e : 0);
        odd = _mm256_set1_ps(o > 1e-30f ? V_MAX / o : 0);
        for (int i = 0; i < pl->hd / 8; i++)
            _mm256_store_si256(v16 + i, round_pairs(_mm256_load_si256(v + i), even, odd));
    }
    put_v_scale(v_scale, (struct v_tail *)v16);
}

static void panel_int8(const struct kern_page_layout *pl, const unsigned char *page, void *panel)
{
    const unsigned char *k = page + pl->k, *v = page + pl->v;
    unsigned char *k16 = panel, *v16 = k16 + KERN_ATTN_PANEL_BYTES(pl->hd) / 2;
    const __m256i offset = _mm256_set1_epi8((char)0x80);

    /* A dword holds 4 dimensions of a slot: two pairs. */
    for (int d = 0; d < pl->hd / 4; d++)
        for (int j = 0; j < SLOTS * 4; j += 32) {
            __m256i x = _mm256_xor_si256(_mm256_load_si256((const __m256i *)(k + d * SLOTS * 4 + j)), offset);
            __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8); /* 0 2, 1 3 */
            __m256i low = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
            __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
            _mm256_store_si256((__m256i *)(k16 + (2 * d) * SLOTS * 4 + j), low);
            _mm256_store_si256((__m256i *)(k16 + (2 * d + 1) * SLOTS * 4 + j), high);
        }
    memcpy(after(panel, pl->hd), page + pl->k_scale, SLOTS * sizeof(float));
    for (int j = 0; j < SLOTS; j += 2)
        for (int d = 0; d < pl->hd; d += 8) {
            __m128i a = _mm_loadl_epi64((const __m128i *)(v + j * pl->hd + d));
            __m128i b = _mm_loadl_epi64((const __m128i *)(v + (j + 1) * pl->hd + d));
            __m256i pair = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
            _mm256_store_si256((__m256i *)(v16 + ((size_t)j / 2 * pl->hd + d) * 4), pair);
        }
    put_v_scale((const float *)(page + pl->v_scale), (struct v_tail *)after(v16, pl->hd));
}

/* ---- s = q k ------------------------------------------------------------------------------------------------------ */

/* n_row rows against 8 n_col slots. */
INLINE void qk_tile(const unsigned char *k, const float *k_scale, int hd, const char *q, const int n_row,
                    const int n_col, float *s)
{
    size_t q_bytes = KERN_ATTN_Q_BYTES(hd);
    __m256i acc[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_setzero_si256();
    for (int d = 0; d < hd / 2; d++, k += SLOTS * 4) {
        __m256i x[4];
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            x[c] = _mm256_load_si256((const __m256i *)(k + c * 32));
#pragma GCC unroll 6
        for (int r = 0; r < n_row; r++) {
            __m256i w = _mm256_set1_epi32(((const int32_t *)(q + r * q_bytes))[d]);
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++) {
                acc[r][c] = _mm256_add_epi32(acc[r][c], _mm256_madd_epi16(w, x[c]));
                IN_REGISTER(acc[r][c]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++) {
        __m256 scale = _mm256_broadcast_ss((const float *)(q + r * q_bytes + (size_t)hd * 2));
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++) {
            __m256 y = _mm256_mul_ps(scale, _mm256_load_ps(k_scale + c * 8));
            _mm256_store_ps(s + r * KERN_ATTN_BLOCK + c * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][c]), y));
        }
    }
}

INLINE void qk_rows(const struct kern_attn_block *b, const char *q, const int n_row, const int n_col, float *s)
{
    for (int i = 0; i < b->n_page; i++)
        for (int j = 0; j < SLOTS; j += 8 * n_col)
            qk_tile(b->k[i] + j * 4, after(b->k[i], b->hd) + j, b->hd, q, n_row, n_col, s + i * SLOTS + j);
}

static void qk(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    const char *at = q;
    for (; n_row >= 6; n_row -= 6, at += 6 * KERN_ATTN_Q_BYTES(b->hd), s += 6 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 6, 2, s);
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_Q_BYTES(b->hd), s += 3 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 3, 4, s);
    for (; n_row > 0; n_row--, at += KERN_ATTN_Q_BYTES(b->hd), s += KERN_ATTN_BLOCK)
        qk_rows(b, at, 1, 4, s);
}

/* ---- p ------------------------------------------------------------------------------------------------------------- */

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

/* Page maxima of a row over the slots that it sees, one a lane; -INFINITY where it sees none. */
INLINE __m256 page_max(const float *s, int n_page, int seen)
{
    const __m256 none = _mm256_set1_ps(-INFINITY);
    __m256 max[KERN_ATTN_PAGES];
    for (int i = 0; i < KERN_ATTN_PAGES; i++) {
        const float *sp = s + i * SLOTS;
        int n = seen - i * SLOTS;
        max[i] = none;
        if (i >= n_page || n <= 0)
            continue;
        __m256 x[4];
        for (int j = 0; j < 4; j++) {
            x[j] = _mm256_load_ps(sp + j * 8);
            if (n < SLOTS)
                x[j] = _mm256_blendv_ps(none, x[j], seen_mask(n, j * 8));
        }
        max[i] = _mm256_max_ps(_mm256_max_ps(x[0], x[1]), _mm256_max_ps(x[2], x[3]));
    }
    return max_of_8(max);
}

INLINE void put_p16(__m256 e0, __m256 e1, int16_t *p)
{
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(e0), _mm256_cvtps_epi32(e1));
    _mm256_store_si256((__m256i *)p, _mm256_permute4x64_epi64(w, _MM_SHUFFLE(3, 1, 2, 0)));
}

/* p16 of a page that the row sees whole, relative to its own maximum; returns the vector sums of 2^(s - max). */
INLINE __m256 page_p16(const float *s, float max, const struct v_tail *v, int16_t *p)
{
    __m256 e[4], m = _mm256_set1_ps(max);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        e[j] = exp2_v8_short(_mm256_sub_ps(_mm256_load_ps(s + j * 8), m));
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += 2)
        put_p16(_mm256_mul_ps(e[j], _mm256_load_ps(v->p_scale + j * 8)),
                _mm256_mul_ps(e[j + 1], _mm256_load_ps(v->p_scale + j * 8 + 8)), p + j * 8);
    return _mm256_add_ps(_mm256_add_ps(e[0], e[1]), _mm256_add_ps(e[2], e[3]));
}

/* The same when it sees the first n < 32 slots. What it does not see has no part in it. */
static __m256 page_p16_part(const float *s, int n, float max, const struct v_tail *v, int16_t *p)
{
    __m256 e[4], m = _mm256_set1_ps(max), up = _mm256_set1_ps(v->up[n - 1]);
    for (int j = 0; j < 4; j++)
        e[j] = _mm256_and_ps(exp2_v8_short(_mm256_sub_ps(_mm256_load_ps(s + j * 8), m)), seen_mask(n, j * 8));
    for (int j = 0; j < 4; j += 2)
        put_p16(_mm256_mul_ps(e[j], _mm256_mul_ps(_mm256_load_ps(v->v_scale + j * 8), up)),
                _mm256_mul_ps(e[j + 1], _mm256_mul_ps(_mm256_load_ps(v->v_scale + j * 8 + 8), up)), p + j * 8);
    return _mm256_add_ps(_mm256_add_ps(e[0], e[1]), _mm256_add_ps(e[2], e[3]));
}

static void softmax_row(const struct kern_attn_block *b, const float *s, int seen, float *m, float *l, float *alpha,
                        int16_t *p)
{
    _Alignas(32) float max[KERN_ATTN_PAGES], share[KERN_ATTN_PAGES];
    __m256 page = page_max(s, b->n_page, seen), sum = _mm256_setzero_ps();
    float old = *m, most = max_v8(page);

    *m = most > old ? most : old;
    *alpha = old == -INFINITY ? 0 : exp2_f32(old - *m);
    _mm256_store_ps(max, page);
    _mm256_store_ps(share, exp2_v8(_mm256_sub_ps(page, _mm256_set1_ps(*m)))); /* 2^(page's max - m); 0 if unseen */
    for (int i = 0; i < b->n_page; i++, p += SLOTS) {
        const struct v_tail *v = (const struct v_tail *)after(b->v[i], b->hd);
        int n = seen - i * SLOTS;
        if (n <= 0) {
            memset(p, 0, SLOTS * sizeof *p);
            share[i] = 0;
            continue;
        }
        __m256 x = n < SLOTS ? page_p16_part(s + i * SLOTS, n, max[i], v, p) : page_p16(s + i * SLOTS, max[i], v, p);
        sum = _mm256_fmadd_ps(x, _mm256_set1_ps(share[i]), sum);
        share[i] *= v->down[n < SLOTS ? n - 1 : SLOTS - 1];
    }
    *l = *l * *alpha + sum_v8(sum);
    memcpy(row_page_scale(p - b->n_page * SLOTS), share, sizeof share);
}

static void softmax(const struct kern_attn_block *b, const float *s, int n_row, const int32_t *seen, float *m, float *l,
                    float *alpha, void *p)
{
    for (int r = 0; r < n_row; r++, s += KERN_ATTN_BLOCK, p = (char *)p + KERN_ATTN_P_BYTES) {
        alpha[r] = 1;
        if (seen[r] > 0) {
            softmax_row(b, s, seen[r], &m[r], &l[r], &alpha[r], p);
            continue;
        }
        memset(p, 0, KERN_ATTN_BLOCK * sizeof(int16_t));
        memset(row_page_scale(p), 0, KERN_ATTN_PAGES * sizeof(float));
    }
}

/* ---- o = o alpha + p v ---------------------------------------------------------------------------------------------- */

/* One page, n_row rows and 16 columns: the integer sums go to o times their row's and page's scale. */
INLINE void pv_tile(const unsigned char *v, int hd, const char *p, const char *scale, const int n_row, float *o)
{
    __m256i acc[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (int j = 0; j < SLOTS / 2; j++, v += (size_t)hd * 4) {
        __m256i x0 = _mm256_load_si256((const __m256i *)v), x1 = _mm256_load_si256((const __m256i *)(v + 32));
#pragma GCC unroll 6
        for (int r = 0; r < n_row; r++) {
            __m256i w = _mm256_set1_epi32(((const int32_t *)(p + r * KERN_ATTN_P_BYTES))[j]);
            acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w, x0));
            IN_REGISTER(acc[r][0]);
            acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w, x1));
            IN_REGISTER(acc[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++) {
        __m256 f = _mm256_broadcast_ss((const float *)(scale + r * KERN_ATTN_P_BYTES));
        float *or = o + r * hd;
        _mm256_storeu_ps(or, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][0]), f, _mm256_loadu_ps(or)));
        _mm256_storeu_ps(or + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][1]), f, _mm256_loadu_ps(or + 8)));
    }
}

INLINE void pv_rows(const struct kern_attn_block *b, const char *p, const int n_row, float *o)
{
    const char *scale = (const char *)row_page_scale((void *)(uintptr_t)p);
    for (int i = 0; i < b->n_page; i++, p += SLOTS * 2, scale += sizeof(float))
        for (int d = 0; d < b->hd; d += 16)
            pv_tile(b->v[i] + (size_t)d * 4, b->hd, p, scale, n_row, o + d);
}

static void pv(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (int r = 0; r < n_row; r++)
        for (int d = 0; d < b->hd; d += 8)
            _mm256_storeu_ps(o + r * b->hd + d,
                             _mm256_mul_ps(_mm256_loadu_ps(o + r * b->hd + d), _mm256_set1_ps(alpha[r])));
    for (; n_row >= 6; n_row -= 6, at += 6 * KERN_ATTN_P_BYTES, o += 6 * b->hd)
        pv_rows(b, at, 6, o);
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_P_BYTES, o += 3 * b->hd)
        pv_rows(b, at, 3, o);
    for (; n_row > 0; n_row--, at += KERN_ATTN_P_BYTES, o += b->hd)
        pv_rows(b, at, 1, o);
}

void kern_attn_avx2_int16(struct kern_attn_fns *f)
{
    const struct kern_attn_form form = { panel_bf16, pack_q, qk, softmax, pv };
    f->prefill[KERN_KV_BF16] = f->prefill[KERN_KV_INT8] = form;
    f->prefill[KERN_KV_INT8].panel = panel_int8;
}
