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
    bool first; /* not continued: see chat_job_init on BOS */
};

/* Render. `continued`: the messages follow an answer of the same session (no BOS, no default system turn; begins with what
 * closes the answer's turn, so the token that ended the answer must not be in the cache). -1 with *err (unknown role, or an
 * order that the family does not allow: BAD_REQUEST), *out empty then. */
int chat_render(const struct chat_template *t, const struct engine_message *msg, int n, bool add_generation_prompt,
                bool continued, struct chat_text *out, struct skv_error *err);
void chat_text_free(struct chat_text *c);

/* Encoding a rendered chat, in bounded pieces like tok_encode_some: control tokens come out of the template's pieces only,
 * the text between them is encoded as one, as if it had never been in pieces. After chat_job_init `c` may go. Each call of
 * chat_job_some appends to out, until it returns 1; 0: more to do; -1 with *err. BOS comes first if the file asks for it, the
 * template has none and the chat is not continued. */
enum chat_mark {
    CHAT_SYSTEM_TO = 0, /* where the leading system turn ends */
    CHAT_LAST_FROM,     /* where the last message's turn begins */
    CHAT_TAIL_FROM,     /* where what follows it begins (the header of the answer), or the end */
    CHAT_MARKS
};
struct chat_job {
    struct tok_job tok;
    /* Index in out of the first token that begins there or later (in a word that crosses the place: after the word);
     * complete when chat_job_some has returned 1. Without a system turn CHAT_SYSTEM_TO is where out began. */
    int index[CHAT_MARKS];
    /* private */
    char *text;
    struct tok_mark *mark;
    size_t at[CHAT_MARKS];
    bool set[CHAT_MARKS];
    bool begun, bos;
};
int chat_job_init(struct chat_job *job, const struct tokenizer *tok, const struct chat_text *c, struct skv_error *err);
/* The same for a plain text: `take` (malloc'd, may be NULL when len is 0) belongs to the job then. The indices mean nothing. */
void chat_job_text(struct chat_job *job, char *take, size_t len, bool special);
int chat_job_some(struct chat_job *job, const struct tokenizer *tok, size_t max_bytes, struct tok_ids *out,
                  struct skv_error *err);
void chat_job_fini(struct chat_job *job); /* also after a failed or unfinished one; a zeroed one is fine */

/* The whole at once. If not NULL: *system_to = tokens of the system turn [0, system_to), *last_from = first token of the
 * last message's turn, both counted from the chat's first token. */
int chat_encode(const struct tokenizer *tok, const struct chat_text *c, struct tok_ids *out, int *system_to,
                int *last_from, struct skv_error *err);

#endif
