/* bench_kernels.c - time the kernels: each operation's shape, time, rate and share of what this machine can do.
 *
 *   bench_kernels [--isa NAME] [--threads N] [--seconds S] [--filter TEXT] [--json] [--limits f32=G,int8=G,dot8=G,bf16=G,mem=G]
 *                 [--cpu-time]
 *
 * --cpu-time, with one thread: count the time that the thread ran, for comparisons on a machine that is busy.
 * Limits are for all threads, in GFLOP/s, GOP/s or GB/s; those not given are measured first.
 */
#include "tests/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void (*const groups[])(struct bench *b) = { bench_linear, bench_attn };

static const char *const unit[BENCH_LIMITS] = { "GFLOP/s", "GOP/s", "GOP/s", "GFLOP/s", "GB/s", "" };
static const char *const limit_name[BENCH_LIMITS] = { "f32", "int8", "dot8", "bf16", "mem", "" };

static clockid_t clock_used = CLOCK_MONOTONIC;

double bench_now(void)
{
    struct timespec t;
    clock_gettime(clock_used, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool bench_wants(const struct bench *b, const char *prefix)
{
    return !b->filter || strstr(b->filter, prefix) || strstr(prefix, b->filter);
}

/* Runs of at least 2 ms each, the best one counts: other work on the machine only ever adds. */
static double best_seconds(const struct bench *b, void (*fn)(void *arg), void *arg)
{
    fn(arg);
    int calls = 1;
    double best = 1e30, end = bench_now() + b->seconds;
    do {
        double t = bench_now();
        for (int i = 0; i < calls; i++)
            fn(arg);
        t = bench_now() - t;
        if (t / calls < best)
            best = t / calls;
        if (t < 0.002 && calls < 1 << 20)
            calls *= 2;
    } while (bench_now() < end);
    return best;
}

double bench_run(struct bench *b, const char *name, const char *shape, double work, enum bench_limit limit,
                 bool all_threads, void (*fn)(void *arg), void *arg)
{
    char full[160];
    snprintf(full, sizeof full, "%s %s", name, shape);
    if (b->filter && !strstr(full, b->filter))
        return 0;
    double s = best_seconds(b, fn, arg), rate = work / s, top = b->limit[all_threads][limit];
    if (b->json) {
        printf("%s\n  {\"op\": \"%s\", \"shape\": \"%s\", \"isa\": \"%s\", \"threads\": %d, \"us\": %.3f",
               b->n_printed ? "," : "", name, shape, b->isa->name, all_threads ? b->threads : 1, s * 1e6);
        if (limit != BENCH_NONE)
            printf(", \"rate\": %.2f, \"unit\": \"%s\", \"limit\": \"%s\", \"share\": %.3f", rate * 1e-9, unit[limit],
                   limit_name[limit], rate / top);
        printf("}");
    } else if (limit == BENCH_NONE) {
        printf("%-24s %-34s %2d %11.2f us\n", name, shape, all_threads ? b->threads : 1, s * 1e6);
    } else {
        printf("%-24s %-34s %2d %11.2f us %9.2f %-7s %4.0f %%\n", name, shape, all_threads ? b->threads : 1, s * 1e6,
               rate * 1e-9, unit[limit], 100 * rate / top);
    }
    fflush(stdout);
    b->n_printed++;
    return s;
}

static void usage(void)
{
    fprintf(stderr, "usage: bench_kernels [--isa NAME] [--threads N] [--seconds S] [--filter TEXT] [--json]\n"
                    "                     [--cpu-time] [--limits f32=G,int8=G,dot8=G,bf16=G,mem=G]\n");
    exit(2);
}

static void parse_limits(struct bench *b, char *text)
{
    for (char *part = strtok(text, ","); part; part = strtok(NULL, ",")) {
        char *eq = strchr(part, '=');
        int k = 0;
        while (eq && k < BENCH_NONE && strncmp(part, limit_name[k], (size_t)(eq - part)) != 0)
            k++;
        double value = eq ? strtod(eq + 1, NULL) * 1e9 : 0;
        if (k == BENCH_NONE || value <= 0)
            usage();
        b->limit[1][k] = b->mean[k] = value;
        b->limit[0][k] = value / b->threads;
    }
}

static void print_head(const struct bench *b)
{
    if (b->json) {
        printf("{\"isa\": \"%s\", \"threads\": %d, \"limits\": {", b->isa->name, b->threads);
        for (int k = 0; k < BENCH_NONE; k++)
            printf("%s\"%s\": {\"one\": %.1f, \"all\": %.1f, \"mean\": %.1f, \"unit\": \"%s\"}", k > 0 ? ", " : "",
                   limit_name[k], b->limit[0][k] * 1e-9, b->limit[1][k] * 1e-9, b->mean[k] * 1e-9, unit[k]);
        printf("}, \"ops\": [");
        return;
    }
    printf("isa %s, %d threads; limits of one thread, of all, and the mean of all in a third of a second:\n", b->isa->name, b->threads);
    for (int k = 0; k < BENCH_NONE; k++)
        printf("  %-5s %9.1f %9.1f %9.1f %s\n", limit_name[k], b->limit[0][k] * 1e-9, b->limit[1][k] * 1e-9, b->mean[k] * 1e-9,
               unit[k]);
    printf("%-24s %-34s %2s %14s %9s %12s\n", "operation", "shape", "th", "time", "rate", "share");
}

int main(int argc, char **argv)
{
    struct bench b = { .threads = (int)sysconf(_SC_NPROCESSORS_ONLN), .seconds = 0.3 };
    const char *isa = NULL;
    char *limits = NULL;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--json") == 0) {
            b.json = true;
            continue;
        }
        if (strcmp(argv[i], "--cpu-time") == 0) {
            clock_used = CLOCK_THREAD_CPUTIME_ID;
            continue;
        }
        if (!value)
            usage();
        if (strcmp(argv[i], "--isa") == 0)
            isa = value;
        else if (strcmp(argv[i], "--threads") == 0)
            b.threads = atoi(value);
        else if (strcmp(argv[i], "--seconds") == 0)
            b.seconds = strtod(value, NULL);
        else if (strcmp(argv[i], "--filter") == 0)
            b.filter = value;
        else if (strcmp(argv[i], "--limits") == 0)
            limits = argv[i + 1];
        else
            usage();
        i++;
    }
    struct skv_error err;
    if (b.threads < 1 || (clock_used != CLOCK_MONOTONIC && b.threads > 1))
        usage();
    if (!(b.isa = kern_isa_get(isa, &err))) {
        fprintf(stderr, "bench_kernels: %s\n", err.msg);
        return 1;
    }
    if (limits)
        parse_limits(&b, limits);
    bench_probe(&b);
    print_head(&b);
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++)
        groups[i](&b);
    if (b.json)
        printf("\n]}\n");
    return 0;
}
