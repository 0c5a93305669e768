/* seq.c - see seq.h. */
#include "engine/seq.h"

#include <stdlib.h>
#include <string.h>

static void free_answer(struct seq *s)
{
    int n_top = s->req != NULL ? s->req->logprobs : 0;

    sampler_free(s->sampler);
    s->sampler = NULL;
    free(s->text.raw);
    free(s->text.out);
    memset(&s->text, 0, sizeof s->text);
    chat_job_fini(&s->job);
    for (int i = 0; s->cont_top != NULL && i < s->cont.n * n_top; i++)
        free(s->cont_top[i].text.s);
    free(s->cont_top);
    free(s->cont_lp);
    free(s->cand_lp);
    free(s->cont_best);
    free(s->cont.id);
    s->cont_top = NULL;
    s->cont_lp = NULL;
    s->cand_lp = NULL;
    s->cont_best = NULL;
    memset(&s->cont, 0, sizeof s->cont);
}

struct seq *seq_new(uint64_t id, struct engine_request *take)
{
    struct seq *s = calloc(1, sizeof *s);

    if (s == NULL)
        return NULL;
    s->id = id;
    s->lane = -1;
    s->uid = take->uid;
    if (take->session != NULL)
        strncpy(s->session, take->session, sizeof s->session - 1);
    seq_begin_request(s, id, take);
    return s;
}

void seq_begin_request(struct seq *s, uint64_t id, struct engine_request *take)
{
    s->request = id;
    s->req = take;
    s->pid = take->pid;
    s->conn = take->conn;
    s->state = SEQ_TEXT;
    s->paused = s->resting = s->thinned = false;
    s->n_turn = 0;
    s->text_begun = s->cont_begun = false;
    s->n_cached = s->n_kv;
    s->prompt_from = s->n_kv;
    s->n_before = s->tokens.n;
    s->n_prompt = 0;
    s->system_to = s->last_from = s->tail_from = -1;
    s->n_answer = 0;
    s->bypassed = 0;
    s->cont_sum = 0;
    s->t_prefill = s->t_first = s->t_last = s->t_progress = s->deadline = 0;
}

void seq_end_request(struct seq *s)
{
    free_answer(s);
    engine_request_free(s->req);
    free(s->row_pos);
    s->row_pos = NULL;
    s->req = NULL;
    s->request = 0;
    s->state = SEQ_IDLE;
    s->resting = false;
}

void seq_free(struct seq *s)
{
    if (s == NULL)
        return;
    free_answer(s);
    engine_request_free(s->req);
    kvplan_fini(&s->plan);
    free(s->tokens.id);
    free(s->slot0);
    free(s->row_pos);
    free(s);
}

bool seq_running(const struct seq *s)
{
    return s->state == SEQ_READY || s->state == SEQ_PREFILL || s->state == SEQ_DECODE;
}

bool seq_active(const struct seq *s)
{
    return seq_running(s) && !s->resting;
}

const char *seq_state_name(const struct seq *s)
{
    static const char *const name[] = { [SEQ_TEXT] = "waiting",    [SEQ_WAITING] = "waiting", [SEQ_READY] = "prefill",
                                        [SEQ_PREFILL] = "prefill", [SEQ_DECODE] = "decode",   [SEQ_IDLE] = "idle" };

    return s->paused ? "paused" : s->resting ? "resting" : name[s->state];
}
