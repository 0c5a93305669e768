/* sparse: the default, chosen by measurement (docs/quality.md).
 *
 * The score is the attention of the prompt's last queries, the template's closing header on top of them. Half of the budget goes by that
 * score smoothed over a short phrase, half by a wide smoothing; both reach further ahead than back, since what a query finds is
 * mostly what comes after the words that it matches. Heads share evenly: competing for the budget (Ada-KV) and value norms
 * (CriticalKV) were tried, and gained less than noise here.
 */
#include "engine/policy.h"

static int choose(const struct policy_params *p, const struct policy_prompt *prompt, struct kern_rule *rule)
{
    policy_window_choose(p, prompt, rule);
    return policy_window(p, prompt, prompt->n_tail);
}

/* A layer by which the prompt is thinned has more, the others so much less that the sum is the same. What the mean holds is kept whole in
 * every layer. */
static void budgets(const struct policy_params *p, int n, int32_t *budget)
{
    double weight = n, sum = 0;
    long given = 0;

    policy_equal_budgets(p, n, budget);
    if (p->first_prompt > 0 && p->first_prompt <= p->budget)
        return;
    for (int i = 0; i < POLICY_THIN; i++)
        if (p->thin[i].layer > p->full_layers)
            weight += (double)p->thin[i].factor - 1;
    for (int l = 0; l < n; l++) {
        double mine = 1;
        for (int i = 0; i < POLICY_THIN; i++)
            if (p->thin[i].layer - 1 == p->full_layers + l)
                mine = (double)p->thin[i].factor;
        sum += mine * n * p->budget / weight;
        long upto = l == n - 1 ? (long)n * p->budget : (long)(sum + 1e-6);
        budget[l] = (int32_t)(upto - given);
        given = upto;
    }
}

/* While decoding, attention accumulates and fades: what the answer has not looked at for some tens of tokens makes room, what it said
 * itself stays as long as it is looked at. */
static void update(const struct policy_params *p, struct kern_rule *rule)
{
    rule->decay = p->decay;
    rule->weight = 1;
    rule->recent = p->recent_decode != 0 ? p->recent_decode : p->recent;
}

const struct policy policy_sparse = {
    .name = "sparse",
    .summary = "the default: the last queries' attention, smoothed ahead at two widths",
    .defaults = { .budget = 511, .sink = 4, .recent = 32, .alpha = 12, .pool = 11, .pool_kind = KERN_POOL_AVG, .pool_shift = 3,
                  .wide = 51, .wide_shift = 20, .narrow = 0.5f, .head_floor = 1,
                  .recent_decode = 64, .decay = 0.97f },
    .thins = true,
    .budgets = budgets,
    .choose = choose,
    .update = update,
};
