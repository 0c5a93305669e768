/* attn.c - attention in AVX2 and FMA: the f32 form (pages in place, or f32 panels of the other dtypes), the scores, the
 * table. */
#include "kernels/avx2/attn_vec.h"

/* ---- s = q k ---------------------------------------------------------------------------------------------- */

/* n_row rows against 8 n_col slots from column j on. */
INLINE void qk_tile(const float *k, const unsigned char *next, int hd, const char *q, const int n_row, const int n_col,
                    const float *scale, float *s)
{
    size_t q_bytes = KERN_ATTN_Q_BYTES(hd);
    __m256 acc[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_setzero_ps();
    for (int d = 0; d < hd; d++, k += SLOTS, next += SLOTS * 4) {
        __m256 x[4];
        prefetch_line(next, 0);
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            x[c] = _mm256_load_ps(k + c * 8);
#pragma GCC unroll 6
        for (int r = 0; r < n_row; r++) {
            __m256 w = _mm256_broadcast_ss((const float *)(q + r * q_bytes) + d);
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++)
                acc[r][c] = _mm256_fmadd_ps(w, x[c], acc[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++) {
            __m256 y = scale ? _mm256_mul_ps(acc[r][c], _mm256_load_ps(scale + c * 8)) : acc[r][c];
            _mm256_store_ps(s + r * KERN_ATTN_BLOCK + c * 8, y);
        }
}

INLINE void qk_rows(const struct kern_attn_block *b, const char *q, const int n_row, const int n_col, float *s)
{
    for (int i = 0; i < b->n_page; i++)
        for (int j = 0; j < SLOTS; j += 8 * n_col)
            qk_tile((const float *)b->k[i] + j, b->k[i + 2] + j * 4, b->hd, q, n_row, n_col,
                    b->k_scale[i] ? b->k_scale[i] + j : NULL, s + i * SLOTS + j);
}

static void qk_f32(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    const char *at = q;
    for (; n_row >= 6; n_row -= 6, at += 6 * KERN_ATTN_Q_BYTES(b->hd), s += 6 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 6, 2, s);
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_Q_BYTES(b->hd), s += 3 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 3, 4, s);
    for (; n_row > 0; n_row--, at += KERN_ATTN_Q_BYTES(b->hd), s += KERN_ATTN_BLOCK)
        qk_rows(b, at, 1, 4, s);
}

/* ---- p ------------------------------------------------------------------------------------------------------ */

static void softmax_row(const struct kern_attn_block *b, float *s, int seen, float m, float *l, float *p)
{
    __m256 max = _mm256_set1_ps(m), sum = _mm256_setzero_ps();
    for (int i = 0; i < b->n_page; i++, s += SLOTS, p += SLOTS, seen -= SLOTS)
        for (int j = 0; j < SLOTS; j += 8) {
            __m256 e = exp2_v8(_mm256_sub_ps(_mm256_load_ps(s + j), max));
            if (seen < SLOTS)
                e = _mm256_and_ps(e, seen_mask(seen, j));
            sum = _mm256_add_ps(sum, e);
            _mm256_store_ps(s + j, e);
            if (b->v_scale[i])
                e = _mm256_mul_ps(e, _mm256_load_ps(b->v_scale[i] + j));
            _mm256_store_ps(p + j, e);
        }
    *l += sum_v8(sum);
}

static void softmax_f32(const struct kern_attn_block *b, float *s, int n_row, const int32_t *seen, float *m,
                        float *l, float *alpha, void *p)
{
    int n_slot = b->n_page * SLOTS;
    for (int r = 0; r < n_row; r++, s += KERN_ATTN_BLOCK, p = (char *)p + KERN_ATTN_P_BYTES) {
        alpha[r] = 1;
        if (seen[r] <= 0) {
            memset(p, 0, n_slot * sizeof(float));
            memset(s, 0, n_slot * sizeof(float));
            continue;
        }
        rescale_row(s, seen[r] < n_slot ? seen[r] : n_slot, &m[r], &alpha[r]);
        l[r] *= alpha[r];
        softmax_row(b, s, seen[r], m[r], &l[r], p);
    }
}

/* ---- o = o alpha + p v ------------------------------------------------------------------------------------------ */

/* n_row rows and 8 n_col columns from column d on. */
INLINE void pv_tile(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col, int d,
                    const float *alpha, float *o)
{
    __m256 acc[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_mul_ps(_mm256_loadu_ps(o + r * b->hd + d + c * 8), _mm256_set1_ps(alpha[r]));
    for (int i = 0; i < b->n_page; i++, p += SLOTS * sizeof(float)) {
        const float *v = (const float *)b->v[i] + d, *next = (const float *)b->v[i + 2] + d;
        for (int j = 0; j < SLOTS; j++, v += b->hd, next += b->hd) {
            __m256 x[4];
            prefetch_line(next, 0);
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++)
                x[c] = _mm256_load_ps(v + c * 8);
#pragma GCC unroll 6
            for (int r = 0; r < n_row; r++) {
                __m256 w = _mm256_broadcast_ss((const float *)(p + r * KERN_ATTN_P_BYTES) + j);
#pragma GCC unroll 4
                for (int c = 0; c < n_col; c++)
                    acc[r][c] = _mm256_fmadd_ps(w, x[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            _mm256_storeu_ps(o + r * b->hd + d + c * 8, acc[r][c]);
}

static void pv_f32(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (; n_row >= 6; n_row -= 6, at += 6 * KERN_ATTN_P_BYTES, alpha += 6, o += 6 * b->hd)
        for (int d = 0; d < b->hd; d += 16)
            pv_tile(b, at, 6, 2, d, alpha, o);
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_P_BYTES, alpha += 3, o += 3 * b->hd) {
        int d = 0;
        for (; d + 32 <= b->hd; d += 32)
            pv_tile(b, at, 3, 4, d, alpha, o);
        if (d < b->hd)
            pv_tile(b, at, 3, 2, d, alpha, o);
    }
    for (; n_row > 0; n_row--, at += KERN_ATTN_P_BYTES, alpha++, o += b->hd)
        for (int d = 0; d < b->hd; d += 16)
            pv_tile(b, at, 1, 2, d, alpha, o);
}

/* ---- scores ------------------------------------------------------------------------------------------------------- */

INLINE __m256 prob(const float *s, float m, float inv_l, int seen, int at, __m256 sum)
{
    __m256 e = exp2_v8(_mm256_sub_ps(_mm256_loadu_ps(s + at), _mm256_set1_ps(m)));
    if (seen < at + 8)
        e = _mm256_and_ps(e, seen_mask(seen, at));
    return _mm256_fmadd_ps(e, _mm256_set1_ps(inv_l), sum);
}

static void colsum(const float *s, int n_row, int n_slot, const int32_t *seen, const float *m, const float *inv_l,
                   float *acc)
{
    for (int j = 0; j < n_slot; j += 16) {
        __m256 a = _mm256_loadu_ps(acc + j), b = _mm256_loadu_ps(acc + j + 8);
        for (int r = 0; r < n_row; r++) {
            const float *sr = s + r * KERN_ATTN_BLOCK;
            a = prob(sr, m[r], inv_l[r], seen[r], j, a);
            b = prob(sr, m[r], inv_l[r], seen[r], j + 8, b);
        }
        _mm256_storeu_ps(acc + j, a);
        _mm256_storeu_ps(acc + j + 8, b);
    }
}

/* The scores of slots from n on, past the head's length, stay. */
static void probs(const float *e, int n_row, int n, const float *w, float decay, float *score)
{
    for (int j = 0; j < n; j += 8) {
        __m256 old = _mm256_loadu_ps(score + j), sum = _mm256_mul_ps(old, _mm256_set1_ps(decay));
        for (int r = 0; r < n_row; r++)
            sum = _mm256_fmadd_ps(_mm256_loadu_ps(e + r * KERN_ATTN_BLOCK + j), _mm256_set1_ps(w[r]), sum);
        _mm256_storeu_ps(score + j, _mm256_blendv_ps(old, sum, seen_mask(n, j)));
    }
}

static float lowest(const float *score, const int32_t *pos, int n, int32_t from, int32_t to)
{
    const __m256i first = _mm256_set1_epi32(from), last = _mm256_set1_epi32(to);
    const __m256 none = _mm256_set1_ps(INFINITY);
    __m256 low = none;
    for (int j = 0; j < n; j += 8) {
        __m256i p = _mm256_loadu_si256((const __m256i *)(pos + j));
        __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(first, p), _mm256_cmpgt_epi32(p, last));
        __m256 may = _mm256_andnot_ps(_mm256_castsi256_ps(out), seen_mask(n, j));
        low = _mm256_min_ps(low, _mm256_blendv_ps(none, _mm256_loadu_ps(score + j), may));
    }
    return min_v8(low);
}

static void scaled(const float *o, float f, int n, float *out)
{
    __m256 vf = _mm256_set1_ps(f);
    int i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(o + i), vf));
    for (; i < n; i++)
        out[i] = o[i] * f;
}

void kern_attn_avx2(struct kern_attn_fns *f)
{
    for (int t = 0; t < KERN_KV_DTYPES; t++) {
        struct kern_attn_form *form = &f->prefill[t];
        form->qk = qk_f32;
        form->softmax = softmax_f32;
        form->pv = pv_f32;
        f->decode[t] = *form;
    }
    kern_attn_avx2_decode(f);
    kern_attn_avx2_int16(f);
    f->colsum = colsum;
    f->probs = probs;
    f->lowest = lowest;
    f->scaled = scaled;
}
