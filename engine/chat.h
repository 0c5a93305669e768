/* chat.h - chat templates: recognised families, rendered here (no template language in the daemon).
 *
 * Families: chatml, llama2, llama3, mistral, gemma, zephyr, phi3. A file's template is recognised by its marks; one that is
 * not known is said, never guessed. Contents are plain text: what looks like a control token in them is not one, so a
 * rendered chat is a list of pieces, each with its own `special`.
 *
 * The text equals what the file's template gives, with these differences on purpose: families without a system role take a
 * leading system message into the first user turn where their template would fail; Llama 3.1's date is the one fixed in
 * its template.
 */
#ifndef SKVD_ENGINE_CHAT_H
#define SKVD_ENGINE_CHAT_H

#include "engine/engine.h"
#include "engine/tokenizer.h"

struct chat_template; /* a family plus what the file's template says of it (default system text, ...) */

/* From the file (name NULL) or a family's name; where both agree, details (a default system text, blanks) are the file's.
 * NULL with *err when it is not known; the message lists the families (BAD_CONFIG for a name, BAD_MODEL for the file). */
struct chat_template *chat_new(const struct gguf *g, const char *name, struct skv_error *err);
void chat_free(struct chat_template *t);
const char *chat_name(const struct chat_template *t);

struct chat_piece {
    char *s;
    size_t len;
    bool special;     /* part of the template (control tokens are parsed), not a content or a role's name */
    bool system;      /* belongs to the system turn: pin_system */
    bool last_message; /* belongs to the last message's turn (its header and content): the score window */
};
struct chat_text {
    struct chat_piece *piece;
    int n;
    bool first; /* not continued: chat_encode puts BOS in front if the file asks for it and the template has none */
};

/* Render. `continued`: the messages follow an answer of the same session (no BOS, no default system turn; begins with what
 * closes the answer's turn, so the token that ended the answer must not be in the cache). -1 with *err (unknown role, or an
 * order that the family does not allow: BAD_REQUEST), *out empty then. */
int chat_render(const struct chat_template *t, const struct engine_message *msg, int n, bool add_generation_prompt,
                bool continued, struct chat_text *out, struct skv_error *err);
void chat_text_free(struct chat_text *c);

/* Append the ids of the rendered pieces: control tokens come out of the template's pieces only, the text between them is
 * encoded as one, as if it had never been in pieces. If not NULL: *system_to = tokens of the system turn
 * [0, system_to), *last_from = first token of the last message's turn (both counted from the first token of this chat; where
 * a turn begins inside a token, from the next one). */
int chat_encode(const struct tokenizer *tok, const struct chat_text *c, struct tok_ids *out, int *system_to,
                int *last_from, struct skv_error *err);

#endif
