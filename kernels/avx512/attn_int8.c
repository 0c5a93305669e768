/* attn_int8.c - decode attention over int8 pages in AVX-512 VNNI. q is a 15-bit integer in two signed digits of 8 bits, so
 * that VPDPBUSD takes K as it lies in the page; V is widened to f32. */
#include "kernels/avx512/attn_vec.h"

/* After the packed q (hd / 4 times: 4 high digits, 4 low ones): what turns the integer sum into a logit. */
struct q_tail {
    float scale;
    int32_t offset; /* 128 * sum of q: K is stored with 128 added */
};

#define Q_MAX 32639 /* 127 * 256 + 127 */

/* The largest |q| is such that no sum of hd products with 255 leaves 31 bits. */
static void pack_q_int8(const float *q, int head_dim, int hd, float scale, void *out)
{
    int largest = INT32_MAX / (255 * hd) < Q_MAX ? INT32_MAX / (255 * hd) : Q_MAX;
    struct q_tail *tail = (struct q_tail *)((char *)out + (size_t)hd * 2);
    int8_t *to = out;
    float max = 0;
    int32_t sum = 0;

    for (int d = 0; d < head_dim; d++)
        max = fabsf(q[d]) > max ? fabsf(q[d]) : max;
    float inv = max > 0 ? (float)largest / max : 0;
    for (int d = 0; d < hd; d++) {
        int x = d < head_dim ? (int)lrintf(q[d] * inv) : 0;
        int low = (int8_t)(x & 255);
        to[d / 4 * 8 + d % 4] = (int8_t)((x - low) / 256);
        to[d / 4 * 8 + 4 + d % 4] = (int8_t)low;
        sum += x;
    }
    *tail = (struct q_tail){ max / (float)largest * scale, 128 * sum };
}

/* 16 slots: the digits' sums as logits. */
INLINE __m512 logits(__m512i high, __m512i low, const struct q_tail *t, const float *scale)
{
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    __m512 x = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(t->offset)));
    return _mm512_mul_ps(x, _mm512_mul_ps(_mm512_set1_ps(t->scale), _mm512_load_ps(scale)));
}

INLINE void qk_rows(const struct kern_attn_block *b, const char *q, const int n_row, float *s)
{
    size_t q_bytes = KERN_ATTN_Q_BYTES(b->hd);
    for (int i = 0; i < b->n_page; i++) {
        const unsigned char *k = b->k[i], *next = b->k[i + 2];
        __m512i high[3][2], low[3][2];
#pragma GCC unroll 3
        for (int r = 0; r < n_row; r++)
            high[r][0] = high[r][1] = low[r][0] = low[r][1] = _mm512_setzero_si512();
        for (int d = 0; d < b->hd / 4; d++) {
            __m512i k0 = _mm512_load_si512(k + d * 128), k1 = _mm512_load_si512(k + d * 128 + 64);
            prefetch_line(next, (size_t)d * 128);
            prefetch_line(next, (size_t)d * 128 + 64);
#pragma GCC unroll 3
            for (int r = 0; r < n_row; r++) {
                const int32_t *w = (const int32_t *)(q + r * q_bytes) + 2 * d;
                __m512i h = _mm512_set1_epi32(w[0]), l = _mm512_set1_epi32(w[1]);
                high[r][0] = _mm512_dpbusd_epi32(high[r][0], k0, h);
                high[r][1] = _mm512_dpbusd_epi32(high[r][1], k1, h);
                low[r][0] = _mm512_dpbusd_epi32(low[r][0], k0, l);
                low[r][1] = _mm512_dpbusd_epi32(low[r][1], k1, l);
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < n_row; r++) {
            const struct q_tail *t = (const struct q_tail *)(q + r * q_bytes + (size_t)b->hd * 2);
            float *to = s + r * KERN_ATTN_BLOCK + i * SLOTS;
            _mm512_store_ps(to, logits(high[r][0], low[r][0], t, b->k_scale[i]));
            _mm512_store_ps(to + 16, logits(high[r][1], low[r][1], t, b->k_scale[i] + 16));
        }
    }
}

static void qk_int8(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    const char *at = q;
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_Q_BYTES(b->hd), s += 3 * KERN_ATTN_BLOCK)
        qk_rows(b, at, 3, s);
    if (n_row == 2)
        qk_rows(b, at, 2, s);
    else if (n_row == 1)
        qk_rows(b, at, 1, s);
}

/* n_row rows and n_col vectors of 16 columns from column d on. */
INLINE void pv_tile(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col, int d,
                    const float *alpha, float *o)
{
    __m512 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm512_mul_ps(_mm512_loadu_ps(o + r * b->hd + d + c * 16), _mm512_set1_ps(alpha[r]));
    for (int i = 0; i < b->n_page; i++) {
        const unsigned char *v = b->v[i] + d, *next = b->v[i + 2] + d;
        for (int j = 0; j < SLOTS; j++, v += b->hd, next += b->hd) {
            __m512 x[4];
            prefetch_line(next, 0);
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++) {
                __m128i bytes = _mm_load_si128((const __m128i *)(v + c * 16));
                x[c] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            }
#pragma GCC unroll 4
            for (int r = 0; r < n_row; r++) {
                __m512 w = _mm512_set1_ps(((const float *)(p + r * KERN_ATTN_P_BYTES))[i * SLOTS + j]);
#pragma GCC unroll 4
                for (int c = 0; c < n_col; c++)
                    acc[r][c] = _mm512_fmadd_ps(w, x[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 4
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

static void pv_int8(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (; n_row >= 4; n_row -= 4, at += 4 * KERN_ATTN_P_BYTES, alpha += 4, o += 4 * b->hd)
        pv_rows(b, at, 4, alpha, o);
    if (n_row == 3)
        pv_rows(b, at, 3, alpha, o);
    else if (n_row == 2)
        pv_rows(b, at, 2, alpha, o);
    else if (n_row == 1)
        pv_rows(b, at, 1, alpha, o);
}

void kern_attn_avx512_int8(struct kern_attn_fns *f)
{
    struct kern_attn_form *form = &f->decode[KERN_KV_INT8];
    form->panel = NULL;
    form->pack_q = pack_q_int8;
    form->qk = qk_int8;
    form->softmax = f->decode[KERN_KV_F32].softmax; /* p in f32, times V's scales */
    form->pv = pv_int8;
}
