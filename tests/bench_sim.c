/* bench_sim.c - the cost model against the CPU backend's measured step times, and the fit that gives its figures.
 *
 *   bench_sim MODEL [--threads N] [--device NAME] [--fit] [--quick] [--repeat N] [--from FILE]
 *
 * The same requests run, step by step, on the CPU backend (timed) and on the sim backend (its clock). A prompt runs one unit
 * (a tile of a layer) a step: the time of a tile is the least over the layers, so other load on the machine matters
 * less (little with --threads 1, where the thread's own time is taken); a decode step's is the least of forty. --fit searches the device figures that make the points marked `fit` agree best; the
 * others are predictions and are never fitted. --from takes the measured times from an earlier run's standard error.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/core.h"
#include "engine/step.h"
#include "kernels/sim/sim.h"

#define TILES_MAX 32
#define DECODE_STEPS 40

struct point {
    const char *policy, *dtype;
    int prompt, batch; /* batch 0: the prefill of one prompt; else decode steps of `batch` sequences at that depth */
    bool fit;
    double measured, predicted; /* ms: a whole prefill, or a step */
};

static struct point points[] = {
    { "full", NULL, 48, 0, true, 0, 0 },       { "full", NULL, 256, 0, true, 0, 0 },   { "full", NULL, 3072, 0, true, 0, 0 },
    { "sparse", NULL, 3072, 0, true, 0, 0 },   { "full", NULL, 8, 1, true, 0, 0 },     { "full", NULL, 8, 12, true, 0, 0 },
    { "full", NULL, 2000, 1, true, 0, 0 },     { "full", NULL, 1500, 8, true, 0, 0 },
    { "full", NULL, 120, 0, false, 0, 0 },     { "full", NULL, 512, 0, false, 0, 0 },  { "full", NULL, 4096, 0, false, 0, 0 },
    { "sparse", NULL, 4096, 0, false, 0, 0 },  { "article", NULL, 2048, 0, false, 0, 0 }, { "full", NULL, 8, 4, false, 0, 0 },
    { "full", NULL, 4000, 1, false, 0, 0 },    { "sparse", NULL, 4000, 1, false, 0, 0 }, { "full", NULL, 1000, 4, false, 0, 0 },
    { "full", NULL, 700, 16, false, 0, 0 },    { "sparse", NULL, 1500, 8, false, 0, 0 },
};
#define N_POINT (sizeof points / sizeof *points)

static struct engine_config base;
static int vocab;

/* With one thread that thread's time, in which other load counts little; else the wall's. */
static double clock_ms(void)
{
    struct timespec t;

    clock_gettime(base.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + 1e-6 * (double)t.tv_nsec;
}

static struct engine *start(const struct point *p, bool sim, const struct sim_device *device)
{
    struct engine_config cfg = base;
    struct skv_error err;

    cfg.backend = sim ? "sim" : "cpu";
    cfg.kv.policy = p->policy;
    cfg.kv.dtype = p->dtype;
    cfg.max_sequences = cfg.max_batch = p->batch > 0 ? p->batch : 1;
    cfg.step_ms = 1;
    cfg.kv_memory = (int64_t)4 << 30;
    struct engine *e = engine_new(&cfg, &err);
    if (e == NULL) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
    if (sim)
        ((struct sim *)e->be)->dev = device;
    vocab = tok_vocab(e->model.tok);
    return e;
}

static void submit(struct engine *e, int n, int answer, uint32_t seed)
{
    struct engine_request *q = engine_request_new(ENGINE_GENERATE);
    struct skv_error err;
    uint64_t id;

    q->tokens = malloc((size_t)n * sizeof *q->tokens);
    q->n_tokens = n;
    for (int i = 0; i < n; i++)
        q->tokens[i] = (int32_t)(sim_mix(seed, (uint64_t)i) % (uint64_t)(vocab - 100)) + 50;
    q->max_tokens = answer;
    q->sampling.temperature = 0;
    q->ignore_eos = true;
    if (engine_submit(e, q, &id, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
}

static void drop_events(struct engine *e)
{
    struct engine_event ev[64];
    int n;

    while ((n = engine_events(e, ev, 64)) > 0)
        for (int i = 0; i < n; i++)
            engine_event_fini(&ev[i]);
}

/* One step; its time in ms by the clock that counts. */
static double step_ms(struct engine *e, bool sim)
{
    double t = sim ? (double)core_now_us(e) / 1000 : clock_ms();
    int ms;

    step_once(e, &ms);
    t = (sim ? (double)core_now_us(e) / 1000 : clock_ms()) - t;
    drop_events(e);
    return t;
}

/* A whole prefill: for each tile the least time over the layers, times the layers. The first unit of all (embedding) and the
 * last (logits) are left out. */
static double run_prefill(const struct point *p, bool sim, const struct sim_device *device)
{
    struct engine *e = start(p, sim, device);
    const struct prefill_group *g = &e->group[0];
    double tile[TILES_MAX], sum = 0;
    int n_tile = (p->prompt + OPS_TILE - 1) / OPS_TILE;

    for (int i = 0; i < TILES_MAX; i++)
        tile[i] = 1e30;
    submit(e, p->prompt, 1, 7);
    step_ms(e, sim);
    while (g->active) {
        int from = g->layer * n_tile + g->tile;
        double t = step_ms(e, sim);
        int units = g->layer * n_tile + g->tile - from;
        if (!g->active || units < 1 || (units > 1 && n_tile > 1))
            continue; /* the last one; or several tiles in one step */
        double *at = &tile[from % n_tile];
        *at = t / units < *at ? t / units : *at;
    }
    for (int i = 0; i < n_tile; i++)
        sum += tile[i] * e->model.src.dims.n_layer;
    engine_free(e);
    return sum;
}

/* Make all sequences as deep as if their prompts had been n tokens: attention takes as long over slots that are zero. Full
 * layers only; what is said is nonsense, and nobody listens. */
static void deepen(struct engine *e, int n)
{
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        for (int l = 0; l < e->model.src.dims.n_layer; l++)
            for (int h = 0; h < e->model.src.dims.n_kv; h++) {
                pages_grow(e->pages, s->lane, l, h, n);
                e->kv->len[core_head(e, s->lane, l, h)] = n;
            }
}

static double run_decode(const struct point *p, bool sim, const struct sim_device *device)
{
    bool shallow = strcmp(p->policy, "full") == 0; /* a short prompt is read, then deepened */
    struct engine *e = start(p, sim, device);
    double least = 1e30;
    struct seq *s;

    for (int i = 0; i < p->batch; i++)
        submit(e, shallow ? 8 : p->prompt, 2000, (uint32_t)i);
    for (int decoding = 0; decoding < p->batch;) {
        step_ms(e, sim);
        decoding = 0;
        TAILQ_FOREACH(s, &e->seqs, link)
            decoding += s->state == SEQ_DECODE;
    }
    if (shallow)
        deepen(e, p->prompt);
    for (int i = 0; i < (sim ? 1 : DECODE_STEPS); i++) {
        double t = step_ms(e, sim);
        least = t < least ? t : least;
    }
    engine_free(e);
    return least;
}

static double run(const struct point *p, bool sim, const struct sim_device *device)
{
    return p->batch > 0 ? run_decode(p, sim, device) : run_prefill(p, sim, device);
}

/* Measured times of an earlier run: its standard error. */
static int read_measured(const char *path)
{
    char what[16], policy[16];
    int prompt, batch;
    double ms;
    FILE *f = fopen(path, "r");

    if (f == NULL)
        return -1;
    while (fscanf(f, "%15s %15s %d tokens, batch %d: %lf ms\n", what, policy, &prompt, &batch, &ms) == 5)
        for (size_t i = 0; i < N_POINT; i++)
            if (points[i].prompt == prompt && points[i].batch == batch && strcmp(points[i].policy, policy) == 0 &&
                (points[i].measured == 0 || ms < points[i].measured))
                points[i].measured = ms;
    fclose(f);
    return 0;
}

static void measure(bool quick)
{
    for (size_t i = 0; i < N_POINT; i++) {
        struct point *p = &points[i];
        if (quick && (p->batch > 0 ? p->policy[0] != 'f' : p->prompt > 512)) /* what takes seconds, not minutes */
            continue;
        double t = run(p, false, NULL);
        if (p->measured == 0 || t < p->measured)
            p->measured = t;
        fprintf(stderr, "%s %s %d tokens, batch %d: %.2f ms\n", p->batch > 0 ? "decode" : "prefill", p->policy, p->prompt, p->batch, t);
    }
}

/* ---- the fit ------------------------------------------------------------------------------------------------------- */

static double misfit(struct sim_device *d)
{
    double sum = 0;

    d->graph_us = d->launch_us; /* a job of the worker pool is one */

    for (size_t i = 0; i < N_POINT; i++)
        if (points[i].fit && points[i].measured > 0) {
            double r = log(run(&points[i], true, d) / points[i].measured);
            sum += r * r;
        }
    return sum;
}

/* Each figure in turn a little up or down, as long as that helps; then smaller steps. */
static void fit(struct sim_device *d)
{
    double *figure[] = { &d->mem_bw, &d->mm_flops, &d->mm_half_rows, &d->attn_flops, &d->decode_flops, &d->row_bw, &d->token_us, &d->launch_us };
    double best = misfit(d);

    for (double step = 1.3; step > 1.02; step = sqrt(step)) {
        bool moved = true;
        for (int round = 0; moved && round < 12; round++) {
            moved = false;
            for (size_t k = 0; k < sizeof figure / sizeof *figure; k++)
                for (int up = 0; up < 2; up++) {
                    double old = *figure[k], m;
                    *figure[k] = up ? old * step : old / step;
                    m = misfit(d);
                    if (m < best) {
                        best = m;
                        moved = true;
                        break;
                    }
                    *figure[k] = old;
                }
        }
        fprintf(stderr, "step %.3f: root mean square of the log ratio %.3f\n", step, sqrt(best / 8));
    }
    printf("mem_bw %.3g mm_flops %.3g mm_half_rows %.3g attn_flops %.3g decode_flops %.3g row_bw %.3g token_us %.3g launch_us %.3g\n", d->mem_bw,
           d->mm_flops, d->mm_half_rows, d->attn_flops, d->decode_flops, d->row_bw, d->token_us, d->launch_us);
}

static double report(const struct sim_device *d)
{
    double worst = 0;

    for (size_t i = 0; i < N_POINT; i++) {
        struct point *p = &points[i];
        if (p->measured <= 0)
            continue;
        p->predicted = run(p, true, d);
        double off = p->predicted / p->measured - 1;
        printf("%-8s %-8s %5d tokens  batch %2d  measured %9.2f ms  model %9.2f ms  %+5.1f %%%s\n", p->batch > 0 ? "decode" : "prefill",
               p->policy, p->prompt, p->batch, p->measured, p->predicted, off * 100, p->fit ? "  (fitted)" : "");
        if (!p->fit && fabs(off) > worst)
            worst = fabs(off);
    }
    printf("worst prediction: %.1f %% off\n", worst * 100);
    return worst;
}

int main(int argc, char **argv)
{
    static const struct option options[] = { { "threads", 1, NULL, 't' }, { "device", 1, NULL, 'd' }, { "fit", 0, NULL, 'f' },
                                             { "quick", 0, NULL, 'q' },   { "repeat", 1, NULL, 'r' },
                                             { "from", 1, NULL, 'm' },    { NULL, 0, NULL, 0 } };
    const char *name = NULL, *from = NULL;
    bool do_fit = false, quick = false;
    int c, repeat = 1;

    engine_config_default(&base);
    base.threads = 2;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (c) {
        case 't': base.threads = atoi(optarg); break;
        case 'd': name = optarg; break;
        case 'f': do_fit = true; break;
        case 'q': quick = true; break;
        case 'm': from = optarg; break;
        case 'r': repeat = atoi(optarg); break;
        default: return 2;
        }
    if (name == NULL)
        name = base.threads == 1 ? "zen4-1core" : "zen4-2core";
    if (optind + 1 != argc || sim_device_find(name) == NULL) {
        fprintf(stderr, "usage: bench_sim MODEL [--threads N] [--device NAME] [--fit] [--quick] [--repeat N] [--from FILE]\n");
        return 2;
    }
    base.model = argv[optind];
    struct sim_device d = *sim_device_find(name);
    if (from != NULL && read_measured(from) < 0) {
        perror(from);
        return 1;
    }
    for (int r = 0; from == NULL && r < repeat; r++)
        measure(quick);
    if (do_fit)
        fit(&d);
    return report(&d) <= 0.2 ? 0 : 1;
}
