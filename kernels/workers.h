/* workers.h - the worker pool: fork-join over a few pinned threads.
 *
 * One caller (the engine thread) is worker 0. Workers spin briefly after a job, then sleep on a futex, so that
 * a decode step's many small jobs start within a microsecond and an idle daemon uses no CPU.
 */
#ifndef SKVD_KERNELS_WORKERS_H
#define SKVD_KERNELS_WORKERS_H

#include "protocol/error.h"

struct workers;

/* n >= 1 threads, the caller included. NULL with *err. */
struct workers *workers_new(int n, struct skv_error *err);
void workers_free(struct workers *w);
int workers_count(const struct workers *w);

/* Call fn(arg, item, worker) once for each item in [0, n), in any order, on any worker, and return when all are
 * done. Items are handed out one at a time by an atomic counter (even load whatever the sizes); results must not
 * depend on the order. `worker` in [0, count) selects scratch memory. Not reentrant. */
void workers_run(struct workers *w, int n, void (*fn)(void *arg, int item, int worker), void *arg);

/* The same for items that lie one after another in memory: every worker has a share of neighbours and takes them in order, one
 * long stream to read. Who has done his share takes from the ends of the others'. */
void workers_run_shares(struct workers *w, int n, void (*fn)(void *arg, int item, int worker), void *arg);

#endif
