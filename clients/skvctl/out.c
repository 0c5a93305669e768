/* out.c - printing for people: text that cannot harm a terminal, figures with units, tables, bars, progress. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#include "protocol/scan.h"

#define RING 32
#define RING_SIZE 256

static char *ring_next(void)
{
    static char ring[RING][RING_SIZE];
    static unsigned at;
    return ring[at++ % RING];
}

const char *fmt(const char *f, ...)
{
    char *s = ring_next();
    va_list ap;
    va_start(ap, f);
    vsnprintf(s, RING_SIZE, f, ap);
    va_end(ap);
    return s;
}

bool out_tty(FILE *f)
{
    return isatty(fileno(f));
}

static struct winsize window_of(FILE *f)
{
    struct winsize w = { 0 };
    if (ioctl(fileno(f), TIOCGWINSZ, &w) < 0 || w.ws_col == 0) {
        const char *c = getenv("COLUMNS"), *l = getenv("LINES");
        w.ws_col = (unsigned short)(c && atoi(c) > 0 ? atoi(c) : 80);
        w.ws_row = (unsigned short)(l && atoi(l) > 0 ? atoi(l) : 24);
    }
    return w;
}

int out_width(FILE *f)
{
    return window_of(f).ws_col;
}

int out_height(FILE *f)
{
    return window_of(f).ws_row;
}

/* ---- text ---- */

static bool harmless(uint32_t cp)
{
    return cp == '\n' || cp == '\t' || !scan_utf8_control(cp);
}

void out_text(FILE *f, const char *s, size_t len)
{
    bool tty = out_tty(f);

    while (len > 0) {
        uint32_t cp;
        int n = scan_utf8_next(s, len, &cp);
        if (n < 0 || (tty && !harmless(cp)))
            fputs("\xef\xbf\xbd", f); /* U+FFFD */
        else
            fwrite(s, 1, (size_t)n, f);
        s += n < 0 ? 1 : n;
        len -= n < 0 ? 1 : (size_t)n;
    }
}

static int cell_width(uint32_t cp)
{
    int w = wcwidth((wchar_t)cp);
    return w < 0 ? 1 : w;
}

int out_columns(const char *s, size_t len)
{
    int cols = 0;
    while (len > 0) {
        uint32_t cp = 0xfffd;
        int n = scan_utf8_next(s, len, &cp);
        cols += cell_width(cp);
        s += n < 0 ? 1 : n;
        len -= n < 0 ? 1 : (size_t)n;
    }
    return cols;
}

/* At most `columns` of s, on one line, into dst[size]. */
static void clip(char *dst, size_t size, const char *s, size_t len, int columns)
{
    size_t at = 0;
    while (len > 0 && at + 5 < size) {
        uint32_t cp = 0xfffd;
        int n = scan_utf8_next(s, len, &cp);
        bool bad = n < 0 || scan_utf8_control(cp) || scan_utf8_moves(cp);
        columns -= bad ? 1 : cell_width(cp);
        if (columns < 0)
            break;
        if (bad)
            dst[at++] = cp == '\n' || cp == '\t' ? ' ' : '?';
        else {
            memcpy(dst + at, s, (size_t)n);
            at += (size_t)n;
        }
        s += n < 0 ? 1 : n;
        len -= n < 0 ? 1 : (size_t)n;
    }
    dst[at] = '\0';
}

const char *fmt_str(const struct skv_value *v, size_t max_columns)
{
    char *s = ring_next();
    size_t len;
    const char *t = skv_str(v, &len);
    clip(s, RING_SIZE, t, len, (int)max_columns);
    return len == 0 ? "-" : s;
}

/* ---- figures ---- */

const char *fmt_bytes(double b)
{
    static const char *const unit[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    int u = 0;
    while (fabs(b) >= 1024 && u < 4) {
        b /= 1024;
        u++;
    }
    return fmt(u == 0 ? "%.0f %s" : fabs(b) < 10 ? "%.2f %s" : fabs(b) < 100 ? "%.1f %s" : "%.0f %s", b, unit[u]);
}

const char *fmt_count(double n)
{
    static const char *const unit[] = { "", "k", "M", "G", "T" };
    int u = 0;
    while (fabs(n) >= 10000 && u < 4) {
        n /= 1000;
        u++;
    }
    return fmt((u == 0 && fabs(n) >= 100) || n == floor(n) || fabs(n) >= 1000 ? "%.0f%s" : "%.1f%s", n, unit[u]);
}

const char *fmt_ms(double ms)
{
    if (!(ms >= 0))
        return "-";
    if (ms < 1)
        return fmt("%.2f ms", ms);
    if (ms < 1000)
        return fmt(ms < 10 ? "%.1f ms" : "%.0f ms", ms);
    return fmt(ms < 10000 ? "%.2f s" : "%.1f s", ms / 1000);
}

const char *fmt_rate(double per_s)
{
    return fmt(per_s < 10 ? "%.2f/s" : per_s < 100 ? "%.1f/s" : "%.0f/s", per_s);
}

const char *fmt_age(double ms)
{
    long s = (long)(ms / 1000);
    if (s < 60)
        return fmt("%lds", s);
    if (s < 3600)
        return fmt("%ldm%02lds", s / 60, s % 60);
    if (s < 48 * 3600)
        return fmt("%ldh%02ldm", s / 3600, s / 60 % 60);
    return fmt("%ldd%02ldh", s / 86400, s / 3600 % 24);
}

const char *fmt_percent(double share)
{
    return share == share ? fmt(share < 0.0995 ? "%.1f %%" : "%.0f %%", 100 * share) : "-";
}

const char *fmt_bar(double share, int cells)
{
    static const char *const part[] = { "", "\u258f", "\u258e", "\u258d", "\u258c", "\u258b", "\u258a", "\u2589" };
    char *s = ring_next();
    size_t at = 0;
    int eighths;

    if (cells > 60)
        cells = 60;
    share = share > 0 ? (share < 1 ? share : 1) : 0;
    eighths = (int)lround(share * cells * 8);
    if (share > 0 && eighths == 0)
        eighths = 1;
    for (int i = 0; i < cells; i++, eighths -= 8) {
        const char *c = eighths >= 8 ? "\u2588" : eighths > 0 ? part[eighths] : " ";
        memcpy(s + at, c, strlen(c));
        at += strlen(c);
    }
    s[at] = '\0';
    return s;
}

/* ---- tables ---- */

struct table {
    char *heads[32];
    const char *align;
    int n_cols;
    char **cell; /* NULL: a rule takes the row's first */
    size_t n;
};

static char *copy_of(const char *s)
{
    size_t n = strlen(s) + 1;
    return memcpy(ctl_alloc(n, 1), s, n);
}

struct table *table_new(const char *const *heads, const char *align)
{
    struct table *t = ctl_alloc(1, sizeof *t);
    t->align = align;
    for (; heads[t->n_cols] != NULL && t->n_cols < 32; t->n_cols++)
        t->heads[t->n_cols] = copy_of(heads[t->n_cols]);
    return t;
}

static void table_put(struct table *t, char *take_cell)
{
    t->cell = ctl_grow(t->cell, t->n + 1, sizeof *t->cell);
    t->cell[t->n++] = take_cell;
}

void table_add(struct table *t, const char *cell)
{
    table_put(t, copy_of(cell));
}

void table_rule(struct table *t)
{
    for (int i = 0; i < t->n_cols; i++)
        table_put(t, NULL);
}

static void pad(FILE *f, const char *s, int width, char align, bool last)
{
    int space = width - out_columns(s, strlen(s));
    if (align == 'r')
        fprintf(f, "%*s", space > 0 ? space : 0, "");
    fputs(s, f);
    if (align != 'r' && !last)
        fprintf(f, "%*s", space > 0 ? space : 0, "");
}

static void table_row(const struct table *t, FILE *f, const char *const *cell, const int *width)
{
    int left = out_tty(f) ? out_width(f) : 1 << 20;
    for (int i = 0; i < t->n_cols; i++) {
        bool last = i == t->n_cols - 1;
        char cut[RING_SIZE * 4];
        int cols = last && t->align[i] == 'l' && width[i] > left ? left : width[i];
        clip(cut, sizeof cut, cell[i], strlen(cell[i]), cols > 0 ? cols : 0);
        pad(f, cut, cols, t->align[i], last);
        if (!last)
            fputs("  ", f);
        left -= cols + 2;
    }
    fputc('\n', f);
}

void table_print(struct table *t, FILE *f)
{
    int width[32] = { 0 }, total = 0, max;
    size_t rows = t->n / (size_t)t->n_cols;

    for (int i = 0; i < t->n_cols; i++) {
        width[i] = out_columns(t->heads[i], strlen(t->heads[i]));
        for (size_t r = 0; r < rows; r++) {
            const char *s = t->cell[r * (size_t)t->n_cols + (size_t)i];
            int w = s ? out_columns(s, strlen(s)) : 0;
            width[i] = w > width[i] ? w : width[i];
        }
        total += width[i] + 2;
    }
    max = out_tty(f) ? out_width(f) : 1 << 20;
    table_row(t, f, (const char *const *)t->heads, width);
    for (size_t r = 0; r < rows; r++) {
        char *const *row = t->cell + r * (size_t)t->n_cols;
        if (row[0] != NULL) {
            table_row(t, f, (const char *const *)row, width);
            continue;
        }
        for (int i = 0; i < total - 2 && i < max; i++)
            fputs("\u2500", f);
        fputc('\n', f);
    }
    for (size_t i = 0; i < t->n; i++)
        free(t->cell[i]);
    for (int i = 0; i < t->n_cols; i++)
        free(t->heads[i]);
    free(t->cell);
    free(t);
}

/* ---- progress ---- */

double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

#define PROGRESS_S 10

static bool progress_shown;

/* Into a file or a pipe: who looks at it later sees how far it has come, and a short command says nothing. */
static void progress_line(double share, const char *note)
{
    static double last;
    const char *wish = getenv("SKVCTL_PROGRESS");
    double now = now_ms(), every = wish != NULL && *wish != '\0' ? strtod(wish, NULL) : PROGRESS_S;

    if (last == 0)
        last = now;
    if (!(every > 0) || now - last < every * 1e3)
        return;
    last = now;
    fprintf(stderr, "skvctl: %3.0f %%  %s\n", 100 * share, note);
}

void progress(double done, double total, const char *note)
{
    int width, cells;
    char cut[RING_SIZE];

    if (!out_tty(stderr)) {
        progress_line(total > 0 ? done / total : 0, note);
        return;
    }
    width = out_width(stderr);
    cells = width < 60 ? 10 : 24;
    clip(cut, sizeof cut, note, strlen(note), width - cells - 10);
    fprintf(stderr, "\r\033[K%s\u2502 %3.0f %%  %s", fmt_bar(total > 0 ? done / total : 0, cells),
            total > 0 ? 100 * done / total : 0, cut);
    fflush(stderr);
    progress_shown = true;
}

void progress_end(void)
{
    if (progress_shown)
        fputs("\r\033[K", stderr);
    progress_shown = false;
}
