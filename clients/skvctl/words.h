/* words.h - prompts for load tests. */
#ifndef SKVD_CLIENTS_SKVCTL_WORDS_H
#define SKVD_CLIENTS_SKVCTL_WORDS_H

#include "clients/skvctl/ctl.h"

struct prompt {
    int32_t *tokens;
    size_t n;
};

/* A prompt of exactly n tokens of English words, tokenized by the daemon at ctl->c. Other seeds begin otherwise. Returns an
 * exit status, after a message where it is not CTL_OK. */
int prompt_make(struct ctl *ctl, uint64_t seed, size_t n, struct prompt *out);

/* Prompts from a file of lines {"tokens": [...]}; of each at most `limit` tokens (0: all). An exit status as above. */
int prompts_read(struct ctl *ctl, const char *path, size_t limit, struct prompt **out, size_t *n);

void prompts_free(struct prompt *p, size_t n);

#endif
