/* engine.h - the engine's public face: all that the daemon sees of it.
 *
 * The engine is one thread that owns the model, the sequences and the KV memory. Other threads talk to it by
 * commands (requests, cancel, ...) and hear from it by events. Ids, never pointers to live objects, cross the border.
 *
 * Threads: functions marked [loop] are for ONE other thread (the daemon's event loop, a test). They never wait for
 * the engine and never compute. Payloads handed over (`_take`) belong to the receiver from then on.
 */
#ifndef SKVD_ENGINE_ENGINE_H
#define SKVD_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol/error.h"

struct engine;

/* ---- settings -------------------------------------------------------------------------------------- */

/* The KV plan that is asked for: the server's, or one request's overrides. -1 (or NULL policy): not given.
 * Ranges: budget 16..max context (slots a head, the mean where heads differ; a fraction of the prompt may be asked
 * by budget_ratio), sink 0..1024, recent 1..65536, alpha 0..65536 (0: the last message), pool odd 1..255. */
struct engine_kv_options {
    const char *policy; /* full streaming snapkv pyramid h2o tova article sparse */
    int budget, sink, recent, alpha, pool, pool_kind /* 0 avg, 1 max */, full_layers;
    const char *dtype;  /* "bf16", "int8" ("f32" with compute f32): server-wide; a request may only name the server's */
};

struct engine_config {
    const char *model;        /* GGUF file; with backend "sim" also "preset:NAME" (engine/preset.h) */
    const char *backend;      /* "auto", "cpu", "cuda", "sim" */
    const char *device;       /* sim: the machine whose time is counted, such as "rtx4090"; NULL: a default */
    bool slot_values;         /* sim: tokens depend on what the KV tables hold (tests) */
    const char *isa;          /* NULL: best */
    const char *chat_template; /* NULL: the file's; else a known family's name */
    int tp;                   /* GPUs that share the model (tensor parallel); 1 */
    bool tp_exact;            /* cuda: the same bits for any tp; slower */
    int threads;              /* 0: all cores */
    int context;              /* positions a sequence may have; 0: the model's */
    int64_t kv_memory;        /* bytes; 0: a share of what is free */
    bool compute_f32;
    int max_sequences;        /* lanes: running and idle sessions */
    int max_batch;            /* sequences decoding in one step */
    int queue_len;            /* requests waiting at most */
    int step_ms;              /* target of one iteration while prompts are prefilled and others decode */
    const char *thin;         /* where prompts get thinner: "auto" (NULL), "off", or LAYER:FACTOR,... (engine/thin.h) */
    int session_idle_s;       /* idle sessions end after this; 0: never */
    int kv_reserve;           /* tokens, prompt and answer, of a request for which a user who runs something leaves room to others; 0: none */
    int64_t max_kv_user;      /* bytes that one user's sequences may need together; 0: no limit */
    int64_t max_kv_connection; /* the same for those of one connection, which is always one user's */
    struct engine_kv_options kv;
    void (*log)(void *arg, int level, const char *msg); /* level: syslog's; any thread */
    void *log_arg;
};

void engine_config_default(struct engine_config *cfg);

/* Load the model, place weights, take the pool, make the layer plan, start the thread. Blocking (seconds at most).
 * progress may be NULL: called with 0..1 while loading. NULL with *err (BAD_MODEL, NO_MEMORY, BAD_CONFIG). */
struct engine *engine_start(const struct engine_config *cfg, struct skv_error *err);

/* Several processes that compute as one (started by torchrun or mpirun with the cuda backend): true in those that don't lead. They
 * have no engine: engine_follow places their part of the model and does what the leader asks for, until it ends (0) or somebody is
 * lost (-1 with *err). */
bool engine_follows(const struct engine_config *cfg);
int engine_follow(const struct engine_config *cfg, struct skv_error *err);

/* Stop at the next step; every request still there gets its END event (cancelled). Then join the thread. */
void engine_stop(struct engine *e);
void engine_free(struct engine *e);

struct engine_model_info {
    const char *name, *arch, *chat_template; /* valid for the engine's life */
    int context, vocab, layers, heads, kv_heads;
    const char *backend;
    char detail[256];       /* ISA, threads, weight bytes */
};
void engine_model_info(const struct engine *e, struct engine_model_info *out); /* any thread */

/* ---- requests [loop] --------------------------------------------------------------------------------- */

enum engine_kind {
    ENGINE_GENERATE = 0,
    ENGINE_SCORE,
    ENGINE_TOKENIZE,
    ENGINE_DETOKENIZE,
    ENGINE_APPLY_TEMPLATE,
    ENGINE_SEQUENCES, /* admin: all; else the caller's (only_uid) */
    ENGINE_KV,
    ENGINE_KEPT,
    ENGINE_SET,       /* settings that may change while running */
};

struct engine_text {
    char *s;     /* not NUL-terminated by contract; len counts */
    size_t len;
};

struct engine_message {
    struct engine_text role, content;
};

struct engine_sampling {
    float temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    int top_k; /* 0: all */
    uint64_t seed;
    bool seed_set;
};
void engine_sampling_default(struct engine_sampling *s); /* the contract's defaults */

struct engine_range {
    int32_t from, to; /* token positions [from, to) of the prompt */
};

/* All pointers are malloc'd and belong to the request (engine_request_free frees them). */
struct engine_request {
    enum engine_kind kind;
    uint32_t uid;
    uint64_t conn; /* the connection that it came by */
    int32_t pid;

    /* exactly one of the three (GENERATE, SCORE); text also for TOKENIZE; tokens for DETOKENIZE; messages for
     * APPLY_TEMPLATE */
    bool has_text;
    struct engine_text text;
    struct engine_message *messages;
    int n_messages; /* -1: not given */
    int32_t *tokens;
    int n_tokens;   /* -1: not given */
    bool raw, special, bos, add_generation_prompt;

    /* GENERATE */
    bool progress;
    int max_tokens;
    struct engine_sampling sampling;
    struct engine_text *stop;
    int n_stop;
    bool ignore_eos;
    int logprobs;
    char *session;
    int priority;
    int64_t deadline_ms; /* from submission; 0: none */
    struct engine_kv_options kv; /* strings malloc'd */
    struct engine_range *pin;
    int n_pin;
    bool pin_system;

    /* SCORE */
    bool has_cont_text;
    struct engine_text cont_text;
    int32_t *cont_tokens;
    int n_cont_tokens;
    int32_t *cand;     /* tokens whose log-probabilities are wanted too: of continuation token i, those from */
    int *cand_from;    /* cand_from[i] up to cand_from[i + 1]; [n_cand_from + 1]; NULL: none */
    int n_cand_from;
    bool refeed;

    /* SEQUENCES: all_uids; KEPT: sequence id */
    bool all_uids;
    uint64_t sequence;

    /* SET: name = value pairs */
    char *set_name;
    double set_value;

    void *priv; /* the engine's: memory for the END event, so that it can always be sent */
};

/* A request with every field at its default. Free with engine_request_free unless submitted. */
struct engine_request *engine_request_new(enum engine_kind kind);
void engine_request_free(struct engine_request *r);

/* Hand a request over. On success *id is set (never 0) and its events will come, ending with ENGINE_EV_END exactly
 * once; on failure (OVERLOADED, DRAINING) the request still belongs to the caller. */
int engine_submit(struct engine *e, struct engine_request *take, uint64_t *id, struct skv_error *err);

/* True when the device that computes has failed for good, with a sentence why: all requests have ended with INTERNAL or are about
 * to, new ones are refused, and only a new engine helps. Any thread. */
bool engine_failed(const struct engine *e, char *why, size_t size);

/* These are hints that may find the id already ended. */
void engine_cancel(struct engine *e, uint64_t id);  /* ends with code SKV_CANCELLED and what there is */
void engine_kill(struct engine *e, uint64_t sequence); /* admin: a running sequence or idle session, by sequence id */
void engine_pause(struct engine *e, uint64_t id);   /* a reader is slow: keep its place, compute nothing */
void engine_resume(struct engine *e, uint64_t id);

/* Refuse new work (true) or take it again. Submits are then refused with DRAINING. */
void engine_drain(struct engine *e, bool on);
bool engine_draining(const struct engine *e);

/* ---- events [loop] ------------------------------------------------------------------------------------ */

enum engine_ev_type { ENGINE_EV_TOKEN = 0, ENGINE_EV_PROGRESS, ENGINE_EV_END };
enum engine_phase { ENGINE_QUEUED = 0, ENGINE_PREFILL };
enum engine_finish { ENGINE_FINISH_STOP = 0, ENGINE_FINISH_LENGTH, ENGINE_FINISH_EOS };

struct engine_top {
    int32_t token;
    float logprob;           /* natural log; -INFINITY never leaves the engine: clamped to -1e30 */
    struct engine_text text;
};

/* GENERATE and SCORE: what a finished (or cancelled) request gives. */
struct engine_result {
    struct engine_text text;
    int32_t *tokens;
    int n_tokens;
    float *logprobs;         /* SCORE: [n_tokens] */
    double sum;              /* SCORE */
    enum engine_finish finish;
    struct engine_text stop; /* s NULL: none matched */
    int prompt_tokens, cached_tokens, completion_tokens;
    double queued_ms, prefill_ms, ttft_ms, decode_ms, total_ms;
    char policy[16];
    int64_t slots_full, slots_kept; /* summed over layers and KV heads */
    int64_t kv_bytes, kv_bytes_full_cache;
    int32_t *score_argmax;   /* SCORE: [n_tokens] the token that was most likely there */
    float *cand_lp;          /* SCORE with candidates: [cand_from[n_cand_from]], as asked; what was not reached is 0 */
    int *cand_from;
    int n_cand_from;
    struct engine_top *top;  /* SCORE with logprobs n: [n_tokens][n_top] alternatives, most likely first */
    int n_top;
};

struct engine_seq_info {
    uint64_t id;
    uint32_t uid;
    int32_t pid;
    char session[64];
    const char *state; /* "waiting" "prefill" "decode" "paused" "idle" */
    int prompt_tokens, completion_tokens;
    int64_t age_ms, kv_bytes;
    char policy[16];
};

struct engine_kv_layer {
    char policy[16];
    int budget, sink, recent;
    int64_t pages, bytes, slots, evicted;
    double kept_mass; /* running mean of the attention mass on kept slots, -1: not measured */
};

struct engine_kv_info {
    int n_layers;
    struct engine_kv_layer *layer;
    int64_t pages_total, pages_used, pages_free, page_bytes;
    int slots_per_page;
    int64_t token_bytes_full;          /* one token in a full cache */
    int fit_context, fit_plan, fit_full; /* sequences of fit_context tokens that fit: this plan, a full cache */
    char dtype[8];
};

struct engine_kept_head {
    int32_t *pos;
    float *score;
    int n;
};

/* What the query kinds give; one union-free struct, unused fields zero. */
struct engine_answer {
    enum engine_kind kind;
    int32_t *tokens;  /* TOKENIZE, APPLY_TEMPLATE */
    int n_tokens;
    struct engine_text text; /* DETOKENIZE, APPLY_TEMPLATE */
    struct engine_seq_info *seq;
    int n_seq;
    struct engine_kv_info kv;
    /* KEPT */
    int kept_n;       /* positions so far */
    int kept_layers, kept_heads;
    char (*kept_policy)[16];       /* [layers] */
    struct engine_kept_head *kept; /* [layers][heads] */
};

struct engine_event {
    enum engine_ev_type type;
    uint64_t id;
    int64_t t_us;  /* when it came about, microseconds on the engine's clock */
    /* TOKEN */
    int i;
    int32_t token;
    struct engine_text text; /* whole UTF-8, may be empty */
    bool has_logprob;
    float logprob;
    struct engine_top *top;
    int n_top;
    /* PROGRESS */
    enum engine_phase phase;
    int done, total;
    /* END */
    enum skv_code code;             /* SKV_OK, or why it ended */
    int retry_after_ms;
    char *message;                  /* code != OK */
    struct engine_result *result;   /* GENERATE, SCORE; also with CANCELLED and DEADLINE */
    struct engine_answer *answer;   /* the query kinds */
};

/* Readable when there are events. */
int engine_event_fd(const struct engine *e);
/* Take up to max events; the payloads now belong to the caller (engine_event_fini). Returns how many. */
int engine_events(struct engine *e, struct engine_event *out, int max);
void engine_event_fini(struct engine_event *ev);

/* ---- figures, any thread ---------------------------------------------------------------------------------- */

#define ENGINE_HIST 24 /* buckets of a latency histogram, see engine_hist_bounds */

struct engine_stats {
    int64_t uptime_ms;
    int running, waiting, idle_sessions;
    int64_t finished, failed, cancelled;
    int64_t finished_reason[3];     /* by enum engine_finish */
    int64_t tokens_in, tokens_out;
    double in_per_s, out_per_s;     /* over the last 10 s */
    int64_t pages_total, pages_used, pages_free;
    int64_t evicted;                /* slots, ever */
    int64_t steps;
    int64_t step_age_ms;            /* since the last step began or ended; 0 when idle */
    double step_ms_last, step_ms_mean;
    int64_t steps_graph, steps_plain; /* decode steps of a GPU: replayed graphs, and those launched piece by piece; -1: no GPU */
    int64_t steps_ahead;            /* of them, those prepared while the one before ran */
    double kept_mass;               /* -1: not measured yet */
    int64_t bytes_saved;            /* full cache minus held, of the sequences there now */
    int64_t hist_ttft[ENGINE_HIST + 1], hist_itl[ENGINE_HIST + 1], hist_queue[ENGINE_HIST + 1];
    double sum_ttft_s, sum_itl_s, sum_queue_s;
};
extern const double engine_hist_bounds[ENGINE_HIST]; /* seconds, ascending */
void engine_stats(const struct engine *e, struct engine_stats *out);

#endif
