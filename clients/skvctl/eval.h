/* eval.h - task files, what a record scores under a variant, and the report. */
#ifndef SKVD_CLIENTS_SKVCTL_EVAL_H
#define SKVD_CLIENTS_SKVCTL_EVAL_H

#include "clients/skvctl/ctl.h"

#define EVAL_VARIANTS 32 /* the full cache included */
#define EVAL_CHOICES 32

enum eval_order { ORDER_TAIL = 0, ORDER_HEADER, ORDER_CONTEXT };
enum eval_kind { SCORE_EXACT = 0, SCORE_TOKENS, SCORE_CHOICE, SCORE_NLL };

struct tokens {
    int32_t *v;
    size_t n;
};

/* Probabilities that are known at one position of an answer. */
struct dist {
    int32_t *id;
    float *lp; /* natural logs */
    size_t n;
};

struct eval_res {
    enum { RES_NONE = 0, RES_DONE, RES_FAILED, RES_UNKNOWN } state; /* UNKNOWN: not measurable this way */
    double score; /* exact, choice: 0 or 1; tokens: a share; nll: mean negative log-likelihood */
    double kl;    /* to the full cache, a token of the answer, nats; NAN: not known */
    double kept;  /* slots kept / slots of a full cache; NAN: not known */
};

struct eval_rec {
    const char *id, *task; /* inside json */
    enum eval_kind kind;
    int size;
    json_t *json;
    char *prompt_text, *pre_text;
    struct tokens prompt, pre, answer, cont; /* cont: pre, then answer */
    int32_t choice[EVAL_CHOICES];            /* first token of each */
    size_t n_choices, right;
    size_t preparing;       /* tokenize requests out */
    bool failed;
    struct dist *full;      /* [answer.n] after the full cache's run */
    size_t variants_left;
    struct eval_res res[EVAL_VARIANTS];
};

struct eval_variant {
    char label[80];
    char *spec;   /* KV arguments without ratio */
    double ratio; /* NAN: none; else budget = (1 - ratio) * prompt tokens */
};

/* ---- tasks (evaltask.c) ---- */

struct eval_filter {
    const char *tasks; /* comma-separated; NULL: all */
    long limit;        /* records a task and size; 0: all */
    char split;        /* 'A', 'B' or 0 */
};

/* Append a file's records. -1 after a message that names the line. */
int eval_read(struct ctl *ctl, const char *path, enum eval_order order, struct eval_rec **recs, size_t *n);
/* Leave only what the filter lets through. */
void eval_filter(struct eval_rec *recs, size_t *n, const struct eval_filter *f);
void eval_rec_fini(struct eval_rec *r);

/* The score from a `score` answer, with the KL to r->full where that is there; keep: remember the distributions as the
 * full cache's. */
void eval_take_score(struct eval_rec *r, const struct skv_value *v, struct eval_res *out, bool keep);
/* The score from tokens that were generated (`generate` with logprobs; first: the top of the first token). */
void eval_take_generated(struct eval_rec *r, const struct skv_value *tokens, const struct dist *first, struct eval_res *out);
/* [[token, text, logprob]...] or [[token, logprob]...] */
void dist_read(struct dist *d, const struct skv_value *top);
void dist_free(struct dist *d);

/* ---- results of the full cache, kept in a file (evalbase.c) ---- */

struct baseline;

/* how: what besides the record the results depend on. NULL after a message. */
struct baseline *baseline_open(const char *path, const char *how);
/* Set r->res[0] and r->full from the file; false: not there. A NULL baseline has and takes nothing. */
bool baseline_get(const struct baseline *b, struct eval_rec *r);
void baseline_put(struct baseline *b, const struct eval_rec *r);
void baseline_close(struct baseline *b);

/* ---- report (evalreport.c) ---- */

void eval_table(const struct eval_rec *recs, size_t n, const struct eval_variant *v, size_t n_v, FILE *f);
json_t *eval_json(const struct eval_rec *recs, size_t n, const struct eval_variant *v, size_t n_v);
json_t *eval_rec_json(const struct eval_rec *r, const struct eval_variant *v, size_t n_v);

#endif
