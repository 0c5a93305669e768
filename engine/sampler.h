/* sampler.h - from logits to a token: penalties, top-k, top-p, min-p, temperature, seeded and exactly reproducible.
 *
 * The order is that of llama.cpp's default chain, so that its users' settings mean the same here:
 *   1. penalties, for each token among the last 64 (the prompt's count too), c = how often it is there:
 *      logit = logit > 0 ? logit / repeat : logit * repeat; then logit -= c * frequency + presence
 *   2. temperature 0: the arg-max, done
 *   3. top_k: the k largest logits stay (0: all)
 *   4. top_p: of those, by falling probability at temperature 1, the fewest whose sum reaches p (1: all)
 *   5. min_p: those with at least min_p times the largest probability (0: all)
 *   6. temperature: logits / temperature, softmax, one is drawn
 * Ties go to the lower id everywhere. -inf and NaN logits are never chosen. The random number of a draw is a hash of
 * (seed, index of the token in the answer) and depends on nothing else.
 */
#ifndef SKVD_ENGINE_SAMPLER_H
#define SKVD_ENGINE_SAMPLER_H

#include "engine/engine.h"

struct sampler; /* one sequence's: settings, recent tokens, scratch. One thread at a time. */

/* For n_vocab logits at a time. Without s->seed_set a seed is drawn from the system. NULL when out of memory. Holds
 * about 32 bytes times top_k; with top_k 0, 8 bytes a token of the vocabulary. */
struct sampler *sampler_new(const struct engine_sampling *s, int n_vocab);
void sampler_free(struct sampler *s);

/* Tell it of a prompt or sampled token, in order. */
void sampler_accept(struct sampler *s, int32_t token);

/* The i-th token (0-based) of the answer. logits [n_vocab] are changed by the penalties only, so logprobs come first.
 * -1 when every logit is NaN or -inf. Allocates nothing, sorts at most what top_k left. */
int32_t sampler_pick(struct sampler *s, float *logits, int i);

/* What a backend needs to choose the i-th token itself (ops.h). */
struct ops_sample;
void sampler_describe(const struct sampler *s, int i, struct ops_sample *out);

/* Natural-log probabilities of the model's own distribution (before temperature and penalties): of `token` (returned;
 * any id outside the vocabulary: -1e30), and the top n <= n_vocab, descending, ties by lower id, into ids / lp [n].
 * logits [n_vocab] as the model gave them. -inf is given as -1e30, NaN counts as -inf. */
float sampler_logprobs(const float *logits, int n_vocab, int32_t token, int n, int32_t *ids, float *lp);

/* ln(sum of exp(logits)), -1e30 when every logit is NaN or -inf. */
float sampler_lse(const float *logits, int n_vocab);

#endif
