/* policy.c - the table of policies, their common parts, and the checks on what a user asks for. */
#include "engine/policy.h"

#include <stdio.h>
#include <string.h>

const struct policy *const policy_table[] = {
    &policy_full,   &policy_streaming, &policy_snapkv,  &policy_pyramid, &policy_h2o,
    &policy_tova,   &policy_article,   &policy_sparse,  NULL,
};

const struct policy *policy_find(const char *name)
{
    for (int i = 0; policy_table[i] != NULL; i++)
        if (strcmp(policy_table[i]->name, name) == 0)
            return policy_table[i];
    return NULL;
}

const char *policy_names(void)
{
    return "full, streaming, snapkv, pyramid, h2o, tova, article, sparse";
}

void policy_equal_budgets(const struct policy_params *p, int n, int32_t *budget)
{
    for (int i = 0; i < n; i++)
        budget[i] = p->budget;
}

void policy_no_update(const struct policy_params *p, struct kern_rule *rule)
{
    (void)p;
    rule->decay = 1;
    rule->weight = 0;
}

/* The ring turns twice within the recent window, so that every pair has been scored before it can go, also where a layer's first
 * burst waits for its turn. */
void policy_ring_update(const struct policy_params *p, struct kern_rule *rule)
{
    int most = p->alpha > 0 && p->alpha < OPS_RING ? p->alpha : OPS_RING;

    rule->decay = 0;
    rule->weight = 1;
    rule->ring = (p->recent + 1) / 2 < most ? (p->recent + 1) / 2 : most;
}

int policy_window(const struct policy_params *p, const struct policy_prompt *prompt, int more)
{
    int alpha = p->alpha;

    if (alpha == 0 && prompt->n_last > 0)
        return prompt->n_last < prompt->n_new ? prompt->n_last : prompt->n_new;
    if (alpha == 0)
        alpha = POLICY_ALPHA_PLAIN;
    return alpha < prompt->n_new - more ? alpha + more : prompt->n_new;
}

/* The score is the attention of the last alpha queries (SnapKV and its kin). Positions that stay anyway are neither
 * pooled nor pooled over. */
int policy_window_choose(const struct policy_params *p, const struct policy_prompt *prompt, struct kern_rule *rule)
{
    rule->use_score = true;
    rule->recent = p->recent;
    rule->pool = p->pool;
    rule->pool_kind = (enum kern_pool_kind)p->pool_kind;
    rule->pool_shift = p->pool_shift;
    rule->wide = p->wide;
    rule->wide_shift = p->wide_shift;
    rule->narrow = p->narrow;
    rule->pool_from = 0;
    rule->pool_to = prompt->n_slot - p->recent;
    rule->by_value = p->by_value;
    rule->value_eps = p->value_eps;
    rule->head_floor = p->head_floor;
    return policy_window(p, prompt, 0);
}

struct option_range {
    const char *name;
    int lo, hi;
};

static int check_range(const struct option_range *r, int value, int *out, enum skv_code code, struct skv_error *err)
{
    if (value == -1)
        return 0;
    if (value < r->lo || value > r->hi)
        return skv_fail(err, code, "kv.%s is %d; it must be from %d to %d", r->name, value, r->lo, r->hi);
    *out = value;
    return 0;
}

int policy_resolve(const struct policy *p, const struct engine_kv_options *o, int max_context, struct policy_params *out,
                   enum skv_code code, struct skv_error *err)
{
    struct policy_params r = p->defaults;
    const struct {
        struct option_range range;
        int value;
        int *out;
    } option[] = {
        { { "budget", 16, max_context > 16 ? max_context : 16 }, o->budget, &r.budget },
        { { "sink", 0, 1024 }, o->sink, &r.sink },
        { { "recent", 1, 65536 }, o->recent, &r.recent },
        { { "alpha", 0, 65536 }, o->alpha, &r.alpha },
        { { "pool", 1, 255 }, o->pool, &r.pool },
        { { "pool_kind", 0, 1 }, o->pool_kind, &r.pool_kind },
        { { "full_layers", 0, 65536 }, o->full_layers, &r.full_layers },
    };

    for (size_t i = 0; i < sizeof option / sizeof *option; i++)
        if (check_range(&option[i].range, option[i].value, option[i].out, code, err) < 0)
            return -1;
    if (r.pool % 2 == 0)
        return skv_fail(err, code, "kv.pool is %d; a width must be odd, such as %d", r.pool, r.pool + 1);
    if (o->pool != -1 || o->pool_kind != -1)
        r.pool_shift = r.wide = 0;
    /* A budget that was asked for shrinks a window that was not, down to a quarter of it. */
    if (o->budget != -1 && o->recent == -1 && r.recent > r.budget / 4 && p != &policy_streaming)
        r.recent = r.budget / 4 > 1 ? r.budget / 4 : 1;
    if (p == &policy_streaming && o->recent == -1)
        r.recent = r.budget > r.sink + 1 ? r.budget - r.sink : 1;
    if (o->recent != -1)
        r.recent_decode = 0;
    if (r.recent_decode > r.budget / 4)
        r.recent_decode = r.budget / 4;
    if (r.recent_decode <= r.recent)
        r.recent_decode = 0;
    if (p != &policy_full && r.sink + r.recent > r.budget)
        return skv_fail(err, code, "kv.sink %d and kv.recent %d are more than kv.budget %d leaves room for; raise budget to %d or more",
                        r.sink, r.recent, r.budget, r.sink + r.recent);
    *out = r;
    return 0;
}
