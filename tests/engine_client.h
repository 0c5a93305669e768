/* engine_client.h - tests: an engine and requests to it, in blocking form. */
#ifndef SKVD_TESTS_ENGINE_CLIENT_H
#define SKVD_TESTS_ENGINE_CLIENT_H

#include "engine/engine.h"

/* Start with cfg; a failure ends the program with its message. */
struct engine *client_start(const struct engine_config *cfg);

/* What a request gave. tokens/text are copies of the streamed events. */
struct client_reply {
    enum skv_code code;
    char message[512];
    struct engine_result *result; /* owned */
    struct engine_answer *answer; /* owned */
    int n_events;                 /* TOKEN events */
    char *streamed;               /* their joined text, NUL-terminated */
    size_t streamed_len;
    float *lp;                    /* log-probability of each token event */
    struct engine_event *token;   /* the events themselves */
    int done_last, total_last, n_progress;
};
void client_reply_free(struct client_reply *r);

/* Submit and wait for the end. A refused submit is a reply with its code. */
struct client_reply *client_call(struct engine *e, struct engine_request *take);

/* Several at once, all submitted before any is waited for. reply [n]. */
void client_call_all(struct engine *e, struct engine_request **take, int n, struct client_reply **reply);

/* As client_call_all, and cancel request `which` after it gave `after` tokens (-1: none). */
void client_call_cancel(struct engine *e, struct engine_request **take, int n, struct client_reply **reply, int which, int after);

/* Two threads, 64 MiB of KV memory, a full cache: what most tests of a small model start from. */
struct engine_config client_config(const char *model);

/* Prompts of a small random model that repeat from run to run: n ids. */
void client_prompt(int which, int n, int32_t *ids);

/* A GENERATE request over token ids, greedy, ignoring end tokens. */
struct engine_request *client_generate(const int32_t *ids, int n, int max_tokens);
void client_set_kv(struct engine_request *r, const char *policy, int budget);
/* Positions that (layer, head) of a session's sequence holds. Fails the program if it is not there. */
struct client_reply *client_kept(struct engine *e, const char *session);
/* Pages in use now (waits until the engine has counted: after an END that is the next step). */
int64_t client_pages_used(struct engine *e);

#endif
