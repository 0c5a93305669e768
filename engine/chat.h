/* chat.h - chat templates: recognised families, rendered here (no template language in the daemon).
 *
 * Families: chatml, llama2, llama3, mistral, gemma, zephyr, phi3. A file's template is recognised by its marks; one that is
 * not known is said, never guessed. Contents are plain text: what looks like a control token in them is not one, so a
 * rendered chat is a list of pieces, each with its own `special`.
 */
#ifndef SKVD_ENGINE_CHAT_H
#define SKVD_ENGINE_CHAT_H

#include "engine/engine.h"
#include "engine/tokenizer.h"

struct chat_template; /* a family plus what the file's template says of it (default system text, ...) */

/* From the file (name NULL) or a family's name. NULL with *err when it is not known; the message lists the families. */
struct chat_template *chat_new(const struct gguf *g, const char *name, struct skv_error *err);
void chat_free(struct chat_template *t);
const char *chat_name(const struct chat_template *t);

struct chat_piece {
    char *s;
    size_t len;
    bool special;     /* part of the template (control tokens are parsed), not a content */
    bool system;      /* belongs to the system turn: pin_system */
    bool last_message; /* belongs to the last message's turn (its header and content): the score window */
};
struct chat_text {
    struct chat_piece *piece;
    int n;
};

/* Render. `continued`: the messages follow an answer of the same session (no BOS, no default system turn; begins with what
 * closes the answer's turn). -1 with *err (unknown role, or an order that the family does not allow). */
int chat_render(const struct chat_template *t, const struct engine_message *msg, int n, bool add_generation_prompt,
                bool continued, struct chat_text *out, struct skv_error *err);
void chat_text_free(struct chat_text *c);

/* Encode rendered pieces. If not NULL: *system_to = tokens of the system turn [0, system_to), *last_from = first token
 * of the last message's turn. */
int chat_encode(const struct tokenizer *tok, const struct chat_text *c, struct tok_ids *out, int *system_to,
                int *last_from, struct skv_error *err);

#endif
