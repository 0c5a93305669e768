/* eval.c - `skvctl eval`: accuracy of a task file under KV policies. Every record runs with the full cache first; what that
 * gives is what the variants are measured against. Many requests are in flight at once on one connection. */
#include "config.h"

#include "clients/skvctl/eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TOP 64
#define MIN_BUDGET 16

static struct {
    long concurrency, limit;
    const char *order, *by, *tasks, *split, *details, *baseline;
    struct opt_list kv, ratio;
    bool no_refeed;
} o = { .concurrency = 8, .order = "tail", .by = "score" };

const struct ctl_opt eval_opts[] = {
    { "kv", 0, OPT_LIST, &o.kv, "KEY=VALUE,...", "a variant, besides the full cache; repeatable; ratio=R as below", 0, 0 },
    { "ratio", 'r', OPT_LIST, &o.ratio, "R", "budget = (1-R) x prompt tokens, for each --kv; repeatable", 0, 0 },
    { "order", 0, OPT_STR, &o.order, "WHERE", "compress at: tail (all is in the prompt), header (of the answer), context", 0, 0 },
    { "by", 0, OPT_STR, &o.by, "HOW", "score (likelihoods of the right answer) or generate", 0, 0 },
    { "no-refeed", 0, OPT_FLAG, &o.no_refeed, NULL, "don't read the last prompt token again over the sparsified cache", 0, 0 },
    { "tasks", 0, OPT_STR, &o.tasks, "NAME,...", "only these", 0, 0 },
    { "limit", 'l', OPT_INT, &o.limit, "N", "at most N records a task and size", 1, 1e6 },
    { "split", 0, OPT_STR, &o.split, "A|B", "one half of the contexts, to choose on one and confirm on the other", 0, 0 },
    { "concurrency", 'c', OPT_INT, &o.concurrency, "N", "requests in flight (8)", 1, 1024 },
    { "baseline", 'b', OPT_STR, &o.baseline, "FILE", "take the full cache's results from FILE, and put new ones there", 0, 0 },
    { "details", 'd', OPT_STR, &o.details, "FILE", "a JSON line for each record into FILE", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

struct eval {
    struct ctl *ctl;
    struct skv *c;
    struct eval_rec *recs;
    size_t n, next, done;   /* records */
    struct eval_variant v[EVAL_VARIANTS];
    struct baseline *baseline;
    size_t n_v, requests, finished;
    bool generate, with_top, with_candidates, broken;
    struct job *ready;      /* to be sent, first in first out */
    struct job **ready_end;
    size_t in_flight;
    double not_before;      /* after "overloaded": ms of the monotonic clock */
    struct skv_error first_error; /* of a record that failed */
};

/* One request: text to tokens, or a record under a variant. */
struct job {
    struct job *next;
    struct eval *e;
    struct eval_rec *r;
    enum { JOB_TOKENS, JOB_PREFILL, JOB_RUN } what;
    struct tokens *to;       /* JOB_TOKENS: where they go, */
    int32_t *first;          /* or only the first of them */
    const char *text;
    size_t variant;
    struct dist first_token; /* JOB_RUN by generation */
};

/* ---- the queue ---- */

static void push(struct eval *e, struct job job)
{
    struct job *j = ctl_alloc(1, sizeof *j);
    *j = job;
    j->next = NULL;
    *e->ready_end = j;
    e->ready_end = &j->next;
}

static struct job *pop(struct eval *e)
{
    struct job *j = e->ready;
    if (j != NULL) {
        e->ready = j->next;
        if (e->ready == NULL)
            e->ready_end = &e->ready;
    }
    return j;
}

static void want_tokens(struct eval *e, struct eval_rec *r, const char *text, struct tokens *to, int32_t *first)
{
    if (*text == '\0')
        return;
    r->preparing++;
    push(e, (struct job){ .e = e, .r = r, .what = JOB_TOKENS, .text = text, .to = to, .first = first });
}

static void prepare(struct eval *e, struct eval_rec *r)
{
    json_t *choices = json_object_get(r->json, "choices");

    want_tokens(e, r, r->prompt_text, &r->prompt, NULL);
    want_tokens(e, r, r->pre_text, &r->pre, NULL);
    want_tokens(e, r, json_string_value(json_object_get(r->json, "answer")), &r->answer, NULL);
    for (size_t i = 0; i < r->n_choices; i++)
        want_tokens(e, r, json_string_value(json_array_get(choices, i)), NULL, &r->choice[i]);
}

/* With generation, what comes between compression and answer is a second turn of a session. */
static void push_run(struct eval *e, struct eval_rec *r, size_t variant)
{
    bool two = e->generate && r->pre.n > 0;
    push(e, (struct job){ .e = e, .r = r, .what = two ? JOB_PREFILL : JOB_RUN, .variant = variant });
}

static void finish_record(struct eval *e, struct eval_rec *r)
{
    for (size_t k = 0; r->full != NULL && k < r->answer.n; k++)
        dist_free(&r->full[k]);
    free(r->full);
    r->full = NULL;
    e->done++;
}

static void finish_variant(struct eval *e, struct eval_rec *r, size_t variant)
{
    e->finished++;
    if (variant == 0)
        for (size_t v = 1; v < e->n_v; v++)
            push_run(e, r, v);
    if (--r->variants_left == 0)
        finish_record(e, r);
}

static void prepared(struct eval *e, struct eval_rec *r)
{
    r->cont.n = r->pre.n + r->answer.n;
    r->cont.v = ctl_alloc(r->cont.n, sizeof *r->cont.v);
    if (r->pre.n > 0)
        memcpy(r->cont.v, r->pre.v, r->pre.n * sizeof *r->pre.v);
    if (r->answer.n > 0)
        memcpy(r->cont.v + r->pre.n, r->answer.v, r->answer.n * sizeof *r->answer.v);
    r->variants_left = e->n_v;
    if (baseline_get(e->baseline, r))
        finish_variant(e, r, 0);
    else
        push_run(e, r, 0);
}

/* ---- requests ---- */

static int put_kv(struct eval *e, struct skv_args *a, const struct eval_rec *r, const struct eval_variant *v)
{
    int rc;
    skv_arg_map(a, "kv");
    rc = opt_kv_args(e->ctl, a, v->spec);
    if (!isnan(v->ratio)) {
        int64_t budget = (int64_t)((double)r->prompt.n * (1 - v->ratio) + 1e-9);
        skv_arg_int(a, "budget", budget < MIN_BUDGET ? MIN_BUDGET : budget);
    }
    skv_arg_end(a);
    return rc;
}

static void put_candidates(struct skv_args *a, const struct eval_rec *r)
{
    skv_arg_array(a, "candidates");
    for (size_t i = 0; i < r->cont.n; i++) {
        skv_arg_array(a, NULL);
        for (size_t c = 0; i == r->pre.n && c < r->n_choices; c++)
            skv_arg_int(a, NULL, r->choice[c]);
        for (size_t c = 0; r->full != NULL && i >= r->pre.n && c < r->full[i - r->pre.n].n; c++)
            skv_arg_int(a, NULL, r->full[i - r->pre.n].id[c]);
        skv_arg_end(a);
    }
    skv_arg_end(a);
}

static const char *session_name(const struct job *j)
{
    return fmt("eval-%zu-%zu", (size_t)(j->r - j->e->recs), j->variant);
}

static struct skv_args *score_args(struct job *j)
{
    struct skv_args *a = ctl_args();
    const struct eval_rec *r = j->r;

    skv_arg_tokens(a, "tokens", r->prompt.v, r->prompt.n);
    skv_arg_tokens(a, "continuation", r->cont.v, r->cont.n);
    skv_arg_bool(a, "refeed", !o.no_refeed);
    if (j->e->with_top)
        skv_arg_int(a, "logprobs", TOP);
    if (j->e->with_candidates)
        put_candidates(a, r);
    put_kv(j->e, a, r, &j->e->v[j->variant]);
    return a;
}

static struct skv_args *generate_args(struct job *j)
{
    struct skv_args *a = ctl_args();
    const struct eval_rec *r = j->r;
    bool second = j->what == JOB_RUN && r->pre.n > 0;

    skv_arg_tokens(a, "tokens", second ? r->pre.v : r->prompt.v, second ? r->pre.n : r->prompt.n);
    skv_arg_int(a, "max_tokens", j->what == JOB_PREFILL ? 0 : (int64_t)r->answer.n);
    skv_arg_num(a, "temperature", 0);
    skv_arg_bool(a, "ignore_eos", true);
    if (r->kind == SCORE_CHOICE && j->what == JOB_RUN)
        skv_arg_int(a, "logprobs", TOP);
    if (r->pre.n > 0)
        skv_arg_str(a, "session", session_name(j));
    put_kv(j->e, a, r, &j->e->v[j->variant]);
    return a;
}

static void run_failed(struct job *j, const struct skv_error *err)
{
    struct eval *e = j->e;
    if (e->first_error.code == SKV_OK)
        e->first_error = *err;
    j->r->res[j->variant].state = RES_FAILED;
    j->r->res[j->variant].kl = j->r->res[j->variant].kept = NAN;
    finish_variant(e, j->r, j->variant);
}

static void tokens_done(struct job *j, const struct skv_value *v)
{
    const struct skv_value *list = skv_get(v, "tokens");
    struct eval_rec *r = j->r;

    if (j->first != NULL)
        *j->first = (int32_t)skv_int(skv_at(list, 0), -1);
    if (j->to != NULL) {
        j->to->n = skv_len(list);
        j->to->v = ctl_alloc(j->to->n, sizeof *j->to->v);
        for (size_t i = 0; i < j->to->n; i++)
            j->to->v[i] = (int32_t)skv_int(skv_at(list, i), -1);
    }
    if (--r->preparing == 0)
        prepared(j->e, r);
}

static void run_done(struct job *j, const struct skv_value *v)
{
    struct eval *e = j->e;
    struct eval_rec *r = j->r;
    struct eval_res *res = &r->res[j->variant];
    const struct skv_value *kv = skv_get(v, "kv");
    double full = skv_num(skv_get(kv, "slots_full"), 0);

    if (e->generate) {
        eval_take_generated(r, skv_get(v, "tokens"), &j->first_token, res);
        res->kept = full > 0 ? skv_num(skv_get(kv, "slots_kept"), 0) / full : NAN;
    } else
        eval_take_score(r, v, res, j->variant == 0);
    if (j->variant == 0)
        baseline_put(e->baseline, r);
    finish_variant(e, r, j->variant);
}

static void on_token(struct skv *c, int64_t id, const char *method, const struct skv_value *v, void *arg)
{
    struct job *j = arg;
    (void)c;
    (void)id;
    if (strcmp(method, "token") == 0 && skv_int(skv_get(v, "i"), -1) == 0 && j->first_token.n == 0)
        dist_read(&j->first_token, skv_get(v, "top"));
}

static void on_done(struct skv *c, int64_t id, struct skv_reply *take_reply, void *arg)
{
    struct job *j = arg;
    struct eval *e = j->e;
    const struct skv_error *err = skv_reply_error(take_reply);

    (void)c;
    (void)id;
    e->in_flight--;
    if (e->broken)
        ;
    else if (err != NULL && err->code == SKV_OVERLOADED) {
        push(e, *j); /* again, behind the others */
        e->not_before = now_ms() + (err->retry_after_ms > 0 ? err->retry_after_ms : 100);
    }    else if (err != NULL && (j->what == JOB_TOKENS || err->code == SKV_IO)) {
        progress_end();
        ctl_error(e->ctl, err);
        e->broken = true;
    } else if (err != NULL)
        run_failed(j, err);
    else if (j->what == JOB_TOKENS)
        tokens_done(j, skv_reply_value(take_reply));
    else if (j->what == JOB_PREFILL)
        push(e, (struct job){ .e = e, .r = j->r, .what = JOB_RUN, .variant = j->variant });
    else
        run_done(j, skv_reply_value(take_reply));
    skv_reply_free(take_reply);
    dist_free(&j->first_token);
    free(j);
}

static int send_job(struct eval *e, struct job *j)
{
    static const struct skv_handler h = { on_token, on_done };
    const char *method = j->what == JOB_TOKENS ? "tokenize" : e->generate ? "generate" : "score";
    struct skv_args *a;
    struct skv_error err;

    if (j->what == JOB_TOKENS) {
        a = ctl_args();
        skv_arg_str(a, "text", j->text);
        skv_arg_bool(a, "special", true);
    } else
        a = e->generate ? generate_args(j) : score_args(j);
    if (skv_start(e->c, method, a, &h, j, &err) >= 0) {
        e->in_flight++;
        return 0;
    }
    free(j);
    ctl_error(e->ctl, &err);
    return -1;
}

/* Keep the wished number in flight; begin a record when nothing else is ready. */
static int feed(struct eval *e)
{
    while (e->in_flight < (size_t)o.concurrency && now_ms() >= e->not_before) {
        struct job *j = pop(e);
        if (j == NULL && e->next < e->n) {
            prepare(e, &e->recs[e->next++]);
            j = pop(e);
        }
        if (j == NULL)
            return 0;
        if (send_job(e, j) < 0)
            return -1;
    }
    return 0;
}

static int loop(struct eval *e)
{
    struct skv_error err;

    while (e->done < e->n && !e->broken && !ctl_interrupted) {
        if (feed(e) < 0)
            return -1;
        if (skv_wait(e->c, 50, &err) < 0 && !e->broken)
            return ctl_error(e->ctl, &err), -1;
        progress((double)e->finished, (double)e->requests,
                 fmt("%zu of %zu records, %zu requests in flight", e->done, e->n, e->in_flight));
    }
    progress_end();
    return e->broken ? -1 : 0;
}

/* ---- what the daemon can tell ---- */

/* Does `score` take the argument? */
static bool takes(struct eval *e, const char *name)
{
    static const int32_t two[] = { 1, 2 };
    struct skv_args *a = ctl_args();
    struct skv_error err = { 0 };
    int rc;

    skv_arg_tokens(a, "tokens", two, 2);
    skv_arg_tokens(a, "continuation", two, 1);
    if (strcmp(name, "logprobs") == 0)
        skv_arg_int(a, name, 1);
    else {
        skv_arg_array(a, name);
        skv_arg_array(a, NULL);
        skv_arg_int(a, NULL, 1);
        skv_arg_end(a);
        skv_arg_end(a);
    }
    rc = skv_call(e->c, "score", a, NULL, &err);
    return rc == 0 || err.code != SKV_BAD_REQUEST;
}

/* ---- variants ---- */

static int add_variant(struct eval *e, const char *spec, const char *ratio)
{
    struct eval_variant *v = &e->v[e->n_v];
    const char *own = strstr(spec, "ratio=");
    char *end, *to;

    if (e->n_v == EVAL_VARIANTS)
        return ctl_usage(e->ctl, "more than %d variants", EVAL_VARIANTS - 1);
    v->ratio = NAN;
    v->spec = to = ctl_alloc(strlen(spec) + 1, 1);
    if (own != NULL && (own == spec || own[-1] == ',')) { /* cut it out */
        size_t len = strcspn(own, ",");
        size_t head = (size_t)(own - spec);
        memcpy(to, spec, head);
        strcpy(to + head, own + len + (own[len] == ','));
        if (head > 0 && to[head] == '\0' && to[head - 1] == ',')
            to[head - 1] = '\0';
        ratio = own + 6;
    } else
        strcpy(to, spec);
    if (ratio != NULL) {
        v->ratio = strtod(ratio, &end);
        if (end == ratio || (*end != '\0' && *end != ',') || !(v->ratio >= 0 && v->ratio < 1))
            return ctl_usage(e->ctl, "a ratio is the share that is evicted, from 0 to below 1");
    }
    snprintf(v->label, sizeof v->label, "%.60s", *v->spec != '\0' ? v->spec : "daemon's plan");
    if (strncmp(v->label, "policy=", 7) == 0)
        memmove(v->label, v->label + 7, strlen(v->label + 7) + 1);
    if (!isnan(v->ratio))
        snprintf(v->label + strlen(v->label), sizeof v->label - strlen(v->label), " r=%.4g", v->ratio);
    e->n_v++;
    return CTL_OK;
}

static int add_variants(struct eval *e)
{
    static const char *none = "";
    const char *const *specs = o.kv.n > 0 ? o.kv.v : &none;
    size_t n = o.kv.n > 0 ? o.kv.n : 1;
    int status = add_variant(e, "policy=full", NULL);

    for (size_t i = 0; i < n && status == CTL_OK; i++) {
        struct skv_args *a = ctl_args();
        if (opt_kv_args(e->ctl, a, specs[i]) < 0)
            status = CTL_USAGE;
        skv_args_free(a);
        if (status == CTL_OK && (o.ratio.n == 0 || strstr(specs[i], "ratio=") != NULL))
            status = add_variant(e, specs[i], NULL);
        else
            for (size_t k = 0; k < o.ratio.n && status == CTL_OK; k++)
                status = add_variant(e, specs[i], o.ratio.v[k]);
    }
    return status;
}

static int parse_choice(struct ctl *ctl, const char *what, const char *value, const char *const *names)
{
    for (int i = 0; names[i] != NULL; i++)
        if (strcmp(value, names[i]) == 0)
            return i;
    ctl_usage(ctl, "--%s: '%s' is not known; 'skvctl eval --help' lists the words", what, value);
    return -1;
}

/* ---- the command ---- */

static int details(const struct eval *e)
{
    FILE *f = fopen(o.details, "w");
    if (f == NULL) {
        perror(o.details);
        return -1;
    }
    for (size_t i = 0; i < e->n; i++) {
        json_t *j = eval_rec_json(&e->recs[i], e->v, e->n_v);
        json_dumpf(j, f, JSON_COMPACT | JSON_REAL_PRECISION(9));
        fputc('\n', f);
        json_decref(j);
    }
    return fclose(f) == 0 ? 0 : -1;
}

static int report(struct eval *e)
{
    size_t failed = 0;

    for (size_t i = 0; i < e->n; i++)
        for (size_t v = 0; v < e->n_v; v++)
            failed += e->recs[i].res[v].state == RES_FAILED;
    if (e->ctl->json) {
        json_t *j = eval_json(e->recs, e->n, e->v, e->n_v);
        json_object_set_new(j, "order", json_string(o.order));
        json_object_set_new(j, "by", json_string(o.by));
        json_object_set_new(j, "refeed", json_boolean(!o.no_refeed));
        json_object_set_new(j, "split", o.split ? json_string(o.split) : json_null());
        json_put(j);
    } else {
        printf("compressed at the %s, by %s%s%s\n\n", o.order, o.by, e->generate || o.no_refeed ? "" : ", refed",
               ctl_interrupted ? "; interrupted: what was finished" : "");
        eval_table(e->recs, e->n, e->v, e->n_v, stdout);
    }
    if (failed > 0) {
        fprintf(stderr, "skvctl: %zu requests failed; the first: ", failed);
        ctl_error(&(struct ctl){ 0 }, &e->first_error);
    }
    if (o.details != NULL && details(e) < 0)
        return CTL_FAILED;
    return failed > 0 || ctl_interrupted ? CTL_FAILED : CTL_OK;
}

static int run_all(struct eval *e)
{
    int rc;

    e->c = ctl_connect(e->ctl);
    if (e->c == NULL)
        return e->ctl->status;
    e->with_top = !e->generate && takes(e, "logprobs");
    e->with_candidates = !e->generate && takes(e, "candidates");
    e->requests = e->n * e->n_v;
    if (o.baseline != NULL) {
        e->baseline = baseline_open(o.baseline, fmt("%s %s %s", o.order, o.by, o.no_refeed ? "once" : "refed"));
        if (e->baseline == NULL)
            return CTL_USAGE;
    }
    ctl_catch_sigint();
    rc = loop(e);
    e->broken = true; /* what still ends does so by closing */
    skv_close(e->c);
    baseline_close(e->baseline);
    e->ctl->c = NULL;
    for (struct job *j = pop(e); j != NULL; j = pop(e))
        free(j);
    return rc < 0 ? CTL_FAILED : report(e);
}

int cmd_eval(struct ctl *ctl, int argc, char **argv)
{
    static const char *const orders[] = { "tail", "header", "context", NULL }, *const ways[] = { "score", "generate", NULL };
    struct eval *e = ctl_alloc(1, sizeof *e);
    struct eval_filter filter = { .tasks = o.tasks, .limit = o.limit, .split = o.split ? *o.split : 0 };
    int order = parse_choice(ctl, "order", o.order, orders), by = parse_choice(ctl, "by", o.by, ways);
    int status = order < 0 || by < 0 ? CTL_USAGE : CTL_OK;

    e->ctl = ctl;
    e->ready_end = &e->ready;
    e->generate = by == 1;
    if (o.split != NULL && strcmp(o.split, "A") != 0 && strcmp(o.split, "B") != 0)
        status = ctl_usage(ctl, "--split takes A or B");
    for (int i = 0; i < argc && status == CTL_OK; i++)
        if (eval_read(ctl, argv[i], (enum eval_order)order, &e->recs, &e->n) < 0)
            status = CTL_USAGE;
    if (status == CTL_OK)
        status = add_variants(e);
    if (status == CTL_OK) {
        eval_filter(e->recs, &e->n, &filter);
        status = e->n > 0 ? run_all(e) : ctl_usage(ctl, "no records are left");
    }
    for (size_t i = 0; i < e->n; i++)
        eval_rec_fini(&e->recs[i]);
    for (size_t i = 0; i < EVAL_VARIANTS; i++)
        free(e->v[i].spec);
    free(e->recs);
    free(e);
    return status;
}
