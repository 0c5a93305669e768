/* tova: the last query alone decides, at every step (TOVA, arXiv 2401.06104), here per KV head. */
#include "engine/policy.h"

static void update(const struct policy_params *p, struct kern_rule *rule)
{
    (void)p;
    rule->decay = 0;
    rule->weight = 1;
}

const struct policy policy_tova = {
    .name = "tova",
    .summary = "what the last query attends to, decided anew at every step",
    .defaults = { .budget = 512, .sink = 0, .recent = 1, .alpha = 1, .pool = 1, .head_floor = 1 },
    .budgets = policy_equal_budgets,
    .choose = policy_window_choose,
    .update = update,
};
