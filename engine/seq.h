/* seq.h - a sequence: one request's (or session's) tokens, its KV plan and lane, what it has said. Engine thread only. */
#ifndef SKVD_ENGINE_SEQ_H
#define SKVD_ENGINE_SEQ_H

#include <sys/queue.h>

#include "engine/chat.h"
#include "engine/engine.h"
#include "engine/kvplan.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"

enum seq_state {
    SEQ_TEXT,    /* its text is being encoded */
    SEQ_WAITING, /* for a lane and pages */
    SEQ_READY,   /* has them; waits for its prefill */
    SEQ_PREFILL,
    SEQ_DECODE,
    SEQ_IDLE,    /* a session between two requests */
};

/* Text going out: bytes in order, cut at stop strings and at whole characters. */
struct seq_text {
    char *raw;      /* all bytes generated */
    size_t len, cap;
    size_t sent;    /* bytes of raw that went out */
    char *out;      /* what went out, valid UTF-8: the result's text */
    size_t out_len, out_cap;
};

struct seq {
    TAILQ_ENTRY(seq) link; /* engine's list, by arrival */
    uint64_t id;           /* of the sequence: its first request's */
    uint64_t request;      /* of the request being served */
    struct engine_request *req;
    enum seq_state state;
    bool paused;           /* its reader does not keep up */
    bool resting;          /* without a place in the step, as it is another user's turn; keeps its lane and pages */
    bool doomed;           /* an idle session that admission is about to end */
    uint32_t uid;
    uint64_t conn;         /* of the request being served, or of the session's last one */
    struct user *user;     /* of that id; the engine's */
    int32_t pid;
    char session[64];      /* "" none */

    /* encoding */
    struct chat_job job;
    bool text_begun, cont_begun;
    int system_to, last_from, tail_from; /* token marks of a rendered chat, -1: none */

    /* tokens: [0, n_kv) are in the KV memory, the rest is this request's prompt and then its answer's last token */
    struct tok_ids tokens;
    int n_kv;
    int n_before;     /* tokens before this request: what a request that fails early leaves behind */
    int prompt_from;  /* first token of this request's prompt (with what was pending before) */
    int n_prompt;     /* tokens.n when the answer begins */
    int n_cached;     /* positions there before this request */
    int n_max;        /* tokens of the answer at most */
    int n_step;       /* decode steps since the prefill */
    int n_turn;       /* of them, since it has its place */
    bool at_context;  /* n_max was cut by the context */

    /* KV */
    bool has_plan;
    struct kvplan plan;
    int lane;         /* -1: none */
    int64_t reserved; /* pages promised */
    int64_t transient; /* pages that its prefill borrows for a moment */
    int bypassed;     /* times that a later, smaller one went first */
    int32_t *slot0;   /* [n_kv heads] slots before the layer's prefill */
    int score_query;  /* queries summed in the layer in hand */
    int32_t *row_pos; /* [prompt] positions of the rows that go on, where the policy thins this prompt; else NULL */
    bool thinned;     /* row_pos [n_row] holds */
    int n_row;

    /* answer */
    struct sampler *sampler;
    struct seq_text text;
    int n_answer;
    int32_t next;     /* token chosen in this step */
    float next_lp;
    int n_top;
    int32_t top_id[64];
    float top_lp[64];

    /* score */
    struct tok_ids cont;
    float *cont_lp;
    int32_t *cont_best;
    struct engine_top *cont_top; /* [cont.n][logprobs] */
    float *cand_lp;              /* of the request's candidates */
    double cont_sum;

    /* time, microseconds of CLOCK_MONOTONIC; 0: not yet */
    int64_t t_submit, t_prefill, t_first, t_last, t_idle, t_progress, deadline;
};
TAILQ_HEAD(seq_list, seq);

struct seq *seq_new(uint64_t id, struct engine_request *take);
void seq_free(struct seq *s);
/* Take the next request of a session, or drop the one in hand. */
void seq_begin_request(struct seq *s, uint64_t id, struct engine_request *take);
void seq_end_request(struct seq *s);

const char *seq_state_name(const struct seq *s);
bool seq_running(const struct seq *s); /* has a lane and work to do */
bool seq_active(const struct seq *s);  /* and a place in the step */

/* --- seq_text.c --- */
/* Add a token's bytes. -1: no memory. */
int seq_text_add(struct seq *s, const char *bytes, size_t len);
/* What may go out now. Returns the index of the stop string that matched (then the text ends before it), or -1.
 * `last`: nothing follows, flush all. *from, *len: the new part of s->text.out. -2: no memory. */
int seq_text_cut(struct seq *s, bool last, size_t *from, size_t *len);

#endif
