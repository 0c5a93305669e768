/* plan.h - capacity questions: the real scheduler and block manager over the sim backend, for one load on one machine.
 *
 * A number of clients, each of which sends its next request when the last one ended; all prompts and answers of one length.
 * What comes out is what the cost model (kernels/sim/sim_cost.c) makes of it, not a measurement.
 */
#ifndef SKVD_ENGINE_PLAN_H
#define SKVD_ENGINE_PLAN_H

#include "engine/engine.h"

struct plan_ask {
    const char *model;    /* a preset's name, NAME/TYPE, or a GGUF file */
    const char *device;   /* kernels/sim/device.c */
    int input, output;    /* tokens of a prompt and of an answer */
    int64_t kv_memory;    /* bytes; 0: `share` of the device's less weights and workspace */
    double share;         /* of the device's memory that may be used */
    int step_ms;
    int rounds;           /* requests a client sends */
    const char *kv_dtype; /* NULL: the default */
};
void plan_ask_default(struct plan_ask *ask);

/* What is the same for every number of clients. */
struct plan_facts {
    char model[128], device[64], policy[16];
    int64_t weight_bytes, kv_bytes; /* kv_bytes: of the pool */
    int fit;                        /* sequences of input + output tokens at a time */
    int full_layers, layers, budget;
};

/* Over the middle half of the run, when all clients are at it. */
struct plan_row {
    int clients;
    double tokens_per_s;              /* of answers */
    double ttft_p50_ms, ttft_p99_ms;  /* from submission, waiting included */
    double gap_p50_ms, gap_p99_ms;    /* between two tokens of an answer */
    int running;                      /* sequences that held memory at a time, at most */
};

/* One policy, one number of clients (1 to 256). 0, or -1 with *err. facts may be NULL. */
int plan_run(const struct plan_ask *ask, const struct engine_kv_options *kv, int clients, struct plan_facts *facts,
             struct plan_row *row, struct skv_error *err);

/* The bytes of KV memory that ask leaves for a pool. -1 with *err when the weights alone don't fit. */
int64_t plan_kv_memory(const struct plan_ask *ask, struct skv_error *err);

#endif
