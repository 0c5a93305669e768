/* random-model: write a GGUF file with random weights (tests/random_model.h). */
#include <getopt.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/random_model.h"

#define OFF(f) offsetof(struct random_model, f)
enum kind { K_INT, K_STR, K_FLOAT, K_BOOL, K_U64 };

static const struct {
    const char *name;
    enum kind kind;
    size_t off;
    const char *help;
} opts[] = {
    {"arch", K_STR, OFF(arch), "llama, qwen2 or qwen3"},
    {"layers", K_INT, OFF(layers), NULL},
    {"width", K_INT, OFF(width), NULL},
    {"heads", K_INT, OFF(heads), "query heads"},
    {"kv-heads", K_INT, OFF(kv_heads), NULL},
    {"head-dim", K_INT, OFF(head_dim), NULL},
    {"ffn", K_INT, OFF(ffn), "width of the MLP"},
    {"context", K_INT, OFF(context), "positions the file claims"},
    {"vocab", K_INT, OFF(vocab), "tokens"},
    {"type", K_STR, OFF(type), "of the matrices: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K"},
    {"embed-type", K_STR, OFF(embed_type), "of the embedding (and output)"},
    {"tied", K_BOOL, OFF(tied), "1: the embedding is the output"},
    {"tokenizer", K_STR, OFF(tokenizer), "gpt2 or llama"},
    {"pre", K_STR, OFF(pre), "smollm, qwen2, gpt-2 or llama-bpe"},
    {"vocab-from", K_STR, OFF(vocab_from), "a GGUF file whose tokenizer is taken"},
    {"rope-base", K_FLOAT, OFF(rope_base), NULL},
    {"rope-freqs", K_BOOL, OFF(rope_freqs), "1: Llama 3.1's scaling"},
    {"norm-eps", K_FLOAT, OFF(norm_eps), NULL},
    {"seed", K_U64, OFF(seed), NULL},
};
enum { N_OPTS = sizeof opts / sizeof *opts };

static int usage(FILE *f)
{
    fprintf(f, "usage: random-model [--preset tiny|tiny-gqa|llama-3.2-1b] [--NAME VALUE]... FILE\n");
    for (int i = 0; i < N_OPTS; i++)
        fprintf(f, "  --%-12s %s\n", opts[i].name, opts[i].help ? opts[i].help : "");
    return 2;
}

static int assign(struct random_model *m, int i, char *value)
{
    char *at = (char *)m + opts[i].off, *end = value;
    switch (opts[i].kind) {
    case K_INT:
        *(int *)(void *)at = (int)strtol(value, &end, 10);
        break;
    case K_FLOAT:
        *(float *)(void *)at = strtof(value, &end);
        break;
    case K_BOOL:
        *(bool *)(void *)at = strtol(value, &end, 10) != 0;
        break;
    case K_U64:
        *(uint64_t *)(void *)at = strtoull(value, &end, 10);
        break;
    case K_STR:
        *(const char **)(void *)at = value;
        return 0;
    }
    if (end != value && *end == '\0')
        return 0;
    fprintf(stderr, "random-model: --%s %s: a number is needed\n", opts[i].name, value);
    return -1;
}

int main(int argc, char **argv)
{
    struct option longs[N_OPTS + 2] = {{"preset", required_argument, NULL, N_OPTS}};
    struct random_model m;
    struct skv_error err;
    int c;
    random_model_default(&m);
    for (int i = 0; i < N_OPTS; i++)
        longs[i + 1] = (struct option){opts[i].name, required_argument, NULL, i};
    while ((c = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (c == N_OPTS ? random_model_preset(&m, optarg) < 0 : c > N_OPTS || assign(&m, c, optarg) < 0)
            return usage(stderr);
    }
    if (optind != argc - 1)
        return usage(stderr);
    if (random_model_write(&m, argv[optind], &err) < 0) {
        fprintf(stderr, "random-model: %s\n", err.msg);
        return 1;
    }
    return 0;
}
