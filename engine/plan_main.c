/* plan_main.c - skvd-plan: what a machine would serve under which KV plan, by the cost model (plan.h). `skvctl plan` runs it. */
#include "config.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/plan.h"
#include "engine/policy.h"
#include "engine/preset.h"
#include "kernels/sim/device.h"

#define POLICIES_MAX 8
#define CLIENTS_MAX  32

struct args {
    struct plan_ask ask;
    const char *policies;
    int budget;
    const char *clients;
    bool json;
};

enum { OPT_MODEL = 1, OPT_GPU, OPT_INPUT, OPT_OUTPUT, OPT_POLICY, OPT_BUDGET, OPT_CLIENTS, OPT_MEMORY, OPT_SHARE, OPT_DTYPE, OPT_STEP,
       OPT_ROUNDS, OPT_JSON, OPT_LIST, OPT_HELP, OPT_VERSION };

static const struct option options[] = {
    { "model", 1, NULL, OPT_MODEL },   { "gpu", 1, NULL, OPT_GPU },         { "device", 1, NULL, OPT_GPU },
    { "input", 1, NULL, OPT_INPUT },   { "output", 1, NULL, OPT_OUTPUT },   { "policy", 1, NULL, OPT_POLICY },
    { "budget", 1, NULL, OPT_BUDGET }, { "concurrency", 1, NULL, OPT_CLIENTS }, { "kv-memory", 1, NULL, OPT_MEMORY },
    { "share", 1, NULL, OPT_SHARE },   { "kv-dtype", 1, NULL, OPT_DTYPE },  { "step-ms", 1, NULL, OPT_STEP },
    { "rounds", 1, NULL, OPT_ROUNDS }, { "json", 0, NULL, OPT_JSON },       { "list", 0, NULL, OPT_LIST },
    { "help", 0, NULL, OPT_HELP },     { "version", 0, NULL, OPT_VERSION }, { NULL, 0, NULL, 0 },
};

static const char help[] =
    "usage: skvd-plan --model NAME [--gpu DEVICE] [OPTIONS]\n\n"
    "What a machine would serve, by a cost model that drives the real scheduler and KV memory.\n\n"
    "  --model NAME[/TYPE]   a preset (--list), its weights as TYPE if given, or a GGUF file\n"
    "  --gpu DEVICE          the machine (--list); rtx4090\n"
    "  --input N             tokens of a prompt; 4000\n"
    "  --output N            tokens of an answer; 500\n"
    "  --policy NAME,...     KV policies to compare; full,article,sparse\n"
    "  --budget N            slots a head in their sparse layers; each policy's default\n"
    "  --concurrency N,...   clients at a time; 1,2,4,8,10,12,16,20,24,32,40\n"
    "  --kv-memory BYTES     of KV memory (K, M and G are understood); what the device has left\n"
    "  --share X             of the device's memory may be used; 0.9\n"
    "  --kv-dtype NAME       bf16 or int8; bf16\n"
    "  --step-ms N           the scheduler's target for a step; 60\n"
    "  --rounds N            requests that each client sends; 4\n"
    "  --json                one JSON line for each policy and concurrency\n"
    "  --list                the presets and devices, with the sources of their figures\n";

static int usage(const char *what, const char *value)
{
    fprintf(stderr, "skvd-plan: %s '%s'; see skvd-plan --help\n", what, value);
    return 2;
}

static bool whole(const char *s, long lo, long hi, int *out)
{
    char *end;
    long v = strtol(s, &end, 10);

    *out = (int)v;
    return end != s && *end == '\0' && v >= lo && v <= hi;
}

static bool size_of(const char *s, int64_t *out)
{
    char *end;
    double v = strtod(s, &end);
    static const char unit[] = "KMGT";
    const char *u = *end != '\0' ? strchr(unit, *end) : NULL;

    for (const char *k = unit; u != NULL && k <= u; k++)
        v *= 1024;
    end += u != NULL;
    *out = (int64_t)v;
    return end != s && *end == '\0' && v >= 1 && v < 1e16;
}

static void list(void)
{
    printf("Models:\n ");
    for (int i = 0; preset_name(i) != NULL; i++)
        printf(" %s", preset_name(i));
    printf("\n\nDevices:\n");
    for (int i = 0; sim_device_at(i) != NULL; i++)
        printf("  %-12s %s\n               %s.\n", sim_device_at(i)->name, sim_device_at(i)->title, sim_device_at(i)->source);
}

/* -1: go on; else an exit status. */
static int take_option(struct args *a, int c)
{
    char *end;

    switch (c) {
    case OPT_MODEL: a->ask.model = optarg; return -1;
    case OPT_GPU: a->ask.device = optarg; return -1;
    case OPT_INPUT: return whole(optarg, 1, 1 << 20, &a->ask.input) ? -1 : usage("--input takes 1 to 1048576, not", optarg);
    case OPT_OUTPUT: return whole(optarg, 1, 1 << 20, &a->ask.output) ? -1 : usage("--output takes 1 to 1048576, not", optarg);
    case OPT_POLICY: a->policies = optarg; return -1;
    case OPT_BUDGET: return whole(optarg, 16, 1 << 20, &a->budget) ? -1 : usage("--budget takes 16 to 1048576, not", optarg);
    case OPT_CLIENTS: a->clients = optarg; return -1;
    case OPT_MEMORY: return size_of(optarg, &a->ask.kv_memory) ? -1 : usage("--kv-memory takes bytes, such as 6G, not", optarg);
    case OPT_SHARE:
        a->ask.share = strtod(optarg, &end);
        return *end == '\0' && a->ask.share > 0 && a->ask.share <= 1 ? -1 : usage("--share takes 0 to 1, not", optarg);
    case OPT_DTYPE: a->ask.kv_dtype = optarg; return -1;
    case OPT_STEP: return whole(optarg, 1, 10000, &a->ask.step_ms) ? -1 : usage("--step-ms takes 1 to 10000, not", optarg);
    case OPT_ROUNDS: return whole(optarg, 1, 1000, &a->ask.rounds) ? -1 : usage("--rounds takes 1 to 1000, not", optarg);
    case OPT_JSON: a->json = true; return -1;
    case OPT_LIST: list(); return 0;
    case OPT_HELP: fputs(help, stdout); return 0;
    case OPT_VERSION: puts("skvd-plan " VERSION); return 0;
    default: return 2;
    }
}

static int parse_clients(const char *s, int *out)
{
    int n = 0;
    char *end;

    for (; n < CLIENTS_MAX; s = end + 1) {
        long v = strtol(s, &end, 10);
        if (end == s || v < 1 || v > 256 || (*end != ',' && *end != '\0'))
            return -1;
        out[n++] = (int)v;
        if (*end == '\0')
            return n;
    }
    return -1;
}

/* ---- output ------------------------------------------------------------------------------------------------------- */

struct column {
    char policy[16];
    struct engine_kv_options kv;
    struct plan_facts facts;
    struct plan_row row[CLIENTS_MAX];
};

static void print_json(const struct args *a, const struct column *c, const struct plan_row *r)
{
    printf("{\"model\": \"%s\", \"device\": \"%s\", \"input\": %d, \"output\": %d, \"policy\": \"%s\", \"budget\": %d, \"full_layers\": %d, "
           "\"kv_bytes\": %lld, \"fit\": %d, \"concurrency\": %d, \"running\": %d, \"tokens_per_s\": %.1f, \"ttft_p50_ms\": %.1f, "
           "\"ttft_p99_ms\": %.1f, \"gap_p50_ms\": %.2f, \"gap_p99_ms\": %.2f, \"model_of_costs\": true}\n",
           a->ask.model, a->ask.device, a->ask.input, a->ask.output, c->policy, c->facts.budget, c->facts.full_layers,
           (long long)c->facts.kv_bytes, c->facts.fit, r->clients, r->running, r->tokens_per_s, r->ttft_p50_ms, r->ttft_p99_ms,
           r->gap_p50_ms, r->gap_p99_ms);
    fflush(stdout);
}

static void print_facts(const struct args *a, const struct column *col, int n)
{
    const struct plan_facts *f = &col[0].facts;

    printf("%s on %s: %d tokens in, %d out\n", f->model, f->device, a->ask.input, a->ask.output);
    printf("weights %.1f GiB, KV memory %.2f GiB, %s cache, step_ms %d\n\n", (double)f->weight_bytes / (1 << 30),
           (double)f->kv_bytes / (1 << 30), a->ask.kv_dtype != NULL ? a->ask.kv_dtype : "bf16", a->ask.step_ms);
    for (int i = 0; i < n; i++) {
        f = &col[i].facts;
        if (f->full_layers == f->layers)
            printf("%-10s every layer full: %d sequences fit\n", col[i].policy, f->fit);
        else
            printf("%-10s %d of %d layers full, %d slots a head in the others: %d sequences fit (%.1fx)\n", col[i].policy,
                   f->full_layers, f->layers, f->budget, f->fit, f->fit / (double)(col[0].facts.fit > 0 ? col[0].facts.fit : 1));
    }
}

static void print_table(const struct args *a, const struct column *col, int n, const int *clients, int n_clients)
{
    (void)a;
    printf("\n%-8s", "clients");
    for (int i = 0; i < n; i++)
        printf("| %-41s", col[i].policy);
    printf("\n%-8s", "");
    for (int i = 0; i < n; i++)
        printf("| %8s %6s %7s %8s %8s ", "tok/s", i > 0 ? "ratio" : "", "at once", "TTFT s", "gap ms");
    printf("\n");
    for (int k = 0; k < n_clients; k++) {
        printf("%7d ", clients[k]);
        for (int i = 0; i < n; i++) {
            const struct plan_row *r = &col[i].row[k];
            char ratio[16] = "";
            if (i > 0)
                snprintf(ratio, sizeof ratio, "%.2fx", r->tokens_per_s / col[0].row[k].tokens_per_s);
            printf("| %8.1f %6s %7d %8.2f %8.1f ", r->tokens_per_s, ratio, r->running, r->ttft_p50_ms / 1000, r->gap_p50_ms);
        }
        printf("\n");
    }
    printf("\nTTFT and gap between two tokens are medians; a client sends its next request when the last one has ended.\n"
           "This is a model, not a measurement: the real scheduler and KV memory with a clock that counts bytes, products and\n"
           "launches. Its formula is checked on the CPU backend's measured step times (one core: within 9 %%, tests/bench_sim); the\n"
           "GPUs' figures are data sheets' times assumed shares (skvd-plan --list), checked on no GPU.\n");
}

/* A line every ten seconds, as skvctl's other long commands. */
static void say_progress(int done, int total)
{
    static double last;
    const char *wish = getenv("SKVCTL_PROGRESS");
    double every = wish != NULL && *wish != '\0' ? strtod(wish, NULL) : 10;
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    double now = (double)t.tv_sec + (double)t.tv_nsec / 1e9;
    if (last == 0)
        last = now;
    if (!(every > 0) || now - last < every)
        return;
    last = now;
    fprintf(stderr, "skvd-plan: %d of %d runs\n", done, total);
}

static int run(const struct args *a, struct column *col, int n, const int *clients, int n_clients)
{
    struct skv_error err;

    for (int i = 0; i < n; i++)
        for (int k = 0; k < n_clients; k++) {
            say_progress(i * n_clients + k, n * n_clients);
            if (plan_run(&a->ask, &col[i].kv, clients[k], &col[i].facts, &col[i].row[k], &err) < 0) {
                fprintf(stderr, "skvd-plan: %s\n", err.msg);
                return 1;
            }
            if (a->json)
                print_json(a, &col[i], &col[i].row[k]);
        }
    if (a->json)
        return 0;
    print_facts(a, col, n);
    print_table(a, col, n, clients, n_clients);
    return 0;
}

/* Names from a list; returns how many, -1: one is unknown or there are too many. */
static int parse_policies(struct args *a, struct column *col)
{
    const char *s = a->policies;
    int n = 0;

    for (;;) {
        size_t len = strcspn(s, ",");
        if (n == POLICIES_MAX || len == 0 || len >= sizeof col[n].policy)
            return -1;
        memcpy(col[n].policy, s, len);
        col[n].policy[len] = '\0';
        if (policy_find(col[n].policy) == NULL)
            return -1;
        col[n].kv = (struct engine_kv_options){ col[n].policy, -1, -1, -1, -1, -1, -1, -1, NULL };
        if (policy_find(col[n].policy) != &policy_full)
            col[n].kv.budget = a->budget;
        n++;
        if (s[len] == '\0')
            return n;
        s += len + 1;
    }
}

int main(int argc, char **argv)
{
    struct args a = { .policies = "full,article,sparse", .budget = -1, .clients = "1,2,4,8,10,12,16,20,24,32,40" };
    int clients[CLIENTS_MAX], n_clients, n, c, status;
    struct column *col;

    plan_ask_default(&a.ask);
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
        if ((status = take_option(&a, c)) >= 0)
            return status;
    if (optind < argc)
        return usage("what is", argv[optind]);
    if (a.ask.model == NULL)
        return usage("--model is missing", "");
    if ((n_clients = parse_clients(a.clients, clients)) < 0)
        return usage("--concurrency takes up to 32 numbers from 1 to 256, not", a.clients);
    col = calloc(POLICIES_MAX, sizeof *col);
    if (col == NULL)
        return 1;
    n = parse_policies(&a, col);
    status = n < 0 ? usage("--policy takes up to 8 names, not", a.policies) : run(&a, col, n, clients, n_clients);
    free(col);
    return status;
}
