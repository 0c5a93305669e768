// kv_launch.cu - launchers of kv.cuh.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/kv.cuh"

void cu_kv_apply(cudaStream_t st, const kv_view &kv, const kv_change *change, const int32_t *n, int most)
{
    LAUNCH(kv_apply, dim3((most + 127) / 128), dim3(128), 0, st, kv, change, n);
}

void cu_kv_clear(cudaStream_t st, const kv_view &kv, const uint32_t *page, const int32_t *n, int most)
{
    LAUNCH(kv_clear, dim3(most), dim3(128), 0, st, kv, page, n);
}

void cu_kv_victims(cudaStream_t st, const kv_view &kv, const int32_t *lane, int n_row, int32_t *out)
{
    dim3 grid((unsigned)(((size_t)n_row * kv.n_layer * kv.n_kv + 127) / 128));
    LAUNCH(kv_victims, grid, dim3(128), 0, st, kv, lane, n_row, out);
}

void cu_kv_slots(cudaStream_t st, const kv_view &kv, size_t idx, int n, int32_t *pos, float *score)
{
    LAUNCH(kv_slots, dim3((n + 127) / 128), dim3(128), 0, st, kv, idx, n, pos, score);
}
