// linear.cuh - products with quantised weights for decode: few rows, bandwidth-bound.
//
// A warp owns two outputs and up to ROWS rows; its lanes walk the row of weights in units (dequant.cuh). A row's
// sum has the same order whatever ROWS is, so a token does not depend on its batch.
#ifndef SKVD_KERNELS_CUDA_LINEAR_CUH
#define SKVD_KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/dequant.cuh"

#define QMV_WARPS 4
#define QMV_OUTS 2 // outputs a warp

// The first output of this warp.
__device__ __forceinline__ int qmv_first()
{
    return ((int)blockIdx.x * QMV_WARPS + (int)(threadIdx.x >> 5)) * QMV_OUTS;
}

// True in the lanes that qmv_sum gives one sum each.
template <int ROWS> __device__ __forceinline__ bool qmv_holds()
{
    return (threadIdx.x & 31 & (32 / (2 * ROWS) - 1)) == 0;
}

// Sums over the units [unit0, unit1) of a row's columns, of outputs o0 and o0 + 1, for rows [0, n) of x, n <= ROWS; x [..][ldx]
// f32. Returns that of output o0 + which / ROWS and row which % ROWS.
template <int TYPE, int ROWS>
__device__ __forceinline__ float qmv_sum(const unsigned char *src, size_t row_bytes, int outs, int o0, int unit0, int unit1,
                                         const float *x, int ldx, int n, int *which)
{
    const unsigned char *row_a = src + (size_t)o0 * row_bytes;
    const unsigned char *row_b = o0 + 1 < outs ? row_a + row_bytes : row_a;
    float acc[2 * ROWS]; // the first output's rows, then the second's
#pragma unroll
    for (int r = 0; r < 2 * ROWS; r++)
        acc[r] = 0.0f;
    for (int u = unit0 + (int)(threadIdx.x & 31); u < unit1; u += 32) {
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
    return warp_sum_many<2 * ROWS>(acc, which);
}

// y[r][o] (stride ldy) = sum_k w[o][k] x[r][k]. Grid: qmv_grid.
template <int TYPE, int ROWS>
__global__ void __launch_bounds__(QMV_WARPS * 32)
    qmv(const unsigned char *src, size_t row_bytes, int outs, int cols, const float *x, int ldx, int n_row, float *y,
        int ldy)
{
    int row0 = (int)blockIdx.y * ROWS, o0 = qmv_first(), n = min(ROWS, n_row - row0), which;
    if (o0 >= outs)
        return;
    float sum = qmv_sum<TYPE, ROWS>(src, row_bytes, outs, o0, 0, cols / 8, x + (size_t)row0 * ldx, ldx, n, &which);
    int r = which % ROWS, o = o0 + which / ROWS;
    if (qmv_holds<ROWS>() && r < n && o < outs)
        y[(size_t)(row0 + r) * ldy + o] = sum;
}

template <int ROWS> static dim3 qmv_grid(int outs, int n)
{
    return dim3((outs + QMV_WARPS * QMV_OUTS - 1) / (QMV_WARPS * QMV_OUTS), (n + ROWS - 1) / ROWS);
}

// Run GO(type) for a GGUF type.
#define BY_TYPE(type, GO)                                                                          \
    switch (type) {                                                                                \
    case KERN_F32: GO(KERN_F32); break;                                                            \
    case KERN_F16: GO(KERN_F16); break;                                                            \
    case KERN_BF16: GO(KERN_BF16); break;                                                          \
    case KERN_Q4_0: GO(KERN_Q4_0); break;                                                          \
    case KERN_Q4_1: GO(KERN_Q4_1); break;                                                          \
    case KERN_Q5_0: GO(KERN_Q5_0); break;                                                          \
    case KERN_Q5_1: GO(KERN_Q5_1); break;                                                          \
    case KERN_Q8_0: GO(KERN_Q8_0); break;                                                          \
    case KERN_Q4_K: GO(KERN_Q4_K); break;                                                          \
    case KERN_Q5_K: GO(KERN_Q5_K); break;                                                          \
    case KERN_Q6_K: GO(KERN_Q6_K); break;                                                          \
    }

#endif
