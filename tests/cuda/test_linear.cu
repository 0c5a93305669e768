// test_linear.cu - dequantisation, embedding, decode products, norms and activations, against plain loops.
#include "tests/cuda/rig.h"

using rig::between;
using rig::close_to;
using rig::dev;
using rig::randoms;
using rig::uniform;

extern "C" {
#include "kernels/blocks.h"
}

static const int types[] = { KERN_F32,  KERN_F16,  KERN_BF16, KERN_Q4_0, KERN_Q4_1, KERN_Q5_0,
                             KERN_Q5_1, KERN_Q8_0, KERN_Q4_K, KERN_Q5_K, KERN_Q6_K };

// Random rows in a format: any bits are legal quants, the scales are made small numbers.
static std::vector<unsigned char> random_blocks(int type, int rows, int cols)
{
    std::vector<unsigned char> v(kern_row_bytes(type, cols) * rows);
    for (unsigned char &b : v)
        b = (unsigned char)rig::rng();
    size_t step = kern_type_block_bytes(type);
    auto half_at = [&](size_t at) {
        uint16_t h = kern_f32_to_f16(uniform(-0.1f, 0.1f));
        memcpy(&v[at], &h, 2);
    };
    for (size_t b = 0; b < v.size(); b += step)
        switch (type) {
        case KERN_F32: {
            float f = uniform();
            memcpy(&v[b], &f, 4);
            break;
        }
        case KERN_BF16: {
            uint16_t h = kern_f32_to_bf16(uniform());
            memcpy(&v[b], &h, 2);
            break;
        }
        case KERN_Q6_K:
            half_at(b + 208);
            break;
        case KERN_Q4_1:
        case KERN_Q5_1:
        case KERN_Q4_K:
        case KERN_Q5_K:
            half_at(b + 2); // fall through
        default:
            half_at(b);
        }
    return v;
}

struct weight_rig {
    std::vector<unsigned char> bytes;
    std::vector<float> exact; // [rows][cols]
    dev<unsigned char> d;
    cu_weight w;

    weight_rig(int type, int rows, int cols)
        : bytes(random_blocks(type, rows, cols)), exact((size_t)rows * cols), d(bytes),
          w{ d.p, type, rows, cols, kern_row_bytes(type, cols) }
    {
        for (int r = 0; r < rows; r++)
            kern_dequant(type, &bytes[r * w.row_bytes], &exact[(size_t)r * cols], cols);
    }
};

static void test_dequant(int type)
{
    int rows = between(3, 40), cols = 256 * between(1, 4);
    weight_rig t(type, rows, cols);
    dev<unsigned short> out((size_t)(rows - 1) * cols);
    cu_dequant_bf16(0, t.w, 1, rows - 1, out.p);
    std::vector<unsigned short> got = out.get();
    int bad = 0;
    for (size_t i = 0; i < got.size(); i++) // one step of bf16 where a product was fused
        bad += !(fabsf(rig::from_bf16(got[i]) - t.exact[i + cols]) <= 1.0f / 256 * fabsf(t.exact[i + cols]) + 1e-6f);
    CHECK(bad == 0);

    std::vector<int32_t> token = { rows - 1, 0, 2 };
    dev<int32_t> dt(token);
    dev<float> x((size_t)3 * cols);
    cu_embed(0, t.w, dt.p, 3, 2.0f, x.p);
    std::vector<float> e = x.get();
    double worst = 0;
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < cols; c++)
            rig::worsen(worst, (double)fabsf(e[r * cols + c] - 2 * t.exact[(size_t)token[r] * cols + c]));
    close_to("embedding", worst, 0, 1e-5);
}

static void test_qmv(int type, int n)
{
    int rows = between(1, 70), cols = 256 * between(1, 5), ldy = rows + 3, ldx = cols + 8 * between(0, 2);
    weight_rig t(type, rows, cols);
    std::vector<float> x = randoms((size_t)n * ldx);
    dev<float> dx(x), y((size_t)n * ldy);
    cu_qmv(0, t.w, dx.p, ldx, n, y.p, ldy);
    std::vector<float> got = y.get();
    double worst = 0;
    for (int r = 0; r < n; r++)
        for (int o = 0; o < rows; o++) {
            double want = 0, size = 1e-3;
            for (int c = 0; c < cols; c++) {
                double v = (double)t.exact[(size_t)o * cols + c] * x[(size_t)r * ldx + c];
                want += v;
                size += fabs(v);
            }
            rig::worsen(worst, fabs(got[(size_t)r * ldy + o] - want) / size);
        }
    close_to("product", worst, 0, 2e-6);
    // A row's result is the same bits whatever the batch.
    dev<float> one(std::vector<float>(x.end() - ldx, x.end())), y1(ldy);
    cu_qmv(0, t.w, one.p, ldx, 1, y1.p, ldy);
    std::vector<float> alone = y1.get();
    CHECK(memcmp(alone.data(), &got[(size_t)(n - 1) * ldy], rows * sizeof(float)) == 0);
}

// What exact.cuh says of a part and of their sum, in plain C.
static long long fixed(float v)
{
    return fabsf(v) < 2097152.0f ? llrint((double)v * 16777216.0) : 1ll << 54;
}

static bool same_number(float got, long long sum)
{
    float want = (float)((double)sum / 16777216.0); // exact in between: sums of a few parts are below 2^53
    return sum < 1ll << 53 ? memcmp(&got, &want, sizeof got) == 0 : std::isnan(got);
}

// Sums that any number of ranks may share: each part as cu_qmv gives it alone, rounded, added; whoever has which parts.
static void test_qmv_exact(int type, int n)
{
    int block = kern_type_block(type), part = block > 32 ? block : 32 * between(1, 4), parts = between(2, 6);
    int rows = between(1, 70), cols = part * parts, ldy = rows + 3, ldx = cols + 8 * between(0, 2), cut = between(1, parts - 1) * part;
    weight_rig t(type, rows, cols);
    std::vector<float> x = randoms((size_t)n * ldx);
    auto share = [&](int from, int to) {
        cu_weight w = t.w;
        w.data += from ? kern_row_bytes(type, from) : 0;
        w.cols = to - from;
        return w;
    };
    if (n >= 4) {
        x[(size_t)between(0, cols - 1)] = NAN;
        x[(size_t)ldx + between(0, cols - 1)] = n & 1 ? INFINITY : -INFINITY;
        for (int i = 0; i < part; i++)
            x[2 * (size_t)ldx + i] *= 1e9f; // some of these are out of range
    }
    dev<float> dx(x), one((size_t)n * ldy), y((size_t)n * ldy);
    dev<long long> all((size_t)n * ldy), mine((size_t)n * ldy), rest((size_t)n * ldy);
    cu_qmv_exact(0, t.w, part, dx.p, ldx, n, all.p, ldy);
    cu_qmv_exact(0, share(0, cut), part, dx.p, ldx, n, mine.p, ldy);
    cu_qmv_exact(0, share(cut, cols), part, dx.p + cut, ldx, n, rest.p, ldy);
    std::vector<long long> want((size_t)n * ldy);
    for (int p = 0; p < cols; p += part) {
        cu_qmv(0, share(p, p + part), dx.p + p, ldx, n, one.p, ldy);
        std::vector<float> v = one.get();
        for (size_t i = 0; i < v.size(); i++)
            want[i] += i % ldy < (size_t)rows ? fixed(v[i]) : 0;
    }
    std::vector<long long> got = all.get(), a = mine.get(), b = rest.get();
    cu_exact_out(0, all.p, got.size(), y.p);
    std::vector<float> f = y.get();
    int bad = 0, apart = 0, odd = 0, n_odd = 0;
    for (size_t i = 0; i < got.size(); i++)
        if (i % ldy < (size_t)rows) {
            bad += got[i] != want[i];
            apart += a[i] + b[i] != want[i];
            odd += !same_number(f[i], want[i]);
            n_odd += i / ldy < 2 && std::isfinite(f[i]);
        }
    CHECK(bad == 0 && apart == 0 && odd == 0);
    CHECK(n < 4 || n_odd == 0);
    cu_qmv_exact(0, t.w, part, dx.p + (size_t)(n - 1) * ldx, ldx, 1, mine.p, ldy); // alone, the same as among others
    CHECK(memcmp(mine.get().data(), &got[(size_t)(n - 1) * ldy], rows * sizeof(long long)) == 0);
}

static void test_exact_out()
{
    const long long bad = 1ll << 54, most = (1ll << 45) - 1;
    std::vector<long long> sum = { 0,   1,          -1,          most,       -most,      256 * most,      -256 * most,
                                   bad, 256 * bad - 1, bad - 255 * most, 255 * bad + most, 255 * bad - most, 16777217, -50331649 };
    dev<long long> d(sum);
    dev<float> y(sum.size());
    cu_exact_out(0, d.p, sum.size(), y.p);
    std::vector<float> got = y.get();
    for (size_t i = 0; i < sum.size(); i++)
        CHECK(same_number(got[i], sum[i]));
}

// Prefill's product: against plain loops; the same bits whatever rows and outputs are computed beside; and in parts.
static void test_exact_gemm()
{
    const int widths[] = { 32, 64, 96, 128, 160, 256 };
    int part = widths[between(0, 5)], parts = between(1, 4), cols = part * parts, rows = between(1, 140), outs = between(1, 140);
    int lda = cols + 8 * between(0, 2), ldw = cols + 8 * between(0, 2), cut = between(0, outs - 1), low = between(0, rows - 1);
    std::vector<unsigned short> a((size_t)rows * lda), w((size_t)outs * ldw);
    for (std::vector<unsigned short> *v : { &a, &w })
        for (unsigned short &h : *v)
            h = rig::to_bf16(uniform());
    a[between(0, cols - 1)] = rig::to_bf16(rows % 2 ? NAN : INFINITY); // of the first row
    dev<unsigned short> da(a), dw(w);
    dev<float> y((size_t)rows * outs), some((size_t)(rows - low) * (outs - cut));
    dev<long long> sum((size_t)rows * outs);
    cu_exact_gemm(0, dw.p, ldw, outs, cols, da.p, lda, rows, y.p);
    cu_exact_gemm(0, dw.p + (size_t)cut * ldw, ldw, outs - cut, cols, da.p + (size_t)low * lda, lda, rows - low, some.p);
    cu_exact_gemm_parts(0, dw.p, ldw, outs, cols, part, da.p, lda, rows, sum.p);
    std::vector<float> got = y.get(), beside = some.get();
    std::vector<long long> total((size_t)rows * outs);
    for (int p = 0; p < cols; p += part) {
        cu_exact_gemm(0, dw.p + p, ldw, outs, part, da.p + p, lda, rows, y.p);
        std::vector<float> v = y.get();
        for (size_t i = 0; i < v.size(); i++)
            total[i] += fixed(v[i]);
    }
    CHECK(sum.get() == total);
    double worst = 0;
    int other = 0, finite = 0;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++) {
            double want = 0, size = 1e-3;
            for (int c = 0; c < cols; c++) {
                double v = (double)rig::from_bf16(a[(size_t)r * lda + c]) * rig::from_bf16(w[(size_t)o * ldw + c]);
                want += v;
                size += fabs(v);
            }
            float is = got[(size_t)r * outs + o];
            if (r == 0)
                finite += std::isfinite(is) || total[o] < 1ll << 53;
            else
                rig::worsen(worst, fabs(is - want) / size);
            if (r >= low && o >= cut)
                other += memcmp(&is, &beside[(size_t)(r - low) * (outs - cut) + o - cut], sizeof is) != 0;
        }
    close_to("exact gemm", worst, 0, 2e-6);
    CHECK(other == 0 && finite == 0);
}

static void test_norm(int d, bool with_y, bool post, bool gather)
{
    const int n = 3, all = 5;
    std::vector<float> x = randoms((size_t)all * d, 3.0f), y = randoms((size_t)n * d), yn = randoms(d), w = randoms(d);
    std::vector<int32_t> row = { 4, 0, 2 };
    dev<float> dx(x), dy(y), dyn(yn), dw(w), out((size_t)n * d);
    dev<unsigned short> out16((size_t)n * d);
    dev<int32_t> drow(row);
    cu_add_norm(0, dx.p, with_y ? dy.p : nullptr, post ? dyn.p : nullptr, dw.p, 1e-5f, d, n, gather ? drow.p : nullptr,
                out.p, out16.p);
    std::vector<float> gx = dx.get(), go = out.get();
    std::vector<unsigned short> g16 = out16.get();
    double worst_x = 0, worst_o = 0, worst_16 = 0;
    for (int r = 0; r < n; r++) {
        int from = gather ? row[r] : r;
        double s = 0, sy = 0;
        std::vector<double> v(d);
        for (int i = 0; i < d; i++)
            sy += (double)y[r * d + i] * y[r * d + i];
        for (int i = 0; i < d; i++) {
            v[i] = x[(size_t)from * d + i];
            if (with_y)
                v[i] += post ? y[r * d + i] / sqrt(sy / d + 1e-5) * yn[i] : y[r * d + i];
            s += v[i] * v[i];
            rig::worsen(worst_x, fabs(gx[(size_t)from * d + i] - v[i]));
        }
        for (int i = 0; i < d; i++) {
            double want = v[i] / sqrt(s / d + 1e-5) * w[i];
            rig::worsen(worst_o, fabs(go[r * d + i] - want));
            rig::worsen(worst_16, fabs(rig::from_bf16(g16[r * d + i]) - want) / (0.01 + fabs(want)));
        }
    }
    close_to("norm x", worst_x, 0, 1e-5);
    close_to("norm out", worst_o, 0, 1e-5);
    close_to("norm bf16", worst_16, 0, 1.0 / 256 + 1e-4);
}

static void test_act(bool gelu)
{
    const int n_row = 3, n = 170;
    std::vector<float> gu = randoms((size_t)n_row * 2 * n, 6.0f);
    dev<float> d(gu), out((size_t)n_row * n);
    cu_gated_act(0, d.p, n_row, n, gelu, out.p, nullptr);
    std::vector<float> got = out.get();
    double worst = 0;
    for (int r = 0; r < n_row; r++)
        for (int i = 0; i < n; i++) {
            double g = gu[(size_t)r * 2 * n + i], u = gu[(size_t)r * 2 * n + n + i];
            double a = gelu ? 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) : g / (1 + exp(-g));
            rig::worsen(worst, fabs(got[r * n + i] - a * u));
        }
    close_to(gelu ? "gelu" : "silu", worst, 0, 2e-5);
}

int main()
{
    for (int type : types) {
        CHECK(cu_type_ok(type));
        test_dequant(type);
        const int batch[] = { 1, 2, 4, 5, 8, 19 };
        for (int n : batch)
            test_qmv(type, n);
        for (int n : { 1, 4, 19 })
            test_qmv_exact(type, n);
    }
    test_exact_out();
    for (int i = 0; i < 6; i++)
        test_exact_gemm();
    CHECK(!cu_type_ok(1000));
    for (int i = 0; i < 8; i++)
        test_norm(between(1, 3) * 32 + between(0, 500), i & 1, i & 2, i & 4);
    test_act(false);
    test_act(true);
    return rig::done();
}
