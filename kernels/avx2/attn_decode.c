/* attn_decode.c - attention in AVX2 for a few rows: bf16 and int8 pages are widened in registers as they stream by, because
 * a panel would cost as much as the products. q and p are f32; for int8's K, q is 16-bit integers (VPMADDWD), which keeps
 * it to 2^-15 of its largest element. And the store, which decode does for every row. */
#include "kernels/avx2/attn_vec.h"

/* Rows that go through the registers together, out of n that are left: 3 by 4 vectors or 4 by 2. */
static int rows_at_once(int n)
{
    return n == 4 || n == 8 ? 4 : n < 3 ? n : 3;
}

INLINE __m256 even_bf16(__m256i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}

INLINE __m256 odd_bf16(__m256i x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
}

/* ---- bf16: s = q k --------------------------------------------------------------------------------------------- */

INLINE void qk_bf16_tile(const unsigned char *k, const unsigned char *next, int hd, const char *q, const int n_row,
                         const int n_col, float *s)
{
    size_t q_bytes = KERN_ATTN_Q_BYTES(hd);
    __m256 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_setzero_ps();
    for (int d = 0; d < hd; d += 2, k += SLOTS * 4, next += SLOTS * 4) {
        prefetch_line(next, 0);
        if (n_col > 2)
            prefetch_line(next, 64);
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++) {
            __m256i x = _mm256_load_si256((const __m256i *)(k + c * 32));
            __m256 even = even_bf16(x), odd = odd_bf16(x);
#pragma GCC unroll 4
            for (int r = 0; r < n_row; r++) {
                const float *w = (const float *)(q + r * q_bytes) + d;
                acc[r][c] = _mm256_fmadd_ps(_mm256_broadcast_ss(w), even, acc[r][c]);
                acc[r][c] = _mm256_fmadd_ps(_mm256_broadcast_ss(w + 1), odd, acc[r][c]);
                IN_REGISTER(acc[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            _mm256_store_ps(s + r * KERN_ATTN_BLOCK + c * 8, acc[r][c]);
}

INLINE void qk_bf16_rows(const struct kern_attn_block *b, const char *q, const int n_row, const int n_col, float *s)
{
    for (int i = 0; i < b->n_page; i++)
        for (int j = 0; j < SLOTS; j += 8 * n_col)
            qk_bf16_tile(b->k[i] + j * 4, b->k[i + 2] + j * 4, b->hd, q, n_row, n_col, s + i * SLOTS + j);
}

static void qk_bf16(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    const char *at = q;
    for (int n; n_row > 0; n_row -= n, at += n * KERN_ATTN_Q_BYTES(b->hd), s += n * KERN_ATTN_BLOCK) {
        n = rows_at_once(n_row);
        if (n == 4)
            qk_bf16_rows(b, at, 4, 2, s);
        else if (n == 3)
            qk_bf16_rows(b, at, 3, 4, s);
        else if (n == 2)
            qk_bf16_rows(b, at, 2, 4, s);
        else
            qk_bf16_rows(b, at, 1, 4, s);
    }
}

/* ---- bf16: o = o alpha + p v --------------------------------------------------------------------------------------- */

INLINE void pv_bf16_tile(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col, int d,
                         const float *alpha, float *o)
{
    size_t stride = (size_t)b->hd * 4;
    __m256 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_mul_ps(_mm256_loadu_ps(o + r * b->hd + d + c * 8), _mm256_set1_ps(alpha[r]));
    for (int i = 0; i < b->n_page; i++, p += SLOTS * sizeof(float)) {
        const unsigned char *v = b->v[i] + d * 4, *next = b->v[i + 2] + d * 4;
        for (int j = 0; j < SLOTS; j += 2, v += stride, next += stride) {
            prefetch_line(next, 0);
            if (n_col > 2)
                prefetch_line(next, 64);
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++) {
                __m256i x = _mm256_load_si256((const __m256i *)(v + c * 32));
                __m256 even = even_bf16(x), odd = odd_bf16(x);
#pragma GCC unroll 4
                for (int r = 0; r < n_row; r++) {
                    const float *w = (const float *)(p + r * KERN_ATTN_P_BYTES) + j;
                    acc[r][c] = _mm256_fmadd_ps(_mm256_broadcast_ss(w), even, acc[r][c]);
                    acc[r][c] = _mm256_fmadd_ps(_mm256_broadcast_ss(w + 1), odd, acc[r][c]);
                    IN_REGISTER(acc[r][c]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            _mm256_storeu_ps(o + r * b->hd + d + c * 8, acc[r][c]);
}

INLINE void pv_bf16_rows(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col,
                         const float *alpha, float *o)
{
    int d = 0;
    for (; d + 8 * n_col <= b->hd; d += 8 * n_col)
        pv_bf16_tile(b, p, n_row, n_col, d, alpha, o);
    if (d < b->hd)
        pv_bf16_tile(b, p, n_row, 2, d, alpha, o);
}

static void pv_bf16(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (int n; n_row > 0; n_row -= n, at += n * KERN_ATTN_P_BYTES, alpha += n, o += n * b->hd) {
        n = rows_at_once(n_row);
        if (n == 4)
            pv_bf16_rows(b, at, 4, 2, alpha, o);
        else if (n == 3)
            pv_bf16_rows(b, at, 3, 4, alpha, o);
        else if (n == 2)
            pv_bf16_rows(b, at, 2, 4, alpha, o);
        else
            pv_bf16_rows(b, at, 1, 4, alpha, o);
    }
}

/* ---- int8: s = q k ------------------------------------------------------------------------------------------------- */

/* After the hd packed q: what turns the integer sum into a logit. */
struct q_tail {
    float scale;
    int32_t offset; /* 128 * sum of q: K is stored with 128 added */
};

INLINE struct q_tail *q_tail(void *q, int hd)
{
    return (struct q_tail *)((char *)q + (size_t)hd * 2);
}

/* int16, four at a time in the order 0 2 1 3: the even bytes of a K dword, then the odd ones. The largest |q| is such that
 * no sum of hd products with 255 leaves 31 bits. */
static void pack_q_int8(const float *q, int head_dim, int hd, float scale, void *out)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    int largest = INT32_MAX / (255 * hd);
    __m256 max = _mm256_setzero_ps();
    __m256i sum = _mm256_setzero_si256();
    _Alignas(32) int32_t part[8];

    largest = largest < INT16_MAX ? largest : INT16_MAX;
    for (int d = 0; d < hd; d += 8)
        max = _mm256_max_ps(max, _mm256_and_ps(load_to(q, d, head_dim), magnitude));
    float most = max_v8(max);
    __m256 inv = _mm256_set1_ps(most > 0 ? (float)largest / most : 0);
    for (int d = 0; d < hd; d += 8) {
        __m256i x = _mm256_cvtps_epi32(_mm256_mul_ps(load_to(q, d, head_dim), inv));
        __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_store_si128((__m128i *)((int16_t *)out + d), _mm_shuffle_epi8(w, order));
        sum = _mm256_add_epi32(sum, x);
    }
    _mm256_store_si256((__m256i *)part, sum);
    int32_t total = part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7];
    *q_tail(out, hd) = (struct q_tail){ most / (float)largest * scale, 128 * total };
}

INLINE void qk_int8_tile(const unsigned char *k, const unsigned char *next, int hd, const char *q, const int n_row,
                         const int n_col, const float *scale, float *s)
{
    const __m256i bytes = _mm256_set1_epi16(0xff);
    size_t q_bytes = KERN_ATTN_Q_BYTES(hd);
    __m256i acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_setzero_si256();
    for (int d = 0; d < hd / 4; d++, k += SLOTS * 4, next += SLOTS * 4) {
        prefetch_line(next, 0);
        if (n_col > 2)
            prefetch_line(next, 64);
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++) {
            __m256i x = _mm256_load_si256((const __m256i *)(k + c * 32));
            __m256i even = _mm256_and_si256(x, bytes), odd = _mm256_srli_epi16(x, 8);
#pragma GCC unroll 4
            for (int r = 0; r < n_row; r++) {
                const int32_t *w = (const int32_t *)(q + r * q_bytes) + 2 * d;
                __m256i a = _mm256_madd_epi16(even, _mm256_set1_epi32(w[0]));
                __m256i b = _mm256_madd_epi16(odd, _mm256_set1_epi32(w[1]));
                acc[r][c] = _mm256_add_epi32(acc[r][c], _mm256_add_epi32(a, b));
                IN_REGISTER(acc[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++) {
        const struct q_tail *t = (const struct q_tail *)(q + r * q_bytes + (size_t)hd * 2);
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++) {
            __m256 y = _mm256_cvtepi32_ps(_mm256_sub_epi32(acc[r][c], _mm256_set1_epi32(t->offset)));
            y = _mm256_mul_ps(y, _mm256_mul_ps(_mm256_set1_ps(t->scale), _mm256_load_ps(scale + c * 8)));
            _mm256_store_ps(s + r * KERN_ATTN_BLOCK + c * 8, y);
        }
    }
}

INLINE void qk_int8_rows(const struct kern_attn_block *b, const char *q, const int n_row, const int n_col, float *s)
{
    for (int i = 0; i < b->n_page; i++)
        for (int j = 0; j < SLOTS; j += 8 * n_col)
            qk_int8_tile(b->k[i] + j * 4, b->k[i + 2] + j * 4, b->hd, q, n_row, n_col, b->k_scale[i] + j,
                         s + i * SLOTS + j);
}

static void qk_int8(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    const char *at = q;
    for (int n; n_row > 0; n_row -= n, at += n * KERN_ATTN_Q_BYTES(b->hd), s += n * KERN_ATTN_BLOCK) {
        n = rows_at_once(n_row);
        if (n == 4)
            qk_int8_rows(b, at, 4, 2, s);
        else if (n == 3)
            qk_int8_rows(b, at, 3, 4, s);
        else if (n == 2)
            qk_int8_rows(b, at, 2, 4, s);
        else
            qk_int8_rows(b, at, 1, 4, s);
    }
}

/* ---- int8: o = o alpha + p v --------------------------------------------------------------------------------------- */

INLINE void pv_int8_tile(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col, int d,
                         const float *alpha, float *o)
{
    __m256 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            acc[r][c] = _mm256_mul_ps(_mm256_loadu_ps(o + r * b->hd + d + c * 8), _mm256_set1_ps(alpha[r]));
    for (int i = 0; i < b->n_page; i++, p += SLOTS * sizeof(float)) {
        const unsigned char *v = b->v[i] + d, *next = b->v[i + 2] + d;
        for (int j = 0; j < SLOTS; j++, v += b->hd, next += b->hd) {
            prefetch_line(next, 0);
#pragma GCC unroll 4
            for (int c = 0; c < n_col; c++) {
                __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(v + c * 8))));
#pragma GCC unroll 4
                for (int r = 0; r < n_row; r++) {
                    const float *w = (const float *)(p + r * KERN_ATTN_P_BYTES) + j;
                    acc[r][c] = _mm256_fmadd_ps(_mm256_broadcast_ss(w), x, acc[r][c]);
                        IN_REGISTER(acc[r][c]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_row; r++)
#pragma GCC unroll 4
        for (int c = 0; c < n_col; c++)
            _mm256_storeu_ps(o + r * b->hd + d + c * 8, acc[r][c]);
}

INLINE void pv_int8_rows(const struct kern_attn_block *b, const char *p, const int n_row, const int n_col,
                         const float *alpha, float *o)
{
    int d = 0;
    for (; d + 8 * n_col <= b->hd; d += 8 * n_col)
        pv_int8_tile(b, p, n_row, n_col, d, alpha, o);
    if (d < b->hd)
        pv_int8_tile(b, p, n_row, 2, d, alpha, o);
}

static void pv_int8(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    const char *at = p;
    for (int n; n_row > 0; n_row -= n, at += n * KERN_ATTN_P_BYTES, alpha += n, o += n * b->hd) {
        n = rows_at_once(n_row);
        if (n == 4)
            pv_int8_rows(b, at, 4, 2, alpha, o);
        else if (n == 3)
            pv_int8_rows(b, at, 3, 4, alpha, o);
        else if (n == 2)
            pv_int8_rows(b, at, 2, 4, alpha, o);
        else
            pv_int8_rows(b, at, 1, 4, alpha, o);
    }
}

/* ---- store ---------------------------------------------------------------------------------------------------------- */

static void (*store_f32)(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v);

/* bf16 bits, rounded to nearest even; finite values only. */
INLINE __m256i round_bf16(__m256 x)
{
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}

static void store_bf16(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v)
{
    uint16_t *pv = (uint16_t *)(page + pl->v) + (size_t)(slot / 2) * pl->hd * 2 + slot % 2;
    uint32_t *pk = (uint32_t *)(page + pl->k) + slot;
    _Alignas(32) uint32_t x[8], y[8];
    for (int d = 0; d < pl->hd; d += 8) {
        _mm256_store_si256((__m256i *)x, round_bf16(load_to(k, d, pl->head_dim)));
        _mm256_store_si256((__m256i *)y, round_bf16(load_to(v, d, pl->head_dim)));
        for (int i = 0; i < 8; i += 2)
            pk[(d + i) / 2 * SLOTS] = x[i] | x[i + 1] << 16;
        for (int i = 0; i < 8; i++) /* the other half belongs to a slot that another thread may be writing */
            pv[(d + i) * 2] = (uint16_t)y[i];
    }
}

INLINE float absmax(const float *x, int n)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 max = _mm256_setzero_ps();
    for (int d = 0; d < n; d += 8)
        max = _mm256_max_ps(max, _mm256_and_ps(load_to(x, d, n), magnitude));
    return max_v8(max);
}

/* Integers of 8 values: to nearest even, within +-127. */
INLINE __m256i round_int8(const float *x, int d, int n, float inv)
{
    __m256i y = _mm256_cvtps_epi32(_mm256_mul_ps(load_to(x, d, n), _mm256_set1_ps(inv)));
    return _mm256_max_epi32(_mm256_min_epi32(y, _mm256_set1_epi32(127)), _mm256_set1_epi32(-127));
}

static void store_int8(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v)
{
    int n = pl->head_dim, hd = pl->hd;
    float k_scale = absmax(k, n) / 127, v_scale = absmax(v, n) / 127;
    float k_inv = k_scale > 0 ? 1 / k_scale : 0, v_inv = v_scale > 0 ? 1 / v_scale : 0;
    unsigned char *pk = page + pl->k + (size_t)slot * 4, *pv = page + pl->v + (size_t)slot * hd;
    _Alignas(16) uint32_t x[2];

    for (int d = 0; d < hd; d += 8) {
        __m256i a = round_int8(k, d, n, k_inv), b = round_int8(v, d, n, v_inv);
        __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        w = _mm_xor_si128(_mm_packs_epi16(w, w), _mm_set1_epi8((char)0x80));
        _mm_storel_epi64((__m128i *)x, w);
        memcpy(pk + (size_t)(d / 4) * SLOTS * 4, &x[0], 4);
        memcpy(pk + (size_t)(d / 4 + 1) * SLOTS * 4, &x[1], 4);
        w = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
        _mm_storel_epi64((__m128i *)(pv + d), _mm_packs_epi16(w, w));
    }
    ((float *)(page + pl->k_scale))[slot] = k_scale;
    ((float *)(page + pl->v_scale))[slot] = v_scale;
}

static void store(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v)
{
    if (pl->dtype == KERN_KV_BF16)
        store_bf16(pl, page, slot, k, v);
    else if (pl->dtype == KERN_KV_INT8)
        store_int8(pl, page, slot, k, v);
    else
        store_f32(pl, page, slot, k, v);
}

void kern_attn_avx2_decode(struct kern_attn_fns *f)
{
    struct kern_attn_form *form = &f->decode[KERN_KV_BF16];
    form->panel = NULL;
    form->qk = qk_bf16;
    form->pv = pv_bf16;
    form = &f->decode[KERN_KV_INT8];
    form->panel = NULL;
    form->pack_q = pack_q_int8;
    form->qk = qk_int8;
    form->pv = pv_int8;
    if (f->store != store)
        store_f32 = f->store; /* plain C copies as fast */
    f->store = store;
}
