/* text.c - from a request's text to tokens, a bounded piece at a time, so that a huge prompt never holds up a step. */
#include <stdlib.h>
#include <string.h>

#include "engine/core.h"

#define TEXT_BYTES_STEP 65536 /* of all texts together in one step */
#define TEXT_US_STEP    4000  /* likewise: what comes first */
#define TEXT_QUANTUM    4096  /* of one text, before it is another user's turn */
#define FAR_TOO_LONG    16    /* times the context: how many tokens there are exactly is not worth knowing */

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

/* A template's text is what is asked for. */
static int keep_text(struct seq *s, const struct chat_text *c, struct skv_error *err)
{
    size_t len = 0;

    for (int i = 0; i < c->n; i++)
        len += c->piece[i].len;
    s->text.out = malloc(len + 1);
    if (s->text.out == NULL)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    for (int i = 0; i < c->n; i++) {
        if (c->piece[i].len > 0)
            memcpy(s->text.out + s->text.out_len, c->piece[i].s, c->piece[i].len);
        s->text.out_len += c->piece[i].len;
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
    if (rc == 0 && r->kind == ENGINE_APPLY_TEMPLATE)
        rc = keep_text(s, &c, err);
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

/* Encode up to *budget bytes into out. 1: all done, 0: more to do, -1: failed. */
static int encode_job(struct engine *e, struct seq *s, struct tok_ids *out, size_t *budget, struct skv_error *err)
{
    size_t before = s->job.tok.done;
    int r = chat_job_some(&s->job, e->model.tok, *budget, out, err);
    size_t used = s->job.tok.done - before;

    *budget -= used < *budget ? used : *budget;
    return r;
}

static int encode_prompt(struct engine *e, struct seq *s, size_t *budget, struct skv_error *err)
{
    int context = e->model.src.dims.max_context, r;

    if (!s->text_begun && begin(e, s, err) < 0)
        return -1;
    r = encode_job(e, s, &s->tokens, budget, err);
    if (r == 0 && s->req->kind <= ENGINE_SCORE && s->tokens.n / FAR_TOO_LONG > context)
        return skv_fail(err, SKV_CONTEXT_OVERFLOW, "the prompt has more than %d tokens%s; the context is %d tokens (--context decides)",
                        s->tokens.n, s->n_kv > 0 ? " with its session's" : "", context);
    if (r == 1 && s->req->n_messages >= 0) {
        s->system_to = s->job.index[CHAT_SYSTEM_TO];
        s->last_from = s->job.index[CHAT_LAST_FROM];
        s->tail_from = s->job.index[CHAT_TAIL_FROM];
    }
    return r;
}

/* The continuation of a score request, after its prompt. */
static int encode_continuation(struct engine *e, struct seq *s, size_t *budget, struct skv_error *err)
{
    struct engine_request *r = s->req;
    int context = e->model.src.dims.max_context, rc;

    if (!r->has_cont_text)
        return push_tokens(e, &s->cont, r->cont_tokens, r->n_cont_tokens, "continuation", err) < 0 ? -1 : 1;
    if (!s->cont_begun) {
        s->cont_begun = true;
        chat_job_fini(&s->job);
        chat_job_text(&s->job, r->cont_text.s, r->cont_text.len, false);
        r->cont_text.s = NULL; /* the job owns it now */
    }
    rc = encode_job(e, s, &s->cont, budget, err);
    if (rc == 0 && s->cont.n / FAR_TOO_LONG > context)
        return skv_fail(err, SKV_CONTEXT_OVERFLOW, "the continuation has more than %d tokens; the context is %d tokens", s->cont.n,
                        context);
    return rc;
}

/* What scoring will need: no memory is taken while it runs. */
static int prepare_score(struct engine *e, struct seq *s, struct skv_error *err)
{
    struct engine_request *r = s->req;
    size_t n = s->cont.n > 0 ? (size_t)s->cont.n : 1;

    if (r->cand_from != NULL && r->n_cand_from > s->cont.n)
        return skv_fail(err, SKV_BAD_REQUEST, "candidates has %d lists, the continuation %d tokens", r->n_cand_from, s->cont.n);
    for (int i = 0; r->cand_from != NULL && i < r->cand_from[r->n_cand_from]; i++)
        if (r->cand[i] < 0 || r->cand[i] >= tok_vocab(e->model.tok))
            return skv_fail(err, SKV_BAD_REQUEST, "candidates has token %d; token ids of this model are 0 to %d", r->cand[i],
                            tok_vocab(e->model.tok) - 1);
    if (r->cand_from != NULL && (s->cand_lp = calloc((size_t)r->cand_from[r->n_cand_from] + 1, sizeof *s->cand_lp)) == NULL)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    s->cont_lp = calloc(n, sizeof *s->cont_lp);
    s->cont_best = calloc(n, sizeof *s->cont_best);
    if (r->logprobs > 0)
        s->cont_top = calloc(n * (size_t)r->logprobs, sizeof *s->cont_top);
    if (s->cont_lp == NULL || s->cont_best == NULL || (r->logprobs > 0 && s->cont_top == NULL))
        return skv_fail(err, SKV_INTERNAL, "no memory");
    return 0;
}

/* Tokens, and a template's text, were all that was asked for. */
static void finish_text(struct engine *e, struct seq *s)
{
    struct engine_answer *a = calloc(1, sizeof *a);

    if (a != NULL) {
        a->kind = s->req->kind;
        a->tokens = s->tokens.id;
        a->n_tokens = s->tokens.n;
        s->tokens.id = NULL;
        a->text = (struct engine_text){ s->text.out, s->text.out_len };
        s->text.out = NULL;
    }
    core_waited(e, s->uid);
    emit_answer(e, s->req, s->request, a);
    sched_forget(e, s);
}

/* Tokens to text: quick enough to be done at once, but not before it is its user's turn. */
static void decode(struct engine *e, struct seq *s)
{
    struct engine_request *req = s->req;

    core_waited(e, s->uid);
    s->req = NULL;
    query_answer(e, s->request, req);
    sched_forget(e, s);
}

static void encode(struct engine *e, struct seq *s, size_t *budget)
{
    struct skv_error err;

    if (s->req->kind == ENGINE_DETOKENIZE) {
        decode(e, s);
        return;
    }
    int r = s->cont_begun ? 1 : encode_prompt(e, s, budget, &err);

    if (r > 0 && s->req->kind == ENGINE_SCORE) {
        r = encode_continuation(e, s, budget, &err);
        if (r > 0)
            r = prepare_score(e, s, &err) < 0 ? -1 : 1;
    }
    if (r < 0)
        sched_fail(e, s, err.code, "%s", err.msg);
    if (r <= 0)
        return;
    chat_job_fini(&s->job);
    if (s->req->kind == ENGINE_TOKENIZE || s->req->kind == ENGINE_APPLY_TEMPLATE)
        finish_text(e, s);
    else
        sched_enqueue(e, s);
}

/* The first text of the user whose turn it is: one after another in the order of their ids, whatever each has waiting. */
static struct seq *next_text(const struct engine *e)
{
    struct seq *s, *best = NULL;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->state == SEQ_TEXT && (best == NULL || s->uid - e->text_uid - 1 < best->uid - e->text_uid - 1))
            best = s;
    return best;
}

void text_run(struct engine *e)
{
    size_t budget = TEXT_BYTES_STEP;
    int64_t until = core_now_us(e) + TEXT_US_STEP;
    struct seq *s;

    do {
        size_t quantum = budget < TEXT_QUANTUM ? budget : TEXT_QUANTUM, left = quantum;
        s = next_text(e);
        if (s == NULL)
            return;
        e->text_uid = s->uid;
        encode(e, s, &left);
        budget -= quantum - left;
        budget -= budget > 0 && left == quantum; /* one of nothing but tokens is not for nothing */
    } while (budget > 0 && core_now_us(e) < until);
}

bool text_pending(const struct engine *e)
{
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (s->state == SEQ_TEXT)
            return true;
    return false;
}
