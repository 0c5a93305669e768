/* sampler.h - from logits to a token: penalties, top-k, top-p, min-p, temperature, seeded and exactly reproducible.
 *
 * Order: penalties on logits, then top-k, then temperature-free softmax for min-p and top-p at temperature... as
 * documented in sampler.c; temperature 0 is the arg-max (ties: the lower id). Random numbers come from a counter-based
 * generator keyed by (seed, index of the token), so a draw depends on nothing else.
 */
#ifndef SKVD_ENGINE_SAMPLER_H
#define SKVD_ENGINE_SAMPLER_H

#include "engine/engine.h"

struct sampler; /* one sequence's: settings, counts of recent tokens, scratch */

/* n_vocab logits at a time. NULL when out of memory. */
struct sampler *sampler_new(const struct engine_sampling *s, int n_vocab);
void sampler_free(struct sampler *s);

/* Tell it of a prompt or sampled token (for the penalties: the last 64 tokens count, as in llama.cpp). */
void sampler_accept(struct sampler *s, int32_t token);

/* The i-th token (0-based) of the answer. logits [n_vocab] may be changed. -1 when every logit is NaN or -inf. No sorting
 * of the whole vocabulary. */
int32_t sampler_pick(struct sampler *s, float *logits, int i);

/* Natural-log probabilities of the model's own distribution (before temperature and penalties): of `token`, and the top n
 * (descending, ties: lower id) into ids/lp. logits as the model gave them. -inf is given as -1e30. */
float sampler_logprobs(const float *logits, int n_vocab, int32_t token, int n, int32_t *ids, float *lp);

#endif
