/* model.h - from a GGUF file to checked hyperparameters and tensors: the one place that knows architectures by name. */
#ifndef SKVD_ENGINE_MODEL_H
#define SKVD_ENGINE_MODEL_H

#include "engine/chat.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"
#include "kernels/ops.h"

struct model {
    struct gguf *gguf;
    struct tokenizer *tok;
    struct chat_template *chat; /* NULL: the file's template is not known and none was named; chat_error says so */
    struct skv_error chat_error;
    struct ops_model_src src;
    struct ops_layer_src *layer; /* [n_layer] */
    void *bytes; /* a preset's vocabulary, else NULL */
    char name[128], arch[32];
};

/* Map, check, build the tokenizer and the chat template. context 0: the model's. 0, or -1 with *err: BAD_MODEL with what is
 * wrong (a broken file never crashes), BAD_CONFIG for an unknown --chat-template. */
int model_open(struct model *m, const char *path, const char *chat_template, int context, struct skv_error *err);
void model_close(struct model *m);

#endif
