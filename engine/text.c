/* text.c - from a request's text to tokens, a bounded piece at a time, so that a huge prompt never holds up a step. */
#include <stdlib.h>
#include <string.h>

#include "engine/core.h"

#define TEXT_BYTES_STEP 65536 /* of all texts together in one step: a few milliseconds */

static int push_token(struct tok_ids *ids, int32_t id, struct skv_error *err)
{
    if (tok_ids_reserve(ids, 1, err) < 0)
        return -1;
    ids->id[ids->n++] = id;
    return 0;
}

static int push_tokens(const struct engine *e, struct tok_ids *ids, const int32_t *id, int n, const char *what,
                       struct skv_error *err)
{
    int vocab = tok_vocab(e->model.tok);

    for (int i = 0; i < n; i++) {
        if (id[i] < 0 || id[i] >= vocab)
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] is %d; token ids of this model are 0 to %d", what, i, id[i],
                            vocab - 1);
        if (push_token(ids, id[i], err) < 0)
            return -1;
    }
    return 0;
}

static int begin_chat(struct engine *e, struct seq *s, bool fresh, struct skv_error *err)
{
    struct engine_request *r = s->req;
    struct chat_text c;

    if (e->model.chat == NULL)
        return skv_fail(err, SKV_BAD_REQUEST, "messages need a chat template: %s", e->model.chat_error.msg);
    if (chat_render(e->model.chat, r->messages, r->n_messages, r->add_generation_prompt, !fresh, &c, err) < 0)
        return -1;
    int rc = chat_job_init(&s->job, e->model.tok, &c, err);
    chat_text_free(&c);
    return rc;
}

/* Set up what is to be encoded. */
static int begin(struct engine *e, struct seq *s, struct skv_error *err)
{
    struct engine_request *r = s->req;
    bool fresh = s->n_kv == 0 && s->tokens.n == 0;

    s->text_begun = true;
    if (r->n_tokens >= 0)
        return push_tokens(e, &s->tokens, r->tokens, r->n_tokens, "tokens", err);
    if (r->n_messages >= 0)
        return begin_chat(e, s, fresh, err);
    chat_job_text(&s->job, r->text.s, r->text.len, r->kind == ENGINE_TOKENIZE ? r->special : !r->raw);
    r->text.s = NULL; /* the job owns it now */
    if (r->kind == ENGINE_TOKENIZE ? r->bos : fresh && !r->raw && tok_add_bos(e->model.tok))
        if (tok_bos(e->model.tok) >= 0)
            return push_token(&s->tokens, tok_bos(e->model.tok), err);
    return 0;
}

/* Encode up to *budget bytes. 1: all done, 0: more to do, -1: failed. */
static int encode_some(struct engine *e, struct seq *s, size_t *budget, struct skv_error *err)
{
    if (!s->text_begun && begin(e, s, err) < 0)
        return -1;
    size_t before = s->job.tok.done;
    int r = chat_job_some(&s->job, e->model.tok, *budget, &s->tokens, err);
    size_t used = s->job.tok.done - before;
    *budget -= used < *budget ? used : *budget;
    if (r == 1 && s->req->n_messages >= 0) {
        s->system_to = s->job.index[CHAT_SYSTEM_TO];
        s->last_from = s->job.index[CHAT_LAST_FROM];
        s->tail_from = s->job.index[CHAT_TAIL_FROM];
    }
    return r;
}

/* The continuation of a score request: short, encoded at once. */
static int encode_continuation(struct engine *e, struct seq *s, struct skv_error *err)
{
    struct engine_request *r = s->req;
    size_t n;

    if (r->has_cont_text) {
        if (tok_encode(e->model.tok, r->cont_text.s, r->cont_text.len, false, &s->cont, err) < 0)
            return -1;
    } else if (push_tokens(e, &s->cont, r->cont_tokens, r->n_cont_tokens, "continuation", err) < 0) {
        return -1;
    }
    if (r->cand_from != NULL && r->n_cand_from > s->cont.n)
        return skv_fail(err, SKV_BAD_REQUEST, "candidates has %d lists, the continuation %d tokens", r->n_cand_from, s->cont.n);
    for (int i = 0; r->cand_from != NULL && i < r->cand_from[r->n_cand_from]; i++)
        if (r->cand[i] < 0 || r->cand[i] >= tok_vocab(e->model.tok))
            return skv_fail(err, SKV_BAD_REQUEST, "candidates has token %d; token ids of this model are 0 to %d", r->cand[i],
                            tok_vocab(e->model.tok) - 1);
    if (r->cand_from != NULL && (s->cand_lp = calloc((size_t)r->cand_from[r->n_cand_from] + 1, sizeof *s->cand_lp)) == NULL)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    n = s->cont.n > 0 ? (size_t)s->cont.n : 1;
    s->cont_lp = calloc(n, sizeof *s->cont_lp);
    s->cont_best = calloc(n, sizeof *s->cont_best);
    if (r->logprobs > 0)
        s->cont_top = calloc(n * (size_t)r->logprobs, sizeof *s->cont_top);
    if (s->cont_lp == NULL || s->cont_best == NULL || (r->logprobs > 0 && s->cont_top == NULL))
        return skv_fail(err, SKV_INTERNAL, "no memory");
    return 0;
}

static void finish_tokenize(struct engine *e, struct seq *s)
{
    struct engine_answer *a = calloc(1, sizeof *a);

    if (a != NULL) {
        a->kind = ENGINE_TOKENIZE;
        a->tokens = s->tokens.id;
        a->n_tokens = s->tokens.n;
        s->tokens.id = NULL;
    }
    atomic_fetch_sub(&e->queued, 1);
    emit_answer(e, s->req, s->request, a);
    TAILQ_REMOVE(&e->seqs, s, link);
    seq_free(s);
}

static void encode(struct engine *e, struct seq *s, size_t *budget)
{
    struct skv_error err;
    int r = encode_some(e, s, budget, &err);

    if (r == 0)
        return;
    if (r > 0 && s->req->kind == ENGINE_SCORE)
        r = encode_continuation(e, s, &err);
    if (r < 0) {
        sched_fail(e, s, err.code, "%s", err.msg);
        return;
    }
    chat_job_fini(&s->job);
    if (s->req->kind == ENGINE_TOKENIZE)
        finish_tokenize(e, s);
    else
        sched_enqueue(e, s);
}

void text_run(struct engine *e)
{
    size_t budget = TEXT_BYTES_STEP;
    struct seq *s, *next;

    for (s = TAILQ_FIRST(&e->seqs); s != NULL && budget > 0; s = next) {
        next = TAILQ_NEXT(s, link);
        if (s->state == SEQ_TEXT)
            encode(e, s, &budget);
    }
}

bool text_pending(const struct engine *e)
{
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->state == SEQ_TEXT)
            return true;
    return false;
}
