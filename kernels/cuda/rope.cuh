// rope.cuh - what follows the Q K V products: bias, per-head norm, rotation, and K and V into their slots.
#ifndef SKVD_KERNELS_CUDA_ROPE_CUH
#define SKVD_KERNELS_CUDA_ROPE_CUH

#include "kernels/cuda/params.h"

#define ROPE_WARPS 4

// Symmetric int8 of one head's vector: returns the scale, absmax / 127.
__device__ __forceinline__ float warp_int8_scale(const float *v, int n)
{
    float m = 0.0f;
    for (int i = threadIdx.x & 31; i < n; i += 32)
        m = fmaxf(m, fabsf(v[i]));
    return warp_max(m) / 127.0f;
}

__device__ __forceinline__ int int8_of(float v, float inv)
{
    int q = (int)rintf(v * inv);
    return q > 127 ? 127 : q < -127 ? -127 : q;
}

// Store K (v_side 0) or V (1) of one head at `slot` of a page; `v` in shared memory. One warp.
template <int DT>
__device__ __forceinline__ void page_store(const kv_view &kv, unsigned char *page, int slot, const float *v, int hd,
                                           int v_side)
{
    int lane = threadIdx.x & 31;
    if constexpr (DT == KERN_KV_BF16) {
        if (v_side) {
            unsigned short *p = reinterpret_cast<unsigned short *>(page + kv.v);
            for (int d = lane; d < hd; d += 32)
                p[((slot >> 1) * hd + d) * 2 + (slot & 1)] = bf16_bits(v[d]);
        } else {
            unsigned *p = reinterpret_cast<unsigned *>(page + kv.k);
            for (int i = lane; i < hd / 2; i += 32)
                p[i * KERN_PAGE_SLOTS + slot] = bf16_pack(v[2 * i], v[2 * i + 1]);
        }
        return;
    }
    float scale = warp_int8_scale(v, hd), inv = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (v_side) {
        signed char *p = reinterpret_cast<signed char *>(page + kv.v);
        for (int d = lane; d < hd; d += 32)
            p[slot * hd + d] = (signed char)int8_of(v[d], inv);
    } else {
        unsigned *p = reinterpret_cast<unsigned *>(page + kv.k);
        for (int i = lane; i < hd / 4; i += 32) {
            unsigned w = 0;
            for (int j = 0; j < 4; j++)
                w |= (unsigned)(int8_of(v[4 * i + j], inv) + 128) << (8 * j);
            p[i * KERN_PAGE_SLOTS + slot] = w;
        }
    }
    if (lane == 0)
        reinterpret_cast<float *>(page + (v_side ? kv.v_scale : kv.k_scale))[slot] = scale;
}

// v[head_dim] in shared memory is normalised and rotated in place by one warp.
__device__ __forceinline__ void head_norm_rope(const rope_params &p, float *v, const float *norm, int pos)
{
    int lane = threadIdx.x & 31;
    if (norm) {
        float s = 0.0f;
        for (int i = lane; i < p.head_dim; i += 32)
            s = fmaf(v[i], v[i], s);
        float inv = 1.0f / sqrtf(warp_sum(s) / (float)p.head_dim + p.eps);
        for (int i = lane; i < p.head_dim; i += 32)
            v[i] = v[i] * inv * norm[i];
        __syncwarp();
    }
    for (int i = lane; i < p.rot_dim / 2; i += 32) {
        int a = p.half ? i : 2 * i, b = p.half ? i + p.rot_dim / 2 : 2 * i + 1;
        float s, c, x = v[a], y = v[b];
        sincosf((float)pos * p.inv_freq[i], &s, &c);
        v[a] = x * c - y * s;
        v[b] = x * s + y * c;
    }
    __syncwarp();
}

// qkv [n_row][n_head + 2 n_kv][head_dim] f32. Q is rotated in place (and copied to q16 as bf16 [n_row][n_head][hd]
// when given); K and V go to their slots with position and score 0. Without q16, in a decode step, a head whose row brings a new
// slot grows by it. One warp a head; grid (heads / 4, n_row); shared memory: 4 head_dim floats.
template <int DT>
__global__ void __launch_bounds__(ROPE_WARPS * 32)
    rope_store(rope_params p, kv_view kv, pass_view pass, int layer, float *qkv, unsigned short *q16)
{
    DYN_SMEM(float, sm);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = blockIdx.y;
    int heads = p.n_head + 2 * p.n_kv, h = (int)blockIdx.x * ROPE_WARPS + warp, hd = p.head_dim;
    if (h >= heads || pass.lane[r] < 0)
        return;
    float *src = qkv + ((size_t)r * heads + h) * hd, *v = sm + warp * hd;
    bool is_q = h < p.n_head, is_v = h >= p.n_head + p.n_kv;
    int kh = is_q ? 0 : is_v ? h - p.n_head - p.n_kv : h - p.n_head;
    const float *bias = is_q ? p.bias_q : is_v ? p.bias_v : p.bias_k;
    if (bias)
        bias += (is_q ? h : kh) * hd;
    for (int i = lane; i < hd; i += 32)
        v[i] = src[i] + (bias ? bias[i] : 0.0f);
    __syncwarp();
    if (!is_v)
        head_norm_rope(p, v, is_q ? p.q_norm : p.k_norm, pass.pos[r]);
    if (is_q) {
        for (int i = lane; i < hd; i += 32) {
            src[i] = v[i];
            if (q16)
                q16[((size_t)r * p.n_head + h) * hd + i] = bf16_bits(v[i]);
        }
        return;
    }
    size_t idx = kv_index(kv, pass.lane[r], layer, kh);
    int slot = pass.slot[r * kv.n_kv + kh];
    if (slot < 0)
        slot = kv.victim[idx];
    else if (!q16 && !is_v && lane == 0)
        kv.len[idx] = slot + 1;
    if (slot < 0) // no victim: by contract only in a padding row
        return;
    unsigned char *page = kv_page(kv, idx, slot / KERN_PAGE_SLOTS);
    slot %= KERN_PAGE_SLOTS;
    page_store<DT>(kv, page, slot, v, hd, is_v);
    if (!is_v && lane == 0) {
        page_pos(kv, page)[slot] = pass.pos[r];
        page_score(kv, page)[slot] = 0.0f;
    }
}

#endif
