/* random_model.h - GGUF files with random weights, for tests and benches.
 *
 * A tiny one (the default: 2 layers, width 64) runs in a fraction of the default model's time, also under
 * sanitizers; the shape of a large one gives a bench real sizes without a download. Weights are scaled so that
 * activations stay near 1, attention is neither flat nor one-hot, and logits have a spread of about 3.
 * Quantised blocks are drawn directly (random codes and scales), so no quantiser is needed.
 * The same settings give the same bytes.
 */
#ifndef SKVD_TESTS_RANDOM_MODEL_H
#define SKVD_TESTS_RANDOM_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "protocol/error.h"

struct random_model {
    const char *arch; /* "llama"; "qwen2" adds biases, "qwen3" norms on q and k */
    int layers, width, heads, kv_heads, head_dim, ffn, context;
    int vocab;              /* tokens; at least 384 */
    const char *type;       /* of the matrices, by kern_type_name: "F32", "Q4_1", "Q4_K", ... */
    const char *embed_type; /* of token_embd and output; NULL: as `type` */
    bool tied;              /* no output tensor of its own */
    const char *tokenizer;  /* "gpt2" (bytes and merges) or "llama" (pieces, scores, byte fallback) */
    const char *pre;        /* gpt2: "smollm", "qwen2", "gpt-2", or "llama-bpe" with Llama 3's control tokens */
    const char *vocab_from; /* take tokenizer and vocabulary from this GGUF file instead; or NULL */
    float rope_base, norm_eps;
    bool rope_freqs;        /* Llama 3.1's scaling: the tensor rope_freqs.weight */
    uint64_t seed;
};

void random_model_default(struct random_model *m);

/* Settings of a published shape: "tiny", "tiny-gqa", "llama-3.2-1b". -1 for a name that is not known. */
int random_model_preset(struct random_model *m, const char *name);

/* Write the file (through a temporary name, so that a reader never sees half of it). */
int random_model_write(const struct random_model *m, const char *path, struct skv_error *err);

#endif
