// linear.cu - launchers of embedding, decode products and dequantisation.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear.cuh"

bool cu_type_ok(int type)
{
    bool ok = false;
#define GO(T) ok = true
    BY_TYPE(type, GO)
#undef GO
    return ok;
}

void cu_embed(cudaStream_t st, const cu_weight &w, const int32_t *token, int n, float scale, float *x)
{
#define GO(T) LAUNCH((embed_rows<T>), dim3(n), dim3(128), 0, st, w.data, w.row_bytes, w.cols, token, scale, x)
    BY_TYPE(w.type, GO)
#undef GO
}

template <int TYPE, int ROWS>
static void qmv_launch(cudaStream_t st, const cu_weight &w, const float *x, int ldx, int n, float *y, int ldy)
{
    LAUNCH((qmv<TYPE, ROWS>), qmv_grid<ROWS>(w.rows, n), dim3(QMV_WARPS * 32), 0, st, w.data, w.row_bytes, w.rows, w.cols, x, ldx, n,
           y, ldy);
}

template <int TYPE>
static void qmv_rows_for(cudaStream_t st, const cu_weight &w, const float *x, int ldx, int n, float *y, int ldy)
{
    if (n <= 1)
        qmv_launch<TYPE, 1>(st, w, x, ldx, n, y, ldy);
    else if (n <= 4)
        qmv_launch<TYPE, 4>(st, w, x, ldx, n, y, ldy);
    else
        qmv_launch<TYPE, 8>(st, w, x, ldx, n, y, ldy);
}

void cu_qmv(cudaStream_t st, const cu_weight &w, const float *x, int ldx, int n, float *y, int ldy)
{
#define GO(T) qmv_rows_for<T>(st, w, x, ldx, n, y, ldy)
    BY_TYPE(w.type, GO)
#undef GO
}

void cu_dequant_bf16(cudaStream_t st, const cu_weight &w, int row0, int n, unsigned short *out)
{
    const unsigned char *src = w.data + (size_t)row0 * w.row_bytes;
    dim3 grid((unsigned)(((size_t)n * (w.cols / 8) + 255) / 256));
#define GO(T) LAUNCH((dequant_bf16<T>), grid, dim3(256), 0, st, src, w.row_bytes, n, w.cols, out)
    BY_TYPE(w.type, GO)
#undef GO
}
