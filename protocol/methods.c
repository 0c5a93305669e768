#include "protocol/methods.h"

#include <limits.h>
#include <string.h>

#include "protocol/args.h"

#define AT(member)           offsetof(struct args, member)
#define BOOL(n, m, d, text)  { .name = n, .type = FIELD_BOOL, .off = AT(m), .max = 1, .dflt = d, \
                               .dflt_doc = (d) != 0 ? "true" : "false", .doc = text }
#define INT(n, m, lo, hi, d, dd, u, text) { .name = n, .type = FIELD_INT, .off = AT(m), .min = lo, .max = hi, .dflt = d, \
                                            .dflt_doc = dd, .unit = u, .doc = text }
#define FLOAT(n, m, lo, hi, d, dd, text) { .name = n, .type = FIELD_FLOAT, .off = AT(m), .min = lo, .max = hi, .dflt = d, \
                                           .dflt_doc = dd, .doc = text }
#define NAME(n, m, lo, hi, text) { .name = n, .type = FIELD_NAME, .off = AT(m), .min = lo, .max = hi, .unit = "bytes", \
                                   .doc = text }
#define END { .name = NULL }

#define TOKEN_COUNT_MAX 1000000
#define PROMPT_FIELDS                                                                                                   \
    { .name = "prompt", .type = FIELD_TEXT, .off = AT(prompt), .max = INT_MAX, .unit = "bytes",                          \
      .doc = "the prompt as text" },                                                                                    \
    { .name = "messages", .type = FIELD_MESSAGES, .off = AT(messages), .min = 1, .max = 65536,                           \
      .doc = "the prompt as an array of {role, content}, laid out by the model's chat template" },                       \
    { .name = "tokens", .type = FIELD_TOKENS, .off = AT(tokens), .max = TOKEN_COUNT_MAX,                                 \
      .doc = "the prompt as an array of token ids" },                                                                   \
    BOOL("raw", raw, 0, "with prompt: add no BOS, parse no special tokens")

static const char *const pool_kinds[] = { "avg", "max", NULL };

static const struct field kv_fields[] = {
    NAME("policy", kv.policy, 1, 15, "which KV pairs stay: full, streaming, snapkv, pyramid, h2o, tova, article, sparse"),
    INT("budget", kv.budget, 16, INT_MAX, -1, NULL, "slots", "KV pairs kept a head (the mean where heads differ)"),
    INT("sink", kv.sink, 0, 1024, -1, NULL, "tokens", "first tokens that always stay"),
    INT("recent", kv.recent, 1, 65536, -1, NULL, "tokens", "last tokens that always stay"),
    INT("alpha", kv.alpha, 0, 65536, -1, NULL, "tokens", "last queries of the prompt that score it; 0: the last message"),
    INT("pool", kv.pool, 1, 255, -1, NULL, "tokens", "neighbours over which scores are pooled, odd; 1: none"),
    { .name = "pool_kind", .type = FIELD_CHOICE, .off = AT(kv.pool_kind), .dflt = -1, .choices = pool_kinds,
      .doc = "how scores are pooled" },
    INT("full_layers", kv.full_layers, 0, 1024, -1, NULL, "layers", "first layers that keep everything"),
    NAME("dtype", kv.dtype, 1, 7, "element type of the cache; only the server's own can be named"),
    END,
};

static const struct field hello_fields[] = {
    NAME("client", client, 0, 128, "the client's name, for the log"),
    NAME("version", version, 0, 128, "the client's version, for the log"),
    END,
};

static const struct field generate_fields[] = {
    PROMPT_FIELDS,
    BOOL("stream", stream, 1, "send token notifications"),
    BOOL("progress", progress, 0, "send progress notifications"),
    INT("max_tokens", max_tokens, 0, INT_MAX, 512, "512", "tokens", "tokens to generate at most; 0: only read the prompt"),
    FLOAT("temperature", temperature, 0, 100, 0.8, "0.8", "0 is greedy"),
    INT("top_k", top_k, 0, INT_MAX, 40, "40", "tokens", "sample among that many of the likeliest; 0: all"),
    FLOAT("top_p", top_p, 0, 1, 0.95, "0.95", "sample among the likeliest that sum to this probability"),
    FLOAT("min_p", min_p, 0, 1, 0.05, "0.05", "drop tokens below this share of the likeliest one's probability"),
    FLOAT("repeat_penalty", repeat_penalty, 0.01, 100, 1, "1", "divides the logits of tokens seen before"),
    FLOAT("presence_penalty", presence_penalty, -100, 100, 0, "0", "taken off the logits of tokens generated before"),
    FLOAT("frequency_penalty", frequency_penalty, -100, 100, 0, "0", "taken off, for each time a token was generated"),
    { .name = "seed", .type = FIELD_UINT64, .off = AT(seed), .off_set = AT(seed_set), .dflt_doc = "random",
      .doc = "same seed, same request, same build: same tokens" },
    { .name = "stop", .type = FIELD_TEXTS, .off = AT(stop), .max = 16, .dflt_doc = "[]",
      .doc = "strings; the text ends before the first one" },
    BOOL("ignore_eos", ignore_eos, 0, "go on when the model ends its answer"),
    INT("logprobs", logprobs, 0, 64, 0, "0", "tokens", "top alternatives to give with each token"),
    NAME("session", session, 1, 63, "keep the KV cache under this name, or continue there"),
    INT("priority", priority, -10, 10, 0, "0", NULL, "higher goes first"),
    { .name = "deadline_ms", .type = FIELD_INT64, .off = AT(deadline_ms), .min = 1, .max = INT_MAX, .unit = "ms",
      .doc = "end with deadline when not finished by then" },
    { .name = "kv", .type = FIELD_MAP, .sub = kv_fields, .dflt_doc = "the server's", .doc = "what of the KV cache is kept" },
    { .name = "pin", .type = FIELD_RANGES, .off = AT(pin), .max = 1024, .dflt_doc = "[]",
      .doc = "ranges [from, to] of prompt tokens that are never evicted" },
    BOOL("pin_system", pin_system, 0, "never evict the system message"),
    END,
};

static const struct field score_fields[] = {
    PROMPT_FIELDS,
    { .name = "continuation", .type = FIELD_TEXT_OR_TOKENS, .required = true, .off = AT(cont_text),
      .off_set = AT(cont_tokens), .max = TOKEN_COUNT_MAX, .doc = "what is scored, as text or as token ids" },
    { .name = "kv", .type = FIELD_MAP, .sub = kv_fields, .dflt_doc = "the server's", .doc = "what of the KV cache is kept" },
    { .name = "candidates", .type = FIELD_TOKEN_LISTS, .off = AT(candidates), .max = TOKEN_COUNT_MAX,
      .doc = "for each token of the continuation, an array of token ids whose log-probabilities there are wanted" },
    BOOL("refeed", refeed, 0, "feed the prompt's last token again, so that the first token is scored over the kept cache too"),
    { .name = "deadline_ms", .type = FIELD_INT64, .off = AT(deadline_ms), .min = 1, .max = INT_MAX, .unit = "ms",
      .doc = "end with deadline when not finished by then" },
    INT("logprobs", logprobs, 0, 64, 0, "0", "tokens", "likeliest alternatives to give at each token"),
    INT("priority", priority, -10, 10, 0, "0", NULL, "higher goes first"),
    END,
};

static const struct field cancel_fields[] = {
    { .name = "msgid", .type = FIELD_UINT64, .off = AT(msgid), .off_set = AT(msgid_set),
      .doc = "the request of this connection to cancel" },
    { .name = "sequence", .type = FIELD_UINT64, .off = AT(sequence), .off_set = AT(sequence_set),
      .doc = "or the sequence or idle session of this user, as status lists them" },
    END,
};

static const struct field tokenize_fields[] = {
    { .name = "text", .type = FIELD_TEXT, .required = true, .off = AT(text), .max = INT_MAX, .unit = "bytes", .doc = "the text" },
    BOOL("special", special, 1, "parse special tokens such as <|im_end|>"),
    BOOL("bos", bos, 0, "begin with the model's BOS token"),
    END,
};

static const struct field detokenize_fields[] = {
    { .name = "tokens", .type = FIELD_TOKENS, .required = true, .off = AT(tokens), .max = TOKEN_COUNT_MAX, .doc = "token ids" },
    END,
};

static const struct field apply_template_fields[] = {
    { .name = "messages", .type = FIELD_MESSAGES, .required = true, .off = AT(messages), .min = 1, .max = 65536,
      .doc = "an array of {role, content}" },
    BOOL("add_generation_prompt", add_generation_prompt, 1, "end with the beginning of the assistant's answer"),
    END,
};

static const struct field sequence_fields[] = {
    { .name = "sequence", .type = FIELD_UINT64, .required = true, .off = AT(sequence), .off_set = AT(sequence_set),
      .doc = "a sequence's id, as sequences gives it" },
    END,
};

static const struct field shutdown_fields[] = {
    { .name = "grace_ms", .type = FIELD_INT64, .off = AT(grace_ms), .max = INT_MAX, .dflt = -1,
      .dflt_doc = "drain-timeout", .unit = "ms", .doc = "how long requests in flight may take to finish" },
    END,
};

static const struct field subscribe_fields[] = {
    { .name = "topics", .type = FIELD_TEXTS, .required = true, .off = AT(topics), .max = 16,
      .doc = "of sequences, evictions, steps; [] ends the subscription" },
    END,
};

static const struct field no_fields[] = { END };

const struct method method_table[METHOD_COUNT] = {
    [METHOD_HELLO] = { "hello", METHOD_HELLO, false, false, hello_fields, "who is there" },
    [METHOD_GENERATE] = { "generate", METHOD_GENERATE, false, false, generate_fields, "continue a prompt" },
    [METHOD_SCORE] = { "score", METHOD_SCORE, false, false, score_fields, "the log-probability of a continuation" },
    [METHOD_CANCEL] = { "cancel", METHOD_CANCEL, false, false, cancel_fields, "end a request of this connection, or a sequence of this user" },
    [METHOD_TOKENIZE] = { "tokenize", METHOD_TOKENIZE, false, false, tokenize_fields, "text to token ids" },
    [METHOD_DETOKENIZE] = { "detokenize", METHOD_DETOKENIZE, false, false, detokenize_fields, "token ids to text" },
    [METHOD_APPLY_TEMPLATE] = { "apply_template", METHOD_APPLY_TEMPLATE, false, false, apply_template_fields,
                                "messages to the prompt that the model sees" },
    [METHOD_STATUS] = { "status", METHOD_STATUS, false, false, no_fields, "counts, rates, memory, the caller's sequences" },
    [METHOD_SEQUENCES] = { "sequences", METHOD_SEQUENCES, true, false, no_fields, "every sequence and idle session" },
    [METHOD_KV] = { "kv", METHOD_KV, true, false, no_fields, "the KV plan and its use, layer by layer" },
    [METHOD_KEPT] = { "kept", METHOD_KEPT, true, false, sequence_fields, "the positions that a sequence holds now" },
    [METHOD_SET] = { "set", METHOD_SET, true, true, no_fields, "change settings while running" },
    [METHOD_GET] = { "get", METHOD_GET, true, false, no_fields, "all settings" },
    [METHOD_DRAIN] = { "drain", METHOD_DRAIN, true, false, no_fields, "refuse new work, finish the old" },
    [METHOD_RESUME] = { "resume", METHOD_RESUME, true, false, no_fields, "take new work again" },
    [METHOD_SHUTDOWN] = { "shutdown", METHOD_SHUTDOWN, true, false, shutdown_fields, "drain and exit" },
    [METHOD_KILL] = { "kill", METHOD_KILL, true, false, sequence_fields, "end a sequence or an idle session" },
    [METHOD_RELOAD] = { "reload", METHOD_RELOAD, true, false, no_fields, "read the config file again" },
    [METHOD_SUBSCRIBE] = { "subscribe", METHOD_SUBSCRIBE, true, false, subscribe_fields, "be told of events" },
};

const struct method *method_find(const char *name, size_t len)
{
    for (int i = 0; i < METHOD_COUNT; i++)
        if (strlen(method_table[i].name) == len && memcmp(method_table[i].name, name, len) == 0)
            return &method_table[i];
    return NULL;
}

#define NEAR_LEN 32

/* Levenshtein's distance of two short strings. */
static unsigned distance(const char *a, size_t na, const char *b, size_t nb)
{
    unsigned row[NEAR_LEN + 1];

    for (size_t j = 0; j <= nb; j++)
        row[j] = (unsigned)j;
    for (size_t i = 1; i <= na; i++) {
        unsigned diag = row[0];

        row[0] = (unsigned)i;
        for (size_t j = 1; j <= nb; j++) {
            unsigned up = row[j], best = diag + (a[i - 1] != b[j - 1]);

            if (up + 1 < best)
                best = up + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            diag = up;
            row[j] = best;
        }
    }
    return row[nb];
}

const char *method_nearest(const char *name, size_t len, const char *(*next)(void *arg), void *arg)
{
    const char *best = NULL, *cand;
    unsigned best_d = len <= 4 ? 2 : 3; /* at most one edit in a short name, two in a longer one */

    if (len > NEAR_LEN)
        return NULL;
    while ((cand = next(arg)) != NULL) {
        size_t n = strlen(cand);
        unsigned d;

        if (n > NEAR_LEN)
            continue;
        d = distance(name, len, cand, n);
        if (d < best_d) {
            best_d = d;
            best = cand;
        }
    }
    return best;
}
