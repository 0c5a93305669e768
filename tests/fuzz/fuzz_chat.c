/* fuzz_chat: any conversation under every family of templates: rendered and encoded, or refused with a sentence. What
 * stands in a content never becomes a control token. */
#include <string.h>

#include "engine/chat.h"
#include "tests/fuzz/model.h"

static const char *const families[] = {"chatml", "llama2", "llama3", "mistral", "gemma", "zephyr", "phi3"};
enum { FAMILIES = sizeof families / sizeof *families, MESSAGES = 6 };

static struct gguf *model;
static struct tokenizer *tok;
static struct chat_template *tpl[FAMILIES];

static void start(void)
{
    struct skv_error err;
    model = fuzz_model("gpt2", "smollm");
    tok = tok_new(model, &err);
    FUZZ_CHECK(tok != NULL);
    for (int i = 0; i < FAMILIES; i++) {
        tpl[i] = chat_new(model, families[i], &err);
        FUZZ_CHECK(tpl[i] != NULL);
    }
}

/* Messages from the input: each a byte for the role and a byte for the length of its content. */
static int messages(struct fuzz_in *in, struct engine_message *msg)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool", ""};
    int n = 0;
    while (in->n > 0 && n < MESSAGES) {
        const char *role = roles[fuzz_byte(in) % 5];
        size_t len = fuzz_byte(in);
        if (len > in->n)
            len = in->n;
        msg[n].role = (struct engine_text){(char *)role, strlen(role)};
        msg[n].content = (struct engine_text){(char *)in->p, len};
        in->p += len;
        in->n -= len;
        n++;
    }
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_in in = {data, size};
    struct engine_message msg[MESSAGES];
    struct skv_error err = {.code = SKV_OK};
    struct chat_text text = {0};
    struct tok_ids ids = {0};
    int system_to = 0, last_from = 0;

    if (model == NULL)
        start();
    unsigned how = fuzz_byte(&in);
    const struct chat_template *t = tpl[how % FAMILIES];
    int n = messages(&in, msg), rc = chat_render(t, msg, n, how & 64, how & 128, &text, &err);
    if (rc != 0) {
        FUZZ_CHECK(err.code != SKV_OK && err.msg[0] != '\0');
        return 0;
    }
    rc = chat_encode(tok, &text, &ids, &system_to, &last_from, &err);
    if (rc == 0) {
        int control = 0, template_control = 0;
        for (int i = 0; i < ids.n; i++)
            control += tok_is_control(tok, ids.id[i]);
        for (int i = 0; i < text.n; i++) {
            struct tok_ids part = {0};
            if (text.piece[i].special && tok_encode(tok, text.piece[i].s, text.piece[i].len, true, &part, &err) == 0)
                for (int j = 0; j < part.n; j++)
                    template_control += tok_is_control(tok, part.id[j]);
            free(part.id);
        }
        FUZZ_CHECK(control <= template_control + 1); /* the BOS token is in no piece */
        FUZZ_CHECK(system_to >= 0 && system_to <= ids.n && last_from >= 0 && last_from <= ids.n);
    }
    free(ids.id);
    chat_text_free(&text);
    return 0;
}
