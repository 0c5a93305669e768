/* snapkv: what the last queries look at (SnapKV, arXiv 2404.14469), one set a KV head. The paper chooses once, after the prompt, and
 * lets the cache grow; here the window of queries moves on with the answer: a ring of the last ones, scored in bursts. */
#include "engine/policy.h"

const struct policy policy_snapkv = {
    .name = "snapkv",
    .summary = "what the last queries attend to, in the prompt smoothed over neighbours",
    .defaults = { .budget = 512, .sink = 4, .recent = 32, .alpha = 32, .pool = 7, .pool_kind = KERN_POOL_AVG, .head_floor = 1 },
    .budgets = policy_equal_budgets,
    .choose = policy_window_choose,
    .update = policy_ring_update,
};
