/* chat_detect.c - recognising a chat template's family by its marks, and reading its details.
 *
 * A template is Jinja source. Its strings, that is quoted literals inside {{ }} and {% %} and the text between the tags,
 * are what it prints; marks are looked for in them, so that a comment or a variable's name does not count.
 */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat_int.h"

/* ---- the strings of a template -------------------------------------------------------------------------- */

#define MAX_DEPTH 64

/* A block that is open: are its strings aside (printed for tools only, or never)? Is what its `else` prints? */
struct block {
    bool aside, else_aside;
};

struct strings {
    const char *begin, *p, *end;
    bool in_tag;
    struct block block[MAX_DEPTH]; /* [0]: outside of all */
    int depth;
    /* the current one */
    char *s; /* decoded, NUL-terminated, room for the whole template */
    size_t len;
    const char *before, *after; /* source around it */
    bool quoted;
};

static bool strings_init(struct strings *it, const char *s, size_t len)
{
    memset(it, 0, sizeof(*it));
    it->p = it->begin = s;
    it->end = s + len;
    it->s = malloc(len + 1);
    return it->s != NULL;
}

static const char *find(const char *p, const char *end, const char *what)
{
    size_t n = strlen(what);
    return n <= (size_t)(end - p) ? memmem(p, (size_t)(end - p), what, n) : NULL;
}

static bool ends_with(const char *from, const char *p, const char *what)
{
    size_t n = strlen(what);
    return (size_t)(p - from) >= n && !memcmp(p - n, what, n);
}

static char unescaped(char c)
{
    return (char)(c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c);
}

/* A quoted literal that begins at it->p. */
static void take_literal(struct strings *it)
{
    char quote = *it->p;
    it->before = it->p++;
    it->len = 0;
    while (it->p < it->end && *it->p != quote) {
        if (*it->p == '\\' && it->end - it->p > 1)
            it->s[it->len++] = unescaped(*++it->p);
        else
            it->s[it->len++] = *it->p;
        it->p++;
    }
    if (it->p < it->end)
        it->p++;
    it->after = it->p;
    it->quoted = true;
}

static bool at_tag(const struct strings *it)
{
    return it->end - it->p > 1 && it->p[0] == '{' && (it->p[1] == '{' || it->p[1] == '%' || it->p[1] == '#');
}

/* Text up to the next tag; false when there is none. */
static bool take_text(struct strings *it)
{
    it->before = it->p;
    it->len = 0;
    while (it->p < it->end && !at_tag(it))
        it->s[it->len++] = *it->p++;
    it->after = it->p;
    it->quoted = false;
    return it->len > 0;
}

static bool at_tag_end(const struct strings *it)
{
    return it->end - it->p > 1 && it->p[1] == '}' && (it->p[0] == '}' || it->p[0] == '%');
}

static bool word_is(const char *p, const char *end, const char *word)
{
    size_t n = strlen(word);
    return (size_t)(end - p) >= n && !memcmp(p, word, n) && ((size_t)(end - p) == n || strchr(" \n\t-%(", p[n]));
}

/* A condition on tools, which this daemon never gives, or one that cannot hold. */
static struct block block_of(const struct strings *it, const char *cond, const char *end)
{
    bool outer = it->block[it->depth].aside;
    bool tools = find(cond, end, "tool") != NULL;
    bool negated = find(cond, end, "not ") || find(cond, end, "none");
    return (struct block){ .aside = outer || tools || find(cond, end, "false == true"), .else_aside = outer || (tools && negated) };
}

/* At a tag's first byte after {%: keep account of the blocks. Deeper than MAX_DEPTH the outer block stands for the inner ones. */
static void note_block(struct strings *it)
{
    const char *p = it->p, *e = find(p, it->end, "%}");
    if (!e)
        return;
    while (p < e && (*p == '-' || *p == '+' || *p == ' ' || *p == '\n' || *p == '\t'))
        p++;
    if (word_is(p, e, "elif") && it->depth > 0 && it->depth < MAX_DEPTH) {
        it->depth--;
        it->block[it->depth + 1] = block_of(it, p, e);
        it->depth++;
    } else if (word_is(p, e, "if") || word_is(p, e, "for") || word_is(p, e, "macro")) {
        if (it->depth + 1 < MAX_DEPTH) {
            it->block[it->depth + 1] = block_of(it, p, e);
            it->block[it->depth + 1].aside |= *p == 'm';
        }
        it->depth++;
    } else if (word_is(p, e, "else") && it->depth > 0 && it->depth < MAX_DEPTH) {
        it->block[it->depth].aside = it->block[it->depth].else_aside;
    } else if ((word_is(p, e, "endif") || word_is(p, e, "endfor") || word_is(p, e, "endmacro")) && it->depth > 0) {
        it->depth--;
    }
}

static bool aside(const struct strings *it)
{
    return it->depth < MAX_DEPTH ? it->block[it->depth].aside : true;
}

static bool next_string(struct strings *it)
{
    while (it->p < it->end) {
        if (!it->in_tag && take_text(it)) {
            it->s[it->len] = '\0';
            return true;
        }
        if (!it->in_tag && it->end - it->p > 1 && it->p[1] == '#') {
            const char *e = find(it->p, it->end, "#}");
            it->p = e ? e + 2 : it->end;
        } else if (!it->in_tag) {
            bool statement = it->end - it->p > 1 && it->p[1] == '%';
            it->in_tag = true;
            it->p += it->end - it->p > 1 ? 2 : 1;
            if (statement)
                note_block(it);
        } else if (*it->p == '\'' || *it->p == '"') {
            take_literal(it);
            it->s[it->len] = '\0';
            return true;
        } else if (at_tag_end(it)) {
            it->in_tag = false;
            it->p += 2;
        } else {
            it->p++;
        }
    }
    return false;
}

/* ---- marks ---------------------------------------------------------------------------------------------- */

enum mark {
    M_IM_START = 1 << 0,
    M_IM_SEP = 1 << 1,
    M_INST = 1 << 2,
    M_SYS = 1 << 3,
    M_SYSTEM_PROMPT = 1 << 4,
    M_HEADER = 1 << 5,
    M_EOT = 1 << 6,
    M_TURN = 1 << 7,
    M_USER = 1 << 8,         /* <|user|> and a newline */
    M_ASSISTANT_NL = 1 << 9, /* <|assistant|> and a newline */
    M_END = 1 << 10,
    M_EOS_AFTER_USER = 1 << 11,
    M_ROLE_NL = 1 << 12, /* '|>' + '\n': phi3's turns by role */
    M_IM_END = 1 << 13,
    M_ENDOFTEXT = 1 << 14,
    M_MORE = 1 << 15, /* more is printed than the family's turns */
};

static const struct {
    const char *text;
    int mark;
} marks[] = {
    { "<|im_start|>", M_IM_START },     { "<|im_end|>", M_IM_END },  { "<|im_sep|>", M_IM_SEP },
    { "[INST]", M_INST },               { "<<SYS>>", M_SYS },        { "[SYSTEM_PROMPT]", M_SYSTEM_PROMPT },
    { "<|start_header_id|>", M_HEADER }, { "<|eot_id|>", M_EOT },    { "<start_of_turn>", M_TURN },
    { "<|user|>\n", M_USER },           { "<|assistant|>\n", M_ASSISTANT_NL }, { "<|end|>", M_END },
    { "|>\n", M_ROLE_NL },              { "<|endoftext|>", M_ENDOFTEXT },
};

static const char *skip_blanks(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t'))
        p++;
    return p;
}

/* Is the literal followed by + '\n' ? */
static bool then_newline(const struct strings *it)
{
    const char *p = skip_blanks(it->after, it->end);
    if (p >= it->end || *p != '+')
        return false;
    p = skip_blanks(p + 1, it->end);
    if (it->end - p < 3 || (*p != '\'' && *p != '"'))
        return false;
    return p[1] == '\n' || (p[1] == '\\' && p[2] == 'n');
}

/* <|user|>\n' + message['content'] + eos_token }} */
static bool eos_before_tag_end(const struct strings *it)
{
    const char *e = find(it->after, it->end, "}}");
    return e && find(it->after, e, "eos_token");
}

static int marks_of(const struct strings *it)
{
    int m = 0;
    for (size_t i = 0; i < sizeof(marks) / sizeof(marks[0]); i++)
        if (strstr(it->s, marks[i].text))
            m |= marks[i].mark;
    if (it->quoted && then_newline(it)) {
        if (!strcmp(it->s, "<|user|>"))
            m |= M_USER;
        if (!strcmp(it->s, "<|assistant|>"))
            m |= M_ASSISTANT_NL;
        if (!strcmp(it->s, "|>"))
            m |= M_ROLE_NL;
    }
    if (it->quoted && !strcmp(it->s, "<|user|>\n") && eos_before_tag_end(it))
        m |= M_EOS_AFTER_USER;
    return m;
}

#define MORE_BYTES 40

/* Does the string print what no family prints: a reasoning model's marks, or a text of its own that is not the default system
 * turn? What is aside does not count, nor what an exception says. */
static bool prints_more(const struct strings *it)
{
    static const char *const head[] = { "<|im_start|>system\n", "<|im_start|>system" };
    static const char raise[] = "raise_exception(";
    const char *s = it->s, *e = s + it->len, *p = it->before;
    if (aside(it))
        return false;
    if (find(s, e, "<think"))
        return true;
    while (p > it->begin && (p[-1] == ' ' || p[-1] == '\n'))
        p--;
    if (it->quoted && ends_with(it->begin, p, raise))
        return false;
    for (size_t i = 0; i < sizeof(head) / sizeof(head[0]); i++)
        if (find(s, e, head[i]) && find(s, e, "<|im_end|>"))
            return false;
    size_t own = 0; /* beside control tokens and blanks */
    while ((s = skip_blanks(s, e)) < e) {
        const char *close = e - s > 2 && s[0] == '<' && s[1] == '|' ? find(s, e, "|>") : NULL;
        own += !close;
        s = close ? close + 2 : s + 1;
    }
    return own > MORE_BYTES;
}

static int family_of(int m)
{
    if (m & M_MORE)
        return -1;
    if (m & M_IM_START)
        return m & M_IM_END && !(m & M_IM_SEP) ? CHAT_CHATML : -1;
    if (m & M_INST)
        return m & M_SYSTEM_PROMPT ? -1 : m & M_SYS ? CHAT_LLAMA2 : CHAT_MISTRAL;
    if (m & M_HEADER)
        return m & M_EOT ? CHAT_LLAMA3 : -1;
    if (m & M_TURN)
        return CHAT_GEMMA;
    if (m & M_END)
        return m & M_ASSISTANT_NL && m & (M_USER | M_ROLE_NL) ? CHAT_PHI3 : -1;
    if (m & M_EOS_AFTER_USER && m & M_ASSISTANT_NL && !(m & M_ENDOFTEXT))
        return CHAT_ZEPHYR;
    return -1;
}

int chat_detect(const char *s, size_t len)
{
    struct strings it;
    int m = 0;
    if (!strings_init(&it, s, len))
        return CHAT_NO_MEMORY;
    while (next_string(&it))
        m |= marks_of(&it) | (prints_more(&it) ? M_MORE : 0);
    free(it.s);
    /* Llama 3.1's preface wants a date, and this one's comes from somewhere else. */
    bool dated = find(s, s + len, "Cutting Knowledge Date: ") && !find(s, s + len, "set date_string = \"");
    return dated ? -1 : family_of(m);
}

/* ---- details -------------------------------------------------------------------------------------------- */

static bool has(const char *s, size_t len, const char *what)
{
    return find(s, s + len, what) != NULL;
}

char *chat_copy(const char *s, size_t len)
{
    char *copy = malloc(len + 1);

    if (copy) {
        memcpy(copy, s, len);
        copy[len] = '\0';
    }
    return copy;
}

static int set(char **dst, const char *s, size_t len)
{
    free(*dst);
    *dst = chat_copy(s, len);
    return *dst ? 0 : -1;
}

/* "<|im_start|>system\nTEXT<|im_end|>" inside one string: the system turn that is there by default. */
static int chatml_string(struct chat_template *t, const struct strings *it)
{
    static const char head[] = "<|im_start|>system\n";
    const char *p = strstr(it->s, head);
    if (!p || t->default_system)
        return 0;
    p += sizeof(head) - 1;
    const char *e = strstr(p, "<|im_end|>");
    return e && e > p ? set(&t->default_system, p, (size_t)(e - p)) : 0;
}

static int mistral_string(struct chat_template *t, const struct strings *it, const char *from)
{
    if (!it->quoted)
        return 0;
    if (strstr(it->s, "[/INST]"))
        return set(&t->close, it->s, it->len);
    if (strstr(it->s, "[INST]"))
        return set(&t->open, it->s, it->len);
    if (strcmp(it->s, " "))
        return 0;
    const char *p = skip_blanks(it->after, it->end);
    if (p < it->end && *p == '+') {
        p = skip_blanks(p + 1, it->end);
        t->answer_blank |= it->end - p >= 7 && !memcmp(p, "message", 7);
    }
    for (p = it->before; p > from && (p[-1] == ' ' || p[-1] == '+'); p--)
        continue;
    if (ends_with(from, p, "eos_token"))
        t->eos_blank = true;
    return 0;
}

/* 'Cutting Knowledge Date: X\n', 'Today Date: ' + date_string, date_string = "D": Llama 3.1's preface. */
static int llama3_preface(struct chat_template *t, const char *s, size_t len)
{
    static const char cut[] = "Cutting Knowledge Date: ", set_date[] = "set date_string = \"";
    const char *end = s + len, *a = find(s, end, cut), *d = find(s, end, set_date);
    while (d && d[sizeof(set_date) - 1] == '"')
        d = find(d + 1, end, set_date);
    if (!a || !d)
        return 0;
    a += sizeof(cut) - 1;
    d += sizeof(set_date) - 1;
    size_t an = strcspn(a, "\\\"'\n{"), dn = strcspn(d, "\"\n");
    if (an > 64 || dn > 64)
        return 0;
    size_t room = an + dn + 64;
    t->preface = malloc(room);
    if (!t->preface)
        return -1;
    snprintf(t->preface, room, "%s%.*s\nToday Date: %.*s\n\n", cut, (int)an, a, (int)dn, d);
    return 0;
}

static void mistral_flags(struct chat_template *t, const char *s, size_t len)
{
    t->system_last = has(s, len, "loop.last and system_message");
    t->answer_trim = has(s, len, "message[\"content\"]|trim") || has(s, len, "message['content']|trim") ||
                     has(s, len, "message[\"content\"] | trim") || has(s, len, "message['content'] | trim");
}

/* Which roles have turns: where each turn's header takes the message's role, any has; where the template knows of tools or
 * asks for roles by name, the three. */
static void roles_string(struct chat_template *t, const struct strings *it, const char *head)
{
    if (!it->quoted)
        return;
    if (!strcmp(it->s, "tool") || !strcmp(it->s, "user"))
        t->asks_roles = true;
    const char *p = skip_blanks(it->after, it->end);
    if (!strstr(it->s, head) || p >= it->end || (*p != '+' && *p != '~'))
        return;
    p = skip_blanks(p + 1, it->end);
    t->any_role |= it->end - p >= 7 && !memcmp(p, "message", 7);
}

int chat_details(struct chat_template *t, const char *s, size_t len)
{
    struct strings it;
    int rc = 0;
    t->any_role = false;
    t->has_bos = has(s, len, "bos_token");
    if (t->family == CHAT_MISTRAL)
        mistral_flags(t, s, len);
    if (t->family == CHAT_PHI3) {
        t->user_opens = !has(s, len, "add_generation_prompt");
        t->eos_at_end = has(s, len, "eos_token");
        t->skip_empty_system = has(s, len, "and message['content']");
    }
    if (t->family == CHAT_LLAMA3) {
        char *copy = chat_copy(s, len); /* NUL-terminated for the scan */
        rc = copy ? llama3_preface(t, copy, strlen(copy)) : -1;
        free(copy);
    }
    if (!strings_init(&it, s, len))
        return -1;
    while (!rc && next_string(&it)) {
        if (t->family == CHAT_CHATML)
            rc = chatml_string(t, &it);
        else if (t->family == CHAT_MISTRAL)
            rc = mistral_string(t, &it, s);
        roles_string(t, &it, t->family == CHAT_LLAMA3 ? "<|start_header_id|>" : "<|im_start|>");
    }
    free(it.s);
    return rc;
}
