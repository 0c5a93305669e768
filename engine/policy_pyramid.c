/* pyramid: as snapkv, but budgets fall arithmetically from lower to upper layers (PyramidKV, arXiv 2406.02069). The paper's code
 * rounds each layer down and so overspends; here the fractions are carried, and the sum is exactly n * budget. As there, a
 * prompt that the mean budget holds is kept whole in every layer. */
#include "engine/policy.h"

#define BETA 20 /* the last layer gets 1/BETA of the mean, beside the protected window */

static void budgets(const struct policy_params *p, int n, int32_t *budget)
{
    int window = p->sink + p->recent;
    double mean = p->budget - window, low = mean / BETA, high = 2 * mean - low;
    double sum = 0;
    long given = 0;

    if (p->first_prompt > 0 && p->first_prompt <= p->budget) {
        policy_equal_budgets(p, n, budget);
        return;
    }
    for (int i = 0; i < n; i++) {
        sum += n > 1 ? high - i * (high - low) / (n - 1) : mean;
        long upto = i == n - 1 ? (long)n * (p->budget - window) : (long)(sum + 0.5);
        budget[i] = window + (int32_t)(upto - given);
        given = upto;
    }
}

const struct policy policy_pyramid = {
    .name = "pyramid",
    .summary = "as snapkv, with larger budgets in lower layers, the same total",
    .defaults = { .budget = 512, .sink = 4, .recent = 32, .alpha = 32, .pool = 7, .pool_kind = KERN_POOL_AVG, .head_floor = 1 },
    .budgets = budgets,
    .choose = policy_window_choose,
    .update = policy_ring_update,
};
