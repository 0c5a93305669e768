/* full: every pair stays. The baseline, and what the first layers of every policy do. */
#include "engine/policy.h"

static void budgets(const struct policy_params *p, int n, int32_t *budget)
{
    (void)p;
    for (int i = 0; i < n; i++)
        budget[i] = 0;
}

static int choose(const struct policy_params *p, const struct policy_prompt *prompt, struct kern_rule *rule)
{
    (void)p;
    (void)prompt;
    rule->use_score = false;
    return 0;
}

const struct policy policy_full = {
    .name = "full",
    .summary = "keeps every KV pair",
    .defaults = { .budget = 16, .recent = 1, .pool = 1, .head_floor = 1 },
    .budgets = budgets,
    .choose = choose,
    .update = policy_no_update,
};
