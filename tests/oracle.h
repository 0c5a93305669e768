/* oracle.h - tests: a llama model and every KV policy once more, in plain loops and double precision, from their descriptions alone.
 *
 * No pages, no tiles, no budgets in advance: attention over lists of positions that the policy's words say are there. It shares
 * with the engine only the file reader and the dequantiser.
 */
#ifndef SKVD_TESTS_ORACLE_H
#define SKVD_TESTS_ORACLE_H

#include "engine/model.h"

#define ORACLE_PIN 4

/* What a request asks for; every number is set. */
struct oracle_policy {
    const char *name;
    int budget, sink, recent, alpha /* 0: all queries of the prompt */, pool, full_layers;
    bool max_pool;
    int n_pin;
    struct kern_range pin[ORACLE_PIN];
};

struct oracle_head {
    int n;
    int32_t *pos; /* ascending */
};

struct oracle_run {
    int n_layer, n_kv, n_token;
    struct oracle_head *prefill, *end; /* [n_layer][n_kv]: what is kept after the prompt; after the last step */
    bool *prefill_tie;                 /* [n_layer][n_kv]: the choice was closer than rounding in f32 may decide */
    int32_t *token;                    /* [n_token] greedy */
    double *logprob, *margin;          /* [n_token]: of the token; of its logit above the second best */
    int sure;                          /* tokens [0, sure) follow from no near tie among evictions */
    bool end_sure;
    int evicted;                       /* while decoding, over layers and heads */
};

/* A prompt and n_token tokens of its greedy answer. Exits on want of memory. */
struct oracle_run *oracle_generate(const struct model *m, const struct oracle_policy *p, const int32_t *prompt, int n, int n_token);
void oracle_free(struct oracle_run *r);

#endif
