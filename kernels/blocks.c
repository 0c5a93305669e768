/* blocks.c - GGUF block formats: sizes, the parts of a group of 32 weights, exact dequantisation. */
#include "kernels/blocks.h"

#include <string.h>

struct type_row {
    int type;
    const char *name;
    int block;
    size_t bytes;
};

static const struct type_row types[] = {
    { KERN_F32, "F32", 1, 4 },      { KERN_F16, "F16", 1, 2 },       { KERN_BF16, "BF16", 1, 2 },
    { KERN_Q4_0, "Q4_0", 32, 18 },  { KERN_Q4_1, "Q4_1", 32, 20 },   { KERN_Q5_0, "Q5_0", 32, 22 },
    { KERN_Q5_1, "Q5_1", 32, 24 },  { KERN_Q8_0, "Q8_0", 32, 34 },   { KERN_Q4_K, "Q4_K", 256, 144 },
    { KERN_Q5_K, "Q5_K", 256, 176 }, { KERN_Q6_K, "Q6_K", 256, 210 },
};

static const struct type_row *type_find(int type)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (types[i].type == type)
            return &types[i];
    return NULL;
}

bool kern_type_known(int type)
{
    return type_find(type) != NULL;
}

const char *kern_type_name(int type)
{
    const struct type_row *t = type_find(type);
    return t ? t->name : "?";
}

int kern_type_block(int type)
{
    const struct type_row *t = type_find(type);
    return t ? t->block : 1;
}

size_t kern_type_block_bytes(int type)
{
    const struct type_row *t = type_find(type);
    return t ? t->bytes : 0;
}

size_t kern_row_bytes(int type, int64_t cols)
{
    const struct type_row *t = type_find(type);
    return t ? (size_t)(cols / t->block) * t->bytes : 0;
}

/* --- half precision ---------------------------------------------------------------------------- */

static float bits_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static uint32_t float_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

float kern_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff;
    if (e == 0) { /* zero and subnormals: m * 2^-24 is exact in f32 */
        float f = (float)m * 0x1p-24f;
        return sign ? -f : f;
    }
    if (e == 31)
        return bits_float(sign | 0x7f800000u | m << 13);
    return bits_float(sign | (e + 112) << 23 | m << 13);
}

uint16_t kern_f32_to_f16(float f)
{
    uint32_t u = float_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (a >= 0x47800000u) /* 65536 and more; 65520 .. 65536 round up to infinity below */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) /* below 2^-14: adding 0.5 aligns the last bit to 2^-24, rounded by the addition */
        return (uint16_t)(sign | (float_bits(bits_float(a) + 0.5f) - 0x3f000000u));
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

static uint16_t load16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* --- groups of 32 -------------------------------------------------------------------------------- */

/* Bits 4.. of a Q5 block: input j in bit j of qh. */
static void group_q5(const uint8_t *qh, const uint8_t *qs, uint8_t *q)
{
    uint32_t h = load32(qh);
    for (int j = 0; j < 16; j++) {
        q[j] = (uint8_t)((qs[j] & 15) | (h >> j & 1) << 4);
        q[j + 16] = (uint8_t)(qs[j] >> 4 | (h >> (j + 16) & 1) << 4);
    }
}

static void group_nibbles(const uint8_t *qs, uint8_t *q)
{
    for (int j = 0; j < 16; j++) {
        q[j] = qs[j] & 15;
        q[j + 16] = qs[j] >> 4;
    }
}

/* The 6-bit scale and minimum of group j (0..7) of a Q4_K / Q5_K superblock. */
static void scale_min_k4(const uint8_t *s, int j, int *sc, int *mn)
{
    if (j < 4) {
        *sc = s[j] & 63;
        *mn = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *mn = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

static void group_k45(const uint8_t *b, int j, bool five, struct kern_group *g)
{
    int sc, mn, shift = (j & 1) * 4;
    scale_min_k4(b + 4, j, &sc, &mn);
    g->super_d = load16(b);
    g->super_m = load16(b + 2);
    g->sc[0] = g->sc[1] = (int8_t)sc;
    g->mn = (uint8_t)mn;
    g->d[0] = g->d[1] = kern_f16_to_f32(g->super_d) * (float)sc;
    g->m = -(kern_f16_to_f32(g->super_m) * (float)mn);
    const uint8_t *qs = b + (five ? 48 : 16) + (j / 2) * 32, *qh = b + 16;
    for (int l = 0; l < 32; l++)
        g->q[l] = (uint8_t)((qs[l] >> shift & 15) | (five ? (qh[l] >> j & 1) << 4 : 0));
}

static void group_q6k(const uint8_t *b, int j, struct kern_group *g)
{
    int half = j / 4, part = j % 4; /* 128 weights a half; its parts of 32 share bytes of ql and qh */
    const uint8_t *ql = b + half * 64 + (part & 1) * 32, *qh = b + 128 + half * 32;
    const int8_t *sc = (const int8_t *)b + 192 + half * 8 + part * 2;
    g->super_d = load16(b + 208);
    float d = kern_f16_to_f32(g->super_d);
    memcpy(g->sc, sc, sizeof g->sc);
    for (int l = 0; l < 32; l++)
        g->q[l] = (uint8_t)((ql[l] >> (part / 2) * 4 & 15) | (qh[l] >> 2 * part & 3) << 4);
    g->d[0] = d * (float)sc[0];
    g->d[1] = d * (float)sc[1];
    g->m = 0;
}

void kern_group_get(int type, const void *row, int64_t group, struct kern_group *g)
{
    const uint8_t *b = row;
    if (kern_type_block(type) == 32) {
        b += (size_t)group * kern_type_block_bytes(type);
        g->d[0] = g->d[1] = kern_f16_to_f32(load16(b));
        g->m = 0;
    } else {
        b += (size_t)(group / 8) * kern_type_block_bytes(type);
    }
    switch (type) {
    case KERN_Q4_0:
        group_nibbles(b + 2, g->q);
        break;
    case KERN_Q4_1:
        g->m = kern_f16_to_f32(load16(b + 2));
        group_nibbles(b + 4, g->q);
        break;
    case KERN_Q5_0:
        group_q5(b + 2, b + 6, g->q);
        break;
    case KERN_Q5_1:
        g->m = kern_f16_to_f32(load16(b + 2));
        group_q5(b + 4, b + 8, g->q);
        break;
    case KERN_Q8_0:
        for (int j = 0; j < 32; j++)
            g->q[j] = b[2 + j] ^ 0x80;
        break;
    case KERN_Q4_K:
    case KERN_Q5_K:
        group_k45(b, (int)(group % 8), type == KERN_Q5_K, g);
        break;
    case KERN_Q6_K:
        group_q6k(b, (int)(group % 8), g);
        break;
    default:
        memset(g, 0, sizeof *g);
    }
}

int kern_type_zero(int type)
{
    switch (type) {
    case KERN_Q4_0:
        return 8;
    case KERN_Q5_0:
        return 16;
    case KERN_Q6_K:
        return 32;
    case KERN_Q8_0:
        return 128;
    default:
        return 0;
    }
}

bool kern_type_has_min(int type)
{
    return type == KERN_Q4_1 || type == KERN_Q5_1 || type == KERN_Q4_K || type == KERN_Q5_K;
}

/* --- dequantisation ------------------------------------------------------------------------------- */

static void dequant_groups(int type, const void *src, float *out, int64_t n)
{
    int zero = kern_type_zero(type);
    bool has_min = kern_type_has_min(type);
    struct kern_group g;
    for (int64_t k = 0; k < n / 32; k++, out += 32) {
        kern_group_get(type, src, k, &g);
        for (int j = 0; j < 32; j++) {
            float v = (float)(g.q[j] - zero) * g.d[j / 16];
            out[j] = has_min ? v + g.m : v;
        }
    }
}

void kern_dequant(int type, const void *src, float *out, int64_t n)
{
    const uint8_t *p = src;
    switch (type) {
    case KERN_F32:
        memcpy(out, src, (size_t)n * sizeof *out);
        break;
    case KERN_F16:
        for (int64_t i = 0; i < n; i++)
            out[i] = kern_f16_to_f32(load16(p + 2 * i));
        break;
    case KERN_BF16:
        for (int64_t i = 0; i < n; i++)
            out[i] = kern_bf16_to_f32(load16(p + 2 * i));
        break;
    default:
        dequant_groups(type, src, out, n);
    }
}
