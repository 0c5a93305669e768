/* policy.h - which KV pairs a layer keeps: one small file a policy, one table.
 *
 * A policy is numbers and two functions. `choose` says how a layer is sparsified after its prefill attention, `update` how
 * scores change at decode; both only fill a kern_rule, which any backend can carry out. `budgets` says how many slots each
 * layer gets. Nothing else in the engine knows a policy by name.
 */
#ifndef SKVD_ENGINE_POLICY_H
#define SKVD_ENGINE_POLICY_H

#include "engine/engine.h"
#include "kernels/ops.h"

#define POLICY_THIN 2 /* times that a prompt is thinned, at most */
#define POLICY_ALL INT32_MAX /* alpha: every query of the prompt counts */

/* Before `layer`, tokens go on that a head of the layer below kept, which has `factor` times the others' budget for it (thin.h). */
struct policy_thin {
    int layer;
    float factor;
};

struct policy_params {
    int budget;      /* slots a head keeps in a sparse layer (mean over layers and heads) */
    int sink;        /* first positions that always stay */
    int recent;      /* last positions that always stay */
    int alpha;       /* last prompt queries whose attention is the score; 0: those of the last message */
    int pool;        /* odd width of the smoothing, 1: none */
    int pool_kind;   /* enum kern_pool_kind */
    int full_layers; /* first layers that keep everything */
    bool by_value;   /* value norms (CriticalKV) */
    float value_eps;
    float head_floor; /* 1: every head the same budget */
    /* Two smoothings (0: one, as `pool` says); not options of a request: who asks for a pool gets that one alone. */
    int pool_shift, wide, wide_shift;
    float narrow;
    int recent_decode; /* last positions that stay while decoding, 0: as `recent` */
    struct policy_thin thin[POLICY_THIN]; /* where a long prompt gets thinner, ascending; layer 0: nowhere. Not of a request */
    int first_prompt;  /* tokens of the sequence's first prompt, 0: not known; budgets that differ may look at it */
    float decay;       /* of scores at every step while decoding, for policies that accumulate with one */
};

/* What is known when a layer of one sequence is sparsified. Slots and positions as in ops.h. */
struct policy_prompt {
    int n_slot;   /* slots of the longest head: kept before, and this prompt's */
    int n_new;    /* tokens of this prompt */
    int n_last;   /* tokens of the last message's turn, the closing header included; 0 where the prompt was no messages */
    int n_tail;   /* template tokens at the prompt's end (the assistant's header), 0 if there are none */
};

struct policy {
    const char *name;
    const char *summary; /* one line for --help and the man page */
    bool thins;          /* its prompts may get thinner on their way up */
    struct policy_params defaults;
    /* Phase 1. budget [n_layer]: slots a head; 0 = full. The first p->full_layers are set by the caller; this fills
     * the n layers that are sparse. Sum over them = n * p->budget, exactly. */
    void (*budgets)(const struct policy_params *p, int n, int32_t *budget);
    /* Phase 3, prefill. rule->budget, sink, recent and pins are filled already. Returns how many of the prompt's last
     * queries are summed (0: none). */
    int (*choose)(const struct policy_params *p, const struct policy_prompt *prompt, struct kern_rule *rule);
    /* Phase 3, decode: decay, weight and ring, and recent where it differs from the prefill's. */
    void (*update)(const struct policy_params *p, struct kern_rule *rule);
};

extern const struct policy policy_full, policy_streaming, policy_snapkv, policy_pyramid, policy_h2o, policy_tova,
    policy_article, policy_sparse;

/* NULL when there is none of that name. */
const struct policy *policy_find(const char *name);
/* The table, NULL-terminated. */
extern const struct policy *const policy_table[];
/* "full streaming ...": for messages. */
const char *policy_names(void);

/* The parameters of a policy with options laid over its defaults; checks ranges. 0, or -1 with *err (BAD_REQUEST, or the
 * code given) naming the option, its range and what was asked. max_context bounds budget. */
int policy_resolve(const struct policy *p, const struct engine_kv_options *o, int max_context, struct policy_params *out,
                   enum skv_code code, struct skv_error *err);

/* Parts that several policies share. */
void policy_equal_budgets(const struct policy_params *p, int n, int32_t *budget);
void policy_no_update(const struct policy_params *p, struct kern_rule *rule);
/* The window of queries moves along: the last ones decide, scored in bursts (kern_rule.ring). */
void policy_ring_update(const struct policy_params *p, struct kern_rule *rule);
/* The window in queries: alpha, or the last message (ALPHA_PLAIN queries where there is none), `more` on top, at most the prompt. */
#define POLICY_ALPHA_PLAIN 16
int policy_window(const struct policy_params *p, const struct policy_prompt *prompt, int more);
int policy_window_choose(const struct policy_params *p, const struct policy_prompt *prompt, struct kern_rule *rule);

#endif
