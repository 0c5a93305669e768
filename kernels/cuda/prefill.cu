// prefill.cu - launchers of prefill.cuh.
#include "kernels/cuda/headdim.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/prefill.cuh"

bool cu_head_dim_ok(int head_dim)
{
    bool ok = false;
#define GO(HD) ok = true
    BY_HEAD_DIM(head_dim, GO)
#undef GO
    return ok;
}

template <int HD, int DT> static void setup_one(cudaError_t *e)
{
    const void *fa = reinterpret_cast<const void *>(fa_prefill<HD, DT>);
    const void *sc = reinterpret_cast<const void *>(score_pass<HD, DT>);
    if (*e == cudaSuccess)
        *e = cudaFuncSetAttribute(fa, cudaFuncAttributeMaxDynamicSharedMemorySize, FA_SMEM(HD));
    if (*e == cudaSuccess)
        *e = cudaFuncSetAttribute(sc, cudaFuncAttributeMaxDynamicSharedMemorySize, SC_SMEM(HD));
}

cudaError_t cu_prefill_setup(void)
{
    const int sizes[] = { 64, 80, 96, 128, 256 };
    cudaError_t e = cudaSuccess;
    for (int hd : sizes) {
#define GO(HD) (setup_one<HD, KERN_KV_BF16>(&e), setup_one<HD, KERN_KV_INT8>(&e))
        BY_HEAD_DIM(hd, GO)
#undef GO
    }
    return e;
}

void cu_prefill(cudaStream_t st, int dtype, int head_dim, const fa_params &p, int n_seg, int most_rows)
{
    dim3 grid((most_rows * p.g + FA_ROWS - 1) / FA_ROWS, p.kv.n_kv, n_seg);
#define GO(HD)                                                                                     \
    if (dtype == KERN_KV_INT8)                                                                     \
        LAUNCH((fa_prefill<HD, KERN_KV_INT8>), grid, dim3(FA_THREADS(HD)), FA_SMEM(HD), st, p);    \
    else                                                                                           \
        LAUNCH((fa_prefill<HD, KERN_KV_BF16>), grid, dim3(FA_THREADS(HD)), FA_SMEM(HD), st, p)
    BY_HEAD_DIM(head_dim, GO)
#undef GO
}

void cu_score(cudaStream_t st, int dtype, int head_dim, const score_params &p, int n_seg, int most_slots)
{
    dim3 grid((most_slots + SC_SLOTS - 1) / SC_SLOTS, p.kv.n_kv, n_seg);
#define GO(HD)                                                                                     \
    if (dtype == KERN_KV_INT8)                                                                     \
        LAUNCH((score_pass<HD, KERN_KV_INT8>), grid, dim3(SC_WARPS * 32), SC_SMEM(HD), st, p);     \
    else                                                                                           \
        LAUNCH((score_pass<HD, KERN_KV_BF16>), grid, dim3(SC_WARPS * 32), SC_SMEM(HD), st, p)
    BY_HEAD_DIM(head_dim, GO)
#undef GO
}
