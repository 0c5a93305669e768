/* step.h - the engine's life: init.c brings it up, step.c runs it. */
#ifndef SKVD_ENGINE_STEP_H
#define SKVD_ENGINE_STEP_H

#include "engine/core.h"

/* Model, backend, pool, layer plan (phase 1). On failure what there is stays for init_undo. */
int init_run(struct engine *e, struct skv_error *err);
/* Of a process that follows another: place its part of the model and follow to the end. */
int init_follow(struct engine *e, struct skv_error *err);
void init_undo(struct engine *e);

/* All of engine_start but the thread: the caller runs the steps (deterministic tests, the planner). */
struct engine *engine_new(const struct engine_config *cfg, struct skv_error *err);

/* One iteration. False: there is nothing to do until a command comes or *wait_ms have passed (-1: for ever). */
bool step_once(struct engine *e, int *wait_ms);
/* The last one: what is still there ends as cancelled. */
void step_end(struct engine *e);

/* The thread: one iteration after another until it is stopped. arg: struct engine. */
void *step_thread(void *arg);

#endif
