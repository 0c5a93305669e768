// step.cu - decode: operations are noted, then run as one CUDA graph.
//
// Whatever changes from step to step (tokens, lanes, positions, slots, rules, table changes, pages to clear, rows of the
// logits) is written into a pinned block per rank while the engine prepares the step. A step is the copy of that block to
// the place where the graph reads it, and the graph, which ends with the copies of tokens and victims: a replay needs
// nothing else from the host. There are two blocks: while the device works, the next step is noted in the other, all but its
// tokens and how the next ones are chosen, and dropped if it turns out to be another step.
// A graph is keyed by the rung of the batch ladder, the rung of the longest head's splits and the hidden states' place;
// rows past the batch have lane -1 and change nothing but their own row of x, which is why the engine's decode states are
// a state of their own.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/nodes.h"

static_assert(DEC_PLACES == OPS_RING, "a ring has as many places as the interface says");

// --- the block ---------------------------------------------------------------------------------------------

static void step_layout(const cuda *c, const cu_rank &r, int pins, cu_step_at *at)
{
    size_t D = c->D, L = c->d.n_layer, b = 0;
    auto take = [&](size_t bytes) {
        size_t from = b;
        b += (bytes + 15) & ~(size_t)15;
        return from;
    };
    at->token = take(D * 4);
    at->lane = take(D * 4);
    at->pos = take(D * 4);
    at->row = take(D * 4);
    at->smp = take(D * sizeof(smp_row));
    at->pen = take(D * SMP_PENS * sizeof(smp_pen));
    at->slot = take(L * D * r.n_kv * 4);
    at->rule = take(L * D * sizeof(dec_rule));
    at->pin = take((size_t)pins * 8);
    at->n_change = take(4);
    at->change = take(CU_CHANGES * sizeof(kv_change));
    at->n_clear = take(4);
    at->clear = take(CU_CLEARS * 4);
    at->bytes = b;
    at->pins = pins;
}

template <class T> static T *in_block(unsigned char *block, size_t at)
{
    return reinterpret_cast<T *>(block + at);
}

// In the block that is being noted into.
template <class T> static T *noted(const cuda *c, const cu_rank &r, size_t at)
{
    return in_block<T>(r.step_h[c->block], at);
}

static int split_most(const cuda *c)
{
    return (c->cfg.max_pages * KERN_PAGE_SLOTS + DEC_SPLIT - 1) / DEC_SPLIT;
}

// (row, split) pairs that the split records hold.
static size_t split_cells(const cuda *c, const cu_rank &r)
{
    size_t each = (size_t)r.n_head * (DEC_SPLIT + c->d.head_dim + 2) * 4;
    return std::max(CU_DECODE_WORK / each, (size_t)split_most(c));
}

static int block_alloc(cu_rank &r, size_t bytes, skv_error *err)
{
    for (unsigned char *&h : r.step_h) {
        if (cudaHostAlloc(reinterpret_cast<void **>(&h), bytes, cudaHostAllocDefault) != cudaSuccess)
            return skv_fail(err, SKV_NO_MEMORY, "no pinned memory for the decode step's block of %zu bytes", bytes);
        memset(h, 0, bytes);
    }
    if (cudaMalloc(reinterpret_cast<void **>(&r.step_d), bytes) != cudaSuccess)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the decode step's block of %zu bytes", bytes);
    r.work_bytes += bytes;
    return 0;
}

static int rank_init(cuda *c, cu_rank &r, skv_error *err)
{
    size_t cells = split_cells(c, r), heads = r.n_head, victims = (size_t)c->D * c->d.n_layer * r.n_kv * 4;
    cu_use(r);
    if (block_alloc(r, r.at.bytes, err) ||
        !(r.part_o = static_cast<float *>(cu_alloc(r, cells * heads * c->d.head_dim * 4, false, err))) ||
        !(r.part_ml = static_cast<float *>(cu_alloc(r, cells * heads * 8, false, err))) ||
        !(r.logit = static_cast<float *>(cu_alloc(r, cells * heads * DEC_SPLIT * 4, false, err))) ||
        !(r.victims = static_cast<int32_t *>(cu_alloc(r, victims, false, err))))
        return -1;
    size_t rings = (size_t)c->cfg.max_lanes * c->d.n_layer * DEC_PLACES;
    if (!(r.ring.q = static_cast<unsigned short *>(cu_alloc(r, rings * heads * c->d.head_dim * 2, false, err))) ||
        !(r.ring.ml = static_cast<float *>(cu_alloc(r, rings * heads * 8, false, err))) ||
        !(r.ring.pos = static_cast<int32_t *>(cu_alloc(r, rings * r.n_kv * 4, false, err))))
        return -1;
    if (cudaHostAlloc(reinterpret_cast<void **>(&r.victims_host), victims, cudaHostAllocDefault) != cudaSuccess)
        return skv_fail(err, SKV_NO_MEMORY, "no pinned memory for the step's victims");
    return 0;
}

int cu_step_init(cuda *c, skv_error *err)
{
    for (cu_rank &r : c->rank) {
        step_layout(c, r, 64 * c->D + 256, &r.at);
        if (rank_init(c, r, err))
            return -1;
    }
    return 0;
}

static void graphs_drop(cu_rank &r)
{
    for (auto &g : r.graphs)
        cudaGraphExecDestroy(g.second);
    r.graphs.clear();
}

void cu_graphs_forget(cu_rank &r, const float *x)
{
    for (auto it = r.graphs.begin(); it != r.graphs.end();) {
        if (std::get<2>(it->first) != x) {
            ++it;
            continue;
        }
        CU_MUST(cudaGraphExecDestroy(it->second));
        it = r.graphs.erase(it);
    }
}

void cu_step_fini(cuda *c)
{
    for (cu_rank &r : c->rank) {
        cudaSetDevice(r.device);
        graphs_drop(r);
        cudaFree(r.step_d);
        cudaFreeHost(r.step_h[0]);
        cudaFreeHost(r.step_h[1]);
        cudaFreeHost(r.victims_host);
    }
}

// More room for pins: new blocks with what is noted so far, and what runs; graphs know the old one's address.
static void step_grow(cuda *c, int pins)
{
    for (cu_rank &r : c->rank) {
        cu_step_at old = r.at;
        unsigned char *h[] = { r.step_h[0], r.step_h[1] };
        skv_error err;
        cu_use(r);
        cu_wait(c, r);
        graphs_drop(r);
        CU_MUST(cudaFree(r.step_d));
        step_layout(c, r, pins, &r.at);
        if (block_alloc(r, r.at.bytes, &err))
            cu_fail("%s", err.msg);
        for (int i = 0; i < 2; i++) {
            memcpy(r.step_h[i], h[i], old.n_change); // all up to the pins lies where it lay; pins grow in place
            cudaFreeHost(h[i]);
        }
    }
}

// --- noting -------------------------------------------------------------------------------------------------

static void step_begin(cuda *c, const ops_pass *pass, const float *x)
{
    if (!c->noted.empty() && c->step_rows == pass->n_row && c->step_x == x)
        return;
    if (!c->ahead)
        cu_step_flush(c);
    c->step_rows = pass->n_row;
    c->step_x = x;
    c->step_most = 1;
    c->step_pins.clear();
    c->step_n_pin = 0;
    for (cu_rank &r : c->rank) {
        int32_t *lane = noted<int32_t>(c, r, r.at.lane), *pos = noted<int32_t>(c, r, r.at.pos);
        memset(noted<int32_t>(c, r, r.at.token), 0, (size_t)c->D * 4);
        memset(noted<int32_t>(c, r, r.at.row), 0, (size_t)c->D * 4);
        for (int i = 0; i < c->D; i++) {
            lane[i] = -1;
            pos[i] = 0;
        }
        for (int i = 0; i < pass->n_seg; i++) {
            lane[pass->seg[i].row0] = pass->seg[i].lane;
            pos[pass->seg[i].row0] = pass->seg[i].pos0;
        }
    }
}

static void step_tokens(cuda *c, const int32_t *token)
{
    for (cu_rank &r : c->rank)
        memcpy(noted<int32_t>(c, r, r.at.token), token, (size_t)c->step_rows * 4);
}

void cu_step_embed(cuda *c, const ops_pass *pass, float *x)
{
    c->ahead = !pass->token;
    step_begin(c, pass, x);
    if (pass->token)
        step_tokens(c, pass->token);
    c->noted.push_back({ CU_EMBED, 0 });
}

void cu_step_attn_in(cuda *c, int layer, const ops_pass *pass, const float *x, const int32_t *slot)
{
    step_begin(c, pass, x);
    for (int i = 0; i < pass->n_seg; i++) {
        const ops_seg &s = pass->seg[i];
        for (int h = 0; h < c->d.n_kv; h++) {
            size_t at = cu_kv_at(c, s.lane, layer, h);
            int to = slot[(size_t)s.row0 * c->d.n_kv + h];
            if (to >= 0) // the device will have counted it by itself
                cu_kv_has(c, c->s_len[at], to + 1);
            c->step_most = std::max(c->step_most, c->kv.len[at]);
        }
        cu_kv_diff(c, s.lane, layer);
    }
    for (cu_rank &r : c->rank) {
        int32_t *to = noted<int32_t>(c, r, r.at.slot) + (size_t)layer * c->D * r.n_kv;
        for (int i = 0; i < pass->n_row; i++)
            for (int h = 0; h < r.n_kv; h++)
                to[i * r.n_kv + h] = slot[(size_t)i * c->d.n_kv + r.kv0 + h];
    }
    c->noted.push_back({ CU_ATTN_IN, layer });
}

// Where the rule's pins are in the block; rules of one sequence share theirs.
static int note_pins(cuda *c, const kern_rule &u)
{
    if (u.n_pin == 0)
        return 0;
    auto known = c->step_pins.find(u.pin);
    if (known != c->step_pins.end())
        return known->second;
    int at = c->step_n_pin;
    if (at + u.n_pin > c->rank[0].at.pins)
        step_grow(c, 2 * (at + u.n_pin));
    for (cu_rank &r : c->rank)
        memcpy(noted<kern_range>(c, r, r.at.pin) + at, u.pin, (size_t)u.n_pin * sizeof(kern_range));
    c->step_n_pin += u.n_pin;
    return c->step_pins[u.pin] = at;
}

void cu_step_attn_decode(cuda *c, int layer, const ops_pass *pass, const kern_rule *rule)
{
    for (int i = 0; i < pass->n_seg; i++) {
        dec_rule d = { 0, 0, 0, 0, 0, 1.0f, 0.0f, 0, 0 };
        if (rule) {
            const kern_rule &u = rule[i];
            int score = u.ring > 0                          ? DEC_RING | (u.burst ? DEC_BURST : 0)
                        : u.weight != 0 || u.decay != 1 ? DEC_SCORE
                                                            : 0;
            d = { DEC_VICTIM | score, u.sink, u.recent, note_pins(c, u), u.n_pin, u.decay, u.weight, u.ring, u.ring_at };
        }
        for (cu_rank &r : c->rank)
            noted<dec_rule>(c, r, r.at.rule)[(size_t)layer * c->D + pass->seg[i].row0] = d;
    }
    c->noted.push_back({ CU_ATTN_DECODE, layer });
}

void cu_step_out_mlp(cuda *c, int layer, const ops_pass *pass, float *x)
{
    (void)pass;
    (void)x;
    c->noted.push_back({ CU_OUT_MLP, layer });
}

void cu_ahead(void *be, const int32_t *token)
{
    cuda *c = static_cast<cuda *>(be);
    cu_tell_ahead(c, token);
    c->ahead = false;
    if (token) {
        step_tokens(c, token);
    } else {
        for (; !c->undo.empty(); c->undo.pop_back())
            *c->undo.back().first = c->undo.back().second;
        for (cu_rank &r : c->rank)
            c->change[r.index].clear(); // all of them its: the launch before took the others
        c->noted.clear();
    }
    c->undo.clear();
}

// --- running -------------------------------------------------------------------------------------------------

struct step_size {
    int rows, n_split;
};

static float *state_of(cuda *c, cu_rank &r)
{
    return cu_state_x(c, r, c->step_x);
}

static void run_embed(cuda *c, const step_size &z)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_embed(r.st, r.embed, in_block<int32_t>(r.step_d, r.at.token), z.rows, c->d.embed_scale, state_of(c, r));
    }
}

// normed: the norm is in in32 already (the layer before left it there).
static void run_attn_in(cuda *c, int layer, const step_size &z, bool normed)
{
    for (cu_rank &r : c->rank) {
        const cu_layer &l = r.layer[layer];
        int hd = c->d.head_dim;
        cu_use(r);
        if (!normed)
            cu_add_norm(r.st, state_of(c, r), nullptr, nullptr, l.attn_norm, c->d.norm_eps, c->d.d_model, z.rows,
                        nullptr, r.in32, nullptr);
        cu_qmv(r.st, l.wq, r.in32, c->d.d_model, z.rows, r.qkv, r.width);
        cu_qmv(r.st, l.wk, r.in32, c->d.d_model, z.rows, r.qkv + r.n_head * hd, r.width);
        cu_qmv(r.st, l.wv, r.in32, c->d.d_model, z.rows, r.qkv + (r.n_head + r.n_kv) * hd, r.width);
        pass_view rows = { in_block<int32_t>(r.step_d, r.at.token), in_block<int32_t>(r.step_d, r.at.lane),
                           in_block<int32_t>(r.step_d, r.at.pos),
                           in_block<int32_t>(r.step_d, r.at.slot) + (size_t)layer * c->D * r.n_kv };
        cu_rope_store(r.st, c->cfg.kv_dtype, cu_rope(c, r, layer), r.kv, rows, layer, z.rows, r.qkv, nullptr);
    }
}

static void run_attn_decode(cuda *c, int layer, const step_size &z)
{
    for (cu_rank &r : c->rank) {
        int chunk = (int)std::max((size_t)1, split_cells(c, r) / z.n_split), hd = c->d.head_dim;
        cu_use(r);
        for (int at = 0; at < z.rows; at += chunk) {
            pass_view rows = { nullptr, in_block<int32_t>(r.step_d, r.at.lane) + at,
                               in_block<int32_t>(r.step_d, r.at.pos) + at, nullptr };
            cu_decode(r.st, c->cfg.kv_dtype, hd,
                      { r.kv, rows, layer, c->g, r.n_head, z.n_split, r.width, c->d.attn_scale,
                        r.qkv + (size_t)at * r.width, r.part_o, r.part_ml, r.logit,
                        r.att32 + (size_t)at * r.n_head * hd,
                        in_block<dec_rule>(r.step_d, r.at.rule) + (size_t)layer * c->D + at,
                        in_block<int32_t>(r.step_d, r.at.pin), r.ring, c->cfg.kv_dtype },
                      std::min(chunk, z.rows - at));
        }
    }
}

// next: leave the next layer's norm in in32.
static void run_out_mlp(cuda *c, int layer, const step_size &z, bool next)
{
    int dm = c->d.d_model;
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_qmv_share(c, r, r.layer[layer].wo_own, c->out_part, r.att32 + r.own0 * c->d.head_dim, r.n_head * c->d.head_dim, z.rows);
    }
    cu_reduce(c, (size_t)z.rows * dm);
    for (cu_rank &r : c->rank) {
        const cu_layer &l = r.layer[layer];
        cu_use(r);
        cu_add_norm(r.st, state_of(c, r), r.y, l.post_attn_norm, l.ffn_norm, c->d.norm_eps, dm, z.rows, nullptr, r.in32,
                    nullptr);
        cu_qmv(r.st, l.gate, r.in32, dm, z.rows, r.gu, 2 * r.n_ffn);
        cu_qmv(r.st, l.up, r.in32, dm, z.rows, r.gu + r.n_ffn, 2 * r.n_ffn);
        cu_gated_act(r.st, r.gu, z.rows, r.n_ffn, c->d.act == KERN_ACT_GELU_TANH, r.act32, nullptr);
        cu_qmv_share(c, r, l.down, c->ffn_part, r.act32, r.n_ffn, z.rows);
    }
    cu_reduce(c, (size_t)z.rows * dm);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_add_norm(r.st, state_of(c, r), r.y, r.layer[layer].post_ffn_norm,
                    next ? r.layer[layer + 1].attn_norm : nullptr, c->d.norm_eps, dm, z.rows, nullptr,
                    next ? r.in32 : nullptr, nullptr);
    }
}

// Where a rank reads which rows of x get logits, and how their tokens are chosen (rank 0 chooses).
struct choice_at {
    const int32_t *row;
    const smp_row *smp;
    const smp_pen *pen;
};

// Logits of `n` rows of x into each rank's buffer, gathered; the tokens, on their way to the host.
static void run_logits(cuda *c, const float *x, const choice_at at[CU_MAX_TP], int n)
{
    size_t part = (size_t)n * c->vocab_part;
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_add_norm(r.st, cu_state_x(c, r, x), nullptr, nullptr, r.out_norm, c->d.norm_eps, c->d.d_model, n,
                    at[r.index].row, r.in32, nullptr);
        cu_qmv(r.st, r.output, r.in32, c->d.d_model, n, r.logits + r.global * part, c->vocab_part);
    }
    cu_gather(c, n);
    cu_rank &r = c->rank[0];
    if (r.global) // the leader chooses
        return;
    cu_use(r);
    cu_sample(r.st, { r.logits, part, c->d.n_vocab, c->vocab_part, at[0].smp, at[0].pen, r.chosen }, n);
    CU_MUST(cudaMemcpyAsync(c->chosen_host, r.chosen, (size_t)n * 4, cudaMemcpyDeviceToHost, r.st));
}

static void block_send(cuda *c)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        CU_MUST(cudaMemcpyAsync(r.step_d, r.step_h[c->block], r.at.bytes, cudaMemcpyHostToDevice, r.st));
    }
}

static void run_begin(cuda *c)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_kv_apply(r.st, r.kv, in_block<kv_change>(r.step_d, r.at.change), in_block<int32_t>(r.step_d, r.at.n_change),
                    CU_CHANGES / 4);
        cu_kv_clear(r.st, r.kv, in_block<uint32_t>(r.step_d, r.at.clear), in_block<int32_t>(r.step_d, r.at.n_clear), 64);
    }
}

static void run_victims(cuda *c, int rows)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_kv_victims(r.st, r.kv, in_block<int32_t>(r.step_d, r.at.lane), rows, r.victims);
        CU_MUST(cudaMemcpyAsync(r.victims_host, r.victims, (size_t)rows * c->d.n_layer * r.n_kv * 4,
                                cudaMemcpyDeviceToHost, r.st));
    }
}

// The whole step, kernel by kernel: straight into the streams, or into a capture.
static void run_step(cuda *c, const step_size &z)
{
    choice_at at[CU_MAX_TP];
    run_begin(c);
    run_embed(c, z);
    for (int l = 0; l < c->d.n_layer; l++) {
        run_attn_in(c, l, z, l > 0);
        run_attn_decode(c, l, z);
        run_out_mlp(c, l, z, l + 1 < c->d.n_layer);
    }
    for (cu_rank &r : c->rank)
        at[r.index] = { in_block<int32_t>(r.step_d, r.at.row), in_block<smp_row>(r.step_d, r.at.smp),
                        in_block<smp_pen>(r.step_d, r.at.pen) };
    run_logits(c, c->step_x, at, z.rows);
    run_victims(c, z.rows);
}

// Table changes and clears into the block, or ahead of it when they don't fit.
static void block_end(cuda *c)
{
    size_t most = 0;
    for (const cu_rank &r : c->rank)
        most = std::max(most, c->change[r.index].size());
    if (most > CU_CHANGES || c->clear.size() > CU_CLEARS)
        cu_kv_push(c);
    for (cu_rank &r : c->rank) {
        std::vector<kv_change> &ch = c->change[r.index];
        *noted<int32_t>(c, r, r.at.n_change) = (int32_t)ch.size();
        if (!ch.empty())
            memcpy(noted<kv_change>(c, r, r.at.change), ch.data(), ch.size() * sizeof ch[0]);
        *noted<int32_t>(c, r, r.at.n_clear) = (int32_t)c->clear.size();
        if (!c->clear.empty())
            memcpy(noted<uint32_t>(c, r, r.at.clear), c->clear.data(), c->clear.size() * 4);
        ch.clear();
    }
    c->clear.clear();
}

static void wait_all(cuda *c)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_wait(c, r);
        CU_MUST(cudaGetLastError());
    }
}

// Wait for the ranks and take the victims that the step of a block chose.
static void step_end(cuda *c, int block, int rows)
{
    int per = c->d.n_layer;
    wait_all(c);
    for (cu_rank &r : c->rank) {
        const int32_t *lane = in_block<int32_t>(r.step_h[block], r.at.lane);
        for (int i = 0; i < rows; i++)
            for (int l = 0; lane[i] >= 0 && l < per; l++)
                for (int h = 0; h < r.n_kv; h++) {
                    size_t at = cu_kv_at(c, lane[i], l, r.kv0 + h);
                    c->kv.victim[at] = c->s_victim[at] = r.victims_host[((size_t)i * per + l) * r.n_kv + h];
                    if (c->nodes && c->nodes->rank == 0) // nobody else needs it
                        c->nodes->victim[at] = c->kv.victim[at];
                }
    }
}

void cu_step_flush(cuda *c)
{
    cu_collect(c);
    if (c->noted.empty())
        return;
    if (c->ahead)
        cu_fail("a step whose tokens are not known was not dropped before another operation");
    cu_tell_flush(c);
    step_size z = { c->step_rows, std::min((c->step_most + DEC_SPLIT - 1) / DEC_SPLIT, split_most(c)) };
    block_end(c);
    c->n_plain += std::any_of(c->noted.begin(), c->noted.end(), [](const cu_op &o) { return o.kind == CU_ATTN_DECODE; });
    block_send(c);
    run_begin(c);
    for (const cu_op &o : c->noted)
        switch (o.kind) {
        case CU_EMBED:
            run_embed(c, z);
            break;
        case CU_ATTN_IN:
            run_attn_in(c, o.layer, z, false);
            break;
        case CU_ATTN_DECODE:
            run_attn_decode(c, o.layer, z);
            break;
        case CU_OUT_MLP:
            run_out_mlp(c, o.layer, z, false);
            break;
        }
    run_victims(c, z.rows);
    step_end(c, c->block, c->step_rows);
    c->noted.clear();
}

// --- the graph -------------------------------------------------------------------------------------------------

// Rungs: 1 2 4 8 12 16 24 32 48 64 96 ...
static int ladder(int n)
{
    int p = 1;
    while (p < n)
        p <<= 1;
    return p >= 16 && n <= p / 4 * 3 ? p / 4 * 3 : p;
}

static int pow2(int n)
{
    int p = 1;
    while (p < n)
        p <<= 1;
    return p;
}

static bool whole_step(const cuda *c)
{
    const int kind[] = { CU_ATTN_IN, CU_ATTN_DECODE, CU_OUT_MLP };
    if (c->noted.size() != 1 + 3 * (size_t)c->d.n_layer || c->noted[0].kind != CU_EMBED)
        return false;
    for (int i = 0; i < 3 * c->d.n_layer; i++)
        if (c->noted[1 + i].kind != kind[i % 3] || c->noted[1 + i].layer != i / 3)
            return false;
    return true;
}

// Rows from x to the end of its state: a rung must not run past it.
static int rows_left(const cuda *c, const float *x)
{
    for (const cu_state &s : c->states)
        if (x >= s.x[0] && x < s.x[0] + (size_t)s.n_row * c->d.d_model)
            return s.n_row - (int)((x - s.x[0]) / c->d.d_model);
    return 0;
}

static void graph_capture(cuda *c, const step_size &z)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        CU_MUST(cudaStreamBeginCapture(r.st, cudaStreamCaptureModeRelaxed));
    }
    try {
        run_step(c, z);
    } catch (...) { // no stream stays in a capture
        for (cu_rank &r : c->rank) {
            cudaGraph_t g = nullptr;
            cudaSetDevice(r.device);
            if (cudaStreamEndCapture(r.st, &g) == cudaSuccess && g)
                cudaGraphDestroy(g);
        }
        throw;
    }
    for (cu_rank &r : c->rank) {
        cudaGraph_t g;
        cudaGraphExec_t e;
        cu_use(r);
        CU_MUST(cudaStreamEndCapture(r.st, &g));
        CU_MUST(cudaGraphInstantiate(&e, g, 0));
        CU_MUST(cudaGraphDestroy(g));
        r.graphs[{ z.rows, z.n_split, c->step_x }] = e;
    }
}

// Returns the rung: rows that were run.
static int graph_run(cuda *c, int n)
{
    step_size z = { std::min(std::min(ladder(n), c->D), rows_left(c, c->step_x)),
                    std::min(pow2((c->step_most + DEC_SPLIT - 1) / DEC_SPLIT), split_most(c)) };
    block_end(c);
    if (c->rank[0].graphs.find({ z.rows, z.n_split, c->step_x }) == c->rank[0].graphs.end())
        graph_capture(c, z);
    block_send(c);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        CU_MUST(cudaGraphLaunch(r.graphs[{ z.rows, z.n_split, c->step_x }], r.st));
    }
    c->n_graph++;
    return z.rows;
}

// One row's settings for the device.
static void smp_fill(const ops_sample &s, smp_row *row, smp_pen *pen)
{
    *row = { !s.host, s.top_k, s.n_pen, s.temperature, s.top_p, s.min_p, s.repeat, s.presence, s.frequency, s.u };
    for (int i = 0; i < s.n_pen; i++)
        pen[i] = { s.pen[i].token, s.pen[i].count };
}

// Put the logits that the host wants, of a run of `rows` rows, on their way.
static void logits_send(cuda *c, const ops_sample *s, int n, int rows)
{
    cu_rank &r = c->rank[0];
    cu_use(r);
    for (int i = 0; i < n; i++)
        for (int k = 0; s[i].host && k < c->world; k++) {
            int first = k * c->vocab_part, size = std::min(c->vocab_part, c->d.n_vocab - first);
            CU_MUST(cudaMemcpyAsync(c->logits_host + (size_t)i * c->d.n_vocab + first,
                                    r.logits + ((size_t)k * rows + i) * c->vocab_part, (size_t)size * 4,
                                    cudaMemcpyDeviceToHost, r.st));
        }
}

static void choice_out(const cuda *c, int n, ops_sample *s, float *logits)
{
    for (int i = 0; c->rank[0].global == 0 && i < n; i++) {
        s[i].token = c->chosen_host[i];
        if (s[i].host)
            memcpy(logits + (size_t)i * c->d.n_vocab, c->logits_host + (size_t)i * c->d.n_vocab, (size_t)c->d.n_vocab * 4);
    }
}

static void choose_eager(cuda *c, const float *x, const int32_t *row, int n, ops_sample *s, float *logits)
{
    choice_at at[CU_MAX_TP];
    size_t smp = ((size_t)n * 4 + 15) & ~(size_t)15, pen = smp + n * sizeof(smp_row), end = pen + n * SMP_PENS * sizeof(smp_pen);
    for (cu_rank &r : c->rank) {
        cu_use(r);
        cu_stage &st = cu_stage_take(c, r);
        memcpy(st.host, row, (size_t)n * 4);
        for (int i = 0; i < n; i++)
            smp_fill(s[i], in_block<smp_row>(st.host, smp) + i, in_block<smp_pen>(st.host, pen) + i * SMP_PENS);
        cu_stage_send(r, st, end);
        at[r.index] = { reinterpret_cast<const int32_t *>(r.meta), in_block<smp_row>(r.meta, smp),
                        in_block<smp_pen>(r.meta, pen) };
    }
    run_logits(c, x, at, n);
    logits_send(c, s, n, n);
    c->out = { n, 0, 0, s, logits };
}

void cu_collect(void *be)
{
    cuda *c = static_cast<cuda *>(be);
    auto o = c->out;
    if (o.n == 0)
        return;
    c->out.n = 0;
    if (o.rows)
        step_end(c, o.block, o.rows);
    else
        wait_all(c);
    choice_out(c, o.n, o.s, o.logits);
}

void cu_collect_op(void *be)
{
    cu_tell_collect(static_cast<cuda *>(be));
    cu_collect(be);
}

void cu_choose(void *be, const float *x, const int32_t *row, int n, ops_sample *s, float *logits)
{
    cuda *c = static_cast<cuda *>(be);
    cu_collect(c);
    cu_tell_choose(c, x, row, n);
    if (n <= c->step_rows && x == c->step_x && whole_step(c)) {
        for (cu_rank &r : c->rank) {
            memcpy(noted<int32_t>(c, r, r.at.row), row, (size_t)n * 4);
            for (int i = 0; i < c->D; i++)
                if (i < n)
                    smp_fill(s[i], noted<smp_row>(c, r, r.at.smp) + i,
                             noted<smp_pen>(c, r, r.at.pen) + i * SMP_PENS);
                else
                    noted<smp_row>(c, r, r.at.smp)[i].on = 0;
        }
        int rows = graph_run(c, c->step_rows);
        logits_send(c, s, n, rows);
        c->out = { n, c->step_rows, c->block, s, logits };
        c->noted.clear();
        c->block ^= 1;
        return;
    }
    cu_step_flush(c);
    for (int i = 0; i < n; i += c->D) {
        cu_collect(c);
        choose_eager(c, x, row + i, std::min(c->D, n - i), s + i, logits + (size_t)i * c->d.n_vocab);
    }
}

void cu_logits(void *be, const float *x, const int32_t *row, int n, float *logits)
{
    std::vector<ops_sample> s((size_t)n);
    for (ops_sample &one : s)
        one.host = true;
    cu_choose(be, x, row, n, s.data(), logits);
    cu_collect_op(be);
}
