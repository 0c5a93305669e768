/* decode.c - one token for every running sequence: phase 2 (step-prepare), the forward pass, the choice of tokens. */
#include <string.h>

#include "engine/core.h"

void decode_prepare(struct engine *e, struct seq *s, int32_t *slot, size_t stride)
{
    int n_layer = e->model.src.dims.n_layer, n_kv = e->model.src.dims.n_kv;

    for (int layer = 0; layer < n_layer; layer++)
        for (int h = 0; h < n_kv; h++) {
            size_t i = core_head(e, s->lane, layer, h);
            int32_t *at = &slot[(size_t)layer * stride + h];
            if (e->kv->len[i] < e->kv->cap[i]) {
                *at = e->kv->len[i];
                pages_grow(e->pages, s->lane, layer, h, e->kv->len[i] + 1);
                e->kv->len[i]++;
            } else {
                *at = -1; /* the victim's, chosen by the step before */
                e->layer_evicted[layer]++;
            }
        }
}

/* ---- after the logits ------------------------------------------------------------------------------ */

struct choice {
    struct engine *e;
    struct seq **seq;
    int n_vocab;
};

/* Log-probabilities of the tokens that a score request asks about here. The likeliest token's, which is finite, gives the
 * logarithm of the sum without another pass over the vocabulary. */
static void score_candidates(struct seq *s, const float *logits)
{
    const struct engine_request *r = s->req;

    if (s->cand_lp == NULL || s->n_answer >= r->n_cand_from)
        return;
    for (int i = r->cand_from[s->n_answer]; i < r->cand_from[s->n_answer + 1]; i++) {
        float lp = logits[r->cand[i]] - logits[s->top_id[0]] + s->top_lp[0];
        s->cand_lp[i] = lp > -1e30f ? lp : -1e30f;
    }
}

/* On a worker: logits of row i to the sequence's next token, unless the backend has chosen it. */
static void choose_row(void *arg, int i)
{
    struct choice *c = arg;
    struct seq *s = c->seq[i];
    if (c->e->ops->sample != NULL && !c->e->pick[i].host) {
        s->n_top = 0;
        s->next = c->e->pick[i].token;
        return;
    }
    float *logits = c->e->logits + (size_t)i * c->n_vocab;

    s->n_top = 0;
    if (s->req->kind == ENGINE_SCORE) {
        int32_t best;
        s->next = s->cont.id[s->n_answer];
        s->n_top = s->req->logprobs > 0 ? s->req->logprobs : 1;
        s->next_lp = sampler_logprobs(logits, c->n_vocab, s->next, s->n_top, s->top_id, s->top_lp);
        best = s->top_id[0];
        s->cont_best[s->n_answer] = best;
        if (best >= 0)
            score_candidates(s, logits);
        if (s->top_lp[0] <= -1e30f) /* even the likeliest is impossible: no number among the logits */
            s->next = -1;
        return;
    }
    if (s->req->logprobs > 0)
        memcpy(c->e->logits_copy + (size_t)i * c->n_vocab, logits, (size_t)c->n_vocab * sizeof *logits);
    s->next = sampler_pick(s->sampler, logits, s->n_answer);
    if (s->req->logprobs > 0 && s->next >= 0) {
        s->n_top = s->req->logprobs;
        s->next_lp = sampler_logprobs(c->e->logits_copy + (size_t)i * c->n_vocab, c->n_vocab, s->next, s->n_top, s->top_id,
                                      s->top_lp);
    }
}

static void accept_score(struct engine *e, struct seq *s)
{
    s->cont_lp[s->n_answer] = s->next_lp;
    s->cont_sum += (double)s->next_lp;
    if (s->cont_top != NULL)
        emit_score_top(e, s);
    s->n_answer++;
    if (s->n_answer == s->cont.n) {
        sched_finish(e, s, ENGINE_FINISH_LENGTH, -1);
        return;
    }
    s->tokens.id[s->tokens.n++] = s->next;
}

static void accept_generate(struct engine *e, struct seq *s)
{
    struct tokenizer *tok = e->model.tok;
    bool eog = !s->req->ignore_eos && tok_is_eog(tok, s->next), last = eog || s->n_answer + 1 == s->n_max;
    size_t from = 0, len = 0, n_bytes = 0;
    int32_t token = s->next;
    int stop;

    if (!eog) {
        const char *bytes = tok_bytes(tok, token, false, &n_bytes);
        if (seq_text_add(s, bytes, n_bytes) < 0) {
            sched_fail(e, s, SKV_INTERNAL, "no memory for the answer's text");
            return;
        }
        s->tokens.id[s->tokens.n++] = token;
        s->n_answer++;
        sampler_accept(s->sampler, token);
    }
    stop = seq_text_cut(s, last, &from, &len);
    if (stop == -2) {
        sched_fail(e, s, SKV_INTERNAL, "no memory for the answer's text");
        return;
    }
    if (!eog || len > 0)
        emit_token(e, s, eog ? s->n_answer : s->n_answer - 1, token, from, len);
    if (stop >= 0)
        sched_finish(e, s, ENGINE_FINISH_STOP, stop);
    else if (eog)
        sched_finish(e, s, ENGINE_FINISH_EOS, -1);
    else if (last)
        sched_finish(e, s, ENGINE_FINISH_LENGTH, -1);
}

static void accept(struct engine *e, struct seq *s)
{
    int64_t now = core_now_us(e);

    if (s->next < 0) {
        sched_fail(e, s, SKV_INTERNAL, "the model's output is not a number; other requests go on");
        return;
    }
    if (s->t_first == 0) {
        s->t_first = now;
        stats_hist_add(&e->stats.ttft, now - s->t_submit);
    } else {
        stats_hist_add(&e->stats.itl, now - s->t_last);
    }
    s->t_last = now;
    if (s->req->kind == ENGINE_SCORE)
        accept_score(e, s);
    else
        accept_generate(e, s);
}

/* Have the next tokens of the sequences chosen, from rows of a hidden state. What a row's request needs decides where its token
 * is chosen, never what runs beside it. */
static void choose_begin(struct engine *e, struct seq **seq, const float *x, const int32_t *row, int n)
{
    for (int i = 0; e->ops->sample != NULL && i < n; i++) {
        bool host = seq[i]->req->kind == ENGINE_SCORE || seq[i]->req->logprobs > 0;
        if (host)
            e->pick[i] = (struct ops_sample){ .host = true };
        else
            sampler_describe(seq[i]->sampler, seq[i]->n_answer, &e->pick[i]);
    }
    if (e->ops->sample != NULL)
        e->ops->sample(e->be, x, row, n, e->pick, e->logits);
    else
        e->ops->logits(e->be, x, row, n, e->logits);
}

static void choose_end(struct engine *e, struct seq **seq, int n)
{
    struct choice c = { e, seq, e->model.src.dims.n_vocab };

    if (e->ops->collect != NULL)
        e->ops->collect(e->be);
    if (core_failed(e))
        return;
    e->ops->host_for(e->be, n, choose_row, &c);
    stats_tokens(&e->stats, 0, n);
    for (int i = 0; i < n; i++)
        accept(e, seq[i]);
}

/* A refed prompt: its last pair is taken back, so that the decode step feeds the token again over what was kept. */
static void take_back_last(struct engine *e, struct seq *s)
{
    int n_layer = e->model.src.dims.n_layer, n_kv = e->model.src.dims.n_kv;

    for (size_t i = core_head(e, s->lane, 0, 0), k = 0; k < (size_t)n_layer * n_kv; k++)
        e->kv->len[i + k]--;
    s->n_kv--;
}

void decode_first(struct engine *e, struct seq **seq, const int32_t *row, int n, const float *x)
{
    struct seq *run[PREFILL_PACK];
    int32_t run_row[PREFILL_PACK];
    int n_run = 0;

    for (int i = 0; i < n; i++) {
        struct seq *s = seq[i];
        s->n_step = 0;
        if (s->req->kind == ENGINE_SCORE && s->req->refeed) {
            take_back_last(e, s);
        } else if (s->req->kind == ENGINE_GENERATE && s->n_max == 0) {
            s->t_first = s->t_last = core_now_us(e);
            sched_finish(e, s, ENGINE_FINISH_LENGTH, -1);
        } else {
            run[n_run] = s;
            run_row[n_run++] = row[i];
        }
    }
    if (n_run == 0)
        return;
    choose_begin(e, run, x, run_row, n_run);
    choose_end(e, run, n_run);
}

/* ---- the step -------------------------------------------------------------------------------------------- */

bool decode_pending(const struct engine *e)
{
    const struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->state == SEQ_DECODE && !s->paused && !s->resting)
            return true;
    return false;
}

static int collect(struct engine *e)
{
    int n_kv = e->model.src.dims.n_kv, n = 0;
    size_t stride = (size_t)core_batch(e) * n_kv;
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link) {
        if (s->state != SEQ_DECODE || s->paused || s->resting || n == core_batch(e))
            continue;
        decode_prepare(e, s, e->slot + (size_t)n * n_kv, stride);
        e->row_seq[n] = s;
        e->row_token[n] = s->tokens.id[s->n_kv];
        e->row_index[n] = n;
        e->seg[n] = (struct ops_seg){ .lane = s->lane, .row0 = n, .n_row = 1, .pos0 = s->n_kv, .score_from = n + 1 };
        n++;
    }
    return n;
}

/* Where the step's queries go in a policy that keeps a ring of them, and whether its layer scores by them now: once a turn of the
 * ring, in every layer at another step, so that no step pays for all; not before victims are near. All of it depends on the
 * sequence alone. */
static void ring_step(const struct engine *e, const struct seq *s, int layer, struct kern_rule *rule)
{
    int n_kv = e->model.src.dims.n_kv, phase;

    if (rule->ring == 0)
        return;
    rule->ring_at = s->n_step % rule->ring;
    phase = (s->n_step + layer * rule->ring / e->model.src.dims.n_layer) % rule->ring;
    if (phase != rule->ring - 1 || s->n_step + 1 < rule->ring)
        return;
    for (int h = 0; h < n_kv; h++) {
        size_t i = core_head(e, s->lane, layer, h);
        rule->burst = rule->burst || e->kv->len[i] >= e->kv->cap[i] - rule->ring;
    }
}

/* Does it need another token after the one that is being chosen? It may end all the same, at an end token or a stop. */
static bool goes_on(const struct seq *s)
{
    return s->n_answer + 1 < (s->req->kind == ENGINE_SCORE ? s->cont.n : s->n_max);
}

/* The pages of the pairs of the step after this one, where they are the first in them. */
static void pages_ahead(struct engine *e, const struct seq *s)
{
    for (int layer = 0; layer < e->model.src.dims.n_layer; layer++)
        for (int h = 0; h < e->model.src.dims.n_kv; h++) {
            size_t i = core_head(e, s->lane, layer, h);
            if (e->kv->len[i] < e->kv->cap[i])
                pages_grow(e->pages, s->lane, layer, h, e->kv->len[i] + 1);
        }
}

/* While the device works: all that doesn't need its tokens. Nothing here touches the sequences in the step but for pages that
 * they have no pair in yet; memory that goes from one sequence to another is cleared behind the step, in the device's order. */
static void work_ahead(struct engine *e, int n)
{
    for (int i = 0; i < n; i++)
        if (goes_on(e->row_seq[i]))
            pages_ahead(e, e->row_seq[i]);
    text_run(e);
    sched_admit(e);
}

bool decode_ahead(const struct engine *e)
{
    return e->ops->collect != NULL && decode_pending(e);
}

void decode_give_back(struct engine *e, const struct seq *s)
{
    for (int layer = 0; layer < e->model.src.dims.n_layer; layer++)
        for (int h = 0; h < e->model.src.dims.n_kv; h++)
            pages_trim(e->pages, s->lane, layer, h, e->kv->len[core_head(e, s->lane, layer, h)]);
}

int decode_step(struct engine *e)
{
    const struct ops_dims *d = &e->model.src.dims;
    size_t stride = (size_t)core_batch(e) * d->n_kv;
    struct ops_pass pass = { .token = e->row_token, .seg = e->seg };
    int n = collect(e);

    if (n == 0)
        return 0;
    pass.n_row = pass.n_seg = n;
    e->ops->embed(e->be, &pass, e->x);
    for (int layer = 0; layer < d->n_layer; layer++) {
        for (int i = 0; i < n; i++) {
            e->rule[i] = e->row_seq[i]->plan.rule[layer];
            ring_step(e, e->row_seq[i], layer, &e->rule[i]);
        }
        e->ops->attn_in(e->be, layer, &pass, e->x, e->slot + (size_t)layer * stride);
        e->ops->attn_decode(e->be, layer, &pass, e->rule);
        e->ops->attn_out_mlp(e->be, layer, &pass, e->x);
    }
    for (int i = 0; i < n; i++) {
        e->row_seq[i]->n_kv++;
        e->row_seq[i]->n_step++;
        e->row_seq[i]->n_turn++;
    }
    choose_begin(e, e->row_seq, e->x, e->row_index, n);
    if (e->ops->collect != NULL)
        work_ahead(e, n);
    choose_end(e, e->row_seq, n);
    return n;
}
