/* command.c - what other threads ask for, carried out at the beginning of a step. */
#include <stdlib.h>
#include <string.h>

#include "engine/core.h"

/* Which sequence a request goes to: its session's if there is one, else a new one. NULL: it was failed. */
static struct seq *submit_target(struct engine *e, uint64_t id, struct engine_request *req)
{
    struct skv_error err;
    struct seq *s = NULL;

    if (req->session != NULL && req->kind == ENGINE_GENERATE) {
        s = sched_find_session(e, req->uid, req->session);
        if (s == NULL && sched_session_lost(e, req->uid, req->session)) {
            skv_fail(&err, SKV_NOT_FOUND,
                     "session \"%s\" is gone: its memory was needed, it was idle too long, or its last request was broken off "
                     "in its prompt; send the whole conversation under this name to begin it anew",
                     req->session);
            goto fail;
        }
        if (s != NULL && s->state != SEQ_IDLE) {
            skv_fail(&err, SKV_BAD_REQUEST, "session \"%s\" is busy with another request; one at a time", req->session);
            goto fail;
        }
        if (s != NULL) {
            seq_begin_request(s, id, req);
            return s;
        }
    }
    s = seq_new(id, req);
    /* Who is new here comes after those who have waited since the last one was served, and before that one. */
    if (s != NULL && (s->user = users_join(&e->users, s->uid, e->turn > 0 ? e->turn - 1 : 0)) == NULL) {
        s->req = NULL; /* still the caller's, below */
        seq_free(s);
        s = NULL;
    }
    if (s != NULL) {
        TAILQ_INSERT_TAIL(&e->seqs, s, link);
        return s;
    }
    skv_fail(&err, SKV_INTERNAL, "no memory for another sequence");
fail:
    core_waited(e, req->uid);
    emit_error(e, req, id, &err);
    engine_request_free(req);
    return NULL;
}

static void submit(struct engine *e, struct cmd *c)
{
    struct engine_request *req = c->req;
    struct seq *s;

    c->req = NULL;
    if (req->kind > ENGINE_APPLY_TEMPLATE) { /* the others have text or tokens, as much as a message holds */
        core_waited(e, req->uid);
        query_answer(e, c->id, req);
        return;
    }
    s = submit_target(e, c->id, req);
    if (s == NULL)
        return;
    admit_seen(e, s->uid);
    s->t_submit = c->t_submit;
    if (req->deadline_ms > 0)
        s->deadline = c->t_submit + req->deadline_ms * 1000;
    emit_progress(e, s, ENGINE_QUEUED, 0, 1);
}

static void cancel(struct engine *e, uint64_t request)
{
    struct seq *s = sched_find_request(e, request);

    if (s != NULL)
        sched_fail(e, s, SKV_CANCELLED, "cancelled");
}

static void kill_sequence(struct engine *e, uint64_t id)
{
    struct seq *s = sched_find_sequence(e, id);

    if (s == NULL)
        return;
    if (s->state == SEQ_IDLE) {
        sched_drop_session(e, s, true);
        return;
    }
    if (s->session[0] != '\0' && s->n_kv > 0) /* the session goes with it, and its next request is told */
        sched_remember_lost(e, s);
    s->session[0] = '\0';
    sched_fail(e, s, SKV_CANCELLED, "ended by kill, or by cancel with its sequence's number");
}

static void run(struct engine *e, struct cmd *c)
{
    struct seq *s;

    switch (c->type) {
    case CMD_SUBMIT:
        submit(e, c);
        break;
    case CMD_CANCEL:
        cancel(e, c->id);
        break;
    case CMD_KILL:
        kill_sequence(e, c->id);
        break;
    case CMD_PAUSE:
    case CMD_RESUME:
        s = sched_find_request(e, c->id);
        if (s != NULL)
            s->paused = c->type == CMD_PAUSE;
        break;
    case CMD_STOP:
        e->stopping = true;
        break;
    }
}

void command_run_all(struct engine *e)
{
    struct mail *m = mailbox_take(&e->commands);

    while (m != NULL) {
        struct cmd *c = (struct cmd *)m;
        m = m->next;
        run(e, c);
        free(c);
    }
}
