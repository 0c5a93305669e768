/* fuzz_template: a chat template of any text is one of the families or unknown, and what it is taken for renders. */
#include "config.h"

#include <string.h>

#include "engine/chat_int.h"
#include "tests/fuzz/fuzz.h"

static void render(const struct chat_template *t)
{
    static char system[] = "S", user[] = "user", role[] = "system", question[] = "Q";
    const struct engine_message msg[2] = {{{role, 6}, {system, 1}}, {{user, 4}, {question, 1}}};
    struct skv_error err;
    for (int from = 0; from < 2; from++)
        for (int continued = 0; continued < 2; continued++) {
            struct chat_text c;
            FUZZ_CHECK(chat_render(t, msg + from, 2 - from, true, continued, &c, &err) == 0);
            FUZZ_CHECK(c.n > 0);
            chat_text_free(&c);
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *s = malloc(size + 1); /* not NUL-terminated on purpose: exactly size bytes are the template's */
    FUZZ_CHECK(s != NULL);
    memcpy(s, data, size);
    char *exact = realloc(s, size ? size : 1);
    FUZZ_CHECK(exact != NULL);
    int family = chat_detect(exact, size);
    if (family >= 0) {
        struct chat_template *t = calloc(1, sizeof(*t));
        FUZZ_CHECK(t != NULL && family < CHAT_FAMILIES);
        t->family = (enum chat_family)family;
        t->bos = strdup("<s>");
        t->eos = strdup("</s>");
        t->open = strdup("[INST] ");
        t->close = strdup(" [/INST]");
        FUZZ_CHECK(t->bos && t->eos && t->open && t->close);
        FUZZ_CHECK(chat_details(t, exact, size) == 0);
        render(t);
        chat_free(t);
    }
    free(exact);
    return 0;
}
