/* attn_bf16.c - attention in AVX-512 BF16: q, k, p and v in bf16, sums in f32 (VDPBF16PS). int8 pages become bf16 panels for
 * prefill: their integers are exact in bf16, and the scales meet logits and probabilities in f32. */
#include "kernels/avx512/attn_vec.h"

#include <string.h>

INLINE __m512i pairs(__m512 even, __m512 odd) /* 16 dwords: bf16 even below, odd above */
{
    __m512i e = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    __m512i o = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    return _mm512_or_si512(e, _mm512_slli_epi32(o, 16));
}

static void pack_q_bf16(const float *q, int head_dim, int hd, float scale, void *out)
{
    __m512 k = _mm512_set1_ps(scale);
    for (int d = 0; d < hd; d += 16) {
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(seen_mask(head_dim, d), q + d), k);
        _mm256_store_si256((__m256i *)((uint16_t *)out + d), (__m256i)_mm512_cvtneps_pbh(x));
    }
}

/* ---- s = q k ---------------------------------------------------------------------------------------------- */

INLINE void qk_rows(const struct kern_attn_block *b, const char *q, const int n_row, float *s)
{
    size_t q_bytes = KERN_ATTN_Q_BYTES(b->hd);
    for (int i = 0; i < b->n_page; i++) {
        const unsigned char *k = b->k[i], *next = b->k[i + 2];
        __m512 acc[KERN_ATTN_TILE][2];
#pragma GCC unroll 12
        for (int r = 0; r < n_row; r++)
            acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        for (int d = 0; d < b->hd / 2; d++) {
            __m512bh k0 = (__m512bh)_mm512_load_si512(k + d * 128);
            __m512bh k1 = (__m512bh)_mm512_load_si512(k + d * 128 + 64);
            prefetch_line(next, (size_t)d * 128);
            prefetch_line(next, (size_t)d * 128 + 64);
#pragma GCC unroll 12
            for (int r = 0; r < n_row; r++) {
                __m512bh x = (__m512bh)_mm512_set1_epi32(((const int32_t *)(q + r * q_bytes))[d]);
                acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, k0);
                acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, k1);
            }
        }
        if (b->k_scale[i]) {
            __m512 s0 = _mm512_load_ps(b->k_scale[i]), s1 = _mm512_load_ps(b->k_scale[i] + 16);
#pragma GCC unroll 12
            for (int r = 0; r < n_row; r++) {
                acc[r][0] = _mm512_mul_ps(acc[r][0], s0);
                acc[r][1] = _mm512_mul_ps(acc[r][1], s1);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < n_row; r++) {
            _mm512_store_ps(s + r * KERN_ATTN_BLOCK + i * SLOTS, acc[r][0]);
            _mm512_store_ps(s + r * KERN_ATTN_BLOCK + i * SLOTS + 16, acc[r][1]);
        }
    }
}

static void qk_bf16(const struct kern_attn_block *b, const void *q, int n_row, float *s)
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

static void softmax_bf16(const struct kern_attn_block *b, float *s, int n_row, const int32_t *seen, float *m,
                         float *l, float *alpha, void *p)
{
    int n_slot = b->n_page * SLOTS;
    rescale_rows(s, n_row, n_slot, seen, m, l, alpha);
    for (int r = 0; r < n_row; r++) {
        float *sr = s + r * KERN_ATTN_BLOCK;
        uint16_t *pr = (uint16_t *)((char *)p + r * KERN_ATTN_P_BYTES);
        __m512 max = _mm512_set1_ps(m[r]), sum0 = _mm512_setzero_ps(), sum1 = sum0;
        for (int i = 0; i < b->n_page; i++, sr += SLOTS, pr += SLOTS) {
            __m512 e0 = _mm512_sub_ps(_mm512_load_ps(sr), max), e1 = _mm512_sub_ps(_mm512_load_ps(sr + 16), max);
            if (seen[r] < (i + 1) * SLOTS) {
                __mmask16 k0 = seen_mask(seen[r], i * SLOTS), k1 = seen_mask(seen[r], i * SLOTS + 16);
                e0 = _mm512_maskz_mov_ps(k0, exp2_v16(_mm512_maskz_mov_ps(k0, e0)));
                e1 = _mm512_maskz_mov_ps(k1, exp2_v16(_mm512_maskz_mov_ps(k1, e1)));
            } else {
                e0 = exp2_v16(e0);
                e1 = exp2_v16(e1);
            }
            sum0 = _mm512_add_ps(sum0, e0);
            sum1 = _mm512_add_ps(sum1, e1);
            _mm512_store_ps(sr, e0);
            _mm512_store_ps(sr + 16, e1);
            if (b->v_scale[i]) {
                e0 = _mm512_mul_ps(e0, _mm512_load_ps(b->v_scale[i]));
                e1 = _mm512_mul_ps(e1, _mm512_load_ps(b->v_scale[i] + 16));
            }
            _mm512_store_si512(pr, (__m512i)_mm512_cvtne2ps_pbh(e1, e0));
        }
        l[r] += _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
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
        const unsigned char *v = b->v[i] + (size_t)d * 4, *next = b->v[i + 2] + (size_t)d * 4;
        for (int j = 0; j < SLOTS / 2; j++, v += (size_t)b->hd * 4, next += (size_t)b->hd * 4) {
            __m512bh x[4];
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++) {
                x[c] = (__m512bh)_mm512_load_si512(v + c * 64);
                prefetch_line(next, (size_t)c * 64);
            }
#pragma GCC unroll 6
            for (int r = 0; r < n_row; r++) {
                int32_t pair = ((const int32_t *)(p + r * KERN_ATTN_P_BYTES))[i * (SLOTS / 2) + j];
                __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int c = 0; c < n_col; c++)
                    acc[r][c] = _mm512_dpbf16_ps(acc[r][c], w, x[c]);
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

static void pv_bf16(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (; n_row >= 6; n_row -= 6, at += 6 * KERN_ATTN_P_BYTES, alpha += 6, o += 6 * b->hd)
        pv_rows(b, at, 6, alpha, o);
    for (; n_row >= 3; n_row -= 3, at += 3 * KERN_ATTN_P_BYTES, alpha += 3, o += 3 * b->hd)
        pv_rows(b, at, 3, alpha, o);
    for (; n_row > 0; n_row--, at += KERN_ATTN_P_BYTES, alpha++, o += b->hd)
        pv_rows(b, at, 1, alpha, o);
}

/* ---- int8 pages as bf16 panels ------------------------------------------------------------------------------------ */

/* 16 bytes of integers (s8) as f32. */
INLINE __m512 widen(__m128i x)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}

static void panel_int8(const struct kern_page_layout *pl, const unsigned char *page, int i_page, void *panels)
{
    const unsigned char *k = page + pl->k, *v = page + pl->v;
    unsigned char *panel = (unsigned char *)panels + i_page * KERN_ATTN_PANEL_BYTES(pl->hd), *to = panel;
    /* K [hd/4][32][4] -> [hd/2][32][2]: 16 slots of 4 bytes, less the offset; bytes 0, 1 and 2, 3 are pairs. */
    for (int d = 0; d < pl->hd / 4; d++)
        for (int half = 0; half < 2; half++) {
            __m512i x = _mm512_xor_si512(_mm512_load_si512(k + d * 128 + half * 64), _mm512_set1_epi8((char)0x80));
            __m512 f[4];
            for (int i = 0; i < 4; i++)
                f[i] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sllv_epi32(x, _mm512_set1_epi32(24 - 8 * i)), 24));
            _mm512_store_si512(to + (2 * d) * 128 + half * 64, pairs(f[0], f[1]));
            _mm512_store_si512(to + (2 * d + 1) * 128 + half * 64, pairs(f[2], f[3]));
        }
    /* V [32][hd] -> [16][hd][2]. */
    to = panel + KERN_ATTN_PANEL_BYTES(pl->hd) / 2;
    for (int j = 0; j < SLOTS; j += 2)
        for (int d = 0; d < pl->hd; d += 16) {
            __m512 even = widen(_mm_load_si128((const __m128i *)(v + j * pl->hd + d)));
            __m512 odd = widen(_mm_load_si128((const __m128i *)(v + (j + 1) * pl->hd + d)));
            _mm512_store_si512(to + ((size_t)j / 2 * pl->hd + d) * 4, pairs(even, odd));
        }
}

/* ---- store ------------------------------------------------------------------------------------------------------------ */

static void (*store_other)(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k,
                           const float *v);

static void store_bf16(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v)
{
    if (pl->dtype != KERN_KV_BF16) {
        store_other(pl, page, slot, k, v);
        return;
    }
    unsigned char *pk = page + pl->k + (size_t)slot * 4, *pv = page + pl->v + (size_t)slot / 2 * pl->hd * 4;
    __mmask32 half = slot % 2 ? 0xaaaaaaaau : 0x55555555u; /* this slot's half of each pair */
    for (int d = 0; d < pl->hd; d += 16) {
        __mmask16 in = seen_mask(pl->head_dim, d);
        _Alignas(32) uint32_t kk[8];
        _mm256_store_si256((__m256i *)kk, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(in, k + d)));
        for (int i = 0; i < 8; i++)
            memcpy(pk + (size_t)(d / 2 + i) * 128, &kk[i], 4);
        __m512i x = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(in, v + d)));
        x = slot % 2 ? _mm512_slli_epi32(x, 16) : x;
        _mm512_mask_storeu_epi16(pv + (size_t)d * 4, half, x);
    }
}

void kern_attn_avx512_bf16(struct kern_attn_fns *f)
{
    const struct kern_attn_form form = { .pack_q = pack_q_bf16, .qk = qk_bf16, .softmax = softmax_bf16, .pv = pv_bf16 };
    f->prefill[KERN_KV_BF16] = f->decode[KERN_KV_BF16] = form;
    f->prefill[KERN_KV_INT8] = f->decode[KERN_KV_INT8] = form;
    f->prefill[KERN_KV_INT8].panel = f->decode[KERN_KV_INT8].panel = panel_int8;
    if (f->store != store_bf16)
        store_other = f->store;
    f->store = store_bf16;
}
