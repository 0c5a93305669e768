// kv.cuh - keeping the device's copy of tables and lengths in step with the host's; clearing pages; victims back.
#ifndef SKVD_KERNELS_CUDA_KV_CUH
#define SKVD_KERNELS_CUDA_KV_CUH

#include "kernels/cuda/params.h"

// Apply *n changes. Indices are unique, so the order does not matter.
__global__ void __launch_bounds__(128) kv_apply(kv_view kv, const kv_change *change, const int32_t *n)
{
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < *n; i += (int)(gridDim.x * blockDim.x)) {
        kv_change c = change[i];
        if (c.kind == KV_TABLE)
            kv.table[c.index] = c.value;
        else if (c.kind == KV_LEN)
            kv.len[c.index] = (int32_t)c.value;
        else if (c.kind == KV_CAP)
            kv.cap[c.index] = (int32_t)c.value;
        else
            kv.victim[c.index] = (int32_t)c.value;
    }
}

// Zero *n pages of the list.
__global__ void __launch_bounds__(128) kv_clear(kv_view kv, const uint32_t *page, const int32_t *n)
{
    for (int i = blockIdx.x; i < *n; i += gridDim.x) {
        uint4 *p = reinterpret_cast<uint4 *>(kv.pool + (size_t)page[i] * kv.page_bytes);
        for (unsigned j = threadIdx.x; j < kv.page_bytes / 16; j += blockDim.x)
            p[j] = make_uint4(0, 0, 0, 0);
    }
}

// out [n_row][n_layer][n_kv] = victims of the rows' lanes.
__global__ void __launch_bounds__(128) kv_victims(kv_view kv, const int32_t *lane, int n_row, int32_t *out)
{
    int per = kv.n_layer * kv.n_kv, i = (int)(blockIdx.x * blockDim.x + threadIdx.x), r = i / per;
    if (r < n_row && lane[r] >= 0)
        out[i] = kv.victim[(size_t)lane[r] * per + i % per];
}

// Positions and scores of a head's slots, for tests and queries.
__global__ void __launch_bounds__(128) kv_slots(kv_view kv, size_t idx, int n, int32_t *pos, float *score)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n)
        return;
    unsigned char *page = kv_page(kv, idx, i / KERN_PAGE_SLOTS);
    pos[i] = page_pos(kv, page)[i % KERN_PAGE_SLOTS];
    score[i] = page_score(kv, page)[i % KERN_PAGE_SLOTS];
}

#endif
