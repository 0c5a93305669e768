/* avx2/linear.c - products of packed weights with AVX2, FMA and F16C. */
#include "kernels/avx2/linear_tile.h"
#include "kernels/avx2/v16.h"
#include "kernels/isa_rows.h"

#define TILE_q4(R, how) tile_packed(s, t, n_group, out, R, 4, how, PLAIN)
#define TILE_q4w(R, how) tile_packed(s, t, n_group, out, R, 4, how, WHOLE)
#define TILE_q5(R, how) tile_packed(s, t, n_group, out, R, 5, how, PLAIN)
#define TILE_q8(R, how) tile_wide(s, t, n_group, out, R, how)
TILE_KIND(q4)
TILE_KIND(q4w)
TILE_KIND(q5)
TILE_KIND(q8)
/* [form]; none but a K type has P6. */
static tile_fn *const plain_tiles[][3][TILE] = { [KERN_P4] = TILES(q4), [KERN_P5] = TILES(q5), [KERN_P8] = TILES(q8) };
static tile_fn *const whole_tiles[3][TILE] = TILES(q4w);

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
    tile_fn *const(*tiles)[TILE] = w->super ? kern_tiles_k_avx2[w->form] : plain_tiles[w->form];
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
    if (w->form == KERN_P4 && !w->super) {
        memcpy(&s.unit, head, sizeof s.unit);
        if (s.unit != 0 && n_row > 2) /* for a row or two the integers cost more than they save */
            tiles = whole_tiles;
    }
    s.next = group + w->panel_bytes;
    s.next_step = w->group_bytes;
    int left = (n_row + TILE - 1) / TILE;
    enum how how = left == 1 ? DIRECT : FIRST;
    for (int r = 0, n; r < n_row; r += n, left--) {
        struct tile t = tile_at(a, row0 + r);
        n = (n_row - r + left - 1) / left;
        tiles[how][n - 1](&s, &t, a->n_group, acc + (size_t)r * KERN_PANEL);
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
