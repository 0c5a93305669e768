// hostshim.h - runs CUDA kernel source on the host, for tests only.
//
// kernels/cuda/compat.cuh includes this file instead of the CUDA compiler's built-ins when the source is
// compiled by g++ or clang++ (-x c++). Types and prototypes come from NVIDIA's own headers, so that a call
// that would not compile against the real library does not compile here either. Every CUDA thread is a fiber;
// warp operations and barriers are where fibers change. Nothing here says anything about a GPU's speed.
//
// Environment: SHIM_SEED=N runs warps and lanes in a random order (0 or unset: in order).
#ifndef SKVD_TESTS_CUDA_HOSTSHIM_H
#define SKVD_TESTS_CUDA_HOSTSHIM_H

#include <cuda_runtime.h>
#include <vector_types.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

namespace shim
{

struct fiber;
struct block;

// What a running thread sees of itself.
struct self {
    uint3 tid, bid;
    dim3 bdim, gdim;
    unsigned lane;
    fiber *f;
    block *b;
};
extern self cur;

// Stop the test with the kernel, the block and what each waiting thread waits for. Exit status 86.
[[noreturn]] void die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

void barrier(const char *file, int line);
void *dyn_smem();

// A warp operation: when every lane named in `mask` has arrived with the same `fin`, fin(args, mask) computes
// all lanes' results at once. args[lane] is what that lane passed.
typedef void (*warp_fin)(void **args, unsigned mask);
void warp_op(unsigned mask, warp_fin fin, void *arg, const char *what);

// cp.async: the copy happens at the wait, not before; shared memory starts out as NaN.
void cp_async(void *dst, const void *src, int bytes);
void cp_commit();
void cp_wait(int groups_left);

void launch(const void *fn, const char *name, dim3 grid, dim3 block, size_t smem, cudaStream_t st,
            std::function<void()> body);

// Put work of a fake library (cuBLAS, NCCL) into a stream: it runs, or is captured, like a kernel.
void enqueue(cudaStream_t st, std::function<void()> work);
// The same for work that needs another process: asked again and again until it says true.
void enqueue_poll(cudaStream_t st, std::function<bool()> poll);
// Run the oldest piece of work of a stream; false when there is none.
bool run_one(cudaStream_t st);
// Kernel launches and graph launches that the host asked for since the start; library calls count as kernels.
struct counts {
    long kernels, graphs, copies, reduces, gathers;
};
extern counts count;
// Start counting towards SHIM_FAIL anew.
void forget_failures();
// True when [p, p + bytes) lies inside one live cudaMalloc allocation.
bool device_range(const void *p, size_t bytes);

// Arguments are evaluated and copied at the launch, as on the device.
template <class... P, class... A>
void launch_kernel(void (*k)(P...), const char *name, dim3 grid, dim3 bdim, size_t smem, cudaStream_t st, A... args)
{
    std::tuple<P...> bound(args...);
    launch(reinterpret_cast<const void *>(k), name, grid, bdim, smem, st, [k, bound] { std::apply(k, bound); });
}

template <class T> struct shfl_arg {
    T v;
    int src;
};

template <class T> void shfl_fin(void **a, unsigned mask)
{
    T out[32];
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1))
            continue;
        int src = static_cast<shfl_arg<T> *>(a[l])->src;
        if (mask >> src & 1)
            out[l] = static_cast<shfl_arg<T> *>(a[src])->v;
        else
            memset(&out[l], 0xff, sizeof(T)); // undefined on the device: poison here
    }
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1)
            static_cast<shfl_arg<T> *>(a[l])->v = out[l];
}

template <class T> T shfl(unsigned mask, T v, int src)
{
    shfl_arg<T> s = { v, src };
    warp_op(mask, shfl_fin<T>, &s, "shfl_sync");
    return s.v;
}

unsigned ballot(unsigned mask, bool pred);

// The tensor-core wrappers' twins; layouts from the PTX ISA manual, section "Warp Level Matrix Instructions".
void mma_bf16_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void ldmatrix(unsigned *r, const void *row, int count, bool trans);

} // namespace shim

#define threadIdx (shim::cur.tid)
#define blockIdx (shim::cur.bid)
#define blockDim (shim::cur.bdim)
#define gridDim (shim::cur.gdim)
#define __syncthreads() shim::barrier(__FILE__, __LINE__)
#define DYN_SMEM(T, name) T *name = static_cast<T *>(shim::dyn_smem())
#define LAUNCH(k, g, b, sm, st, ...) shim::launch_kernel((k), #k, (g), (b), (sm), (st), __VA_ARGS__)

inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    shim::warp_op(mask, nullptr, nullptr, "syncwarp");
}

template <class T> inline T __shfl_sync(unsigned m, T v, int s, int w = 32)
{
    int l = (int)shim::cur.lane;
    return shim::shfl(m, v, (l & ~(w - 1)) | (s & (w - 1)));
}

template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32)
{
    int l = (int)shim::cur.lane, s = l ^ x;
    if ((s & ~(w - 1)) > (l & ~(w - 1)))
        s = l;
    return shim::shfl(m, v, s);
}

template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32)
{
    int l = (int)shim::cur.lane, s = l + (int)d;
    if ((s & ~(w - 1)) != (l & ~(w - 1)))
        s = l;
    return shim::shfl(m, v, s);
}

template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32)
{
    int l = (int)shim::cur.lane, s = l - (int)d;
    if (s < (l & ~(w - 1)))
        s = l;
    return shim::shfl(m, v, s);
}

inline unsigned __ballot_sync(unsigned m, int p)
{
    return shim::ballot(m, p != 0);
}

// Fibers never run at the same time, so plain read-modify-write is atomic here.
template <class T> inline T atomicAdd(T *p, T v)
{
    T o = *p;
    *p = o + v;
    return o;
}

template <class T> inline T atomicMax(T *p, T v)
{
    T o = *p;
    *p = o > v ? o : v;
    return o;
}

inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}

inline unsigned __float_as_uint(float f)
{
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}

inline float __uint_as_float(unsigned u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline long long __float2ll_rn(float f) // in range; the device saturates
{
    return llrintf(f);
}

inline float __ll2float_rn(long long v)
{
    return (float)v;
}

using std::max;
using std::min;

// --- the five wrappers of compat.cuh -------------------------------------------------------------

inline void mma_bf16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    shim::mma_bf16_m16n8k16(d, a, b, c);
}

inline void ldm_x4(unsigned r[4], const void *row)
{
    shim::ldmatrix(r, row, 4, false);
}

inline void ldm_x2(unsigned r[2], const void *row)
{
    shim::ldmatrix(r, row, 2, false);
}

inline void ldm_x2t(unsigned r[2], const void *row)
{
    shim::ldmatrix(r, row, 2, true);
}

inline void cp16(void *dst, const void *src)
{
    shim::cp_async(dst, src, 16);
}

inline void cp_commit()
{
    shim::cp_commit();
}

template <int N> inline void cp_wait()
{
    shim::cp_wait(N);
}

#endif
