// kernels.h - launchers of the CUDA kernels: plain calls that pick the template and put it into a stream.
//
// All pointers are device memory; nothing here synchronises or fails on its own (launch errors are sticky and
// collected by the backend with cudaGetLastError). Shapes are row-major.
#ifndef SKVD_KERNELS_CUDA_KERNELS_H
#define SKVD_KERNELS_CUDA_KERNELS_H

#include "kernels/cuda/params.h"

// A weight in its GGUF blocks on the device.
struct cu_weight {
    const unsigned char *data;
    int type; // enum kern_gguf_type
    int rows, cols;
    size_t row_bytes;
};

// True when kernels for it were compiled.
bool cu_head_dim_ok(int head_dim);
bool cu_type_ok(int type);

// Allow the large dynamic shared memory that some kernels need. Once per device.
cudaError_t cu_prefill_setup(void);
cudaError_t cu_decode_setup(void);

// linear.cu
void cu_embed(cudaStream_t st, const cu_weight &w, const int32_t *token, int n, float scale, float *x);
// y [n][ldy] f32 = x [n][ldx] f32 (its first `cols` columns) times the weights, kept quantised.
void cu_qmv(cudaStream_t st, const cu_weight &w, const float *x, int ldx, int n, float *y, int ldy);
// out [rows][cols] bf16, rows [row0, row0 + n) of the weight.
void cu_dequant_bf16(cudaStream_t st, const cu_weight &w, int row0, int n, unsigned short *out);

// exact.cu: products whose bits don't depend on how many ranks share them; see exact.cuh. Parts are `part` columns wide, at
// most EXACT_PARTS; sums of them are integers, which exact_out turns into numbers.
#define EXACT_PARTS 256
void cu_qmv_exact(cudaStream_t st, const cu_weight &w, int part, const float *x, int ldx, int n, long long *y, int ldy);
// y [rows][outs] = a [rows][lda] w^T, w [outs][ldw], both bf16, over `cols` columns.
void cu_exact_gemm(cudaStream_t st, const unsigned short *w, int ldw, int outs, int cols, const unsigned short *a, int lda,
                   int rows, float *y);
void cu_exact_gemm_parts(cudaStream_t st, const unsigned short *w, int ldw, int outs, int cols, int part,
                         const unsigned short *a, int lda, int rows, long long *y);
void cu_exact_out(cudaStream_t st, const long long *sum, size_t n, float *y);

// norm.cu; see norm.cuh for what each optional argument does
void cu_add_norm(cudaStream_t st, float *x, const float *y, const float *y_norm, const float *w, float eps, int d,
                 int n, const int32_t *row, float *out, unsigned short *out16);
void cu_gated_act(cudaStream_t st, const float *gate_up, int n_row, int n, bool gelu, float *out,
                  unsigned short *out16);

// rope.cu
void cu_rope_store(cudaStream_t st, int dtype, const rope_params &p, const kv_view &kv, const pass_view &pass,
                   int layer, int n_row, float *qkv, unsigned short *q16);

// prefill.cu: most_rows, most_slots: the largest segment's; n_scored: the largest number of scored rows (0: no pass 2)
void cu_prefill(cudaStream_t st, int dtype, int head_dim, const fa_params &p, int n_seg, int most_rows);
void cu_score(cudaStream_t st, int dtype, int head_dim, const score_params &p, int n_seg, int most_slots);

// decode.cu
void cu_decode(cudaStream_t st, int dtype, int head_dim, const dec_params &p, int n_row);

// sample.cu; one block a row
void cu_sample(cudaStream_t st, const smp_params &p, int n_row);

// select.cu: begin chooses by score; rest the part that goes by a wider smoothing (cu_select_wide) or, with by_value, by
// norms computed in between (values -> product with Wo -> norm, per head); end gathers. n_page: pages of the longest head
// before the choice.
void cu_select_begin(cudaStream_t st, const sel_params &p);
void cu_select_values(cudaStream_t st, const sel_params &p, int dtype, int head, int slot0, int n, unsigned short *out);
void cu_select_norm(cudaStream_t st, const float *c, int n, int d_model, float weight, float *norm);
bool cu_select_wide(const sel_params &p);
void cu_select_rest(cudaStream_t st, const sel_params &p);
void cu_select_end(cudaStream_t st, const sel_params &p, int dtype, int n_page);

// kv_launch.cu; counts are read on the device
void cu_kv_apply(cudaStream_t st, const kv_view &kv, const kv_change *change, const int32_t *n, int most);
void cu_kv_clear(cudaStream_t st, const kv_view &kv, const uint32_t *page, const int32_t *n, int most);
void cu_kv_victims(cudaStream_t st, const kv_view &kv, const int32_t *lane, int n_row, int32_t *out);
void cu_kv_slots(cudaStream_t st, const kv_view &kv, size_t idx, int n, int32_t *pos, float *score);

#endif
