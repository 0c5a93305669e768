/* h2o: heavy hitters by attention summed over all queries, prompt and answer (H2O, arXiv 2306.14048), and the recent ones. */
#include "engine/policy.h"

static void update(const struct policy_params *p, struct kern_rule *rule)
{
    (void)p;
    rule->decay = 1;
    rule->weight = 1;
}

const struct policy policy_h2o = {
    .name = "h2o",
    .summary = "attention accumulated over all queries, and the recent half",
    .defaults = { .budget = 512, .sink = 0, .recent = 256, .alpha = POLICY_ALL, .pool = 1, .head_floor = 1 },
    .budgets = policy_equal_budgets,
    .choose = policy_window_choose,
    .update = update,
};
