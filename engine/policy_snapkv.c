/* snapkv: what the last queries of the prompt look at (SnapKV, arXiv 2404.14469), one set a KV head. New tokens come with
 * score 0, so the one that leaves the recent window is the next to go: the prompt's choice stays. */
#include "engine/policy.h"

const struct policy policy_snapkv = {
    .name = "snapkv",
    .summary = "what the prompt's last queries attend to, smoothed over neighbours",
    .defaults = { .budget = 512, .sink = 4, .recent = 32, .alpha = 32, .pool = 7, .pool_kind = KERN_POOL_AVG, .head_floor = 1 },
    .budgets = policy_equal_budgets,
    .choose = policy_window_choose,
    .update = policy_no_update,
};
