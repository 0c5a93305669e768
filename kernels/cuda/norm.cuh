// norm.cuh - RMSNorm with the residual add, the gated activation, small element-wise kernels.
#ifndef SKVD_KERNELS_CUDA_NORM_CUH
#define SKVD_KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/compat.cuh"

#define NORM_THREADS 256

// Sum over the block in a fixed order; `part` has a float per warp. Every thread gets the result.
__device__ __forceinline__ float block_sum(float v, float *part)
{
    int warp = threadIdx.x >> 5, n = blockDim.x >> 5;
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0)
        part[warp] = v;
    __syncthreads();
    float s = 0.0f;
    for (int i = 0; i < n; i++)
        s += part[i];
    return s;
}

// One block a row of d numbers. Each step is optional:
//   y given:          x += y, or with y_norm given: x += RMSNorm(y) * y_norm
//   out / out16 given: RMSNorm(x) * w as f32 / bf16
// row (optional): the rows of x that are read, for a gather in front of the logits; out is then [gridDim.x][d].
__global__ void __launch_bounds__(NORM_THREADS)
    add_norm(float *x, const float *y, const float *y_norm, const float *w, float eps, int d, const int32_t *row,
             float *out, unsigned short *out16)
{
    DYN_SMEM(float, part);
    size_t r = blockIdx.x;
    float *xr = x + (row ? (size_t)row[r] : r) * d;
    if (y) {
        const float *yr = y + r * d;
        float inv = 1.0f;
        if (y_norm) {
            float s = 0.0f;
            for (int i = threadIdx.x; i < d; i += blockDim.x)
                s = fmaf(yr[i], yr[i], s);
            inv = 1.0f / sqrtf(block_sum(s, part) / (float)d + eps);
        }
        for (int i = threadIdx.x; i < d; i += blockDim.x)
            xr[i] += y_norm ? yr[i] * inv * y_norm[i] : yr[i];
    }
    if (!out && !out16)
        return;
    float s = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x)
        s = fmaf(xr[i], xr[i], s);
    float inv = 1.0f / sqrtf(block_sum(s, part) / (float)d + eps);
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float v = xr[i] * inv * w[i];
        if (out)
            out[r * d + i] = v;
        if (out16)
            out16[r * d + i] = bf16_bits(v);
    }
}

// act(gate) * up. gate_up [n_row][2 n]: gate in the first half of a row. gelu: tanh form, else SiLU.
__global__ void __launch_bounds__(256)
    gated_act(const float *gate_up, int n_row, int n, int gelu, float *out, unsigned short *out16)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)n_row * n)
        return;
    size_t r = i / n, c = i % n;
    float g = gate_up[r * 2 * n + c], u = gate_up[r * 2 * n + n + c], a;
    if (gelu)
        a = 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)));
    else
        a = g / (1.0f + expf(-g));
    if (out)
        out[i] = a * u;
    if (out16)
        out16[i] = bf16_bits(a * u);
}

#endif
