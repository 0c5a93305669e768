/* evalreport.c - scores of a task file per task and variant, relative to the full cache. */
#include "config.h"

#include "clients/skvctl/eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TASKS 16

struct sum {
    double v;
    size_t n;
};

static void sum_add(struct sum *s, double v)
{
    if (isnan(v))
        return;
    s->v += v;
    s->n++;
}

static double mean(struct sum s)
{
    return s.n > 0 ? s.v / (double)s.n : NAN;
}

/* One size's figures. */
struct cells {
    const char *task[MAX_TASKS];
    enum eval_kind kind[MAX_TASKS];
    size_t records[MAX_TASKS], n_tasks;
    struct sum score[MAX_TASKS][EVAL_VARIANTS], kl[MAX_TASKS][EVAL_VARIANTS], kept[EVAL_VARIANTS];
    size_t failed[EVAL_VARIANTS], unknown[EVAL_VARIANTS];
};

static size_t task_index(struct cells *c, const struct eval_rec *r)
{
    size_t t = 0;
    while (t < c->n_tasks && strcmp(c->task[t], r->task) != 0)
        t++;
    if (t == c->n_tasks && t < MAX_TASKS) {
        c->task[t] = r->task;
        c->kind[t] = r->kind;
        c->n_tasks++;
    }
    return t;
}

/* A record counts where every variant has it: means are over the same records. */
static bool counts(const struct eval_rec *r, size_t n_v)
{
    for (size_t v = 0; v < n_v; v++)
        if (r->res[v].state == RES_FAILED || r->res[v].state == RES_NONE)
            return false;
    return true;
}

static struct cells *gather(const struct eval_rec *recs, size_t n, int size, size_t n_v)
{
    struct cells *c = ctl_alloc(1, sizeof *c);

    for (size_t i = 0; i < n; i++) {
        const struct eval_rec *r = &recs[i];
        size_t t;
        if (r->size != size || (t = task_index(c, r)) == MAX_TASKS)
            continue;
        for (size_t v = 0; v < n_v; v++) {
            c->failed[v] += r->res[v].state == RES_FAILED;
            c->unknown[v] += r->res[v].state == RES_UNKNOWN;
        }
        if (!counts(r, n_v))
            continue;
        c->records[t]++;
        for (size_t v = 0; v < n_v; v++) {
            sum_add(&c->score[t][v], r->res[v].state == RES_DONE ? r->res[v].score : NAN);
            sum_add(&c->kl[t][v], r->res[v].kl);
            sum_add(&c->kept[v], r->res[v].kept);
        }
    }
    return c;
}

/* Mean over the tasks of min(1, score / the full cache's), without running text. */
static double relative(const struct cells *c, size_t v, bool capped)
{
    struct sum s = { 0 };
    for (size_t t = 0; t < c->n_tasks; t++) {
        double full = mean(c->score[t][0]), x = mean(c->score[t][v]);
        if (c->kind[t] == SCORE_NLL || isnan(x) || !(full > 0))
            continue;
        sum_add(&s, capped && x > full ? 1 : x / full);
    }
    return mean(s);
}

/* Mean over the tasks of the mean KL; text: running text instead of the tasks with answers. */
static double mean_kl(const struct cells *c, size_t v, bool text)
{
    struct sum s = { 0 };
    for (size_t t = 0; t < c->n_tasks; t++)
        if ((c->kind[t] == SCORE_NLL) == text)
            sum_add(&s, mean(c->kl[t][v]));
    return mean(s);
}

static bool has_text(const struct cells *c)
{
    for (size_t t = 0; t < c->n_tasks; t++)
        if (c->kind[t] == SCORE_NLL)
            return true;
    return false;
}

static const char *figure(double v, const char *f)
{
    char s[32];
    if (isnan(v))
        return "-";
    snprintf(s, sizeof s, strcmp(f, "3") == 0 ? "%.3f" : "%.2f", v);
    return fmt("%s", s);
}

static void table_of(const struct cells *c, const struct eval_variant *v, size_t n_v, FILE *f)
{
    const char *heads[MAX_TASKS + 8] = { "variant", "kept" };
    char align[MAX_TASKS + 8] = "lr";
    size_t cols = 2;
    struct table *t;

    for (size_t i = 0; i < c->n_tasks; i++) {
        heads[cols] = fmt("%s%s (%zu)", c->task[i], c->kind[i] == SCORE_NLL ? " nll" : "", c->records[i]);
        align[cols++] = 'r';
    }
    heads[cols] = "mean";
    align[cols++] = 'r';
    heads[cols] = "KL";
    align[cols++] = 'r';
    if (has_text(c)) {
        heads[cols] = "KL text";
        align[cols++] = 'r';
    }
    heads[cols] = NULL;
    t = table_new(heads, align);
    for (size_t i = 0; i < n_v; i++) {
        table_add(t, v[i].label);
        table_add(t, fmt_percent(mean(c->kept[i])));
        for (size_t k = 0; k < c->n_tasks; k++)
            table_add(t, figure(mean(c->score[k][i]), c->kind[k] == SCORE_NLL ? "3" : "2"));
        table_add(t, figure(relative(c, i, true), "2"));
        table_add(t, figure(mean_kl(c, i, false), "3"));
        if (has_text(c))
            table_add(t, figure(mean_kl(c, i, true), "3"));
    }
    table_print(t, f);
    for (size_t i = 0; i < n_v; i++) {
        if (c->failed[i] > 0)
            fprintf(f, "%s: %zu records failed and are left out of every row\n", v[i].label, c->failed[i]);
        if (c->unknown[i] > 0)
            fprintf(f, "%s: %zu records can't be scored this way with what the daemon tells\n", v[i].label, c->unknown[i]);
    }
}

/* The next size above `after`; 0: none. */
static int next_size(const struct eval_rec *recs, size_t n, int after)
{
    int best = INT32_MAX;
    for (size_t i = 0; i < n; i++)
        if (recs[i].size > after && recs[i].size < best)
            best = recs[i].size;
    return best == INT32_MAX ? -1 : best;
}

void eval_table(const struct eval_rec *recs, size_t n, const struct eval_variant *v, size_t n_v, FILE *f)
{
    for (int size = next_size(recs, n, -1); size >= 0; size = next_size(recs, n, size)) {
        struct cells *c = gather(recs, n, size, n_v);
        fprintf(f, "%d tokens\n", size);
        table_of(c, v, n_v, f);
        fputc('\n', f);
        free(c);
    }
    fputs("mean: over the tasks, score relative to the first row's, 1 at most. KL: to the first row, nats a token.\n", f);
}

static json_t *number(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

static json_t *variant_json(const struct cells *c, const struct eval_variant *v, size_t i)
{
    json_t *j = json_object(), *tasks = json_object();

    json_object_set_new(j, "label", json_string(v->label));
    json_object_set_new(j, "ratio", number(v->ratio));
    json_object_set_new(j, "kept", number(mean(c->kept[i])));
    for (size_t k = 0; k < c->n_tasks; k++) {
        json_t *t = json_object();
        double full = mean(c->score[k][0]), x = mean(c->score[k][i]);
        json_object_set_new(t, "n", json_integer((json_int_t)c->records[k]));
        json_object_set_new(t, c->kind[k] == SCORE_NLL ? "nll" : "score", number(x));
        json_object_set_new(t, "relative", number(full > 0 ? x / full : NAN));
        json_object_set_new(t, "kl", number(mean(c->kl[k][i])));
        json_object_set_new(tasks, c->task[k], t);
    }
    json_object_set_new(j, "tasks", tasks);
    json_object_set_new(j, "mean", number(relative(c, i, true)));
    json_object_set_new(j, "mean_uncapped", number(relative(c, i, false)));
    json_object_set_new(j, "kl", number(mean_kl(c, i, false)));
    json_object_set_new(j, "kl_text", number(mean_kl(c, i, true)));
    json_object_set_new(j, "failed", json_integer((json_int_t)c->failed[i]));
    json_object_set_new(j, "unknown", json_integer((json_int_t)c->unknown[i]));
    return j;
}

json_t *eval_json(const struct eval_rec *recs, size_t n, const struct eval_variant *v, size_t n_v)
{
    json_t *j = json_object(), *sizes = json_array();

    for (int size = next_size(recs, n, -1); size >= 0; size = next_size(recs, n, size)) {
        struct cells *c = gather(recs, n, size, n_v);
        json_t *s = json_object(), *list = json_array();
        for (size_t i = 0; i < n_v; i++)
            json_array_append_new(list, variant_json(c, &v[i], i));
        json_object_set_new(s, "size", json_integer(size));
        json_object_set_new(s, "variants", list);
        json_array_append_new(sizes, s);
        free(c);
    }
    json_object_set_new(j, "sizes", sizes);
    return j;
}

json_t *eval_rec_json(const struct eval_rec *r, const struct eval_variant *v, size_t n_v)
{
    static const char *const states[] = { "none", "done", "failed", "unknown" };
    json_t *j = json_object(), *list = json_array();

    json_object_set_new(j, "id", json_string(r->id));
    json_object_set_new(j, "task", json_string(r->task));
    json_object_set_new(j, "size", json_integer(r->size));
    json_object_set_new(j, "prompt_tokens", json_integer((json_int_t)r->prompt.n));
    for (size_t i = 0; i < n_v; i++) {
        json_t *o = json_object();
        json_object_set_new(o, "label", json_string(v[i].label));
        json_object_set_new(o, "state", json_string(states[r->res[i].state]));
        json_object_set_new(o, "score", number(r->res[i].score));
        json_object_set_new(o, "kl", number(r->res[i].kl));
        json_object_set_new(o, "kept", number(r->res[i].kept));
        json_array_append_new(list, o);
    }
    json_object_set_new(j, "variants", list);
    return j;
}
