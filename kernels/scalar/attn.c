/* attn.c - attention's micro-kernels in plain C: the definition that the other ISAs are tested against.
 *
 * All forms use f32 for q, p and panels; 16-bit and int8 pages are widened exactly (int8 values stay integers and
 * their scales meet the logits and the probabilities).
 */
#include "kernels/isa_attn.h"

#include <math.h>
#include <string.h>

#include "kernels/blocks.h"

#define SLOTS KERN_PAGE_SLOTS

/* ---- one slot in and out of a page ------------------------------------------------------------- */

static int8_t round_s8(float f)
{
    float r = rintf(f); /* to nearest even: the default rounding mode */
    return (int8_t)(r > 127 ? 127 : r < -127 ? -127 : r);
}

static float absmax(const float *x, int n)
{
    float m = 0;
    for (int i = 0; i < n; i++)
        m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
    return m;
}

static void store_f32(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k,
                      const float *v)
{
    float *pk = (float *)(page + pl->k), *pv = (float *)(page + pl->v);
    for (int d = 0; d < pl->head_dim; d++)
        pk[d * SLOTS + slot] = k[d];
    memcpy(pv + (size_t)slot * pl->hd, v, (size_t)pl->head_dim * sizeof *v);
}

static void store_bf16(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k,
                       const float *v)
{
    uint16_t *pk = (uint16_t *)(page + pl->k), *pv = (uint16_t *)(page + pl->v);
    for (int d = 0; d < pl->head_dim; d++)
        pk[(d / 2 * SLOTS + slot) * 2 + d % 2] = kern_f32_to_bf16(k[d]);
    for (int d = 0; d < pl->head_dim; d++)
        pv[(slot / 2 * pl->hd + d) * 2 + slot % 2] = kern_f32_to_bf16(v[d]);
}

static void store_int8(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k,
                       const float *v)
{
    uint8_t *pk = page + pl->k;
    int8_t *pv = (int8_t *)(page + pl->v);
    float k_scale = absmax(k, pl->head_dim) / 127, v_scale = absmax(v, pl->head_dim) / 127;
    float k_inv = k_scale > 0 ? 1 / k_scale : 0, v_inv = v_scale > 0 ? 1 / v_scale : 0;
    for (int d = 0; d < pl->hd; d++)
        pk[(d / 4 * SLOTS + slot) * 4 + d % 4] = (uint8_t)(d < pl->head_dim ? round_s8(k[d] * k_inv) + 128 : 128);
    for (int d = 0; d < pl->head_dim; d++)
        pv[slot * pl->hd + d] = round_s8(v[d] * v_inv);
    ((float *)(page + pl->k_scale))[slot] = k_scale;
    ((float *)(page + pl->v_scale))[slot] = v_scale;
}

static void store(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v)
{
    switch (pl->dtype) {
    case KERN_KV_F32:
        store_f32(pl, page, slot, k, v);
        break;
    case KERN_KV_BF16:
        store_bf16(pl, page, slot, k, v);
        break;
    default:
        store_int8(pl, page, slot, k, v);
    }
}

/* Unscaled for int8. */
static float k_at(const struct kern_page_layout *pl, const unsigned char *page, int slot, int d)
{
    const unsigned char *k = page + pl->k;
    switch (pl->dtype) {
    case KERN_KV_F32:
        return ((const float *)k)[d * SLOTS + slot];
    case KERN_KV_BF16:
        return kern_bf16_to_f32(((const uint16_t *)k)[(d / 2 * SLOTS + slot) * 2 + d % 2]);
    default:
        return (float)(k[(d / 4 * SLOTS + slot) * 4 + d % 4] - 128);
    }
}

static float v_at(const struct kern_page_layout *pl, const unsigned char *page, int slot, int d)
{
    const unsigned char *v = page + pl->v;
    switch (pl->dtype) {
    case KERN_KV_F32:
        return ((const float *)v)[slot * pl->hd + d];
    case KERN_KV_BF16:
        return kern_bf16_to_f32(((const uint16_t *)v)[(slot / 2 * pl->hd + d) * 2 + slot % 2]);
    default:
        return (float)((const int8_t *)v)[slot * pl->hd + d];
    }
}

void kern_attn_load_k(const struct kern_page_layout *pl, const unsigned char *page, int slot, float *k)
{
    float scale = pl->dtype == KERN_KV_INT8 ? ((const float *)(page + pl->k_scale))[slot] : 1;
    for (int d = 0; d < pl->head_dim; d++)
        k[d] = k_at(pl, page, slot, d) * scale;
}

void kern_attn_load_v(const struct kern_page_layout *pl, const unsigned char *page, int slot, float *v)
{
    float scale = pl->dtype == KERN_KV_INT8 ? ((const float *)(page + pl->v_scale))[slot] : 1;
    for (int d = 0; d < pl->head_dim; d++)
        v[d] = v_at(pl, page, slot, d) * scale;
}

/* ---- the f32 form ---------------------------------------------------------------------------------- */

/* The layout of an f32 page: K [hd][32], V [32][hd]. int8's padding is 0 in V and in q, so K's does not matter. */
static void panel_f32(const struct kern_page_layout *pl, const unsigned char *page, int i, void *panels)
{
    float *k = (float *)((char *)panels + i * KERN_ATTN_PANEL_BYTES(pl->hd)), *v = k + (size_t)pl->hd * SLOTS;
    for (int d = 0; d < pl->hd; d++)
        for (int j = 0; j < SLOTS; j++)
            k[d * SLOTS + j] = k_at(pl, page, j, d);
    for (int j = 0; j < SLOTS; j++)
        for (int d = 0; d < pl->hd; d++)
            v[j * pl->hd + d] = v_at(pl, page, j, d);
}

static void pack_q(const float *q, int head_dim, int hd, float scale, void *out)
{
    float *o = out;
    for (int d = 0; d < hd; d++)
        o[d] = d < head_dim ? q[d] * scale : 0;
}

static void qk(const struct kern_attn_block *b, const void *q, int n_row, float *s)
{
    for (int r = 0; r < n_row; r++) {
        const float *qr = (const float *)((const char *)q + r * KERN_ATTN_Q_BYTES(b->hd));
        for (int i = 0; i < b->n_page; i++) {
            const float *k = (const float *)b->k[i];
            float *sr = s + r * KERN_ATTN_BLOCK + i * SLOTS;
            memset(sr, 0, SLOTS * sizeof *sr);
            for (int d = 0; d < b->hd; d++)
                for (int j = 0; j < SLOTS; j++)
                    sr[j] += qr[d] * k[d * SLOTS + j];
            for (int j = 0; b->k_scale[i] && j < SLOTS; j++)
                sr[j] *= b->k_scale[i][j];
        }
    }
}

static void softmax(const struct kern_attn_block *b, float *s, int n_row, const int32_t *seen, float *m,
                    float *l, float *alpha, void *p)
{
    int n_slot = b->n_page * SLOTS;
    for (int r = 0; r < n_row; r++) {
        float *sr = s + r * KERN_ATTN_BLOCK;
        float *pr = (float *)((char *)p + r * KERN_ATTN_P_BYTES);
        int n = seen[r] < n_slot ? seen[r] : n_slot;
        float max = m[r], sum = 0;
        for (int j = 0; j < n; j++)
            max = sr[j] > max ? sr[j] : max;
        for (int j = 0; j < n_slot; j++) {
            float e = j < n ? exp2f(sr[j] - max) : 0;
            const float *scale = b->v_scale[j / SLOTS];
            sum += e;
            sr[j] = e;
            pr[j] = scale ? e * scale[j % SLOTS] : e;
        }
        alpha[r] = m[r] == -INFINITY ? 0 : exp2f(m[r] - max);
        l[r] = l[r] * alpha[r] + sum;
        m[r] = max;
    }
}

static void pv(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o)
{
    for (int r = 0; r < n_row; r++) {
        const float *pr = (const float *)((const char *)p + r * KERN_ATTN_P_BYTES);
        float *or = o + r * b->hd;
        for (int d = 0; d < b->hd; d++)
            or[d] *= alpha[r];
        for (int j = 0; j < b->n_page * SLOTS; j++) {
            const float *v = (const float *)b->v[j / SLOTS] + j % SLOTS * b->hd;
            for (int d = 0; d < b->hd; d++)
                or[d] += pr[j] * v[d];
        }
    }
}

/* ---- scores ------------------------------------------------------------------------------------------ */

static void colsum(const float *s, int n_row, int n_slot, const int32_t *seen, const float *m, const float *inv_l,
                   float *acc)
{
    for (int r = 0; r < n_row; r++)
        for (int j = 0; j < n_slot && j < seen[r]; j++)
            acc[j] += exp2f(s[r * KERN_ATTN_BLOCK + j] - m[r]) * inv_l[r];
}

static void probs(const float *e, int n_row, int n, const float *w, float decay, float *score)
{
    for (int j = 0; j < n; j++) {
        score[j] *= decay;
        for (int r = 0; r < n_row; r++)
            score[j] += e[r * KERN_ATTN_BLOCK + j] * w[r];
    }
}

static float lowest(const float *score, const int32_t *pos, int n, int32_t from, int32_t to)
{
    float low = INFINITY;
    for (int j = 0; j < n; j++)
        if (pos[j] >= from && pos[j] <= to && score[j] < low)
            low = score[j];
    return low;
}

static void scaled(const float *o, float f, int n, float *out)
{
    for (int i = 0; i < n; i++)
        out[i] = o[i] * f;
}

void kern_attn_scalar(struct kern_attn_fns *f)
{
    const struct kern_attn_form form = { .pack_q = pack_q, .qk = qk, .softmax = softmax, .pv = pv };
    for (int t = 0; t < KERN_KV_DTYPES; t++) {
        f->prefill[t] = form;
        if (t != KERN_KV_F32)
            f->prefill[t].panel = panel_f32;
        f->decode[t] = f->prefill[t];
    }
    f->colsum = colsum;
    f->probs = probs;
    f->lowest = lowest;
    f->scaled = scaled;
    f->store = store;
}
