/* tok_pre.c - "gpt2" kind: cutting text into the words that are merged one by one.
 *
 * The patterns are published with the models (tokenizer.json); here each is a small matcher, because a general regex
 * engine is several times slower than everything else in the tokenizer and wants writable code pages for its JIT.
 * tests/test_tokenizer.c compares them with splits that Hugging Face tokenizers made.
 *
 * gpt-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * smollm   each \p{N} alone first; what lies between, by the gpt-2 pattern
 * llama3   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
 *          |\s*[\r\n]+|\s+(?!\S)|\s+
 * qwen2    as llama3 with \p{N} in place of \p{N}{1,3}
 */
#include "config.h"

#include <string.h>

#include "engine/tok_int.h"

static bool in_ranges(const struct tok_range *r, int n, uint32_t cp)
{
    int lo = 0, hi = n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (cp > r[mid].last)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < n && cp >= r[lo].first;
}

static void mark(uint8_t *bmp, const struct tok_range *r, int n, enum tok_class c)
{
    for (int i = 0; i < n && r[i].first < 65536; i++)
        for (uint32_t cp = r[i].first; cp <= r[i].last && cp < 65536;) {
            if ((cp & 3) == 0 && cp + 3 <= r[i].last) { /* four at once: most ranges are long */
                bmp[cp >> 2] = (uint8_t)(c * 0x55);
                cp += 4;
            } else {
                bmp[cp >> 2] |= (uint8_t)(c << (2 * (cp & 3)));
                cp++;
            }
        }
}

void tok_classes_init(uint8_t *bmp)
{
    mark(bmp, tok_letter, tok_letter_n, TOK_C_LETTER);
    mark(bmp, tok_number, tok_number_n, TOK_C_NUMBER);
    mark(bmp, tok_space, tok_space_n, TOK_C_SPACE);
}

enum tok_class tok_class_of(const struct tokenizer *t, uint32_t cp)
{
    if (cp < 65536)
        return (enum tok_class)(t->bmp[cp >> 2] >> (2 * (cp & 3)) & 3);
    if (in_ranges(tok_letter, tok_letter_n, cp))
        return TOK_C_LETTER;
    return in_ranges(tok_number, tok_number_n, cp) ? TOK_C_NUMBER : TOK_C_OTHER; /* no spaces up there */
}

/* A place in the text. */
struct at {
    const struct tokenizer *t;
    const char *p, *end;
};

static inline enum tok_class class_at(const struct at *a, int *n)
{
    uint32_t cp;
    if (a->p >= a->end)
        return *n = 0, TOK_C_END;
    cp = (unsigned char)*a->p;
    *n = 1;
    if (cp >= 0x80) {
        *n = utf8_decode(a->p, (size_t)(a->end - a->p), &cp);
        if (*n == 0)
            return TOK_C_BAD;
    }
    return tok_class_of(a->t, cp);
}

/* Go past at most `most` characters of class c. */
static inline void skip(struct at *a, enum tok_class c, size_t most)
{
    int n;
    while (most-- && class_at(a, &n) == c)
        a->p += n;
}

/* Length of 's 't 're 've 'm 'll 'd at a->p, else 0. fold: letters of any case, the long s (U+017F) too. */
static size_t contraction(const struct at *a, bool fold)
{
    size_t left = (size_t)(a->end - a->p);
    if (left < 2 || a->p[0] != '\'')
        return 0;
    unsigned char c = (unsigned char)a->p[1], d = left > 2 ? (unsigned char)a->p[2] : 0;
    if (fold) {
        if (c == 0xc5 && d == 0xbf)
            return 3;
        if (c >= 'A' && c <= 'Z')
            c |= 0x20;
        if (d >= 'A' && d <= 'Z')
            d |= 0x20;
    }
    if (c == 's' || c == 't' || c == 'm' || c == 'd')
        return 2;
    if ((c == 'r' && d == 'e') || (c == 'v' && d == 'e') || (c == 'l' && d == 'l'))
        return 3;
    return 0;
}

/* \s+(?!\S)|\s+ : blanks up to the last before something else, which belongs to what follows; all of them at the end.
 * stop: this class counts as the end. */
static size_t blanks(struct at a, enum tok_class stop)
{
    const char *from = a.p, *last = a.p;
    enum tok_class c;
    int n;
    while ((c = class_at(&a, &n)) == TOK_C_SPACE) {
        last = a.p;
        a.p += n;
    }
    if (c == TOK_C_END || c == stop || last == from)
        return (size_t)(a.p - from);
    return (size_t)(last - from);
}

static size_t word_gpt2(struct at a, bool digits_apart)
{
    const char *from = a.p;
    int n;
    enum tok_class c = class_at(&a, &n);
    if (c == TOK_C_BAD)
        return 0;
    if (c == TOK_C_NUMBER && digits_apart)
        return (size_t)n;
    size_t apostrophe = contraction(&a, false);
    if (apostrophe)
        return apostrophe;
    if (*from == ' ') {
        a.p++;
        c = class_at(&a, &n);
    }
    if (c == TOK_C_LETTER || c == TOK_C_OTHER || (c == TOK_C_NUMBER && !digits_apart)) {
        skip(&a, c, SIZE_MAX);
        return (size_t)(a.p - from);
    }
    a.p = from;
    return blanks(a, digits_apart ? TOK_C_NUMBER : TOK_C_END);
}

static bool line_end(const struct at *a)
{
    return a->p < a->end && (*a->p == '\r' || *a->p == '\n');
}

static size_t word_llama3(struct at a, size_t digits)
{
    const char *from = a.p, *newline = NULL;
    int n;
    enum tok_class c = class_at(&a, &n);
    if (c == TOK_C_BAD)
        return 0;
    size_t apostrophe = contraction(&a, true);
    if (apostrophe)
        return apostrophe;
    if (c == TOK_C_NUMBER) {
        skip(&a, c, digits);
        return (size_t)(a.p - from);
    }
    if (c != TOK_C_LETTER && !line_end(&a)) {
        struct at b = { a.t, a.p + n, a.end };
        int m;
        if (class_at(&b, &m) == TOK_C_LETTER)
            a.p = b.p, c = TOK_C_LETTER;
    }
    if (c == TOK_C_LETTER) {
        skip(&a, c, SIZE_MAX);
        return (size_t)(a.p - from);
    }
    if (*from == ' ') {
        a.p++;
        c = class_at(&a, &n);
    }
    if (c == TOK_C_OTHER) {
        skip(&a, c, SIZE_MAX);
        while (line_end(&a))
            a.p++;
        return (size_t)(a.p - from);
    }
    for (a.p = from; class_at(&a, &n) == TOK_C_SPACE; a.p += n)
        if (line_end(&a))
            newline = a.p;
    if (newline)
        return (size_t)(newline + 1 - from);
    a.p = from;
    return blanks(a, TOK_C_END);
}

size_t tok_pre_word(const struct tokenizer *t, const char *s, size_t len)
{
    if (len > TOK_WORD_MAX)
        len = utf8_whole(s, TOK_WORD_MAX);
    struct at a = { t, s, s + len };
    switch (t->pre) {
    case TOK_PRE_LLAMA3:
        return word_llama3(a, 3);
    case TOK_PRE_QWEN2:
        return word_llama3(a, 1);
    case TOK_PRE_SMOLLM:
        return word_gpt2(a, true);
    default:
        return word_gpt2(a, false);
    }
}
