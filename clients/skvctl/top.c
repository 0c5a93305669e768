/* top.c - `skvctl top`: a live screen. Plain ANSI sequences and one write a frame, so that it is usable over a slow line. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define HISTORY 120

static struct {
    double interval;
    long count;
    bool plain;
} o = { .interval = 1 };

const struct ctl_opt top_opts[] = {
    { "interval", 'd', OPT_NUM, &o.interval, "SECONDS", "between two looks (1)", 0.1, 3600 },
    { "count", 'c', OPT_INT, &o.count, "N", "end after N looks", 1, 1e9 },
    { "plain", 'p', OPT_FLAG, &o.plain, NULL, "print below one another instead of a live screen", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

enum order { BY_ID, BY_KV, BY_OUT, BY_AGE, ORDERS };

struct top {
    struct ctl *ctl;
    struct skv_reply *hello, *status, *sequences, *kv;
    bool may_look; /* the administrator's methods answer */
    double out[HISTORY], in[HISTORY];
    int n_history;
    enum order order;
    FILE *f; /* a frame */
    int rows, cols, row;
};

/* ---- asking ---- */

static int ask(struct top *t, const char *method, struct skv_reply **reply, struct skv_error *err)
{
    skv_reply_free(*reply);
    *reply = NULL;
    if (skv_call(t->ctl->c, method, NULL, reply, err) == 0)
        return 0;
    skv_reply_free(*reply);
    *reply = NULL;
    return -1;
}

static double num(const struct skv_value *v, const char *name)
{
    return skv_num(skv_get(v, name), 0);
}

static int look(struct top *t)
{
    struct skv_error err;
    const struct skv_value *s;

    if (t->hello == NULL && ask(t, "hello", &t->hello, &err) < 0)
        return ctl_error(t->ctl, &err);
    if (ask(t, "status", &t->status, &err) < 0)
        return ctl_error(t->ctl, &err);
    if (t->may_look && (ask(t, "sequences", &t->sequences, &err) < 0 || ask(t, "kv", &t->kv, &err) < 0)) {
        if (err.code != SKV_FORBIDDEN)
            return ctl_error(t->ctl, &err);
        t->may_look = false;
    }
    s = skv_reply_value(t->status);
    if (t->n_history == HISTORY) {
        memmove(t->out, t->out + 1, sizeof t->out - sizeof t->out[0]);
        memmove(t->in, t->in + 1, sizeof t->in - sizeof t->in[0]);
        t->n_history--;
    }
    t->out[t->n_history] = num(s, "tokens_out_per_s");
    t->in[t->n_history++] = num(s, "tokens_in_per_s");
    return CTL_OK;
}

/* ---- drawing ---- */

/* A line that may have colours: cells counts what is seen of it. */
static void line(struct top *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void line(struct top *t, const char *format, ...)
{
    va_list ap;

    if (t->row++ >= t->rows)
        return;
    va_start(ap, format);
    vfprintf(t->f, format, ap);
    va_end(ap);
    fputs(o.plain ? "\n" : "\033[K\r\n", t->f);
}

static const char *style(const char *code)
{
    return o.plain ? "" : code;
}
#define BOLD style("\033[1m")
#define DIM style("\033[2m")
#define REVERSE style("\033[7m")
#define PLAIN style("\033[0m")

static const char *level(double share)
{
    static const char *const steps[] = { " ", "\u2581", "\u2582", "\u2583", "\u2584", "\u2585", "\u2586", "\u2587", "\u2588" };
    int i = (int)ceil(share * 8);
    return steps[i < 0 ? 0 : i > 8 ? 8 : i];
}

/* The last values as little columns, the newest at the right. */
static void spark(struct top *t, const char *label, const double *v, int cells)
{
    double most = 1;
    int from = t->n_history > cells ? t->n_history - cells : 0;

    for (int i = from; i < t->n_history; i++)
        most = v[i] > most ? v[i] : most;
    fprintf(t->f, "%-10s %9s/s ", label, fmt_count(v[t->n_history - 1]));
    for (int i = from; i < t->n_history; i++)
        fputs(level(v[i] / most), t->f);
}

static void draw_head(struct top *t)
{
    const struct skv_value *h = skv_reply_value(t->hello), *s = skv_reply_value(t->status), *m = skv_get(h, "model");
    double used = num(s, "pages_used"), total = num(s, "pages_total"), share = total > 0 ? used / total : 0;
    double mass = skv_num(skv_get(s, "kept_mass"), -1);
    int bar = t->cols < 70 ? 16 : 30, cells = t->cols - 24 > HISTORY ? HISTORY : t->cols - 24;
    char now[16];
    time_t clock = time(NULL);
    struct tm tm;

    strftime(now, sizeof now, "%H:%M:%S", localtime_r(&clock, &tm));
    line(t, "%sskvd%s %s  %s  up %s, %s  %s", BOLD, PLAIN, fmt_str(skv_get(h, "version"), 20),
         fmt_str(skv_get(m, "name"), t->cols > 60 ? (size_t)t->cols - 50 : 10), fmt_age(num(s, "uptime_ms")),
         fmt_str(skv_get(s, "state"), 12), now);
    line(t, "requests   %s%.0f%s running, %s%.0f%s waiting, %.0f idle; %s done, %s failed", BOLD, num(s, "running"), PLAIN, BOLD,
         num(s, "waiting"), PLAIN, num(s, "idle_sessions"), fmt_count(num(s, "finished")), fmt_count(num(s, "failed")));
    if (t->row < t->rows)
        spark(t, "tokens out", t->out, cells);
    line(t, "%s", "");
    if (t->row < t->rows)
        spark(t, "tokens in", t->in, cells);
    line(t, "%s", "");
    line(t, "step       %s last, %s mean%s", fmt_ms(num(s, "step_ms_last")), fmt_ms(num(s, "step_ms_mean")),
         num(s, "step_age_ms") > 2000 ? fmt(", %snow for %s%s", BOLD, fmt_ms(num(s, "step_age_ms")), PLAIN) : "");
    line(t, "KV pages   %s%s%s %s of %s, %s%s", style(share > 0.9 ? "\033[31m" : "\033[32m"), fmt_bar(share, bar), PLAIN,
         fmt_count(used), fmt_count(total), fmt_percent(share),
         num(s, "bytes_saved") > 0 ? fmt(", %s saved", fmt_bytes(num(s, "bytes_saved"))) : "");
    if (mass >= 0)
        line(t, "attention  %s%s%s %s on what was kept", DIM, fmt_bar(mass, bar), PLAIN, fmt_percent(mass));
}

static bool same_policy(const struct skv_value *layers, size_t a, size_t b)
{
    size_t n, m;
    const char *p = skv_str(skv_get(skv_at(layers, a), "policy"), &n), *q = skv_str(skv_get(skv_at(layers, b), "policy"), &m);
    return n == m && memcmp(p, q, n) == 0;
}

/* Layers as columns: how much of the largest layer each holds; and which policy rules where. */
static void draw_kv(struct top *t)
{
    const struct skv_value *layers = skv_get(skv_reply_value(t->kv), "layers");
    size_t n = skv_len(layers), room = t->cols > 30 ? (size_t)t->cols - 30 : 1;
    double most = 1;

    if (n == 0 || t->row >= t->rows)
        return;
    for (size_t i = 0; i < n; i++)
        most = fmax(most, num(skv_at(layers, i), "bytes"));
    fprintf(t->f, "KV layers  %s", style("\033[36m"));
    for (size_t i = 0; i < n && i < room; i++)
        fputs(level(num(skv_at(layers, i), "bytes") / most), t->f);
    line(t, "%s largest %s", PLAIN, fmt_bytes(most));
    if (t->row >= t->rows)
        return;
    fprintf(t->f, "          %s", DIM);
    for (size_t i = 0, from = 0; i < n; i++)
        if (i + 1 == n || !same_policy(layers, i, i + 1)) {
            fprintf(t->f, " %s %zu-%zu", fmt_str(skv_get(skv_at(layers, i), "policy"), 12), from, i);
            from = i + 1;
        }
    line(t, "%s", PLAIN);
}

static enum order sort_by;

static int by_order(const void *a, const void *b)
{
    static const char *const field[] = { "id", "kv_bytes", "completion_tokens", "age_ms" };
    const struct skv_value *x = *(const struct skv_value *const *)a, *y = *(const struct skv_value *const *)b;
    double p = num(x, field[sort_by]), q = num(y, field[sort_by]);
    return sort_by == BY_ID ? (p > q) - (p < q) : (p < q) - (p > q);
}

static void draw_sequences(struct top *t)
{
    static const char *const names[] = { "id", "KV", "tokens", "age" };
    const struct skv_value *list = skv_get(skv_reply_value(t->may_look ? t->sequences : t->status), "sequences");
    size_t n = skv_len(list);
    const struct skv_value **rows = ctl_alloc(n, sizeof *rows);

    for (size_t i = 0; i < n; i++)
        rows[i] = skv_at(list, i);
    sort_by = t->order;
    qsort(rows, n, sizeof *rows, by_order);
    line(t, "%s", "");
    line(t, "%s%*s %6s %7s %-8s %7s %6s %7s %9s %-9s %-*s%s", REVERSE, 6, "ID", "UID", "PID", "STATE", "PROMPT", "OUT", "AGE", "KV",
         "POLICY", t->cols > 84 ? t->cols - 78 : 7, "SESSION", PLAIN);
    for (size_t i = 0; i < n; i++) {
        const struct skv_value *s = rows[i];
        if (t->row >= t->rows - 1 && n - i > 1) {
            line(t, "%s... and %zu more%s", DIM, n - i, PLAIN);
            break;
        }
        line(t, "%6.0f %6.0f %7.0f %-8s %7.0f %6.0f %7s %9s %-9s %s", num(s, "id"), num(s, "uid"), num(s, "pid"),
             fmt_str(skv_get(s, "state"), 8), num(s, "prompt_tokens"), num(s, "completion_tokens"), fmt_age(num(s, "age_ms")),
             fmt_bytes(num(s, "kv_bytes")), fmt_str(skv_get(s, "policy"), 9),
             fmt_str(skv_get(s, "session"), t->cols > 84 ? (size_t)t->cols - 78 : 7));
    }
    if (n == 0)
        line(t, "%sno sequences%s", DIM, PLAIN);
    if (!o.plain && t->row < t->rows - 1) {
        line(t, "%s", "");
        line(t, "%sq ends, s sorts by another column (now %s)%s", DIM, names[t->order], PLAIN);
    }
    free(rows);
}

static void draw(struct top *t)
{
    char *frame = NULL;
    size_t len = 0;

    t->f = open_memstream(&frame, &len);
    if (t->f == NULL)
        return;
    t->rows = o.plain ? 1000 : out_height(stdout) - 1;
    t->cols = out_width(stdout);
    t->row = 0;
    if (!o.plain)
        fputs("\033[H\033[?7l", t->f); /* home, no wrapping of long lines */
    draw_head(t);
    draw_kv(t);
    draw_sequences(t);
    if (!o.plain)
        fputs("\033[J\033[?7h", t->f);
    fclose(t->f);
    fwrite(frame, 1, len, stdout);
    fflush(stdout);
    free(frame);
}

/* ---- the loop ---- */

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* Wait until the next look is due. True: end. */
static bool pause_for_keys(struct top *t, double until)
{
    while (!ctl_interrupted) {
        struct pollfd p = { .fd = STDIN_FILENO, .events = POLLIN };
        double left = until - now_s();
        char key;
        if (left <= 0)
            return false;
        if (poll(o.plain ? NULL : &p, o.plain ? 0 : 1, (int)(left * 1000) + 1) <= 0)
            continue;
        if (read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q' || key == 3)
            return true;
        if (key == 's')
            t->order = (t->order + 1) % ORDERS;
        if (key == 's' || key == ' ')
            draw(t);
    }
    return true;
}

static int run(struct top *t)
{
    int status = CTL_OK;

    for (long i = 0; (o.count == 0 || i < o.count) && !ctl_interrupted; i++) {
        double due = now_s() + o.interval;
        status = look(t);
        if (status != CTL_OK)
            break;
        draw(t);
        if ((o.count > 0 && i + 1 == o.count) || pause_for_keys(t, due))
            break;
    }
    return status;
}

static int live(struct top *t)
{
    struct termios old, raw;
    bool keys = tcgetattr(STDIN_FILENO, &old) == 0;
    int status;

    if (keys) {
        raw = old;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    fputs("\033[?1049h\033[?25l", stdout); /* another screen, no cursor */
    status = look(t); /* a refusal must not flash by on the other screen */
    if (status == CTL_OK)
        status = run(t);
    fputs("\033[?25h\033[?1049l", stdout);
    fflush(stdout);
    if (keys)
        tcsetattr(STDIN_FILENO, TCSANOW, &old);
    return status;
}

int cmd_top(struct ctl *ctl, int argc, char **argv)
{
    struct top t = { .ctl = ctl, .may_look = true };
    int status;

    (void)argc;
    (void)argv;
    if (ctl_connect(ctl) == NULL)
        return ctl->status;
    if (!out_tty(stdout))
        o.plain = true;
    if (o.plain && o.count == 0 && !out_tty(stdout))
        o.count = 1; /* into a file or a pipe: one look, unless told otherwise */
    ctl_catch_sigint();
    if (ctl->json) {
        status = look(&t);
        if (status == CTL_OK) {
            json_t *j = json_of(skv_reply_value(t.status));
            if (t.may_look)
                json_object_set_new(j, "kv", json_of(skv_reply_value(t.kv)));
            json_put(j);
        }
    } else
        status = o.plain ? run(&t) : live(&t);
    skv_reply_free(t.hello);
    skv_reply_free(t.status);
    skv_reply_free(t.sequences);
    skv_reply_free(t.kv);
    return status;
}
