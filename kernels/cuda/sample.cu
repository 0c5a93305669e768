// sample.cu - launcher of sample.cuh.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/sample.cuh"

void cu_sample(cudaStream_t st, const smp_params &p, int n_row)
{
    LAUNCH(sample_rows, dim3(n_row), dim3(SMP_THREADS), sizeof(smp_smem), st, p);
}
