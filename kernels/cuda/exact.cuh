// exact.cuh - products whose bits do not depend on how many ranks share them (tp-exact).
//
// A sum over ranks in f32 depends on where each rank's share begins. Here a product that ranks share is cut along its
// columns into parts that the model alone decides. A part is summed in f32, in the same order whoever has it, and
// rounded once to a multiple of 2^-24; parts are added as 64-bit integers, which gives the same in any order, on one
// rank or on several.
//
// The other products of prefill are done here as well: a rank has fewer outputs than the whole model, and for another
// number of outputs cuBLAS may choose another algorithm, which adds in another order.
#ifndef SKVD_KERNELS_CUDA_EXACT_CUH
#define SKVD_KERNELS_CUDA_EXACT_CUH

#include "kernels/cuda/linear.cuh"

// A part is below EXACT_MOST in size, so that the sum of up to EXACT_PARTS is below 2^53. One that is not, an infinity or
// not a number counts as EXACT_BAD, which no others bring back below 2^53, nor, all being such, past 2^63.
#define EXACT_ONE   16777216.0f // 2^24
#define EXACT_MOST  2097152.0f  // 2^21
#define EXACT_BAD   (1ll << 54)

__device__ __forceinline__ long long exact_fixed(float v)
{
    return fabsf(v) < EXACT_MOST ? __float2ll_rn(v * EXACT_ONE) : EXACT_BAD;
}

__device__ __forceinline__ float exact_float(long long sum)
{
    return sum < EXACT_BAD / 2 ? __ll2float_rn(sum) * (1.0f / EXACT_ONE) : NAN;
}

// y [n]: the sums as numbers.
__global__ void __launch_bounds__(256) exact_out(const long long *sum, size_t n, float *y)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = exact_float(sum[i]);
}

// Decode: qmv in parts of `part` columns, a multiple of 32, whose sum goes to y as an integer. The warp that owns an
// output walks all its parts, so nothing is added in memory and nothing has to be cleared. Grid: as qmv's.
// Four blocks a multiprocessor: asked for nothing, or for more, the compiler spills.
template <int TYPE, int ROWS>
__global__ void __launch_bounds__(QMV_WARPS * 32, 4)
    qmv_exact(const unsigned char *src, size_t row_bytes, int outs, int cols, int part, const float *x, int ldx, int n_row,
              long long *y, int ldy)
{
    int row0 = (int)blockIdx.y * ROWS, o0 = qmv_first(), n = min(ROWS, n_row - row0), which = 0;
    if (o0 >= outs)
        return;
    long long sum = 0;
    x += (size_t)row0 * ldx;
    for (int u = 0; u < cols / 8; u += part / 8)
        sum += exact_fixed(qmv_sum<TYPE, ROWS>(src, row_bytes, outs, o0, u, u + part / 8, x, ldx, n, &which));
    int r = which % ROWS, o = o0 + which / ROWS;
    if (qmv_holds<ROWS>() && r < n && o < outs)
        y[(size_t)(row0 + r) * ldy + o] = sum;
}

// Prefill: y [rows][ldy] = a [rows][lda] w^T, w [outs][ldw], both bf16, over `cols` columns, in parts of `part` (a multiple
// of 16 that divides them). As integers, or, for one part, as f32.
template <class OUT> struct exact_gemm_params {
    const unsigned short *w, *a;
    int ldw, lda, outs, rows, cols, part;
    OUT *y;
    int ldy;
};

#define EXG_THREADS 128
#define EXG_TILE 64                // rows, and outputs, of a block; a warp has half of each
#define EXG_COLS 64                // columns that are in shared memory at once, twice: one is read, one filled
#define EXG_LD (EXG_COLS + 8)      // so that the rows of an 8x8 matrix are in different banks
#define EXG_SMEM (4 * EXG_TILE * EXG_LD * 2)

__device__ __forceinline__ void exact_add(float part, long long &sum)
{
    sum += exact_fixed(part);
}

__device__ __forceinline__ void exact_add(float part, float &sum)
{
    sum = part;
}

// Columns [at, at + width) of the tile's rows; past the last one that one again, for what nobody takes.
__device__ __forceinline__ void exg_load(unsigned short *to, const unsigned short *src, int ld, int first, int n, int at,
                                         int width)
{
    for (int i = threadIdx.x; i < EXG_TILE * (EXG_COLS / 8); i += EXG_THREADS) {
        int r = i / (EXG_COLS / 8), c = i % (EXG_COLS / 8) * 8;
        if (c < width)
            cp16(to + r * EXG_LD + c, src + (size_t)min(first + r, n - 1) * ld + at + c);
    }
}

// acc += the warp's 32 rows times its 32 outputs over the columns in shared memory.
__device__ __forceinline__ void exg_mma(const unsigned short *a, const unsigned short *w, int width, float acc[2][4][4])
{
    int lane = threadIdx.x & 31;
    for (int k = 0; k < width; k += 16) {
        unsigned fa[2][4], fw[2][4]; // of w: two tiles of 8 outputs, each 2 x 8 columns
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ldm_x4(fa[i], a + (i * 16 + (lane & 15)) * EXG_LD + k + (lane >> 4) * 8);
            ldm_x4(fw[i], w + (i * 16 + (lane >> 4) * 8 + (lane & 7)) * EXG_LD + k + (lane >> 3 & 1) * 8);
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                mma_bf16(acc[m][n], fa[m], fw[n >> 1] + (n & 1) * 2, acc[m][n]);
    }
}

// Grid: (outs / EXG_TILE, rows / EXG_TILE).
template <class OUT> __global__ void __launch_bounds__(EXG_THREADS) exact_gemm(exact_gemm_params<OUT> p)
{
    DYN_SMEM(unsigned short, smem); // [2][a, w][EXG_TILE][EXG_LD]
    const int tile = EXG_TILE * EXG_LD;
    int out0 = (int)blockIdx.x * EXG_TILE, row0 = (int)blockIdx.y * EXG_TILE, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int wr = (warp >> 1) * 32, wo = (warp & 1) * 32;
    int per = (p.part + EXG_COLS - 1) / EXG_COLS, n_step = p.cols / p.part * per; // steps of a part, of all
    float acc[2][4][4] = {};
    OUT sum[2][4][4] = {};
    for (int s = -1; s < n_step; s++) { // the copy of the next step's columns is under way while a step's are used
        __syncthreads();                // all warps are done with what it overwrites
        if (s + 1 < n_step) {
            int k = (s + 1) % per * EXG_COLS, at = (s + 1) / per * p.part + k, width = min(EXG_COLS, p.part - k);
            unsigned short *to = smem + ((s + 1) & 1) * 2 * tile;
            exg_load(to, p.a, p.lda, row0, p.rows, at, width);
            exg_load(to + tile, p.w, p.ldw, out0, p.outs, at, width);
        }
        cp_commit();
        if (s < 0)
            continue;
        cp_wait<1>();
        __syncthreads();
        const unsigned short *from = smem + (s & 1) * 2 * tile;
        exg_mma(from + wr * EXG_LD, from + tile + wo * EXG_LD, min(EXG_COLS, p.part - s % per * EXG_COLS), acc);
        if (s % per + 1 < per)
            continue;
#pragma unroll
        for (int i = 0; i < 32; i++) { // the part is whole
            exact_add(acc[i >> 4][i >> 2 & 3][i & 3], sum[i >> 4][i >> 2 & 3][i & 3]);
            acc[i >> 4][i >> 2 & 3][i & 3] = 0.0f;
        }
    }
    cp_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int row = row0 + wr + (i >> 4) * 16 + (i >> 1 & 1) * 8 + (lane >> 2);
        int out = out0 + wo + (i >> 2 & 3) * 8 + (lane & 3) * 2 + (i & 1);
        if (row < p.rows && out < p.outs)
            p.y[(size_t)row * p.ldy + out] = sum[i >> 4][i >> 2 & 3][i & 3];
    }
}

#endif
