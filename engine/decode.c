/* decode.c - one token for every running sequence: phase 2 (step-prepare), the forward pass, the choice of tokens. */
#include <string.h>

#include "engine/core.h"

/* Where a row's slots are in e->slot, and how far apart those of two layers. */
static int32_t *row_slot(const struct engine *e, int row)
{
    return e->slot + (size_t)row * e->model.src.dims.n_kv;
}

static size_t slot_stride(const struct engine *e)
{
    return (size_t)e->batch_cap * e->model.src.dims.n_kv;
}

/* A slot for the new KV pair in every layer and head of a row: step-prepare. */
static void take_slots(struct engine *e, const struct seq *s, int row)
{
    int n_layer = e->model.src.dims.n_layer, n_kv = e->model.src.dims.n_kv;

    for (int layer = 0; layer < n_layer; layer++)
        for (int h = 0; h < n_kv; h++) {
            size_t i = core_head(e, s->lane, layer, h);
            int32_t *at = &row_slot(e, row)[(size_t)layer * slot_stride(e) + h];
            *at = -1; /* the victim's, chosen by the step before */
            if (e->kv->len[i] < e->kv->cap[i]) {
                *at = e->kv->len[i];
                pages_grow(e->pages, s->lane, layer, h, e->kv->len[i] + 1);
            }
        }
}

/* The row's pairs are counted from now on, or (-1) not yet. */
static void count_pairs(struct engine *e, const struct seq *s, int row, int by)
{
    int n_layer = e->model.src.dims.n_layer, n_kv = e->model.src.dims.n_kv;

    for (int layer = 0; layer < n_layer; layer++)
        for (int h = 0; h < n_kv; h++)
            if (row_slot(e, row)[(size_t)layer * slot_stride(e) + h] >= 0)
                e->kv->len[core_head(e, s->lane, layer, h)] += by;
            else
                e->layer_evicted[layer] += by;
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

static bool runs(const struct seq *s)
{
    return s->state == SEQ_DECODE && !s->paused && !s->resting;
}

bool decode_pending(const struct engine *e)
{
    const struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (runs(s))
            return true;
    return false;
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

/* Who is in the step; `next`: in the one after it, as far as can be said. */
static int collect(struct engine *e, struct seq **row_seq, bool next)
{
    struct seq *s;
    int n = 0;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (runs(s) && n < core_batch(e) && (!next || goes_on(s)))
            row_seq[n++] = s;
    return n;
}

/* A step's operations, but for the choice of its tokens. token NULL: not known yet. */
static void forward(struct engine *e, struct seq *const *row_seq, int n, const int32_t *token)
{
    const struct ops_dims *d = &e->model.src.dims;
    struct ops_pass pass = { .n_row = n, .n_seg = n, .token = token, .seg = e->seg };

    for (int i = 0; i < n; i++) {
        take_slots(e, row_seq[i], i);
        count_pairs(e, row_seq[i], i, 1);
        e->row_index[i] = i;
        e->seg[i] = (struct ops_seg){ .lane = row_seq[i]->lane, .row0 = i, .n_row = 1, .pos0 = row_seq[i]->n_kv,
                                      .score_from = i + 1 };
    }
    e->ops->embed(e->be, &pass, e->x);
    for (int layer = 0; layer < d->n_layer; layer++) {
        for (int i = 0; i < n; i++) {
            e->rule[i] = row_seq[i]->plan.rule[layer];
            ring_step(e, row_seq[i], layer, &e->rule[i]);
        }
        e->ops->attn_in(e->be, layer, &pass, e->x, e->slot + (size_t)layer * slot_stride(e));
        e->ops->attn_decode(e->be, layer, &pass, e->rule);
        e->ops->attn_out_mlp(e->be, layer, &pass, e->x);
    }
}

/* The next step, as it is if nobody ends, comes or pauses until then: all but its tokens. A prompt's operations would come between. */
static void prepare(struct engine *e)
{
    int n;

    if (e->ops->ahead == NULL || prefill_pending(e) || (n = collect(e, e->ahead_seq, true)) == 0)
        return;
    forward(e, e->ahead_seq, n, NULL);
    for (int i = 0; i < n; i++)
        count_pairs(e, e->ahead_seq[i], i, -1);
    e->n_ahead = n;
}

void decode_forget(struct engine *e)
{
    if (e->n_ahead == 0)
        return;
    e->n_ahead = 0;
    e->ops->ahead(e->be, NULL);
}

/* The step of these rows is the one that was prepared: their tokens are all that it lacks. */
static bool prepared(struct engine *e, int n)
{
    if (n == 0 || n != e->n_ahead || memcmp(e->row_seq, e->ahead_seq, (size_t)n * sizeof *e->row_seq) != 0)
        return false;
    for (int i = 0; i < n; i++)
        count_pairs(e, e->row_seq[i], i, 1);
    e->n_ahead = 0;
    e->ops->ahead(e->be, e->row_token);
    atomic_fetch_add_explicit(&e->stats.steps_ahead, 1, memory_order_relaxed);
    return true;
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

/* While the device works: all that doesn't need its tokens. Nothing here changes the sequences in the step but for pages that
 * they have no pair in yet; memory that goes from one sequence to another is cleared behind the step, in the device's order. */
static void work_ahead(struct engine *e, int n)
{
    for (int i = 0; i < n; i++)
        if (goes_on(e->row_seq[i]))
            pages_ahead(e, e->row_seq[i]);
    text_run(e);
    sched_admit(e);
    prepare(e);
}

bool decode_ahead(const struct engine *e)
{
    return e->ops->collect != NULL && decode_pending(e);
}

void decode_give_back(struct engine *e, const struct seq *s)
{
    for (int i = 0; i < e->n_ahead; i++)
        if (e->ahead_seq[i] == s)
            decode_forget(e);
    for (int layer = 0; layer < e->model.src.dims.n_layer; layer++)
        for (int h = 0; h < e->model.src.dims.n_kv; h++)
            pages_trim(e->pages, s->lane, layer, h, e->kv->len[core_head(e, s->lane, layer, h)]);
}

int decode_step(struct engine *e)
{
    int n = collect(e, e->row_seq, false);

    for (int i = 0; i < n; i++)
        e->row_token[i] = e->row_seq[i]->tokens.id[e->row_seq[i]->n_kv];
    if (!prepared(e, n)) {
        decode_forget(e);
        if (n == 0)
            return 0;
        forward(e, e->row_seq, n, e->row_token);
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
