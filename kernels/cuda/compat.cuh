// compat.cuh - the only place with inline PTX, <<<>>> and extern __shared__.
//
// All other device text is C++ that nvcc compiles for sm_80 and newer and that the tests compile with g++
// against the host shim (macro CUDA_HOST_SHIM names its header), so that the very kernel source runs where
// there is no GPU. The shim has a twin for each wrapper below; tests/cuda/test_wrappers.cu checks the twins
// against the fragment tables of NVIDIA's PTX ISA manual.
#ifndef SKVD_KERNELS_CUDA_COMPAT_CUH
#define SKVD_KERNELS_CUDA_COMPAT_CUH

#ifdef CUDA_HOST_SHIM
#include CUDA_HOST_SHIM
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// Dynamic shared memory of the block as a T array, 128-byte aligned.
#define DYN_SMEM(T, name)                                                                          \
    extern __shared__ __align__(128) unsigned char dyn_smem_raw[];                                 \
    T *name = reinterpret_cast<T *>(dyn_smem_raw)

// Launch kernel k (parenthesise a template's name) on stream st.
#define LAUNCH(k, g, b, sm, st, ...) k<<<(g), (b), (sm), (st)>>>(__VA_ARGS__)

__device__ __forceinline__ unsigned smem_u32(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}

// d = a b + c over a warp: a 16x16 and b 16x8 bf16, c and d 16x8 f32 (mma.m16n8k16, row.col).
__device__ __forceinline__ void mma_bf16(float d[4], const unsigned a[4], const unsigned b[2],
                                         const float c[4])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};\n"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                   "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Load four (two) 8x8 matrices of 16-bit elements from shared memory; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldm_x4(unsigned r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(row))
                 : "memory");
}

__device__ __forceinline__ void ldm_x2(unsigned r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_u32(row))
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldm_x2t(unsigned r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(smem_u32(row))
                 : "memory");
}

// Start a copy of 16 bytes from global to shared memory; it is there after the wait for its group.
__device__ __forceinline__ void cp16(void *dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;\n" ::"r"(smem_u32(dst)), "l"(src)
                 : "memory");
}

__device__ __forceinline__ void cp_commit()
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Wait until at most N of this thread's groups are still under way.
template <int N> __device__ __forceinline__ void cp_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}
#endif

#define FULL_WARP 0xffffffffu

// --- small helpers that both builds share ----------------------------------------------------------

__device__ __forceinline__ float bf16_lo(unsigned w)
{
    return __uint_as_float(w << 16);
}

__device__ __forceinline__ float bf16_hi(unsigned w)
{
    return __uint_as_float(w & 0xffff0000u);
}

// Two floats as one word of bf16, `lo` in the low half, rounded to nearest even.
__device__ __forceinline__ unsigned bf16_pack(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    unsigned w;
    memcpy(&w, &v, sizeof w);
    return w;
}

__device__ __forceinline__ unsigned short bf16_bits(float f)
{
    return (unsigned short)(bf16_pack(f, 0.0f) & 0xffff);
}

__device__ __forceinline__ float f16_bits_to_f32(unsigned short h)
{
    __half_raw r;
    r.x = h;
    return __half2float(__half(r));
}

// Sums and maxima over a warp; every lane gets the result. The order is fixed (a butterfly).
__device__ __forceinline__ float warp_sum(float v)
{
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, o);
    return v;
}

__device__ __forceinline__ float warp_max(float v)
{
    for (int o = 16; o; o >>= 1)
        v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, o));
    return v;
}

// Sums over a warp of N values at once (N a power of two), the same bits as warp_sum gives each: lanes share the values
// out as they add, so N values cost about N + 4 exchanges instead of 5 N. Returns the sum of value `which`; the lanes
// with (lane & (32 / N - 1)) == 0 hold each once.
template <int N> __device__ __forceinline__ float warp_sum_many(float v[N], int *which)
{
    int lane = threadIdx.x & 31, at = 0, o = 16;
#pragma unroll
    for (int n = N; n > 1; n >>= 1, o >>= 1) {
        bool up = lane & o;
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            if (i < n / 2) {
                float send = up ? v[i] : v[i + n / 2], keep = up ? v[i + n / 2] : v[i];
                v[i] = keep + __shfl_xor_sync(FULL_WARP, send, o);
            }
        at += up ? n / 2 : 0;
    }
    for (; o; o >>= 1)
        v[0] += __shfl_xor_sync(FULL_WARP, v[0], o);
    *which = at;
    return v[0];
}

__device__ __forceinline__ int warp_sum_int(int v)
{
    for (int o = 16; o; o >>= 1)
        v += __shfl_xor_sync(FULL_WARP, v, o);
    return v;
}

#endif
