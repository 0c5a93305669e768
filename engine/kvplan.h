/* kvplan.h - phase 1: the layer plan, and from it the exact bytes that a sequence needs.
 *
 * A plan belongs to one request: policy and parameters laid over the server's. It says per layer how many slots a head
 * keeps, and carries the numbers that select and decode need (kern_rule).
 */
#ifndef SKVD_ENGINE_KVPLAN_H
#define SKVD_ENGINE_KVPLAN_H

#include "engine/policy.h"
#include "kernels/ops.h"

struct kvplan {
    const struct policy *policy;
    struct policy_params params;
    int n_layer, n_kv;
    int32_t *budget;        /* [n_layer] slots a head; 0: full */
    struct kern_rule *rule; /* [n_layer]; budget 0 in full layers */
    struct kern_range *pin; /* owned; the rules point here */
    int n_pin;
};

/* Pins are positions that never go; they raise a budget that they would not fit into. 0, or -1 with *err. */
int kvplan_init(struct kvplan *plan, const struct policy *policy, const struct policy_params *params,
                const struct kern_range *pin, int n_pin, const struct ops_dims *dims, struct skv_error *err);
void kvplan_fini(struct kvplan *plan);

/* Slots (at most, summed over heads and layers) and pages that a sequence of n tokens holds after its prefill. */
int64_t kvplan_slots(const struct kvplan *plan, int64_t n);
int64_t kvplan_pages(const struct kvplan *plan, int64_t n);
/* Pages that one sparse layer holds for a moment while n_slot slots of it are prefilled. 0 without sparse layers. */
int64_t kvplan_transient(const struct kvplan *plan, int64_t n_slot);
/* The longest sequence whose pages + transient fit in `pages`, at most limit. */
int64_t kvplan_longest(const struct kvplan *plan, int64_t pages, int64_t limit);
/* How many sequences of n tokens fit in `pages` at a time. */
int64_t kvplan_fit(const struct kvplan *plan, int64_t pages, int64_t n);
/* The most slots that any sparse head may hold beside the new one; 0 without sparse layers. */
int kvplan_max_budget(const struct kvplan *plan);

#endif
