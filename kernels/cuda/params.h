// params.h - what the launchers pass to the kernels: one struct by value each.
#ifndef SKVD_KERNELS_CUDA_PARAMS_H
#define SKVD_KERNELS_CUDA_PARAMS_H

#include "kernels/cuda/view.cuh"

struct rope_params {
    int n_head, n_kv, head_dim, rot_dim;
    int half;              // pairs (i, i + rot/2) instead of (2i, 2i + 1)
    float eps;
    const float *inv_freq; // [rot_dim / 2] radians a position
    const float *bias_q, *bias_k, *bias_v; // [heads][head_dim] or NULL
    const float *q_norm, *k_norm;          // [head_dim] or NULL
};

// A segment as the kernels see it; arrays on the device.
struct seg_view {
    const int32_t *lane, *row0, *n_row, *score_from; // [n_seg]; score_from: first scored row of the pass
};

struct fa_params {
    kv_view kv;
    pass_view pass;
    seg_view seg;
    int layer, g, n_head, lse_rows;
    float scale;
    const unsigned short *q; // [n_row][n_head][HD] bf16
    unsigned short *out;     // [n_row][n_head][HD] bf16
    float *lse;              // [n_head][lse_rows]: m + ln l of the scored rows
};

struct score_params {
    kv_view kv;
    pass_view pass;
    seg_view seg;
    int layer, g, n_head, lse_rows;
    float scale;
    const unsigned short *q;
    const float *lse;
    float *const *row;    // [lanes]: the lane's score row [n_kv][stride[lane]]
    const int32_t *stride; // [lanes]
};

#define DEC_SPLIT 256 // slots of a split of decode attention

#define DEC_VICTIM 1 // the next victim is chosen once the head is at its capacity
#define DEC_SCORE 2  // score = decay * score + weight * p
#define DEC_RING 4   // the row's queries go to place ring_at of its ring
#define DEC_BURST 8  // score = decay * score + weight * sum of p over the ring
#define DEC_PLACES 16 // places of a ring in memory: OPS_RING

// What phase 3 does to a row's heads after the step; one per (layer, row), made from struct kern_rule.
struct dec_rule {
    int32_t on;           // DEC_VICTIM, DEC_SCORE
    int32_t sink, recent; // positions [0, sink) and the last `recent` are never evicted
    int32_t pin0, n_pin;  // more such ranges, in dec_params.pin
    float decay, weight;
    int32_t ring, ring_at; // places in use, this step's
};

// The last queries of decoding lanes, a ring for each (lane, layer, query head): see kern_rule.ring.
struct ring_view {
    unsigned short *q; // [lanes][n_layer][n_head][DEC_PLACES][HD] bf16, scaled
    float *ml;         // [lanes][n_layer][n_head][DEC_PLACES][2]: maximum and 1 / sum of the step's softmax
    int32_t *pos;      // [lanes][n_layer][n_kv][DEC_PLACES]
};

struct dec_params {
    kv_view kv;
    pass_view pass;
    int layer, g, n_head, n_split, row_width;
    float scale;
    const float *q;         // row r, head h at q + r * row_width + h * HD, f32
    float *part_o;          // [n_row][n_head][n_split][HD]
    float *part_ml;         // [n_row][n_head][n_split][2]
    float *logit;           // [n_row][n_head][n_split * 256], scaled
    float *out;             // [n_row][n_head * HD]
    const dec_rule *rule;   // [n_row]
    const int32_t *pin;     // pairs [from, to)
    ring_view ring;
    int dtype;              // enum kern_kv_dtype
};

typedef unsigned long long sel_key;

struct sel_head {
    int n, n_cand, n_protected, budget, n_floor, take, newest, kept;
    sel_key floor_key; // keys at or above it are the head's own already
};

struct sel_params {
    kv_view kv;
    int lane, layer, hd;
    // the rule (kernels/ops.h)
    int budget, sink, recent, pool, pool_shift, wide, wide_shift, pool_max, pool_from, pool_to;
    int use_score, by_value, shared, n_pin;
    float narrow, head_floor, value_eps, per_query;
    const int32_t *pin; // pairs [from, to)
    // scores of the prefill, [n_kv][row_stride]
    const float *row;
    int row_stride;
    // work space, [n_kv][stride]; stride is a power of two
    int stride;
    float *pooled, *norm;
    int32_t *pos, *keep, *src;
    sel_key *key;
    sel_head *head;       // [n_kv]
    unsigned char *spare; // [n_kv][max_pages] pages
    float *kept_mass;     // [n_kv]
};

// How one row's token is chosen: the settings of engine/sampler.h.
#define SMP_PENS 64
struct smp_pen {
    int32_t token, count; // a token among the last, and how often it is there
};

struct smp_row {
    int32_t on, top_k, n_pen; // on 0: the row's logits go to the host; top_k 0: all
    float temperature, top_p, min_p, repeat, presence, frequency;
    double u; // the random number, [0, 1)
};

struct smp_params {
    float *logits;      // [ranks][n_row][part], changed by the penalties
    size_t rank_stride; // n_row * part
    int vocab, part;    // a rank has the tokens [rank * part, ...)
    const smp_row *row; // [n_row]
    const smp_pen *pen; // [n_row][SMP_PENS]
    int32_t *out;       // [n_row]: the token, -1: there is no number among the logits
};

// One change of the per-(lane, layer, head) arrays; index into the array of its kind.
enum { KV_TABLE = 0, KV_LEN, KV_CAP, KV_VICTIM };

struct kv_change {
    int32_t kind;
    uint32_t index, value;
};

#endif
