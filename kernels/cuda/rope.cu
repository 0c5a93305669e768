// rope.cu - launcher of rope.cuh.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rope.cuh"

void cu_rope_store(cudaStream_t st, int dtype, const rope_params &p, const kv_view &kv, const pass_view &pass, int layer,
                   int n_row, float *qkv, unsigned short *q16)
{
    int heads = p.n_head + 2 * p.n_kv;
    dim3 grid((heads + ROPE_WARPS - 1) / ROPE_WARPS, n_row);
    size_t smem = (size_t)ROPE_WARPS * p.head_dim * sizeof(float);
    if (dtype == KERN_KV_INT8)
        LAUNCH((rope_store<KERN_KV_INT8>), grid, dim3(ROPE_WARPS * 32), smem, st, p, kv, pass, layer, qkv, q16);
    else
        LAUNCH((rope_store<KERN_KV_BF16>), grid, dim3(ROPE_WARPS * 32), smem, st, p, kv, pass, layer, qkv, q16);
}
