/* bench_limits.c - what this machine can do at best: memory read bandwidth and the peak rate of the instructions that
 * the kernels of an ISA live on, for one thread and for all. */
#include "tests/bench.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/workers.h"

#define PROBE_BYTES ((size_t)128 << 20) /* a thread: past any cache that one core can call its own */
#define HUGE_PAGE   ((size_t)2 << 20)
#define ROUNDS      20000
#define PROBE_SECONDS 0.3 /* long enough to find a moment when no one else computes */

static volatile uint64_t sink;

struct probe {
    unsigned char **buf;
    double (*work)(unsigned char *buf); /* returns what it did */
    double done[256];
};

static void probe_item(void *arg, int item, int worker)
{
    struct probe *p = arg;
    p->done[item] = p->work(p->buf[worker]);
}

/* Plain loads and additions, eight sums of `width` bytes: as fast as this core can ask for memory. */
#define READ(name, attribute, width)                                             \
    attribute static double name(unsigned char *buf)                             \
    {                                                                            \
        typedef uint64_t vec __attribute__((vector_size(width)));                \
        const vec *p = (const vec *)buf;                                         \
        vec s[8] = { 0 }, all = { 0 };                                           \
        for (size_t i = 0; i < PROBE_BYTES / sizeof *p; i += 8)                  \
            for (int k = 0; k < 8; k++)                                          \
                s[k] += p[i + k];                                                \
        for (int k = 0; k < 8; k++)                                              \
            all += s[k];                                                         \
        sink += all[0];                                                          \
        return (double)PROBE_BYTES;                                              \
    }
READ(read16, , 16)

/* Twelve chains hide the latency of any of these instructions. */
#define CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

#ifdef SKV_X86
#include <immintrin.h>

#define PROBE(name, target_isa, type, zero, step, per_step)                     \
    __attribute__((target(target_isa))) static double name(unsigned char *buf)  \
    {                                                                           \
        type x = zero, y = zero, a[12];                                         \
        (void)buf;                                                              \
        for (int i = 0; i < 12; i++)                                            \
            a[i] = zero;                                                        \
        for (int n = 0; n < ROUNDS; n++) {                                      \
            CHAINS(step)                                                        \
        }                                                                       \
        return 12.0 * ROUNDS * (per_step);                                      \
    }
#define STEP_FMA(i)  __asm__ volatile("vfmadd231ps %1, %2, %0" : "+v"(a[i]) : "v"(x), "v"(y));
#define STEP_VNNI(i) __asm__ volatile("vpdpbusd %1, %2, %0" : "+v"(a[i]) : "v"(x), "v"(y));
#define STEP_BF16(i) __asm__ volatile("vdpbf16ps %1, %2, %0" : "+v"(a[i]) : "v"(x), "v"(y));
/* AVX2's product of small bytes: vpmaddubsw, then a 16-bit addition */
#define STEP_MADD(i) \
    __asm__ volatile("vpmaddubsw %2, %1, %%ymm15\n\tvpaddw %%ymm15, %0, %0" : "+x"(a[i]) : "x"(x), "x"(y) : "xmm15");
/* and what brings all products of bytes, not only small ones, into 32 bits: vpmaddubsw, vpmaddwd, a 32-bit addition. There is no
 * shorter way: vpmaddwd on bytes made 16 bits wide takes as many multiplications. */
#define STEP_DOT8(i)                                                                                             \
    __asm__ volatile("vpmaddubsw %2, %1, %%ymm15\n\tvpmaddwd %1, %%ymm15, %%ymm15\n\tvpaddd %%ymm15, %0, %0" \
                     : "+x"(a[i]) : "x"(x), "x"(y) : "xmm15");
READ(read32, __attribute__((target("avx2"))), 32)
READ(read64, __attribute__((target("avx512f"))), 64)
PROBE(fma256, "avx2,fma", __m256, _mm256_setzero_ps(), STEP_FMA, 16)
PROBE(fma512, "avx512f", __m512, _mm512_setzero_ps(), STEP_FMA, 32)
PROBE(madd256, "avx2", __m256i, _mm256_setzero_si256(), STEP_MADD, 64)
PROBE(dot8_256, "avx2", __m256i, _mm256_setzero_si256(), STEP_DOT8, 64)
PROBE(vnni512, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(), STEP_VNNI, 128)
PROBE(bf16_512, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(), STEP_BF16, 64)
#endif

static double scalar_products(unsigned char *buf)
{
    float a[12] = { 0 }, x = (float)buf[0], y = x;
    for (int n = 0; n < ROUNDS; n++) {
#define STEP_C(i) a[i] = a[i] + x * y; __asm__ volatile("" : "+x"(a[i]));
        CHAINS(STEP_C)
    }
    return 24.0 * ROUNDS;
}

static void choose(const struct bench *b, double (*work[BENCH_LIMITS])(unsigned char *))
{
    work[BENCH_F32] = work[BENCH_INT8] = work[BENCH_DOT8] = work[BENCH_BF16] = scalar_products;
    work[BENCH_MEMORY] = read16;
#ifdef SKV_X86
    if (strcmp(b->isa->name, "avx2") == 0) {
        work[BENCH_F32] = work[BENCH_BF16] = fma256;
        work[BENCH_INT8] = madd256;
        work[BENCH_DOT8] = dot8_256;
        work[BENCH_MEMORY] = read32;
    } else if (strcmp(b->isa->name, "avx512") == 0) {
        work[BENCH_F32] = work[BENCH_BF16] = fma512;
        work[BENCH_INT8] = work[BENCH_DOT8] = vnni512;
        work[BENCH_MEMORY] = read64;
        if (__builtin_cpu_supports("avx512bf16"))
            work[BENCH_BF16] = bf16_512;
    }
#else
    (void)b;
#endif
}

/* The best rate of any call, and the mean of all. */
static double probe_rate(struct workers *w, int n, struct probe *p, double *mean)
{
    double best = 0, begin = bench_now(), all = 0, t = begin;
    do {
        double from = t, done = 0;
        workers_run(w, n, probe_item, p);
        t = bench_now();
        for (int i = 0; i < n; i++)
            done += p->done[i];
        all += done;
        if (done / (t - from) > best)
            best = done / (t - from);
    } while (t < begin + PROBE_SECONDS);
    *mean = all / (t - begin);
    return best;
}

void bench_probe(struct bench *b)
{
    struct skv_error err;
    struct probe p = { 0 };
    double (*work[BENCH_LIMITS])(unsigned char *) = { NULL };
    struct workers *one = workers_new(1, &err), *all = workers_new(b->threads, &err);
    p.buf = calloc((size_t)b->threads, sizeof *p.buf);
    if (!one || !all || !p.buf || b->threads > 256)
        abort();
    for (int i = 0; i < b->threads; i++) {
        if (!(p.buf[i] = aligned_alloc(HUGE_PAGE, PROBE_BYTES)))
            abort();
        madvise(p.buf[i], PROBE_BYTES, MADV_HUGEPAGE); /* as the weights and the cache lie */
        memset(p.buf[i], i + 1, PROBE_BYTES);
    }
    choose(b, work);
    for (int k = 0; k < BENCH_NONE; k++) {
        p.work = work[k];
        double mean;
        if (b->limit[0][k] == 0)
            b->limit[0][k] = probe_rate(one, 1, &p, &mean);
        if (b->limit[1][k] == 0)
            b->limit[1][k] = probe_rate(all, b->threads, &p, &b->mean[k]);
    }
    for (int i = 0; i < b->threads; i++)
        free(p.buf[i]);
    free(p.buf);
    workers_free(one);
    workers_free(all);
}
