/* ops.h - the operation table: everything the engine asks of a backend.
 *
 * A backend (cpu, cuda, sim) fills one `struct ops`. The engine (engine/prefill.c, engine/decode.c) calls
 * these in order and knows nothing of ISAs, streams or devices; a backend knows tensors, pages, slots and
 * LANES (rows of the KV state arrays), never sequences or policies by name.
 *
 * Threads: every function is called from the engine thread only. A backend may use its own workers inside.
 * Errors: functions that can fail return 0 / -1 with *err filled. A step op that fails leaves the backend
 * usable; the engine ends the sequences it was for.
 * Determinism: the values computed for a row depend only on that row's inputs and its lane's KV state, never
 * on which other rows are in the pass or how many threads work (fixed reduction orders and split sizes).
 *
 * Shapes are row-major, written [a][b]; n_head = query heads, n_kv = KV heads, g = n_head / n_kv, query head
 * h reads KV head h / g.
 */
#ifndef SKVD_KERNELS_OPS_H
#define SKVD_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/page.h"
#include "protocol/error.h"

/* ---- the model, as numbers and mapped tensors ------------------------------------------------- */

enum kern_act { KERN_ACT_SILU = 0, KERN_ACT_GELU_TANH };
enum kern_rope { KERN_ROPE_INTERLEAVED = 0, /* pairs (2i, 2i+1): llama GGUF files */
                 KERN_ROPE_HALF };          /* pairs (i, i + rot/2): qwen2, qwen3, gemma3 */

struct ops_dims {
    int n_layer, d_model, n_head, n_kv, head_dim, n_ffn, n_vocab;
    int rot_dim;     /* rotated part of a head, even, <= head_dim */
    int max_context; /* positions */
    float norm_eps;
    float attn_scale; /* usually 1 / sqrt(head_dim) */
    float rope_base;
    const float *rope_freqs; /* [rot_dim/2] divisors of the frequencies (Llama 3.1), or NULL */
    enum kern_rope rope;
    enum kern_act act;
    float embed_scale; /* multiplies embeddings (gemma3), else 1 */
};

/* A tensor in the mapped file: rows of `cols` weights in a GGUF block format (kernels/blocks.h). Already
 * checked: data is readable for rows * kern_row_bytes(type, cols). data == NULL: the tensor is absent. */
struct kern_tensor {
    const void *data;
    int type; /* enum kern_gguf_type */
    int64_t rows, cols;
};

struct ops_layer_src {
    struct kern_tensor attn_norm, wq, wk, wv, wo, ffn_norm, w_gate, w_up, w_down;
    struct kern_tensor bq, bk, bv;             /* optional biases, f32 (qwen2) */
    struct kern_tensor q_norm, k_norm;         /* optional per-head norms, f32 [head_dim] (qwen3, gemma3) */
    struct kern_tensor post_attn_norm, post_ffn_norm; /* optional (gemma3) */
};

struct ops_model_src {
    struct ops_dims dims;
    struct kern_tensor embed, out_norm, output; /* output may be the same tensor as embed (tied) */
    const struct ops_layer_src *layer;          /* [n_layer] */
};

/* ---- init --------------------------------------------------------------------------------------- */

struct ops_config {
    int n_threads;                /* CPU worker threads, the caller included; >= 1 */
    const char *isa;              /* NULL: the best this CPU has; else "scalar", "avx2", "avx512" */
    bool compute_f32;             /* exact: f32 activations on the original blocks, f32 KV */
    enum kern_kv_dtype kv_dtype;  /* F32 exactly when compute_f32 */
    int max_lanes;                /* rows of the KV state arrays */
    int max_rows;                 /* rows of the largest pass: >= OPS_TILE and >= decode batch */
    int max_pages;                /* page-table entries per (lane, layer, head) */
    int tp;                       /* cuda: devices that share the model; 0 and 1: one */
    bool tp_exact;                /* cuda: the same bits for any tp; slower */
    const char *device;           /* sim: whose time is counted (kernels/sim/device.c); NULL: its first */
    bool slot_values;             /* sim: a value in each slot, so that tokens depend on what the tables hold */
};

/* A prefill tile has at most this many rows. Part of the numeric contract: scores are summed tile by tile. */
#define OPS_TILE 256

/* Queries that a lane's ring holds at most, per layer and query head (kern_rule.ring). */
#define OPS_RING 16

/* KV state: flat arrays at addresses that stay fixed for the backend's life, owned by the backend, filled by
 * the engine's block manager (host side) before each pass. Index of (lane, layer, head):
 * i = (lane * n_layer + layer) * n_kv + head. On a device backend these are the host mirrors. */
struct ops_kv {
    struct kern_page_layout page;
    uint32_t n_pages;
    int max_pages;
    uint32_t *table; /* [lanes][n_layer][n_kv][max_pages] page ids; entries past the length are undefined */
    int32_t *len;    /* [lanes][n_layer][n_kv] slots in use */
    int32_t *cap;    /* [..] slots at most; INT32_MAX in a full layer. At len == cap the victim is overwritten */
    int32_t *victim; /* [..] slot that the next pair overwrites, chosen by attn_decode / select; -1: none yet */
};

/* ---- one pass: a ragged batch of rows ------------------------------------------------------------ */

/* A run of consecutive rows of one lane. A pass's segments are in the order of their rows; a row that lies in none belongs to a
 * sequence that left: it is nobody's, its pair is stored nowhere and its results mean nothing. */
struct ops_seg {
    int lane;
    int row0, n_row;  /* rows [row0, row0 + n_row) of the pass */
    int pos0;         /* position of the first row; row r has position pos0 + (r - row0), unless */
    const int32_t *pos; /* [n_row] says them, ascending (a prompt that was thinned); NULL: they follow each other */
    int slot0;        /* prefill: slot of the first row's KV in the layer of this pass; row r goes to
                       * slot0 + (r - row0) in every head, and sees exactly the slots <= its own. (Equal lengths
                       * over the heads are NOT assumed: see ops_seg_head_slot0.) decode: unused. */
    const int32_t *head_slot0; /* [n_kv] overrides slot0 per head (a continued sparse session), or NULL */
    int score_from;   /* prefill: first row (index inside the pass) whose attention counts for the score;
                       * >= row0 + n_row: none. */
};

static inline int32_t ops_seg_pos(const struct ops_seg *g, int row)
{
    return g->pos != NULL ? g->pos[row - g->row0] : g->pos0 + (row - g->row0);
}

struct ops_pass {
    int n_row, n_seg;
    const int32_t *token;      /* [n_row], for embed only; NULL: not known yet (ops.ahead) */
    const struct ops_seg *seg; /* [n_seg] */
};

/* ---- phase 3: rules as numbers (engine/policy_*.c make them) -------------------------------------- */

enum kern_pool_kind { KERN_POOL_AVG = 0, KERN_POOL_MAX };

struct kern_range {
    int32_t from, to; /* positions [from, to) */
};

/* How one layer of one lane is sparsified. Scores are per KV head: mean over the g query heads, taken
 * before pooling. */
struct kern_rule {
    int32_t budget;  /* slots a head keeps (mean over the heads where they differ); 0: full, nothing is evicted */
    int32_t sink;    /* the first positions, never evicted */
    int32_t recent;  /* the last positions (the newest included), never evicted */
    const struct kern_range *pin; /* more positions that are never evicted, ascending; owned by the caller */
    int32_t n_pin;
    /* prefill */
    int32_t pool;    /* odd width of the smoothing over neighbours, 1: none */
    enum kern_pool_kind pool_kind; /* AVG: zero padding, divided by the width. MAX: outside ignored */
    int32_t pool_shift; /* the window of slot i is centred at i - pool_shift: a score reaches further ahead than back */
    int32_t wide, wide_shift; /* odd width > 1: a second smoothing, by which the rest of the budget goes; 0: none */
    float narrow;             /* with `wide`: share of the budget that goes by the first smoothing */
    int32_t pool_from, pool_to; /* slot range that is pooled and pooled over: [pool_from, pool_to) */
    bool use_score;  /* false: no score, the oldest go (streaming) */
    bool by_value;   /* CriticalKV: the second half of the budget goes by (score + value_eps) * |V| norm */
    float value_eps;
    float head_floor; /* share of the budget that each head keeps whatever the others' scores (Ada-KV); 1: equal, as in all policies.
                         With tp, heads of one device share */
    /* decode, ring == 0: score = decay * score + weight * p at every step.
     * ring > 0: the step's queries go to place ring_at of the lane's ring of that many instead, and where `burst` is set the
     * scores follow from all of them, once: score = decay * score + weight * sum over the ring of the probabilities that each query
     * had in its own step. A burst needs a ring that this lane filled since its prefill. */
    float decay, weight;
    int32_t ring, ring_at; /* ring <= OPS_RING, ring_at < ring */
    bool burst;
};

/* How a row's next token is chosen, where the backend does it (engine/sampler.h: the rules and their order). */
#define OPS_SAMPLE_PENS 64
struct ops_sample {
    bool host;           /* in: the row's logits are wanted instead */
    int top_k;           /* 0: all */
    float temperature, top_p, min_p, repeat, presence, frequency;
    double u;            /* the random number of a draw, [0, 1) */
    int n_pen;
    struct {
        int32_t token, count;
    } pen[OPS_SAMPLE_PENS]; /* the last tokens, each once, and how often it is there */
    int32_t token;       /* out; -1: no number among the logits */
};

/* ---- the table ------------------------------------------------------------------------------------ */

struct ops {
    const char *name; /* "cpu", "cuda", "sim" */

    /* Place weights and workspace. `src` and the mapping behind it must outlive the backend when
     * cfg->compute_f32; otherwise the backend may copy (repack) what it needs, and says in
     * resident_bytes what it keeps. Returns the backend, or NULL with *err. */
    void *(*open)(const struct ops_config *cfg, const struct ops_model_src *src, struct skv_error *err);
    void (*close)(void *be);

    /* Bytes of weights (own copies) and of workspace that the backend holds; one line on what was chosen. */
    void (*info)(void *be, size_t *weight_bytes, size_t *work_bytes, char *text, size_t text_size);

    /* Phase 1: take the pool. Once, after open. Pages start zeroed. NULL with *err when there is no memory. */
    struct ops_kv *(*kv_init)(void *be, uint32_t n_pages, struct skv_error *err);
    /* Zero a page's K, V and scores before it enters a table (another uid's text may be in it). */
    void (*page_clear)(void *be, const uint32_t *pages, int n);
    /* Copy out positions and scores of a (lane, layer, head)'s slots [0, len): [len] each. */
    void (*kv_read)(void *be, int lane, int layer, int head, int32_t *pos, float *score);

    /* Hidden states of a prefill group, f32 [n_row][d_model] in backend memory. */
    float *(*state_new)(void *be, int n_row, struct skv_error *err);
    void (*state_free)(void *be, float *state);
    /* Keep only rows row[0] < row[1] < ... of a state: they move to its first n rows. state: the address that state_new gave. */
    void (*state_thin)(void *be, float *state, const int32_t *row, int n);

    /* x[r] = embedding of pass->token[r]. x: [n_row][d_model]. */
    void (*embed)(void *be, const struct ops_pass *pass, float *x);

    /* First half of a layer: RMSNorm, Q K V products, biases, per-head norms, RoPE; K and V go to their
     * slots (prefill: seg->slot0; decode: slot[r * n_kv + head], set by step-prepare, -1 meaning the lane's
     * `victim`), with position and score 0. Q stays inside the backend for the attention that follows. */
    void (*attn_in)(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot);

    /* Prefill attention of the pass's rows over their lanes' slots in `layer` (causal by slot index).
     * Rows >= seg->score_from also add their probabilities to the lane's score row (pass 2 of the design):
     * score[head][slot] += mean over the group of A[row, slot]. Output stays inside the backend. */
    void (*attn_prefill)(void *be, int layer, const struct ops_pass *pass);

    /* Decode attention: one row a segment, over all slots in use. With rule[i] (per segment) applied:
     * scores updated (at every step, or in bursts: kern_rule.ring), then the next victim of each head is chosen (lowest score among slots whose position
     * is outside sink, recent and pins; ties: the lowest position) when len == cap. */
    void (*attn_decode)(void *be, int layer, const struct ops_pass *pass, const struct kern_rule *rule);

    /* Second half: output projection, residual into x, RMSNorm, gated MLP, residual into x. */
    void (*attn_out_mlp)(void *be, int layer, const struct ops_pass *pass, float *x);

    /* Start a score row for a lane (zeroed f32 [n_kv][max slots]) before the first tile of a layer. */
    void (*score_begin)(void *be, int lane, int n_slot);

    /* Phase 3, prefill: choose what each head of (lane, layer) keeps out of its len slots, gather it to the front
     * of its pages (ascending positions) with the unpooled scores, set len, cap and victim. The caller frees
     * the pages that are past the new length. kept_mass [n_kv], may be NULL: share of the score that the kept
     * slots hold. `n_query`: rows that were summed (for normalising). */
    void (*select)(void *be, int lane, int layer, const struct kern_rule *rule, int n_query, float *kept_mass);

    /* The current score row of `lane` (after score_begin .. attn_prefill): [n_kv][n_slot], copied out. Tests. */
    void (*score_read)(void *be, int lane, int n_slot, float *out);

    /* logits[i] = output * RMSNorm(x[row[i]]), f32 [n][n_vocab] in host memory. */
    void (*logits)(void *be, const float *x, const int32_t *row, int n, float *logits);

    /* Run fn(arg, i) for i in [0, n) on the backend's host workers (sampling). */
    void (*host_for)(void *be, int n, void (*fn)(void *arg, int i), void *arg);

    /* A clock of the backend's own, in microseconds; any thread. NULL: time is the system's. */
    int64_t (*now_us)(void *be);
    /* Time in which nothing was computed passes on that clock. NULL without one. */
    void (*idle)(void *be, int64_t us);

    /* Bytes that the pool may take of the backend's own memory, its overhead already off; NULL: host memory, which the
     * engine measures. */
    size_t (*pool_room)(void *be);

    /* As logits, but the backend chooses the tokens, and only the logits of the rows with s[i].host come back: logits[i]. A draw
     * takes the candidates by falling probability (lower token first), so it differs from the host's draw of the same u. NULL:
     * the engine chooses from logits. */
    void (*sample)(void *be, const float *x, const int32_t *row, int n, struct ops_sample *s, float *logits);
    /* Where it is there, sample only gives the device its work: s and logits, which stay where they are, are filled when this
     * returns. Until then they are the backend's, and of its operations only page_clear is called, and `ahead`'s. NULL: sample
     * fills them. */
    void (*collect)(void *be);
    /* Where it is there, the next step's operations, from an embed without tokens to the last attn_out_mlp, may be called before
     * collect: the backend notes them. Of all others only page_clear and collect come between them and this, with kv->len as those
     * operations saw it: token [n_row], the step is what sample goes on with; or NULL, it is as if they had not been called. NULL:
     * a step's operations are called once its tokens are known. */
    void (*ahead)(void *be, const int32_t *token);

    /* Why nothing can be computed any more (a device's errors stay), or NULL while all is well; valid until close. From then
     * on every operation but this and close does nothing, and what it should have filled is undefined. The engine asks before
     * it believes a pass's results. NULL: the backend can't fail in a pass. */
    const char *(*failed)(void *be);
    /* Decode steps that one replayed graph ran, and those launched kernel by kernel. NULL: there are no graphs. */
    void (*steps)(void *be, int64_t *graph, int64_t *plain);

    /* Where several processes compute as one (the environment of torchrun or mpirun): this one's place. 0: it leads, or is alone,
     * and has an engine. NULL: never several. */
    int (*process_rank)(void);
    /* A process that doesn't lead, after open: do what the leader asks for until it ends. 0: it has ended in order; -1: it, or the
     * device, is lost. */
    int (*follow)(void *be, struct skv_error *err);
};

extern const struct ops ops_cpu, ops_sim;
/* Only in programs that kernels/cuda's objects are linked into (skvd, where it was configured): NULL elsewhere. */
extern const struct ops ops_cuda __attribute__((weak));
/* Is there a device that ops_cuda can run on? If not, why gets a sentence. */
bool ops_cuda_usable(char *why, size_t size) __attribute__((weak));

/* The backend of a name, or NULL. "auto" gives the best that this build and machine have. */
const struct ops *ops_find(const char *name);

#endif
