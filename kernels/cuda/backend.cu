// backend.cu - the CUDA backend: opening, closing, states, and its table of operations.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include <sched.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/nodes.h"

#ifdef CUDA_HOST_SHIM
#define BACKEND_NAME "cuda-shim" // tests only: kernels run on the host
#else
#define BACKEND_NAME "cuda"
#endif

void cu_must(cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        cu_fail("%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

void cu_fail(const char *fmt, ...)
{
    cu_error e;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e.msg, sizeof e.msg, fmt, ap);
    va_end(ap);
    throw e;
}

void cu_use(const cu_rank &r)
{
    CU_MUST(cudaSetDevice(r.device));
}

// Now and then: is everybody there, is NCCL well?
static void check_others(cuda *c, int round)
{
    if (round % 512 == 511) {
        cu_nodes_check(c->nodes);
        cu_comm_check(c);
    }
    sched_yield();
}

void cu_wait(cuda *c, cu_rank &r)
{
    if (!c->nodes) {
        CU_MUST(cudaStreamSynchronize(r.st));
        return;
    }
    // A sum that waits for a rank that is gone never ends: look up now and then.
    cudaError_t e;
    for (int i = 0; (e = cudaStreamQuery(r.st)) == cudaErrorNotReady; i++)
        check_others(c, i);
    cu_must(e, "cudaStreamQuery");
}

void cu_wait_event(cuda *c, cudaEvent_t ev)
{
    if (!c->nodes) {
        CU_MUST(cudaEventSynchronize(ev));
        return;
    }
    cudaError_t e;
    for (int i = 0; (e = cudaEventQuery(ev)) == cudaErrorNotReady; i++)
        check_others(c, i);
    cu_must(e, "cudaEventQuery");
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

// Ranks in all, -1 with *err. One process has them all, or each has one.
static int ranks_asked(const ops_config *cfg, const ops_dims &d, skv_error *err)
{
    int n = std::max(cfg->tp, 1), devices = 0, need, rank, world, local;
    if (cu_nodes_env(&rank, &world, &local)) {
        if (n > 1 && n != world)
            return skv_fail(err, SKV_BAD_CONFIG, "tp is %d, but the environment says that there are %d processes", n, world);
        n = world;
        need = local + 1;
    } else {
        need = n;
    }
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || devices < 1) {
        skv_fail(err, SKV_BAD_CONFIG, "no CUDA device: %s", cudaGetErrorString(e));
        return -1;
    }
    if (n < 1 || n > CU_MAX_TP || need > devices || n > d.n_head || n > d.n_ffn / 32 || d.n_vocab < n * n) {
        skv_fail(err, SKV_BAD_CONFIG, "tensor parallel over %d: %d devices here, %d query heads, %d in all at most", n,
                 devices, d.n_head, CU_MAX_TP);
        return -1;
    }
    return n;
}

// With more ranks than KV heads several ranks hold the same head: its pages, scores and choices, bit for bit the same, and
// the attention of its whole group, since the score is the group's mean. They share out the group's output projection.
static void rank_heads(const ops_dims &d, int g, int n, cu_rank *r)
{
    int i = r->global;
    if (n <= d.n_kv) {
        r->kv0 = d.n_kv * i / n;
        r->n_kv = d.n_kv * (i + 1) / n - r->kv0;
        r->own0 = 0;
        r->n_own = r->n_kv * g;
    } else {
        int head = d.n_kv * i / n, first = (head * n + d.n_kv - 1) / d.n_kv, end = ((head + 1) * n + d.n_kv - 1) / d.n_kv;
        int sharing = end - first, at = i - first;
        r->kv0 = head;
        r->n_kv = 1;
        r->own0 = g * at / sharing;
        r->n_own = g * (at + 1) / sharing - r->own0;
    }
    r->n_head = r->n_kv * g;
}

// The rank's runs of heads, columns and vocabulary. Columns are cut at 256 so that every block format fits, or at parts.
void cu_rank_cut(const cuda *c, int global, cu_rank *r)
{
    const ops_dims &d = c->d;
    int n = c->world, unit = d.n_ffn % 256 == 0 && d.n_ffn / 256 >= n ? 256 : 32, i = global, part = c->vocab_part;
    unit = c->ffn_part ? c->ffn_part : unit;
    int units = d.n_ffn / unit;
    r->global = global;
    rank_heads(d, c->g, n, r);
    r->ffn0 = units * i / n * unit;
    r->n_ffn = (i + 1 == n ? d.n_ffn : units * (i + 1) / n * unit) - r->ffn0;
    r->vocab0 = part * i;
    r->n_vocab = std::min(part, d.n_vocab - r->vocab0);
    r->width = (r->n_head + 2 * r->n_kv) * d.head_dim;
}

// The parts of the two products that are summed over ranks (tp_exact), which the model alone decides: of the output
// projection a head, or as many as are a multiple of 32; of down whole blocks of the file's format, and else as many columns as
// leave each of the most ranks four parts, so that ranks have about the same to do.
static int exact_parts(cuda *c, const ops_model_src *src, skv_error *err)
{
    const ops_dims &d = c->d;
    int heads = d.n_head * d.head_dim, part = 32;
    for (c->out_part = d.head_dim; c->out_part % 32;)
        c->out_part += d.head_dim;
    for (int i = 0; i < d.n_layer; i++)
        part = std::max(part, kern_type_block(src->layer[i].w_down.type));
    while (d.n_ffn % (2 * part) == 0 && d.n_ffn / (2 * part) >= 4 * CU_MAX_TP)
        part *= 2;
    c->ffn_part = part;
    if (heads % c->out_part || d.n_ffn % part || d.n_ffn / part < c->world ||
        std::max(heads / c->out_part, d.n_ffn / part) > EXACT_PARTS)
        return skv_fail(err, SKV_BAD_CONFIG,
                        "tp-exact: %d columns of heads in parts of %d, and %d of the feed-forward in parts of %d, don't go over %d "
                        "ranks; parts are %d at most",
                        heads, c->out_part, d.n_ffn, part, c->world, EXACT_PARTS);
    for (int i = 0; i < c->world; i++) {
        cu_rank r;
        cu_rank_cut(c, i, &r);
        if (((r.kv0 * c->g + r.own0) * d.head_dim) % c->out_part || (r.n_own * d.head_dim) % c->out_part)
            return skv_fail(err, SKV_BAD_CONFIG,
                            "tp-exact: heads of %d columns go together by %d, which rank %d of %d would divide: it has %d", d.head_dim,
                            c->out_part / d.head_dim, i, c->world, r.n_own);
    }
    return 0;
}

static int rank_open(cuda *c, cu_rank &r, int n, skv_error *err)
{
    int major = 0, global, world, local;
    bool nodes = cu_nodes_env(&global, &world, &local);
    r.device = nodes ? local : r.index;
    cu_rank_cut(c, nodes ? global : r.index, &r);
    if (cudaSetDevice(r.device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, r.device) != cudaSuccess)
        return skv_fail(err, SKV_BAD_CONFIG, "CUDA device %d can't be used", r.device);
    if (r.n_own < 1)
        return skv_fail(err, SKV_BAD_CONFIG, "tensor parallel over %d: %d ranks would share a KV head of %d query heads", n,
                        (n + c->d.n_kv - 1) / c->d.n_kv, c->g);
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

// Errors are not looked at: after a failure every call may give one, and what can be freed is freed all the same.
static void cu_close(void *be)
{
    cuda *c = static_cast<cuda *>(be);
    if (!c)
        return;
    if (!c->failed[0])
        cu_tell_end(c);
    if (c->failed[0])
        cu_comm_fini(c); // first: what waits for a rank that never comes must not be waited for
    for (cu_rank &r : c->rank)
        if (r.st) {
            cudaSetDevice(r.device);
            cudaStreamSynchronize(r.st);
        }
    cu_step_fini(c);
    cu_pass_fini(c);
    cu_kv_fini(c);
    cu_comm_fini(c);
    for (cu_rank &r : c->rank) {
        cudaSetDevice(r.device);
        for (const cu_state &s : c->states)
            cudaFree(s.x[r.index]);
        for (void *p : r.owned)
            cudaFree(p);
        if (r.blas)
            cublasDestroy(r.blas);
        if (r.st)
            cudaStreamDestroy(r.st);
    }
    cu_nodes_free(c->nodes);
    delete c;
}

// What is free here, less what selection, scores and prompts' hidden states take as they are needed.
static size_t room_here(cuda *c)
{
    size_t room = SIZE_MAX;
    for (cu_rank &r : c->rank) {
        size_t free_bytes = 0, total = 0;
        cu_use(r);
        CU_MUST(cudaMemGetInfo(&free_bytes, &total));
        room = std::min(room, free_bytes / 10 * 9);
    }
    return room;
}

static size_t cu_pool_room(void *be)
{
    cuda *c = static_cast<cuda *>(be);
    return std::min(room_here(c), c->others_room);
}

// All processes have opened their part; the leader learns what the others have room for.
static void all_open(cuda *c)
{
    uint64_t room = room_here(c);
    c->others_room = SIZE_MAX;
    if (c->nodes)
        c->nodes->watch = [c] {
            cudaError_t e = cudaStreamQuery(c->rank[0].st);
            if (e != cudaErrorNotReady)
                cu_must(e, "the device, while a message was waited for");
            return e == cudaErrorNotReady;
        };
    if (c->nodes && c->nodes->rank)
        cu_nodes_write(c->nodes, &room, sizeof room);
    for (int i = 1; c->nodes && c->nodes->rank == 0 && i < c->world; i++) {
        cu_nodes_read(c->nodes, i, &room, sizeof room);
        c->others_room = std::min(c->others_room, (size_t)room);
    }
}

static int open_all(cuda *c, const ops_model_src *src, int n, skv_error *err)
{
    try {
        if (c->cfg.tp_exact && exact_parts(c, src, err))
            return -1;
        for (cu_rank &r : c->rank)
            if (rank_open(c, r, n, err))
                return -1;
        if (cu_comm_init(c, err) || cu_weights_load(c, src, err) || cu_pass_init(c, err) || cu_step_init(c, err))
            return -1;
        all_open(c);
        return 0;
    } catch (const cu_error &e) {
        return skv_fail(err, SKV_INTERNAL, "CUDA: %s", e.msg);
    } catch (const std::bad_alloc &) {
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the CUDA backend");
    }
}

static void *cu_open(const ops_config *cfg, const ops_model_src *src, skv_error *err)
{
    if (check(cfg, src->dims, err))
        return nullptr;
    int n = ranks_asked(cfg, src->dims, err);
    if (n < 0)
        return nullptr;
    cuda *c = new cuda();
    c->d = src->dims;
    c->cfg = *cfg;
    c->g = c->d.n_head / c->d.n_kv;
    c->R = (cfg->max_rows + CU_GEMM_ROWS - 1) / CU_GEMM_ROWS * CU_GEMM_ROWS;
    c->D = std::min(cfg->max_lanes, c->R);
    c->world = n;
    c->vocab_part = (c->d.n_vocab + n - 1) / n;
    int rank, world, local, here = cu_nodes_env(&rank, &world, &local) ? 1 : n;
    c->rank.resize((size_t)here);
    for (int i = 0; i < here; i++)
        c->rank[i].index = i;
    if (open_all(c, src, n, err)) {
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
        snprintf(text, text_size, "%s, %d device%s%s, weights as in the file %.1f MiB, workspace %.1f MiB%s%s", BACKEND_NAME,
                 c->world, c->world > 1 ? "s" : "", c->nodes ? " in as many processes" : "", (double)*weight_bytes / 1048576,
                 (double)*work_bytes / 1048576, c->nodes ? " here" : "", c->ffn_part ? ", exact sums over devices" : "");
}

float *cu_state_new(void *be, int n_row, skv_error *err)
{
    cuda *c = static_cast<cuda *>(be);
    cu_state s = { ++c->last_state, n_row, {} };
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
    cu_tell_state(c, s.id, n_row);
    return s.x[0];
}

// Rows only move towards the front, in ascending order, so the copies on one stream don't overtake what they read.
void cu_state_thin(void *be, float *state, const int32_t *row, int n)
{
    cuda *c = static_cast<cuda *>(be);
    size_t d = (size_t)c->d.d_model;
    cu_tell_thin(c, state, row, n);
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

void cu_state_free(void *be, float *state)
{
    cuda *c = static_cast<cuda *>(be);
    if (!state)
        return;
    cu_step_flush(c);
    for (size_t i = 0; i < c->states.size(); i++) {
        if (c->states[i].x[0] != state)
            continue;
        cu_tell_state(c, c->states[i].id, 0);
        for (cu_rank &r : c->rank) {
            cu_use(r);
            cu_wait(c, r);
            cu_graphs_forget(r, state);
            float *x = c->states[i].x[r.index];
            c->states[i].x[r.index] = nullptr; // another rank may fail before the state is off the list
            CU_MUST(cudaFree(x));
        }
        c->states.erase(c->states.begin() + (long)i);
        return;
    }
}

// One row a segment may be a decode step: its operations are noted. What follows tells. One without tokens leaves the step
// that runs alone.
void cu_embed_op(void *be, const ops_pass *pass, float *x)
{
    cuda *c = static_cast<cuda *>(be);
    cu_tell_embed(c, pass, x);
    if (pass->token)
        cu_step_flush(c);
    if (pass->n_seg == pass->n_row && pass->n_row <= c->D)
        cu_step_embed(c, pass, x);
    else
        cu_pass_embed(c, pass, x);
}

void cu_attn_in_op(void *be, int layer, const ops_pass *pass, const float *x, const int32_t *slot)
{
    cuda *c = static_cast<cuda *>(be);
    cu_tell_attn_in(c, layer, pass, x, slot);
    if (slot) {
        cu_step_attn_in(c, layer, pass, x, slot);
        return;
    }
    cu_step_flush(c);
    cu_pass_attn_in(c, layer, pass, x);
}

void cu_attn_prefill_op(void *be, int layer, const ops_pass *pass)
{
    cu_tell_attn_prefill(static_cast<cuda *>(be), layer, pass);
    cu_step_flush(static_cast<cuda *>(be));
    cu_attn_prefill(be, layer, pass);
}

static void cu_attn_decode_op(void *be, int layer, const ops_pass *pass, const kern_rule *rule)
{
    cu_tell_attn_decode(static_cast<cuda *>(be), layer, pass, rule);
    cu_step_attn_decode(static_cast<cuda *>(be), layer, pass, rule);
}

void cu_out_mlp_op(void *be, int layer, const ops_pass *pass, float *x)
{
    cuda *c = static_cast<cuda *>(be);
    cu_tell_out_mlp(c, layer, pass, x);
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

static const char *cu_failed(void *be)
{
    const cuda *c = static_cast<const cuda *>(be);
    return c->failed[0] ? c->failed : nullptr;
}

static int cu_process_rank(void)
{
    int rank, world, local;
    return cu_nodes_env(&rank, &world, &local) ? rank : 0;
}

static void cu_steps(void *be, int64_t *graph, int64_t *plain)
{
    const cuda *c = static_cast<const cuda *>(be);
    *graph = c->n_graph;
    *plain = c->n_plain;
}

// An operation of the table: does nothing once the device has failed, and is where a failure ends.
template <auto F> struct border;
template <class R, class... A, R (*F)(void *, A...)> struct border<F> {
    static R run(void *be, A... a)
    {
        cuda *c = static_cast<cuda *>(be);
        if (c->failed[0])
            return R();
        try {
            return F(be, a...);
        } catch (const cu_error &e) {
            snprintf(c->failed, sizeof c->failed, "CUDA: %s", e.msg);
        } catch (const std::bad_alloc &) {
            snprintf(c->failed, sizeof c->failed, "no memory for a step's tables");
        }
        return R();
    }
};
#define OP(f) border<f>::run

// Those that must say why.
static float *state_new_op(void *be, int n_row, skv_error *err)
{
    float *x = OP(cu_state_new)(be, n_row, err);
    if (!x && cu_failed(be))
        skv_fail(err, SKV_INTERNAL, "%s", cu_failed(be));
    return x;
}

static ops_kv *kv_init_op(void *be, uint32_t n_pages, skv_error *err)
{
    ops_kv *kv = OP(cu_kv_init)(be, n_pages, err);
    if (!kv && cu_failed(be))
        skv_fail(err, SKV_INTERNAL, "%s", cu_failed(be));
    return kv;
}

extern "C" const ops ops_cuda = {
    BACKEND_NAME,
    cu_open,
    cu_close,
    cu_info,
    kv_init_op,
    OP(cu_page_clear),
    OP(cu_kv_read),
    state_new_op,
    OP(cu_state_free),
    OP(cu_state_thin),
    OP(cu_embed_op),
    OP(cu_attn_in_op),
    OP(cu_attn_prefill_op),
    OP(cu_attn_decode_op),
    OP(cu_out_mlp_op),
    OP(cu_score_begin),
    OP(cu_select_op),
    OP(cu_score_read),
    OP(cu_logits),
    cu_host_for,
    nullptr,
    nullptr,
    OP(cu_pool_room),
    OP(cu_choose),
    OP(cu_collect_op),
    OP(cu_ahead),
    cu_failed,
    cu_steps,
    cu_process_rank,
    cu_follow,
};
