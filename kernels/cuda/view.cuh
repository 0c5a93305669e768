// view.cuh - how device code sees the KV pool and one pass. Passed by value to kernels.
#ifndef SKVD_KERNELS_CUDA_VIEW_CUH
#define SKVD_KERNELS_CUDA_VIEW_CUH

#include <stdint.h>

#include "kernels/cuda/compat.cuh"
extern "C" {
#include "kernels/page.h"
}

// The pool and the per-(lane, layer, head) arrays of ops.h's struct ops_kv, on the device.
struct kv_view {
    unsigned char *pool; // [n_pages][page_bytes], layout of kernels/page.h
    size_t page_bytes;
    uint32_t k, v, k_scale, v_scale, pos, score; // byte offsets inside a page
    int n_layer, n_kv, max_pages;
    uint32_t *table;             // [lanes][n_layer][n_kv][max_pages]
    int32_t *len, *cap, *victim; // [lanes][n_layer][n_kv]
};

// Rows of a pass. A row with lane < 0 is padding (a graph captured for a larger batch) and does nothing.
struct pass_view {
    const int32_t *token, *lane, *pos; // [n_row]
    const int32_t *slot;               // [n_row][n_kv] of the layer at hand; -1: the victim
};

__device__ __forceinline__ size_t kv_index(const kv_view &kv, int lane, int layer, int head)
{
    return ((size_t)lane * kv.n_layer + layer) * kv.n_kv + head;
}

__device__ __forceinline__ unsigned char *kv_page(const kv_view &kv, size_t index, int page)
{
    return kv.pool + (size_t)kv.table[index * kv.max_pages + page] * kv.page_bytes;
}

__device__ __forceinline__ int32_t *page_pos(const kv_view &kv, unsigned char *page)
{
    return reinterpret_cast<int32_t *>(page + kv.pos);
}

__device__ __forceinline__ float *page_score(const kv_view &kv, unsigned char *page)
{
    return reinterpret_cast<float *>(page + kv.score);
}

// Scale of K (V) of a slot; 1 unless the cache is int8.
template <int DT>
__device__ __forceinline__ float page_k_scale(const kv_view &kv, const unsigned char *page, int slot)
{
    return DT == KERN_KV_INT8 ? reinterpret_cast<const float *>(page + kv.k_scale)[slot] : 1.0f;
}

template <int DT>
__device__ __forceinline__ float page_v_scale(const kv_view &kv, const unsigned char *page, int slot)
{
    return DT == KERN_KV_INT8 ? reinterpret_cast<const float *>(page + kv.v_scale)[slot] : 1.0f;
}

// Two neighbouring dimensions (2 kp, 2 kp + 1) of K of a slot as a word of bf16. int8 values are exact in bf16; the
// slot's scale is not applied.
template <int DT>
__device__ __forceinline__ unsigned page_k_pair(const kv_view &kv, const unsigned char *page, int kp, int slot)
{
    if (DT == KERN_KV_BF16)
        return reinterpret_cast<const unsigned *>(page + kv.k)[kp * KERN_PAGE_SLOTS + slot];
    unsigned w = reinterpret_cast<const unsigned *>(page + kv.k)[(kp >> 1) * KERN_PAGE_SLOTS + slot];
    w >>= (kp & 1) * 16;
    return bf16_pack((float)((int)(w & 0xff) - 128), (float)((int)(w >> 8 & 0xff) - 128));
}

// Dimension d of V of the slots 2 pair, 2 pair + 1 as a word of bf16.
template <int DT, int HD>
__device__ __forceinline__ unsigned page_v_pair(const kv_view &kv, const unsigned char *page, int pair, int d)
{
    if (DT == KERN_KV_BF16)
        return reinterpret_cast<const unsigned *>(page + kv.v)[pair * HD + d];
    const signed char *v = reinterpret_cast<const signed char *>(page + kv.v);
    return bf16_pack((float)v[2 * pair * HD + d], (float)v[(2 * pair + 1) * HD + d]);
}

#endif
