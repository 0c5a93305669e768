/* llama_logits.c - what llama.cpp computes, for tests/test_llama: writes tests/data/llama.bin. Not
 * built by make:
 *
 *   L=llama.cpp; M=SmolLM2-135M-Instruct.Q4_1.gguf
 *   $L/build/bin/llama-quantize --allow-requantize $M model-f32.gguf F32      # the same weights,
 * written out
 *   gcc -O2 -I$L/include -I$L/ggml/include llama_logits.c -o llama_logits \
 *       $L/build/src/libllama.a $L/build/ggml/src/libggml.a $L/build/ggml/src/libggml-cpu.a
 * $L/build/ggml/src/libggml-base.a \ -lstdc++ -lgomp -lm -lpthread
 *   ./llama_logits model-f32.gguf $M tests/data/logits.tsv t300:300 t512:512 t777:700 >
 * tests/data/llama.bin
 *
 * Each NAME:N is a row of logits.tsv, cut to N tokens. The first model is computed with an f32
 * cache, the second with llama.cpp's defaults and with its q8_0 cache. Little-endian: the bytes
 * "llm1", u32 texts; a text: u32 n, u16 id [n], then for each position but the last: TOP times {
 * u16 id, u16 f32, u16 default, u16 q8_0 }, the f32 model's likeliest tokens, and { u16 f32, u16
 * default, u16 q8_0 } of the token that follows. A log-probability l is written as round(-2000 l),
 * at most 65535.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

#define TOP     16
#define MAX     1024
#define COLUMNS 3

static struct llama_model *load(const char *path)
{
    struct llama_model_params p = llama_model_default_params();
    struct llama_model *m = llama_model_load_from_file(path, p);
    if (m == NULL)
        exit(1);
    return m;
}

/* Log-probabilities [n][vocab] at each of the n tokens. */
static float *run(struct llama_model *m, enum ggml_type cache, int32_t *ids, int n)
{
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(m));
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = MAX;
    p.n_threads = p.n_threads_batch = 2;
    p.type_k = p.type_v = cache;
    if (cache == GGML_TYPE_F32)
        p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (cache == GGML_TYPE_Q8_0)
        p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    struct llama_context *c = llama_init_from_model(m, p);
    struct llama_batch b = llama_batch_init(n, 0, 1);
    float *lp = malloc((size_t)n * (size_t)vocab * sizeof *lp);
    if (c == NULL || lp == NULL)
        exit(1);
    b.n_tokens = n;
    for (int i = 0; i < n; i++) {
        b.token[i] = ids[i];
        b.pos[i] = i;
        b.n_seq_id[i] = 1;
        b.seq_id[i][0] = 0;
        b.logits[i] = 1;
    }
    if (llama_decode(c, b) != 0)
        exit(1);
    for (int i = 0; i < n; i++) {
        const float *x = llama_get_logits_ith(c, i);
        double max = -1e30, sum = 0;
        for (int k = 0; k < vocab; k++)
            max = fmax(max, x[k]);
        for (int k = 0; k < vocab; k++)
            sum += exp(x[k] - max);
        for (int k = 0; k < vocab; k++)
            lp[(size_t)i * (size_t)vocab + (size_t)k] = (float)(x[k] - max - log(sum));
    }
    llama_batch_free(b);
    llama_free(c);
    return lp;
}

static void put16(double v)
{
    unsigned u = v < 0 ? 0 : v > 65535 ? 65535 : (unsigned)v;
    putchar((int)(u & 255));
    putchar((int)(u >> 8));
}

static void put_lp(float lp)
{
    put16(round(-2000.0 * lp));
}

static void put32(unsigned v)
{
    put16(v & 65535);
    put16(v >> 16);
}

/* The row's ids, at most n of them. */
static int find(const char *tsv, const char *name, int n, int32_t *ids)
{
    static char line[1 << 20];
    FILE *f = fopen(tsv, "r");
    size_t len = strlen(name);
    int got = 0;
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, name, len) == 0 && line[len] == '\t') {
            char *p = line + len + 1;
            while (got < n && *p != '\t')
                ids[got++] = (int32_t)strtol(p, &p, 10);
        }
    if (f != NULL)
        fclose(f);
    return got;
}

static void text(struct llama_model **m, int32_t *ids, int n)
{
    static const enum ggml_type cache[COLUMNS] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0 };
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(m[0]));
    char *used = calloc((size_t)n * (size_t)vocab, 1);
    float *lp[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
        lp[c] = run(m[c > 0], cache[c], ids, n);
    put32((unsigned)n);
    for (int i = 0; i < n; i++)
        put16(ids[i]);
    for (int i = 0; i + 1 < n; i++) {
        size_t at = (size_t)i * (size_t)vocab;
        for (int t = 0; t < TOP; t++) {
            int best = 0;
            while (used[at + (size_t)best])
                best++;
            for (int k = best; k < vocab; k++)
                if (!used[at + (size_t)k] && lp[0][at + (size_t)k] > lp[0][at + (size_t)best])
                    best = k;
            used[at + (size_t)best] = 1;
            put16(best);
            for (int c = 0; c < COLUMNS; c++)
                put_lp(lp[c][at + (size_t)best]);
        }
        for (int c = 0; c < COLUMNS; c++)
            put_lp(lp[c][at + (size_t)ids[i + 1]]);
    }
    for (int c = 0; c < COLUMNS; c++) {
        double kl = 0, nll = 0;
        for (int i = 0; i + 1 < n; i++) {
            const float *x = lp[0] + (size_t)i * (size_t)vocab,
                        *y = lp[c] + (size_t)i * (size_t)vocab;
            for (int k = 0; k < vocab; k++)
                kl += exp(x[k]) * (x[k] - y[k]);
            nll -= y[ids[i + 1]];
        }
        fprintf(stderr, "%d tokens, cache %s: KL over the whole vocabulary %.5f, perplexity %.4f\n",
                n, ggml_type_name(cache[c]), kl / (n - 1), exp(nll / (n - 1)));
    }
    for (int c = 0; c < COLUMNS; c++)
        free(lp[c]);
    free(used);
}

static void quiet(enum ggml_log_level level, const char *s, void *arg)
{
    (void)arg;
    if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT)
        fputs(s, stderr);
}

int main(int argc, char **argv)
{
    int32_t ids[MAX];
    if (argc < 5)
        return 2;
    llama_log_set(quiet, NULL);
    struct llama_model *m[2] = { load(argv[1]), load(argv[2]) };
    fputs("llm1", stdout);
    put32((unsigned)argc - 4);
    for (int i = 4; i < argc; i++) {
        char *colon = strchr(argv[i], ':');
        int n = colon ? atoi(colon + 1) : 0;
        if (n < 2 || n > MAX)
            return 2;
        *colon = '\0';
        if ((n = find(argv[3], argv[i], n, ids)) < 2)
            return 1;
        text(m, ids, n);
    }
    return 0;
}
