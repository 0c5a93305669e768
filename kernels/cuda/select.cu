// select.cu - launchers of select.cuh.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/select.cuh"

void cu_select_begin(cudaStream_t st, const sel_params &p)
{
    dim3 heads(p.kv.n_kv);
    LAUNCH(sel_prepare, heads, dim3(SEL_THREADS), SEL_SMEM, st, p);
    if (p.budget == 0)
        return;
    if (p.shared) {
        LAUNCH(sel_floor, heads, dim3(SEL_THREADS), SEL_SMEM, st, p);
        LAUNCH(sel_share, dim3(1), dim3(SEL_SHARE_THREADS), SEL_SMEM, st, p);
    }
    LAUNCH(sel_choose, heads, dim3(SEL_THREADS), SEL_SMEM, st, p, (int)SEL_FIRST);
}

bool cu_select_wide(const sel_params &p)
{
    return p.wide > 1 && p.use_score;
}

void cu_select_rest(cudaStream_t st, const sel_params &p)
{
    int part = cu_select_wide(p) ? SEL_BY_WIDE : SEL_BY_VALUE;
    LAUNCH(sel_choose, dim3(p.kv.n_kv), dim3(SEL_THREADS), SEL_SMEM, st, p, part);
}

void cu_select_values(cudaStream_t st, const sel_params &p, int dtype, int head, int slot0, int n, unsigned short *out)
{
    dim3 grid((n + 3) / 4);
    if (dtype == KERN_KV_INT8)
        LAUNCH((sel_values<KERN_KV_INT8>), grid, dim3(128), 0, st, p, head, slot0, out);
    else
        LAUNCH((sel_values<KERN_KV_BF16>), grid, dim3(128), 0, st, p, head, slot0, out);
}

void cu_select_norm(cudaStream_t st, const float *c, int n, int d_model, float weight, float *norm)
{
    LAUNCH(sel_norm, dim3(n), dim3(SEL_THREADS), SEL_THREADS / 32 * sizeof(float), st, c, d_model, weight, norm);
}

void cu_select_end(cudaStream_t st, const sel_params &p, int dtype, int n_page)
{
    dim3 grid(n_page, p.kv.n_kv);
    LAUNCH(sel_list, dim3(p.kv.n_kv), dim3(SEL_THREADS), SEL_SMEM, st, p);
    LAUNCH(sel_caps, dim3(1), dim3(256), 0, st, p);
    if (dtype == KERN_KV_INT8)
        LAUNCH((sel_gather<KERN_KV_INT8>), grid, dim3(128), 0, st, p);
    else
        LAUNCH((sel_gather<KERN_KV_BF16>), grid, dim3(128), 0, st, p);
    LAUNCH(sel_back, grid, dim3(128), 0, st, p);
}
