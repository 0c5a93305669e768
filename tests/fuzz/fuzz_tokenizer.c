/* fuzz_tokenizer: any text to tokens and back, whole and in pieces, with every kind of vocabulary; any ids to text. */
#include "config.h"

#include <string.h>

#include "engine/tokenizer.h"
#include "tests/fuzz/model.h"

enum { KINDS = 5 };

static struct tokenizer *tokenizer_of(unsigned kind)
{
    static const struct {
        const char *model, *pre;
    } how[KINDS] = {{"gpt2", "smollm"}, {"gpt2", "llama-bpe"}, {"gpt2", "qwen2"}, {"gpt2", "gpt-2"}, {"llama", ""}};
    static struct gguf *from[KINDS];
    static struct tokenizer *made[KINDS];

    if (made[kind] == NULL) {
        struct skv_error err;
        from[kind] = fuzz_model(how[kind].model, how[kind].pre); /* both live as long as the process */
        made[kind] = tok_new(from[kind], &err);
        FUZZ_CHECK(made[kind] != NULL);
    }
    return made[kind];
}

static void text_to_tokens(const struct tokenizer *t, unsigned how, const char *text, size_t len)
{
    struct tok_ids whole = {0}, parts = {0};
    struct skv_error err = {.code = SKV_OK};
    bool special = how & 1, valid;
    size_t bad, back_len;
    struct tok_job job = {.text = text, .len = len, .special = special};
    int rc = tok_encode(t, text, len, special, &whole, &err), some;

    valid = utf8_valid(text, len, &bad);
    FUZZ_CHECK(valid ? rc == 0 : rc == -1 && err.code == SKV_BAD_REQUEST);
    while ((some = tok_encode_some(t, &job, 1 + how, &parts, &err)) == 0)
        FUZZ_CHECK(job.done <= len);
    FUZZ_CHECK((some == 1) == valid);
    if (valid) {
        FUZZ_CHECK(whole.n == parts.n && (whole.n == 0 || memcmp(whole.id, parts.id, (size_t)whole.n * sizeof *whole.id) == 0));
        char *back = tok_decode(t, whole.id, whole.n, true, &back_len, &err);
        FUZZ_CHECK(back != NULL);
        /* the "llama" kind writes a space as U+2581, which therefore comes back as one */
        if (memmem(text, len, "\342\226\201", 3) == NULL)
            FUZZ_CHECK(back_len == len && memcmp(back, text, len) == 0);
        free(back);
    }
    free(whole.id);
    free(parts.id);
}

static void tokens_to_text(const struct tokenizer *t, const uint8_t *p, size_t n)
{
    int32_t ids[256];
    int count = 0;
    size_t len;
    struct skv_error err;

    for (; n >= 2 && count < 256; n -= 2, p += 2)
        ids[count++] = (int32_t)((unsigned)p[0] | (unsigned)p[1] << 8) % tok_vocab(t);
    char *text = tok_decode(t, ids, count, count & 1, &len, &err);
    FUZZ_CHECK(text != NULL);
    char *clean = malloc(3 * len + 1);
    FUZZ_CHECK(clean != NULL);
    FUZZ_CHECK(utf8_valid(clean, utf8_sanitize(text, len, clean), NULL));
    FUZZ_CHECK(utf8_whole(text, len) <= len);
    free(clean);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_in in = {data, size};
    unsigned kind = fuzz_byte(&in) % KINDS, how = fuzz_byte(&in);
    const struct tokenizer *t = tokenizer_of(kind);

    text_to_tokens(t, how, (const char *)in.p, in.n);
    tokens_to_text(t, in.p, in.n);
    return 0;
}
