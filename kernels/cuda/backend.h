// backend.h - the CUDA backend's inside, shared by the files of kernels/cuda.
//
// A backend drives one or more ranks (tensor parallel): devices that each hold a run of KV heads with their query
// heads, a run of MLP columns and a run of the vocabulary. One host thread, the engine's, puts work into every
// rank's stream; nothing waits but logits, collect, select and the reads.
//
// Prefill passes run at once, op by op. Decode ops are noted (step.cu) and run when the logits are asked for: the
// step's numbers go into a pinned block, and the whole step, from what that block's copy says of tables to the copy of the
// chosen tokens, is one CUDA graph, captured once per ladder step. sample launches it, collect waits: the engine works in
// between, and the block belongs to the device. The next step's ops may be noted there and then, in the other block.
#ifndef SKVD_KERNELS_CUDA_BACKEND_H
#define SKVD_KERNELS_CUDA_BACKEND_H

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <cublas_v2.h>

#include "kernels/cuda/kernels.h"

extern "C" {
#include "kernels/blocks.h"
#include "kernels/ops.h"
}

#define CU_GEMM_ROWS   256      // rows of every prefill product: one shape, so one algorithm, whatever the pass holds
#define CU_MAX_TP      8
#define CU_CHANGES     4096     // table changes that a decode step carries in its block
#define CU_CLEARS      1024     // pages that a decode step clears
#define CU_DECODE_WORK ((size_t)64 << 20) // bytes of split records at most, unless one row needs more
#define CU_BLAS_WORK   ((size_t)32 << 20)

// A CUDA, cuBLAS or NCCL call failed inside a step: the device's state is lost, nothing after it can be trusted. Thrown
// where it happens, caught at the border of the table of operations (backend.cu), which then does nothing any more but say
// why (ops.failed). Calls of open and kv_init report through *err instead.
struct cu_error {
    char msg[200];
};
[[noreturn]] void cu_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void cu_must(cudaError_t e, const char *what);
#define CU_MUST(call) cu_must((call), #call)

struct cu_layer {
    cu_weight wq, wk, wv, wo, gate, up, down;
    cu_weight wo_own;  // the columns of wo that this rank's product takes: all, but where ranks share a KV head
    float *attn_norm, *ffn_norm, *bq, *bk, *bv, *q_norm, *k_norm, *post_attn_norm, *post_ffn_norm;
};

// A pinned block, its copy on the device, and when the copy has been read.
struct cu_stage {
    unsigned char *host;
    size_t bytes;
    cudaEvent_t done;
};

// Where the parts of a decode step's block are; the same offsets on host and device.
struct cu_step_at {
    size_t token, lane, pos, row, smp, pen, slot, rule, pin, n_change, change, n_clear, clear, bytes;
    int pins;
};

struct cu_rank {
    int device, index, global; // index: in this process; global: among all ranks
    cudaStream_t st;
    cublasHandle_t blas;
    void *blas_work;
    std::vector<void *> owned;      // device memory, freed at close
    size_t weight_bytes, work_bytes;

    int kv0, n_kv, n_head;          // KV heads [kv0, kv0 + n_kv), their query heads
    int own0, n_own;                // query heads [own0, own0 + n_own) of those go into this rank's output projection
    int ffn0, n_ffn, vocab0, n_vocab; // runs of MLP columns and of the vocabulary
    int width;                      // (n_head + 2 n_kv) * head_dim

    cu_weight embed, output;
    float *out_norm, *inv_freq;
    std::vector<cu_layer> layer;
    int layer16;                    // whose weights are in the bf16 buffers, -1: none
    unsigned short *qkv16, *o16, *gu16, *down16;

    // one pass's scratch; R = max_rows rounded up to CU_GEMM_ROWS
    unsigned short *in16;  // [R][max(d_model, n_head * head_dim, n_ffn)]: the bf16 operand of the next product
    unsigned short *q16;   // [R][n_head * head_dim]
    float *in32;           // [R][d_model]: the f32 operand of decode products
    float *qkv, *y, *gu;   // [R][width], [R][d_model], [R][2 n_ffn]
    float *att32, *act32;  // [D][n_head * head_dim], [D][n_ffn]
    float *lse;            // [n_head][R]
    float *part_o, *part_ml, *logit;
    ring_view ring;
    unsigned char *meta;   // device side of a prefill pass's block
    std::vector<cu_stage> stage; // host sides, used in turn
    size_t next_stage, meta_bytes;
    float *logits;         // [ranks][rows][vocab_part]: this rank's, and after the gather everybody's
    int32_t *chosen;       // [D]; rank 0: the tokens that were chosen
    int32_t *victims, *victims_host;
    long long *sum;        // [R][d_model]: with tp_exact what ranks add, and then all products are exact.cuh's; else NULL

    kv_view kv;
    std::vector<float *> score_row; // [lanes], device; grown by score_begin
    std::vector<int32_t> score_stride;
    float **score_row_d;
    int32_t *score_stride_d;
    unsigned char *sel_work;
    size_t sel_bytes;

    cu_step_at at;                  // of step_h and step_d
    unsigned char *step_d;
    unsigned char *step_h[2];       // one is noted into while the device has the other
    std::map<std::tuple<int, int, const float *>, cudaGraphExec_t> graphs; // rows, splits, states
    void *comm;                     // ncclComm_t; NULL with one rank
};

struct cu_state {
    uint32_t id; // from 1
    int n_row;
    float *x[CU_MAX_TP]; // one copy a rank
};

enum cu_op_kind { CU_EMBED, CU_ATTN_IN, CU_ATTN_DECODE, CU_OUT_MLP };

struct cu_op {
    cu_op_kind kind;
    int layer;
};

struct cuda {
    ops_dims d;
    ops_config cfg;
    int vocab_part;          // tokens of the vocabulary that a rank has, the last may have fewer
    float *logits_host;      // pinned, [D][n_vocab]
    int32_t *chosen_host;    // pinned, [D]
    int g, R, D;             // query heads per KV head; rows of scratch; rows of a decode step at most
    std::vector<cu_rank> rank; // of this process
    int world;                 // ranks in all
    int out_part, ffn_part;    // with tp_exact: columns of a part of the two products that are summed over ranks; else 0
    struct cu_nodes *nodes;    // where they are several processes
    uint32_t last_state;
    size_t others_room;        // for the pool, in the other processes
    std::vector<cu_state> states;
    kern_page_layout page;

    ops_kv kv;               // host mirrors, owned here
    std::vector<uint32_t> s_table;  // what the device has, or will have once what is noted has run
    std::vector<int32_t> s_len, s_cap, s_victim;
    std::vector<kv_change> change[CU_MAX_TP];
    std::vector<uint32_t> clear;

    // the decode step being noted
    std::vector<cu_op> noted;
    int block;                // where
    bool ahead;               // without its tokens: it may be dropped
    std::vector<std::pair<uint32_t *, uint32_t>> undo; // then: numbers of s_table, ... and what they were
    int step_rows, step_most; // rows; slots of the longest head
    const float *step_x;
    std::map<const kern_range *, int> step_pins;
    int step_n_pin;
    struct {                  // launched, to be collected; n == 0: nothing is
        int n;
        int rows, block;      // of a decode step; rows == 0: rows of a prompt's hidden states
        ops_sample *s;
        float *logits;
    } out;
    int64_t n_graph, n_plain; // decode steps that a graph ran, and that were launched kernel by kernel
    char failed[256];         // why nothing can be computed any more; empty while all is well
};

// The device has, or will have once what is noted has run, this number: an element of s_table, s_len, ...
template <class T> static inline void cu_kv_has(cuda *c, T &then, T now)
{
    static_assert(sizeof(T) == 4, "signed or not");
    if (c->ahead)
        c->undo.push_back({ reinterpret_cast<uint32_t *>(&then), (uint32_t)then });
    then = now;
}

static inline size_t cu_kv_at(const cuda *c, int lane, int layer, int head)
{
    return ((size_t)lane * c->d.n_layer + layer) * c->d.n_kv + head;
}

void cu_use(const cu_rank &r);
// Wait for all that a rank's stream has been given, or for an event in it. Throws when that can't come any more.
void cu_wait(cuda *c, cu_rank &r);
void cu_wait_event(cuda *c, cudaEvent_t e);
// The part of the model that rank `global` has, into r.
void cu_rank_cut(const cuda *c, int global, cu_rank *r);
// Device memory of the rank, freed at close; counted as weights or workspace. NULL with *err.
void *cu_alloc(cu_rank &r, size_t bytes, bool weights, skv_error *err);

// weights.cu
int cu_weights_load(cuda *c, const ops_model_src *src, skv_error *err);
// The layer's weights as bf16 in the rank's buffers (kept until another layer is asked for).
void cu_layer16(cuda *c, cu_rank &r, int layer);

// kv_host.cu
ops_kv *cu_kv_init(void *be, uint32_t n_pages, skv_error *err);
void cu_kv_fini(cuda *c);
void cu_page_clear(void *be, const uint32_t *pages, int n);
void cu_kv_read(void *be, int lane, int layer, int head, int32_t *pos, float *score);
// Note what the host changed of (lane, layer) since the device last heard.
void cu_kv_diff(cuda *c, int lane, int layer);
// Send what is noted, and clear pages.
void cu_kv_push(cuda *c);

// pass.cu: prefill, and what both share
int cu_pass_init(cuda *c, skv_error *err);
// The next block of the ring, free to be written; then its first `bytes` to r.meta.
cu_stage &cu_stage_take(cuda *c, cu_rank &r);
void cu_stage_send(cu_rank &r, cu_stage &s, size_t bytes);
// Room of at least `bytes` in r.sel_work.
void cu_sel_room(cuda *c, cu_rank &r, size_t bytes);
void cu_pass_fini(cuda *c);
float *cu_state_x(cuda *c, const cu_rank &r, const float *x);
void cu_score_begin(void *be, int lane, int n_slot);
void cu_score_read(void *be, int lane, int n_slot, float *out);
void cu_select_op(void *be, int lane, int layer, const kern_rule *rule, int n_query, float *kept_mass);
void cu_attn_prefill(void *be, int layer, const ops_pass *pass);
void cu_pass_embed(cuda *c, const ops_pass *pass, float *x);
void cu_pass_attn_in(cuda *c, int layer, const ops_pass *pass, const float *x);
void cu_pass_out_mlp(cuda *c, int layer, int n_row, float *x);
rope_params cu_rope(const cuda *c, const cu_rank &r, int layer);
// y [rows][outs] f32 = a [rows][lda] w^T, w [outs][ldw], both bf16, over `cols` columns.
void cu_gemm(cu_rank &r, const unsigned short *w, int ldw, int outs, int cols, const unsigned short *a, int lda, int rows,
             float *y);
// The same, and cu_qmv, for a product that is to be summed over the ranks, d_model wide, in parts of `part` columns with
// tp_exact: into r.sum then, else into r.y.
void cu_gemm_share(const cuda *c, cu_rank &r, const unsigned short *w, int ldw, int cols, int part, const unsigned short *a,
                   int lda, int rows);
void cu_qmv_share(const cuda *c, cu_rank &r, const cu_weight &w, int part, const float *x, int ldx, int n);
// The ranks' y [n], or their sums, summed over the ranks: everybody's y.
void cu_reduce(cuda *c, size_t n);
// Everybody's part of the logits of `rows` rows to everybody.
void cu_gather(cuda *c, int rows);

// step.cu: decode
int cu_step_init(cuda *c, skv_error *err);
void cu_step_fini(cuda *c);
void cu_step_embed(cuda *c, const ops_pass *pass, float *x);
void cu_step_attn_in(cuda *c, int layer, const ops_pass *pass, const float *x, const int32_t *slot);
void cu_step_attn_decode(cuda *c, int layer, const ops_pass *pass, const kern_rule *rule);
void cu_step_out_mlp(cuda *c, int layer, const ops_pass *pass, float *x);
// Destroy graphs that hold the address of a state.
void cu_graphs_forget(cu_rank &r, const float *x);
// Run what is noted without logits, once what is launched is collected. Every other operation calls it first.
void cu_step_flush(cuda *c);
void cu_logits(void *be, const float *x, const int32_t *row, int n, float *logits);
void cu_choose(void *be, const float *x, const int32_t *row, int n, ops_sample *s, float *logits);
// Wait for what cu_choose launched and fill its tokens and logits.
void cu_collect(void *be);
void cu_collect_op(void *be); // and tell the others
// The tokens of the step that was noted ahead; NULL: it is dropped.
void cu_ahead(void *be, const int32_t *token);

// nccl.cu
// The part of cu_reduce between the ranks: y, or sums, in place.
void cu_all_reduce(cuda *c, size_t n);
int cu_comm_init(cuda *c, skv_error *err);
void cu_comm_fini(cuda *c);
// Throws when a communicator has failed.
void cu_comm_check(cuda *c);

// backend.cu: operations that a follower calls too
float *cu_state_new(void *be, int n_row, skv_error *err);
void cu_state_free(void *be, float *state);
void cu_state_thin(void *be, float *state, const int32_t *row, int n);
void cu_embed_op(void *be, const ops_pass *pass, float *x);
void cu_attn_in_op(void *be, int layer, const ops_pass *pass, const float *x, const int32_t *slot);
void cu_attn_prefill_op(void *be, int layer, const ops_pass *pass);
void cu_out_mlp_op(void *be, int layer, const ops_pass *pass, float *x);

// follow.cu: a rank in a process of its own does what the leader's engine asks for. cu_tell_*: nothing unless this process
// leads others. Each is called before the operation itself, so that all ranks come to the same sums.
void cu_tell_kv_init(cuda *c, uint32_t n_pages);
void cu_tell_clear(cuda *c, const uint32_t *pages, int n);
void cu_tell_kv(cuda *c, int lane, int layer);
void cu_tell_state(cuda *c, uint32_t id, int n_row); // 0 rows: freed
void cu_tell_thin(cuda *c, const float *state, const int32_t *row, int n);
void cu_tell_embed(cuda *c, const ops_pass *pass, const float *x);
void cu_tell_attn_in(cuda *c, int layer, const ops_pass *pass, const float *x, const int32_t *slot);
void cu_tell_attn_prefill(cuda *c, int layer, const ops_pass *pass);
void cu_tell_attn_decode(cuda *c, int layer, const ops_pass *pass, const kern_rule *rule);
void cu_tell_out_mlp(cuda *c, int layer, const ops_pass *pass, const float *x);
void cu_tell_score(cuda *c, int lane, int n_slot);
void cu_tell_select(cuda *c, int lane, int layer, const kern_rule *rule, int n_query);
void cu_tell_choose(cuda *c, const float *x, const int32_t *row, int n);
void cu_tell_collect(cuda *c);
void cu_tell_ahead(cuda *c, const int32_t *token);
void cu_tell_flush(cuda *c);
void cu_tell_end(cuda *c);
// After a selection: what each process's heads kept goes to the leader.
void cu_kept_exchange(cuda *c, int lane, int layer, float *kept_mass);
// Positions and scores of a head that another process has; false when it is this one's.
bool cu_kv_read_far(cuda *c, int lane, int layer, int head, int32_t *pos, float *score);
int cu_follow(void *be, skv_error *err);

#endif
