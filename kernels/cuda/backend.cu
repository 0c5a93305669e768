// backend.cu - the CUDA backend: opening, closing, states, and its table of operations.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/backend.h"

#ifdef CUDA_HOST_SHIM
#define BACKEND_NAME "cuda-shim" // tests only: kernels run on the host
#else
#define BACKEND_NAME "cuda"
#endif

void cu_must(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "skvd: cuda: %s: %s (%s)\n", what, cudaGetErrorString(e), cudaGetErrorName(e));
    abort();
}

void cu_use(const cu_rank &r)
{
    CU_MUST(cudaSetDevice(r.device));
}

void *cu_alloc(cu_rank &r, size_t bytes, bool weights, skv_error *err)
{
    void *p = nullptr;
    cudaError_t e = cudaMalloc(&p, bytes ? bytes : 1);
    if (e != cudaSuccess) {
        cudaGetLastError();
        skv_fail(err, SKV_NO_MEMORY, "device %d has no %zu MiB more: %s", r.device, (bytes >> 20) + 1,
                 cudaGetErrorString(e));
        return nullptr;
    }
    r.owned.push_back(p);
    (weights ? r.weight_bytes : r.work_bytes) += bytes;
    return p;
}

static int check(const ops_config *cfg, const ops_dims &d, skv_error *err)
{
    if (d.n_layer < 1 || d.d_model < 1 || d.n_kv < 1 || d.n_head < d.n_kv || d.n_head % d.n_kv || d.n_ffn < 1 ||
        d.n_vocab < 1 || d.rot_dim < 0 || d.rot_dim % 2 || d.rot_dim > d.head_dim || d.max_context < 1)
        return skv_fail(err, SKV_BAD_MODEL, "the model's dimensions don't fit together");
    if (!cu_head_dim_ok(d.head_dim))
        return skv_fail(err, SKV_BAD_MODEL, "the CUDA backend has no attention kernels for heads of %d", d.head_dim);
    if (d.n_head / d.n_kv > 8)
        return skv_fail(err, SKV_BAD_MODEL, "the CUDA backend takes at most 8 query heads per KV head, this model has %d",
                        d.n_head / d.n_kv);
    if (d.n_kv > 256 || d.max_context > 1 << 24)
        return skv_fail(err, SKV_BAD_MODEL, "selection keys hold 256 KV heads and 2^24 positions");
    if (cfg->compute_f32 || cfg->kv_dtype == KERN_KV_F32)
        return skv_fail(err, SKV_BAD_CONFIG, "the CUDA backend keeps its cache in bf16 or int8; exact f32 is the CPU's");
    if (cfg->max_rows < 1 || cfg->max_lanes < 1 || cfg->max_pages < 1)
        return skv_fail(err, SKV_BAD_CONFIG, "rows, lanes and pages must be at least 1");
    return 0;
}

// Ranks from the environment: SKVD_TP=N; 1 when it is not set.
static int ranks_asked(const ops_dims &d, skv_error *err)
{
    const char *s = getenv("SKVD_TP");
    int n = s ? atoi(s) : 1, devices = 0;
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || devices < 1) {
        skv_fail(err, SKV_BAD_CONFIG, "no CUDA device: %s", cudaGetErrorString(e));
        return -1;
    }
    if (n < 1 || n > CU_MAX_TP || n > devices || n > d.n_kv) {
        skv_fail(err, SKV_BAD_CONFIG, "tensor parallel over %d: at most %d devices here, %d KV heads, %d in all", n,
                 devices, d.n_kv, CU_MAX_TP);
        return -1;
    }
    return n;
}

// The rank's runs of heads, columns and vocabulary. Columns are cut at 256 so that every block format fits.
static void rank_cut(const ops_dims &d, int g, int n, cu_rank *r)
{
    int unit = d.n_ffn % 256 == 0 && d.n_ffn / 256 >= n ? 256 : 32, units = d.n_ffn / unit, i = r->index;
    r->kv0 = d.n_kv * i / n;
    r->n_kv = d.n_kv * (i + 1) / n - r->kv0;
    r->n_head = r->n_kv * g;
    r->ffn0 = units * i / n * unit;
    r->n_ffn = (i + 1 == n ? d.n_ffn : units * (i + 1) / n * unit) - r->ffn0;
    r->vocab0 = (int)((int64_t)d.n_vocab * i / n);
    r->n_vocab = (int)((int64_t)d.n_vocab * (i + 1) / n) - r->vocab0;
    r->width = (r->n_head + 2 * r->n_kv) * d.head_dim;
}

static int rank_open(cuda *c, cu_rank &r, int n, skv_error *err)
{
    int major = 0;
    r.device = r.index;
    rank_cut(c->d, c->g, n, &r);
    if (cudaSetDevice(r.device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, r.device) != cudaSuccess)
        return skv_fail(err, SKV_BAD_CONFIG, "CUDA device %d can't be used", r.device);
    if (major < 8)
        return skv_fail(err, SKV_BAD_CONFIG, "CUDA device %d has compute capability %d.x, the kernels need 8.0", r.device,
                        major);
    if (cudaStreamCreateWithFlags(&r.st, cudaStreamNonBlocking) != cudaSuccess)
        return skv_fail(err, SKV_INTERNAL, "no stream on CUDA device %d", r.device);
    if (cublasCreate(&r.blas) != CUBLAS_STATUS_SUCCESS || cublasSetStream(r.blas, r.st) != CUBLAS_STATUS_SUCCESS)
        return skv_fail(err, SKV_INTERNAL, "cuBLAS does not start on device %d", r.device);
    // A workspace of ours: cuBLAS then allocates nothing inside a step and always has the same to choose by.
    if (!(r.blas_work = cu_alloc(r, CU_BLAS_WORK, false, err)))
        return -1;
    if (cublasSetWorkspace(r.blas, r.blas_work, CU_BLAS_WORK) != CUBLAS_STATUS_SUCCESS)
        return skv_fail(err, SKV_INTERNAL, "cuBLAS does not take its workspace on device %d", r.device);
    if (cu_prefill_setup() != cudaSuccess || cu_decode_setup() != cudaSuccess)
        return skv_fail(err, SKV_INTERNAL, "the kernels can't be loaded on CUDA device %d", r.device);
    return 0;
}

static void cu_close(void *be)
{
    cuda *c = static_cast<cuda *>(be);
    if (!c)
        return;
    for (cu_rank &r : c->rank)
        if (r.st) {
            cu_use(r);
            cudaStreamSynchronize(r.st);
        }
    cu_step_fini(c);
    cu_pass_fini(c);
    cu_kv_fini(c);
    cu_comm_fini(c);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        for (const cu_state &s : c->states)
            cudaFree(s.x[r.index]);
        for (void *p : r.owned)
            cudaFree(p);
        if (r.blas)
            cublasDestroy(r.blas);
        if (r.st)
            cudaStreamDestroy(r.st);
    }
    delete c;
}

static void *cu_open(const ops_config *cfg, const ops_model_src *src, skv_error *err)
{
    if (check(cfg, src->dims, err))
        return nullptr;
    int n = ranks_asked(src->dims, err);
    if (n < 0)
        return nullptr;
    cuda *c = new cuda();
    c->d = src->dims;
    c->cfg = *cfg;
    c->g = c->d.n_head / c->d.n_kv;
    c->R = (cfg->max_rows + CU_GEMM_ROWS - 1) / CU_GEMM_ROWS * CU_GEMM_ROWS;
    c->D = std::min(cfg->max_lanes, c->R);
    c->rank.resize((size_t)n);
    for (int i = 0; i < n; i++)
        c->rank[i].index = i;
    bool ok = true;
    for (cu_rank &r : c->rank)
        ok = ok && !rank_open(c, r, n, err);
    if (!ok || cu_comm_init(c, err) || cu_weights_load(c, src, err) || cu_pass_init(c, err) || cu_step_init(c, err)) {
        cu_close(c);
        return nullptr;
    }
    return c;
}

static void cu_info(void *be, size_t *weight_bytes, size_t *work_bytes, char *text, size_t text_size)
{
    const cuda *c = static_cast<const cuda *>(be);
    *weight_bytes = *work_bytes = 0;
    for (const cu_rank &r : c->rank) {
        *weight_bytes += r.weight_bytes;
        *work_bytes += r.work_bytes;
    }
    if (text_size)
        snprintf(text, text_size, "%s, %d device%s, weights as in the file %.1f MiB, workspace %.1f MiB", BACKEND_NAME,
                 (int)c->rank.size(), c->rank.size() > 1 ? "s" : "", (double)*weight_bytes / 1048576,
                 (double)*work_bytes / 1048576);
}

static float *cu_state_new(void *be, int n_row, skv_error *err)
{
    cuda *c = static_cast<cuda *>(be);
    cu_state s = { n_row, {} };
    size_t bytes = (size_t)n_row * c->d.d_model * sizeof(float);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cudaError_t e = cudaMalloc(reinterpret_cast<void **>(&s.x[r.index]), bytes);
        if (e == cudaSuccess)
            continue;
        cudaGetLastError();
        for (int i = 0; i < r.index; i++)
            cudaFree(s.x[i]);
        skv_fail(err, SKV_NO_MEMORY, "device %d has no %zu MiB for hidden states of %d tokens", r.device,
                 (bytes >> 20) + 1, n_row);
        return nullptr;
    }
    c->states.push_back(s);
    return s.x[0];
}

/* Rows only move towards the front, in ascending order, so the copies on one stream don't overtake what they read. */
static void cu_state_thin(void *be, float *state, const int32_t *row, int n)
{
    cuda *c = static_cast<cuda *>(be);
    size_t d = (size_t)c->d.d_model;
    for (cu_rank &r : c->rank) {
        float *x = cu_state_x(c, r, state);
        cu_use(r);
        for (int i = 0, run; i < n; i += run) {
            for (run = 1; i + run < n && row[i + run] == row[i] + run && run < row[i] - i;)
                run++;
            if (row[i] != i)
                CU_MUST(cudaMemcpyAsync(x + i * d, x + row[i] * d, run * d * sizeof *x, cudaMemcpyDeviceToDevice, r.st));
        }
    }
}

static void cu_state_free(void *be, float *state)
{
    cuda *c = static_cast<cuda *>(be);
    if (!state)
        return;
    cu_step_flush(c);
    for (size_t i = 0; i < c->states.size(); i++) {
        if (c->states[i].x[0] != state)
            continue;
        for (cu_rank &r : c->rank) {
            cu_use(r);
            CU_MUST(cudaStreamSynchronize(r.st));
            cu_graphs_forget(r, state);
            CU_MUST(cudaFree(c->states[i].x[r.index]));
        }
        c->states.erase(c->states.begin() + (long)i);
        return;
    }
}

// One row a segment may be a decode step: its operations are noted. What follows tells.
static void cu_embed_op(void *be, const ops_pass *pass, float *x)
{
    cuda *c = static_cast<cuda *>(be);
    cu_step_flush(c);
    if (pass->n_seg == pass->n_row && pass->n_row <= c->D)
        cu_step_embed(c, pass, x);
    else
        cu_pass_embed(c, pass, x);
}

static void cu_attn_in_op(void *be, int layer, const ops_pass *pass, const float *x, const int32_t *slot)
{
    cuda *c = static_cast<cuda *>(be);
    if (slot) {
        cu_step_attn_in(c, layer, pass, x, slot);
        return;
    }
    cu_step_flush(c);
    cu_pass_attn_in(c, layer, pass, x);
}

static void cu_attn_prefill_op(void *be, int layer, const ops_pass *pass)
{
    cu_step_flush(static_cast<cuda *>(be));
    cu_attn_prefill(be, layer, pass);
}

static void cu_attn_decode_op(void *be, int layer, const ops_pass *pass, const kern_rule *rule)
{
    cu_step_attn_decode(static_cast<cuda *>(be), layer, pass, rule);
}

static void cu_out_mlp_op(void *be, int layer, const ops_pass *pass, float *x)
{
    cuda *c = static_cast<cuda *>(be);
    if (!c->noted.empty())
        cu_step_out_mlp(c, layer, pass, x);
    else
        cu_pass_out_mlp(c, layer, pass->n_row, x);
}

// Sampling: rows are few and short, the engine's thread does them.
static void cu_host_for(void *, int n, void (*fn)(void *arg, int i), void *arg)
{
    for (int i = 0; i < n; i++)
        fn(arg, i);
}

// What is free, less what selection, scores and prompts' hidden states take as they are needed.
static size_t cu_pool_room(void *be)
{
    cuda *c = static_cast<cuda *>(be);
    size_t room = SIZE_MAX;
    for (cu_rank &r : c->rank) {
        size_t free_bytes = 0, total = 0;
        cu_use(r);
        CU_MUST(cudaMemGetInfo(&free_bytes, &total));
        room = std::min(room, free_bytes / 10 * 9);
    }
    return room;
}

extern "C" bool ops_cuda_usable(char *why, size_t size)
{
    int n = 0, major = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaErrorInsufficientDriver)
        snprintf(why, size, "no CUDA driver, or one too old");
    else if (e != cudaSuccess || n < 1)
        snprintf(why, size, "no CUDA device");
    else if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major < 8)
        snprintf(why, size, "the CUDA device is older than compute capability 8.0");
    else
        return true;
    return false;
}

extern "C" const ops ops_cuda = {
    BACKEND_NAME, cu_open,     cu_close,          cu_info,           cu_kv_init,    cu_page_clear,  cu_kv_read,
    cu_state_new, cu_state_free, cu_state_thin, cu_embed_op,     cu_attn_in_op,     cu_attn_prefill_op, cu_attn_decode_op,
    cu_out_mlp_op, cu_score_begin, cu_select_op,  cu_score_read,     cu_logits,     cu_host_for,
    nullptr,      nullptr,     cu_pool_room,
};
