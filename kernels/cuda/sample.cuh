// sample.cuh - the next token of each row, chosen on the device: only token numbers go to the host.
//
// The rules and their order are engine/sampler.h's. Everything is one question, asked again and again: which is the key
// such that the weights of all keys from the largest down to it first reach a target? With weight 1 that is top-k, with
// probabilities top-p, and with probabilities at the temperature and a random target it is the draw. A key is (logit, lower
// id first), so no two are equal. Weights are integers: their sums don't depend on the order in which threads add.
#ifndef SKVD_KERNELS_CUDA_SAMPLE_CUH
#define SKVD_KERNELS_CUDA_SAMPLE_CUH

#include "kernels/cuda/params.h"

#define SMP_THREADS 512
#define SMP_LIST    2048 // keys that are looked at closely when top_k asks for few
#define SMP_ONE     1099511627776.0f // 2^40: the weight of probability 1

struct smp_smem {
    unsigned long long hist[256];
    unsigned long long part[SMP_THREADS / 32];
    unsigned long long list[SMP_LIST];
    unsigned long long target;
    int digit, n_list;
};

__device__ __forceinline__ unsigned long long smp_key(float v, int id)
{
    unsigned u = __float_as_uint(v);
    if (!(v > -INFINITY)) // also not a number
        return 0;
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (unsigned long long)u << 32 | (unsigned)~id;
}

__device__ __forceinline__ float smp_value(unsigned long long key)
{
    unsigned u = (unsigned)(key >> 32);
    return __uint_as_float(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

// The weight of a logit beside the largest one, at a temperature.
__device__ __forceinline__ unsigned long long smp_weight(float v, float top, float temperature)
{
    return v == top ? (unsigned long long)SMP_ONE : (unsigned long long)(expf((v - top) / temperature) * SMP_ONE);
}

// Sum over the block; every thread gets it.
__device__ __forceinline__ unsigned long long smp_sum(unsigned long long v, smp_smem &s)
{
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, o);
    __syncthreads();
    if ((threadIdx.x & 31) == 0)
        s.part[threadIdx.x >> 5] = v;
    __syncthreads();
    unsigned long long sum = 0;
    for (int i = 0; i < SMP_THREADS / 32; i++)
        sum += s.part[i];
    return sum;
}

__device__ __forceinline__ unsigned long long smp_max(unsigned long long v, smp_smem &s)
{
    for (int o = 16; o; o >>= 1)
        v = max(v, __shfl_xor_sync(FULL_WARP, v, o));
    __syncthreads();
    if ((threadIdx.x & 31) == 0)
        s.part[threadIdx.x >> 5] = v;
    __syncthreads();
    for (int i = 0; i < SMP_THREADS / 32; i++)
        v = max(v, s.part[i]);
    return v;
}

// The digit of s.hist at which the sum from digit 255 downwards reaches s.target, and what is left of the target there. By
// the first warp: lane l has the eight digits from 255 - 8 l downwards.
__device__ __forceinline__ void smp_digit(smp_smem &s)
{
    int lane = threadIdx.x & 31, d = 255 - 8 * lane;
    unsigned long long mine = 0, want = s.target, upto;
    for (int i = 0; i < 8; i++)
        mine += s.hist[d - i];
    upto = mine;
    for (int o = 1; o < 32; o <<= 1) {
        unsigned long long v = __shfl_up_sync(FULL_WARP, upto, o);
        upto += lane >= o ? v : 0;
    }
    unsigned reached = __ballot_sync(FULL_WARP, upto >= want);
    int first = reached ? 31 - __clz((int)(reached & (0u - reached))) : 31;
    if (lane == first) {
        unsigned long long before = upto - mine;
        while (d > 255 - 8 * lane - 7 && before + s.hist[d] < want)
            before += s.hist[d--];
        s.digit = d;
        s.target = want - before;
    }
}

// The largest key such that the weights of all keys >= it reach `target` (>= 1, at most the sum of all). Keys of 0 don't count.
template <class Key, class Weight>
__device__ __forceinline__ unsigned long long smp_cut(int n, Key key_at, Weight weight_of, unsigned long long target,
                                                      smp_smem &s)
{
    unsigned long long prefix = 0;
    if (threadIdx.x == 0)
        s.target = target;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += SMP_THREADS)
            s.hist[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += SMP_THREADS) {
            unsigned long long k = key_at(i);
            if (k != 0 && (shift == 56 || k >> (shift + 8) == prefix))
                atomicAdd(&s.hist[k >> shift & 255], weight_of(k));
        }
        __syncthreads();
        if (threadIdx.x < 32)
            smp_digit(s);
        __syncthreads();
        prefix = prefix << 8 | (unsigned)s.digit;
        __syncthreads();
    }
    return prefix;
}

// From the keys of one row to its token.
template <class Key>
__device__ __forceinline__ int smp_choose(int n, Key key_at, const smp_row &u, float top, smp_smem &s)
{
    unsigned long long cut = 1;
    if (u.top_k > 0) {
        unsigned long long have = 0;
        for (int i = threadIdx.x; i < n; i += SMP_THREADS)
            have += key_at(i) != 0;
        have = smp_sum(have, s);
        cut = smp_cut(n, key_at, [](unsigned long long) { return 1ull; }, min((unsigned long long)u.top_k, have), s);
    }
    if (u.top_p < 1.0f) {
        unsigned long long sum = 0, from = cut;
        auto kept = [=](int i) {
            unsigned long long k = key_at(i);
            return k >= from ? k : 0;
        };
        for (int i = threadIdx.x; i < n; i += SMP_THREADS)
            if (unsigned long long k = kept(i))
                sum += smp_weight(smp_value(k), top, 1.0f);
        sum = smp_sum(sum, s);
        unsigned long long want = (unsigned long long)((double)sum * (double)u.top_p);
        cut = smp_cut(n, kept, [=](unsigned long long k) { return smp_weight(smp_value(k), top, 1.0f); },
                      max(min(want, sum), 1ull), s);
    }
    if (u.min_p > 0.0f) {
        unsigned long long least = smp_key(top + logf(u.min_p), 0) >> 32 << 32;
        cut = max(cut, least);
    }
    unsigned long long sum = 0, from = cut;
    float t = u.temperature;
    auto kept = [=](int i) {
        unsigned long long k = key_at(i);
        return k >= from ? k : 0;
    };
    for (int i = threadIdx.x; i < n; i += SMP_THREADS)
        if (unsigned long long k = kept(i))
            sum += smp_weight(smp_value(k), top, t);
    sum = smp_sum(sum, s);
    unsigned long long want = min((unsigned long long)((double)sum * u.u), sum - 1) + 1;
    return (int)~(unsigned)smp_cut(n, kept, [=](unsigned long long k) { return smp_weight(smp_value(k), top, t); }, want, s);
}

// One block a row. A row that is not `on` is left alone: its logits go to the host.
__global__ void __launch_bounds__(SMP_THREADS, 1) sample_rows(smp_params p)
{
    DYN_SMEM(smp_smem, sp);
    smp_smem &s = *sp;
    int r = blockIdx.x, n = p.vocab;
    smp_row u = p.row[r];
    if (!u.on)
        return;
    float *base = p.logits + (size_t)r * p.part;
    int part = p.part;
    size_t rank_stride = p.rank_stride;
    auto at = [=](int i) { return i < part ? base + i : base + (size_t)(i / part) * rank_stride + i % part; };
    for (int i = threadIdx.x; i < u.n_pen; i += SMP_THREADS) {
        smp_pen pen = p.pen[r * SMP_PENS + i];
        float *x = at(pen.token), v = *x > 0.0f ? *x / u.repeat : *x * u.repeat;
        *x = v - ((float)pen.count * u.frequency + u.presence);
    }
    __syncthreads();
    unsigned long long mine = 0;
    for (int i = threadIdx.x; i < n; i += SMP_THREADS)
        mine = max(mine, smp_key(*at(i), i));
    s.list[threadIdx.x] = mine;
    if (threadIdx.x == 0)
        s.n_list = 0;
    unsigned long long top = smp_max(mine, s);
    float value = smp_value(top);
    if (top == 0 || !(u.temperature > 0.0f)) {
        if (threadIdx.x == 0)
            p.out[r] = top ? (int)~(unsigned)top : -1;
        return;
    }
    auto all = [=](int i) { return smp_key(*at(i), i); };
    if (u.top_k > 0 && u.top_k < SMP_THREADS && u.top_k < n) {
        // As many threads have a key at least as large as the top_k-th of the threads' largest: whatever is below it can't be
        // among the best top_k. What is left is a short list, unless the logits are sorted against us.
        const unsigned long long *list = s.list;
        unsigned long long some = smp_sum(mine != 0, s);
        unsigned long long least =
            some < (unsigned long long)u.top_k
                ? 1
                : smp_cut(SMP_THREADS, [=](int i) { return list[i]; }, [](unsigned long long) { return 1ull; },
                          (unsigned long long)u.top_k, s);
        for (int i = threadIdx.x; i < n; i += SMP_THREADS) {
            unsigned long long k = all(i);
            if (k >= least && k != 0) {
                int to = atomicAdd(&s.n_list, 1);
                if (to < SMP_LIST)
                    s.list[to] = k;
            }
        }
        __syncthreads();
        if (s.n_list <= SMP_LIST) {
            int got = smp_choose(s.n_list, [=](int i) { return list[i]; }, u, value, s);
            if (threadIdx.x == 0)
                p.out[r] = got;
            return;
        }
    }
    int got = smp_choose(n, all, u, value, s);
    if (threadIdx.x == 0)
        p.out[r] = got;
}

#endif
