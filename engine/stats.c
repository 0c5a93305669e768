#include "engine/stats.h"

#include <string.h>
#include <time.h>

#define GET(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define SET(x, v) atomic_store_explicit(&(x), (v), memory_order_relaxed)
#define ADD(x, v) atomic_fetch_add_explicit(&(x), (v), memory_order_relaxed)

const double engine_hist_bounds[ENGINE_HIST] = { 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
                                                 0.3,   0.4,   0.6,   0.8,  1,    2,    5,    10,   20,    40,  80,  160 };

static int64_t now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void stats_init(struct stats *s)
{
    memset(s, 0, sizeof *s);
    s->t_start = now_us();
    SET(s->mass_ppm, -1);
    SET(s->steps_graph, -1);
    SET(s->steps_plain, -1);
}

/* The ring slot of the second that now is in; the first writer of a new second clears it. */
void stats_tokens(struct stats *s, int64_t in, int64_t out)
{
    int64_t sec = now_us() / 1000000;
    int k = (int)(sec % STATS_SECONDS);

    if (GET(s->second[k]) != sec) {
        SET(s->in_s[k], 0);
        SET(s->out_s[k], 0);
        SET(s->second[k], sec);
    }
    ADD(s->in_s[k], in);
    ADD(s->out_s[k], out);
    ADD(s->tokens_in, in);
    ADD(s->tokens_out, out);
}

void stats_hist_add(struct stats_hist *h, int64_t us)
{
    int b = 0;

    while (b < ENGINE_HIST && (double)us > engine_hist_bounds[b] * 1e6)
        b++;
    ADD(h->bucket[b], 1);
    ADD(h->sum_us, us);
}

void stats_step_begin(struct stats *s)
{
    SET(s->step_t, now_us());
    SET(s->busy, 1);
}

void stats_step_end(struct stats *s)
{
    int64_t now = now_us(), us = now - GET(s->step_t);

    SET(s->step_us_last, us);
    ADD(s->step_us_sum, us);
    ADD(s->steps, 1);
    SET(s->step_t, now);
}

void stats_idle(struct stats *s)
{
    SET(s->busy, 0);
}

static void read_hist(const struct stats_hist *h, int64_t *bucket, double *sum)
{
    for (int i = 0; i <= ENGINE_HIST; i++)
        bucket[i] = GET(h->bucket[i]);
    *sum = (double)GET(h->sum_us) * 1e-6;
}

void stats_read(const struct stats *s, struct engine_stats *out)
{
    int64_t now = now_us(), sec = now / 1000000, in = 0, tokens = 0;
    int mass = GET(s->mass_ppm);

    memset(out, 0, sizeof *out);
    out->uptime_ms = (now - s->t_start) / 1000;
    out->running = GET(s->running);
    out->waiting = GET(s->waiting);
    out->idle_sessions = GET(s->idle_sessions);
    out->finished = GET(s->finished);
    out->failed = GET(s->failed);
    out->cancelled = GET(s->cancelled);
    for (int i = 0; i < 3; i++)
        out->finished_reason[i] = GET(s->reason[i]);
    out->tokens_in = GET(s->tokens_in);
    out->tokens_out = GET(s->tokens_out);
    for (int k = 0; k < STATS_SECONDS; k++)
        if (GET(s->second[k]) > sec - 10) {
            in += GET(s->in_s[k]);
            tokens += GET(s->out_s[k]);
        }
    out->in_per_s = (double)in / 10;
    out->out_per_s = (double)tokens / 10;
    out->pages_total = GET(s->pages_total);
    out->pages_used = GET(s->pages_used);
    out->pages_free = out->pages_total - out->pages_used;
    out->evicted = GET(s->evicted);
    out->steps = GET(s->steps);
    out->step_age_ms = GET(s->busy) ? (now - GET(s->step_t)) / 1000 : 0;
    out->steps_graph = GET(s->steps_graph);
    out->steps_plain = GET(s->steps_plain);
    out->steps_ahead = GET(s->steps_ahead);
    out->step_ms_last = (double)GET(s->step_us_last) * 1e-3;
    out->step_ms_mean = out->steps > 0 ? (double)GET(s->step_us_sum) * 1e-3 / (double)out->steps : 0;
    out->kept_mass = mass < 0 ? -1 : mass * 1e-6;
    out->bytes_saved = GET(s->bytes_saved);
    read_hist(&s->ttft, out->hist_ttft, &out->sum_ttft_s);
    read_hist(&s->itl, out->hist_itl, &out->sum_itl_s);
    read_hist(&s->queue, out->hist_queue, &out->sum_queue_s);
}
