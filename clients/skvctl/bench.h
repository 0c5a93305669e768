/* bench.h - what one load test measured, and its report. */
#ifndef SKVD_CLIENTS_SKVCTL_BENCH_H
#define SKVD_CLIENTS_SKVCTL_BENCH_H

#include "clients/skvctl/ctl.h"

struct series {
    double *v;
    size_t n, size;
};

void series_add(struct series *s, double v);
void series_sort(struct series *s);
double series_at(const struct series *s, double share); /* sorted; between neighbours by proportion; NAN when empty */
double series_mean(const struct series *s);
void series_free(struct series *s);

/* One variant's run. Times in ms. */
struct bench_run {
    char label[96];
    size_t requests, ok, failed, retries;
    struct {
        enum skv_code code;
        size_t n;
        char msg[160];
    } failures[8];
    size_t n_failures;
    double wall_ms;
    double prompt_tokens, cached_tokens, output_tokens;
    double slots_kept, slots_full, bytes, bytes_full;     /* sums over the answers */
    double running_max, running_sum, running_n, used_max, pages_total; /* from status, sampled; n 0: not known */
    struct series ttft, gap, whole;
    struct series begin, end, token; /* moments since the start: decoding began / ended, tokens came */
    double decode_batch, decode_per_s;                    /* tokens/s while that many were decoding at once */
};

/* Work out what needs the whole run; target: the concurrency that was asked for. */
void bench_finish(struct bench_run *r, double target);
void bench_table(const struct bench_run *runs, size_t n, FILE *f);
json_t *bench_json(const struct bench_run *runs, size_t n);
void bench_run_fini(struct bench_run *r);

#endif
