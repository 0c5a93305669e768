/* chat.c - rendering chats by family, and encoding what was rendered. */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat_int.h"

/* One rendering under way. */
struct render {
    const struct chat_template *t;
    const struct engine_message *msg;
    int n;
    bool generate, continued;
    struct chat_text *out;
    int cap;
    bool system, last; /* of the pieces that come now */
    bool leading;      /* all messages so far are the system's, and nothing went before */
    bool no_memory;
};

/* ---- pieces --------------------------------------------------------------------------------------------- */

static void put(struct render *r, const char *s, size_t len, bool special)
{
    struct chat_text *o = r->out;
    if (len == 0 || r->no_memory)
        return;
    if (o->n == r->cap) {
        int cap = r->cap ? r->cap * 2 : 16;
        struct chat_piece *p = realloc(o->piece, (size_t)cap * sizeof(*p));
        if (!p) {
            r->no_memory = true;
            return;
        }
        o->piece = p;
        r->cap = cap;
    }
    char *copy = malloc(len);
    if (!copy) {
        r->no_memory = true;
        return;
    }
    memcpy(copy, s, len);
    o->piece[o->n++] = (struct chat_piece){ copy, len, special, r->system, r->last };
}

static void mark(struct render *r, const char *s)
{
    put(r, s, strlen(s), true);
}

/* Python's str.isspace: what Jinja's trim takes off. */
static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

/* The character at s[0..len), 0 if there is none; bytes that are not UTF-8 are no spaces. */
static size_t space_at(const char *s, size_t len)
{
    const unsigned char *u = (const unsigned char *)s;
    if (len >= 1 && u[0] < 0x80)
        return is_space(u[0]) ? 1 : 0;
    if (len >= 2 && u[0] == 0xc2)
        return is_space(u[1]) ? 2 : 0;
    if (len >= 3 && (u[0] & 0xf0) == 0xe0)
        return is_space((u[0] & 0x0fu) << 12 | (u[1] & 0x3fu) << 6 | (u[2] & 0x3fu)) ? 3 : 0;
    return 0;
}

enum { TRIM_NONE = 0, TRIM_START = 1, TRIM_END = 2, TRIM = 3 };

static void content(struct render *r, const struct engine_text *c, int trim)
{
    const char *s = c->s;
    size_t len = c->len, k;
    while (trim & TRIM_START && (k = space_at(s, len))) {
        s += k;
        len -= k;
    }
    while (trim & TRIM_END && len) {
        for (k = 1; k <= 3 && k <= len && space_at(s + len - k, k) != k; k++)
            continue;
        if (k > 3 || k > len)
            break;
        len -= k;
    }
    put(r, s, len, false);
}

static bool is_blank(const struct engine_text *c)
{
    size_t i = 0, k;
    while (i < c->len && (k = space_at(c->s + i, c->len - i)))
        i += k;
    return i == c->len;
}

/* ---- roles and their order ------------------------------------------------------------------------------ */

static bool role_is(const struct engine_message *m, const char *role)
{
    return m->role.len == strlen(role) && !memcmp(m->role.s, role, m->role.len);
}

static int known_roles(const struct render *r, struct skv_error *err)
{
    for (int i = 0; i < r->n; i++)
        if (!role_is(&r->msg[i], "system") && !role_is(&r->msg[i], "user") && !role_is(&r->msg[i], "assistant"))
            return skv_fail(err, SKV_BAD_REQUEST,
                            "messages[%d]: the model's chat template has no such role (system, user and assistant "
                            "are possible)",
                            i);
    return 0;
}

static int possible_roles(const struct render *r, struct skv_error *err)
{
    return r->t->any_role && !r->t->asks_roles ? 0 : known_roles(r, err);
}

/* An optional system message, then user and assistant in turn; returns the index of the first user message or -1. */
static int alternating(const struct render *r, struct skv_error *err)
{
    if (known_roles(r, err))
        return -1;
    int from = role_is(&r->msg[0], "system");
    for (int i = from; i < r->n; i++)
        if (!role_is(&r->msg[i], (i - from) % 2 ? "assistant" : "user"))
            return skv_fail(err, SKV_BAD_REQUEST,
                            "messages[%d]: this model's chats are a system message (or none), then user and "
                            "assistant in turn",
                            i);
    if (from == r->n)
        return skv_fail(err, SKV_BAD_REQUEST, "messages: this model needs a user message beside the system's");
    return from;
}

/* Flags of the i-th message's pieces, in order. The system turn is what leads. */
static void at_message(struct render *r, int i)
{
    r->leading = r->leading && role_is(&r->msg[i], "system");
    r->system = r->leading;
    r->last = i == r->n - 1;
}

static void after_messages(struct render *r)
{
    r->system = r->last = false;
}

/* ---- families ------------------------------------------------------------------------------------------- */

static int render_chatml(struct render *r, struct skv_error *err)
{
    if (possible_roles(r, err))
        return -1;
    if (r->t->default_system && !r->continued && !role_is(&r->msg[0], "system")) {
        r->system = true;
        mark(r, "<|im_start|>system\n");
        mark(r, r->t->default_system);
        mark(r, "<|im_end|>\n");
    }
    for (int i = 0; i < r->n; i++) {
        at_message(r, i);
        mark(r, "<|im_start|>");
        content(r, &r->msg[i].role, TRIM_NONE);
        mark(r, "\n");
        content(r, &r->msg[i].content, TRIM_NONE);
        mark(r, "<|im_end|>\n");
    }
    after_messages(r);
    if (r->generate)
        mark(r, "<|im_start|>assistant\n");
    return 0;
}

static int render_llama3(struct render *r, struct skv_error *err)
{
    if (possible_roles(r, err))
        return -1;
    const char *preface = r->continued ? NULL : r->t->preface;
    if (preface && !role_is(&r->msg[0], "system")) {
        r->system = true;
        mark(r, "<|start_header_id|>system<|end_header_id|>\n\n");
        mark(r, preface);
        mark(r, "<|eot_id|>");
    }
    for (int i = 0; i < r->n; i++) {
        at_message(r, i);
        mark(r, "<|start_header_id|>");
        content(r, &r->msg[i].role, TRIM_NONE);
        mark(r, "<|end_header_id|>\n\n");
        if (preface && i == 0 && r->system)
            mark(r, preface);
        content(r, &r->msg[i].content, TRIM);
        mark(r, "<|eot_id|>");
    }
    after_messages(r);
    if (r->generate)
        mark(r, "<|start_header_id|>assistant<|end_header_id|>\n\n");
    return 0;
}

static int render_llama2(struct render *r, struct skv_error *err)
{
    int from = alternating(r, err);
    if (from < 0)
        return -1;
    for (int i = from; i < r->n; i++) {
        at_message(r, i);
        if (role_is(&r->msg[i], "assistant")) {
            mark(r, " ");
            content(r, &r->msg[i].content, TRIM);
            mark(r, " ");
            mark(r, r->t->eos);
            continue;
        }
        bool with_system = from && i == from;
        r->system = with_system && !r->continued;
        mark(r, r->t->bos); /* each user turn begins a new sequence */
        mark(r, "[INST] ");
        if (with_system) {
            mark(r, "<<SYS>>\n");
            content(r, &r->msg[0].content, TRIM_NONE);
            /* the whole is trimmed, so before a blank message the newlines go too */
            mark(r, is_blank(&r->msg[i].content) ? "\n<</SYS>>" : "\n<</SYS>>\n\n");
        }
        r->system = false;
        content(r, &r->msg[i].content, with_system && !is_blank(&r->msg[i].content) ? TRIM_END : TRIM);
        mark(r, " [/INST]");
    }
    after_messages(r);
    return 0;
}

static int render_mistral(struct render *r, struct skv_error *err)
{
    const struct chat_template *t = r->t;
    int from = alternating(r, err);
    if (from < 0)
        return -1;
    for (int i = from; i < r->n; i++) {
        at_message(r, i);
        if (role_is(&r->msg[i], "assistant")) {
            mark(r, t->answer_blank ? " " : "");
            content(r, &r->msg[i].content, t->answer_trim ? TRIM : TRIM_NONE);
            mark(r, t->eos);
            mark(r, t->eos_blank ? " " : "");
            continue;
        }
        bool with_system = from && (t->system_last ? i == r->n - 1 : i == from);
        r->system = with_system && i == from && !r->continued;
        mark(r, t->open);
        if (with_system) {
            content(r, &r->msg[0].content, TRIM_NONE);
            mark(r, "\n\n");
        }
        r->system = false;
        content(r, &r->msg[i].content, TRIM_NONE);
        mark(r, t->close);
    }
    after_messages(r);
    return 0;
}

static int render_gemma(struct render *r, struct skv_error *err)
{
    int from = alternating(r, err);
    if (from < 0)
        return -1;
    for (int i = from; i < r->n; i++) {
        at_message(r, i);
        bool with_system = from && i == from;
        r->system = with_system && !r->continued;
        mark(r, role_is(&r->msg[i], "user") ? "<start_of_turn>user\n" : "<start_of_turn>model\n");
        if (with_system) {
            content(r, &r->msg[0].content, TRIM_NONE);
            mark(r, "\n\n");
        }
        r->system = false;
        content(r, &r->msg[i].content, TRIM);
        mark(r, "<end_of_turn>\n");
    }
    after_messages(r);
    if (r->generate)
        mark(r, "<start_of_turn>model\n");
    return 0;
}

/* <|role|> newline content end: zephyr and phi3. */
static int render_roles(struct render *r, const char *end, struct skv_error *err)
{
    const struct chat_template *t = r->t;
    if (known_roles(r, err))
        return -1;
    for (int i = 0; i < r->n; i++) {
        at_message(r, i);
        if (t->skip_empty_system && role_is(&r->msg[i], "system") && r->msg[i].content.len == 0)
            continue;
        if (!t->user_opens || !role_is(&r->msg[i], "assistant")) {
            mark(r, "<|");
            content(r, &r->msg[i].role, TRIM_NONE);
            mark(r, "|>\n");
        }
        content(r, &r->msg[i].content, TRIM_NONE);
        mark(r, end);
        mark(r, "\n");
        if (t->user_opens && role_is(&r->msg[i], "user"))
            mark(r, "<|assistant|>\n");
    }
    after_messages(r);
    if (r->generate && !t->user_opens)
        mark(r, "<|assistant|>\n");
    else if (t->eos_at_end && !t->user_opens)
        mark(r, t->eos);
    return 0;
}

static int render_zephyr(struct render *r, struct skv_error *err)
{
    return render_roles(r, r->t->eos, err);
}

static int render_phi3(struct render *r, struct skv_error *err)
{
    return render_roles(r, "<|end|>", err);
}

static const struct {
    const char *name;
    int (*render)(struct render *r, struct skv_error *err);
    const char *bos, *eos; /* where the file does not say */
    bool has_bos;
    /* What closes an answer's turn before the next one: text, EOS (before the text after it). */
    const char *close_before, *close_after;
    bool close_eos;
} families[CHAT_FAMILIES] = {
    [CHAT_CHATML] = { "chatml", render_chatml, "", "<|im_end|>", false, "<|im_end|>\n", "", false },
    [CHAT_LLAMA2] = { "llama2", render_llama2, "<s>", "</s>", true, " ", "", true },
    [CHAT_LLAMA3] = { "llama3", render_llama3, "<|begin_of_text|>", "<|eot_id|>", true, "<|eot_id|>", "", false },
    [CHAT_MISTRAL] = { "mistral", render_mistral, "<s>", "</s>", true, "", "", true },
    [CHAT_GEMMA] = { "gemma", render_gemma, "<bos>", "<eos>", true, "<end_of_turn>\n", "", false },
    [CHAT_ZEPHYR] = { "zephyr", render_zephyr, "<s>", "</s>", false, "", "\n", true },
    [CHAT_PHI3] = { "phi3", render_phi3, "<s>", "<|endoftext|>", false, "<|end|>\n", "", false },
};

/* ---- life ----------------------------------------------------------------------------------------------- */

static int family_by_name(const char *name)
{
    for (int i = 0; i < CHAT_FAMILIES; i++)
        if (!strcmp(name, families[i].name))
            return i;
    return -1;
}

static int no_family(struct skv_error *err, enum skv_code code, const char *what)
{
    char list[128] = "";
    for (int i = 0; i < CHAT_FAMILIES; i++) {
        strcat(list, i ? " " : "");
        strcat(list, families[i].name);
    }
    return skv_fail(err, code, "%s; known ones: %s", what, list);
}

/* The text of the token whose id a key gives, else `absent`; malloc'd. */
static char *token_text(const struct gguf *g, const char *key, const char *absent)
{
    struct gguf_arr tokens;
    uint32_t id;
    if (gguf_get_u32(g, key, &id, NULL) == 1 && gguf_get_arr(g, "tokenizer.ggml.tokens", GGUF_T_STR, &tokens, NULL) == 1 &&
        id < tokens.n && !memchr(tokens.str[id].s, 0, tokens.str[id].len))
        return chat_copy(tokens.str[id].s, tokens.str[id].len);
    return strdup(absent);
}

/* The family, by name or from the file; -1 with *err. *from_file: the file's template is of that family. */
static int choose(const char *name, const struct gguf_str *text, bool has_text, bool *from_file, struct skv_error *err)
{
    char what[128];
    int detected = has_text ? chat_detect(text->s, text->len) : -1;
    int family = name ? family_by_name(name) : detected;
    if (detected == CHAT_NO_MEMORY)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the chat template");
    if (family < 0 && name) {
        snprintf(what, sizeof(what), "chat template '%.40s' is not known", name);
        return no_family(err, SKV_BAD_CONFIG, what);
    }
    if (family < 0)
        return no_family(err, SKV_BAD_MODEL,
                         has_text ? "the model's chat template is none that is known (name one with --chat-template)"
                                  : "the model has no chat template (name one with --chat-template)");
    *from_file = family == detected;
    return family;
}

struct chat_template *chat_new(const struct gguf *g, const char *name, struct skv_error *err)
{
    struct gguf_str text = { 0 };
    bool from_file = false;
    int rc = gguf_get_str(g, "tokenizer.chat_template", &text, err);
    if (rc < 0)
        return NULL;
    int family = choose(name, &text, rc == 1, &from_file, err);
    if (family < 0)
        return NULL;
    struct chat_template *t = calloc(1, sizeof(*t));
    if (!t) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the chat template");
        return NULL;
    }
    t->family = (enum chat_family)family;
    t->has_bos = families[family].has_bos;
    t->any_role = true;
    t->bos = token_text(g, "tokenizer.ggml.bos_token_id", families[family].bos);
    t->eos = token_text(g, "tokenizer.ggml.eos_token_id", families[family].eos);
    t->open = strdup("[INST] ");
    t->close = strdup(" [/INST]");
    if (!t->bos || !t->eos || !t->open || !t->close || (from_file && chat_details(t, text.s, text.len))) {
        chat_free(t);
        skv_fail(err, SKV_NO_MEMORY, "no memory for the chat template");
        return NULL;
    }
    return t;
}

void chat_free(struct chat_template *t)
{
    if (!t)
        return;
    free(t->bos);
    free(t->eos);
    free(t->default_system);
    free(t->preface);
    free(t->open);
    free(t->close);
    free(t);
}

const char *chat_name(const struct chat_template *t)
{
    return families[t->family].name;
}

/* ---- rendering ------------------------------------------------------------------------------------------ */

/* Close the answer that the messages follow; or begin with BOS, where the template does. */
static void opening(struct render *r)
{
    const struct chat_template *t = r->t;
    if (r->continued) {
        mark(r, families[t->family].close_before);
        mark(r, families[t->family].close_eos ? t->eos : "");
        mark(r, families[t->family].close_after);
        if (t->family == CHAT_MISTRAL && t->eos_blank)
            mark(r, " ");
    } else if (t->has_bos && t->family != CHAT_LLAMA2) {
        /* BOS goes with the system turn if that is what comes first. */
        r->system = role_is(&r->msg[0], "system") || t->default_system || t->preface;
        mark(r, t->bos);
    }
}

int chat_render(const struct chat_template *t, const struct engine_message *msg, int n, bool add_generation_prompt,
                bool continued, struct chat_text *out, struct skv_error *err)
{
    struct render r = { .t = t, .msg = msg, .n = n, .generate = add_generation_prompt, .continued = continued, .out = out,
                        .leading = !continued };
    memset(out, 0, sizeof(*out));
    out->first = !continued;
    if (n <= 0)
        return skv_fail(err, SKV_BAD_REQUEST, "messages: there is none");
    opening(&r);
    int rc = families[t->family].render(&r, err);
    if (!rc && r.no_memory)
        rc = skv_fail(err, SKV_NO_MEMORY, "no memory to render the messages");
    if (rc)
        chat_text_free(out);
    return rc;
}

void chat_text_free(struct chat_text *c)
{
    for (int i = 0; i < c->n; i++)
        free(c->piece[i].s);
    free(c->piece);
    memset(c, 0, sizeof(*c));
}

/* ---- encoding ------------------------------------------------------------------------------------------- */

/* The control tokens in a template's piece, as marks at base + their places; returns how many (counts only if !mark). */
static size_t piece_marks(const struct tokenizer *tok, const struct chat_piece *p, size_t base, struct tok_mark *mark)
{
    size_t n = 0, pos = 0, at = 0, len;
    int32_t id = -1;
    while (p->special && pos < p->len && (len = tok_next_special(tok, p->s + pos, p->len - pos, &at, &id))) {
        if (mark)
            mark[n] = (struct tok_mark){ base + pos + at, len, id };
        pos += at + len;
        n++;
    }
    return n;
}

static void note_place(struct chat_job *job, enum chat_mark m, size_t at)
{
    if (job->at[m] == SIZE_MAX)
        job->at[m] = at;
}

int chat_job_init(struct chat_job *job, const struct tokenizer *tok, const struct chat_text *c, struct skv_error *err)
{
    size_t total = 0, n = 0, len = 0;
    memset(job, 0, sizeof(*job));
    for (int i = 0; i < c->n; i++) {
        total += c->piece[i].len;
        n += piece_marks(tok, &c->piece[i], 0, NULL);
    }
    job->text = malloc(total ? total : 1);
    job->mark = malloc((n ? n : 1) * sizeof(*job->mark));
    if (!job->text || !job->mark || n > INT32_MAX) {
        chat_job_fini(job);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a chat of %zu bytes", total);
    }
    for (int m = 0; m < CHAT_MARKS; m++)
        job->at[m] = SIZE_MAX;
    n = 0;
    for (int i = 0; i < c->n; i++) {
        const struct chat_piece *p = &c->piece[i];
        if (!p->system)
            note_place(job, CHAT_SYSTEM_TO, len);
        if (p->last_message)
            note_place(job, CHAT_LAST_FROM, len);
        else if (job->at[CHAT_LAST_FROM] != SIZE_MAX)
            note_place(job, CHAT_TAIL_FROM, len);
        n += piece_marks(tok, p, len, job->mark + n);
        memcpy(job->text + len, p->s, p->len);
        len += p->len;
    }
    for (int m = 0; m < CHAT_MARKS; m++)
        note_place(job, (enum chat_mark)m, len);
    job->tok = (struct tok_job){ .text = job->text, .len = len, .mark = job->mark, .n_mark = (int)n };
    job->bos = c->first && tok_add_bos(tok) && !(n && job->mark[0].at == 0 && job->mark[0].id == tok_bos(tok));
    return 0;
}

void chat_job_text(struct chat_job *job, char *take, size_t len, bool special)
{
    memset(job, 0, sizeof(*job));
    job->text = take;
    job->tok = (struct tok_job){ .text = take, .len = len, .special = special };
}

/* Places that encoding has reached become indices; returns the bytes to the next place. */
static size_t reach(struct chat_job *job, const struct tok_ids *out)
{
    size_t next = SIZE_MAX;
    for (int m = 0; m < CHAT_MARKS; m++) {
        if (job->set[m])
            continue;
        if (job->at[m] <= job->tok.done) {
            job->set[m] = true;
            job->index[m] = out->n;
        } else if (job->at[m] - job->tok.done < next) {
            next = job->at[m] - job->tok.done;
        }
    }
    return next;
}

static int put_bos(struct chat_job *job, const struct tokenizer *tok, struct tok_ids *out, struct skv_error *err)
{
    struct tok_mark m = { 0, 1, tok_bos(tok) };
    struct tok_job one = { .text = " ", .len = 1, .mark = &m, .n_mark = 1 };
    if (job->at[CHAT_SYSTEM_TO] == 0) { /* there is no system turn that it could belong to */
        job->set[CHAT_SYSTEM_TO] = true;
        job->index[CHAT_SYSTEM_TO] = out->n;
    }
    return tok_encode_some(tok, &one, 1, out, err) < 0 ? -1 : 0;
}

int chat_job_some(struct chat_job *job, const struct tokenizer *tok, size_t max_bytes, struct tok_ids *out,
                  struct skv_error *err)
{
    size_t from = job->tok.done;
    if (!job->begun && job->bos && put_bos(job, tok, out, err))
        return -1;
    job->begun = true;
    while (job->tok.done < job->tok.len && job->tok.done - from < max_bytes) {
        size_t most = max_bytes - (job->tok.done - from), place = reach(job, out);
        if (tok_encode_some(tok, &job->tok, place < most ? place : most, out, err) < 0)
            return -1;
    }
    reach(job, out);
    return job->tok.done >= job->tok.len;
}

void chat_job_fini(struct chat_job *job)
{
    free(job->text);
    free(job->mark);
    memset(job, 0, sizeof(*job));
}

int chat_encode(const struct tokenizer *tok, const struct chat_text *c, struct tok_ids *out, int *system_to,
                int *last_from, struct skv_error *err)
{
    struct chat_job job;
    int from = out->n;
    if (chat_job_init(&job, tok, c, err))
        return -1;
    int rc = chat_job_some(&job, tok, SIZE_MAX, out, err);
    if (rc < 0)
        out->n = from;
    if (rc > 0 && system_to)
        *system_to = job.index[CHAT_SYSTEM_TO] - from;
    if (rc > 0 && last_from)
        *last_from = job.index[CHAT_LAST_FROM] - from;
    chat_job_fini(&job);
    return rc < 0 ? -1 : 0;
}
