/* test_linear.c - block formats, repacking, products of packed weights and row functions, for every ISA here. */
#include <check.h>

#include "tests/linear_rig.h"

static const struct kern_isa *isa[4];
static int n_isa;

/* --- block formats ---------------------------------------------------------------------------------- */

/* The golden file: "DQ01", then per type int32 type, weights, bytes; the blocks; the values by gguf-py in f32. */
START_TEST(test_dequant_golden)
{
    char path[512];
    const char *dir = getenv("srcdir");
    snprintf(path, sizeof path, "%s/tests/data/dequant.bin", dir ? dir : ".");
    FILE *f = fopen(path, "rb");
    ck_assert_msg(f != NULL, "%s", path);
    char magic[4];
    int32_t head[3];
    int seen = 0;
    ck_assert_uint_eq(fread(magic, 1, 4, f), 4);
    while (fread(head, 4, 3, f) == 3) {
        unsigned char *raw = malloc((size_t)head[2]);
        float *want = malloc((size_t)head[1] * 4), *got = malloc((size_t)head[1] * 4);
        ck_assert_uint_eq(fread(raw, 1, (size_t)head[2], f), (size_t)head[2]);
        ck_assert_uint_eq(fread(want, 4, (size_t)head[1], f), (size_t)head[1]);
        ck_assert_uint_eq(kern_row_bytes(head[0], head[1]), (size_t)head[2]);
        kern_dequant(head[0], raw, got, head[1]);
        for (int i = 0; i < head[1]; i++)
            ck_assert_msg(got[i] == want[i], "%s weight %d: %a, gguf-py has %a", kern_type_name(head[0]), i,
                          (double)got[i], (double)want[i]);
        free(raw);
        free(want);
        free(got);
        seen++;
    }
    fclose(f);
    ck_assert_int_eq(seen, 10);
}
END_TEST

START_TEST(test_half)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = kern_f16_to_f32((uint16_t)h);
        if (f != f)
            ck_assert((h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0);
        else
            ck_assert_uint_eq(kern_f32_to_f16(f), h);
    }
    /* between neighbours: to the nearer one, from the middle to the even one */
    for (uint32_t h = 0; h < 0x7bff; h++) {
        float a = kern_f16_to_f32((uint16_t)h), b = kern_f16_to_f32((uint16_t)(h + 1)), mid = a + (b - a) / 2;
        ck_assert_uint_eq(kern_f32_to_f16(mid), h + (h & 1));
        ck_assert_uint_eq(kern_f32_to_f16(nextafterf(mid, 0)), h);
        ck_assert_uint_eq(kern_f32_to_f16(nextafterf(mid, INFINITY)), h + 1);
    }
    ck_assert_uint_eq(kern_f32_to_f16(65519.0f), 0x7bff);
    ck_assert_uint_eq(kern_f32_to_f16(65520.0f), 0x7c00);
    ck_assert_uint_eq(kern_f32_to_f16(-1e30f), 0xfc00);
}
END_TEST

START_TEST(test_types)
{
    ck_assert(!kern_type_known(4) && !kern_type_known(-1) && kern_type_known(KERN_Q6_K));
    ck_assert_str_eq(kern_type_name(KERN_Q4_1), "Q4_1");
    ck_assert_str_eq(kern_type_name(99), "?");
    ck_assert_uint_eq(kern_row_bytes(KERN_Q4_K, 512), 288);
    ck_assert_uint_eq(kern_row_bytes(KERN_F32, 7), 28);
}
END_TEST

/* --- repacking ---------------------------------------------------------------------------------------- */

/* Weight (row, i) out of a packed matrix. */
static double packed_weight(const struct kern_packed *w, int64_t row, int64_t i)
{
    int panel = (int)(row / 16), j = (int)(row % 16);
    const unsigned char *q = kern_panel_at(w, panel, 0), *group = kern_panel_at(w, panel, (int)(i / 32));
    if (w->form == KERN_PF32)
        return (double)((const float *)q)[i * 16 + j];
    if (w->form == KERN_PF16)
        return (double)kern_f16_to_f32(((const uint16_t *)q)[i * 16 + j]);
    if (w->form == KERN_PBF16)
        return (double)kern_bf16_to_f32(((const uint16_t *)q)[i / 2 * 32 + 2 * j + i % 2]);
    const unsigned char *packed = kern_group_q(w, group);
    int in = (int)(i % 32), v = in / 4, byte = 4 * j + in % 4, value;
    if (w->form == KERN_P8)
        value = packed[64 * v + byte];
    else
        value = v < 4 ? packed[64 * v + byte] & 15 : packed[64 * (v - 4) + byte] >> 4;
    if (w->form == KERN_P5)
        value |= (packed[256 + byte] >> v & 1) << 4;
    if (w->form == KERN_P6) {
        value = v % 4 < 3 ? packed[64 * (v - v / 4) + byte] & 63 : 0;
        for (int part = 0; v % 4 == 3 && part < 3; part++)
            value |= packed[64 * (v / 4 * 3 + part) + byte] >> 6 << 2 * part;
    }
    double d, m = 0;
    if (w->super) {
        const uint16_t *head = kern_head_d(w, kern_panel_head(w, panel), (int)(i / 32));
        d = (double)kern_f16_to_f32(head[j]) * kern_group_sc(group, in / w->group)[j];
        if (w->has_m)
            m = (double)kern_f16_to_f32(head[16 + j]) * kern_group_mn(w, group)[j];
    } else {
        d = (double)kern_f16_to_f32(kern_group_d(group, in / w->group)[j]);
        if (w->has_m)
            m = (double)kern_f16_to_f32(kern_group_m(w, group)[j]);
    }
    return w->has_m ? d * value + m : d * (value - w->zero);
}

START_TEST(test_repack)
{
    int type = lrig_types[_i], block = kern_type_block(type);
    struct kern_tensor t = lrig_tensor(type, 37, block == 1 ? 70 : 512, 11);
    struct kern_packed p = lrig_pack(&t);
    float *row = lrig_alloc((size_t)t.cols * 4);
    ck_assert_int_eq(p.n_panel, 3);
    for (int64_t r = 0; r < t.rows; r++) {
        kern_dequant(type, (const unsigned char *)t.data + (size_t)r * kern_row_bytes(type, t.cols), row, t.cols);
        for (int64_t i = 0; i < t.cols; i++) {
            double got = packed_weight(&p, r, i), want = (double)row[i];
            double slack = 1e-7 * (fabs(want) + 0.3); /* the file's formula in f32 */
            ck_assert_msg(fabs(got - want) <= slack, "%s (%d, %d): %g, not %g", kern_type_name(type), (int)r,
                          (int)i, got, want);
        }
    }
    for (int64_t r = t.rows; r < 48; r++) /* what hangs over is zero */
        for (int64_t i = 0; i < t.cols; i++)
            ck_assert(packed_weight(&p, r, i) == 0);
    free(row);
    free(p.data);
    free((void *)t.data);
}
END_TEST

/* --- products --------------------------------------------------------------------------------------------- */

#define MAX_ROWS 40

/* One type and shape: the packed matrix, inputs in every form, results of an ISA. */
struct mul_case {
    struct kern_tensor t;
    struct kern_packed p;
    struct kern_input in;
    float *x, *acc[2];
    void *scratch;
};

static void case_open(struct mul_case *k, int type, int rows, int cols)
{
    k->t = lrig_tensor(type, rows, cols, (uint64_t)type * 1000 + (uint64_t)cols);
    k->p = lrig_pack(&k->t);
    k->in = lrig_input(MAX_ROWS, cols);
    k->x = lrig_floats((size_t)MAX_ROWS * (size_t)cols, 2.0f, 99);
    for (int r = 0; r < MAX_ROWS; r++) {
        for (int i = 0; r % 5 == 0 && i < cols; i += 7)
            k->x[r * cols + i] *= 20; /* outliers, as real activations have */
        isa[0]->lin.act_set(&k->in, r, k->x + (size_t)r * cols, cols);
    }
    for (int i = 0; i < 2; i++)
        k->acc[i] = lrig_alloc((size_t)MAX_ROWS * 16 * 4);
    k->scratch = lrig_alloc(kern_mul_scratch(&k->p));
}

static void case_close(struct mul_case *k)
{
    free((void *)k->t.data);
    free(k->p.data);
    lrig_input_free(&k->in);
    free(k->x);
    free(k->acc[0]);
    free(k->acc[1]);
    free(k->scratch);
}

static bool is_quant(const struct kern_packed *p)
{
    return kern_form_quant(p->form);
}

/* The product in double of what is packed and what was quantised, and the sum of magnitudes that bounds its error. */
static double exact(const struct mul_case *k, int panel, int r, int j, double *size)
{
    int64_t row = panel * 16 + j;
    double sum = 0;
    *size = 0;
    for (int64_t i = 0; row < k->p.rows && i < k->p.cols; i++) {
        size_t g = (size_t)r * k->in.n_group + (size_t)(i / 32), at = g * 32 + (size_t)(i % 32);
        double a = is_quant(&k->p) ? (double)k->in.q8[at] * (double)k->in.scale[4 * g] : (double)k->in.f32[at];
        double v = packed_weight(&k->p, row, i) * a;
        sum += v;
        *size += fabs(v);
    }
    return sum;
}

static void mul(const struct mul_case *k, int which, int panel, int row0, int n_row, float *acc)
{
    isa[which]->lin.mul(&k->p, panel, 0, &k->in, row0, n_row, acc, k->scratch);
}

static const int shapes[][2] = { { 16, 256 }, { 40, 512 }, { 33, 768 }, { 16, 2304 } };
static const int small_shapes[][2] = { { 16, 32 }, { 24, 96 }, { 100, 576 } };

static void each_case(int type, void (*fn)(struct mul_case *k))
{
    struct mul_case k;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        case_open(&k, type, shapes[s][0], shapes[s][1]);
        fn(&k);
        case_close(&k);
    }
    for (size_t s = 0; kern_type_block(type) <= 32 && s < sizeof small_shapes / sizeof small_shapes[0]; s++) {
        case_open(&k, type, small_shapes[s][0], small_shapes[s][1]);
        fn(&k);
        case_close(&k);
    }
}

/* Against double: 2^-22 of the sum of magnitudes (f32 sums of up to 144 scales); m and d * q may cancel, so 2^-19 where
 * there is a minimum or a zero point. bf16 activations: 2^-8. */
static void check_exact(struct mul_case *k)
{
    for (int which = 0; which < n_isa; which++)
        for (int panel = 0; panel < k->p.n_panel; panel++) {
            double bound = is_quant(&k->p) ? 0x1p-19 : isa[which]->lin.need[k->p.form] & KERN_NEED_BF16 ? 0x1p-8 : 0x1p-20;
            mul(k, which, panel, 0, MAX_ROWS, k->acc[0]);
            for (int i = 0; i < MAX_ROWS * 16; i++) {
                double size, want = exact(k, panel, i / 16, i % 16, &size);
                ck_assert_msg(fabs((double)k->acc[0][i] - want) <= bound * size + 1e-30,
                              "%s %s %dx%d row %d output %d: %.9g, not %.9g (of %g)", isa[which]->name,
                              kern_type_name(k->t.type), (int)k->p.rows, (int)k->p.cols, i / 16,
                              panel * 16 + i % 16, (double)k->acc[0][i], want, size);
            }
        }
}

/* Quantised forms: equal to scalar to the bit. All forms: any number of rows from any first row gives the same bits. */
static void check_bits(struct mul_case *k)
{
    for (int which = 0; which < n_isa; which++)
        for (int panel = 0; panel < k->p.n_panel; panel += k->p.n_panel > 1 ? k->p.n_panel - 1 : 1) {
            mul(k, is_quant(&k->p) ? 0 : which, panel, 0, MAX_ROWS, k->acc[0]);
            for (int n = 1; n <= MAX_ROWS; n++)
                for (int row0 = 0; row0 + n <= MAX_ROWS; row0 += which == 0 ? 39 : 13) {
                    mul(k, which, panel, row0, n, k->acc[1]);
                    ck_assert_msg(memcmp(k->acc[1], k->acc[0] + row0 * 16, (size_t)n * 64) == 0,
                                  "%s %s %dx%d: rows %d + %d differ", isa[which]->name, kern_type_name(k->t.type),
                                  (int)k->p.rows, (int)k->p.cols, row0, n);
                }
        }
}

/* Part of a matrix's groups (a head of the output projection), against scalar over the whole with zeros elsewhere. */
static void check_part(struct mul_case *k)
{
    int cols = (int)k->p.cols, g0 = k->p.n_group / 2, n = k->p.n_group - g0 > 1 ? k->p.n_group - g0 - 1 : 1;
    struct kern_input part = lrig_input(4, n * 32);
    float *wide = lrig_alloc((size_t)k->p.n_group * 32 * 4);
    for (int r = 0; r < 4; r++) {
        memset(wide, 0, (size_t)k->p.n_group * 32 * 4);
        for (int i = 0; i < n * 32 && g0 * 32 + i < cols; i++)
            wide[g0 * 32 + i] = k->x[r * cols + i];
        isa[0]->lin.act_set(&k->in, r, wide, cols);
        isa[0]->lin.act_set(&part, r, wide + g0 * 32, n * 32);
    }
    for (int which = 0; which < n_isa; which++)
        for (int rows = 1; rows <= 4; rows += 3) {
            mul(k, which, 0, 0, rows, k->acc[0]);
            isa[which]->lin.mul(&k->p, 0, g0, &part, 0, rows, k->acc[1], k->scratch);
            for (int i = 0; i < rows * 16; i++)
                ck_assert(k->acc[0][i] == k->acc[1][i]);
        }
    free(wide);
    lrig_input_free(&part);
}

/* Panels of Q4_0 and Q4_1 whose d are whole numbers of 15 bits in one unit, and such as have none. */
START_TEST(test_mul_unit)
{
    static const struct {
        float least, most; /* |d| of all groups but the last, and of the last */
        float unit;        /* expected, or 0 */
    } t[] = {
        { 2047, 2047 * 16.0f, 1 },                     /* the largest that 15 bits hold: 32752 */
        { 2047, 2047 * 32.0f, 0 },                     /* one bit more */
        { 0x1p-24f, 2047 * 0x1p-20f, 0x1p24f },        /* from the least of all halves */
        { 0x1p-24f, 0.25f, 0 },
        { 0x1.8p-9f, 0x1.ap-8f, 0x1p11f },
        { 0, 0.5f, 2 },
        { 0, 0, 1 },
        { 1, INFINITY, 0 },
    };
    static const int types[] = { KERN_Q4_0, KERN_Q4_1 };
    int type = types[_i % 2], i = _i / 2;
    size_t each = kern_type_block_bytes(type), n = 16 * 512 / 32;
    struct mul_case k;
    float unit;

    case_open(&k, type, 16, 512);
    unsigned char *b = (unsigned char *)k.t.data;
    for (size_t at = 0; at < n; at++) {
        float d = at + 1 == n ? t[i].most : t[i].least;
        if (at % 3 == 0)
            memset(b + at * each, 0xff, each);
        lrig_put_half(b + at * each, at % 5 == 0 ? -d : d);
        if (kern_type_has_min(type))
            lrig_put_half(b + at * each + 2, at % 7 == 0 ? 60000.0f : -3.5f * t[i].least);
    }
    memset(k.p.data, 0, k.p.panel_bytes);
    kern_pack_panel(&k.p, &k.t, 0);
    memcpy(&unit, kern_panel_head(&k.p, 0), sizeof unit);
    ck_assert_msg(unit == t[i].unit, "unit %g, not %g", (double)unit, (double)t[i].unit);
    for (int r = 0; r < MAX_ROWS; r += 2) { /* sums at their ends: the largest, both ways */
        for (int c = 0; c < 512; c++)
            k.x[r * 512 + c] = r % 4 == 0 ? 1.5f : -1.5f;
        isa[0]->lin.act_set(&k.in, r, k.x + (size_t)r * 512, 512);
    }
    check_bits(&k);
    case_close(&k);
}
END_TEST

START_TEST(test_mul_exact)
{
    each_case(lrig_types[_i], check_exact);
}
END_TEST

START_TEST(test_mul_bits)
{
    each_case(lrig_types[_i], check_bits);
}
END_TEST

START_TEST(test_mul_part)
{
    each_case(lrig_types[_i], check_part);
}
END_TEST

/* The largest sums that the formats allow: every q and every activation at its end. */
START_TEST(test_mul_saturation)
{
    int type = lrig_types[_i];
    if (kern_type_block(type) == 1)
        return;
    struct mul_case k;
    case_open(&k, type, 16, 512);
    unsigned char *b = (unsigned char *)k.t.data;
    size_t each = kern_type_block_bytes(type), n = 16 * (size_t)(512 / kern_type_block(type));
    uint64_t seed = 3;
    for (size_t i = 0; i < n; i++) {
        lrig_block(type, b + i * each, &seed);
        uint16_t first, second;
        memcpy(&first, b + i * each + (type == KERN_Q6_K ? 208 : 0), 2);
        memcpy(&second, b + i * each + 2, 2);
        memset(b + i * each, type == KERN_Q8_0 ? (i & 1 ? 0x7f : 0x80) : 0xff, each);
        memcpy(b + i * each + (type == KERN_Q6_K ? 208 : 0), &first, 2);
        if (kern_type_has_min(type))
            memcpy(b + i * each + 2, &second, 2);
    }
    for (int i = 0; i < k.p.n_panel; i++)
        kern_pack_panel(&k.p, &k.t, i);
    for (int r = 0; r < MAX_ROWS; r++) {
        float x[512];
        for (int i = 0; i < 512; i++)
            x[i] = r & 1 ? -1.0f : 1.0f;
        isa[0]->lin.act_set(&k.in, r, x, 512);
    }
    check_bits(&k);
    check_exact(&k);
    case_close(&k);
}
END_TEST

START_TEST(test_dot_f32)
{
    enum { N = 608, W = 7, X = 9 };
    float *w = lrig_floats(W * N, 1, 5), *x = lrig_floats(X * N, 1, 6), out[X][W], one;
    for (int which = 0; which < n_isa; which++) {
        isa[which]->lin.dot_f32(w, N, W, x, N, X, N, &out[0][0], W);
        for (int i = 0; i < X; i++)
            for (int j = 0; j < W; j++) {
                double want = 0;
                for (int k = 0; k < N; k++)
                    want += (double)w[j * N + k] * (double)x[i * N + k];
                ck_assert_double_le(fabs((double)out[i][j] - want), 1e-5 * sqrt(N));
                isa[which]->lin.dot_f32(w + j * N, N, 1, x + i * N, N, 1, N, &one, 1);
                ck_assert(one == out[i][j]);
            }
    }
    free(w);
    free(x);
}
END_TEST

/* --- rows --------------------------------------------------------------------------------------------------- */

START_TEST(test_act)
{
    const int cols = 81; /* two groups and a part of a third */
    for (int which = 0; which < n_isa; which++) {
        struct kern_input a = lrig_input(2, cols), ref = lrig_input(2, cols);
        float *x = lrig_floats(81, 3, 17);
        memset(x + 32, 0, 32 * 4); /* a group of zeros */
        isa[which]->lin.act_set(&a, 1, x, cols);
        isa[0]->lin.act_set(&ref, 1, x, cols);
        for (int i = 0; i < 96; i++) {
            int g = 3 + i / 32;
            float v = i < cols ? x[i] : 0;
            ck_assert(fabsf((float)a.q8[96 + i] * a.scale[4 * g] - v) <= 0.5001f * a.scale[4 * g]);
            ck_assert(a.f32[96 + i] == v);
            ck_assert_int_eq(a.bf16[96 + i], kern_f32_to_bf16(v));
            static const int order[4] = { 0, 2, 1, 3 };
            ck_assert_int_eq(a.q16[96 + i], a.q8[96 + (i & ~3) + order[i & 3]]);
        }
        for (int g = 3; g < 6; g++) {
            int s[2] = { 0, 0 };
            for (int i = 0; i < 32; i++)
                s[i / 16] += a.q8[g * 32 + i];
            const float *scale = a.scale + 4 * g;
            ck_assert(scale[1] == scale[0] * (float)(s[0] + s[1]));
            ck_assert(scale[2] == scale[0] * (float)s[0] && scale[3] == scale[0] * (float)s[1]);
        }
        ck_assert(memcmp(a.q8, ref.q8, 192) == 0 && memcmp(a.scale, ref.scale, 96) == 0);
        free(x);
        lrig_input_free(&a);
        lrig_input_free(&ref);
    }
}
END_TEST

START_TEST(test_rmsnorm)
{
    const int sizes[] = { 16, 64, 576, 577, 7 };
    for (int which = 0; which < n_isa; which++)
        for (int k = 0; k < 5; k++) {
            int n = sizes[k];
            float *x = lrig_floats((size_t)n, 5, 1), *w = lrig_floats((size_t)n, 1, 2), *o = lrig_alloc((size_t)n * 4),
                  *ref = lrig_alloc((size_t)n * 4);
            double sum = 0;
            for (int i = 0; i < n; i++)
                sum += (double)x[i] * (double)x[i];
            isa[0]->lin.rmsnorm(x, w, 1e-5f, n, ref);
            isa[which]->lin.rmsnorm(x, w, 1e-5f, n, o);
            for (int i = 0; i < n; i++) {
                double want = (double)x[i] / sqrt(sum / n + 1e-5) * (double)w[i];
                ck_assert_double_le(fabs((double)o[i] - want), 1e-6 * fabs(want) + 1e-12);
                ck_assert(o[i] == ref[i]);
            }
            isa[which]->lin.rmsnorm(x, w, 1e-5f, n, x);
            ck_assert(memcmp(x, o, (size_t)n * 4) == 0);
            free(x);
            free(w);
            free(o);
            free(ref);
        }
}
END_TEST

START_TEST(test_gated)
{
    enum { N = 4096 };
    float *g = lrig_alloc(N * 4), *u = lrig_floats(N, 3, 8), *o = lrig_alloc(N * 4), *ref = lrig_alloc(N * 4);
    for (int i = 0; i < N; i++)
        g[i] = (float)(i - N / 2) * 0.05f; /* -102.4 .. 102.3 */
    for (int act = KERN_ACT_SILU; act <= KERN_ACT_GELU_TANH; act++)
        for (int which = 0; which < n_isa; which++) {
            isa[0]->lin.gated(act, g, u, N, ref);
            isa[which]->lin.gated(act, g, u, N, o);
            for (int i = 0; i < N; i++) {
                double x = (double)g[i], y;
                if (act == KERN_ACT_SILU)
                    y = x / (1 + exp(-x));
                else
                    y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
                y *= (double)u[i];
                ck_assert_msg(fabs((double)o[i] - y) <= 1e-6 * fabs(y) + 2e-6, "act(%g): %g, not %g", x,
                              (double)o[i], y);
                ck_assert(o[i] == ref[i]);
            }
        }
    free(g);
    free(u);
    free(o);
    free(ref);
}
END_TEST

START_TEST(test_rope)
{
    const int rots[] = { 64, 48, 20, 2 };
    for (int which = 0; which < n_isa; which++)
        for (int k = 0; k < 4; k++) {
            int rot = rots[k];
            float x[64], y[64], table[128];
            uint64_t seed = 4;
            for (int layout = KERN_ROPE_INTERLEAVED; layout <= KERN_ROPE_HALF; layout++) {
                for (int i = 0; i < 64; i++)
                    x[i] = y[i] = lrig_float(&seed);
                for (int i = 0; i < rot / 2; i++) {
                    float c = cosf((float)i + 0.3f), s = sinf((float)i + 0.3f);
                    if (layout == KERN_ROPE_INTERLEAVED) {
                        table[2 * i] = table[2 * i + 1] = c;
                        table[rot + 2 * i] = -s;
                        table[rot + 2 * i + 1] = s;
                    } else {
                        table[i] = c;
                        table[rot + i] = s;
                    }
                }
                isa[which]->lin.rope(layout, table, rot, x);
                for (int i = 0; i < rot / 2; i++) {
                    int a = layout == KERN_ROPE_HALF ? i : 2 * i, b = layout == KERN_ROPE_HALF ? i + rot / 2 : 2 * i + 1;
                    double c = cos(i + 0.3), s = sin(i + 0.3);
                    ck_assert_double_le(fabs((double)x[a] - ((double)y[a] * c - (double)y[b] * s)), 5e-6);
                    ck_assert_double_le(fabs((double)x[b] - ((double)y[b] * c + (double)y[a] * s)), 5e-6);
                }
                for (int i = rot; i < 64; i++)
                    ck_assert(x[i] == y[i]);
            }
        }
}
END_TEST

START_TEST(test_registry)
{
    struct skv_error err;
    ck_assert_str_eq(isa[0]->name, "scalar");
    ck_assert_ptr_eq(kern_isa_get("scalar", &err), isa[0]);
    ck_assert_ptr_null(kern_isa_get("itanium", &err));
    ck_assert_int_eq(err.code, SKV_BAD_CONFIG);
    ck_assert_ptr_nonnull(strstr(err.msg, "scalar"));
    ck_assert(setenv("SKVD_ISA", "scalar", 1) == 0);
    ck_assert_ptr_eq(kern_isa_get(NULL, &err), isa[0]);
    unsetenv("SKVD_ISA");
    ck_assert_ptr_eq(kern_isa_get("auto", &err), isa[n_isa - 1]);
}
END_TEST

int main(void)
{
    n_isa = kern_isa_list(isa);
    Suite *s = suite_create("linear");
    TCase *t = tcase_create("linear");
    tcase_set_timeout(t, 120);
    tcase_add_test(t, test_dequant_golden);
    tcase_add_test(t, test_half);
    tcase_add_test(t, test_types);
    tcase_add_test(t, test_registry);
    tcase_add_loop_test(t, test_repack, 0, LRIG_TYPES);
    tcase_add_loop_test(t, test_mul_exact, 0, LRIG_TYPES);
    tcase_add_loop_test(t, test_mul_bits, 0, LRIG_TYPES);
    tcase_add_loop_test(t, test_mul_unit, 0, 2 * 8);
    tcase_add_loop_test(t, test_mul_part, 0, LRIG_TYPES);
    tcase_add_loop_test(t, test_mul_saturation, 0, LRIG_TYPES);
    tcase_add_test(t, test_dot_f32);
    tcase_add_test(t, test_act);
    tcase_add_test(t, test_rmsnorm);
    tcase_add_test(t, test_gated);
    tcase_add_test(t, test_rope);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? 1 : 0;
}
