/* lab.c - the laboratory for KV policies: many variants of the selection on one prefill.
 *
 *   lab MODEL RECORDS.tsv [--half A|B] [--every K] [--order tail|header] [--tasks a,b] VARIANT...
 *
 * RECORDS come from quality_to_tsv.py. A context's KV is computed once; for each variant it is copied, the prompt's last
 * rows are computed again (their scores are what a policy sees), every layer is selected, and the answer is decoded over what was kept.
 * That is what the engine does, without its queue. Scores as in the task format: exact, tokens, choice, nll; "mean" is the mean
 * over tasks of min(1, score / the full cache's), without nll; KL is from the full cache's distribution on the answer's tokens.
 *
 * VARIANT: name:key=value,...  with share (kept share of all slots), full (layers), alpha, tail (1: the template's closing tokens come
 * on top of alpha), pool, max (1), value (1), eps, floor, sink, recent, shift (the smoothing reaches ahead), evict (1: decode evicts too, by decay,
 * weight and drecent; ring: by a ring of that many queries, scored in bursts), shape (budgets fall linearly from 1 + shape to 1 - shape),
 * thin (layer from which on only the prompt tokens go on that any head of the `span` layers below kept, with the share tshare; thin2, tshare2:
 * thinned again there).
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/model.h"
#include "engine/pages.h"
#include "tests/tsv.h"

#define TASKS 16
#define VARIANTS 64
#define ROWS OPS_TILE

struct variant {
    char name[64];
    double share, tshare, tshare2, eps, floor, shape, narrow, decay, weight;
    int full, alpha, tail, pool, max, value, sink, recent, shift, wide, wshift, evict, drecent, ring, thin, thin2, span;
    double score[TASKS], kl, kl_n, slots, seconds, passed;
};

static struct model m;
static const struct ops *ops = &ops_cpu;
static void *be;
static struct ops_kv *kv;
static int L, H, per_head, n_task;
static char task_name[TASKS][16];
static double full_score[TASKS], task_n[TASKS];
static struct variant var[VARIANTS];
static int n_var, header_order, n_step;
static float *x, *logits;
static float **state; /* [L][tokens][d_model]: the full run's hidden states before each layer */

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t at(int lane, int layer, int head)
{
    return ((size_t)lane * L + layer) * H + head;
}

static void open_model(const char *path, int max_tokens, const char *dtype)
{
    struct skv_error err;
    struct ops_config c = { .n_threads = 1, .kv_dtype = strcmp(dtype, "int8") == 0 ? KERN_KV_INT8 : KERN_KV_BF16, .max_lanes = 2,
                            .max_rows = ROWS };

    if (model_open(&m, path, NULL, 0, &err) < 0)
        goto fail;
    L = m.src.dims.n_layer;
    H = m.src.dims.n_kv;
    per_head = (int)pages_for(max_tokens);
    c.max_pages = per_head;
    be = ops->open(&c, &m.src, &err);
    if (be == NULL)
        goto fail;
    kv = ops->kv_init(be, (uint32_t)(2 * L * H * per_head), &err);
    if (kv == NULL)
        goto fail;
    for (size_t i = 0; i < 2 * (size_t)L * H; i++)
        for (int k = 0; k < per_head; k++)
            kv->table[i * kv->max_pages + k] = (uint32_t)(i * per_head + k);
    x = ops->state_new(be, ROWS, &err);
    logits = malloc((size_t)m.src.dims.n_vocab * sizeof *logits);
    state = calloc((size_t)L, sizeof *state);
    for (int l = 0; l < L; l++)
        state[l] = malloc((size_t)max_tokens * m.src.dims.d_model * sizeof **state);
    return;
fail:
    fprintf(stderr, "%s\n", err.msg);
    exit(1);
}

static unsigned char *page(int lane, int layer, int head, int k)
{
    /* the pool's first page is page 0; cpu backend only */
    extern unsigned char *lab_pool(void *be);
    return lab_pool(be) + (at(lane, layer, head) * per_head + k) * kv->page.bytes;
}

/* Rows [from, to) of the tokens through the first layers of a lane whose slots [0, from) are there; scored rows from `scored` on. select
 * may be NULL. */
static void rows(int lane, const int32_t *tok, int from, int to, int scored, int n_layer, void (*select)(int layer, void *arg), void *arg)
{
    struct ops_seg seg = { .lane = lane, .n_row = to - from, .pos0 = from, .slot0 = from,
                           .score_from = scored < to ? (scored > from ? scored - from : 0) : to - from };
    struct ops_pass pass = { .n_row = to - from, .n_seg = 1, .token = tok + from, .seg = &seg };

    size_t d = m.src.dims.d_model;

    ops->embed(be, &pass, x);
    for (int l = 0; l < n_layer; l++) {
        if (select == NULL)
            memcpy(state[l] + from * d, x, (size_t)(to - from) * d * sizeof *x);
        for (int h = 0; h < H; h++)
            kv->len[at(lane, l, h)] = to;
        if (select != NULL)
            ops->score_begin(be, lane, to);
        ops->attn_in(be, l, &pass, x, NULL);
        ops->attn_prefill(be, l, &pass);
        ops->attn_out_mlp(be, l, &pass, x);
        if (select != NULL)
            select(l, arg);
    }
}

/* One token over a lane; logits of what follows. */
static void step(const struct variant *v, int lane, int32_t token, int pos)
{
    bool evict = v != NULL && v->evict;
    struct ops_seg seg = { .lane = lane, .n_row = 1, .pos0 = pos, .score_from = 1 };
    struct ops_pass pass = { .n_row = 1, .n_seg = 1, .token = &token, .seg = &seg };
    struct kern_rule rule = { .budget = evict, .sink = 4, .recent = evict ? v->drecent : 0, .decay = evict ? (float)v->decay : 1,
                              .weight = evict ? (float)v->weight : 0, .pool = 1, .head_floor = 1 };
    int32_t slot[64], zero = 0;

    rule.ring = evict ? v->ring : 0;
    rule.ring_at = rule.ring > 0 ? n_step % rule.ring : 0;
    ops->embed(be, &pass, x);
    for (int l = 0; l < L; l++) {
        rule.burst = rule.ring > 0 && n_step + 1 >= rule.ring && (n_step + l * rule.ring / L) % rule.ring == rule.ring - 1;
        for (int h = 0; h < H; h++) {
            size_t i = at(lane, l, h);
            if (!evict)
                kv->cap[i] = INT32_MAX;
            slot[h] = kv->len[i] < kv->cap[i] ? kv->len[i]++ : -1;
        }
        ops->attn_in(be, l, &pass, x, slot);
        ops->attn_decode(be, l, &pass, &rule);
        ops->attn_out_mlp(be, l, &pass, x);
    }
    n_step++;
    ops->logits(be, x, &zero, 1, logits);
}

struct record {
    const char *task, *score;
    struct tok_ids prompt, prefix, answer, choice;
    int right; /* index of the right choice */
};

static void encode(const struct tsv_field *f, bool special, struct tok_ids *out)
{
    struct skv_error err;

    if (tok_encode(m.tok, f->s, f->len, special, out, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
}

static double lse(const float *v, int n)
{
    double top = v[0], sum = 0;

    for (int i = 1; i < n; i++)
        top = v[i] > top ? v[i] : top;
    for (int i = 0; i < n; i++)
        sum += exp((double)v[i] - top);
    return top + log(sum);
}

static int arg_max(const float *v, int n)
{
    int best = 0;

    for (int i = 1; i < n; i++)
        if (v[i] > v[best])
            best = i;
    return best;
}

/* Feed the last prompt token again, the prefix, then the right answer; the record's score. full: distributions of the full cache,
 * written when kl is NULL, else compared with. */
static double answer(const struct variant *v, int lane, const struct record *r, int n_prompt, float *full, double *kl, double *kl_n)
{
    int V = m.src.dims.n_vocab, right = 0, pos = n_prompt - 1, best_choice = 0;
    double nll = 0;

    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++)
            kv->len[at(lane, l, h)]--;
    n_step = 0;
    step(v, lane, r->prompt.id[pos], pos);
    pos++;
    for (int i = 0; i < r->prefix.n; i++)
        step(v, lane, r->prefix.id[i], pos++);
    for (int i = 0; i < r->answer.n; i++) {
        double z = lse(logits, V);
        float *f = full + (size_t)i * V;
        if (kl == NULL) {
            for (int k = 0; k < V; k++)
                f[k] = (float)(logits[k] - z);
        } else {
            double d = 0;
            for (int k = 0; k < V; k++)
                d += exp((double)f[k]) * (f[k] - (logits[k] - z));
            *kl += d;
            *kl_n += 1;
        }
        if (i == 0 && r->choice.n > 0) {
            for (int k = 1; k < r->choice.n; k++)
                if (logits[r->choice.id[k]] > logits[r->choice.id[best_choice]])
                    best_choice = k;
        }
        right += arg_max(logits, V) == r->answer.id[i];
        nll += z - logits[r->answer.id[i]];
        if (i + 1 < r->answer.n)
            step(v, lane, r->answer.id[i], pos++);
    }
    if (strcmp(r->score, "exact") == 0)
        return right == r->answer.n;
    if (strcmp(r->score, "tokens") == 0)
        return (double)right / r->answer.n;
    if (strcmp(r->score, "choice") == 0)
        return best_choice == r->right;
    return nll / r->answer.n;
}

struct pick {
    struct variant *v;
    int n, n_query;
    int32_t pos[8192]; /* what goes on */
    int n_row;
};

static void pick_layer(int layer, void *arg)
{
    struct pick *p = arg;
    struct variant *v = p->v;
    double b = (v->share * L - v->full) / (L - v->full) * p->n;
    int sparse = layer - v->full, n_sparse = L - v->full;

    if (layer < v->full)
        return;
    for (int k = 0; k < 2; k++) { /* layers by which the prompt is thinned may keep more */
        int f = k == 0 ? v->thin : v->thin2;
        double share = k == 0 ? v->tshare : v->tshare2;
        if (share > 0 && f > 0 && layer >= f - v->span && layer < f)
            b = share * p->n;
    }
    b *= 1 + v->shape * (1 - 2.0 * sparse / (n_sparse - 1));
    struct kern_rule rule = { .budget = (int)(b + 0.5), .sink = v->sink, .recent = v->recent, .pool = v->pool,
                              .pool_kind = v->max ? KERN_POOL_MAX : KERN_POOL_AVG, .pool_to = kv->len[at(1, layer, 0)] - v->recent, .pool_shift = v->shift, .wide = v->wide, .wide_shift = v->wshift,
                              .narrow = (float)v->narrow, .use_score = v->alpha > 0,
                              .by_value = v->value, .value_eps = (float)v->eps, .head_floor = (float)v->floor, .decay = 1 };
    if (rule.budget < v->sink + v->recent)
        rule.budget = v->sink + v->recent;
    ops->select(be, 1, layer, &rule, p->n_query, NULL);
    for (int h = 0; h < H; h++) {
        kv->cap[at(1, layer, h)] = kv->len[at(1, layer, h)] + 1;
        kv->victim[at(1, layer, h)] = -1;
    }
}

static void copy_lane(int n)
{
    int pages = (int)pages_for(n);

    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++)
            memcpy(page(1, l, h, 0), page(0, l, h, 0), (size_t)pages * kv->page.bytes);
}

/* The positions that any head of the last `span` layers before `layer` kept, and those of the scored queries, go on. */
static void thin_rows(struct pick *p, int layer)
{
    static char mark[8192];
    static int32_t pos[8192];
    static float score[8192];
    const struct variant *v = p->v;
    int n = 0;

    memset(mark, 0, sizeof mark);
    for (int l = layer - v->span; l < layer; l++)
        for (int h = 0; h < H; h++) {
            int len = kv->len[at(1, l, h)];
            ops->kv_read(be, 1, l, h, pos, score);
            for (int i = 0; i < len; i++)
                mark[pos[i]] = 1;
        }
    for (int i = p->n - p->n_query; i < p->n; i++)
        mark[i] = 1;
    for (int i = 0; i < p->n_row; i++)
        if (mark[p->pos[i]])
            p->pos[n++] = p->pos[i];
    p->n_row = n;
}

/* Layers [from, to) over the rows that go on. */
static void thin_layers(struct pick *p, float *y, int from, int to)
{
    size_t d = m.src.dims.d_model;

    for (int l = from; l < to; l++) {
        for (int h = 0; h < H; h++)
            kv->len[at(1, l, h)] = 0;
        ops->score_begin(be, 1, p->n_row);
        for (int a = 0; a < p->n_row; a += ROWS) {
            int n = p->n_row - a < ROWS ? p->n_row - a : ROWS, scored = p->n_row - p->n_query - a;
            for (int h = 0; h < H; h++)
                kv->len[at(1, l, h)] = a + n;
            struct ops_seg seg = { .lane = 1, .n_row = n, .pos = p->pos + a, .pos0 = p->pos[a], .slot0 = a,
                                   .score_from = scored < 0 ? 0 : scored > n ? n : scored };
            struct ops_pass pass = { .n_row = n, .n_seg = 1, .seg = &seg };
            ops->attn_in(be, l, &pass, y + a * d, NULL);
            ops->attn_prefill(be, l, &pass);
            ops->attn_out_mlp(be, l, &pass, y + a * d);
        }
        pick_layer(l, p);
    }
}

static void thin_run(struct pick *p)
{
    size_t d = m.src.dims.d_model;
    const struct variant *v = p->v;
    float *y = malloc((size_t)p->n * d * sizeof *y);
    int32_t *old = malloc((size_t)p->n * sizeof *old);

    p->n_row = p->n;
    for (int i = 0; i < p->n; i++)
        p->pos[i] = i;
    thin_rows(p, v->thin);
    for (int i = 0; i < p->n_row; i++)
        memcpy(y + i * d, state[v->thin] + p->pos[i] * d, d * sizeof *y);
    p->v->passed += (double)p->n_row / p->n;
    if (v->thin2 > 0) {
        thin_layers(p, y, v->thin, v->thin2);
        memcpy(old, p->pos, (size_t)p->n_row * sizeof *old);
        thin_rows(p, v->thin2);
        for (int i = 0, k = 0; i < p->n_row; i++) {
            while (old[k] != p->pos[i])
                k++;
            memmove(y + i * d, y + k * d, d * sizeof *y);
        }
        thin_layers(p, y, v->thin2, L);
    } else {
        thin_layers(p, y, v->thin, L);
    }
    free(old);
    free(y);
}

static void run_variant(struct variant *v, const struct record *r, const int32_t *tok, int n, int task, float *full)
{
    int tail = 0;
    double t = now();

    for (int k = 1; k <= 12; k++)
        if (tok_is_eog(m.tok, tok[n - k])) {
            tail = k;
            break;
        }
    int alpha = v->alpha + (v->tail ? tail : 0);
    if (alpha > ROWS)
        alpha = ROWS;
    if (alpha < 1)
        alpha = 1;
    static struct pick p;
    p.v = v;
    p.n = n;
    p.n_query = alpha;
    copy_lane(n);
    rows(1, tok, n - alpha, n, n - alpha, v->thin > 0 ? v->thin : L, pick_layer, &p);
    if (v->thin > 0)
        thin_run(&p);
    else
        v->passed += 1;
    double slots = 0;
    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++)
            slots += kv->len[at(1, l, h)];
    v->slots += slots / ((double)L * H * n);
    v->score[task] += answer(v, 1, r, n, full, &v->kl, &v->kl_n);
    v->seconds += now() - t;
}

static int find_task(const char *name)
{
    for (int i = 0; i < n_task; i++)
        if (strcmp(task_name[i], name) == 0)
            return i;
    snprintf(task_name[n_task], sizeof task_name[0], "%s", name);
    return n_task++;
}

static double total(void)
{
    double n = 0;

    for (int t = 0; t < n_task; t++)
        n += task_n[t];
    return n;
}

static void report(void)
{
    printf("%-34s %6s", "variant", "kept");
    for (int t = 0; t < n_task; t++)
        printf(" %9s", task_name[t]);
    printf("  %6s %6s %6s %6s\n%-34s %6s", "mean", "KL", "pass", "s", "full", "1");
    for (int t = 0; t < n_task; t++)
        printf(" %9.3f", full_score[t] / task_n[t]);
    printf("   n %.0f\n", task_n[0]);
    for (int i = 0; i < n_var; i++) {
        struct variant *v = &var[i];
        double mean = 0, n = 0;
        printf("%-34s %6.3f", v->name, v->slots / total());
        for (int t = 0; t < n_task; t++) {
            printf(" %9.3f", v->score[t] / task_n[t]);
            bool nll = strcmp(task_name[t], "continue") == 0 || strcmp(task_name[t], "repeats") == 0;
            if (nll || full_score[t] == 0)
                continue;
            mean += fmin(1, v->score[t] / full_score[t]);
            n++;
        }
        printf("  %6.3f %6.3f %6.3f %6.2f\n", mean / n, v->kl / v->kl_n, v->passed / total(), v->seconds / total());
    }
    fflush(stdout);
}

static void parse_variant(char *s)
{
    struct variant *v = &var[n_var++];
    char *spec = strchr(s, ':');

    *v = (struct variant){ .share = 0.19, .eps = 1e-4, .floor = 0.2, .alpha = 16, .tail = 1, .pool = 21, .value = 1, .sink = 4, .recent = 32, .narrow = 0.5, .decay = 1,
                            .drecent = 32, .span = 1 };
    if (spec != NULL)
        *spec++ = '\0';
    snprintf(v->name, sizeof v->name, "%s", s);
    for (char *k = spec != NULL ? strtok(spec, ",") : NULL; k != NULL; k = strtok(NULL, ",")) {
        char *eq = strchr(k, '=');
        double x_ = eq != NULL ? atof(eq + 1) : 1;
        if (eq != NULL)
            *eq = '\0';
        struct { const char *k; int *i; double *d; } key[] = {
            { "share", NULL, &v->share }, { "eps", NULL, &v->eps }, { "floor", NULL, &v->floor }, { "shape", NULL, &v->shape },
            { "full", &v->full, NULL }, { "alpha", &v->alpha, NULL }, { "tail", &v->tail, NULL }, { "pool", &v->pool, NULL },
            { "max", &v->max, NULL }, { "value", &v->value, NULL }, { "sink", &v->sink, NULL }, { "recent", &v->recent, NULL },
            { "shift", &v->shift, NULL }, { "thin", &v->thin, NULL }, { "thin2", &v->thin2, NULL }, { "tshare", NULL, &v->tshare },
            { "tshare2", NULL, &v->tshare2 }, { "span", &v->span, NULL },
            { "wide", &v->wide, NULL }, { "wshift", &v->wshift, NULL }, { "narrow", NULL, &v->narrow },
            { "evict", &v->evict, NULL }, { "drecent", &v->drecent, NULL }, { "ring", &v->ring, NULL }, { "decay", NULL, &v->decay }, { "weight", NULL, &v->weight } };
        bool found = false;
        for (size_t i = 0; i < sizeof key / sizeof *key; i++)
            if (strcmp(key[i].k, k) == 0) {
                found = true;
                if (key[i].i != NULL)
                    *key[i].i = (int)x_;
                else
                    *key[i].d = x_;
            }
        if (!found) {
            fprintf(stderr, "variant key %s is not known\n", k);
            exit(2);
        }
    }
}

static void read_record(const struct tsv_row *row, struct record *r)
{
    memset(r, 0, sizeof *r);
    r->task = row->f[1].s;
    r->score = row->f[2].s;
    bool chat = strncmp(row->f[4].s, "<|im_start|>", 12) == 0;
    encode(&row->f[4], true, &r->prompt);
    if (chat && header_order)
        encode(&row->f[5], true, &r->prefix);
    else
        encode(&row->f[5], true, &r->prompt);
    encode(&row->f[6], false, &r->answer);
    char *s = row->f[7].s;
    for (char *end; s != NULL && *s != '\0'; s = end != NULL ? end + 1 : NULL) {
        end = strchr(s, '\x1f');
        struct tsv_field f = { s, end != NULL ? (size_t)(end - s) : strlen(s) };
        if (f.len == row->f[6].len && memcmp(f.s, row->f[6].s, f.len) == 0)
            r->right = r->choice.n;
        struct tok_ids one = { NULL, 0, 0 };
        encode(&f, false, &one);
        int before = r->choice.n;
        encode(&f, false, &r->choice);
        r->choice.n = before + 1; /* the first token stands for the choice */
        free(one.id);
    }
}

int main(int argc, char **argv)
{
    static const struct option opts[] = { { "half", 1, NULL, 'h' }, { "every", 1, NULL, 'e' }, { "order", 1, NULL, 'o' },
                                          { "tasks", 1, NULL, 't' }, { "dtype", 1, NULL, 'd' }, { NULL, 0, NULL, 0 } };
    const char *half = NULL, *tasks = NULL, *dtype = "bf16";
    int c, every = 1, n_before = 0, done = 0;
    int32_t *before = NULL;
    double t0 = now();

    while ((c = getopt_long(argc, argv, "", opts, NULL)) != -1)
        switch (c) {
        case 'h': half = optarg; break;
        case 'e': every = atoi(optarg); break;
        case 'o': header_order = strcmp(optarg, "header") == 0; break;
        case 't': tasks = optarg; break;
        case 'd': dtype = optarg; break;
        default: return 2;
        }
    if (argc - optind < 2)
        return 2;
    for (int i = optind + 2; i < argc; i++)
        parse_variant(argv[i]);
    open_model(argv[optind], 8192, dtype);
    struct tsv *t = tsv_read(argv[optind + 1]);
    float *full = malloc(200 * (size_t)m.src.dims.n_vocab * sizeof *full);
    for (int i = 0; i < t->n; i++) {
        struct record r;
        if ((half != NULL && t->row[i].f[3].s[0] != half[0]) || i % every != 0 || (tasks != NULL && strstr(tasks, t->row[i].f[1].s) == NULL))
            continue;
        if (header_order && strncmp(t->row[i].f[4].s, "<|im_start|>", 12) != 0)
            continue;
        read_record(&t->row[i], &r);
        int n = r.prompt.n, same = 0;
        while (same < n_before && same < n - 1 && before[same] == r.prompt.id[same])
            same++;
        for (int from = same; from < n; from += ROWS)
            rows(0, r.prompt.id, from, from + ROWS < n ? from + ROWS : n, n, L, NULL, NULL);
        int task = find_task(r.task);
        task_n[task]++;
        full_score[task] += answer(NULL, 0, &r, n, full, NULL, NULL);
        for (int v = 0; v < n_var; v++)
            run_variant(&var[v], &r, r.prompt.id, n, task, full);
        free(before);
        before = r.prompt.id;
        n_before = n - 1; /* the answer was decoded over what follows */
        free(r.prefix.id);
        free(r.answer.id);
        free(r.choice.id);
        if (++done % 20 == 0)
            fprintf(stderr, "%d records, %.0f s\n", done, now() - t0);
    }
    report();
    return 0;
}
