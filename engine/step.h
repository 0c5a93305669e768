/* step.h - the engine's life: init.c brings it up, step.c runs it. */
#ifndef SKVD_ENGINE_STEP_H
#define SKVD_ENGINE_STEP_H

#include "engine/core.h"

/* Model, backend, pool, layer plan (phase 1). On failure what there is stays for init_undo. */
int init_run(struct engine *e, struct skv_error *err);
void init_undo(struct engine *e);

/* The thread: one iteration after another until it is stopped. arg: struct engine. */
void *step_thread(void *arg);

#endif
