/* bench.c - `skvctl bench`: a load test. Each of --concurrency lanes has a connection of its own and one request in
 * flight; what is measured is what a client sees. */
#include "config.h"

#include "clients/skvctl/bench.h"

#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "clients/skvctl/words.h"

#define SAMPLE_MS 200
#define MAX_VARIANTS 9

static struct {
    long concurrency, input, output, requests, seed, warmup;
    const char *prompts, *compare;
    struct opt_list kv;
} o = { .concurrency = 4, .output = 128, .seed = 1, .warmup = 1 };

const struct ctl_opt bench_opts[] = {
    { "concurrency", 'c', OPT_INT, &o.concurrency, "N", "requests in flight at once (4)", 1, 4096 },
    { "requests", 'r', OPT_INT, &o.requests, "N", "requests in all (as many as --concurrency)", 1, 1e6 },
    { "input", 'i', OPT_INT, &o.input, "N", "tokens of each prompt (512)", 1, 1e6 },
    { "output", 'n', OPT_INT, &o.output, "N", "tokens of each answer (128)", 0, 1e6 },
    { "prompts", 'f', OPT_STR, &o.prompts, "FILE", "prompts from lines {\"tokens\": [...]}, cut to --input when that is given", 0, 0 },
    { "compare", 'C', OPT_STR, &o.compare, "POLICY,...", "a run for each policy, one after the other, with ratios to the first", 0, 0 },
    { "kv", 0, OPT_LIST, &o.kv, "KEY=VALUE,...", "KV arguments; again: a further run to compare", 0, 0 },
    { "seed", 0, OPT_INT, &o.seed, "N", "other prompts (1)", 0, 1e9 },
    { "warmup", 0, OPT_INT, &o.warmup, "N", "short requests before each run (1)", 0, 1000 },
    { "temperature", 't', WIRE_NUM, NULL, "X", "as in `run`; greedy when not given", 0, 100 },
    { "priority", 0, WIRE_INT, NULL, "N", "-10 to 10, higher first", -10, 10 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

struct bench;

struct lane {
    struct bench *b;
    struct skv *c;
    const struct prompt *prompt; /* NULL: nothing to do */
    bool in_flight;
    double sent, last, again_at; /* ms since the run began; last: the token before, 0: none yet */
};

struct bench {
    struct ctl *ctl;
    const char *kv;
    struct prompt *prompts;
    size_t n_prompts, next, done, total;
    struct lane *lanes;
    size_t n_lanes, decoding;
    struct bench_run *run;
    double start, sampled, shown;
    struct skv *watch; /* asks for status meanwhile */
    bool asked, broken;
};

static double since(const struct bench *b)
{
    return now_ms() - b->start;
}

/* ---- one request ---- */

static void on_token(struct skv *c, int64_t id, const char *method, const struct skv_value *v, void *arg)
{
    struct lane *l = arg;
    struct bench_run *r = l->b->run;
    double now = since(l->b);

    (void)c;
    (void)id;
    (void)v;
    if (strcmp(method, "token") != 0)
        return;
    if (l->last == 0) {
        series_add(&r->ttft, now - l->sent);
        series_add(&r->begin, now);
        l->b->decoding++;
    } else
        series_add(&r->gap, now - l->last);
    series_add(&r->token, now);
    l->last = now;
}

static void add_failure(struct bench_run *r, const struct skv_error *e)
{
    size_t i = 0;

    r->failed++;
    while (i < r->n_failures && r->failures[i].code != e->code)
        i++;
    if (i == sizeof r->failures / sizeof r->failures[0])
        return;
    if (i == r->n_failures) {
        r->n_failures++;
        r->failures[i].code = e->code;
        snprintf(r->failures[i].msg, sizeof r->failures[i].msg, "%.150s", e->msg);
    }
    r->failures[i].n++;
}

static void add_result(struct bench_run *r, const struct skv_value *v)
{
    const struct skv_value *kv = skv_get(v, "kv");

    r->ok++;
    r->prompt_tokens += skv_num(skv_get(v, "prompt_tokens"), 0);
    r->cached_tokens += skv_num(skv_get(v, "cached_tokens"), 0);
    r->output_tokens += skv_num(skv_get(v, "completion_tokens"), 0);
    r->slots_kept += skv_num(skv_get(kv, "slots_kept"), 0);
    r->slots_full += skv_num(skv_get(kv, "slots_full"), 0);
    r->bytes += skv_num(skv_get(kv, "bytes"), 0);
    r->bytes_full += skv_num(skv_get(kv, "bytes_full_cache"), 0);
}

static void on_done(struct skv *c, int64_t id, struct skv_reply *take_reply, void *arg)
{
    struct lane *l = arg;
    struct bench *b = l->b;
    const struct skv_error *e = skv_reply_error(take_reply);
    double now = since(b);

    (void)c;
    (void)id;
    l->in_flight = false;
    if (e != NULL && e->code == SKV_OVERLOADED && l->last == 0) {
        b->run->retries++;
        l->again_at = now + (e->retry_after_ms > 0 ? e->retry_after_ms : 100);
        skv_reply_free(take_reply);
        return;
    }
    if (l->last != 0) {
        series_add(&b->run->end, now);
        b->decoding--;
    }
    if (e == NULL) {
        add_result(b->run, skv_reply_value(take_reply));
        series_add(&b->run->whole, now - l->sent);
    } else
        add_failure(b->run, e);
    b->done++;
    l->prompt = NULL;
    skv_reply_free(take_reply);
}

static int send_prompt(struct bench *b, struct lane *l, const struct prompt *p, long output)
{
    static const struct skv_handler h = { on_token, on_done };
    struct skv_args *a = ctl_args();
    struct skv_error err;

    skv_arg_tokens(a, "tokens", p->tokens, p->n);
    skv_arg_int(a, "max_tokens", output);
    skv_arg_bool(a, "ignore_eos", true);
    if (opt_wire_given("temperature") == NULL)
        skv_arg_num(a, "temperature", 0);
    if (opt_wire(b->ctl, a, NULL) < 0) {
        skv_args_free(a);
        return -1;
    }
    skv_arg_map(a, "kv");
    if (opt_kv_args(b->ctl, a, b->kv) < 0) {
        skv_args_free(a);
        return -1;
    }
    skv_arg_end(a);
    l->in_flight = true;
    l->again_at = 0;
    l->last = 0;
    if (skv_start(l->c, "generate", a, &h, l, &err) >= 0)
        return 0;
    ctl_error(b->ctl, &err);
    return -1;
}

/* Give every idle lane something to do. */
static int feed(struct bench *b)
{
    for (size_t i = 0; i < b->n_lanes; i++) {
        struct lane *l = &b->lanes[i];
        if (l->in_flight || (l->prompt != NULL && since(b) < l->again_at))
            continue;
        if (l->prompt == NULL) {
            if (b->next == b->total || ctl_interrupted)
                continue;
            l->prompt = &b->prompts[b->next++ % b->n_prompts];
            l->sent = since(b); /* kept when sent again: the client waits from here on */
        }
        if (send_prompt(b, l, l->prompt, o.output) < 0)
            return -1;
    }
    return 0;
}

/* ---- looking at the daemon meanwhile ---- */

static void on_status(struct skv *c, int64_t id, struct skv_reply *take_reply, void *arg)
{
    struct bench *b = arg;
    const struct skv_value *v = skv_reply_value(take_reply), *running = skv_get(v, "running");
    double used = skv_num(skv_get(v, "pages_used"), 0);

    (void)c;
    (void)id;
    b->asked = false;
    if (running != NULL) {
        double n = skv_num(running, 0);
        b->run->running_max = n > b->run->running_max ? n : b->run->running_max;
        b->run->running_sum += n;
        b->run->running_n++;
        b->run->used_max = used > b->run->used_max ? used : b->run->used_max;
        b->run->pages_total = skv_num(skv_get(v, "pages_total"), 0);
    }
    skv_reply_free(take_reply);
}

static void sample(struct bench *b)
{
    static const struct skv_handler h = { NULL, on_status };
    double now = since(b);

    if (b->watch != NULL && !b->asked && now - b->sampled >= SAMPLE_MS) {
        b->sampled = now;
        b->asked = skv_start(b->watch, "status", NULL, &h, b, NULL) >= 0;
    }
    if (now - b->shown >= 100) {
        b->shown = now;
        progress((double)b->done + 0.001, (double)b->total,
                 fmt("%s: %zu of %zu done, %zu decoding, %s tokens out, %s", b->run->label, b->done, b->total, b->decoding,
                     fmt_count((double)b->run->token.n), fmt_age(now)));
    }
}

static int dispatch_all(struct bench *b, struct pollfd *fds)
{
    struct skv_error err;

    for (size_t i = 0; i < b->n_lanes; i++)
        if (fds[i].revents != 0 && skv_dispatch(b->lanes[i].c, &err) < 0) {
            progress_end();
            ctl_error(b->ctl, &err);
            return -1;
        }
    if (b->watch != NULL && fds[b->n_lanes].revents != 0 && skv_dispatch(b->watch, &err) < 0) {
        skv_close(b->watch);
        b->watch = NULL;
    }
    return 0;
}

static short events_of(struct skv *c)
{
    return (short)(POLLIN | (skv_want_write(c) ? POLLOUT : 0));
}

static int loop(struct bench *b)
{
    struct pollfd *fds = ctl_alloc(b->n_lanes + 1, sizeof *fds);
    int rc = 0;

    while (rc == 0 && b->done < b->total) {
        bool busy = false;
        rc = feed(b);
        for (size_t i = 0; i < b->n_lanes; i++) {
            fds[i] = (struct pollfd){ .fd = skv_fd(b->lanes[i].c), .events = events_of(b->lanes[i].c) };
            busy |= b->lanes[i].prompt != NULL;
        }
        if (b->watch != NULL)
            fds[b->n_lanes] = (struct pollfd){ .fd = skv_fd(b->watch), .events = events_of(b->watch) };
        if (rc < 0 || !busy || ctl_interrupted)
            break; /* interrupted: what is in flight ends with its connection */
        if (poll(fds, b->n_lanes + (b->watch != NULL), 50) > 0)
            rc = dispatch_all(b, fds);
        sample(b);
    }
    free(fds);
    return rc;
}

/* ---- a run ---- */

/* Short requests that are not counted: weights come into memory, threads wake. */
static int warm_up(struct bench *b)
{
    struct bench_run scratch = { 0 }, *run = b->run;
    struct prompt p = { 0 };
    struct skv_error err;
    int rc = 0;

    b->run = &scratch;
    for (long i = 0; i < o.warmup && rc == 0; i++) {
        struct lane *l = &b->lanes[0];
        rc = prompt_make(b->ctl, (uint64_t)o.seed + 0xabcdef + (uint64_t)i, 16, &p) == CTL_OK ? 0 : -1;
        l->prompt = &p;
        if (rc == 0)
            rc = send_prompt(b, l, &p, 4);
        while (rc == 0 && l->in_flight)
            rc = skv_wait(l->c, -1, &err) < 0 ? -1 : 0;
    }
    for (size_t i = 0; i < scratch.n_failures; i++) {
        struct skv_error e = { scratch.failures[i].code, 0, "" };
        snprintf(e.msg, sizeof e.msg, "%s", scratch.failures[i].msg);
        ctl_error(b->ctl, &e);
        rc = -1;
    }
    free(p.tokens);
    bench_run_fini(&scratch);
    b->run = run;
    b->done = 0;
    b->decoding = 0;
    return rc;
}

static int run_variant(struct ctl *ctl, const char *kv, struct prompt *prompts, size_t n_prompts, struct bench_run *run)
{
    struct bench b = { .ctl = ctl, .kv = kv, .prompts = prompts, .n_prompts = n_prompts, .run = run };
    int rc = 0;

    b.total = run->requests = (size_t)o.requests;
    b.n_lanes = (size_t)o.concurrency;
    b.lanes = ctl_alloc(b.n_lanes, sizeof *b.lanes);
    for (size_t i = 0; i < b.n_lanes && rc == 0; i++) {
        b.lanes[i].b = &b;
        b.lanes[i].c = ctl_connect_again(ctl);
        rc = b.lanes[i].c != NULL ? 0 : -1;
    }
    if (rc == 0)
        b.watch = skv_connect(ctl->socket, NULL);
    if (rc == 0)
        rc = warm_up(&b);
    b.start = now_ms();
    if (rc == 0)
        rc = loop(&b);
    run->wall_ms = since(&b);
    progress_end();
    b.run = &(struct bench_run){ 0 }; /* what ends by closing is not counted */
    for (size_t i = 0; i < b.n_lanes; i++)
        skv_close(b.lanes[i].c);
    skv_close(b.watch);
    bench_run_fini(b.run);
    free(b.lanes);
    bench_finish(run, (double)o.concurrency);
    return rc < 0 ? CTL_FAILED : CTL_OK;
}

/* The variants' KV arguments: one for each of --compare (with the one --kv besides), or one for each --kv. */
static int variants(struct ctl *ctl, const char **kv, struct bench_run *runs)
{
    char *list = o.compare ? strdup(o.compare) : NULL, *save = NULL;
    int n = 0;

    if (o.compare != NULL && o.kv.n > 1) {
        free(list);
        ctl_usage(ctl, "--compare and more than one --kv");
        return -1;
    }
    for (char *p = list ? strtok_r(list, ",", &save) : NULL; p != NULL && n < MAX_VARIANTS; p = strtok_r(NULL, ",", &save), n++) {
        size_t size = strlen(p) + (o.kv.n ? strlen(o.kv.v[0]) : 0) + 16;
        char *spec = ctl_alloc(size, 1);
        snprintf(spec, size, "policy=%s%s%s", p, o.kv.n ? "," : "", o.kv.n ? o.kv.v[0] : "");
        kv[n] = spec;
        snprintf(runs[n].label, sizeof runs[n].label, "%.60s", p);
    }
    free(list);
    if (n > 0)
        return n;
    for (size_t i = 0; i < o.kv.n && n < MAX_VARIANTS; i++, n++) {
        kv[n] = strdup(o.kv.v[i]);
        snprintf(runs[n].label, sizeof runs[n].label, "%.60s", o.kv.v[i]);
    }
    if (n == 0) {
        kv[n] = strdup("");
        snprintf(runs[n++].label, sizeof runs[0].label, "daemon's plan");
    }
    return n;
}

/* Refuse a bad --kv before any work. */
static int check_kv(struct ctl *ctl, const char *const *kv, int n)
{
    int rc = 0;
    for (int i = 0; i < n && rc == 0; i++) {
        struct skv_args *a = ctl_args();
        rc = opt_kv_args(ctl, a, kv[i]);
        skv_args_free(a);
    }
    return rc;
}

static int get_prompts(struct ctl *ctl, struct prompt **prompts, size_t *n)
{
    int status = CTL_OK;

    if (o.prompts != NULL)
        return prompts_read(ctl, o.prompts, (size_t)o.input, prompts, n);
    *n = (size_t)o.requests;
    *prompts = ctl_alloc(*n, sizeof **prompts);
    for (size_t i = 0; i < *n && status == CTL_OK; i++) {
        progress((double)i, (double)*n, "making prompts");
        status = prompt_make(ctl, (uint64_t)o.seed * 1000003 + i, (size_t)o.input, &(*prompts)[i]);
    }
    progress_end();
    return status;
}

static void report(struct ctl *ctl, const struct bench_run *runs, int n, const struct prompt *p, size_t n_prompts)
{
    size_t least = SIZE_MAX, most = 0;
    json_t *j;

    for (size_t i = 0; i < n_prompts; i++) {
        least = p[i].n < least ? p[i].n : least;
        most = p[i].n > most ? p[i].n : most;
    }
    if (!ctl->json) {
        printf("%ld requests, %ld at a time, %s tokens in, %ld out%s\n", o.requests, o.concurrency,
               least == most ? fmt("%zu", most) : fmt("%zu to %zu", least, most), o.output,
               runs[0].pages_total > 0 ? fmt("; a KV pool of %.0f pages%s", runs[0].pages_total, n > 1 ? " for each run" : "") : "");
        bench_table(runs, (size_t)n, stdout);
        return;
    }
    j = bench_json(runs, (size_t)n);
    json_object_set_new(j, "concurrency", json_integer(o.concurrency));
    json_object_set_new(j, "input_min", json_integer((json_int_t)least));
    json_object_set_new(j, "input_max", json_integer((json_int_t)most));
    json_object_set_new(j, "output", json_integer(o.output));
    json_object_set_new(j, "pool_pages", json_integer((json_int_t)runs[0].pages_total));
    json_put(j);
}

int cmd_bench(struct ctl *ctl, int argc, char **argv)
{
    const char *kv[MAX_VARIANTS] = { NULL };
    struct bench_run *runs = ctl_alloc(MAX_VARIANTS, sizeof *runs);
    struct prompt *prompts = NULL;
    size_t n_prompts = 0;
    int n = variants(ctl, kv, runs), status = CTL_USAGE, ran = 0;

    (void)argc;
    (void)argv;
    if (o.requests == 0)
        o.requests = o.concurrency;
    if (o.input == 0 && o.prompts == NULL)
        o.input = 512;
    if (n > 0 && check_kv(ctl, kv, n) == 0)
        status = ctl_connect(ctl) != NULL ? get_prompts(ctl, &prompts, &n_prompts) : ctl->status;
    ctl_catch_sigint();
    for (int i = 0; status == CTL_OK && i < n && !ctl_interrupted; i++, ran++)
        status = run_variant(ctl, kv[i], prompts, n_prompts, &runs[i]);
    if (status == CTL_OK)
        report(ctl, runs, ran, prompts, n_prompts);
    for (int i = 0; i < ran && status == CTL_OK; i++)
        if (runs[i].ok < runs[i].requests)
            status = CTL_FAILED;
    for (int i = 0; i < MAX_VARIANTS; i++) {
        free((char *)kv[i]);
        bench_run_fini(&runs[i]);
    }
    free(runs);
    prompts_free(prompts, n_prompts);
    return status;
}
