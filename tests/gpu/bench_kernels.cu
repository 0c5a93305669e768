// bench_kernels.cu - times of the CUDA kernels on a real device, with their share of its memory bandwidth or of its bf16 rate.
//
// For tests/gpu/run. Shapes are Llama-3-8B's: 32 query and 8 KV heads of 128, width 4096, feed-forward 14336. Peaks come from
// the device's own clocks; products a clock and multiprocessor from NVIDIA's tables (dense bf16, sums in f32).
#include "tests/cuda/rig.h"

#include <functional>

using rig::dev;
using rig::kv_rig;

static double peak_bytes, peak_flops;

static void device_peaks()
{
    int major, minor, sms, mhz_sm, mhz_mem, bus;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(&mhz_sm, cudaDevAttrClockRate, 0); // kHz
    cudaDeviceGetAttribute(&mhz_mem, cudaDevAttrMemoryClockRate, 0);
    cudaDeviceGetAttribute(&bus, cudaDevAttrGlobalMemoryBusWidth, 0);
    int per_clock = major == 8 && minor == 0 ? 2048 : major == 8 ? 512 : major == 9 ? 4096 : major == 10 ? 8192 : 512;
    peak_bytes = 2.0 * mhz_mem * 1e3 * bus / 8;
    peak_flops = (double)per_clock * sms * mhz_sm * 1e3;
    printf("sm_%d%d, %d multiprocessors: %.0f GB/s, %.0f bf16 TFLOP/s at its highest clocks\n", major, minor, sms,
           peak_bytes / 1e9, peak_flops / 1e12);
}

// Median of 20 runs in microseconds, after three.
static double time_us(const std::function<void()> &work)
{
    std::vector<float> t;
    cudaEvent_t from, to;
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    for (int i = 0; i < 23; i++) {
        float ms;
        OK(cudaEventRecord(from));
        work();
        OK(cudaEventRecord(to));
        OK(cudaEventSynchronize(to));
        OK(cudaEventElapsedTime(&ms, from, to));
        if (i >= 3)
            t.push_back(ms * 1e3f);
    }
    OK(cudaEventDestroy(from));
    OK(cudaEventDestroy(to));
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

static void say(const char *what, double us, double bytes, double flops)
{
    printf("%-44s %9.1f us  %7.1f GB/s (%4.1f %%)  %7.2f TFLOP/s (%4.1f %%)\n", what, us, bytes / us / 1e3,
           100 * bytes / us * 1e6 / peak_bytes, flops / us / 1e6, 100 * flops / us * 1e6 / peak_flops);
}

static void products(int type, const char *name)
{
    const int rows = 14336, cols = 4096;
    size_t row_bytes = kern_row_bytes(type, cols);
    dev<unsigned char> w(std::vector<unsigned char>(row_bytes * rows, 1));
    dev<float> x(rig::randoms((size_t)32 * cols)), y((size_t)32 * rows);
    cu_weight wt = { w.p, type, rows, cols, row_bytes };
    for (int n : { 1, 4, 16, 32 }) {
        char what[80];
        snprintf(what, sizeof what, "decode product, %s, %d rows", name, n);
        say(what, time_us([&] { cu_qmv(0, wt, x.p, cols, n, y.p, rows); }), (double)row_bytes * rows, 2.0 * n * rows * cols);
    }
    dev<unsigned short> out((size_t)rows * cols);
    char what[80];
    snprintf(what, sizeof what, "dequantise to bf16, %s", name);
    say(what, time_us([&] { cu_dequant_bf16(0, wt, 0, rows, out.p); }), (double)rows * (row_bytes + 2.0 * cols), 0);
}

static void decode(kern_kv_dtype dt, const char *name, int batch, int slots)
{
    const int hd = 128, n_kv = 8, g = 4, n_head = n_kv * g, width = (n_head + 2 * n_kv) * hd;
    int n_split = (slots + DEC_SPLIT - 1) / DEC_SPLIT;
    kv_rig kv(dt, hd, batch, n_kv, (slots + 31) / 32);
    for (int32_t &n : kv.len)
        n = slots;
    kv.put();
    std::vector<int32_t> lane(batch), now(batch, slots);
    for (int i = 0; i < batch; i++)
        lane[i] = i;
    dev<float> q(rig::randoms((size_t)batch * width)), po((size_t)batch * n_head * n_split * hd);
    dev<float> ml((size_t)batch * n_head * n_split * 2), logit((size_t)batch * n_head * n_split * DEC_SPLIT);
    dev<float> out((size_t)batch * n_head * hd);
    dev<int32_t> dl(lane), dn(now), pin(std::vector<int32_t>(2, 0));
    for (int on : { 0, DEC_VICTIM | DEC_SCORE }) {
        dev<dec_rule> rule(std::vector<dec_rule>(batch, dec_rule{ on, 4, 32, 0, 0, 0.9f, 0.5f }));
        dec_params p = { kv.view, { nullptr, dl.p, dn.p, nullptr }, 0,    g,     n_head, n_split, width, 0.088f, q.p, po.p,
                         ml.p,    logit.p, out.p, rule.p, pin.p };
        char what[80];
        snprintf(what, sizeof what, "decode attention%s, %s, %d x %d slots", on ? " + scores" : "", name, batch, slots);
        say(what, time_us([&] { cu_decode(0, dt, hd, p, batch); }),
            (double)batch * slots * n_kv * (double)kern_page_slot_bytes(&kv.pl), 4.0 * batch * slots * n_head * hd);
    }
}

static void prefill(kern_kv_dtype dt, const char *name, int slots)
{
    const int hd = 128, n_kv = 8, g = 4, n_head = n_kv * g, rows = 256, scored = 256;
    kv_rig kv(dt, hd, 1, n_kv, (slots + 31) / 32);
    for (int32_t &n : kv.len)
        n = slots;
    kv.put();
    std::vector<int32_t> lane(rows, 0), pos(rows), slot((size_t)rows * n_kv);
    for (int i = 0; i < rows; i++) {
        pos[i] = slots - rows + i;
        for (int h = 0; h < n_kv; h++)
            slot[i * n_kv + h] = pos[i];
    }
    dev<int32_t> dlane(lane), dpos(pos), dslot(slot), z(std::vector<int32_t>{ 0 }), n(std::vector<int32_t>{ rows });
    dev<int32_t> stride(std::vector<int32_t>{ slots });
    dev<unsigned short> q((size_t)rows * n_head * hd), out((size_t)rows * n_head * hd);
    dev<float> lse((size_t)n_head * rows), score((size_t)n_kv * slots);
    OK(cudaMemset(q.p, 0, (size_t)rows * n_head * hd * 2));
    OK(cudaMemset(score.p, 0, (size_t)n_kv * slots * 4));
    dev<float *> row(std::vector<float *>{ score.p });
    pass_view pass = { nullptr, dlane.p, dpos.p, dslot.p };
    seg_view seg = { z.p, z.p, n.p, z.p };
    double pairs = (double)rows * (slots - rows) + rows * (rows + 1) / 2.0;
    char what[80];
    snprintf(what, sizeof what, "prefill attention, %s, 256 rows over %d", name, slots);
    say(what, time_us([&] { cu_prefill(0, dt, hd, { kv.view, pass, seg, 0, g, n_head, rows, 0.088f, q.p, out.p, lse.p }, 1, rows); }),
        (double)slots * n_kv * (double)kern_page_slot_bytes(&kv.pl), 4 * pairs * n_head * hd);
    snprintf(what, sizeof what, "scores, %s, %d rows over %d", name, scored, slots);
    say(what,
        time_us([&] { cu_score(0, dt, hd, { kv.view, pass, seg, 0, g, n_head, rows, 0.088f, q.p, lse.p, row.p, stride.p }, 1, slots); }),
        (double)slots * n_kv * (double)kern_page_slot_bytes(&kv.pl) / 2, 2 * pairs * n_head * hd);
}

static void sample(int vocab, int n)
{
    dev<float> x(rig::randoms((size_t)n * vocab, 8.0f));
    dev<int32_t> out(n);
    dev<smp_pen> pen((size_t)n * SMP_PENS);
    for (int top_k : { 40, 0 }) {
        dev<smp_row> row(std::vector<smp_row>(n, smp_row{ 1, top_k, 0, 0.8f, 0.95f, 0.05f, 1, 0, 0, 0.5 }));
        char what[80];
        snprintf(what, sizeof what, "sampling, top_k %d, %d rows of %d", top_k, n, vocab);
        say(what, time_us([&] { cu_sample(0, { x.p, (size_t)n * vocab, vocab, vocab, row.p, pen.p, out.p }, n); }), 4.0 * n * vocab,
            0);
    }
}

int main()
{
    OK(cu_prefill_setup());
    OK(cu_decode_setup());
    device_peaks();
    products(KERN_Q4_1, "Q4_1");
    products(KERN_Q8_0, "Q8_0");
    products(KERN_F16, "F16");
    for (int slots : { 1024, 4096 }) {
        decode(KERN_KV_BF16, "bf16", 16, slots);
        decode(KERN_KV_INT8, "int8", 16, slots);
        prefill(KERN_KV_BF16, "bf16", slots);
        prefill(KERN_KV_INT8, "int8", slots);
    }
    sample(128256, 16);
    OK(cudaDeviceSynchronize());
    return 0;
}
