/* pack.c - repacking GGUF matrices into the panels of isa_linear.h. */
#include "kernels/pack.h"

#include "kernels/blocks.h"

#include <math.h>
#include <string.h>

/* --- shapes ---------------------------------------------------------------------------------------- */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

void kern_pack_shape(struct kern_packed *p, const struct kern_tensor *t)
{
    *p = (struct kern_packed){ .rows = t->rows, .cols = t->cols, .group = 32 };
    p->n_panel = (int)((t->rows + KERN_PANEL - 1) / KERN_PANEL);
    p->n_group = (int)((t->cols + KERN_GROUP - 1) / KERN_GROUP);
    switch (t->type) {
    case KERN_F32:
        p->form = KERN_PF32;
        p->q_bytes = KERN_GROUP * KERN_PANEL * 4;
        break;
    case KERN_F16:
    case KERN_BF16:
        p->form = t->type == KERN_F16 ? KERN_PF16 : KERN_PBF16;
        p->q_bytes = KERN_GROUP * KERN_PANEL * 2;
        break;
    default:
        p->q_max = t->type == KERN_Q8_0 ? 255
                   : t->type == KERN_Q6_K ? 63
                   : t->type == KERN_Q5_0 || t->type == KERN_Q5_1 || t->type == KERN_Q5_K ? 31 : 15;
        p->form = p->q_max == 15 ? KERN_P4 : KERN_P8;
        p->group = t->type == KERN_Q6_K ? 16 : 32;
        p->has_m = kern_type_has_min(t->type);
        p->zero = kern_type_zero(t->type);
        p->q_bytes = KERN_GROUP * KERN_PANEL / (p->form == KERN_P4 ? 2 : 1);
    }
    size_t scales = p->q_max ? (size_t)(KERN_GROUP / p->group) * KERN_PANEL * sizeof(uint16_t) : 0;
    p->group_bytes = p->q_bytes + scales * (p->has_m ? 2 : 1);
    p->panel_bytes = p->stride = round_up((size_t)p->n_group * p->group_bytes + kern_panel_tail(p), 64);
}

/* --- repacking one panel ------------------------------------------------------------------------------ */

/* Half precision, kept finite: only a broken file has scales beyond it. */
static uint16_t half(float f)
{
    return kern_f32_to_f16(fminf(fmaxf(f, -65504.0f), 65504.0f));
}

/* Row j of a panel, its 32 inputs of group g. */
static void put_group(const struct kern_packed *p, unsigned char *panel, int j, int g, const struct kern_group *q)
{
    unsigned char *group = panel + (size_t)g * p->group_bytes, *to = group + 4 * j;
    if (p->form == KERN_P8) {
        for (int v = 0; v < 8; v++)
            memcpy(to + 64 * v, q->q + 4 * v, 4);
    } else {
        for (int v = 0; v < 4; v++) {
            uint32_t lo, hi;
            memcpy(&lo, q->q + 4 * v, 4);
            memcpy(&hi, q->q + 16 + 4 * v, 4);
            lo |= hi << 4;
            memcpy(to + 64 * v, &lo, 4);
        }
    }
    uint16_t *d = (uint16_t *)(group + p->q_bytes) + j;
    int per = KERN_GROUP / p->group;
    for (int k = 0; k < per; k++)
        d[k * KERN_PANEL] = half(q->d[k]);
    if (p->has_m)
        d[per * KERN_PANEL] = half(q->m);
}

static void pack_row_quant(const struct kern_packed *p, int type, unsigned char *panel, int j, const void *row)
{
    struct kern_group q;
    for (int g = 0; g < p->n_group; g++) {
        kern_group_get(type, row, g, &q);
        put_group(p, panel, j, g, &q);
    }
}

/* Q4_0 and Q4_1 blocks hold their nibbles as P4 does, so bytes are copied as they are. */
static void pack_row_q4(const struct kern_packed *p, int type, unsigned char *panel, int j, const void *row)
{
    const unsigned char *b = row;
    size_t block = kern_type_block_bytes(type);
    for (int g = 0; g < p->n_group; g++, b += block) {
        unsigned char *group = panel + (size_t)g * p->group_bytes, *to = group + 4 * j;
        uint16_t *d = (uint16_t *)(group + p->q_bytes) + j;
        const unsigned char *qs = b + block - 16;
        for (int v = 0; v < 4; v++)
            memcpy(to + 64 * v, qs + 4 * v, 4);
        memcpy(d, b, 2);
        if (p->has_m)
            memcpy(d + KERN_PANEL, b + 2, 2);
    }
}

static void pack_row_float(const struct kern_packed *p, int type, unsigned char *panel, int j, const void *row)
{
    (void)type;
    if (p->form == KERN_PF32) {
        const float *x = row;
        for (int64_t i = 0; i < p->cols; i++)
            ((float *)panel)[i * KERN_PANEL + j] = x[i];
        return;
    }
    const uint16_t *x = row;
    uint16_t *to = (uint16_t *)panel;
    for (int64_t i = 0; i < p->cols; i++)
        to[p->form == KERN_PF16 ? i * KERN_PANEL + j : (i / 2) * 2 * KERN_PANEL + 2 * j + i % 2] = x[i];
}

/* See isa_linear.h. Every half is a whole number of 2^-24, of 40 bits at most: those that any of them has decide. */
static float panel_unit(const struct kern_packed *p, const unsigned char *panel)
{
    uint64_t bits = 0;
    for (int g = 0; g < p->n_group; g++) {
        const uint16_t *d = (const uint16_t *)(panel + (size_t)g * p->group_bytes + p->q_bytes);
        for (int j = 0; j < KERN_PANEL; j++) {
            unsigned e = d[j] >> 10 & 31, m = d[j] & 0x3ff;
            if (e == 31) /* an infinity */
                return 0;
            bits |= e > 0 ? (uint64_t)(m | 0x400) << (e - 1) : m;
        }
    }
    if (bits == 0)
        return 1;
    int low = __builtin_ctzll(bits), top = 63 - __builtin_clzll(bits);
    return top - low < 15 ? ldexpf(1.0f, 24 - low) : 0.0f;
}

void kern_pack_panel(const struct kern_packed *p, const struct kern_tensor *t, int panel)
{
    unsigned char *to = p->data + (size_t)panel * p->stride;
    size_t row_bytes = kern_row_bytes(t->type, t->cols);
    void (*pack)(const struct kern_packed *, int, unsigned char *, int, const void *) =
        t->type == KERN_Q4_0 || t->type == KERN_Q4_1 ? pack_row_q4 : p->q_max ? pack_row_quant : pack_row_float;
    for (int j = 0; j < KERN_PANEL; j++) {
        int64_t row = (int64_t)panel * KERN_PANEL + j;
        if (row < p->rows)
            pack(p, t->type, to, j, (const unsigned char *)t->data + (size_t)row * row_bytes);
    }
    if (p->form == KERN_P4) {
        float unit = panel_unit(p, to);
        memcpy(to + (size_t)p->n_group * p->group_bytes, &unit, sizeof unit);
    }
}
