/* benchreport.c - percentiles, rates and ratios of load tests, as a table and as JSON. */
#include "config.h"

#include "clients/skvctl/bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- series ---- */

void series_add(struct series *s, double v)
{
    if (s->n == s->size)
        s->v = ctl_grow(s->v, s->size = s->size * 2 + 64, sizeof *s->v);
    s->v[s->n++] = v;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void series_sort(struct series *s)
{
    if (s->n > 0)
        qsort(s->v, s->n, sizeof *s->v, by_value);
}

double series_at(const struct series *s, double share)
{
    double at = share * (double)(s->n - 1);
    size_t i = (size_t)at;

    if (s->n == 0)
        return NAN;
    if (i + 1 >= s->n)
        return s->v[s->n - 1];
    return s->v[i] + (at - (double)i) * (s->v[i + 1] - s->v[i]);
}

double series_mean(const struct series *s)
{
    double sum = 0;
    for (size_t i = 0; i < s->n; i++)
        sum += s->v[i];
    return s->n > 0 ? sum / (double)s->n : NAN;
}

void series_free(struct series *s)
{
    free(s->v);
    memset(s, 0, sizeof *s);
}

/* ---- decode throughput ---- */

/* Walk over the moments at which the number of decoding requests changes; while it is at least `batch`, sum up time and
 * tokens. All three series are sorted. Returns the time. */
static double at_batch(const struct bench_run *r, double batch, double *tokens)
{
    size_t b = 0, e = 0, t = 0;
    double time = 0, from = 0, now;

    *tokens = 0;
    while (e < r->end.n) {
        bool on = (double)(b - e) >= batch;
        bool begins = b < r->begin.n && r->begin.v[b] <= r->end.v[e];
        now = begins ? r->begin.v[b] : r->end.v[e];
        for (; t < r->token.n && r->token.v[t] <= now; t++)
            *tokens += on && r->token.v[t] > from;
        if (on)
            time += now - from;
        from = now;
        if (begins)
            b++;
        else
            e++;
    }
    return time;
}

void bench_finish(struct bench_run *r, double target)
{
    double most = 0, tokens, time;
    size_t b = 0, e = 0;

    series_sort(&r->ttft);
    series_sort(&r->gap);
    series_sort(&r->whole);
    series_sort(&r->begin);
    series_sort(&r->end);
    series_sort(&r->token);
    while (b < r->begin.n && e < r->end.n) {
        if (r->begin.v[b] <= r->end.v[e])
            b++;
        else
            e++;
        if ((double)(b - e) > most)
            most = (double)(b - e);
    }
    r->decode_batch = most < target ? most : target;
    time = at_batch(r, r->decode_batch, &tokens);
    r->decode_per_s = time > 0 && tokens > 0 ? 1000 * tokens / time : NAN;
}

void bench_run_fini(struct bench_run *r)
{
    series_free(&r->ttft);
    series_free(&r->gap);
    series_free(&r->whole);
    series_free(&r->begin);
    series_free(&r->end);
    series_free(&r->token);
}

/* ---- rows ---- */

enum unit { UNIT_N, UNIT_MS, UNIT_RATE, UNIT_SHARE, UNIT_BYTES };

struct row {
    const char *label, *key; /* key: in JSON */
    enum unit unit;
    double (*get)(const struct bench_run *r);
    bool ratio; /* worth comparing */
};

#define GET(name, expr)                                                                                                          \
    static double name(const struct bench_run *r)                                                                                \
    {                                                                                                                            \
        return expr;                                                                                                             \
    }
GET(get_ok, (double)r->ok)
GET(get_failed, (double)r->failed)
GET(get_retries, (double)r->retries)
GET(get_wall, r->wall_ms)
GET(get_prompt_rate, 1000 * r->prompt_tokens / r->wall_ms)
GET(get_output_rate, 1000 * r->output_tokens / r->wall_ms)
GET(get_decode, r->decode_per_s)
GET(get_batch, r->decode_batch)
GET(get_running_max, r->running_n > 0 ? r->running_max : NAN)
GET(get_running_mean, r->running_n > 0 ? r->running_sum / r->running_n : NAN)
GET(get_ttft50, series_at(&r->ttft, 0.5))
GET(get_ttft95, series_at(&r->ttft, 0.95))
GET(get_ttft99, series_at(&r->ttft, 0.99))
GET(get_ttft_max, series_at(&r->ttft, 1))
GET(get_gap50, series_at(&r->gap, 0.5))
GET(get_gap95, series_at(&r->gap, 0.95))
GET(get_gap99, series_at(&r->gap, 0.99))
GET(get_gap_max, series_at(&r->gap, 1))
GET(get_gap_mean, series_mean(&r->gap))
GET(get_whole50, series_at(&r->whole, 0.5))
GET(get_whole_max, series_at(&r->whole, 1))
GET(get_cached, r->cached_tokens)
GET(get_kept, r->slots_full > 0 ? r->slots_kept / r->slots_full : NAN)
GET(get_bytes, r->ok > 0 ? r->bytes / (double)r->ok : NAN)
GET(get_used, r->pages_total > 0 ? r->used_max / r->pages_total : NAN)

static const struct row rows[] = {
    { "finished", "ok", UNIT_N, get_ok, false },
    { "failed", "failed", UNIT_N, get_failed, false },
    { "sent again after overloaded", "retries", UNIT_N, get_retries, false },
    { "wall time", "wall_ms", UNIT_MS, get_wall, true },
    { "prompt tokens", "prompt_tok_s", UNIT_RATE, get_prompt_rate, true },
    { "output tokens", "output_tok_s", UNIT_RATE, get_output_rate, true },
    { "decoded at full batch", "decode_tok_s", UNIT_RATE, get_decode, true },
    { "full batch", "decode_batch", UNIT_N, get_batch, true },
    { "running at once, most", "running_max", UNIT_N, get_running_max, true },
    { "running at once, mean", "running_mean", UNIT_N, get_running_mean, true },
    { "first token P50", "ttft_p50_ms", UNIT_MS, get_ttft50, true },
    { "first token P95", "ttft_p95_ms", UNIT_MS, get_ttft95, true },
    { "first token P99", "ttft_p99_ms", UNIT_MS, get_ttft99, true },
    { "first token max", "ttft_max_ms", UNIT_MS, get_ttft_max, true },
    { "between tokens P50", "itl_p50_ms", UNIT_MS, get_gap50, true },
    { "between tokens P95", "itl_p95_ms", UNIT_MS, get_gap95, true },
    { "between tokens P99", "itl_p99_ms", UNIT_MS, get_gap99, true },
    { "between tokens max", "itl_max_ms", UNIT_MS, get_gap_max, true },
    { "between tokens mean", "itl_mean_ms", UNIT_MS, get_gap_mean, true },
    { "whole request P50", "request_p50_ms", UNIT_MS, get_whole50, true },
    { "whole request max", "request_max_ms", UNIT_MS, get_whole_max, true },
    { "prompt tokens from a cache", "cached_tokens", UNIT_N, get_cached, false },
    { "KV slots kept", "kept_share", UNIT_SHARE, get_kept, true },
    { "KV bytes a sequence", "kv_bytes", UNIT_BYTES, get_bytes, true },
    { "KV pool used, most", "pool_share_max", UNIT_SHARE, get_used, true },
};
#define N_ROWS (sizeof rows / sizeof rows[0])

static const char *show(const struct row *row, double v)
{
    if (isnan(v))
        return "-";
    switch (row->unit) {
    case UNIT_MS:
        return fmt_ms(v);
    case UNIT_RATE:
        return fmt("%s tok/s", fmt_count(v));
    case UNIT_SHARE:
        return fmt_percent(v);
    case UNIT_BYTES:
        return fmt_bytes(v);
    default:
        return fmt(v == floor(v) ? "%.0f" : "%.1f", v);
    }
}

/* Rows that say something only when they are not zero. */
static bool worth_a_line(const struct row *row, const struct bench_run *runs, size_t n)
{
    bool quiet = row->get == get_retries || row->get == get_cached, known = false;
    for (size_t i = 0; i < n; i++) {
        double v = row->get(&runs[i]);
        known |= !isnan(v) && (!quiet || v != 0);
    }
    return known;
}

static void print_failures(const struct bench_run *r, FILE *f)
{
    for (size_t i = 0; i < r->n_failures; i++)
        fprintf(f, "%s: %zu x %s: %s\n", r->label, r->failures[i].n, skv_code_name(r->failures[i].code), r->failures[i].msg);
}

void bench_table(const struct bench_run *runs, size_t n, FILE *f)
{
    const char *heads[20] = { "" };
    char align[20] = "l";
    size_t cols = 1;
    struct table *t;

    for (size_t i = 0; i < n && i < 9; i++) {
        heads[cols] = runs[i].label;
        align[cols++] = 'r';
        if (i > 0) {
            heads[cols] = "ratio";
            align[cols++] = 'r';
        }
    }
    heads[cols] = NULL;
    t = table_new(heads, align);
    for (size_t k = 0; k < N_ROWS; k++) {
        double base = rows[k].get(&runs[0]);
        if (!worth_a_line(&rows[k], runs, n))
            continue;
        table_add(t, rows[k].label);
        for (size_t i = 0; i < n && i < 9; i++) {
            double v = rows[k].get(&runs[i]);
            table_add(t, show(&rows[k], v));
            if (i > 0)
                table_add(t, rows[k].ratio && base > 0 && !isnan(v) ? fmt("%.2fx", v / base) : "");
        }
    }
    table_print(t, f);
    for (size_t i = 0; i < n; i++)
        print_failures(&runs[i], f);
}

static json_t *number(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

static json_t *run_json(const struct bench_run *r)
{
    json_t *j = json_object(), *fails = json_object();

    json_object_set_new(j, "label", json_string(r->label));
    json_object_set_new(j, "requests", json_integer((json_int_t)r->requests));
    for (size_t k = 0; k < N_ROWS; k++) {
        double v = rows[k].get(r);
        json_object_set_new(j, rows[k].key, rows[k].unit == UNIT_N && v == floor(v) ? json_integer((json_int_t)v) : number(v));
    }
    json_object_set_new(j, "prompt_tokens", json_integer((json_int_t)r->prompt_tokens));
    json_object_set_new(j, "output_tokens", json_integer((json_int_t)r->output_tokens));
    for (size_t i = 0; i < r->n_failures; i++)
        json_object_set_new(fails, skv_code_name(r->failures[i].code), json_integer((json_int_t)r->failures[i].n));
    json_object_set_new(j, "failures", fails);
    return j;
}

json_t *bench_json(const struct bench_run *runs, size_t n)
{
    json_t *j = json_object(), *list = json_array(), *ratios = json_array();

    for (size_t i = 0; i < n; i++) {
        json_t *q = json_object();
        json_array_append_new(list, run_json(&runs[i]));
        for (size_t k = 0; i > 0 && k < N_ROWS; k++)
            if (rows[k].ratio)
                json_object_set_new(q, rows[k].key, number(rows[k].get(&runs[i]) / rows[k].get(&runs[0])));
        json_object_set_new(q, "label", json_string(runs[i].label));
        if (i > 0)
            json_array_append_new(ratios, q);
        else
            json_decref(q);
    }
    json_object_set_new(j, "runs", list);
    json_object_set_new(j, "ratios", ratios);
    return j;
}
