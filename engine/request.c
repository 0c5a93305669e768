/* request.c - making and freeing what crosses the engine's border. Any thread. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

void engine_sampling_default(struct engine_sampling *s)
{
    *s = (struct engine_sampling){ .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1 };
}

static const struct engine_kv_options kv_none = { NULL, -1, -1, -1, -1, -1, -1, -1, NULL };

struct engine_request *engine_request_new(enum engine_kind kind)
{
    struct engine_request *r = calloc(1, sizeof *r);

    if (r == NULL)
        return NULL;
    r->kind = kind;
    r->n_messages = r->n_tokens = -1;
    r->n_cont_tokens = -1;
    r->special = true;
    r->add_generation_prompt = true;
    r->max_tokens = 512;
    r->kv = kv_none;
    engine_sampling_default(&r->sampling);
    return r;
}

void engine_request_free(struct engine_request *r)
{
    if (r == NULL)
        return;
    free(r->text.s);
    for (int i = 0; i < r->n_messages; i++) {
        free(r->messages[i].role.s);
        free(r->messages[i].content.s);
    }
    free(r->messages);
    free(r->tokens);
    for (int i = 0; i < r->n_stop; i++)
        free(r->stop[i].s);
    free(r->stop);
    free(r->session);
    free((char *)r->kv.policy);
    free((char *)r->kv.dtype);
    free(r->pin);
    free(r->cont_text.s);
    free(r->cont_tokens);
    free(r->cand);
    free(r->cand_from);
    free(r->set_name);
    free(r->priv);
    free(r);
}

static void top_free(struct engine_top *top, int n)
{
    for (int i = 0; top != NULL && i < n; i++)
        free(top[i].text.s);
    free(top);
}

static void result_free(struct engine_result *r)
{
    if (r == NULL)
        return;
    top_free(r->top, r->n_top * r->n_tokens);
    free(r->text.s);
    free(r->tokens);
    free(r->logprobs);
    free(r->stop.s);
    free(r->score_argmax);
    free(r->cand_lp);
    free(r->cand_from);
    free(r);
}

static void answer_free(struct engine_answer *a)
{
    if (a == NULL)
        return;
    free(a->tokens);
    free(a->text.s);
    free(a->seq);
    free(a->kv.layer);
    for (int i = 0; a->kept != NULL && i < a->kept_layers * a->kept_heads; i++) {
        free(a->kept[i].pos);
        free(a->kept[i].score);
    }
    free(a->kept);
    free(a->kept_policy);
    free(a);
}

void engine_event_fini(struct engine_event *ev)
{
    free(ev->text.s);
    top_free(ev->top, ev->n_top);
    free(ev->message);
    result_free(ev->result);
    answer_free(ev->answer);
    memset(ev, 0, sizeof *ev);
}
