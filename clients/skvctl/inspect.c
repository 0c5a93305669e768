/* inspect.c - `skvctl inspect SEQ`: which tokens each layer of a sequence holds, as a heat map of layers x positions in the
 * terminal and as an SVG picture of layers and heads x positions. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct {
    const char *svg;
    long head, width;
    bool scores;
} o = { .head = -1 };

const struct ctl_opt inspect_opts[] = {
    { "svg", 'o', OPT_STR, &o.svg, "FILE", "write a picture instead, a thin row for each head", 0, 0 },
    { "head", 0, OPT_INT, &o.head, "N", "one KV head instead of the mean over all", 0, 1e6 },
    { "scores", 0, OPT_FLAG, &o.scores, NULL, "colour by score (rank within the head) instead of kept or not", 0, 0 },
    { "width", 'w', OPT_INT, &o.width, "N", "columns of the map", 10, 2000 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

struct head {
    int n;
    int32_t *pos;
    float *rank; /* 0..1, the best score 1 */
};

struct kept {
    size_t n, layers, heads; /* positions, layers, KV heads */
    struct head *h;          /* [layers][heads] */
    const struct skv_value *v;
};

/* ---- reading ---- */

struct scored {
    float score;
    int i;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    return (x->score > y->score) - (x->score < y->score);
}

static void read_head(struct head *h, const struct skv_value *v, size_t n_positions)
{
    const struct skv_value *pos = skv_get(v, "positions"), *scores = skv_get(v, "scores");
    size_t n = skv_len(pos);
    struct scored *s = ctl_alloc(n, sizeof *s);

    h->pos = ctl_alloc(n, sizeof *h->pos);
    h->rank = ctl_alloc(n, sizeof *h->rank);
    for (size_t i = 0; i < n; i++) {
        int64_t p = skv_int(skv_at(pos, i), -1);
        if (p < 0 || (size_t)p >= n_positions)
            continue; /* never from our daemon */
        h->pos[h->n] = (int32_t)p;
        s[h->n] = (struct scored){ (float)skv_num(skv_at(scores, i), 0), h->n };
        h->n++;
    }
    qsort(s, (size_t)h->n, sizeof *s, by_score);
    for (int i = 0; i < h->n; i++)
        h->rank[s[i].i] = h->n > 1 ? (float)i / (float)(h->n - 1) : 1;
    free(s);
}

static int read_kept(struct ctl *ctl, const struct skv_value *v, struct kept *k)
{
    const struct skv_value *layers = skv_get(v, "layers");

    memset(k, 0, sizeof *k);
    k->v = v;
    k->n = (size_t)skv_int(skv_get(v, "n"), 0);
    k->layers = skv_len(layers);
    k->heads = skv_len(skv_get(skv_at(layers, 0), "heads"));
    if (k->n == 0 || k->layers == 0 || k->heads == 0 || k->n > 100000000) {
        fputs("skvctl: the sequence holds nothing yet\n", stderr);
        return -1;
    }
    if (o.head >= (long)k->heads) {
        ctl_usage(ctl, "--head: the model has KV heads 0 to %zu", k->heads - 1);
        return -1;
    }
    k->h = ctl_alloc(k->layers * k->heads, sizeof *k->h);
    for (size_t l = 0; l < k->layers; l++)
        for (size_t h = 0; h < k->heads; h++)
            read_head(&k->h[l * k->heads + h], skv_at(skv_get(skv_at(layers, l), "heads"), h), k->n);
    return 0;
}

static void kept_free(struct kept *k)
{
    for (size_t i = 0; k->h != NULL && i < k->layers * k->heads; i++) {
        free(k->h[i].pos);
        free(k->h[i].rank);
    }
    free(k->h);
}

/* ---- binning ---- */

static size_t bin_begin(const struct kept *k, size_t b, size_t bins)
{
    return b * k->n / bins;
}

/* Per bin the share of positions held (or the mean rank of those held), over one head or all of a layer. */
static void bin_layer(const struct kept *k, size_t layer, long head, size_t bins, float *out)
{
    size_t from = head < 0 ? 0 : (size_t)head, to = head < 0 ? k->heads : from + 1;
    float *count = ctl_alloc(bins, sizeof *count);

    memset(out, 0, bins * sizeof *out);
    for (size_t h = from; h < to; h++) {
        const struct head *x = &k->h[layer * k->heads + h];
        for (int i = 0; i < x->n; i++) {
            size_t b = ((size_t)x->pos[i] * bins + bins - 1) / k->n;
            while (b >= bins || bin_begin(k, b, bins) > (size_t)x->pos[i])
                b--;
            while (b + 1 < bins && bin_begin(k, b + 1, bins) <= (size_t)x->pos[i])
                b++;
            out[b] += o.scores ? x->rank[i] : 1;
            count[b]++;
        }
    }
    for (size_t b = 0; b < bins; b++) {
        double cells = (double)(bin_begin(k, b + 1, bins) - bin_begin(k, b, bins)) * (double)(to - from);
        out[b] = o.scores ? (count[b] > 0 ? 0.15f + 0.85f * out[b] / count[b] : 0) : (float)(out[b] / cells);
    }
    free(count);
}

static double layer_share(const struct kept *k, size_t layer)
{
    double sum = 0;
    for (size_t h = 0; h < k->heads; h++)
        sum += k->h[layer * k->heads + h].n;
    return sum / ((double)k->n * (double)k->heads);
}

/* ---- colours: dark violet, blue, green, yellow; nothing held is black ---- */

static void colour(float v, int rgb[3])
{
    static const float ramp[][3] = { { 68, 1, 84 }, { 59, 82, 139 }, { 33, 145, 140 }, { 94, 201, 98 }, { 253, 231, 37 } };
    float at = fminf(fmaxf(v, 0), 1) * 4;
    int i = at >= 4 ? 3 : (int)at;

    for (int c = 0; c < 3; c++)
        rgb[c] = v <= 0 ? 16 : (int)lroundf(ramp[i][c] + (at - (float)i) * (ramp[i + 1][c] - ramp[i][c]));
}

/* The nearest of the 6x6x6 colours every terminal over ssh has. */
static int colour256(float v)
{
    int rgb[3], q[3];

    if (v <= 0)
        return 16;
    colour(v, rgb);
    for (int c = 0; c < 3; c++)
        q[c] = rgb[c] < 48 ? 0 : rgb[c] < 115 ? 1 : (rgb[c] - 35) / 40;
    return 16 + 36 * q[0] + 6 * q[1] + q[2];
}

/* ---- the terminal ---- */

/* Two layers a line: the upper half block in the first one's colour on the second one's. */
static void print_pair(const struct kept *k, size_t layer, const float *a, const float *b, size_t bins)
{
    int fg = -1, bg = -1;

    printf("%3zu ", layer);
    for (size_t i = 0; i < bins; i++) {
        int f = colour256(a[i]), g = b ? colour256(b[i]) : -2;
        if (f != fg)
            printf("\033[38;5;%dm", f);
        if (g != bg && g >= 0)
            printf("\033[48;5;%dm", g);
        fg = f;
        bg = g;
        fputs("\u2580", stdout);
    }
    printf("\033[0m %4s %s\n", fmt_percent(layer_share(k, layer)), b ? fmt_percent(layer_share(k, layer + 1)) : "");
}

static void print_shades(const struct kept *k, size_t layer, const float *a, size_t bins)
{
    static const char *const shade[] = { " ", "\u2591", "\u2592", "\u2593", "\u2588" };

    printf("%3zu ", layer);
    for (size_t i = 0; i < bins; i++)
        fputs(shade[a[i] <= 0 ? 0 : a[i] >= 0.995f ? 4 : 1 + (int)(a[i] * 2.999f)], stdout);
    printf(" %4s\n", fmt_percent(layer_share(k, layer)));
}

static void print_axis(const struct kept *k, size_t bins)
{
    size_t step = bins < 60 ? bins / 2 : bins / 5, at = 0;

    fputs("    ", stdout);
    while (at < bins) {
        const char *s = fmt("\u2502%zu", bin_begin(k, at, bins));
        size_t len = (size_t)out_columns(s, strlen(s));
        if (at + len > bins)
            break;
        printf("%s%*s", s, (int)(step > len ? step - len : 1), "");
        at += step > len ? step : len + 1;
    }
    fputs("\n", stdout);
}

static void print_map(const struct kept *k)
{
    size_t room = (size_t)out_width(stdout) > 30 ? (size_t)out_width(stdout) - 16 : 16, bins = o.width > 0 ? (size_t)o.width : room;
    bool colours = out_tty(stdout);
    float *a, *b;
    double kept = 0;

    if (bins > k->n)
        bins = k->n;
    a = ctl_alloc(bins, sizeof *a);
    b = ctl_alloc(bins, sizeof *b);
    for (size_t l = 0; l < k->layers; l += colours ? 2 : 1) {
        bin_layer(k, l, o.head, bins, a);
        if (!colours) {
            print_shades(k, l, a, bins);
            continue;
        }
        if (l + 1 < k->layers)
            bin_layer(k, l + 1, o.head, bins, b);
        print_pair(k, l, a, l + 1 < k->layers ? b : NULL, bins);
    }
    print_axis(k, bins);
    for (size_t l = 0; l < k->layers; l++)
        kept += layer_share(k, l) / (double)k->layers;
    printf("%zu positions, %zu layers, %zu KV heads; %s held.\nA column is %.3g positions; %s.\n", k->n, k->layers, k->heads,
           fmt_percent(kept), (double)k->n / (double)bins,
           o.scores ? "bright: high scores" : o.head >= 0 ? "bright: held" : "bright: held by all heads");
    free(a);
    free(b);
}

/* ---- the picture ---- */

static void svg_row(FILE *f, const struct kept *k, size_t layer, size_t head, double x, double y, double w, double h)
{
    size_t bins = k->n < 1200 ? k->n : 1200, from = 0;
    float *v = ctl_alloc(bins, sizeof *v);

    bin_layer(k, layer, (long)head, bins, v);
    for (size_t i = 1; i <= bins; i++) { /* neighbours of one colour are one rectangle */
        int a[3], b[3] = { -1, -1, -1 };
        float q = roundf(v[from] * 16) / 16, next = i < bins ? roundf(v[i] * 16) / 16 : -1;
        colour(v[from] > 0 && q == 0 ? 1.0f / 16 : q, a);
        if (i < bins)
            colour(v[i] > 0 && next == 0 ? 1.0f / 16 : next, b);
        if (a[0] == b[0] && a[1] == b[1] && a[2] == b[2])
            continue;
        if (v[from] > 0)
            fprintf(f, "<path fill='#%02x%02x%02x' d='M%.1f %.1fh%.1fv%.1fh-%.1fz'/>\n", a[0], a[1], a[2],
                    x + w * (double)from / (double)bins, y, w * (double)(i - from) / (double)bins, h,
                    w * (double)(i - from) / (double)bins);
        from = i;
    }
    free(v);
}

static void svg_text(FILE *f, double x, double y, const char *anchor, const char *text)
{
    fprintf(f, "<text x='%.1f' y='%.1f' text-anchor='%s'>", x, y, anchor);
    for (const char *p = text; *p != '\0'; p++)
        fputs(*p == '<' ? "&lt;" : *p == '&' ? "&amp;" : (char[2]){ *p, '\0' }, f);
    fputs("</text>\n", f);
}

static void svg_axis(FILE *f, const struct kept *k, double left, double y, double w)
{
    double step = pow(10, floor(log10((double)k->n)));

    if ((double)k->n / step < 4)
        step /= 2;
    if ((double)k->n / step < 4)
        step /= 2.5;
    for (double p = 0; p <= (double)k->n; p += step < 1 ? 1 : step) {
        double x = left + w * p / (double)k->n;
        fprintf(f, "<path stroke='#888' d='M%.1f %.1fv4'/>\n", x, y);
        svg_text(f, x, y + 15, "middle", fmt("%.0f", p));
    }
    svg_text(f, left + w / 2, y + 30, "middle", "position in the sequence");
}

static void svg_draw(FILE *f, const struct kept *k, long seq)
{
    const struct skv_value *layers = skv_get(k->v, "layers");
    size_t rows = o.head >= 0 ? 1 : k->heads;
    double row = rows > 4 ? 2 : 4, layer_h = row * (double)rows + 3, left = 110, top = 34, w = 1200;
    double height = top + layer_h * (double)k->layers + 44, kept = 0;

    for (size_t l = 0; l < k->layers; l++)
        kept += layer_share(k, l) / (double)k->layers;
    fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %.0f %.0f' font-family='sans-serif' font-size='11'>\n"
               "<rect width='100%%' height='100%%' fill='#fff'/>\n",
            left + w + 60, height);
    fprintf(f, "<g font-size='14'>\n");
    svg_text(f, left, 20, "start",
             fmt("Sequence %ld: %zu positions, %zu layers, %zu KV heads, %s of the KV cache held", seq, k->n, k->layers, k->heads,
                 fmt_percent(kept)));
    fprintf(f, "</g>\n");
    for (size_t l = 0; l < k->layers; l++) {
        double y = top + layer_h * (double)l;
        fprintf(f, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='#101010'/>\n", left, y, w, layer_h - 2);
        for (size_t h = 0; h < rows; h++)
            svg_row(f, k, l, o.head >= 0 ? (size_t)o.head : h, left, y + row * (double)h, w, row - (row > 2 ? 0.5 : 0));
        svg_text(f, left - 6, y + layer_h / 2 + 3, "end", fmt("%zu %s", l, fmt_str(skv_get(skv_at(layers, l), "policy"), 10)));
        svg_text(f, left + w + 6, y + layer_h / 2 + 3, "start", fmt_percent(layer_share(k, l)));
    }
    svg_axis(f, k, left, top + layer_h * (double)k->layers, w);
    fputs("</svg>\n", f);
}

static int write_svg(const struct kept *k, long seq)
{
    FILE *f = strcmp(o.svg, "-") == 0 ? stdout : fopen(o.svg, "w");
    bool bad;

    if (f == NULL) {
        fprintf(stderr, "skvctl: %s: %s\n", o.svg, strerror(errno));
        return CTL_FAILED;
    }
    svg_draw(f, k, seq);
    bad = ferror(f);
    if (f != stdout && fclose(f) != 0)
        bad = true;
    if (bad)
        fprintf(stderr, "skvctl: %s: %s\n", o.svg, strerror(errno));
    return bad ? CTL_FAILED : CTL_OK;
}

int cmd_inspect(struct ctl *ctl, int argc, char **argv)
{
    struct skv_args *a;
    struct skv_reply *r;
    struct kept k;
    long seq;
    int status;

    (void)argc;
    if (!opt_number(argv[0], 0, LONG_MAX, &seq))
        return ctl_usage(ctl, "'%s' is not a sequence number ('skvctl ps' lists them)", argv[0]);
    a = ctl_args();
    skv_arg_int(a, "sequence", seq);
    r = ctl_call(ctl, "kept", a, &status);
    if (r == NULL)
        return status;
    if (ctl->json)
        json_print(skv_reply_value(r));
    else if (read_kept(ctl, skv_reply_value(r), &k) < 0)
        status = CTL_FAILED;
    else {
        if (o.svg != NULL)
            status = write_svg(&k, seq);
        else
            print_map(&k);
        kept_free(&k);
    }
    skv_reply_free(r);
    return status;
}
