/* tok_spm.c - "llama" kind: cutting text into words.
 *
 * SentencePiece merges over the whole text, which would make a huge text one huge word. But a merge can only make a token,
 * so where no token of the vocabulary has byte b right after byte a, no merge crosses from an a to a b, and cutting there
 * changes nothing. For real vocabularies that is nearly every blank (a blank only begins words).
 *
 * A blank is U+2581 in the vocabulary; both that and ' ' are one byte ' ' here, in tokens and in words.
 */
#include "config.h"

#include <stdlib.h>
#include <string.h>

#include "engine/tok_int.h"

static int append(struct tok_word *w, const char *s, size_t n)
{
    if (n > w->cap - w->len) {
        size_t cap = w->cap * 4;
        char *p = w->s == w->small ? malloc(cap) : realloc(w->s, cap);
        if (!p)
            return -1;
        if (w->s == w->small)
            memcpy(p, w->small, w->len);
        w->s = p;
        w->cap = cap;
    }
    memcpy(w->s + w->len, s, n);
    w->len += n;
    return 0;
}

static bool never_follows(const struct tokenizer *t, unsigned char a, unsigned char b)
{
    unsigned i = a * 256u + b;
    return !(t->follows[i >> 3] >> (i & 7) & 1);
}

int tok_spm_word(const struct tokenizer *t, const char *s, size_t len, bool lead, struct tok_word *w,
                 size_t *used)
{
    size_t i = 0;
    uint32_t cp;
    w->len = 0;
    if (lead && append(w, " ", 1))
        return -1;
    while (i < len && w->len < TOK_WORD_MAX) {
        int n = utf8_decode(s + i, len - i, &cp);
        if (n == 0) {
            if (w->len == 0)
                return 0;
            break;
        }
        const char *c = cp == 0x2581 ? " " : s + i;
        size_t c_len = cp == 0x2581 ? 1 : (size_t)n;
        if (w->len && never_follows(t, (unsigned char)w->s[w->len - 1], (unsigned char)*c))
            break;
        if (append(w, c, c_len))
            return -1;
        i += (size_t)n;
    }
    *used = i;
    return 1;
}
