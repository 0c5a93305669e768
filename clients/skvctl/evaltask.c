/* evaltask.c - records of a task file, and scoring their answers. */
#include "config.h"

#include "clients/skvctl/eval.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LOG_FLOOR (-60.0f) /* below this a probability is nothing; daemons give -1e30 for zero */

/* ---- reading ---- */

static char *concat(const char *a, const char *b, const char *c, const char *d)
{
    size_t n = strlen(a) + strlen(b) + strlen(c) + strlen(d) + 1;
    char *s = ctl_alloc(n, 1);
    snprintf(s, n, "%s%s%s%s", a, b, c, d);
    return s;
}

static const char *text_of(const json_t *j, const char *name)
{
    const char *s = json_string_value(json_object_get(j, name));
    return s ? s : "";
}

static void make_prompt(struct eval_rec *r, enum eval_order order)
{
    static const char head[] = "<|im_start|>user\n", turn[] = "<|im_end|>\n<|im_start|>assistant\n";
    const char *context = text_of(r->json, "context"), *question = text_of(r->json, "question");
    const char *prefix = text_of(r->json, "answer_prefix");
    bool raw = strcmp(text_of(r->json, "format"), "raw") == 0;

    if (raw) { /* no header: compressed at the end of the prompt, or of the context */
        r->prompt_text = concat(context, order == ORDER_CONTEXT ? "" : question, "", "");
        r->pre_text = concat(order == ORDER_CONTEXT ? question : "", "", "", "");
    } else if (order == ORDER_CONTEXT) {
        r->prompt_text = concat(head, context, "", "");
        r->pre_text = concat(question, turn, prefix, "");
    } else {
        char *asked = concat(head, context, question, turn);
        r->prompt_text = concat(asked, order == ORDER_TAIL ? prefix : "", "", "");
        r->pre_text = concat(order == ORDER_TAIL ? "" : prefix, "", "", "");
        free(asked);
    }
}

static int kind_of(const char *score)
{
    static const char *const names[] = { "exact", "tokens", "choice", "nll" };
    for (int i = 0; i < 4; i++)
        if (strcmp(names[i], score) == 0)
            return i;
    return -1;
}

/* NULL when the line is a record; else what is wrong with it. */
static const char *take_record(struct eval_rec *r, json_t *take_json, enum eval_order order)
{
    json_t *choices = json_object_get(take_json, "choices");
    int kind = kind_of(text_of(take_json, "score"));

    memset(r, 0, sizeof *r);
    r->json = take_json;
    r->id = text_of(take_json, "id");
    r->task = text_of(take_json, "task");
    r->size = (int)json_integer_value(json_object_get(take_json, "size"));
    if (kind < 0)
        return "score must be exact, tokens, choice or nll";
    r->kind = (enum eval_kind)kind;
    if (*r->task == '\0' || *text_of(take_json, "answer") == '\0')
        return "a record needs a task and an answer";
    r->n_choices = json_array_size(choices);
    if (r->kind == SCORE_CHOICE && (r->n_choices < 2 || r->n_choices > EVAL_CHOICES))
        return "a choice needs 2 to 32 choices";
    if (r->kind == SCORE_CHOICE) {
        const char *answer = text_of(take_json, "answer");
        r->right = r->n_choices;
        for (size_t i = 0; i < r->n_choices; i++)
            if (json_string_value(json_array_get(choices, i)) != NULL &&
                strcmp(json_string_value(json_array_get(choices, i)), answer) == 0)
                r->right = i;
        if (r->right == r->n_choices)
            return "the answer is none of the choices";
    }
    make_prompt(r, order);
    return NULL;
}

int eval_read(struct ctl *ctl, const char *path, enum eval_order order, struct eval_rec **recs, size_t *n)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t size = 0, line_no = 0;
    int rc = 0;

    if (f == NULL) {
        ctl_usage(ctl, "%s: %s", path, strerror(errno));
        return -1;
    }
    while (rc == 0 && getline(&line, &size, f) >= 0) {
        json_error_t je;
        const char *bad;
        json_t *j;
        line_no++;
        if (line[strspn(line, " \t\r\n")] == '\0')
            continue;
        j = json_loads(line, 0, &je);
        if (!json_is_object(j)) {
            ctl_usage(ctl, "%s:%zu: not a JSON object%s%s", path, line_no, j ? "" : ": ", j ? "" : je.text);
            json_decref(j);
            rc = -1;
            break;
        }
        *recs = ctl_grow(*recs, *n + 1, sizeof **recs);
        bad = take_record(&(*recs)[*n], j, order);
        (*n)++;
        if (bad != NULL) {
            ctl_usage(ctl, "%s:%zu: %s", path, line_no, bad);
            rc = -1;
        }
    }
    free(line);
    fclose(f);
    return rc;
}

void dist_free(struct dist *d)
{
    free(d->id);
    free(d->lp);
    memset(d, 0, sizeof *d);
}

void eval_rec_fini(struct eval_rec *r)
{
    for (size_t i = 0; r->full != NULL && i < r->answer.n; i++)
        dist_free(&r->full[i]);
    free(r->full);
    free(r->prompt_text);
    free(r->pre_text);
    free(r->prompt.v);
    free(r->pre.v);
    free(r->answer.v);
    free(r->cont.v);
    json_decref(r->json);
    memset(r, 0, sizeof *r);
}

/* ---- choosing ---- */

/* Records of one context stay in one half. The contexts whose first record has the same task and size are dealt out
 * in turn. seen: whether the context was met before; its half then. */
static char half_of(const struct eval_rec *recs, size_t i, char *halves)
{
    const char *context = text_of(recs[i].json, "context_id");
    size_t rank = 0;

    for (size_t k = 0; k < i; k++) {
        if (*context != '\0' && strcmp(text_of(recs[k].json, "context_id"), context) == 0)
            return halves[k];
        /* halves[k] is lower case where record k was not its context's first */
        rank += strcmp(recs[k].task, recs[i].task) == 0 && recs[k].size == recs[i].size && (halves[k] & 0x20) == 0;
    }
    return rank % 2 == 0 ? 'A' : 'B';
}

void eval_filter(struct eval_rec *recs, size_t *n, const struct eval_filter *f)
{
    char *halves = ctl_alloc(*n, 1);
    size_t kept = 0;
    bool *keep = ctl_alloc(*n, sizeof *keep);

    for (size_t i = 0; i < *n; i++) {
        long same = 0;
        char half = half_of(recs, i, halves);
        bool first = true;
        for (size_t k = 0; k < i; k++) {
            first &= strcmp(text_of(recs[k].json, "context_id"), text_of(recs[i].json, "context_id")) != 0;
            same += keep[k] && strcmp(recs[k].task, recs[i].task) == 0 && recs[k].size == recs[i].size;
        }
        halves[i] = (char)(first ? half & ~0x20 : half | 0x20);
        keep[i] = (f->split == 0 || (half & ~0x20) == f->split) && opt_listed(f->tasks, recs[i].task) &&
                  (f->limit == 0 || same < f->limit);
    }
    for (size_t i = 0; i < *n; i++) {
        if (keep[i])
            recs[kept++] = recs[i];
        else
            eval_rec_fini(&recs[i]);
    }
    *n = kept;
    free(keep);
    free(halves);
}

/* ---- scoring ---- */

void dist_read(struct dist *d, const struct skv_value *top)
{
    d->n = skv_len(top);
    d->id = ctl_alloc(d->n, sizeof *d->id);
    d->lp = ctl_alloc(d->n, sizeof *d->lp);
    for (size_t i = 0; i < d->n; i++) {
        const struct skv_value *e = skv_at(top, i);
        d->id[i] = (int32_t)skv_int(skv_at(e, 0), -1);
        d->lp[i] = (float)skv_num(skv_at(e, skv_len(e) - 1), LOG_FLOOR);
        d->lp[i] = d->lp[i] < LOG_FLOOR ? LOG_FLOOR : d->lp[i];
    }
}

static void dist_add(struct dist *d, int32_t id, double lp)
{
    for (size_t i = 0; i < d->n; i++)
        if (d->id[i] == id)
            return;
    d->id = ctl_grow(d->id, d->n + 1, sizeof *d->id);
    d->lp = ctl_grow(d->lp, d->n + 1, sizeof *d->lp);
    d->id[d->n] = id;
    d->lp[d->n++] = lp < LOG_FLOOR ? LOG_FLOOR : (float)lp;
}

static const float *dist_find(const struct dist *d, int32_t id)
{
    for (size_t i = 0; i < d->n; i++)
        if (d->id[i] == id)
            return &d->lp[i];
    return NULL;
}

/* KL(p || q) over the partition {each token that both know, all the others together}: never above the exact one, and
 * within a few per cent of it when p's known tokens have nearly all the mass. */
static double dist_kl(const struct dist *p, const struct dist *q)
{
    double kl = 0, rest_p = 1, rest_q = 1;

    for (size_t i = 0; i < p->n; i++) {
        const float *lq = dist_find(q, p->id[i]);
        if (lq == NULL)
            continue;
        kl += exp(p->lp[i]) * (p->lp[i] - *lq);
        rest_p -= exp(p->lp[i]);
        rest_q -= exp(*lq);
    }
    if (rest_p > 1e-6)
        kl += rest_p * log(rest_p / (rest_q > 1e-9 ? rest_q : 1e-9));
    return kl > 0 ? kl : 0;
}

/* What a `score` answer says of position i of the continuation. */
static void dist_of(struct dist *d, const struct eval_rec *r, const struct skv_value *v, size_t i)
{
    const struct skv_value *known = skv_at(skv_get(v, "candidates"), i);
    size_t k = i - r->pre.n, c = 0;

    memset(d, 0, sizeof *d);
    dist_read(d, skv_at(skv_get(v, "top"), i));
    /* The candidates were asked in this order: the choices at the answer's first position, then the full cache's top. */
    for (size_t j = 0; k == 0 && j < r->n_choices && c < skv_len(known); j++, c++)
        dist_add(d, r->choice[j], skv_num(skv_at(known, c), LOG_FLOOR));
    for (size_t j = 0; r->full != NULL && j < r->full[k].n && c < skv_len(known); j++, c++)
        dist_add(d, r->full[k].id[j], skv_num(skv_at(known, c), LOG_FLOOR));
    dist_add(d, r->answer.v[k], skv_num(skv_at(skv_get(v, "logprobs"), i), LOG_FLOOR));
}

/* The likeliest token at position i; -1 when the daemon does not say. */
static int64_t likeliest(const struct skv_value *v, const struct dist *d, size_t i)
{
    const struct skv_value *a = skv_at(skv_get(v, "argmax"), i);
    size_t best = 0;

    if (a != NULL)
        return skv_int(a, -1);
    if (skv_len(skv_at(skv_get(v, "top"), i)) == 0)
        return -1;
    for (size_t j = 1; j < d->n; j++)
        if (d->lp[j] > d->lp[best])
            best = j;
    return d->id[best];
}

static void choose(const struct eval_rec *r, const struct dist *d, struct eval_res *out)
{
    const float *right = dist_find(d, r->choice[r->right]);
    size_t known = 0;
    bool beaten = false;

    for (size_t i = 0; i < r->n_choices; i++) {
        const float *lp = dist_find(d, r->choice[i]);
        known += lp != NULL;
        beaten |= lp != NULL && i != r->right && r->choice[i] != r->choice[r->right] && (right == NULL || *lp > *right);
    }
    out->score = right != NULL && !beaten;
    /* With only the answer known, nothing was compared. (A choice missing from a long top is less likely than all in it.) */
    if (known < 2 && d->n < 8)
        out->state = RES_UNKNOWN;
}

void eval_take_score(struct eval_rec *r, const struct skv_value *v, struct eval_res *out, bool keep)
{
    const struct skv_value *lps = skv_get(v, "logprobs"), *kv = skv_get(v, "kv");
    double full = skv_num(skv_get(kv, "slots_full"), 0), nll = 0, kl = 0;
    struct dist *dists = ctl_alloc(r->answer.n, sizeof *dists);
    size_t hits = 0;
    bool unknown = false, with_kl = r->full != NULL;

    out->state = RES_DONE;
    out->kept = full > 0 ? skv_num(skv_get(kv, "slots_kept"), 0) / full : NAN;
    if (skv_len(lps) != r->cont.n) {
        out->state = RES_FAILED;
        free(dists);
        return;
    }
    for (size_t k = 0; k < r->answer.n; k++) {
        size_t i = r->pre.n + k;
        int64_t best;
        dist_of(&dists[k], r, v, i);
        best = likeliest(v, &dists[k], i);
        unknown |= best < 0;
        hits += best == r->answer.v[k];
        nll -= fmax(skv_num(skv_at(lps, i), LOG_FLOOR), LOG_FLOOR);
        if (with_kl)
            kl += dist_kl(&r->full[k], &dists[k]);
        with_kl &= dists[k].n > 1;
    }
    if (r->kind == SCORE_EXACT)
        out->score = hits == r->answer.n;
    else if (r->kind == SCORE_TOKENS)
        out->score = (double)hits / (double)r->answer.n;
    else if (r->kind == SCORE_NLL)
        out->score = nll / (double)r->answer.n;
    else
        choose(r, &dists[0], out);
    if (unknown && (r->kind == SCORE_EXACT || r->kind == SCORE_TOKENS))
        out->state = RES_UNKNOWN;
    out->kl = with_kl ? kl / (double)r->answer.n : NAN;
    for (size_t k = 0; k < r->answer.n && !keep; k++)
        dist_free(&dists[k]);
    if (keep) {
        out->kl = 0;
        r->full = dists;
    } else
        free(dists);
}

void eval_take_generated(struct eval_rec *r, const struct skv_value *tokens, const struct dist *first, struct eval_res *out)
{
    size_t n = skv_len(tokens), hits = 0;
    bool prefix = true;

    for (size_t k = 0; k < r->answer.n; k++) {
        bool hit = k < n && skv_int(skv_at(tokens, k), -1) == r->answer.v[k];
        hits += hit;
        prefix &= hit;
    }
    out->state = RES_DONE;
    out->kl = NAN;
    if (r->kind == SCORE_EXACT)
        out->score = prefix;
    else if (r->kind == SCORE_TOKENS)
        out->score = (double)hits / (double)r->answer.n;
    else if (r->kind == SCORE_CHOICE)
        choose(r, first, out);
    else
        out->state = RES_UNKNOWN;
}
