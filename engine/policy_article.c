/* article: Novita AI's "KV sparsity in vLLM": the first three layers whole, the others a window in which the lowest scores go;
 * scores are the last 256 queries' attention and what decoding adds. */
#include "engine/policy.h"

static void update(const struct policy_params *p, struct kern_rule *rule)
{
    (void)p;
    rule->decay = 1;
    rule->weight = 1;
}

const struct policy policy_article = {
    .name = "article",
    .summary = "three full layers; elsewhere a window by accumulated attention",
    .defaults = { .budget = 1024, .sink = 4, .recent = 32, .alpha = 256, .pool = 1, .pool_kind = KERN_POOL_MAX, .full_layers = 3, .head_floor = 1 },
    .budgets = policy_equal_budgets,
    .choose = policy_window_choose,
    .update = update,
};
