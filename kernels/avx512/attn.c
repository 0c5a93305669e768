/* attn.c - attention in AVX-512: the f32 form, the scores, and the table. A CPU without BF16 keeps AVX2's 16-bit prefill. */
#include "kernels/avx512/attn_vec.h"


/* ---- s = q k ---------------------------------------------------------------------------------------------- */

INLINE void qk_rows(const struct kern_attn_block *b, const char *q, const int n_row, float *s)
{
    size_t q_bytes = KERN_ATTN_Q_BYTES(b->hd);
    for (int i = 0; i < b->n_page; i++) {
        const float *k = (const float *)b->k[i];
        const unsigned char *next = b->k[i + 2];
        __m512 acc[KERN_ATTN_TILE][2];
#pragma GCC unroll 12
        for (int r = 0; r < n_row; r++)
            acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        for (int d = 0; d < b->hd; d++) {
            __m512 k0 = _mm512_load_ps(k + d * SLOTS), k1 = _mm512_load_ps(k + d * SLOTS + 16);
            prefetch_line(next, (size_t)d * 128);
            prefetch_line(next, (size_t)d * 128 + 64);
#pragma GCC unroll 12
            for (int r = 0; r < n_row; r++) {
                __m512 x = _mm512_set1_ps(((const float *)(q + r * q_bytes))[d]);
                acc[r][0] = _mm512_fmadd_ps(x, k0, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(x, k1, acc[r][1]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < n_row; r++) {
            _mm512_store_ps(s + r * KERN_ATTN_BLOCK + i * SLOTS, acc[r][0]);
            _mm512_store_ps(s + r * KERN_ATTN_BLOCK + i * SLOTS + 16, acc[r][1]);
        }
    }
}

static void qk_f32(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    const char *at = q;
    for (; n_row >= 12; n_row -= 12, at += 12 * KERN_ATTN_Q_BYTES(b->hd), s += 12 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 12, s);
    for (; n_row >= 4; n_row -= 4, at += 4 * KERN_ATTN_Q_BYTES(b->hd), s += 4 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 4, s);
    if (n_row == 3)
        qk_rows(b, at, 3, s);
    else if (n_row == 2)
        qk_rows(b, at, 2, s);
    else if (n_row == 1)
        qk_rows(b, at, 1, s);
}

/* ---- p ------------------------------------------------------------------------------------------------------ */

static void softmax_f32(const struct kern_attn_block *b, float *s, int n_row, const int32_t *seen, float *m,
                        float *l, float *alpha, void *p)
{
    int n_slot = b->n_page * SLOTS;
    rescale_rows(s, n_row, n_slot, seen, m, l, alpha);
    for (int r = 0; r < n_row; r++) {
        float *sr = s + r * KERN_ATTN_BLOCK;
        float *pr = (float *)((char *)p + r * KERN_ATTN_P_BYTES);
        __m512 max = _mm512_set1_ps(m[r]), sum = _mm512_setzero_ps();
        for (int j = 0; j < n_slot; j += 16) {
            __mmask16 k = seen_mask(seen[r], j);
            __m512 e = _mm512_maskz_mov_ps(k, exp2_v16(_mm512_maskz_sub_ps(k, _mm512_load_ps(sr + j), max)));
            const float *scale = b->v_scale[j / SLOTS];
            sum = _mm512_add_ps(sum, e);
            _mm512_store_ps(sr + j, e);
            _mm512_store_ps(pr + j, scale ? _mm512_mul_ps(e, _mm512_load_ps(scale + j % SLOTS)) : e);
        }
        l[r] += _mm512_reduce_add_ps(sum);
    }
}

/* ---- o = o alpha + p v ------------------------------------------------------------------------------------------ */

/* n_row rows and n_col vectors of 16 columns from column d on. */
INLINE void pv_tile(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col, int d,
                    const float *alpha, float *o)
{
    __m512 acc[6][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm512_mul_ps(_mm512_loadu_ps(o + r * b->hd + d + c * 16), _mm512_set1_ps(alpha[r]));
    for (int i = 0; i < b->n_page; i++) {
        const float *v = (const float *)b->v[i] + d;
        const unsigned char *next = b->v[i + 2] + (size_t)d * 4;
        for (int j = 0; j < SLOTS; j++, v += b->hd, next += (size_t)b->hd * 4) {
            __m512 x[4];
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++) {
                x[c] = _mm512_load_ps(v + c * 16);
                prefetch_line(next, (size_t)c * 64);
            }
#pragma GCC unroll 6
            for (int r = 0; r < n_row; r++) {
                __m512 w = _mm512_set1_ps(((const float *)(p + r * KERN_ATTN_P_BYTES))[i * SLOTS + j]);
#pragma GCC unroll 4
                for (int c = 0; c < n_col; c++)
                    acc[r][c] = _mm512_fmadd_ps(w, x[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            _mm512_storeu_ps(o + r * b->hd + d + c * 16, acc[r][c]);
}

INLINE void pv_rows(const struct kern_attn_block *b, const char *p, const int n_row, const float *alpha, float *o)
{
    int d = 0;
    for (; d + 64 <= b->hd; d += 64)
        pv_tile(b, p, n_row, 4, d, alpha, o);
    for (; d + 32 <= b->hd; d += 32)
        pv_tile(b, p, n_row, 2, d, alpha, o);
    if (d < b->hd)
        pv_tile(b, p, n_row, 1, d, alpha, o);
}

static void pv_f32(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (; n_row >= 6; n_row -= 6, at += 6 * KERN_ATTN_P_BYTES, alpha += 6, o += 6 * b->hd)
        pv_rows(b, at, 6, alpha, o);
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_P_BYTES, alpha += 3, o += 3 * b->hd)
        pv_rows(b, at, 3, alpha, o);
    for (; n_row > 0; n_row--, at += KERN_ATTN_P_BYTES, alpha++, o += b->hd)
        pv_rows(b, at, 1, alpha, o);
}

/* ---- scores ------------------------------------------------------------------------------------------------------- */

INLINE __m512 prob(const float *s, float m, float inv_l, __mmask16 k, __m512 sum)
{
    __m512 e = exp2_v16(_mm512_maskz_sub_ps(k, _mm512_loadu_ps(s), _mm512_set1_ps(m)));
    return _mm512_mask3_fmadd_ps(e, _mm512_set1_ps(inv_l), sum, k);
}

static void colsum(const float *s, int n_row, int n_slot, const int32_t *seen, const float *m, const float *inv_l,
                   float *acc)
{
    for (int j = 0; j < n_slot; j += 32) {
        __m512 a = _mm512_loadu_ps(acc + j), b = _mm512_loadu_ps(acc + j + 16);
        for (int r = 0; r < n_row; r++) {
            const float *sr = s + r * KERN_ATTN_BLOCK + j;
            a = prob(sr, m[r], inv_l[r], seen_mask(seen[r], j), a);
            b = prob(sr + 16, m[r], inv_l[r], seen_mask(seen[r], j + 16), b);
        }
        _mm512_storeu_ps(acc + j, a);
        _mm512_storeu_ps(acc + j + 16, b);
    }
}

static void probs(const float *e, int n_row, int n, const float *w, float decay, float *score)
{
    for (int j = 0; j < n; j += 16) {
        __mmask16 k = seen_mask(n, j);
        __m512 sum = _mm512_mul_ps(_mm512_maskz_loadu_ps(k, score + j), _mm512_set1_ps(decay));
        for (int r = 0; r < n_row; r++)
            sum = _mm512_fmadd_ps(_mm512_loadu_ps(e + r * KERN_ATTN_BLOCK + j), _mm512_set1_ps(w[r]), sum);
        _mm512_mask_storeu_ps(score + j, k, sum);
    }
}

void kern_attn_avx512(struct kern_attn_fns *f)
{
    struct kern_attn_form *form[2] = { &f->prefill[KERN_KV_F32], &f->decode[KERN_KV_F32] };
    for (int i = 0; i < 2; i++) {
        form[i]->qk = qk_f32;
        form[i]->softmax = softmax_f32;
        form[i]->pv = pv_f32;
    }
    f->colsum = colsum;
    f->probs = probs;
    if (__builtin_cpu_supports("avx512bf16"))
        kern_attn_avx512_bf16(f);
    kern_attn_avx512_int8(f);
}
