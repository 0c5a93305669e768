/* sim_cost.c - the cost model: what each operation of the table reads and computes, and from it its time.
 *
 *   t = max(bytes / bandwidth, products / rate(rows) + attention / attention rate) + row bytes / row bandwidth + kernels * launch
 *
 * Bytes: weights by their GGUF type, K and V of the slots in use (scores and positions where they are read). Products: 2 flops a
 * weight and row; rate(rows) = rate * rows / (rows + half). Attention: 4 * head_dim flops for each pair of query and slot a
 * head, 2 * head_dim more where a score is taken.
 */
#include "kernels/blocks.h"
#include "kernels/sim/sim.h"

struct work {
    double bytes, products, rows; /* products: flops of matrix products with `rows` rows */
    double attention, decode;     /* flops of attention in prefill, in decode */
    double row_bytes;             /* activations that passes over rows read and write */
    int kernels;
    bool graph;
};

static void spend(struct sim *s, const struct work *w)
{
    const struct sim_device *d = s->dev;
    double memory = w->bytes / d->mem_bw, math = w->attention / d->attn_flops + w->decode / d->decode_flops;

    if (w->products > 0)
        math += w->products / (d->mm_flops * w->rows / (w->rows + d->mm_half_rows));
    double t = (memory > math ? memory : math) + w->row_bytes / d->row_bw;
    t += w->kernels * (w->graph ? d->graph_us : d->launch_us) * 1e-6;
    atomic_fetch_add_explicit(&s->ns, (int64_t)(t * 1e9 + 0.5), memory_order_relaxed);
}

static double tensor_bytes(const struct kern_tensor *t)
{
    return t->data != NULL ? (double)kern_row_bytes(t->type, t->cols) * (double)t->rows : 0;
}

static double tensor_flops(const struct kern_tensor *t)
{
    return 2 * (double)t->rows * (double)t->cols;
}

double sim_weight_bytes(const struct ops_model_src *src)
{
    double sum = tensor_bytes(&src->embed) + (src->output.data != src->embed.data ? tensor_bytes(&src->output) : 0);

    for (int l = 0; l < src->dims.n_layer; l++) {
        const struct ops_layer_src *y = &src->layer[l];
        sum += tensor_bytes(&y->wq) + tensor_bytes(&y->wk) + tensor_bytes(&y->wv) + tensor_bytes(&y->wo);
        sum += tensor_bytes(&y->w_gate) + tensor_bytes(&y->w_up) + tensor_bytes(&y->w_down);
    }
    return sum;
}

void sim_cost_rows(struct sim *s, int n_row)
{
    spend(s, &(struct work){ .row_bytes = 8.0 * n_row * s->d.d_model, .kernels = 1 });
}

/* Norm; Q, K and V; RoPE and the write to slots. */
void sim_cost_attn_in(struct sim *s, int layer, int n_row)
{
    const struct ops_layer_src *y = &s->src->layer[layer];
    double width = (s->d.n_head + 2.0 * s->d.n_kv) * s->d.head_dim;

    spend(s, &(struct work){
        .bytes = tensor_bytes(&y->wq) + tensor_bytes(&y->wk) + tensor_bytes(&y->wv),
        .products = n_row * (tensor_flops(&y->wq) + tensor_flops(&y->wk) + tensor_flops(&y->wv)),
        .rows = n_row, .row_bytes = n_row * (8.0 * s->d.d_model + 8 * width), .kernels = 3, .graph = s->decode });
}

void sim_cost_attn_prefill(struct sim *s, int layer, const struct ops_pass *pass)
{
    double pairs = 0, scored = 0, slots = 0; /* pairs of query head and slot; slots read, all KV heads */
    bool score = false;

    (void)layer;
    for (int i = 0; i < pass->n_seg; i++) {
        const struct ops_seg *seg = &pass->seg[i];
        for (int h = 0; h < s->d.n_kv; h++) {
            double at = seg->head_slot0 != NULL ? seg->head_slot0[h] : seg->slot0, n = seg->n_row;
            double from = seg->score_from > seg->row0 ? seg->score_from - seg->row0 : 0;
            pairs += s->g * (n * at + n * (n + 1) / 2);
            slots += at + n;
            if (from < n) {
                score = true;
                scored += s->g * ((n - from) * at + (n * (n + 1) - from * (from + 1)) / 2);
            }
        }
    }
    spend(s, &(struct work){ .bytes = slots * (double)kern_page_slot_bytes(&s->kv.page),
                             .attention = (4 * pairs + 2 * scored) * s->d.head_dim, .kernels = score ? 2 : 1 });
}

/* Attention and its merge; scores and the victim's choice read a score and a position a slot; a burst passes a ring of queries over the
 * keys. */
void sim_cost_attn_decode(struct sim *s, int layer, const struct ops_pass *pass, const struct kern_rule *rule)
{
    double slots = 0, seen = 0, pairs = 0;

    for (int i = 0; i < pass->n_seg; i++)
        for (int h = 0; h < s->d.n_kv; h++) {
            size_t at = sim_index(s, pass->seg[i].lane, layer, h);
            slots += s->kv.len[at];
            if (rule != NULL && rule[i].burst)
                pairs += (double)rule[i].ring * s->kv.len[at];
            if (rule != NULL && rule[i].budget > 0 && s->kv.len[at] >= s->kv.cap[at])
                seen += s->kv.len[at];
        }
    spend(s, &(struct work){ .bytes = slots * (double)kern_page_slot_bytes(&s->kv.page) + 8 * seen,
                             .decode = (4 * slots + 2 * pairs) * s->g * s->d.head_dim, .kernels = 2 + (seen > 0), .graph = true });
}

/* Output projection and residual; norm; gate and up; activation; down and residual. */
void sim_cost_attn_out_mlp(struct sim *s, int layer, int n_row)
{
    const struct ops_layer_src *y = &s->src->layer[layer];

    spend(s, &(struct work){
        .bytes = tensor_bytes(&y->wo) + tensor_bytes(&y->w_gate) + tensor_bytes(&y->w_up) + tensor_bytes(&y->w_down),
        .products = n_row * (tensor_flops(&y->wo) + tensor_flops(&y->w_gate) + tensor_flops(&y->w_up) + tensor_flops(&y->w_down)),
        .rows = n_row, .row_bytes = n_row * (24.0 * s->d.d_model + 12.0 * s->d.n_ffn), .kernels = 5,
        .graph = s->decode });
}

/* Pooling, keys and the radix passes go over each slot's score a few times; value norms are a product with Wo; kept pairs move. */
void sim_cost_select(struct sim *s, int lane, int layer, const struct kern_rule *rule)
{
    double slots = 0, kept = 0;

    for (int h = 0; h < s->d.n_kv; h++) {
        int len = s->kv.len[sim_index(s, lane, layer, h)];
        slots += len;
        kept += len < rule->budget ? len : rule->budget;
    }
    struct work w = { .bytes = 2 * kept * (double)kern_page_slot_bytes(&s->kv.page), .row_bytes = 100 * slots, .kernels = 3 };
    if (rule->use_score && rule->by_value && kept < slots) {
        w.rows = slots / s->d.n_kv;
        w.products = 2 * slots * s->g * s->d.head_dim * s->d.d_model;
        w.bytes += slots * (double)kern_page_slot_bytes(&s->kv.page) / 2;
    }
    spend(s, &w);
}

void sim_cost_logits(struct sim *s, int n)
{
    spend(s, &(struct work){ .bytes = tensor_bytes(&s->src->output), .products = n * tensor_flops(&s->src->output), .rows = n,
                             .kernels = 2, .graph = s->decode });
}

void sim_cost_host(struct sim *s, int n)
{
    double us = s->dev->step_us + n * s->dev->token_us;

    atomic_fetch_add_explicit(&s->ns, (int64_t)(us * 1e3), memory_order_relaxed);
}
