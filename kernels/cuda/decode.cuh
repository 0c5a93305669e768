// decode.cuh - paged decode attention, split over slots; merge; score update and the next victim.
//
// A split is 256 slots, whatever the batch, so a row's result does not depend on it. A block computes one split for
// the whole group of query heads of a KV head: every byte of K and V is read once.
#ifndef SKVD_KERNELS_CUDA_DECODE_CUH
#define SKVD_KERNELS_CUDA_DECODE_CUH

#include "kernels/cuda/params.h"

#define DEC_WARPS 4
#define DEC_PAGES (DEC_SPLIT / KERN_PAGE_SLOTS)
#define DEC_MAX_GROUP 8
// G is the group's room: 1, 2, 4 or 8 heads; unused heads compute on zeros and are not written.
// q [G][HD], probabilities [G][256], m and l [2][G], partial O of the warps [4][G][HD]
#define DEC_SMEM(HD, G) (((G) * (HD) + (G) * DEC_SPLIT + 2 * (G) + DEC_WARPS * (G) * (HD)) * 4)

// s[j] = q_j k of the lane's slot for the group's heads; s comes in as zeros.
template <int HD, int DT, int G>
__device__ __forceinline__ void dec_dot(const kv_view &kv, const unsigned char *page, const float *q, float s[G])
{
    int lane = threadIdx.x & 31;
    if constexpr (DT == KERN_KV_BF16) {
        const unsigned *k = reinterpret_cast<const unsigned *>(page + kv.k) + lane;
#pragma unroll 8
        for (int i = 0; i < HD / 2; i++) {
            unsigned w = k[i * KERN_PAGE_SLOTS];
            float a = bf16_lo(w), b = bf16_hi(w);
#pragma unroll
            for (int j = 0; j < G; j++)
                s[j] = fmaf(q[j * HD + 2 * i + 1], b, fmaf(q[j * HD + 2 * i], a, s[j]));
        }
        return;
    }
    const unsigned *k = reinterpret_cast<const unsigned *>(page + kv.k) + lane;
#pragma unroll 4
    for (int i = 0; i < HD / 4; i++) {
        unsigned w = k[i * KERN_PAGE_SLOTS];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float v = (float)((int)(w >> (8 * c) & 0xff) - 128);
#pragma unroll
            for (int j = 0; j < G; j++)
                s[j] = fmaf(q[j * HD + 4 * i + c], v, s[j]);
        }
    }
    float scale = page_k_scale<DT>(kv, page, lane);
#pragma unroll
    for (int j = 0; j < G; j++)
        s[j] *= scale;
}

// o[j][i] += p_j V for the lane's dimensions lane + 32 i; pr: this page's probabilities, stride DEC_SPLIT a head.
template <int HD, int DT, int G, int ND>
__device__ __forceinline__ void dec_accumulate(const kv_view &kv, const unsigned char *page, const float *pr, int n,
                                               float o[G][ND])
{
    int lane = threadIdx.x & 31;
    if constexpr (DT == KERN_KV_BF16) {
        const unsigned *v = reinterpret_cast<const unsigned *>(page + kv.v);
        for (int s = 0; s < n; s += 2) // an odd tail's probability is 0
#pragma unroll
            for (int i = 0; i < ND; i++) {
                int d = lane + 32 * i;
                unsigned w = d < HD ? v[(s >> 1) * HD + d] : 0;
                float a = bf16_lo(w), b = bf16_hi(w);
#pragma unroll
                for (int j = 0; j < G; j++)
                    o[j][i] = fmaf(pr[j * DEC_SPLIT + s + 1], b, fmaf(pr[j * DEC_SPLIT + s], a, o[j][i]));
            }
        return;
    }
    const signed char *v = reinterpret_cast<const signed char *>(page + kv.v);
    for (int s = 0; s < n; s++) {
        float scale = page_v_scale<DT>(kv, page, s);
#pragma unroll
        for (int i = 0; i < ND; i++) {
            int d = lane + 32 * i;
            float a = d < HD ? scale * (float)v[s * HD + d] : 0.0f;
#pragma unroll
            for (int j = 0; j < G; j++)
                o[j][i] = fmaf(pr[j * DEC_SPLIT + s], a, o[j][i]);
        }
    }
}

// One split of one KV head of one row. Grid: (n_split, n_kv, n_row).
template <int HD, int DT, int G>
__global__ void __launch_bounds__(DEC_WARPS * 32, (HD) * (G) > 1024 ? 2 : 4) dec_split(dec_params p)
{
    DYN_SMEM(float, q);
    float *pr = q + G * HD, *ml = pr + G * DEC_SPLIT, *po = ml + 2 * G;
    const int ND = (HD + 31) / 32;
    int split = blockIdx.x, kh = blockIdx.y, r = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int row_lane = p.pass.lane[r];
    if (row_lane < 0)
        return;
    size_t idx = kv_index(p.kv, row_lane, p.layer, kh);
    int begin = split * DEC_SPLIT, n = min(p.kv.len[idx] - begin, DEC_SPLIT);
    if (n <= 0)
        return;
    const float *src = p.q + (size_t)r * p.row_width + (size_t)kh * p.g * HD;
    for (int i = threadIdx.x; i < G * HD; i += DEC_WARPS * 32)
        q[i] = i < p.g * HD ? src[i] * p.scale : 0.0f;
    __syncthreads();

    float *logit = p.logit + ((size_t)r * p.n_head + kh * p.g) * p.n_split * DEC_SPLIT + begin;
    for (int pg = warp; pg * KERN_PAGE_SLOTS < DEC_SPLIT; pg += DEC_WARPS) {
        int at = pg * KERN_PAGE_SLOTS + lane;
        float s[G];
#pragma unroll
        for (int j = 0; j < G; j++)
            s[j] = 0.0f;
        if (pg * KERN_PAGE_SLOTS < n)
            dec_dot<HD, DT, G>(p.kv, kv_page(p.kv, idx, split * DEC_PAGES + pg), q, s);
#pragma unroll
        for (int j = 0; j < G; j++) {
            pr[j * DEC_SPLIT + at] = at < n ? s[j] : -INFINITY;
            if (at < n && j < p.g && (p.rule[r].on & DEC_SCORE))
                logit[(size_t)j * p.n_split * DEC_SPLIT + at] = s[j];
        }
    }
    __syncthreads();
    for (int j = warp; j < G; j += DEC_WARPS) {
        float m = -INFINITY, l = 0.0f;
        for (int i = lane; i < DEC_SPLIT; i += 32)
            m = fmaxf(m, pr[j * DEC_SPLIT + i]);
        m = warp_max(m);
        for (int i = lane; i < DEC_SPLIT; i += 32) {
            float e = i < n ? expf(pr[j * DEC_SPLIT + i] - m) : 0.0f;
            pr[j * DEC_SPLIT + i] = e;
            l += e;
        }
        l = warp_sum(l);
        if (lane == 0) {
            ml[2 * j] = m;
            ml[2 * j + 1] = l;
        }
    }
    __syncthreads();
    float o[G][ND];
#pragma unroll
    for (int j = 0; j < G; j++)
        for (int i = 0; i < ND; i++)
            o[j][i] = 0.0f;
    for (int pg = warp; pg * KERN_PAGE_SLOTS < n; pg += DEC_WARPS)
        dec_accumulate<HD, DT, G, ND>(p.kv, kv_page(p.kv, idx, split * DEC_PAGES + pg), pr + pg * KERN_PAGE_SLOTS,
                                      min(n - pg * KERN_PAGE_SLOTS, KERN_PAGE_SLOTS), o);
#pragma unroll
    for (int j = 0; j < G; j++)
#pragma unroll
        for (int i = 0; i < ND; i++)
            if (lane + 32 * i < HD)
                po[(warp * G + j) * HD + lane + 32 * i] = o[j][i];
    __syncthreads();
    for (int i = threadIdx.x; i < p.g * HD; i += DEC_WARPS * 32) {
        int j = i / HD;
        size_t at = ((size_t)r * p.n_head + kh * p.g + j) * p.n_split + split;
        float v = 0.0f;
        for (int w = 0; w < DEC_WARPS; w++)
            v += po[w * G * HD + i];
        p.part_o[at * HD + i % HD] = v;
        if (i % HD == 0) {
            p.part_ml[2 * at] = ml[2 * j];
            p.part_ml[2 * at + 1] = ml[2 * j + 1];
        }
    }
}

// Lexicographic (score, position): the next victim is the least of these, so ties go to the oldest.
struct victim_best {
    float score;
    int pos, slot;
};

__device__ __forceinline__ bool victim_less(const victim_best &a, const victim_best &b)
{
    if (a.slot < 0 || b.slot < 0)
        return b.slot < 0 && a.slot >= 0;
    return a.score < b.score || (a.score == b.score && a.pos < b.pos);
}

__device__ __forceinline__ bool evictable(const dec_rule &u, const int32_t *pin, int pos, int now)
{
    if (pos < u.sink || pos > now - u.recent)
        return false;
    for (int i = u.pin0; i < u.pin0 + u.n_pin; i++)
        if (pos >= pin[2 * i] && pos < pin[2 * i + 1])
            return false;
    return true;
}

#define MERGE_THREADS 128
// m, 1 / l of the group [2][g]; victims of the warps [4][3]
#define MERGE_SMEM(G) ((2 * (G) + (MERGE_THREADS / 32) * 3) * 4)

__device__ __forceinline__ size_t ring_index(const dec_params &p, int lane, int head)
{
    return ((size_t)lane * p.kv.n_layer + p.layer) * p.n_head + head;
}

// The step's queries of a group with their softmax's maximum and 1 / sum into their place.
template <int HD>
__device__ __forceinline__ void ring_put(const dec_params &p, const dec_rule &u, size_t idx, int r, int kh, const float *ml)
{
    const float *src = p.q + (size_t)r * p.row_width + (size_t)kh * p.g * HD;
    size_t first = ring_index(p, p.pass.lane[r], kh * p.g) * DEC_PLACES + u.ring_at;
    for (int i = threadIdx.x; i < p.g * HD / 2; i += MERGE_THREADS) {
        int j = 2 * i / HD, d = 2 * i % HD;
        reinterpret_cast<unsigned *>(p.ring.q + (first + (size_t)j * DEC_PLACES) * HD)[d / 2] =
            bf16_pack(src[2 * i] * p.scale, src[2 * i + 1] * p.scale);
    }
    if ((int)threadIdx.x < p.g) {
        float *to = p.ring.ml + 2 * (first + (size_t)threadIdx.x * DEC_PLACES);
        to[0] = ml[2 * threadIdx.x];
        to[1] = ml[2 * threadIdx.x + 1];
    }
    if (threadIdx.x == 0)
        p.ring.pos[idx * DEC_PLACES + u.ring_at] = p.pass.pos[r];
}

// s[place] = q k of a slot for the ring of one query head.
template <int HD>
__device__ __forceinline__ void ring_dot(const dec_params &p, const unsigned char *page, int slot, const unsigned *q, int n,
                                         float s[DEC_PLACES])
{
#pragma unroll
    for (int i = 0; i < DEC_PLACES; i++)
        s[i] = 0.0f;
    for (int d = 0; d < HD / 2; d++) {
        unsigned w = p.dtype == KERN_KV_INT8 ? page_k_pair<KERN_KV_INT8>(p.kv, page, d, slot)
                                             : page_k_pair<KERN_KV_BF16>(p.kv, page, d, slot);
        float a = bf16_lo(w), b = bf16_hi(w);
#pragma unroll
        for (int i = 0; i < DEC_PLACES; i++)
            if (i < n) {
                unsigned v = q[i * (HD / 2) + d];
                s[i] = fmaf(bf16_hi(v), b, fmaf(bf16_lo(v), a, s[i]));
            }
    }
    if (p.dtype == KERN_KV_INT8) {
        float scale = page_k_scale<KERN_KV_INT8>(p.kv, page, slot);
#pragma unroll
        for (int i = 0; i < DEC_PLACES; i++)
            s[i] *= scale;
    }
}

// A burst: the probabilities that the ring's queries had for each slot that was there in their step. A thread owns a slot, so the sum
// has one order.
template <int HD>
__device__ __forceinline__ void ring_score(const dec_params &p, const dec_rule &u, size_t idx, int lane, int kh)
{
    const int32_t *at = p.ring.pos + idx * DEC_PLACES;
    for (int s = threadIdx.x; s < p.kv.len[idx]; s += MERGE_THREADS) {
        unsigned char *page = kv_page(p.kv, idx, s / KERN_PAGE_SLOTS);
        int slot = s % KERN_PAGE_SLOTS, pos = page_pos(p.kv, page)[slot];
        float sum = 0.0f;
        for (int j = 0; j < p.g; j++) {
            size_t first = ring_index(p, lane, kh * p.g + j) * DEC_PLACES;
            const float *ml = p.ring.ml + 2 * first;
            float dot[DEC_PLACES];
            ring_dot<HD>(p, page, slot, reinterpret_cast<const unsigned *>(p.ring.q + first * HD), u.ring, dot);
#pragma unroll
            for (int i = 0; i < DEC_PLACES; i++)
                if (i < u.ring && pos <= at[i])
                    sum += expf(dot[i] - ml[2 * i]) * ml[2 * i + 1];
        }
        float *score = page_score(p.kv, page) + slot;
        *score = u.decay * *score + u.weight * (sum / (float)p.g);
    }
}

// Score update over the head's slots, then the victim.
__device__ __forceinline__ void merge_score(const dec_params &p, const dec_rule &u, size_t idx, int r, int kh,
                                            const float *ml, float *best)
{
    int len = p.kv.len[idx], now = p.pass.pos[r], warp = threadIdx.x >> 5;
    const float *logit = p.logit + ((size_t)r * p.n_head + kh * p.g) * p.n_split * DEC_SPLIT;
    victim_best mine = { 0.0f, 0, -1 };
    for (int s = threadIdx.x; s < len; s += MERGE_THREADS) {
        unsigned char *page = kv_page(p.kv, idx, s / KERN_PAGE_SLOTS);
        float *score = page_score(p.kv, page) + s % KERN_PAGE_SLOTS, v = *score;
        if (u.on & DEC_SCORE) {
            float sum = 0.0f;
            for (int j = 0; j < p.g; j++)
                sum += expf(logit[(size_t)j * p.n_split * DEC_SPLIT + s] - ml[2 * j]) * ml[2 * j + 1];
            v = u.decay * v + u.weight * (sum / (float)p.g);
            *score = v;
        }
        int pos = page_pos(p.kv, page)[s % KERN_PAGE_SLOTS];
        victim_best b = { v, pos, s };
        if (evictable(u, p.pin, pos, now) && victim_less(b, mine))
            mine = b;
    }
    for (int o = 16; o; o >>= 1) {
        victim_best b = { __shfl_xor_sync(FULL_WARP, mine.score, o), __shfl_xor_sync(FULL_WARP, mine.pos, o),
                          __shfl_xor_sync(FULL_WARP, mine.slot, o) };
        if (victim_less(b, mine))
            mine = b;
    }
    if ((threadIdx.x & 31) == 0) {
        best[3 * warp] = mine.score;
        reinterpret_cast<int *>(best)[3 * warp + 1] = mine.pos;
        reinterpret_cast<int *>(best)[3 * warp + 2] = mine.slot;
    }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int w = 1; w < MERGE_THREADS / 32; w++) {
        victim_best b = { best[3 * w], reinterpret_cast<int *>(best)[3 * w + 1],
                          reinterpret_cast<int *>(best)[3 * w + 2] };
        if (victim_less(b, mine))
            mine = b;
    }
    if ((u.on & DEC_VICTIM) && len >= p.kv.cap[idx])
        p.kv.victim[idx] = mine.slot;
}

// Merge the splits of a KV head's group, write the output, then phase 3. Grid: (n_kv, n_row).
template <int HD>
__global__ void __launch_bounds__(MERGE_THREADS, 4) dec_merge(dec_params p)
{
    DYN_SMEM(float, ml);
    float *best = ml + 2 * p.g;
    int kh = blockIdx.x, r = blockIdx.y, row_lane = p.pass.lane[r];
    if (row_lane < 0)
        return;
    size_t idx = kv_index(p.kv, row_lane, p.layer, kh);
    int n = (p.kv.len[idx] + DEC_SPLIT - 1) / DEC_SPLIT;
    const float *part = p.part_ml + ((size_t)r * p.n_head + kh * p.g) * p.n_split * 2;
    if ((int)threadIdx.x < p.g) {
        const float *s = part + (size_t)threadIdx.x * p.n_split * 2;
        float m = -INFINITY, l = 0.0f;
        for (int i = 0; i < n; i++)
            m = fmaxf(m, s[2 * i]);
        for (int i = 0; i < n; i++)
            l += s[2 * i + 1] * expf(s[2 * i] - m);
        ml[2 * threadIdx.x] = m;
        ml[2 * threadIdx.x + 1] = 1.0f / l;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.g * HD; i += MERGE_THREADS) {
        int j = i / HD, d = i % HD;
        const float *s = part + (size_t)j * p.n_split * 2;
        const float *o = p.part_o + ((size_t)r * p.n_head + kh * p.g + j) * p.n_split * HD + d;
        float v = 0.0f;
        for (int k = 0; k < n; k++)
            v += o[(size_t)k * HD] * expf(s[2 * k] - ml[2 * j]);
        p.out[((size_t)r * p.n_head + kh * p.g + j) * HD + d] = v * ml[2 * j + 1];
    }
    dec_rule u = p.rule[r];
    if (u.on & DEC_RING) {
        ring_put<HD>(p, u, idx, r, kh, ml);
        __syncthreads();
        if (u.on & DEC_BURST) {
            ring_score<HD>(p, u, idx, row_lane, kh);
            __syncthreads();
        }
    }
    if ((u.on & DEC_SCORE) || ((u.on & DEC_VICTIM) && p.kv.len[idx] >= p.kv.cap[idx]))
        merge_score(p, u, idx, r, kh, ml, best);
}

#endif
