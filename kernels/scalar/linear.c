/* scalar/linear.c - the linear micro-kernels in portable C: the definition, and the oracle of the tests. */
#include "kernels/isa_linear.h"

#include "kernels/blocks.h"

#include <math.h>

typedef struct {
    float v[16];
} v16;

#define V16_MAP(expr)               \
    v16 o;                          \
    for (int i = 0; i < 16; i++)    \
        o.v[i] = (expr);            \
    return o

static inline v16 v16_load(const float *p)
{
    V16_MAP(p[i]);
}
static inline void v16_store(float *p, v16 a)
{
    for (int i = 0; i < 16; i++)
        p[i] = a.v[i];
}
static inline v16 v16_set1(float f)
{
    V16_MAP(f);
}
static inline v16 v16_add(v16 a, v16 b)
{
    V16_MAP(a.v[i] + b.v[i]);
}
static inline v16 v16_sub(v16 a, v16 b)
{
    V16_MAP(a.v[i] - b.v[i]);
}
static inline v16 v16_mul(v16 a, v16 b)
{
    V16_MAP(a.v[i] * b.v[i]);
}
static inline v16 v16_div(v16 a, v16 b)
{
    V16_MAP(a.v[i] / b.v[i]);
}
static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    V16_MAP(fmaf(a.v[i], b.v[i], c.v[i]));
}
static inline v16 v16_max(v16 a, v16 b)
{
    V16_MAP(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
static inline v16 v16_min(v16 a, v16 b)
{
    V16_MAP(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
static inline v16 v16_abs(v16 a)
{
    V16_MAP(fabsf(a.v[i]));
}
static inline v16 v16_pow2(v16 n)
{
    v16 o;
    for (int i = 0; i < 16; i++) {
        union {
            uint32_t u;
            float f;
        } b = { .u = (uint32_t)((int)n.v[i] + 127) << 23 };
        o.v[i] = b.f;
    }
    return o;
}
static inline v16 v16_swap(v16 a)
{
    V16_MAP(a.v[i ^ 1]);
}
static inline float v16_hsum(v16 a)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a.v[i] += a.v[i + half];
    return a.v[0];
}
static inline float v16_hmax(v16 a)
{
    float m = a.v[0];
    for (int i = 1; i < 16; i++)
        m = a.v[i] > m ? a.v[i] : m;
    return m;
}
static inline void v16_store_i8(int8_t *p, v16 a)
{
    for (int i = 0; i < 16; i++)
        p[i] = (int8_t)a.v[i];
}
static inline void v16_store_i16(int16_t *p, v16 a)
{
    static const int order[4] = { 0, 2, 1, 3 };
    for (int i = 0; i < 16; i++)
        p[i] = (int16_t)a.v[(i & ~3) + order[i & 3]];
}

#include "kernels/isa_rows.h"

/* q of input i of a group and panel row j. */
static int packed_q(const struct kern_packed *w, const unsigned char *group, int i, int j)
{
    const unsigned char *q = kern_group_q(w, group);
    int v = i / 4, byte = 4 * j + i % 4;
    if (w->form == KERN_P8)
        return q[64 * v + byte];
    if (w->form == KERN_P6) {
        const unsigned char *third = q + 64 * 3 * (v / 4) + byte;
        return v % 4 < 3 ? third[64 * (v % 4)] & 63 : third[0] >> 6 | third[64] >> 6 << 2 | third[128] >> 6 << 4;
    }
    int low = v < 4 ? q[64 * v + byte] & 15 : q[64 * (v - 4) + byte] >> 4;
    return w->form == KERN_P4 ? low : low | (q[256 + byte] >> v & 1) << 4;
}

/* The exact dot of row `row` and the group's inputs of scale k. */
static int group_dot(const struct kern_packed *w, const unsigned char *group, int k, const int8_t *x, int j)
{
    int dot = 0;
    for (int i = k * w->group; i < (k + 1) * w->group; i++)
        dot += packed_q(w, group, i, j) * x[i];
    return dot;
}

static float mul_quant(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row, int j)
{
    int per = KERN_GROUP / w->group; /* scales in 32 inputs */
    float acc = 0;
    for (int g = 0; g < a->n_group; g++) {
        const unsigned char *group = kern_panel_at(w, panel, g0 + g);
        const float *scale = a->scale + 4 * ((size_t)row * a->n_group + g);
        for (int k = 0; k < per; k++) {
            int dot = group_dot(w, group, k, a->q8 + ((size_t)row * a->n_group + g) * KERN_GROUP, j);
            float dw = kern_f16_to_f32(kern_group_d(group, k)[j]);
            float mw = w->has_m ? kern_f16_to_f32(kern_group_m(w, group)[j]) : dw * (float)-w->zero;
            acc = fmaf((float)dot * dw, scale[0], acc);
            acc = fmaf(scale[per == 1 ? 1 : 2 + k], mw, acc);
        }
    }
    return acc;
}

static float mul_super(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row, int j)
{
    int per = KERN_GROUP / w->group;
    float acc = 0, s = 0;
    for (int g = 0; g < a->n_group; g++) {
        const unsigned char *group = kern_panel_at(w, panel, g0 + g);
        const uint16_t *head = kern_head_d(w, kern_panel_head(w, panel), g0 + g);
        const float *scale = a->scale + 4 * ((size_t)row * a->n_group + g);
        for (int k = 0; k < per; k++) {
            int sc = kern_group_sc(group, k)[j];
            float sa = scale[per == 1 ? 1 : 2 + k];
            s = fmaf((float)(group_dot(w, group, k, a->q8 + ((size_t)row * a->n_group + g) * KERN_GROUP, j) * sc), scale[0], s);
            if (w->has_m)
                acc = fmaf(sa, (float)kern_group_mn(w, group)[j] * kern_f16_to_f32(head[KERN_PANEL + j]), acc);
            else
                s = fmaf(sa, (float)(-w->zero * sc), s);
        }
        if ((g0 + g) % KERN_SUPER == KERN_SUPER - 1 || g == a->n_group - 1) {
            acc = fmaf(s, kern_f16_to_f32(head[j]), acc);
            s = 0;
        }
    }
    return acc;
}

static float mul_float(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row, int j)
{
    const unsigned char *p = kern_panel_at(w, panel, g0);
    const float *x = a->f32 + (size_t)row * a->n_group * 32;
    float acc = 0;
    for (int i = 0; i < a->n_group * 32; i++) {
        size_t c = (size_t)i;
        float v;
        if (w->form == KERN_PF32)
            v = ((const float *)p)[c * KERN_PANEL + j];
        else if (w->form == KERN_PF16)
            v = kern_f16_to_f32(((const uint16_t *)p)[c * KERN_PANEL + j]);
        else
            v = kern_bf16_to_f32(((const uint16_t *)p)[(c / 2) * 2 * KERN_PANEL + 2 * j + c % 2]);
        acc = acc + v * x[i];
    }
    return acc;
}

static void scalar_mul(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                       int n_row, float *acc, void *scratch)
{
    (void)scratch;
    float (*fn)(const struct kern_packed *, int, int, const struct kern_input *, int, int) =
        w->super ? mul_super : kern_form_quant(w->form) ? mul_quant : mul_float;
    for (int r = 0; r < n_row; r++)
        for (int j = 0; j < KERN_PANEL; j++)
            acc[r * KERN_PANEL + j] = fn(w, panel, g0, a, row0 + r, j);
}

static void scalar_dot_f32(const float *w, int ldw, int n_w, const float *x, int ldx, int n_x, int n, float *out,
                           int ldo)
{
    for (int i = 0; i < n_x; i++)
        for (int j = 0; j < n_w; j++) {
            v16 s = v16_set1(0);
            for (int k = 0; k < n; k += 16)
                s = v16_add(s, v16_mul(v16_load(w + (size_t)j * ldw + k), v16_load(x + (size_t)i * ldx + k)));
            out[(size_t)i * ldo + j] = v16_hsum(s);
        }
}

void kern_linear_scalar(struct kern_linear_fns *f)
{
    rows_fill(f);
    f->mul = scalar_mul;
    f->dot_f32 = scalar_dot_f32;
    for (enum kern_form i = 0; i < KERN_FORMS; i++)
        f->need[i] = kern_form_quant(i) ? KERN_NEED_Q8 : KERN_NEED_F32;
}
