/* sparse: the default, chosen by measurement (docs/quality.md): the prompt's last queries, smoothed widely enough to hold a
 * short phrase, budgets that heads compete for (Ada-KV, arXiv 2407.11550), and value norms (CriticalKV, arXiv 2502.03805). */
#include "engine/policy.h"

const struct policy policy_sparse = {
    .name = "sparse",
    .summary = "the default: a short window's attention, widely smoothed, budgets per head, value norms",
    .defaults = { .budget = 512, .sink = 4, .recent = 32, .alpha = 16, .pool = 21, .pool_kind = KERN_POOL_AVG, .by_value = true,
                  .value_eps = 1e-4f, .head_floor = 0.2f },
    .budgets = policy_equal_budgets,
    .choose = policy_window_choose,
    .update = policy_no_update,
};
