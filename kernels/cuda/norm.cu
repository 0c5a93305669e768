// norm.cu - launchers of norm.cuh.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/norm.cuh"

void cu_add_norm(cudaStream_t st, float *x, const float *y, const float *y_norm, const float *w, float eps, int d,
                 int n, const int32_t *row, float *out, unsigned short *out16)
{
    LAUNCH(add_norm, dim3(n), dim3(NORM_THREADS), NORM_THREADS / 32 * sizeof(float), st, x, y, y_norm, w, eps, d, row,
           out, out16);
}

void cu_gated_act(cudaStream_t st, const float *gate_up, int n_row, int n, bool gelu, float *out, unsigned short *out16)
{
    dim3 grid((unsigned)(((size_t)n_row * n + 255) / 256));
    LAUNCH(gated_act, grid, dim3(256), 0, st, gate_up, n_row, n, gelu ? 1 : 0, out, out16);
}
