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

static const unsigned form_bits[KERN_FORMS] = { /* of a weight */
    [KERN_P4] = 4, [KERN_P5] = 5, [KERN_P6] = 6, [KERN_P8] = 8, [KERN_PF32] = 32, [KERN_PF16] = 16, [KERN_PBF16] = 16,
};

void kern_pack_shape(struct kern_packed *p, const struct kern_tensor *t)
{
    *p = (struct kern_packed){ .rows = t->rows, .cols = t->cols, .group = 32 };
    p->n_panel = (int)((t->rows + KERN_PANEL - 1) / KERN_PANEL);
    p->n_group = (int)((t->cols + KERN_GROUP - 1) / KERN_GROUP);
    switch (t->type) {
    case KERN_F32:
        p->form = KERN_PF32;
        break;
    case KERN_F16:
        p->form = KERN_PF16;
        break;
    case KERN_BF16:
        p->form = KERN_PBF16;
        break;
    case KERN_Q8_0:
        p->form = KERN_P8;
        break;
    case KERN_Q6_K:
        p->form = KERN_P6;
        p->group = 16;
        break;
    case KERN_Q5_0:
    case KERN_Q5_1:
    case KERN_Q5_K:
        p->form = KERN_P5;
        break;
    default:
        p->form = KERN_P4;
    }
    if (kern_form_quant(p->form)) {
        size_t per = (size_t)(KERN_GROUP / p->group);
        p->has_m = kern_type_has_min(t->type);
        p->super = kern_type_block(t->type) == KERN_SUPER * KERN_GROUP;
        p->zero = kern_type_zero(t->type);
        p->scale_bytes = (per + p->has_m) * KERN_PANEL * (p->super ? 1 : sizeof(uint16_t));
        size_t supers = (size_t)(p->n_group + KERN_SUPER - 1) / KERN_SUPER;
        p->head_bytes = p->super ? supers * (1 + p->has_m) * KERN_PANEL * sizeof(uint16_t) : p->form == KERN_P4 ? 32 : 0;
    }
    p->group_bytes = p->scale_bytes + KERN_GROUP * KERN_PANEL * form_bits[p->form] / 8;
    p->panel_bytes = p->stride = round_up(p->head_bytes + (size_t)p->n_group * p->group_bytes, 64);
}

/* --- repacking one panel ------------------------------------------------------------------------------ */

/* Half precision, kept finite: only a broken file has scales beyond it. */
static uint16_t half(float f)
{
    return kern_f32_to_f16(fminf(fmaxf(f, -65504.0f), 65504.0f));
}

/* A column's 32 q, from its first byte: see isa_linear.h. */
static void put_nibbles(unsigned char *to, const uint8_t *q)
{
    for (int v = 0; v < 4; v++)
        for (int j = 0; j < 4; j++)
            to[64 * v + j] = (unsigned char)((q[4 * v + j] & 15) | q[16 + 4 * v + j] << 4);
}

static void put_p5(unsigned char *to, const uint8_t *q)
{
    put_nibbles(to, q);
    for (int i = 0; i < KERN_GROUP; i++)
        to[256 + i % 4] |= (unsigned char)(q[i] >> 4 << i / 4);
}

static void put_p6(unsigned char *to, const uint8_t *q)
{
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 12; i++) {
            unsigned upper = q[16 * k + 12 + i % 4] >> 2 * (i / 4) & 3;
            to[64 * (3 * k + i / 4) + i % 4] = (unsigned char)(q[16 * k + i] | upper << 6);
        }
}

static void put_p8(unsigned char *to, const uint8_t *q)
{
    for (int v = 0; v < 8; v++)
        memcpy(to + 64 * v, q + 4 * v, 4);
}

static void (*const put_q[])(unsigned char *, const uint8_t *) = {
    [KERN_P4] = put_nibbles, [KERN_P5] = put_p5, [KERN_P6] = put_p6, [KERN_P8] = put_p8,
};

/* Row j of a panel, its 32 inputs of group g. */
static void put_group(const struct kern_packed *p, unsigned char *panel, int j, int g, const struct kern_group *q)
{
    unsigned char *group = panel + p->head_bytes + (size_t)g * p->group_bytes;
    int per = KERN_GROUP / p->group;

    put_q[p->form](group + p->scale_bytes + 4 * j, q->q);
    if (p->super) {
        uint16_t *head = (uint16_t *)kern_head_d(p, panel, g) + j;
        int8_t *sc = (int8_t *)group + j;
        for (int k = 0; k < per; k++)
            sc[k * KERN_PANEL] = q->sc[k];
        head[0] = half(kern_f16_to_f32(q->super_d));
        if (p->has_m) {
            sc[per * KERN_PANEL] = (int8_t)q->mn;
            head[KERN_PANEL] = half(-kern_f16_to_f32(q->super_m));
        }
        return;
    }
    uint16_t *d = (uint16_t *)group + j;
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
        unsigned char *group = panel + p->head_bytes + (size_t)g * p->group_bytes, *to = group + p->scale_bytes + 4 * j;
        uint16_t *d = (uint16_t *)group + j;
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
        const uint16_t *d = (const uint16_t *)(panel + p->head_bytes + (size_t)g * p->group_bytes);
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
        t->type == KERN_Q4_0 || t->type == KERN_Q4_1 ? pack_row_q4 : kern_form_quant(p->form) ? pack_row_quant : pack_row_float;
    for (int j = 0; j < KERN_PANEL; j++) {
        int64_t row = (int64_t)panel * KERN_PANEL + j;
        if (row < p->rows)
            pack(p, t->type, to, j, (const unsigned char *)t->data + (size_t)row * row_bytes);
    }
    if (p->form == KERN_P4 && !p->super) {
        float unit = panel_unit(p, to);
        memcpy(to, &unit, sizeof unit);
    }
}
