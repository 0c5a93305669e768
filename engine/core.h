/* core.h - the engine's inside, shared by the files of engine/ that run on the engine thread.
 *
 * One iteration (step.c): commands -> texts -> admission (admit.c) -> decode step (decode.c) -> a slice of prefill (prefill.c)
 * -> events (emit.c). Where a device computes by itself, texts, admission and the next decode step's preparation are done while the
 * decode step runs. Everything but the two mailboxes, the settings marked atomic and the counters belongs to the engine thread.
 */
#ifndef SKVD_ENGINE_CORE_H
#define SKVD_ENGINE_CORE_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/mailbox.h"
#include "engine/model.h"
#include "engine/pages.h"
#include "engine/seq.h"
#include "engine/stats.h"
#include "engine/users.h"

#define PREFILL_PACK 32   /* short prompts in one group at most */
#define PREFILL_GROUPS 3
#define DECODE_BATCH_MAX 256

enum cmd_type { CMD_SUBMIT = 0, CMD_CANCEL, CMD_KILL, CMD_PAUSE, CMD_RESUME, CMD_STOP };

struct cmd {
    struct mail mail; /* first */
    enum cmd_type type;
    uint64_t id;
    struct engine_request *req; /* CMD_SUBMIT: taken */
    int64_t t_submit;
};

struct event_mail {
    struct mail mail; /* first */
    struct engine_event ev;
};

/* Prompts that go through the layers together: one long one in tiles, or several short ones in one tile. */
struct prefill_group {
    bool active;
    int n_seq;
    struct seq *seq[PREFILL_PACK];
    int row0[PREFILL_PACK]; /* first row of each in the group's state */
    int n_row, n_tile;
    int layer, tile;        /* next unit */
    float *x;               /* [n_row][d_model] hidden states, backend memory */
};

struct lost_session {
    uint64_t at; /* when it was noted, counted from 1; 0: the entry is free */
    uint32_t uid;
    char name[64];
};
#define LOST_SESSIONS 256

struct recent_user {
    bool is;
    uint32_t uid;
    int64_t at; /* microseconds */
};

struct engine {
    struct engine_config cfg;
    struct model model;
    const struct ops *ops;
    void *be;
    struct ops_kv *kv;
    struct pages *pages;
    const struct policy *policy; /* the server's */
    struct policy_params params;
    struct policy_thin thin[POLICY_THIN]; /* this model's, for policies that thin */
    struct kvplan plan;
    const char *dtype;
    int batch_cap;               /* max_batch at start: what the arrays hold */
    char detail[256];
    size_t weight_bytes, work_bytes;

    pthread_t thread;
    bool thread_started, stopping;
    struct mailbox commands, events;
    struct mail *taken_events; /* consumer side: taken but not handed out yet */
    _Atomic uint64_t next_id;
    atomic_bool draining, stop_asked;
    _Atomic int queued;        /* requests in the box, encoding or waiting */
    struct users users;        /* the same, by user; and what each has */
    uint32_t text_uid;         /* whose text was encoded last */
    struct stats stats;
    atomic_bool dead;          /* the backend has failed for good; `why` was written before */
    char why[256];

    struct seq_list seqs;
    /* [0] long ones and whatever comes, [1] short ones that overtake, [2] the long one of a user who has nothing at work yet */
    struct prefill_group group[PREFILL_GROUPS];
    int group_turn;            /* whose unit was the last */
    struct lost_session lost[LOST_SESSIONS];
    uint64_t lost_at;
    uint64_t turn;             /* the last that a user was given; even */
    int n_share;               /* users that hold a lane */
    int64_t reserve_pages;     /* of the pool, beside those of kv_memory */
    struct recent_user recent[2]; /* the last two who asked for something, the latest first */

    /* one step's flat arrays, at addresses that stay */
    struct ops_seg *seg;       /* [batch] */
    struct seq **row_seq;      /* [batch] */
    struct seq **ahead_seq;    /* [batch] rows of the step that the backend has been told of without its tokens */
    int n_ahead;               /* 0: there is none */
    int32_t *row_token;        /* [max rows] */
    int32_t *row_index;        /* [batch] */
    int32_t *slot;             /* [n_layer][batch][n_kv] */
    struct kern_rule *rule;    /* [batch] */
    float *x;                  /* decode hidden states, backend memory [batch][d_model] */
    float *logits;             /* [batch][n_vocab] */
    struct ops_sample *pick;   /* [batch] where the backend chooses the tokens */
    float *logits_copy;        /* [batch][n_vocab] for logprobs: sampling changes the first */
    float *kept_mass;          /* [n_kv] */
    int32_t *thin_pos, *thin_row; /* [max context] thinning a prompt: positions of a head's slots, rows that go on */
    float *thin_score;         /* [max context] */
    bool *thin_mark;           /* [max context] by position */
    int64_t *layer_evicted;    /* [n_layer] slots, ever */
    int64_t *layer_dropped;    /* [n_layer] of those, what the counters know already */
    double *layer_mass;        /* [n_layer] running mean, -1 */
};

/* Microseconds on the backend's clock, or CLOCK_MONOTONIC. Any thread. */
int64_t core_now_us(const struct engine *e);
void core_log(struct engine *e, int level, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int core_batch(const struct engine *e);
/* Has the backend failed? Asked after each pass, before its results are believed. */
bool core_failed(struct engine *e);
/* One of this user's requests waits no more. Any thread. */
static inline void core_waited(struct engine *e, uint32_t uid)
{
    atomic_fetch_sub(&e->queued, 1);
    users_waited(&e->users, uid);
}
/* Pages that one user alone may fill: those of kv_memory. */
static inline int64_t core_pages(const struct engine *e)
{
    return pages_total(e->pages) - e->reserve_pages;
}
static inline size_t core_head(const struct engine *e, int lane, int layer, int head)
{
    return ((size_t)lane * e->model.src.dims.n_layer + layer) * e->model.src.dims.n_kv + head;
}

/* --- admit.c --- */
/* Pages that a user who runs something leaves to a stranger, out of a pool of so many: of a request of kv_reserve tokens. */
int64_t core_reserve(const struct engine *e, int64_t pages);

/* --- command.c --- */
/* Carry out all commands there are. */
void command_run_all(struct engine *e);

/* --- text.c: from a request's text to tokens --- */
/* Encode a bounded amount for the sequences in SEQ_TEXT; those that are done move on, or end with an error. */
void text_run(struct engine *e);
bool text_pending(const struct engine *e);

/* --- query.c --- */
/* Answer a query kind at once (takes the request). */
void query_answer(struct engine *e, uint64_t id, struct engine_request *take);

/* --- sched.c --- */
/* Check a fully encoded request and queue it; fails it when it can never run. */
void sched_enqueue(struct engine *e, struct seq *s);
/* Pages that a request's sequence can need at most. */
int64_t sched_wanted_pages(const struct engine *e, const struct seq *s);
/* End what is past its deadline, and idle sessions that are too old; returns ms until the next such moment, -1: none. */
int sched_expire(struct engine *e);
/* End a sequence's request (its END event goes out) and either keep it as an idle session or free it. */
void sched_finish(struct engine *e, struct seq *s, enum engine_finish finish, int stop);
void sched_fail(struct engine *e, struct seq *s, enum skv_code code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* A sequence that holds nothing any more is gone. */
void sched_forget(struct engine *e, struct seq *s);
/* Drop an idle session; `lost`: its next use is told so. */
void sched_drop_session(struct engine *e, struct seq *s, bool lost);
struct seq *sched_find_request(struct engine *e, uint64_t request);
struct seq *sched_find_sequence(struct engine *e, uint64_t id);
struct seq *sched_find_session(struct engine *e, uint32_t uid, const char *name);
/* The next use of this sequence's session is told that it is lost. */
void sched_remember_lost(struct engine *e, const struct seq *s);
/* True, and forgotten, when this session was dropped since. */
bool sched_session_lost(struct engine *e, uint32_t uid, const char *name);

/* --- admit.c: places, lanes and pages, shared out between users --- */
/* This user asks for something: the others' requests leave it some room from now on. */
void admit_seen(struct engine *e, uint32_t uid);
/* Give places, lanes and pages to those whose turn it is. */
void sched_admit(struct engine *e);

/* --- prefill.c --- */
/* Form groups of READY sequences and run units until deadline_us; at least one unit. Returns false when there was nothing. */
bool prefill_slice(struct engine *e, int64_t deadline_us);
bool prefill_pending(const struct engine *e);
/* A sequence leaves (cancel): its rows are skipped from now on. */
void prefill_leave(struct engine *e, struct seq *s);

/* --- decode.c --- */
/* One token for each running sequence. Returns how many. Where the backend chooses the tokens by itself, texts, admission, the
 * next pairs' pages and, where it can, the next step's operations are seen to while it works. */
int decode_step(struct engine *e);
/* The step that was prepared is not to be, or not yet: called before any other operation that computes or reads. */
void decode_forget(struct engine *e);
/* Is there a running sequence; and does its step see to texts and admission? */
bool decode_pending(const struct engine *e);
bool decode_ahead(const struct engine *e);
/* A running sequence ends: a step that was prepared with it, and pages that were taken for a pair that never came. */
void decode_give_back(struct engine *e, const struct seq *s);
/* Choose the first tokens of sequences whose prefill is done, from rows of a hidden state. */
void decode_first(struct engine *e, struct seq **seq, const int32_t *row, int n, const float *x);

/* --- emit.c --- */
void emit_token(struct engine *e, struct seq *s, int i, int32_t token, size_t from, size_t len);
/* The alternatives of a score request's token in hand. */
void emit_score_top(struct engine *e, struct seq *s);
void emit_progress(struct engine *e, struct seq *s, enum engine_phase phase, int done, int total);
void emit_end(struct engine *e, struct seq *s, enum skv_code code, const char *message, enum engine_finish finish, int stop);
void emit_answer(struct engine *e, struct engine_request *req, uint64_t id, struct engine_answer *take);
void emit_error(struct engine *e, struct engine_request *req, uint64_t id, const struct skv_error *err);

#endif
