/* streaming: the first positions and the last ones (StreamingLLM, arXiv 2309.17453, at true positions). No score. */
#include "engine/policy.h"

static int choose(const struct policy_params *p, const struct policy_prompt *prompt, struct kern_rule *rule)
{
    (void)p;
    (void)prompt;
    rule->use_score = false;
    rule->head_floor = 1;
    return 0;
}

const struct policy policy_streaming = {
    .name = "streaming",
    .summary = "the first positions (sink) and the most recent ones",
    .defaults = { .budget = 512, .sink = 4, .recent = 508, .pool = 1, .head_floor = 1 },
    .budgets = policy_equal_budgets,
    .choose = choose,
    .update = policy_no_update,
};
