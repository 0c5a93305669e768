/* sched_rig.h - tests: the real scheduler, block manager and engine over the sim backend, step by step on its clock.
 *
 * No thread: the test runs every step, and after each one checks what must always hold (sched_rig.c: check_state). So a
 * scenario is exactly repeatable, and minutes of model time take milliseconds.
 */
#ifndef SKVD_TESTS_SCHED_RIG_H
#define SKVD_TESTS_SCHED_RIG_H

#include "engine/core.h"
#include "engine/step.h"

/* What is known of a request from its events. */
struct rig_req {
    uint64_t id;          /* 0: refused at submit */
    enum skv_code code;   /* once ended, or why it was refused */
    char message[256];
    int n_end;            /* END events */
    int n_token, last_i;  /* TOKEN events, and the last one's index */
    int done;             /* last PROGRESS of the prefill */
    int32_t *token;       /* those of the TOKEN events */
    int64_t t_submit, t_first, t_last, t_end, t_start; /* microseconds; t_start: of its prefill */
    int64_t worst_gap;    /* between two tokens */
    double queued_ms, ttft_ms;
    int prompt_tokens, completion_tokens;
    int order;            /* of its first token among all, from 1; 0: none */
};

struct rig {
    struct engine *e;
    struct rig_req *req;
    int n, cap;
    int n_first;          /* first tokens so far */
    int64_t steps;
    int64_t worst_step;   /* microseconds of model time */
    char wrong[256];      /* the first thing that did not hold; "" none */
};

/* cfg with backend sim, preset tiny and slot values; the test changes what it needs. */
void rig_config(struct engine_config *cfg);
/* Ends the program when the engine can't be made. */
void rig_start(struct rig *r, const struct engine_config *cfg);
/* Ends what is there, checks that every request ended once and no page is left, frees. */
void rig_stop(struct rig *r);

/* Pages that a request of n tokens needs alone under a policy, as admission counts them; and a page's bytes. */
int64_t rig_pages_needed(const char *policy, int budget, int n);
size_t rig_page_bytes(void);

int64_t rig_now(const struct rig *r);
void rig_idle(struct rig *r, int64_t us);

/* A GENERATE request of n prompt tokens that only `seed` decides; greedy, end tokens ignored. */
struct engine_request *rig_generate(int n, uint32_t seed, int max_tokens);
/* Submit; returns its index. */
int rig_submit(struct rig *r, struct engine_request *take);
bool rig_ended(const struct rig *r, int i);

/* One step and its checks. False: nothing to do; *wait_ms as step_once. */
bool rig_step(struct rig *r, int *wait_ms);
/* Steps until all have ended; sets `wrong` when nothing moves any more. */
void rig_run(struct rig *r);
/* Steps until request i has given n tokens or ended. */
void rig_run_tokens(struct rig *r, int i, int n);

/* Random numbers: the same everywhere. */
uint32_t rig_rand(uint64_t *state);
int rig_range(uint64_t *state, int lo, int hi); /* both included */

#endif
