/* bench_engine.c - the engine's speed, without a socket: prefill and decode at the depths and batches that users meet.
 *
 *   bench_engine MODEL [--threads N] [--json] [--policy NAME] [--dtype bf16|int8] [--quick] [--batch N] [--isa NAME] [--rounds N]
 *                      [--rows prefill:TOKENS,decode:DEPTH:BATCH,gap:TOKENS,...] [--prompts FILE] [--step-ms N]
 *
 * Prefill: time to the first token of one prompt. Decode: all sequences' prompts are put into sessions first, then all go on at
 * once; tokens are counted from the moment when the last one began until the first one ends. The best of the rounds is given,
 * with the spread. Gap: one client decodes while the prompt of another is prefilled; the longest time between two of its tokens, also
 * as a multiple of step_ms. Prompts are lines {"tokens": [...]} of the file, one after the other, else made up.
 */
#include <getopt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/engine_client.h"

static struct engine_config cfg;
static bool json;
static int vocab, rounds = 3;
static const char *prompts;

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Line n of the file, going round; NULL if there is none. malloc'd. */
static char *nth_line(const char *path, uint32_t n)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t size = 0;
    uint32_t count = 0;

    while (f != NULL && getline(&line, &size, f) >= 0)
        count++;
    if (count > 0) {
        rewind(f);
        for (uint32_t i = 0; i <= n % count; i++)
            if (getline(&line, &size, f) < 0)
                break;
    } else {
        fprintf(stderr, "%s: no prompts\n", path);
        free(line);
        line = NULL;
    }
    if (f != NULL)
        fclose(f);
    return line;
}

/* Up to n tokens of a line {"tokens": [...]}. Returns how many. */
static int of_line(const char *line, int32_t *ids, int n)
{
    const char *p = line != NULL ? strstr(line, "\"tokens\"") : NULL;
    int got = 0;

    p = p != NULL ? strchr(p, '[') : NULL;
    while (p != NULL && got < n) {
        char *end;
        ids[got] = (int32_t)strtol(p + 1, &end, 10);
        if (end == p + 1)
            break;
        got++;
        p = end;
    }
    return got;
}

static int32_t *tokens(int n, uint32_t seed)
{
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    uint32_t x = seed * 2654435761u + 1;

    char *line = prompts != NULL ? nth_line(prompts, seed) : NULL;
    for (int i = of_line(line, ids, n); ids != NULL && i < n; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (int32_t)((x >> 8) % (uint32_t)(vocab - 100)) + 50;
    }
    free(line);
    return ids;
}

static void row(const char *what, int depth, int batch, const char *policy, double best, double worst)
{
    if (json)
        printf("{\"bench\": \"%s\", \"depth\": %d, \"batch\": %d, \"policy\": \"%s\", \"dtype\": \"%s\", \"tokens_per_s\": %.1f, \"worst\": %.1f}\n",
               what, depth, batch, policy, cfg.kv.dtype != NULL ? cfg.kv.dtype : "bf16", best, worst);
    else
        printf("%-8s %6d tokens  batch %2d  %-10s %9.1f tokens/s   (worst round %.1f)\n", what, depth, batch, policy, best, worst);
    fflush(stdout);
}

static void prefill(struct engine *e, int n)
{
    double best = 0, worst = 1e30;

    for (int r = 0; r < rounds; r++) {
        int32_t *ids = tokens(n, (uint32_t)r + 1);
        double t = now();
        struct client_reply *reply = client_call(e, client_generate(ids, n, 1));
        double rate = n / (now() - t);
        if (reply->code != SKV_OK)
            fprintf(stderr, "prefill %d: %s\n", n, reply->message);
        client_reply_free(reply);
        free(ids);
        best = rate > best ? rate : best;
        worst = rate < worst ? rate : worst;
    }
    row("prefill", n, 1, cfg.kv.policy, best, worst);
}

static void fill_session(struct engine *e, int i, int depth)
{
    int32_t *ids = tokens(depth, 100 + (uint32_t)i);
    struct engine_request *q = client_generate(ids, depth, 0);
    char name[16];

    snprintf(name, sizeof name, "b%d", i);
    q->session = strdup(name);
    struct client_reply *r = client_call(e, q);
    if (r->code != SKV_OK)
        fprintf(stderr, "session %d of %d tokens: %s\n", i, depth, r->message);
    client_reply_free(r);
    free(ids);
}

/* One token more for every session, `steps` answer tokens each; tokens a second while all of them run. */
static double decode_round(struct engine *e, int batch, int steps)
{
    uint64_t id[256];
    int first[256] = { 0 }, begun = 0, count = 0, open = batch;
    double t0 = 0, t1 = 0;
    int32_t one = 100;

    for (int i = 0; i < batch; i++) {
        struct engine_request *q = client_generate(&one, 1, steps);
        struct skv_error err;
        char name[16];
        snprintf(name, sizeof name, "b%d", i);
        q->session = strdup(name);
        if (engine_submit(e, q, &id[i], &err) < 0)
            fprintf(stderr, "%s\n", err.msg);
    }
    while (open > 0) {
        struct pollfd p = { .fd = engine_event_fd(e), .events = POLLIN };
        struct engine_event ev[64];
        poll(&p, 1, -1);
        int n = engine_events(e, ev, 64);
        for (int k = 0; k < n; k++) {
            double t = 1e-6 * (double)ev[k].t_us; /* the engine's clock: this thread may be late */
            int i = 0;
            while (i < batch && id[i] != ev[k].id)
                i++;
            if (ev[k].type == ENGINE_EV_END) {
                open--;
                if (t1 == 0)
                    t1 = t;
            } else if (t1 == 0 && begun == batch) {
                count++;
            } else if (first[i]++ == 0 && ++begun == batch) {
                t0 = t;
            }
            engine_event_fini(&ev[k]);
        }
    }
    return t1 > t0 ? count / (t1 - t0) : 0;
}

static void decode(struct engine *e, int depth, int batch)
{
    double best = 0, worst = 1e30;

    for (int i = 0; i < batch; i++)
        fill_session(e, i, depth);
    for (int r = 0; r < rounds; r++) {
        double rate = decode_round(e, batch, batch > 8 ? 24 : 48);
        best = rate > best ? rate : best;
        worst = rate < worst ? rate : worst;
    }
    row("decode", depth, batch, cfg.kv.policy, best, worst);
}

/* What one token event after the other says of the pace while the other's prompt is in hand. */
struct pace {
    int64_t last, worst; /* microseconds */
    double sum;
    int n;
};

static void pace_token(struct pace *p, int64_t t)
{
    int64_t gap = t - p->last;

    if (p->last != 0) {
        p->worst = gap > p->worst ? gap : p->worst;
        p->sum += (double)gap;
        p->n++;
    }
    p->last = t;
}

/* A client decodes; after 8 tokens a prompt of n comes, and gaps count until its first token. Returns the seconds that it took. */
static double gap_round(struct engine *e, int n, uint32_t seed, struct pace *pace)
{
    int32_t *first = tokens(200, seed + 50), *ids = tokens(n, seed);
    uint64_t decoder, prompt = 0;
    struct skv_error err;
    double begun = 0, took = 0;
    int open = 1, count = 0;

    memset(pace, 0, sizeof *pace);
    if (engine_submit(e, client_generate(first, 200, 7900), &decoder, &err) < 0)
        fprintf(stderr, "%s\n", err.msg);
    while (open > 0) {
        struct pollfd p = { .fd = engine_event_fd(e), .events = POLLIN };
        struct engine_event ev[64];
        poll(&p, 1, -1);
        int k = engine_events(e, ev, 64);
        for (int i = 0; i < k; i++) {
            if (ev[i].type == ENGINE_EV_END) {
                open--;
            } else if (ev[i].type == ENGINE_EV_TOKEN && ev[i].id == prompt) {
                took = now() - begun;
                engine_cancel(e, decoder);
            } else if (ev[i].type == ENGINE_EV_TOKEN && took == 0) {
                count++;
                if (begun > 0 && (double)ev[i].t_us >= 1e6 * begun) /* not what lay in the queue */
                    pace_token(pace, ev[i].t_us);
            }
            engine_event_fini(&ev[i]);
        }
        if (count >= 8 && begun == 0) {
            begun = now();
            if (engine_submit(e, client_generate(ids, n, 1), &prompt, &err) < 0)
                fprintf(stderr, "%s\n", err.msg);
            open++;
        }
    }
    free(first);
    free(ids);
    return took;
}

static void gap(struct engine *e, int n)
{
    double best = 0, worst = 0, mean = 0, seconds = 0;

    for (int r = 0; r < rounds; r++) {
        struct pace p;
        double took = gap_round(e, n, (uint32_t)r + 1, &p), ms = (double)p.worst / 1000;
        if (r == 0 || ms < best) {
            best = ms;
            mean = p.n > 0 ? p.sum / p.n / 1000 : 0;
            seconds = took;
        }
        worst = ms > worst ? ms : worst;
    }
    if (json)
        printf("{\"bench\": \"gap\", \"depth\": %d, \"policy\": \"%s\", \"step_ms\": %d, \"worst_gap_ms\": %.1f, \"of_step_ms\": %.2f, "
               "\"worst_round_ms\": %.1f, \"mean_gap_ms\": %.1f, \"prefill_s\": %.2f}\n", n, cfg.kv.policy, cfg.step_ms, best,
               best / cfg.step_ms, worst, mean, seconds);
    else
        printf("gap      %6d tokens  prefilled in %.2f s beside one that decodes, %s: worst gap %.1f ms = %.2f step_ms of %d (worst round %.1f "
               "ms), mean %.1f ms\n", n, seconds, cfg.kv.policy, best, best / cfg.step_ms, cfg.step_ms, worst, mean);
    fflush(stdout);
}

static struct engine *start(const char *policy)
{
    cfg.kv.policy = policy;
    struct engine *e = client_start(&cfg);
    struct engine_model_info info;
    engine_model_info(e, &info);
    vocab = info.vocab;
    if (!json)
        printf("%s: %s, KV policy %s\n", info.name, info.detail, policy);
    return e;
}

/* "prefill:512,decode:4000:20": each on an engine of its own. */
static int run_rows(const char *policy, const char *rows)
{
    int depth, batch, used;

    for (const char *p = rows; *p != '\0'; p += used + (p[used] == ',')) {
        struct engine *e = start(policy);
        if (sscanf(p, "prefill:%d%n", &depth, &used) == 1)
            prefill(e, depth);
        else if (sscanf(p, "gap:%d%n", &depth, &used) == 1)
            gap(e, depth);
        else if (sscanf(p, "decode:%d:%d%n", &depth, &batch, &used) == 2 && batch >= 1 && batch <= 64)
            decode(e, depth, batch);
        else
            used = -1;
        engine_free(e);
        if (used < 0) {
            fprintf(stderr, "--rows: \"%s\" is none of prefill:TOKENS, decode:DEPTH:BATCH and gap:TOKENS\n", p);
            return 2;
        }
    }
    return 0;
}

static void run(const char *policy, bool quick, int batch)
{
    struct engine *e = start(policy);

    prefill(e, 512);
    prefill(e, 4096 < cfg.context || cfg.context == 0 ? 4096 : 1024);
    engine_free(e);
    e = start(policy);
    decode(e, 8, 1);
    engine_free(e);
    e = start(policy);
    decode(e, 4000, 1);
    engine_free(e);
    if (quick)
        return;
    e = start(policy);
    decode(e, 4000, batch);
    engine_free(e);
}

int main(int argc, char **argv)
{
    static const struct option options[] = { { "threads", 1, NULL, 't' }, { "json", 0, NULL, 'j' },  { "policy", 1, NULL, 'p' },
                                             { "dtype", 1, NULL, 'd' },   { "quick", 0, NULL, 'q' }, { "batch", 1, NULL, 'b' },
                                             { "isa", 1, NULL, 'i' },     { "rounds", 1, NULL, 'r' },
                                             { "rows", 1, NULL, 'R' },    { "prompts", 1, NULL, 'P' },
                                             { "step-ms", 1, NULL, 's' }, { NULL, 0, NULL, 0 } };
    const char *policy = NULL, *rows = NULL;
    bool quick = false;
    int c, batch = 20;

    engine_config_default(&cfg);
    cfg.kv_memory = (int64_t)6 << 30;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
        switch (c) {
        case 't': cfg.threads = atoi(optarg); break;
        case 'j': json = true; break;
        case 'p': policy = optarg; break;
        case 'd': cfg.kv.dtype = optarg; break;
        case 'q': quick = true; break;
        case 'b': batch = atoi(optarg); break;
        case 'i': cfg.isa = optarg; break;
        case 'R': rows = optarg; break;
        case 'P': prompts = optarg; break;
        case 's': cfg.step_ms = atoi(optarg); break;
        case 'r': rounds = atoi(optarg); break;
        default: return 2;
        }
    if (optind + 1 != argc || batch < 1 || batch > 64 || rounds < 1) {
        fprintf(stderr, "usage: bench_engine MODEL [--threads N] [--json] [--policy NAME] [--dtype NAME] [--quick] [--batch N] [--rounds N]\n");
        return 2;
    }
    cfg.model = argv[optind];
    if (rows != NULL)
        return run_rows(policy != NULL ? policy : "full", rows);
    if (policy != NULL) {
        run(policy, quick, batch);
    } else {
        run("full", quick, batch);
        run("sparse", quick, batch);
    }
    return 0;
}
