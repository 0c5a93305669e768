/* stats.h - counters that the engine thread writes and any thread reads: relaxed atomics, no locks. */
#ifndef SKVD_ENGINE_STATS_H
#define SKVD_ENGINE_STATS_H

#include <stdatomic.h>

#include "engine/engine.h"

#define STATS_SECONDS 16 /* ring of per-second token counts; 10 are summed */

struct stats_hist {
    _Atomic int64_t bucket[ENGINE_HIST + 1];
    _Atomic int64_t sum_us;
};

struct stats {
    int64_t t_start;
    _Atomic int running, waiting, idle_sessions;
    _Atomic int64_t finished, failed, cancelled, reason[3];
    _Atomic int64_t tokens_in, tokens_out;
    _Atomic int64_t second[STATS_SECONDS], in_s[STATS_SECONDS], out_s[STATS_SECONDS];
    _Atomic int64_t pages_total, pages_used;
    _Atomic int64_t evicted, steps, step_t, step_us_last, step_us_sum, bytes_saved;
    _Atomic int64_t steps_graph, steps_plain; /* -1: the backend has no graphs */
    _Atomic int64_t steps_ahead;              /* decode steps whose tokens came last */
    _Atomic int busy; /* a step is under way or due */
    _Atomic int mass_ppm; /* -1: not measured */
    struct stats_hist ttft, itl, queue;
};

void stats_init(struct stats *s);
void stats_tokens(struct stats *s, int64_t in, int64_t out);
void stats_hist_add(struct stats_hist *h, int64_t us);
void stats_step_begin(struct stats *s);
void stats_step_end(struct stats *s);
void stats_idle(struct stats *s);
void stats_read(const struct stats *s, struct engine_stats *out);

#endif
