/* oracle.c - see oracle.h. */
#include "tests/oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/blocks.h"

#define NEAR 3e-5 /* relative difference of two scores below which f32 may order them otherwise */
#define RING_MOST 16

static void *must(size_t n, size_t size)
{
    void *p = calloc(n > 0 ? n : 1, size);

    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(99);
    }
    return p;
}

/* ---- the model --------------------------------------------------------------------------------------------- */

/* y [rows] = W x. */
static void product(const struct kern_tensor *w, const double *x, double *y)
{
    float *row = must((size_t)w->cols, sizeof *row);

    for (int64_t r = 0; r < w->rows; r++) {
        kern_dequant(w->type, (const char *)w->data + r * (int64_t)kern_row_bytes(w->type, w->cols), row, w->cols);
        y[r] = 0;
        for (int64_t c = 0; c < w->cols; c++)
            y[r] += (double)row[c] * x[c];
    }
    free(row);
}

static void norm(const struct kern_tensor *w, double eps, const double *x, double *y)
{
    float *weight = must((size_t)w->cols, sizeof *weight);
    double sum = 0;

    kern_dequant(w->type, w->data, weight, w->cols);
    for (int64_t i = 0; i < w->cols; i++)
        sum += x[i] * x[i];
    for (int64_t i = 0; i < w->cols; i++)
        y[i] = x[i] / sqrt(sum / (double)w->cols + eps) * (double)weight[i];
    free(weight);
}

static void rotate(const struct ops_dims *d, double *v, int pos)
{
    for (int i = 0; i < d->rot_dim / 2; i++) {
        double a = pos * pow((double)d->rope_base, -2.0 * i / d->rot_dim), x = v[2 * i], y = v[2 * i + 1];
        v[2 * i] = x * cos(a) - y * sin(a);
        v[2 * i + 1] = x * sin(a) + y * cos(a);
    }
}

/* ---- what a head holds ------------------------------------------------------------------------------------- */

struct pair {
    int32_t pos;
    double score;
    double *k, *v;
};

struct head {
    struct pair *pair; /* ascending positions */
    int n, budget;     /* 0: everything stays */
    double **past;     /* ring of the last queries' probabilities by position */
};

struct state {
    const struct model *m;
    const struct ops_dims *d;
    const struct oracle_policy *p;
    struct head *head; /* [n_layer][n_kv] */
    struct oracle_run *run;
    int n, n_max, step;
};

static bool is(const struct state *s, const char *name)
{
    return strcmp(s->p->name, name) == 0;
}

/* Positions that no policy may touch. */
static bool safe(const struct oracle_policy *p, int pos, int newest)
{
    bool yes = pos < p->sink || pos > newest - p->recent;

    for (int i = 0; i < p->n_pin; i++)
        yes = yes || (pos >= p->pin[i].from && pos < p->pin[i].to);
    return yes;
}

/* Budgets: the same everywhere, but for pyramid, where what lies above the protected window falls in equal steps from the first
 * sparse layer to the last, which has a twentieth of the mean; fractions are carried so that the sum is exact. */
static void budgets(struct state *s)
{
    const struct oracle_policy *p = s->p;
    int full = p->full_layers, n = s->d->n_layer - full, window = p->sink + p->recent, pinned = 0;
    double c = p->budget - window, sum = 0, given = 0;

    for (int i = 0; i < p->n_pin; i++)
        pinned += p->pin[i].to - p->pin[i].from;
    for (int i = 0; i < n; i++) {
        int b = p->budget;
        if (is(s, "pyramid") && s->n > p->budget) {
            sum += n > 1 ? (2 - 1 / 20.0) * c - i * (2 - 2 / 20.0) * c / (n - 1) : c;
            double upto = i == n - 1 ? n * c : floor(sum + 0.5);
            b = window + (int)(upto - given);
            given = upto;
        }
        b = b < window + pinned ? window + pinned : b;
        for (int h = 0; h < s->d->n_kv; h++)
            s->head[(full + i) * s->d->n_kv + h].budget = is(s, "full") ? 0 : b;
    }
}

/* ---- attention ---------------------------------------------------------------------------------------------- */

/* prob [h->n] of a query over what the head holds up to position pos (0 beyond); out [head_dim]. */
static void attend(const struct ops_dims *d, const struct head *h, const double *q, int pos, double *prob, double *out)
{
    double max = -INFINITY, sum = 0;

    for (int i = 0; i < h->n; i++) {
        prob[i] = -INFINITY;
        if (h->pair[i].pos > pos)
            continue;
        prob[i] = 0;
        for (int k = 0; k < d->head_dim; k++)
            prob[i] += q[k] * h->pair[i].k[k];
        prob[i] /= sqrt(d->head_dim);
        max = fmax(max, prob[i]);
    }
    for (int i = 0; i < h->n; i++)
        sum += prob[i] = exp(prob[i] - max);
    memset(out, 0, (size_t)d->head_dim * sizeof *out);
    for (int i = 0; i < h->n; i++) {
        prob[i] /= sum;
        for (int k = 0; k < d->head_dim; k++)
            out[k] += prob[i] * h->pair[i].v[k];
    }
}

/* q [n_head][head_dim], and the token's pair at the end of each head of the layer. */
static void project(struct state *s, int layer, const double *x, int pos, double *q)
{
    const struct ops_dims *d = s->d;
    const struct ops_layer_src *w = &s->m->src.layer[layer];
    double *y = must((size_t)d->d_model, sizeof *y), *k = must((size_t)d->n_kv * d->head_dim, sizeof *k);
    double *v = must((size_t)d->n_kv * d->head_dim, sizeof *v);

    norm(&w->attn_norm, (double)d->norm_eps, x, y);
    product(&w->wq, y, q);
    product(&w->wk, y, k);
    product(&w->wv, y, v);
    for (int h = 0; h < d->n_head; h++)
        rotate(d, q + h * d->head_dim, pos);
    for (int h = 0; h < d->n_kv; h++) {
        struct head *to = &s->head[layer * d->n_kv + h];
        struct pair *p = &to->pair[to->n++];
        *p = (struct pair){ .pos = pos, .k = must((size_t)d->head_dim, sizeof *k), .v = must((size_t)d->head_dim, sizeof *v) };
        rotate(d, k + h * d->head_dim, pos);
        memcpy(p->k, k + h * d->head_dim, (size_t)d->head_dim * sizeof *k);
        memcpy(p->v, v + h * d->head_dim, (size_t)d->head_dim * sizeof *v);
    }
    free(y);
    free(k);
    free(v);
}

/* x += Wo att, then the gated MLP. */
static void finish_layer(struct state *s, int layer, const double *att, double *x)
{
    const struct ops_dims *d = s->d;
    const struct ops_layer_src *w = &s->m->src.layer[layer];
    double *y = must((size_t)d->d_model, sizeof *y), *g = must((size_t)d->n_ffn, sizeof *g), *u = must((size_t)d->n_ffn, sizeof *u);

    product(&w->wo, att, y);
    for (int i = 0; i < d->d_model; i++)
        x[i] += y[i];
    norm(&w->ffn_norm, (double)d->norm_eps, x, y);
    product(&w->w_gate, y, g);
    product(&w->w_up, y, u);
    for (int i = 0; i < d->n_ffn; i++)
        u[i] *= g[i] / (1 + exp(-g[i]));
    product(&w->w_down, u, y);
    for (int i = 0; i < d->d_model; i++)
        x[i] += y[i];
    free(y);
    free(g);
    free(u);
}

/* ---- after the prompt ------------------------------------------------------------------------------------------- */

/* Scores smoothed over `width` neighbours around i - shift, within the n that are no recent ones (an average counts what lies outside
 * as 0, a maximum leaves it out). */
static void smooth(const struct head *h, int n, int width, int shift, bool max, double *out)
{
    for (int i = 0; i < h->n; i++) {
        double sum = 0, top = -1;
        out[i] = h->pair[i].score;
        if (width <= 1 || i >= n)
            continue;
        for (int j = i - shift - width / 2; j <= i - shift + width / 2; j++)
            if (j >= 0 && j < n) {
                sum += h->pair[j].score;
                top = fmax(top, h->pair[j].score);
            }
        out[i] = max ? fmax(top, 0) : sum / width;
    }
}

/* Keep the best `take` of those that are not kept yet; equal scores: the lower position. True where the cut was near. */
static bool choose(const struct head *h, const double *score, int take, bool *keep)
{
    double last = 0, next = 0;

    for (int t = 0; t <= take; t++) {
        int best = -1;
        for (int i = 0; i < h->n; i++)
            if (!keep[i] && (best < 0 || score[i] > score[best]))
                best = i;
        if (best < 0)
            return false;
        if (t == take) {
            next = score[best];
            break;
        }
        last = score[best];
        keep[best] = true;
    }
    return take > 0 && last != next && last - next < NEAR * fabs(last);
}

static void drop(struct pair *p)
{
    free(p->k);
    free(p->v);
}

/* Phase 3: a head keeps what is safe and the best of the rest until its budget. */
static bool sparsify(const struct state *s, struct head *h)
{
    int take = h->budget, newest = h->pair[h->n - 1].pos, n = 0, pooled = h->n - s->p->recent;
    bool *keep = must((size_t)h->n, sizeof *keep), tie = false;
    double *score = must((size_t)h->n, sizeof *score);

    for (int i = 0; i < h->n; i++) {
        keep[i] = safe(s->p, h->pair[i].pos, newest);
        take -= keep[i];
    }
    if (is(s, "streaming")) {
        for (int i = 0; i < h->n; i++)
            score[i] = h->pair[i].pos;
        choose(h, score, take, keep);
    } else if (is(s, "sparse") && s->p->pool == 0) { /* its own: half by a short phrase, the rest by passages */
        int left = take;
        for (int i = 0; i < h->n; i++)
            left -= !keep[i];
        smooth(h, pooled, 11, 3, false, score);
        tie = choose(h, score, left >= 0 ? take : take / 2, keep);
        smooth(h, pooled, 51, 20, false, score);
        tie = (left < 0 && choose(h, score, take - take / 2, keep)) || tie;
    } else {
        smooth(h, pooled, s->p->pool, 0, s->p->max_pool, score);
        tie = choose(h, score, take, keep);
    }
    for (int i = 0; i < h->n; i++)
        if (keep[i])
            h->pair[n++] = h->pair[i];
        else
            drop(&h->pair[i]);
    h->n = n;
    free(keep);
    free(score);
    return tie;
}

/* One layer over the whole prompt: x [n][d_model] moves on; the layer's pairs are scored and sparsified. */
static void prefill_layer(struct state *s, int layer, double *x)
{
    const struct ops_dims *d = s->d;
    int g = d->n_head / d->n_kv, width = d->n_head * d->head_dim, n = s->n, alpha = s->p->alpha;
    double *q = must((size_t)n * width, sizeof *q), *att = must((size_t)width, sizeof *att), *prob = must((size_t)n, sizeof *prob);

    for (int t = 0; t < n; t++)
        project(s, layer, x + (size_t)t * d->d_model, t, q + (size_t)t * width);
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < d->n_head; h++) {
            struct head *from = &s->head[layer * d->n_kv + h / g];
            attend(d, from, q + (size_t)t * width + h * d->head_dim, t, prob, att + h * d->head_dim);
            for (int i = 0; !is(s, "streaming") && i < n && (alpha == 0 || t >= n - alpha); i++)
                from->pair[i].score += prob[i] / g;
        }
        finish_layer(s, layer, att, x + (size_t)t * d->d_model);
    }
    for (int h = 0; h < d->n_kv; h++) {
        struct head *to = &s->head[layer * d->n_kv + h];
        if (to->budget > 0 && to->n > to->budget)
            s->run->prefill_tie[layer * d->n_kv + h] = sparsify(s, to);
    }
    free(q);
    free(att);
    free(prob);
}

/* ---- while decoding ------------------------------------------------------------------------------------------------ */

/* The ring of snapkv and pyramid: how many of the last steps decide, and whether this layer's turn is now. */
static int ring_of(const struct state *s)
{
    int half = (s->p->recent + 1) / 2, most = s->p->alpha > 0 && s->p->alpha < RING_MOST ? s->p->alpha : RING_MOST;

    return half < most ? half : most;
}

static bool turn(const struct state *s, int layer, const struct head *any)
{
    int ring = ring_of(s);

    return s->step + 1 >= ring && (s->step + layer * ring / s->d->n_layer) % ring == ring - 1 && any->n >= any->budget + 1 - ring;
}

/* New scores after a step in which the head's pairs got `prob` (mean of the group). */
static void rescore(const struct state *s, struct head *h, int layer, const double *prob)
{
    if (is(s, "h2o") || is(s, "article") || is(s, "tova") || is(s, "sparse")) {
        double decay = is(s, "tova") ? 0 : is(s, "sparse") ? (double)0.97f : 1;
        for (int i = 0; i < h->n; i++)
            h->pair[i].score = decay * h->pair[i].score + prob[i];
    }
    if (!is(s, "snapkv") && !is(s, "pyramid"))
        return;
    int ring = ring_of(s);
    double *now = h->past[s->step % ring];
    memset(now, 0, (size_t)s->n_max * sizeof *now);
    for (int i = 0; i < h->n; i++)
        now[h->pair[i].pos] = prob[i];
    for (int i = 0; turn(s, layer, h) && i < h->n; i++) {
        h->pair[i].score = 0;
        for (int r = 0; r < ring; r++)
            h->pair[i].score += h->past[r][h->pair[i].pos];
    }
}

/* Above its budget: the lowest score goes, equal ones the oldest first. True where another one was near. */
static bool evict(const struct state *s, struct head *h)
{
    int newest = h->pair[h->n - 1].pos, low = -1;
    double second = INFINITY;

    for (int i = 0; i < h->n; i++)
        if (!safe(s->p, h->pair[i].pos, newest) && (low < 0 || h->pair[i].score < h->pair[low].score))
            low = i;
    for (int i = 0; i < h->n; i++)
        if (i != low && !safe(s->p, h->pair[i].pos, newest) && h->pair[i].score != h->pair[low].score)
            second = fmin(second, h->pair[i].score);
    bool near = second - h->pair[low].score < NEAR * fabs(second);
    drop(&h->pair[low]);
    memmove(&h->pair[low], &h->pair[low + 1], (size_t)(h->n - low - 1) * sizeof *h->pair);
    h->n--;
    return near;
}

/* One token through the model. Sets *near when some eviction was a near tie. */
static void decode_token(struct state *s, int32_t token, double *x, bool *near)
{
    const struct ops_dims *d = s->d;
    int g = d->n_head / d->n_kv;
    double *q = must((size_t)d->n_head * d->head_dim, sizeof *q), *att = must((size_t)d->n_head * d->head_dim, sizeof *att);
    double *prob = must((size_t)s->n_max, sizeof *prob), *mean = must((size_t)s->n_max, sizeof *mean);
    float *row = must((size_t)d->d_model, sizeof *row);
    const struct kern_tensor *w = &s->m->src.embed;

    kern_dequant(w->type, (const char *)w->data + token * (int64_t)kern_row_bytes(w->type, w->cols), row, w->cols);
    for (int i = 0; i < d->d_model; i++)
        x[i] = (double)row[i];
    for (int l = 0; l < d->n_layer; l++) {
        project(s, l, x, s->n, q);
        for (int k = 0; k < d->n_kv; k++) {
            struct head *h = &s->head[l * d->n_kv + k];
            memset(mean, 0, (size_t)s->n_max * sizeof *mean);
            for (int j = 0; j < g; j++) {
                attend(d, h, q + (k * g + j) * d->head_dim, s->n, prob, att + (k * g + j) * d->head_dim);
                for (int i = 0; i < h->n; i++)
                    mean[i] += prob[i] / g;
            }
            if (h->budget == 0)
                continue;
            rescore(s, h, l, mean);
            if (h->n > h->budget) {
                *near = evict(s, h) || *near;
                s->run->evicted++;
            }
        }
        finish_layer(s, l, att, x);
    }
    s->n++;
    s->step++;
    free(q);
    free(att);
    free(prob);
    free(mean);
    free(row);
}

/* ---- a run --------------------------------------------------------------------------------------------------------------- */

static void pick(struct state *s, const double *x, int i)
{
    const struct ops_dims *d = s->d;
    double *y = must((size_t)d->d_model, sizeof *y), *logit = must((size_t)d->n_vocab, sizeof *logit), sum = 0, second = -INFINITY;
    int best = 0;

    norm(&s->m->src.out_norm, (double)d->norm_eps, x, y);
    product(&s->m->src.output, y, logit);
    for (int t = 1; t < d->n_vocab; t++)
        best = logit[t] > logit[best] ? t : best;
    for (int t = 0; t < d->n_vocab; t++) {
        sum += exp(logit[t] - logit[best]);
        second = t != best ? fmax(second, logit[t]) : second;
    }
    s->run->token[i] = best;
    s->run->logprob[i] = -log(sum);
    s->run->margin[i] = logit[best] - second;
    free(y);
    free(logit);
}

static struct oracle_head *snapshot(const struct state *s)
{
    int n = s->d->n_layer * s->d->n_kv;
    struct oracle_head *out = must((size_t)n, sizeof *out);

    for (int h = 0; h < n; h++) {
        out[h].n = s->head[h].n;
        out[h].pos = must((size_t)out[h].n, sizeof *out[h].pos);
        for (int i = 0; i < out[h].n; i++)
            out[h].pos[i] = s->head[h].pair[i].pos;
    }
    return out;
}

static void prefill(struct state *s, const int32_t *prompt, double *last)
{
    const struct ops_dims *d = s->d;
    const struct kern_tensor *w = &s->m->src.embed;
    double *x = must((size_t)s->n * d->d_model, sizeof *x);
    float *row = must((size_t)d->d_model, sizeof *row);

    for (int t = 0; t < s->n; t++) {
        kern_dequant(w->type, (const char *)w->data + prompt[t] * (int64_t)kern_row_bytes(w->type, w->cols), row, w->cols);
        for (int i = 0; i < d->d_model; i++)
            x[(size_t)t * d->d_model + i] = (double)row[i];
    }
    for (int l = 0; l < d->n_layer; l++)
        prefill_layer(s, l, x);
    memcpy(last, x + (size_t)(s->n - 1) * d->d_model, (size_t)d->d_model * sizeof *last);
    free(x);
    free(row);
}

struct oracle_run *oracle_generate(const struct model *m, const struct oracle_policy *p, const int32_t *prompt, int n, int n_token)
{
    const struct ops_dims *d = &m->src.dims;
    int heads = d->n_layer * d->n_kv;
    struct oracle_run *r = must(1, sizeof *r);
    struct state s = { .m = m, .d = d, .p = p, .run = r, .n = n, .n_max = n + n_token + 1 };
    double *x = must((size_t)d->d_model, sizeof *x);
    bool near = false;

    *r = (struct oracle_run){ .n_layer = d->n_layer, .n_kv = d->n_kv, .n_token = n_token, .end_sure = true };
    r->prefill_tie = must((size_t)heads, sizeof *r->prefill_tie);
    r->token = must((size_t)n_token, sizeof *r->token);
    r->logprob = must((size_t)n_token, sizeof *r->logprob);
    r->margin = must((size_t)n_token, sizeof *r->margin);
    s.head = must((size_t)heads, sizeof *s.head);
    for (int h = 0; h < heads; h++) {
        s.head[h].pair = must((size_t)s.n_max, sizeof *s.head[h].pair);
        s.head[h].past = must(RING_MOST, sizeof *s.head[h].past);
        for (int i = 0; i < RING_MOST; i++)
            s.head[h].past[i] = must((size_t)s.n_max, sizeof *s.head[h].past[i]);
    }
    budgets(&s);
    prefill(&s, prompt, x);
    r->prefill = snapshot(&s);
    for (int h = 0; h < heads; h++)
        near = near || r->prefill_tie[h];
    for (int i = 0; i < n_token; i++) {
        pick(&s, x, i);
        r->sure += i == 0 || !near; /* the first token follows from the prompt's own attention */
        if (i + 1 < n_token)
            decode_token(&s, r->token[i], x, &near);
    }
    r->end_sure = !near;
    r->end = snapshot(&s);
    for (int h = 0; h < heads; h++) {
        for (int i = 0; i < s.head[h].n; i++)
            drop(&s.head[h].pair[i]);
        for (int i = 0; i < RING_MOST; i++)
            free(s.head[h].past[i]);
        free(s.head[h].past);
        free(s.head[h].pair);
    }
    free(s.head);
    free(x);
    return r;
}

void oracle_free(struct oracle_run *r)
{
    for (int h = 0; h < r->n_layer * r->n_kv; h++) {
        free(r->prefill[h].pos);
        free(r->end[h].pos);
    }
    free(r->prefill);
    free(r->end);
    free(r->prefill_tie);
    free(r->token);
    free(r->logprob);
    free(r->margin);
    free(r);
}
