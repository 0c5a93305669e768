// fakeblas.cpp - the part of cuBLAS that the backend uses, with the real prototypes, in plain loops.
//
// Written from the documentation of cublasGemmEx; what the backend never asks for stops the test, so that a
// new use has to be thought about here too.
#include "tests/cuda/hostshim.h"

#include <cublas_v2.h>

#include <vector>

struct cublasContext {
    cudaStream_t stream;
    void *workspace;
};

namespace
{

float bf16_at(const void *p, size_t i)
{
    return __uint_as_float((unsigned)static_cast<const uint16_t *>(p)[i] << 16);
}

// C [n][m] (column-major m x n, leading dimension ldc) = A^T B: A is k x m, B is k x n, both column-major, so row i
// of A^T and column j of B are runs of k numbers.
void gemm_tn(int m, int n, int k, float alpha, const void *a, int lda, const void *b, int ldb, float beta, float *c,
             int ldc)
{
    const int JB = 8; // columns of B at a time stay in the first-level cache
    std::vector<float> bf((size_t)n * k), af(k);
    for (int j = 0; j < n; j++)
        for (int p = 0; p < k; p++)
            bf[(size_t)j * k + p] = bf16_at(b, (size_t)j * ldb + p);
    for (int i = 0; i < m; i++) {
        for (int p = 0; p < k; p++)
            af[p] = bf16_at(a, (size_t)i * lda + p);
        for (int j0 = 0; j0 < n; j0 += JB)
            for (int j = j0; j < n && j < j0 + JB; j++) {
                float lane[16] = { 0 };
                const float *bj = &bf[(size_t)j * k];
                int p = 0;
                for (; p + 16 <= k; p += 16)
                    for (int l = 0; l < 16; l++)
                        lane[l] += af[p + l] * bj[p + l];
                float sum = 0;
                for (; p < k; p++)
                    sum += af[p] * bj[p];
                for (int l = 0; l < 16; l++)
                    sum += lane[l];
                float *out = &c[(size_t)j * ldc + i];
                *out = alpha * sum + (beta == 0.0f ? 0.0f : beta * *out);
            }
    }
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *h)
{
    *h = new cublasContext();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t h)
{
    delete h;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t st)
{
    h->stream = st;
    h->workspace = nullptr; // as documented: setting the stream resets the workspace
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *p, size_t n)
{
    if (!shim::device_range(p, n) || (uintptr_t)p % 64)
        shim::die("cublasSetWorkspace: not device memory");
    h->workspace = p;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType at, int lda, const void *b, cudaDataType bt,
                            int ldb, const void *beta, void *c, cudaDataType ct, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algo)
{
    if (ta != CUBLAS_OP_T || tb != CUBLAS_OP_N || at != CUDA_R_16BF || bt != CUDA_R_16BF || ct != CUDA_R_32F ||
        compute != CUBLAS_COMPUTE_32F || algo != CUBLAS_GEMM_DEFAULT)
        shim::die("cublasGemmEx: a kind that is not modelled");
    if (m < 1 || n < 1 || k < 1 || lda < k || ldb < k || ldc < m || !h->workspace)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!shim::device_range(a, ((size_t)(m - 1) * lda + k) * 2) ||
        !shim::device_range(b, ((size_t)(n - 1) * ldb + k) * 2) ||
        !shim::device_range(c, ((size_t)(n - 1) * ldc + m) * 4))
        shim::die("cublasGemmEx %d x %d x %d: an operand is outside device memory", m, n, k);
    float al = *static_cast<const float *>(alpha), be = *static_cast<const float *>(beta);
    shim::enqueue(h->stream, [=] { gemm_tn(m, n, k, al, a, lda, b, ldb, be, static_cast<float *>(c), ldc); });
    return CUBLAS_STATUS_SUCCESS;
}

} // extern "C"
