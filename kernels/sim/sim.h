/* sim.h - the sim backend's inside: no weight is read and nothing is computed; a clock moves on by what each operation
 * would take on a device (sim_cost.c), tokens follow from a hash.
 *
 * Two depths. Without slot values a row's hash is that of its token and position, selection keeps the same number in
 * every head, and no page is touched: fast, for capacity questions. With them (ops_config.slot_values) every slot carries a
 * value, attention adds up what the tables hold, scores and victims are chosen by position and score under the same rules as on
 * the CPU: a page in a wrong table, a slot overwritten too early or a result that depends on the batch changes tokens.
 */
#ifndef SKVD_KERNELS_SIM_SIM_H
#define SKVD_KERNELS_SIM_SIM_H

#include <stdatomic.h>

#include "kernels/ops.h"
#include "kernels/sim/device.h"

struct sim {
    struct ops_dims d;
    struct ops_config cfg;
    const struct sim_device *dev;
    const struct ops_model_src *src;
    int g; /* query heads per KV head */
    double weight_bytes;
    _Atomic int64_t ns;
    bool decode; /* what the pass in hand is: a decode step runs in a graph */

    struct ops_kv kv;
    int max_slots;     /* of a head */
    uint64_t *row;     /* [max_rows] hash of each row's hidden state */
    uint64_t *att;     /* [max_rows] what attention gave it */

    /* slot values; NULL without */
    uint64_t *value;   /* [n_pages][32], 0: never written since the page was cleared */
    int32_t *pos;      /* [n_pages][32] */
    float *score;      /* [n_pages][32] */
    float *score_row;  /* [max_lanes][n_kv][max_slots] */
    struct sim_pick *pick; /* [n_kv][max_slots] */
    struct sim_query *ring; /* [max_lanes][n_layer][OPS_RING] */
};

/* A hash that mixes two numbers well (the finaliser of MurmurHash3). */
static inline uint64_t sim_mix(uint64_t a, uint64_t b)
{
    uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6))) * 0xff51afd7ed558ccdu;

    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 33;
}

static inline size_t sim_index(const struct sim *s, int lane, int layer, int head)
{
    return ((size_t)lane * s->d.n_layer + layer) * s->d.n_kv + head;
}

/* --- sim_cost.c: the clock. Each function adds the time of one operation --- */
void sim_cost_rows(struct sim *s, int n_row); /* hidden states that are written once: embedding, thinning */
void sim_cost_attn_in(struct sim *s, int layer, int n_row);
void sim_cost_attn_prefill(struct sim *s, int layer, const struct ops_pass *pass);
void sim_cost_attn_decode(struct sim *s, int layer, const struct ops_pass *pass, const struct kern_rule *rule);
void sim_cost_attn_out_mlp(struct sim *s, int layer, int n_row);
void sim_cost_select(struct sim *s, int lane, int layer, const struct kern_rule *rule);
void sim_cost_logits(struct sim *s, int n);
void sim_cost_host(struct sim *s, int n);
double sim_weight_bytes(const struct ops_model_src *src);

/* --- sim_kv.c: what slots hold, with slot values --- */
int sim_kv_values(struct sim *s, struct skv_error *err);
void sim_kv_free(struct sim *s);
void sim_kv_store(struct sim *s, int layer, const struct ops_pass *pass, const int32_t *slot);
void sim_kv_attn_prefill(struct sim *s, int layer, const struct ops_pass *pass);
void sim_kv_attn_decode(struct sim *s, int layer, const struct ops_pass *pass, const struct kern_rule *rule);
void sim_kv_select(struct sim *s, int lane, int layer, const struct kern_rule *rule, float *kept_mass);

#endif
