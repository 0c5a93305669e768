/* preset.h - models without a file: shapes and weight types alone, for the sim backend, which reads no weight.
 *
 * The vocabulary is the 256 bytes and two control tokens, so a text is as long as its bytes; the output matrix has the real
 * model's rows, so its cost is the real one's.
 */
#ifndef SKVD_ENGINE_PRESET_H
#define SKVD_ENGINE_PRESET_H

#include "engine/model.h"

/* "preset:NAME" or "preset:NAME/TYPE" (TYPE: a GGUF type for the weights, such as q4_0, instead of the preset's own). */
bool preset_named(const char *model);

/* Fill m as model_open does; model_close frees it. 0, or -1 with *err (BAD_CONFIG naming the presets). */
int preset_open(struct model *m, const char *model, int context, struct skv_error *err);

/* The i-th preset's name, NULL past the end. */
const char *preset_name(int i);

#endif
