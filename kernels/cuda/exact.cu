// exact.cu - launchers of exact.cuh.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/exact.cuh"

template <int TYPE, int ROWS>
static void launch(cudaStream_t st, const cu_weight &w, int part, const float *x, int ldx, int n, long long *y, int ldy)
{
    LAUNCH((qmv_exact<TYPE, ROWS>), qmv_grid<ROWS>(w.rows, n), dim3(QMV_WARPS * 32), 0, st, w.data, w.row_bytes, w.rows, w.cols,
           part, x, ldx, n, y, ldy);
}

template <int TYPE>
static void launch_rows(cudaStream_t st, const cu_weight &w, int part, const float *x, int ldx, int n, long long *y, int ldy)
{
    if (n <= 1)
        launch<TYPE, 1>(st, w, part, x, ldx, n, y, ldy);
    else if (n <= 4)
        launch<TYPE, 4>(st, w, part, x, ldx, n, y, ldy);
    else
        launch<TYPE, 8>(st, w, part, x, ldx, n, y, ldy);
}

void cu_qmv_exact(cudaStream_t st, const cu_weight &w, int part, const float *x, int ldx, int n, long long *y, int ldy)
{
#define GO(T) launch_rows<T>(st, w, part, x, ldx, n, y, ldy)
    BY_TYPE(w.type, GO)
#undef GO
}

template <class OUT> static void gemm(cudaStream_t st, const exact_gemm_params<OUT> &p)
{
    dim3 grid((p.outs + EXG_TILE - 1) / EXG_TILE, (p.rows + EXG_TILE - 1) / EXG_TILE);
    LAUNCH((exact_gemm<OUT>), grid, dim3(EXG_THREADS), EXG_SMEM, st, p);
}

void cu_exact_gemm(cudaStream_t st, const unsigned short *w, int ldw, int outs, int cols, const unsigned short *a, int lda,
                   int rows, float *y)
{
    gemm<float>(st, { w, a, ldw, lda, outs, rows, cols, cols, y, outs });
}

void cu_exact_gemm_parts(cudaStream_t st, const unsigned short *w, int ldw, int outs, int cols, int part,
                         const unsigned short *a, int lda, int rows, long long *y)
{
    gemm<long long>(st, { w, a, ldw, lda, outs, rows, cols, part, y, outs });
}

void cu_exact_out(cudaStream_t st, const long long *sum, size_t n, float *y)
{
    LAUNCH(exact_out, dim3((unsigned)((n + 255) / 256)), dim3(256), 0, st, sum, n, y);
}
