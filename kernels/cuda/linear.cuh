// linear.cuh - products with quantised weights for decode: few rows, bandwidth-bound.
//
// A warp owns two outputs and up to ROWS rows; its lanes walk the row of weights in units (dequant.cuh). A row's
// sum has the same order whatever ROWS is, so a token does not depend on its batch.
#ifndef SKVD_KERNELS_CUDA_LINEAR_CUH
#define SKVD_KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/dequant.cuh"

#define QMV_WARPS 4
#define QMV_OUTS 2 // outputs a warp

// y[r][o] (stride ldy) = sum_k w[o][k] x[r][k] for rows [row0, row0 + n), n <= ROWS; x [..][ldx] f32.
template <int TYPE, int ROWS>
__device__ __forceinline__ void qmv_rows(const unsigned char *src, size_t row_bytes, int outs, int cols,
                                         const float *x, int ldx, int n, float *y, int ldy)
{
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int o0 = ((int)blockIdx.x * QMV_WARPS + warp) * QMV_OUTS;
    if (o0 >= outs)
        return;
    const unsigned char *row_a = src + (size_t)o0 * row_bytes;
    const unsigned char *row_b = o0 + 1 < outs ? row_a + row_bytes : row_a;
    float acc[2 * ROWS]; // the first output's rows, then the second's
#pragma unroll
    for (int r = 0; r < 2 * ROWS; r++)
        acc[r] = 0.0f;
    for (int u = lane; u < cols / 8; u += 32) {
        float wa[8], wb[8];
        deq<TYPE>::unit(row_a, u >> 2, u & 3, wa);
        deq<TYPE>::unit(row_b, u >> 2, u & 3, wb);
        int c = unit_first(u >> 2, u & 3);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float *xr = x + (size_t)(r < n ? r : 0) * ldx + c;
            float4 lo = *reinterpret_cast<const float4 *>(xr);
            float4 hi = *reinterpret_cast<const float4 *>(xr + 16);
            float xs[8] = { lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w };
            for (int i = 0; i < 8; i++) {
                acc[r] = fmaf(wa[i], xs[i], acc[r]);
                acc[ROWS + r] = fmaf(wb[i], xs[i], acc[ROWS + r]);
            }
        }
    }
    int which, r, o;
    float sum = warp_sum_many<2 * ROWS>(acc, &which);
    r = which % ROWS;
    o = o0 + which / ROWS;
    if ((lane & (32 / (2 * ROWS) - 1)) == 0 && r < n && o < outs)
        y[(size_t)r * ldy + o] = sum;
}

// Grid: (outputs / 8, rows / ROWS).
template <int TYPE, int ROWS>
__global__ void __launch_bounds__(QMV_WARPS * 32)
    qmv(const unsigned char *src, size_t row_bytes, int outs, int cols, const float *x, int ldx, int n_row, float *y,
        int ldy)
{
    int row0 = (int)blockIdx.y * ROWS;
    qmv_rows<TYPE, ROWS>(src, row_bytes, outs, cols, x + (size_t)row0 * ldx, ldx, min(ROWS, n_row - row0),
                         y + (size_t)row0 * ldy, ldy);
}

#endif
