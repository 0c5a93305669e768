// select.cuh - phase 3 after a prefill: what each head of a layer keeps, and the gather to the front of its pages.
//
// The choice is by 64-bit keys, score above position above head, no two equal: the kept set is unique whatever
// the order of the work, and equals the CPU backend's. Selection is by radix: eight passes of 256 counters.
//
//   sel_prepare   a block a head   positions, pooled scores, protected slots, keys of the candidates
//   sel_floor     a block a head   the head's own share of the budget (Ada-KV's floor)
//   sel_share     one block        the rest of the layer's budget goes to the best of all heads
//   sel_choose    a block a head   the best `take` candidates are kept (or a part of them, then the rest by value norms or
//                                  a wider smoothing)
//   sel_list      a block a head   kept slots in the order of their positions, kept mass, new length
//   sel_caps      one block        capacities
//   sel_gather    a block a page   kept pairs into spare pages; sel_back: and from there to the head's own
#ifndef SKVD_KERNELS_CUDA_SELECT_CUH
#define SKVD_KERNELS_CUDA_SELECT_CUH

#include "kernels/cuda/params.h"

#define SEL_THREADS 256
#define SEL_SHARE_THREADS 512
#define SEL_SMEM ((256 + 2) * 4 + 32 * 8)

__device__ __forceinline__ unsigned float_order(float f)
{
    unsigned u = __float_as_uint(f + 0.0f); // -0 becomes +0
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Larger is better; equal scores: the lower position, then the lower head. Never 0.
__device__ __forceinline__ sel_key sel_key_of(float score, int pos, int head)
{
    return (sel_key)float_order(score) << 32 | (sel_key)(0xffffffu - (unsigned)pos) << 8 | (255u - (unsigned)head);
}

struct sel_smem {
    int *count;  // [256]
    int *pick;   // [2]: digit, rank left
    double *sum; // [32]
};

__device__ __forceinline__ sel_smem sel_smem_at(unsigned char *sm)
{
    sel_smem s;
    s.sum = reinterpret_cast<double *>(sm);
    s.count = reinterpret_cast<int *>(sm + 32 * 8);
    s.pick = s.count + 256;
    return s;
}

// The k-th largest key of those that key_at(i), i < n, gives; 0 means "none here". k >= 1 and at least k keys. The whole
// block calls it; every thread gets the key.
template <class KeyAt> __device__ __forceinline__ sel_key block_key_select(KeyAt key_at, int n, int k, const sel_smem &s)
{
    sel_key prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += blockDim.x)
            s.count[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            sel_key key = key_at(i);
            if (key != 0 && (shift == 56 || key >> (shift + 8) == prefix))
                atomicAdd(&s.count[key >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (digit > 0 && s.count[digit] < k)
                k -= s.count[digit--];
            s.pick[0] = digit;
            s.pick[1] = k;
        }
        __syncthreads();
        prefix = prefix << 8 | (sel_key)s.pick[0];
        k = s.pick[1];
    }
    return prefix;
}

// Sum of an int over the block; every thread gets it.
__device__ __forceinline__ int block_sum_int(int v, const sel_smem &s)
{
    v = warp_sum_int(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0)
        s.count[threadIdx.x >> 5] = v;
    __syncthreads();
    int sum = 0;
    for (unsigned i = 0; i < blockDim.x / 32; i++)
        sum += s.count[i];
    return sum;
}

// The score of slot i smoothed over `width` neighbours of i - shift.
__device__ __forceinline__ float sel_pooled(const sel_params &p, int width, int shift, const float *in, int i, int n)
{
    int from = max(p.pool_from, 0), to = min(p.pool_to, n), half = width / 2, at = i - shift;
    if (width <= 1 || i < from || i >= to)
        return in[i];
    int a = max(at - half, from), b = min(at + half, to - 1);
    float sum = 0.0f, top = a <= b ? in[a] : 0.0f;
    for (int j = a; j <= b; j++) {
        sum += in[j];
        top = fmaxf(top, in[j]);
    }
    return p.pool_max ? top : sum / (float)width;
}

__device__ __forceinline__ bool sel_pinned(const sel_params &p, int pos)
{
    for (int i = 0; i < p.n_pin; i++)
        if (pos >= p.pin[2 * i] && pos < p.pin[2 * i + 1])
            return true;
    return false;
}

__global__ void __launch_bounds__(SEL_THREADS) sel_prepare(sel_params p)
{
    DYN_SMEM(unsigned char, sm);
    sel_smem s = sel_smem_at(sm);
    int h = blockIdx.x;
    size_t idx = kv_index(p.kv, p.lane, p.layer, h), base = (size_t)h * p.stride;
    int n = p.kv.len[idx], newest = 0, n_protected = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int pos = page_pos(p.kv, kv_page(p.kv, idx, i / KERN_PAGE_SLOTS))[i % KERN_PAGE_SLOTS];
        p.pos[base + i] = pos;
        newest = max(newest, pos);
    }
    for (int o = 16; o; o >>= 1)
        newest = max(newest, __shfl_xor_sync(FULL_WARP, newest, o));
    if ((threadIdx.x & 31) == 0)
        s.count[threadIdx.x >> 5] = newest;
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x / 32; i++)
        newest = max(newest, s.count[i]);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        int pos = p.pos[base + i];
        float score = p.use_score ? sel_pooled(p, p.pool, p.pool_shift, p.row + (size_t)h * p.row_stride, i, n) : (float)pos;
        bool safe = pos < p.sink || pos > newest - p.recent || sel_pinned(p, pos);
        p.pooled[base + i] = score;
        p.keep[base + i] = safe || p.budget == 0;
        p.key[base + i] = safe ? 0 : sel_key_of(score, pos, h);
        n_protected += safe;
    }
    n_protected = block_sum_int(n_protected, s);
    if (threadIdx.x == 0) {
        sel_head &hd = p.head[h];
        hd.n = n;
        hd.n_protected = n_protected;
        hd.n_cand = n - n_protected;
        hd.budget = max(p.budget - n_protected, 0);
        hd.n_floor = min((int)floorf((float)hd.budget * p.head_floor), hd.n_cand);
        hd.take = min(hd.budget, hd.n_cand);
        hd.floor_key = ~(sel_key)0;
    }
}

__global__ void __launch_bounds__(SEL_THREADS) sel_floor(sel_params p)
{
    DYN_SMEM(unsigned char, sm);
    sel_smem s = sel_smem_at(sm);
    int h = blockIdx.x, k = p.head[h].n_floor;
    const sel_key *key = p.key + (size_t)h * p.stride;
    if (k <= 0)
        return;
    sel_key cut = block_key_select([=](int i) { return key[i]; }, p.head[h].n, k, s);
    if (threadIdx.x == 0)
        p.head[h].floor_key = cut;
}

__global__ void __launch_bounds__(SEL_SHARE_THREADS) sel_share(sel_params p)
{
    DYN_SMEM(unsigned char, sm);
    sel_smem s = sel_smem_at(sm);
    int pooled = 0, all = 0, n_kv = p.kv.n_kv, most = 0;
    for (int h = 0; h < n_kv; h++) {
        pooled += p.head[h].budget - p.head[h].n_floor;
        all += p.head[h].n_cand - p.head[h].n_floor;
        most = max(most, p.head[h].n);
    }
    // Keys that are not yet a head's own, the heads' rows one after the other.
    const sel_key *key = p.key;
    const sel_head *head = p.head;
    int stride = p.stride;
    auto open_key = [=](int i) -> sel_key {
        int h = i / most, at = i % most;
        if (at >= head[h].n)
            return 0;
        sel_key v = key[(size_t)h * stride + at];
        return v < head[h].floor_key ? v : 0;
    };
    sel_key cut = ~(sel_key)0;
    if (pooled >= all)
        cut = 1;
    else if (pooled > 0)
        cut = block_key_select(open_key, n_kv * most, pooled, s);
    for (int h = 0; h < n_kv; h++) {
        int n = 0;
        for (int i = threadIdx.x; i < head[h].n; i += blockDim.x) {
            sel_key v = open_key(h * most + i);
            n += v != 0 && v >= cut;
        }
        n = block_sum_int(n, s);
        if (threadIdx.x == 0)
            p.head[h].take = p.head[h].n_floor + n;
    }
}

enum { SEL_FIRST = 0, SEL_BY_VALUE, SEL_BY_WIDE };

// How many of a head's budget go by the first smoothing alone.
__device__ __forceinline__ int sel_first_part(const sel_params &p, int take, int cand)
{
    if (take >= cand)
        return take;
    if (p.wide > 1 && p.use_score)
        return (int)((float)take * p.narrow);
    return p.by_value ? take / 2 : take;
}

// The best k candidates are kept: SEL_FIRST by the keys of sel_prepare, as many as sel_first_part says; else what is left
// of `take`, by new keys: score and value norm, or a wider smoothing. Candidates are the slots with a key.
__global__ void __launch_bounds__(SEL_THREADS) sel_choose(sel_params p, int part)
{
    DYN_SMEM(unsigned char, sm);
    sel_smem s = sel_smem_at(sm);
    int h = blockIdx.x, n = p.head[h].n, k = p.head[h].take, cand = p.head[h].n_cand;
    size_t base = (size_t)h * p.stride;
    sel_key *key = p.key + base;
    int32_t *keep = p.keep + base;
    const float *row = p.row + (size_t)h * p.row_stride;
    if (part == SEL_FIRST)
        k = sel_first_part(p, k, cand);
    else
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            if (key[i]) {
                float score = part == SEL_BY_VALUE ? (p.pooled[base + i] * p.per_query + p.value_eps) * p.norm[base + i]
                                                   : sel_pooled(p, p.wide, p.wide_shift, row, i, n);
                key[i] = sel_key_of(score, p.pos[base + i], h);
            }
    __syncthreads();
    if (k <= 0)
        return;
    sel_key cut = k < cand ? block_key_select([=](int i) { return key[i]; }, n, k, s) : 1;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (key[i] && key[i] >= cut) {
            keep[i] = 1;
            key[i] = 0;
        }
    __syncthreads();
    if (threadIdx.x == 0) {
        p.head[h].take -= k;
        p.head[h].n_cand -= k;
    }
}

// norm[h][slot0 + i] += sum over d of |c[i][d]| / g for n rows of c [n][d_model] = Wo v; one block a row.
__global__ void __launch_bounds__(SEL_THREADS) sel_norm(const float *c, int d_model, float weight, float *norm)
{
    DYN_SMEM(float, part);
    float v = 0.0f;
    for (int i = threadIdx.x; i < d_model; i += blockDim.x)
        v += fabsf(c[(size_t)blockIdx.x * d_model + i]);
    v = warp_sum(v);
    if ((threadIdx.x & 31) == 0)
        part[threadIdx.x >> 5] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned i = 1; i < blockDim.x / 32; i++)
            v += part[i];
        norm[blockIdx.x] += weight * v;
    }
}

// out [n][hd] bf16 = V of the slots [slot0, slot0 + n) of a head; one warp a slot.
template <int DT> __global__ void __launch_bounds__(128) sel_values(sel_params p, int head, int slot0, unsigned short *out)
{
    int i = (int)blockIdx.x * 4 + ((int)threadIdx.x >> 5), slot = slot0 + i;
    size_t idx = kv_index(p.kv, p.lane, p.layer, head);
    if (slot >= p.kv.len[idx])
        return;
    const unsigned char *page = kv_page(p.kv, idx, slot / KERN_PAGE_SLOTS);
    slot %= KERN_PAGE_SLOTS;
    for (int d = threadIdx.x & 31; d < p.hd; d += 32) {
        if (DT == KERN_KV_BF16)
            out[(size_t)i * p.hd + d] =
                reinterpret_cast<const unsigned short *>(page + p.kv.v)[((slot >> 1) * p.hd + d) * 2 + (slot & 1)];
        else
            out[(size_t)i * p.hd + d] = bf16_bits(page_v_scale<DT>(p.kv, page, slot) *
                                                  (float)reinterpret_cast<const signed char *>(page + p.kv.v)[slot * p.hd + d]);
    }
}

// Bitonic sort of key[0, n) ascending by the whole block; n a power of two.
__device__ __forceinline__ void block_sort(sel_key *key, int n)
{
    for (int size = 2; size <= n; size <<= 1)
        for (int step = size >> 1; step > 0; step >>= 1) {
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += blockDim.x) {
                int j = i ^ step;
                if (j > i && (key[i] > key[j]) == ((i & size) == 0)) {
                    sel_key t = key[i];
                    key[i] = key[j];
                    key[j] = t;
                }
            }
        }
    __syncthreads();
}

// Sum of a double over the block, in a fixed order; thread 0 gets it.
__device__ __forceinline__ double block_sum_double(double v, const sel_smem &s)
{
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, o);
    __syncthreads();
    if ((threadIdx.x & 31) == 0)
        s.sum[threadIdx.x >> 5] = v;
    __syncthreads();
    double sum = 0.0;
    for (unsigned i = 0; i < blockDim.x / 32; i++)
        sum += s.sum[i];
    return sum;
}

__global__ void __launch_bounds__(SEL_THREADS) sel_list(sel_params p)
{
    DYN_SMEM(unsigned char, sm);
    sel_smem s = sel_smem_at(sm);
    int h = blockIdx.x, n = p.head[h].n, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    size_t base = (size_t)h * p.stride, idx = kv_index(p.kv, p.lane, p.layer, h);
    int done = 0, unsorted = 0;
    double kept_sum = 0.0, all_sum = 0.0;
    for (int i0 = 0; i0 < n; i0 += blockDim.x) { // kept slots in slot order, by a scan of ballots
        int i = i0 + threadIdx.x, keep = i < n && p.keep[base + i];
        float f = i < n && p.use_score ? p.row[(size_t)h * p.row_stride + i] : 0.0f;
        unsigned votes = __ballot_sync(FULL_WARP, keep);
        __syncthreads();
        if (lane == 0)
            s.count[warp] = __popc(votes);
        __syncthreads();
        int at = done + __popc(votes & ((1u << lane) - 1));
        for (unsigned w = 0; w < blockDim.x / 32; w++) {
            at += (int)w < warp ? s.count[w] : 0;
            done += s.count[w];
        }
        if (keep)
            p.src[base + at] = i;
        all_sum += f;
        kept_sum += keep ? f : 0.0f;
    }
    __syncthreads();
    for (int i = threadIdx.x + 1; i < done; i += blockDim.x)
        unsorted |= p.pos[base + p.src[base + i - 1]] > p.pos[base + p.src[base + i]];
    if (block_sum_int(unsorted, s)) { // a continued session: slots were overwritten
        int size = 1;
        while (size < done)
            size <<= 1;
        for (int i = threadIdx.x; i < size; i += blockDim.x)
            p.key[base + i] = i < done ? (sel_key)p.pos[base + p.src[base + i]] << 32 | (unsigned)p.src[base + i]
                                       : ~(sel_key)0;
        block_sort(p.key + base, size);
        for (int i = threadIdx.x; i < done; i += blockDim.x)
            p.src[base + i] = (int32_t)(p.key[base + i] & 0xffffffffu);
    }
    kept_sum = block_sum_double(kept_sum, s);
    all_sum = block_sum_double(all_sum, s);
    if (threadIdx.x == 0) {
        p.kept_mass[h] = all_sum > 0.0 ? (float)(kept_sum / all_sum) : n > 0 ? (float)done / (float)n : 1.0f;
        p.head[h].kept = done;
        p.kv.len[idx] = done;
        p.kv.victim[idx] = -1;
    }
}

// A head may grow to its budget while the layer is below its own, else it stays at what it has.
__global__ void sel_caps(sel_params p)
{
    long long total = 0;
    int h = threadIdx.x;
    for (int i = 0; i < p.kv.n_kv; i++)
        total += p.head[i].kept;
    if (h >= p.kv.n_kv)
        return;
    bool full = p.shared && total >= (long long)p.budget * p.kv.n_kv;
    int len = p.head[h].kept;
    p.kv.cap[kv_index(p.kv, p.lane, p.layer, h)] = p.budget == 0 ? 0x7fffffff
                                                   : full || len > p.budget ? len
                                                                            : p.budget;
}

// Kept pairs [32 page, 32 page + 32) of a head into its spare page; slots past the end are zeros.
// Grid: (pages that may be kept, n_kv).
template <int DT> __global__ void __launch_bounds__(128) sel_gather(sel_params p)
{
    int h = blockIdx.y, first = (int)blockIdx.x * KERN_PAGE_SLOTS, kept = p.head[h].kept;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (first >= kept)
        return;
    size_t idx = kv_index(p.kv, p.lane, p.layer, h), base = (size_t)h * p.stride;
    unsigned char *to = p.spare + ((size_t)h * p.kv.max_pages + blockIdx.x) * p.kv.page_bytes;
    bool in = first + lane < kept;
    int slot = in ? p.src[base + first + lane] : 0, at = slot % KERN_PAGE_SLOTS;
    const unsigned char *page = kv_page(p.kv, idx, slot / KERN_PAGE_SLOTS);
    int words = DT == KERN_KV_BF16 ? p.hd / 2 : p.hd / 4;
    for (int i = warp; i < words; i += 4) {
        unsigned w = reinterpret_cast<const unsigned *>(page + p.kv.k)[i * KERN_PAGE_SLOTS + at];
        reinterpret_cast<unsigned *>(to + p.kv.k)[i * KERN_PAGE_SLOTS + lane] = in ? w : 0;
    }
    for (int i = warp; i < p.hd; i += 4) {
        if (DT == KERN_KV_BF16) {
            unsigned short v = reinterpret_cast<const unsigned short *>(page + p.kv.v)[((at >> 1) * p.hd + i) * 2 + (at & 1)];
            reinterpret_cast<unsigned short *>(to + p.kv.v)[((lane >> 1) * p.hd + i) * 2 + (lane & 1)] =
                in ? v : (unsigned short)0;
        } else {
            to[p.kv.v + lane * p.hd + i] = in ? page[p.kv.v + at * p.hd + i] : (unsigned char)0;
        }
    }
    if (warp != 0)
        return;
    page_pos(p.kv, to)[lane] = in ? p.pos[base + slot] : 0;
    page_score(p.kv, to)[lane] = in && p.use_score ? p.row[(size_t)h * p.row_stride + slot] : 0.0f;
    if (DT == KERN_KV_INT8) {
        reinterpret_cast<float *>(to + p.kv.k_scale)[lane] = in ? page_k_scale<DT>(p.kv, page, at) : 0.0f;
        reinterpret_cast<float *>(to + p.kv.v_scale)[lane] = in ? page_v_scale<DT>(p.kv, page, at) : 0.0f;
    }
}

__global__ void __launch_bounds__(128) sel_back(sel_params p)
{
    int h = blockIdx.y;
    if ((int)blockIdx.x * KERN_PAGE_SLOTS >= p.head[h].kept)
        return;
    const uint4 *from =
        reinterpret_cast<const uint4 *>(p.spare + ((size_t)h * p.kv.max_pages + blockIdx.x) * p.kv.page_bytes);
    uint4 *to = reinterpret_cast<uint4 *>(kv_page(p.kv, kv_index(p.kv, p.lane, p.layer, h), blockIdx.x));
    for (unsigned i = threadIdx.x; i < p.kv.page_bytes / 16; i += 128)
        to[i] = from[i];
}

#endif
