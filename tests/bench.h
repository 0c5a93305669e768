/* bench.h - the kernel benches' frame: limits of the machine, timing, and the table that is printed.
 *
 * A group (bench_linear.c, ...) sets up its data and calls bench_run once per operation; bench_kernels.c holds the
 * list of groups.
 */
#ifndef SKVD_TESTS_BENCH_H
#define SKVD_TESTS_BENCH_H

#include <stdbool.h>

#include "kernels/isa.h"

/* What an operation is measured against. */
enum bench_limit {
    BENCH_F32 = 0, /* multiplies and adds in f32: GFLOP/s */
    BENCH_INT8,    /* the fastest 8-bit product of the ISA, for weights of few bits: GOP/s */
    BENCH_DOT8,    /* the same added into 32 bits, for weights of 8; where VNNI is, one instruction for both */
    BENCH_BF16,    /* bf16 products where the ISA has them, else as f32: GFLOP/s */
    BENCH_MEMORY,  /* bytes read: GB/s */
    BENCH_NONE,    /* only the time */
    BENCH_LIMITS
};

struct bench {
    const struct kern_isa *isa;
    int threads;
    double limit[2][BENCH_LIMITS]; /* per second, of one thread and of all; 0: not known */
    double mean[BENCH_LIMITS];     /* of all, over a third of a second: what a longer piece of work may be held against */
    double seconds;                /* per operation */
    const char *filter;            /* only operations whose "name shape" contains it; NULL: all */
    bool json;
    int n_printed;
};

/* Time fn(arg) (best of several runs that last b->seconds together) and print a row: name, shape, time of a call, rate
 * of `work` (operations or bytes a call), share of the limit. all_threads: against all threads' limit. Returns the
 * seconds of a call; 0 when the filter leaves the operation out. */
double bench_run(struct bench *b, const char *name, const char *shape, double work, enum bench_limit limit,
                 bool all_threads, void (*fn)(void *arg), void *arg);

/* Whether any operation whose name starts with `prefix` would run (to spare its set-up). */
bool bench_wants(const struct bench *b, const char *prefix);

/* Measure the limits that are 0: a small roofline (about 2 s). */
void bench_probe(struct bench *b);

double bench_now(void);

/* groups */
void bench_linear(struct bench *b);
void bench_attn(struct bench *b);

#endif
