// decode.cu - launchers of decode.cuh.
#include "kernels/cuda/headdim.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/decode.cuh"

template <int HD, int DT, int G> static void split_setup(cudaError_t *e)
{
    const void *fn = reinterpret_cast<const void *>(dec_split<HD, DT, G>);
    if (*e == cudaSuccess)
        *e = cudaFuncSetAttribute(fn, cudaFuncAttributeMaxDynamicSharedMemorySize, DEC_SMEM(HD, G));
}

template <int HD, int DT> static void group_setup(cudaError_t *e)
{
    split_setup<HD, DT, 1>(e);
    split_setup<HD, DT, 2>(e);
    split_setup<HD, DT, 4>(e);
    split_setup<HD, DT, 8>(e);
}

cudaError_t cu_decode_setup(void)
{
    const int sizes[] = { 64, 80, 96, 128, 256 };
    cudaError_t e = cudaSuccess;
    for (int hd : sizes) {
#define GO(HD) (group_setup<HD, KERN_KV_BF16>(&e), group_setup<HD, KERN_KV_INT8>(&e))
        BY_HEAD_DIM(hd, GO)
#undef GO
    }
    return e;
}

template <int HD, int DT> static void split_launch(cudaStream_t st, const dec_params &p, int n_row)
{
    dim3 grid(p.n_split, p.kv.n_kv, n_row), block(DEC_WARPS * 32);
    if (p.g <= 1)
        LAUNCH((dec_split<HD, DT, 1>), grid, block, DEC_SMEM(HD, 1), st, p);
    else if (p.g <= 2)
        LAUNCH((dec_split<HD, DT, 2>), grid, block, DEC_SMEM(HD, 2), st, p);
    else if (p.g <= 4)
        LAUNCH((dec_split<HD, DT, 4>), grid, block, DEC_SMEM(HD, 4), st, p);
    else
        LAUNCH((dec_split<HD, DT, 8>), grid, block, DEC_SMEM(HD, 8), st, p);
}

void cu_decode(cudaStream_t st, int dtype, int head_dim, const dec_params &p, int n_row)
{
#define GO(HD)                                                                                     \
    do {                                                                                           \
        if (dtype == KERN_KV_INT8)                                                                 \
            split_launch<HD, KERN_KV_INT8>(st, p, n_row);                                          \
        else                                                                                       \
            split_launch<HD, KERN_KV_BF16>(st, p, n_row);                                          \
        LAUNCH((dec_merge<HD>), dim3(p.kv.n_kv, n_row), dim3(MERGE_THREADS), MERGE_SMEM(p.g), st, p); \
    } while (0)
    BY_HEAD_DIM(head_dim, GO)
#undef GO
}
