/* kvplan.c - see kvplan.h. */
#include "engine/kvplan.h"

#include <stdlib.h>
#include <string.h>

#include "engine/pages.h"

static int pinned_count(const struct kern_range *pin, int n)
{
    int sum = 0;

    for (int i = 0; i < n; i++)
        sum += pin[i].to - pin[i].from;
    return sum;
}

static void fill_rules(struct kvplan *plan)
{
    const struct policy_params *p = &plan->params;
    int recent = p->recent_decode > p->recent ? p->recent_decode : p->recent;
    int safe = p->sink + recent + pinned_count(plan->pin, plan->n_pin);

    for (int l = 0; l < plan->n_layer; l++) {
        struct kern_rule *r = &plan->rule[l];
        if (plan->budget[l] != 0 && plan->budget[l] < safe)
            plan->budget[l] = safe;
        *r = (struct kern_rule){ .budget = plan->budget[l], .sink = p->sink, .recent = p->recent, .pin = plan->pin,
                                 .n_pin = plan->n_pin, .pool = 1, .head_floor = 1, .decay = 1 };
        if (plan->budget[l] != 0)
            plan->policy->update(p, r);
    }
}

int kvplan_init(struct kvplan *plan, const struct policy *policy, const struct policy_params *params,
                const struct kern_range *pin, int n_pin, const struct ops_dims *dims, struct skv_error *err)
{
    int full = params->full_layers < dims->n_layer ? params->full_layers : dims->n_layer;

    memset(plan, 0, sizeof *plan);
    plan->policy = policy;
    plan->params = *params;
    plan->n_layer = dims->n_layer;
    plan->n_kv = dims->n_kv;
    plan->budget = calloc((size_t)dims->n_layer, sizeof *plan->budget);
    plan->rule = calloc((size_t)dims->n_layer, sizeof *plan->rule);
    plan->pin = n_pin > 0 ? malloc((size_t)n_pin * sizeof *pin) : NULL;
    if (plan->budget == NULL || plan->rule == NULL || (n_pin > 0 && plan->pin == NULL)) {
        kvplan_fini(plan);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a layer plan");
    }
    if (n_pin > 0)
        memcpy(plan->pin, pin, (size_t)n_pin * sizeof *pin);
    plan->n_pin = n_pin;
    if (full < dims->n_layer)
        policy->budgets(params, dims->n_layer - full, plan->budget + full);
    fill_rules(plan);
    return 0;
}

void kvplan_fini(struct kvplan *plan)
{
    free(plan->budget);
    free(plan->rule);
    free(plan->pin);
    memset(plan, 0, sizeof *plan);
}

/* Heads of a layer share n_kv * budget slots; where they compete for it (head_floor < 1) each may round up to a page of its
 * own. One slot more a head: the new pair is written before a victim is chosen. */
static int64_t layer_pages(const struct kvplan *plan, int layer, int64_t n)
{
    int64_t b = plan->budget[layer];

    if (b == 0 || n <= b + 1)
        return plan->n_kv * pages_for(n);
    if (plan->params.head_floor >= 1)
        return plan->n_kv * pages_for(b + 1);
    return plan->n_kv * (b + 1) / KERN_PAGE_SLOTS + plan->n_kv;
}

int64_t kvplan_pages(const struct kvplan *plan, int64_t n)
{
    int64_t sum = 0;

    for (int l = 0; l < plan->n_layer; l++)
        sum += layer_pages(plan, l, n);
    return sum;
}

int64_t kvplan_slots(const struct kvplan *plan, int64_t n)
{
    int64_t sum = 0;

    for (int l = 0; l < plan->n_layer; l++) {
        int64_t b = plan->budget[l];
        sum += plan->n_kv * (b == 0 || n < b ? n : b);
    }
    return sum;
}

int kvplan_max_budget(const struct kvplan *plan)
{
    int max = 0;

    for (int l = 0; l < plan->n_layer; l++)
        if (plan->budget[l] > max)
            max = plan->budget[l];
    return max;
}

int64_t kvplan_transient(const struct kvplan *plan, int64_t n_slot)
{
    int64_t most = 0;

    for (int l = 0; l < plan->n_layer; l++)
        if (plan->budget[l] != 0) {
            int64_t extra = plan->n_kv * pages_for(n_slot) - layer_pages(plan, l, n_slot);
            if (extra > most)
                most = extra;
        }
    return most;
}

int64_t kvplan_longest(const struct kvplan *plan, int64_t pages, int64_t limit)
{
    int64_t lo = 0, hi = limit;

    while (lo < hi) {
        int64_t mid = lo + (hi - lo + 1) / 2;
        if (kvplan_pages(plan, mid) + kvplan_transient(plan, mid) <= pages)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

int64_t kvplan_fit(const struct kvplan *plan, int64_t pages, int64_t n)
{
    int64_t left = pages - kvplan_transient(plan, n), one = kvplan_pages(plan, n);

    return left < one || one == 0 ? 0 : left / one;
}
