// weights.cu - weights on the device: GGUF blocks as they are in the file, cut by rank; one layer at a time as bf16
// for prefill.
#include <cstring>

#include "kernels/cuda/backend.h"

// Bytes [rows row0 .. row0 + n][cols col0 .. col0 + n_col) of a tensor; columns start and end at blocks.
static int upload(cu_rank &r, const kern_tensor &t, int64_t row0, int64_t n, int64_t col0, int64_t n_col, cu_weight *w,
                  skv_error *err)
{
    int block = kern_type_block(t.type);
    if (!cu_type_ok(t.type))
        return skv_fail(err, SKV_BAD_MODEL, "the CUDA backend has no kernels for %s weights", kern_type_name(t.type));
    if (t.cols % 32 || col0 % block || n_col % block || n_col % 32)
        return skv_fail(err, SKV_BAD_MODEL,
                        "a weight of %lld columns of %s can't be cut at columns %lld and %lld for tensor parallel",
                        (long long)t.cols, kern_type_name(t.type), (long long)col0, (long long)(col0 + n_col));
    size_t from = kern_row_bytes(t.type, t.cols), to = kern_row_bytes(t.type, n_col), skip = 0;
    if (col0)
        skip = kern_row_bytes(t.type, col0);
    const unsigned char *src = static_cast<const unsigned char *>(t.data) + (size_t)row0 * from + skip;
    unsigned char *dst = static_cast<unsigned char *>(cu_alloc(r, to * (size_t)n, true, err));
    if (!dst)
        return -1;
    cudaError_t e = cudaSuccess;
    if (from == to) {
        e = cudaMemcpy(dst, src, to * (size_t)n, cudaMemcpyHostToDevice);
    } else {
        std::vector<unsigned char> cut(to * (size_t)n);
        for (int64_t i = 0; i < n; i++)
            memcpy(&cut[(size_t)i * to], src + (size_t)i * from, to);
        e = cudaMemcpy(dst, cut.data(), cut.size(), cudaMemcpyHostToDevice);
    }
    if (e != cudaSuccess)
        return skv_fail(err, SKV_INTERNAL, "copying weights to device %d: %s", r.device, cudaGetErrorString(e));
    *w = { dst, t.type, (int)n, (int)n_col, to };
    return 0;
}

// Columns [col0, col0 + n_col) of a weight that is on the device already.
static int part_of(const cu_weight &w, int col0, int n_col, cu_weight *out, skv_error *err)
{
    int block = kern_type_block(w.type);
    if (col0 % block || n_col % block || n_col % 32)
        return skv_fail(err, SKV_BAD_MODEL, "ranks that share a KV head can't cut %s weights at columns %d and %d",
                        kern_type_name(w.type), col0, col0 + n_col);
    *out = { w.data + (col0 ? kern_row_bytes(w.type, col0) : 0), w.type, w.rows, n_col, w.row_bytes };
    return 0;
}

// Numbers [from, from + n) of a vector as f32; an absent tensor gives NULL.
static int vector_up(cu_rank &r, const kern_tensor &t, int64_t from, int64_t n, float **out, skv_error *err)
{
    *out = nullptr;
    if (!t.data)
        return 0;
    std::vector<float> v((size_t)(t.rows * t.cols));
    kern_dequant(t.type, t.data, v.data(), (int64_t)v.size());
    *out = static_cast<float *>(cu_alloc(r, (size_t)n * sizeof(float), true, err));
    if (!*out)
        return -1;
    cudaError_t e = cudaMemcpy(*out, v.data() + from, (size_t)n * sizeof(float), cudaMemcpyHostToDevice);
    if (e != cudaSuccess)
        return skv_fail(err, SKV_INTERNAL, "copying weights to device %d: %s", r.device, cudaGetErrorString(e));
    return 0;
}

static int layer_up(const cuda *c, cu_rank &r, const ops_layer_src &s, cu_layer *l, skv_error *err)
{
    int hd = c->d.head_dim, dm = c->d.d_model, q0 = r.kv0 * c->g * hd, nq = r.n_head * hd;
    int k0 = r.kv0 * hd, nk = r.n_kv * hd;
    if (upload(r, s.wq, q0, nq, 0, dm, &l->wq, err) || upload(r, s.wk, k0, nk, 0, dm, &l->wk, err) ||
        upload(r, s.wv, k0, nk, 0, dm, &l->wv, err) || upload(r, s.wo, 0, dm, q0, nq, &l->wo, err) ||
        part_of(l->wo, r.own0 * hd, r.n_own * hd, &l->wo_own, err) ||
        upload(r, s.w_gate, r.ffn0, r.n_ffn, 0, dm, &l->gate, err) ||
        upload(r, s.w_up, r.ffn0, r.n_ffn, 0, dm, &l->up, err) ||
        upload(r, s.w_down, 0, dm, r.ffn0, r.n_ffn, &l->down, err))
        return -1;
    return vector_up(r, s.attn_norm, 0, dm, &l->attn_norm, err) || vector_up(r, s.ffn_norm, 0, dm, &l->ffn_norm, err) ||
                   vector_up(r, s.bq, q0, nq, &l->bq, err) || vector_up(r, s.bk, k0, nk, &l->bk, err) ||
                   vector_up(r, s.bv, k0, nk, &l->bv, err) || vector_up(r, s.q_norm, 0, hd, &l->q_norm, err) ||
                   vector_up(r, s.k_norm, 0, hd, &l->k_norm, err) ||
                   vector_up(r, s.post_attn_norm, 0, dm, &l->post_attn_norm, err) ||
                   vector_up(r, s.post_ffn_norm, 0, dm, &l->post_ffn_norm, err)
               ? -1
               : 0;
}

// Radians a position of each rotated pair, the model's own divisors applied.
static int freqs_up(const cuda *c, cu_rank &r, skv_error *err)
{
    int n = c->d.rot_dim / 2;
    std::vector<float> f((size_t)(n ? n : 1), 0.0f);
    for (int i = 0; i < n; i++) {
        double v = pow((double)c->d.rope_base, -2.0 * i / c->d.rot_dim);
        f[i] = (float)(c->d.rope_freqs ? v / (double)c->d.rope_freqs[i] : v);
    }
    r.inv_freq = static_cast<float *>(cu_alloc(r, f.size() * sizeof(float), true, err));
    if (!r.inv_freq)
        return -1;
    cudaError_t e = cudaMemcpy(r.inv_freq, f.data(), f.size() * sizeof(float), cudaMemcpyHostToDevice);
    return e == cudaSuccess ? 0 : skv_fail(err, SKV_INTERNAL, "copying to device %d failed", r.device);
}

// Buffers for one layer in bf16.
static int buffers16(const cuda *c, cu_rank &r, skv_error *err)
{
    size_t dm = c->d.d_model, nq = (size_t)r.n_head * c->d.head_dim;
    const struct {
        unsigned short **p;
        size_t n;
    } want[] = { { &r.qkv16, r.width * dm }, { &r.o16, dm * nq }, { &r.gu16, 2 * (size_t)r.n_ffn * dm },
                 { &r.down16, dm * r.n_ffn } };
    r.layer16 = -1;
    for (const auto &w : want)
        if (!(*w.p = static_cast<unsigned short *>(cu_alloc(r, w.n * 2, false, err))))
            return -1;
    return 0;
}

int cu_weights_load(cuda *c, const ops_model_src *src, skv_error *err)
{
    for (cu_rank &r : c->rank) {
        cu_use(r);
        r.layer.resize(c->d.n_layer);
        for (int i = 0; i < c->d.n_layer; i++)
            if (layer_up(c, r, src->layer[i], &r.layer[i], err))
                return -1;
        // A tied output is the same tensor: the rank's part of the vocabulary is a run of its rows.
        if (upload(r, src->embed, 0, c->d.n_vocab, 0, c->d.d_model, &r.embed, err))
            return -1;
        if (src->output.data == src->embed.data) {
            r.output = r.embed;
            r.output.data += (size_t)r.vocab0 * r.embed.row_bytes;
            r.output.rows = r.n_vocab;
        } else if (upload(r, src->output, r.vocab0, r.n_vocab, 0, c->d.d_model, &r.output, err)) {
            return -1;
        }
        if (vector_up(r, src->out_norm, 0, c->d.d_model, &r.out_norm, err) || freqs_up(c, r, err) ||
            buffers16(c, r, err))
            return -1;
    }
    return 0;
}

void cu_layer16(cuda *c, cu_rank &r, int layer)
{
    if (r.layer16 == layer)
        return;
    const cu_layer &l = r.layer[layer];
    size_t dm = c->d.d_model;
    unsigned short *k = r.qkv16 + (size_t)l.wq.rows * dm;
    cu_dequant_bf16(r.st, l.wq, 0, l.wq.rows, r.qkv16);
    cu_dequant_bf16(r.st, l.wk, 0, l.wk.rows, k);
    cu_dequant_bf16(r.st, l.wv, 0, l.wv.rows, k + (size_t)l.wk.rows * dm);
    cu_dequant_bf16(r.st, l.wo, 0, l.wo.rows, r.o16);
    cu_dequant_bf16(r.st, l.gate, 0, l.gate.rows, r.gu16);
    cu_dequant_bf16(r.st, l.up, 0, l.up.rows, r.gu16 + (size_t)r.n_ffn * dm);
    cu_dequant_bf16(r.st, l.down, 0, l.down.rows, r.down16);
    r.layer16 = layer;
}
