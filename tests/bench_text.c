/* bench_text: speed of opening a model's text parts, of the tokenizer (MB/s) and of sampling (us a token).
 *
 * Times are of this thread's CPU, the best of some rounds, so that others on the machine count less.
 *
 *     bench_text [FILE...]    # with FILEs their text is encoded, else a made-up English text
 */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/sampler.h"
#include "engine/tokenizer.h"
#include "tests/tsv.h"

#define ROUNDS 5

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static char *read_file(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return NULL;
    size_t cap = 64u << 20;
    char *s = malloc(cap);
    *len = s ? fread(s, 1, cap, f) : 0;
    fclose(f);
    return s;
}

/* Words by a skewed draw out of a few hundred, with punctuation, capitals and lines, so that caches see what they would. */
static char *english(size_t *len)
{
    static const char *const words[] = {
        "the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his",
        "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were",
        "government", "independence", "necessary", "unalienable", "legislature", "representation", "established",
        "constitution", "tokenizer", "kilobytes", "vocabularies", "measurement", "scheduler", "quantised", "strength",
        "people", "mankind", "political", "powers", "separate", "station", "nature", "opinions", "requires", "declare",
    };
    const size_t n_words = sizeof(words) / sizeof(words[0]);
    uint32_t seed = 1;
    char *s = malloc(4u << 20);
    if (!s)
        return NULL;
    for (*len = 0; *len < (4u << 20) - 64;) {
        seed = seed * 1664525u + 1013904223u;
        size_t i = (size_t)((double)(seed >> 8) / 16777216.0 * ((seed >> 4) % 8 < 5 ? 34.0 : (double)n_words));
        seed = seed * 1664525u + 1013904223u;
        unsigned kind = seed >> 24;
        *len += (size_t)sprintf(s + *len, "%s%s", words[i], kind < 16 ? ", " : kind < 24 ? ".\n" : kind < 26 ? " 1776 " : " ");
    }
    return s;
}

static void bench_encode(const struct tokenizer *t, const char *what, const char *s, size_t len)
{
    double best = 1e9;
    struct tok_ids out = { 0 };
    struct skv_error err = { 0 };
    for (int r = 0; r < ROUNDS; r++) {
        double from = now();
        out.n = 0;
        if (tok_encode(t, s, len, true, &out, &err)) {
            printf("%s: %s\n", what, err.msg);
            break;
        }
        double took = now() - from;
        best = took < best ? took : best;
    }
    printf("encode %-24s %9zu bytes %9d tokens %7.1f MB/s\n", what, len, out.n, (double)len / best / 1e6);
    free(out.id);
}

static void bench_model(int argc, char **argv)
{
    const char *path = tsv_model_path();
    struct skv_error err = { 0 };
    if (!path)
        return;
    double a = now();
    struct gguf *g = gguf_open(path, &err);
    double b = now();
    struct tokenizer *t = g ? tok_new(g, &err) : NULL;
    double c = now();
    if (!t) {
        printf("%s\n", err.msg);
        gguf_close(g);
        return;
    }
    printf("open %.1f ms, tokenizer %.1f ms\n", (b - a) * 1e3, (c - b) * 1e3);
    for (int i = 1; i < argc || (i == 1 && argc == 1); i++) {
        size_t len = 0;
        char *s = argc > 1 ? read_file(argv[i], &len) : english(&len);
        if (s)
            bench_encode(t, argc > 1 ? argv[i] : "made-up English", s, len);
        free(s);
    }
    tok_free(t);
    gguf_close(g);
}

static void bench_sampler(const char *what, struct engine_sampling set, const float *logits, int n)
{
    float *copy = malloc((size_t)n * sizeof(*copy));
    double best = 1e9;
    set.seed_set = true;
    struct sampler *s = sampler_new(&set, n);
    for (int i = 0; s && copy && i < 50; i++) {
        sampler_accept(s, i);
        memcpy(copy, logits, (size_t)n * sizeof(*copy));
        double from = now();
        sampler_pick(s, copy, i);
        double took = now() - from;
        best = took < best ? took : best;
    }
    printf("sample %-36s %6.1f us\n", what, best * 1e6);
    sampler_free(s);
    free(copy);
}

int main(int argc, char **argv)
{
    enum { N = 49152 };
    float *logits = malloc(N * sizeof(*logits)), lp[20];
    int32_t ids[20];
    uint32_t seed = 7;
    if (!logits)
        return 1;
    bench_model(argc, argv);
    for (int i = 0; i < N; i++) {
        logits[i] = -36;
        for (int k = 0; k < 12; k++) {
            seed = seed * 1664525u + 1013904223u;
            logits[i] += (float)(seed >> 8) / 16777216.0f * 6;
        }
    }
    struct engine_sampling d = { .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1 };
    bench_sampler("defaults", d, logits, N);
    d.repeat_penalty = 1.1f;
    bench_sampler("defaults, repeat penalty", d, logits, N);
    d.top_k = 0;
    bench_sampler("top_k 0", d, logits, N);
    d.min_p = 0;
    bench_sampler("top_k 0, min_p 0", d, logits, N);
    d.temperature = 0;
    bench_sampler("greedy", d, logits, N);
    double best = 1e9;
    for (int i = 0; i < 50; i++) {
        double from = now();
        sampler_logprobs(logits, N, 1, 20, ids, lp);
        double took = now() - from;
        best = took < best ? took : best;
    }
    printf("logprobs, top 20 %26s %6.1f us\n", "", best * 1e6);
    free(logits);
    return 0;
}
