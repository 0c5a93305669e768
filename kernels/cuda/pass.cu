// pass.cu - prefill passes: products by cuBLAS on one layer in bf16, attention and scores, selection; states; logits of
// prompts are in step.cu.
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/backend.h"

#define STAGES 4

// --- scratch -------------------------------------------------------------------------------------------

// The ints of a prefill pass: 3 per row (token, lane, position), n_kv slots, 4 per segment.
static size_t meta_size(const cuda *c, const cu_rank &r)
{
    size_t ints = (size_t)c->R * (3 + r.n_kv + 4) + 64, list = CU_CHANGES * sizeof(kv_change) + 64;
    size_t choice = (size_t)c->D * (4 + sizeof(smp_row) + SMP_PENS * sizeof(smp_pen)) + 64;
    return std::max(std::max(ints * 4, list), choice);
}

static int rank_scratch(cuda *c, cu_rank &r, skv_error *err)
{
    size_t dm = c->d.d_model, R = c->R, D = c->D, nq = (size_t)r.n_head * c->d.head_dim, ffn = r.n_ffn;
    const struct {
        void *p; // address of the pointer
        size_t bytes;
    } want[] = { { &r.in16, R * std::max(dm, std::max(nq, ffn)) * 2 },
                 { &r.q16, R * nq * 2 },
                 { &r.in32, D * dm * 4 },
                 { &r.qkv, R * r.width * 4 },
                 { &r.y, R * dm * 4 },
                 { &r.gu, R * 2 * ffn * 4 },
                 { &r.att32, D * nq * 4 },
                 { &r.act32, D * ffn * 4 },
                 { &r.lse, R * r.n_head * 4 },
                 { &r.logits, D * (size_t)c->vocab_part * c->world * 4 },
                 { &r.chosen, D * 4 },
                 { &r.score_row_d, c->cfg.max_lanes * sizeof(float *) },
                 { &r.score_stride_d, c->cfg.max_lanes * sizeof(int32_t) } };
    cu_use(r);
    for (const auto &w : want) {
        void *p = cu_alloc(r, w.bytes, false, err);
        if (!p)
            return -1;
        memcpy(w.p, &p, sizeof p);
    }
    if (c->cfg.tp_exact && !(r.sum = static_cast<long long *>(cu_alloc(r, R * dm * sizeof *r.sum, false, err))))
        return -1;
    r.meta_bytes = meta_size(c, r);
    if (!(r.meta = static_cast<unsigned char *>(cu_alloc(r, r.meta_bytes, false, err))))
        return -1;
    r.score_row.assign(c->cfg.max_lanes, nullptr);
    r.score_stride.assign(c->cfg.max_lanes, 0);
    for (int i = 0; i < STAGES; i++) {
        cu_stage s = { nullptr, r.meta_bytes, nullptr };
        if (cudaHostAlloc(reinterpret_cast<void **>(&s.host), s.bytes, cudaHostAllocDefault) != cudaSuccess)
            return skv_fail(err, SKV_NO_MEMORY, "no pinned memory for staging");
        CU_MUST(cudaEventCreateWithFlags(&s.done, cudaEventDisableTiming));
        r.stage.push_back(s);
    }
    return 0;
}

int cu_pass_init(cuda *c, skv_error *err)
{
    for (cu_rank &r : c->rank)
        if (rank_scratch(c, r, err))
            return -1;
    size_t logits = c->D * (size_t)c->d.n_vocab * 4;
    if (cudaHostAlloc(reinterpret_cast<void **>(&c->logits_host), logits, cudaHostAllocPortable) != cudaSuccess ||
        cudaHostAlloc(reinterpret_cast<void **>(&c->chosen_host), c->D * 4, cudaHostAllocPortable) != cudaSuccess)
        return skv_fail(err, SKV_NO_MEMORY, "no pinned memory for logits");
    return 0;
}

void cu_pass_fini(cuda *c)
{
    for (cu_rank &r : c->rank) {
        cudaSetDevice(r.device);
        for (cu_stage &s : r.stage) {
            cudaFreeHost(s.host);
            cudaEventDestroy(s.done);
        }
        for (float *p : r.score_row)
            cudaFree(p);
        cudaFree(r.sel_work);
    }
    cudaFreeHost(c->logits_host);
    cudaFreeHost(c->chosen_host);
}

cu_stage &cu_stage_take(cuda *c, cu_rank &r)
{
    cu_stage &s = r.stage[r.next_stage++ % STAGES];
    cu_wait_event(c, s.done);
    return s;
}

void cu_stage_send(cu_rank &r, cu_stage &s, size_t bytes)
{
    CU_MUST(cudaMemcpyAsync(r.meta, s.host, bytes, cudaMemcpyHostToDevice, r.st));
    CU_MUST(cudaEventRecord(s.done, r.st));
}

void cu_sel_room(cuda *c, cu_rank &r, size_t bytes)
{
    if (bytes <= r.sel_bytes)
        return;
    cu_wait(c, r);
    CU_MUST(cudaFree(r.sel_work));
    r.work_bytes += bytes - r.sel_bytes;
    r.sel_bytes = bytes;
    CU_MUST(cudaMalloc(reinterpret_cast<void **>(&r.sel_work), bytes));
}

float *cu_state_x(cuda *c, const cu_rank &r, const float *x)
{
    for (const cu_state &s : c->states) {
        size_t n = (size_t)s.n_row * c->d.d_model;
        if (x >= s.x[0] && x < s.x[0] + n)
            return s.x[r.index] + (x - s.x[0]);
    }
    cu_fail("hidden states that state_new did not give");
}

// --- a pass's numbers on the device ------------------------------------------------------------------------

struct pass_meta {
    pass_view rows;
    seg_view seg;
    int most_rows, most_slots, n_scored;
};

static int seg_slot0(const ops_seg &s, int head)
{
    return s.head_slot0 ? s.head_slot0[head] : s.slot0;
}

static pass_meta send_pass(cuda *c, cu_rank &r, const ops_pass *p)
{
    cu_stage &st = cu_stage_take(c, r);
    int32_t *h = reinterpret_cast<int32_t *>(st.host), *d = reinterpret_cast<int32_t *>(r.meta);
    int n = p->n_row, m = p->n_seg, nk = r.n_kv;
    int32_t *token = h, *lane = h + n, *pos = h + 2 * n, *slot = h + 3 * n, *seg = h + (3 + nk) * n;
    pass_meta out = { { d, d + n, d + 2 * n, d + 3 * n },
                      { d + (3 + nk) * n, d + (3 + nk) * n + m, d + (3 + nk) * n + 2 * m, d + (3 + nk) * n + 3 * m },
                      0, 0, 0 };
    for (int i = 0; i < n; i++) {
        token[i] = p->token ? p->token[i] : 0;
        lane[i] = -1;
    }
    for (int i = 0; i < m; i++) {
        const ops_seg &s = p->seg[i];
        seg[i] = s.lane;
        seg[m + i] = s.row0;
        seg[2 * m + i] = s.n_row;
        seg[3 * m + i] = s.score_from;
        out.most_rows = std::max(out.most_rows, s.n_row);
        out.n_scored = std::max(out.n_scored, s.row0 + s.n_row - std::max(s.score_from, s.row0));
        for (int j = 0; j < s.n_row; j++) {
            lane[s.row0 + j] = s.lane;
            pos[s.row0 + j] = ops_seg_pos(&s, s.row0 + j);
            for (int k = 0; k < nk; k++) {
                slot[(s.row0 + j) * nk + k] = seg_slot0(s, r.kv0 + k) + j;
                out.most_slots = std::max(out.most_slots, seg_slot0(s, r.kv0 + k) + j + 1);
            }
        }
    }
    cu_stage_send(r, st, ((size_t)(3 + nk) * n + 4 * (size_t)m) * 4);
    return out;
}

// --- products ------------------------------------------------------------------------------------------------

void cu_gemm(cu_rank &r, const unsigned short *w, int ldw, int outs, int cols, const unsigned short *a, int lda, int rows,
             float *y)
{
    const float one = 1.0f, zero = 0.0f;
    if (r.sum) {
        cu_exact_gemm(r.st, w, ldw, outs, cols, a, lda, rows, y);
        return;
    }
    for (int i = 0; i < rows; i += CU_GEMM_ROWS) {
        cublasStatus_t s = cublasGemmEx(r.blas, CUBLAS_OP_T, CUBLAS_OP_N, outs, CU_GEMM_ROWS, cols, &one, w, CUDA_R_16BF,
                                        ldw, a + (size_t)i * lda, CUDA_R_16BF, lda, &zero, y + (size_t)i * outs,
                                        CUDA_R_32F, outs, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        if (s != CUBLAS_STATUS_SUCCESS)
            cu_fail("cublasGemmEx %d x %d x %d: status %d", outs, CU_GEMM_ROWS, cols, (int)s);
    }
}

void cu_gemm_share(const cuda *c, cu_rank &r, const unsigned short *w, int ldw, int cols, int part, const unsigned short *a,
                   int lda, int rows)
{
    if (r.sum)
        cu_exact_gemm_parts(r.st, w, ldw, c->d.d_model, cols, part, a, lda, rows, r.sum);
    else
        cu_gemm(r, w, ldw, c->d.d_model, cols, a, lda, rows, r.y);
}

void cu_qmv_share(const cuda *c, cu_rank &r, const cu_weight &w, int part, const float *x, int ldx, int n)
{
    if (r.sum)
        cu_qmv_exact(r.st, w, part, x, ldx, n, r.sum, c->d.d_model);
    else
        cu_qmv(r.st, w, x, ldx, n, r.y, c->d.d_model);
}

void cu_reduce(cuda *c, size_t n)
{
    cu_all_reduce(c, n);
    for (cu_rank &r : c->rank)
        if (r.sum) {
            cu_use(r);
            cu_exact_out(r.st, r.sum, n, r.y);
        }
}

rope_params cu_rope(const cuda *c, const cu_rank &r, int layer)
{
    const cu_layer &l = r.layer[layer];
    return { r.n_head, r.n_kv, c->d.head_dim, c->d.rot_dim, c->d.rope == KERN_ROPE_HALF, c->d.norm_eps, r.inv_freq,
             l.bq,     l.bk,   l.bv,          l.q_norm,     l.k_norm };
}

// --- operations -----------------------------------------------------------------------------------------------

void cu_pass_embed(cuda *c, const ops_pass *pass, float *x)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        pass_meta m = send_pass(c, r, pass);
        cu_embed(r.st, r.embed, m.rows.token, pass->n_row, c->d.embed_scale, cu_state_x(c, r, x));
    }
}

void cu_pass_attn_in(cuda *c, int layer, const ops_pass *pass, const float *x)
{
    for (int i = 0; i < pass->n_seg; i++)
        cu_kv_diff(c, pass->seg[i].lane, layer);
    cu_kv_push(c);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_layer16(c, r, layer);
        pass_meta m = send_pass(c, r, pass);
        cu_add_norm(r.st, cu_state_x(c, r, x), nullptr, nullptr, r.layer[layer].attn_norm, c->d.norm_eps, c->d.d_model,
                    pass->n_row, nullptr, nullptr, r.in16);
        cu_gemm(r, r.qkv16, c->d.d_model, r.width, c->d.d_model, r.in16, c->d.d_model, pass->n_row, r.qkv);
        cu_rope_store(r.st, c->cfg.kv_dtype, cu_rope(c, r, layer), r.kv, m.rows, layer, pass->n_row, r.qkv, r.q16);
    }
}

void cu_attn_prefill(void *be, int layer, const ops_pass *pass)
{
    cuda *c = static_cast<cuda *>(be);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        pass_meta m = send_pass(c, r, pass);
        cu_prefill(r.st, c->cfg.kv_dtype, c->d.head_dim,
                   { r.kv, m.rows, m.seg, layer, c->g, r.n_head, c->R, c->d.attn_scale, r.q16, r.in16, r.lse },
                   pass->n_seg, m.most_rows);
        if (m.n_scored > 0)
            cu_score(r.st, c->cfg.kv_dtype, c->d.head_dim,
                     { r.kv, m.rows, m.seg, layer, c->g, r.n_head, c->R, c->d.attn_scale, r.q16, r.lse, r.score_row_d,
                       r.score_stride_d },
                     pass->n_seg, m.most_slots);
    }
}

void cu_pass_out_mlp(cuda *c, int layer, int n_row, float *x)
{
    int dm = c->d.d_model;
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_layer16(c, r, layer);
        int width = r.n_head * c->d.head_dim, own = r.own0 * c->d.head_dim;
        cu_gemm_share(c, r, r.o16 + own, width, r.n_own * c->d.head_dim, c->out_part, r.in16 + own, width, n_row);
    }
    cu_reduce(c, (size_t)n_row * dm);
    for (cu_rank &r : c->rank) {
        const cu_layer &l = r.layer[layer];
        cu_use(r);
        cu_add_norm(r.st, cu_state_x(c, r, x), r.y, l.post_attn_norm, l.ffn_norm, c->d.norm_eps, dm, n_row, nullptr,
                    nullptr, r.in16);
        cu_gemm(r, r.gu16, dm, 2 * r.n_ffn, dm, r.in16, dm, n_row, r.gu);
        cu_gated_act(r.st, r.gu, n_row, r.n_ffn, c->d.act == KERN_ACT_GELU_TANH, nullptr, r.in16);
        cu_gemm_share(c, r, r.down16, r.n_ffn, r.n_ffn, c->ffn_part, r.in16, r.n_ffn, n_row);
    }
    cu_reduce(c, (size_t)n_row * dm);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_add_norm(r.st, cu_state_x(c, r, x), r.y, r.layer[layer].post_ffn_norm, nullptr, c->d.norm_eps, dm, n_row,
                    nullptr, nullptr, nullptr);
    }
}

// --- scores and selection -------------------------------------------------------------------------------------

void cu_score_begin(void *be, int lane, int n_slot)
{
    cuda *c = static_cast<cuda *>(be);
    cu_tell_score(c, lane, n_slot);
    cu_step_flush(c);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        if (n_slot > r.score_stride[lane]) {
            int stride = (n_slot + 1023) / 1024 * 1024;
            cu_wait(c, r);
            CU_MUST(cudaFree(r.score_row[lane]));
            CU_MUST(cudaMalloc(reinterpret_cast<void **>(&r.score_row[lane]), (size_t)r.n_kv * stride * 4));
            r.work_bytes += (size_t)r.n_kv * (stride - r.score_stride[lane]) * 4;
            r.score_stride[lane] = stride;
            size_t n = (size_t)c->cfg.max_lanes;
            CU_MUST(cudaMemcpy(r.score_row_d, r.score_row.data(), n * sizeof(float *), cudaMemcpyHostToDevice));
            CU_MUST(cudaMemcpy(r.score_stride_d, r.score_stride.data(), n * 4, cudaMemcpyHostToDevice));
        }
        CU_MUST(cudaMemsetAsync(r.score_row[lane], 0, (size_t)r.n_kv * r.score_stride[lane] * 4, r.st));
    }
}

void cu_score_read(void *be, int lane, int n_slot, float *out)
{
    cuda *c = static_cast<cuda *>(be);
    cu_step_flush(c);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_wait(c, r);
        for (int h = 0; h < r.n_kv; h++)
            CU_MUST(cudaMemcpy(out + (size_t)(r.kv0 + h) * n_slot, r.score_row[lane] + (size_t)h * r.score_stride[lane],
                               (size_t)n_slot * 4, cudaMemcpyDeviceToHost));
    }
}

// Parts of the selection's work space.
static void sel_parts(cuda *c, cu_rank &r, int pages, int n_pin, sel_params *p)
{
    size_t stride = 1, at = 0;
    while (stride < (size_t)pages * KERN_PAGE_SLOTS)
        stride <<= 1;
    size_t cells = stride * r.n_kv;
    auto take = [&](size_t bytes) {
        size_t from = at;
        at += (bytes + 255) & ~(size_t)255;
        return from;
    };
    size_t key = take(cells * 8), head = take(r.n_kv * sizeof(sel_head)), pooled = take(cells * 4);
    size_t norm = take(cells * 4), pos = take(cells * 4), keep = take(cells * 4), src = take(cells * 4);
    size_t mass = take((size_t)r.n_kv * 4), pin = take((size_t)n_pin * 8 + 8);
    size_t spare = take((size_t)r.n_kv * c->cfg.max_pages * c->page.bytes);
    cu_sel_room(c, r, at);
    unsigned char *w = r.sel_work;
    p->stride = (int)stride;
    p->key = reinterpret_cast<sel_key *>(w + key);
    p->head = reinterpret_cast<sel_head *>(w + head);
    p->pooled = reinterpret_cast<float *>(w + pooled);
    p->norm = reinterpret_cast<float *>(w + norm);
    p->pos = reinterpret_cast<int32_t *>(w + pos);
    p->keep = reinterpret_cast<int32_t *>(w + keep);
    p->src = reinterpret_cast<int32_t *>(w + src);
    p->kept_mass = reinterpret_cast<float *>(w + mass);
    p->pin = reinterpret_cast<int32_t *>(w + pin);
    p->spare = w + spare;
}

static sel_params sel_for(cuda *c, cu_rank &r, int lane, int layer, const kern_rule *u, int n_query, int pages)
{
    sel_params p;
    memset(&p, 0, sizeof p);
    p.kv = r.kv;
    p.lane = lane;
    p.layer = layer;
    p.hd = c->d.head_dim;
    p.budget = u->budget;
    p.sink = u->sink;
    p.recent = u->recent;
    p.pool = u->pool;
    p.pool_shift = u->pool_shift;
    p.wide = u->wide;
    p.wide_shift = u->wide_shift;
    p.narrow = u->narrow;
    p.pool_max = u->pool_kind == KERN_POOL_MAX;
    p.pool_from = u->pool_from;
    p.pool_to = u->pool_to;
    p.use_score = u->use_score;
    p.by_value = u->by_value;
    p.shared = u->use_score && u->head_floor < 1;
    p.n_pin = u->n_pin;
    p.head_floor = u->head_floor;
    p.value_eps = u->value_eps;
    p.per_query = 1.0f / (float)(n_query > 0 ? n_query : 1);
    p.row = r.score_row[lane];
    p.row_stride = r.score_stride[lane];
    sel_parts(c, r, pages, u->n_pin, &p);
    if (u->n_pin)
        CU_MUST(cudaMemcpy(const_cast<int32_t *>(p.pin), u->pin, (size_t)u->n_pin * 8, cudaMemcpyHostToDevice));
    return p;
}

// norm[head][slot] = mean over the group's query heads of |Wo_h v|_1: V as bf16 times the layer's bf16 output
// projection, CU_GEMM_ROWS slots at a time.
static void value_norms(cuda *c, cu_rank &r, int layer, const sel_params &p)
{
    int hd = c->d.head_dim, dm = c->d.d_model, ld = r.n_head * hd;
    cu_layer16(c, r, layer);
    CU_MUST(cudaMemsetAsync(p.norm, 0, (size_t)r.n_kv * p.stride * 4, r.st));
    for (int h = 0; h < r.n_kv; h++) {
        int n = c->kv.len[cu_kv_at(c, p.lane, layer, r.kv0 + h)];
        for (int s = 0; s < n; s += CU_GEMM_ROWS) {
            int rows = std::min(CU_GEMM_ROWS, n - s);
            cu_select_values(r.st, p, c->cfg.kv_dtype, h, s, rows, r.q16);
            for (int j = 0; j < c->g; j++) {
                cu_gemm(r, r.o16 + (size_t)(h * c->g + j) * hd, ld, dm, hd, r.q16, hd, CU_GEMM_ROWS, r.y);
                cu_select_norm(r.st, r.y, rows, dm, 1.0f / (float)c->g, p.norm + (size_t)h * p.stride + s);
            }
        }
    }
}

// What the rank's heads kept, into the host's arrays. Waits for the rank.
static void sel_results(cuda *c, cu_rank &r, const sel_params &p, float *kept_mass)
{
    std::vector<sel_head> head((size_t)r.n_kv);
    std::vector<float> mass((size_t)r.n_kv);
    std::vector<int32_t> cap((size_t)r.n_kv);
    size_t local = ((size_t)p.lane * c->d.n_layer + p.layer) * r.n_kv;
    cu_wait(c, r);
    CU_MUST(cudaMemcpy(head.data(), p.head, head.size() * sizeof(sel_head), cudaMemcpyDeviceToHost));
    CU_MUST(cudaMemcpy(mass.data(), p.kept_mass, mass.size() * 4, cudaMemcpyDeviceToHost));
    CU_MUST(cudaMemcpy(cap.data(), r.kv.cap + local, cap.size() * 4, cudaMemcpyDeviceToHost));
    for (int h = 0; h < r.n_kv; h++) {
        size_t at = cu_kv_at(c, p.lane, p.layer, r.kv0 + h);
        c->kv.len[at] = c->s_len[at] = head[h].kept;
        c->kv.cap[at] = c->s_cap[at] = cap[h];
        c->kv.victim[at] = c->s_victim[at] = -1;
        if (kept_mass)
            kept_mass[r.kv0 + h] = mass[h];
    }
}

void cu_select_op(void *be, int lane, int layer, const kern_rule *rule, int n_query, float *kept_mass)
{
    cuda *c = static_cast<cuda *>(be);
    std::vector<sel_params> p;
    cu_tell_select(c, lane, layer, rule, n_query);
    cu_step_flush(c);
    cu_kv_diff(c, lane, layer);
    cu_kv_push(c);
    for (cu_rank &r : c->rank) {
        int most = 1;
        for (int h = 0; h < r.n_kv; h++)
            most = std::max(most, c->kv.len[cu_kv_at(c, lane, layer, r.kv0 + h)]);
        int pages = (most + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS;
        cu_use(r);
        p.push_back(sel_for(c, r, lane, layer, rule, n_query, pages));
        cu_select_begin(r.st, p.back());
        bool wide = cu_select_wide(p.back());
        if (rule->budget && (wide || rule->by_value)) {
            if (!wide)
                value_norms(c, r, layer, p.back());
            cu_select_rest(r.st, p.back());
        }
        cu_select_end(r.st, p.back(), c->cfg.kv_dtype, pages);
    }
    for (cu_rank &r : c->rank) {
        cu_use(r);
        sel_results(c, r, p[r.index], kept_mass);
    }
    cu_kept_exchange(c, lane, layer, kept_mass);
}
