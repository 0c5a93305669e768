/* thin.h - prompts that get thinner on their way up: which tokens go on past a layer. Engine thread only.
 *
 * In some layers a head finds, for the prompt's last queries, the tokens that all layers above will want too (as FastKV, arXiv 2502.01068,
 * and GemFilter, arXiv 2409.17422, use it). Past such a layer only tokens go on that one of its heads kept; the layers above then
 * compute, and hold KV of, these alone. Which layers can tell is a property of the model and has to be measured: three layers
 * further the same thinning loses every answer (docs/quality.md).
 */
#ifndef SKVD_ENGINE_THIN_H
#define SKVD_ENGINE_THIN_H

#include "engine/core.h"

/* What a setting says of a model: "auto" (or NULL: what was measured for models of this shape, else nothing), "off", or
 * "LAYER:FACTOR[,LAYER:FACTOR]": before LAYER, by what the layer below kept with FACTOR times the budget. out [POLICY_THIN]. 0, or -1
 * with *err (BAD_CONFIG). */
int thin_resolve(const char *setting, const struct ops_dims *d, struct policy_thin *out, struct skv_error *err);

/* May this sequence's prompt be thinned? Then it needs row_pos. A prompt of at most a tile never is: it may share its group. */
bool thin_wanted(const struct seq *s);

/* Before `layer`: if it is one at which the group's prompt gets thinner, only the rows that go on stay in the group's state. */
void thin_group(struct engine *e, struct prefill_group *g, int layer);

#endif
