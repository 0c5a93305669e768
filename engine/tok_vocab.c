/* tok_vocab.c - the vocabulary, merges and special tokens out of the file, checked, and the tables made of them. */
#include "config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tok_int.h"

#define MAX_TOKENS (1 << 24)

/* What is read of the file before tables are made of it. */
struct source {
    const struct gguf *g;
    struct gguf_arr tokens, types, scores, merges;
    bool has_types, has_scores;
};

static int bad(struct skv_error *err, const char *what)
{
    return skv_fail(err, SKV_BAD_MODEL, "tokenizer: %s", what);
}

static int no_memory(struct skv_error *err)
{
    return skv_fail(err, SKV_NO_MEMORY, "no memory for the tokenizer's tables");
}

static bool str_is(struct gguf_str s, const char *lit)
{
    return s.len == strlen(lit) && !memcmp(s.s, lit, s.len);
}

/* ---- which kind ----------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    enum tok_pre pre;
} pres[] = {
    { "gpt-2", TOK_PRE_GPT2 },        { "default", TOK_PRE_GPT2 },   { "mpt", TOK_PRE_GPT2 },
    { "olmo", TOK_PRE_GPT2 },         { "phi-2", TOK_PRE_GPT2 },     { "smollm", TOK_PRE_SMOLLM },
    { "starcoder", TOK_PRE_SMOLLM },  { "refact", TOK_PRE_SMOLLM },  { "llama-bpe", TOK_PRE_LLAMA3 },
    { "llama3", TOK_PRE_LLAMA3 },     { "llama-v3", TOK_PRE_LLAMA3 }, { "qwen2", TOK_PRE_QWEN2 },
    { "deepseek-r1-qwen", TOK_PRE_QWEN2 },
};

static int read_kind(struct tokenizer *t, const struct gguf *g, struct skv_error *err)
{
    struct gguf_str model, pre;
    int rc = gguf_get_str(g, "tokenizer.ggml.model", &model, err);
    if (rc < 0)
        return -1;
    if (rc == 0)
        return bad(err, "the file has no tokenizer.ggml.model");
    if (str_is(model, "llama")) {
        t->kind = TOK_SPM;
        return 0;
    }
    if (!str_is(model, "gpt2"))
        return skv_fail(err, SKV_BAD_MODEL, "tokenizer: kind '%.*s' is not supported (gpt2 and llama are)",
                        (int)utf8_whole(model.s, model.len > 60 ? 60 : model.len), model.s);
    t->kind = TOK_GPT2;
    rc = gguf_get_str(g, "tokenizer.ggml.pre", &pre, err);
    if (rc < 0)
        return -1;
    for (size_t i = 0; i < sizeof(pres) / sizeof(pres[0]); i++)
        if (rc == 0 || str_is(pre, pres[i].name)) {
            t->pre = rc == 0 ? TOK_PRE_GPT2 : pres[i].pre;
            t->ignore_merges = t->pre == TOK_PRE_LLAMA3;
            return 0;
        }
    return skv_fail(err, SKV_BAD_MODEL,
                    "tokenizer: pre-tokenizer '%.*s' is not supported (smollm, llama-bpe, qwen2, gpt-2 "
                    "and default are)",
                    (int)utf8_whole(pre.s, pre.len > 60 ? 60 : pre.len), pre.s);
}

static int read_arrays(struct tokenizer *t, struct source *s, struct skv_error *err)
{
    int rc = gguf_get_arr(s->g, "tokenizer.ggml.tokens", GGUF_T_STR, &s->tokens, err);
    if (rc < 0)
        return -1;
    if (rc == 0 || s->tokens.n == 0)
        return bad(err, "the file has no tokenizer.ggml.tokens");
    if (s->tokens.n > MAX_TOKENS)
        return bad(err, "tokenizer.ggml.tokens has more than 2^24 entries");
    t->n = (int)s->tokens.n;

    rc = gguf_get_arr(s->g, "tokenizer.ggml.token_type", GGUF_T_I32, &s->types, err);
    if (rc < 0)
        return -1;
    s->has_types = rc == 1;
    if (s->has_types && s->types.n != s->tokens.n)
        return skv_fail(err, SKV_BAD_MODEL, "tokenizer: %zu token types for %zu tokens", s->types.n,
                        s->tokens.n);
    rc = gguf_get_arr(s->g, "tokenizer.ggml.scores", GGUF_T_F32, &s->scores, err);
    if (rc < 0)
        return -1;
    s->has_scores = rc == 1;
    if (s->has_scores && s->scores.n != s->tokens.n)
        return skv_fail(err, SKV_BAD_MODEL, "tokenizer: %zu scores for %zu tokens", s->scores.n,
                        s->tokens.n);
    if (t->kind == TOK_SPM && !s->has_scores)
        return bad(err, "kind llama needs tokenizer.ggml.scores");
    if (t->kind == TOK_GPT2) {
        rc = gguf_get_arr(s->g, "tokenizer.ggml.merges", GGUF_T_STR, &s->merges, err);
        if (rc < 0)
            return -1;
        if (rc == 0)
            return bad(err, "kind gpt2 needs tokenizer.ggml.merges");
    }
    return 0;
}

/* The vocabulary's size is also a hyperparameter. */
static int check_vocab_size(const struct tokenizer *t, const struct gguf *g, struct skv_error *err)
{
    struct gguf_str arch;
    char key[96];
    uint32_t n;
    int rc = gguf_get_str(g, "general.architecture", &arch, err);
    if (rc <= 0)
        return rc;
    snprintf(key, sizeof(key), "%.*s.vocab_size", (int)(arch.len > 64 ? 64 : arch.len), arch.s);
    rc = gguf_get_u32(g, key, &n, err);
    if (rc == 1 && n != (uint32_t)t->n)
        return skv_fail(err, SKV_BAD_MODEL, "tokenizer: %d tokens, but %s is %u", t->n, key, n);
    return rc < 0 ? -1 : 0;
}

/* ---- tokens as bytes ------------------------------------------------------------------------------------ */

/* GPT-2's table: each byte is written as a visible character. Printable Latin-1 stands for itself, the other 68 bytes,
 * in order, for U+0100.. */
static void byte_chars(int16_t *byte_of) /* [324] code point -> byte, -1 */
{
    int next = 256;
    for (int i = 0; i < 324; i++)
        byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool visible = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        byte_of[visible ? b : next++] = (int16_t)b;
    }
}

/* The bytes that s stands for into dst (never more than s.len); -1 if a character is none of the table's. */
static ptrdiff_t gpt2_bytes(const int16_t *byte_of, const char *s, size_t len, char *dst)
{
    size_t o = 0;
    uint32_t cp;
    for (size_t i = 0; i < len;) {
        int n = utf8_decode(s + i, len - i, &cp);
        if (n == 0 || cp >= 324 || byte_of[cp] < 0)
            return -1;
        dst[o++] = (char)byte_of[cp];
        i += (size_t)n;
    }
    return (ptrdiff_t)o;
}

/* U+2581 to a blank. */
static size_t spm_bytes(const char *s, size_t len, char *dst)
{
    size_t o = 0;
    for (size_t i = 0; i < len;) {
        if (len - i >= 3 && !memcmp(s + i, "\xe2\x96\x81", 3)) {
            dst[o++] = ' ';
            i += 3;
        } else {
            dst[o++] = s[i++];
        }
    }
    return o;
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* <0x0A>: its byte, or -1. */
static int byte_token(struct gguf_str s)
{
    if (s.len != 6 || memcmp(s.s, "<0x", 3) || s.s[5] != '>' || hex(s.s[3]) < 0 || hex(s.s[4]) < 0)
        return -1;
    return hex(s.s[3]) << 4 | hex(s.s[4]);
}

static int fill_bytes(struct tokenizer *t, const struct source *s, struct skv_error *err)
{
    int16_t byte_of[324];
    uint64_t total = 0;
    for (int i = 0; i < t->n; i++)
        total += s->tokens.str[i].len;
    if (total > UINT32_MAX)
        return bad(err, "the tokens' texts are longer than 4 GiB");
    t->bytes = malloc(total ? (size_t)total : 1);
    if (!t->bytes)
        return no_memory(err);
    byte_chars(byte_of);
    uint32_t o = 0;
    for (int i = 0; i < t->n; i++) {
        struct gguf_str tok = s->tokens.str[i];
        char *dst = t->bytes + o;
        bool literal = t->type[i] == TOK_T_CONTROL || t->type[i] == TOK_T_USER || t->type[i] == TOK_T_UNKNOWN;
        ptrdiff_t n = -1;
        t->off[i] = o;
        if (t->type[i] == TOK_T_BYTE && byte_token(tok) < 0)
            return skv_fail(err, SKV_BAD_MODEL, "tokenizer: token %d is a byte token but not like <0x0A>", i);
        if (t->type[i] == TOK_T_BYTE)
            dst[0] = (char)byte_token(tok), n = 1;
        else if (!literal && t->kind == TOK_GPT2)
            n = gpt2_bytes(byte_of, tok.s, tok.len, dst);
        else if (!literal)
            n = (ptrdiff_t)spm_bytes(tok.s, tok.len, dst);
        if (n < 0) {
            memcpy(dst, tok.s, tok.len);
            n = (ptrdiff_t)tok.len;
        }
        o += (uint32_t)n;
    }
    t->off[t->n] = o;
    return 0;
}

static int fill_types(struct tokenizer *t, const struct source *s, struct skv_error *err)
{
    for (int i = 0; i < t->n; i++) {
        int32_t type = s->has_types ? gguf_arr_i32(&s->types, (size_t)i) : TOK_T_NORMAL;
        if (type < 0 || type > TOK_T_BYTE)
            return skv_fail(err, SKV_BAD_MODEL, "tokenizer: token %d has the unknown type %d", i, type);
        t->type[i] = type ? (uint8_t)type : TOK_T_NORMAL;
        if (t->kind == TOK_SPM) {
            float f = gguf_arr_f32(&s->scores, (size_t)i) + 0.0f; /* -0 becomes 0 */
            uint32_t u;
            if (isnan(f))
                return skv_fail(err, SKV_BAD_MODEL, "tokenizer: the score of token %d is no number", i);
            memcpy(&u, &f, 4);
            t->key[i] = ~(u >> 31 ? ~u : u | 0x80000000u); /* order of floats, the best first */
        }
    }
    return 0;
}

/* ---- text -> id ----------------------------------------------------------------------------------------- */

static inline uint64_t hash(const char *s, size_t len)
{
    uint64_t h = len * 0x9e3779b97f4a7c15u, w = 0;
    for (; len >= 8; s += 8, len -= 8) {
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    w = 0;
    if (len >= 4) {
        uint32_t a, b;
        memcpy(&a, s, 4);
        memcpy(&b, s + len - 4, 4);
        w = (uint64_t)a << 32 | b;
    } else if (len) {
        w = (uint64_t)(unsigned char)s[0] << 16 | (uint64_t)(unsigned char)s[len / 2] << 8 |
            (unsigned char)s[len - 1];
    }
    h = (h ^ w) * 0xff51afd7ed558ccdu;
    return h ^ h >> 29;
}

int32_t tok_lookup(const struct tokenizer *t, const char *s, size_t len)
{
    uint64_t h = hash(s, len);
    uint32_t tag = (uint32_t)(h >> 32);
    for (uint32_t i = (uint32_t)h;; i++) {
        const struct tok_slot *p = &t->slot[i & t->slot_mask];
        if (!p->id1)
            return -1;
        int32_t id = (int32_t)(p->id1 - 1);
        if (p->tag == tag && tok_len(t, id) == len && !memcmp(t->bytes + t->off[id], s, len))
            return id;
    }
}

static void insert(struct tokenizer *t, int32_t id)
{
    const char *s = t->bytes + t->off[id];
    size_t len = tok_len(t, id);
    if (len == 0 || tok_lookup(t, s, len) >= 0)
        return; /* of two with the same text the first counts */
    uint64_t h = hash(s, len);
    uint32_t i = (uint32_t)h;
    while (t->slot[i & t->slot_mask].id1)
        i++;
    t->slot[i & t->slot_mask] = (struct tok_slot){ (uint32_t)id + 1, (uint32_t)(h >> 32) };
}

static uint32_t table_size(size_t n)
{
    uint32_t size = 16;
    while (size < 2 * n)
        size *= 2;
    return size;
}

static int fill_lookup(struct tokenizer *t, struct skv_error *err)
{
    uint32_t size = table_size((size_t)t->n);
    t->slot = calloc(size, sizeof(*t->slot));
    if (!t->slot)
        return no_memory(err);
    t->slot_mask = size - 1;
    for (int i = 0; i < t->n; i++)
        if (t->type[i] == TOK_T_NORMAL || t->type[i] == TOK_T_UNUSED)
            insert(t, i);
    for (int i = 0; i < t->n; i++)
        if (t->type[i] == TOK_T_USER)
            insert(t, i);
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        t->byte_id[b] = t->kind == TOK_GPT2 ? tok_lookup(t, &c, 1) : -1;
    }
    for (int i = 0; i < t->n; i++)
        if (t->type[i] == TOK_T_BYTE)
            t->byte_id[(unsigned char)t->bytes[t->off[i]]] = i;
    return 0;
}

static int fill_follows(struct tokenizer *t, struct skv_error *err)
{
    t->follows = calloc(65536 / 8, 1);
    if (!t->follows)
        return no_memory(err);
    for (int i = 0; i < t->n; i++) {
        if (t->type[i] == TOK_T_CONTROL || t->type[i] == TOK_T_UNKNOWN)
            continue;
        for (uint32_t k = t->off[i] + 1; k < t->off[i + 1]; k++) {
            unsigned pair = (unsigned char)t->bytes[k - 1] * 256u + (unsigned char)t->bytes[k];
            t->follows[pair >> 3] |= (uint8_t)(1 << (pair & 7));
        }
    }
    return 0;
}

/* ---- merges --------------------------------------------------------------------------------------------- */

static inline uint32_t mix(uint64_t key)
{
    key *= 0x9e3779b97f4a7c15u;
    return (uint32_t)(key >> 32) ^ (uint32_t)(key >> 52);
}

static int bad_merge(struct skv_error *err, size_t i, const char *what)
{
    return skv_fail(err, SKV_BAD_MODEL, "tokenizer: merge %zu %s", i, what);
}

/* One merge "left right": the ids of both and of what they give. buf has room for the line's bytes. */
static int read_merge(const struct tokenizer *t, const int16_t *byte_of, struct gguf_str m, size_t i,
                      char *buf, uint64_t *key, int32_t *id, struct skv_error *err)
{
    const char *blank = m.len > 1 ? memchr(m.s + 1, ' ', m.len - 1) : NULL;
    if (!blank)
        return bad_merge(err, i, "is not two tokens with a blank between");
    size_t ln = (size_t)(blank - m.s), rn = m.len - ln - 1;
    ptrdiff_t a = gpt2_bytes(byte_of, m.s, ln, buf);
    if (a < 0)
        memcpy(buf, m.s, ln), a = (ptrdiff_t)ln;
    ptrdiff_t b = gpt2_bytes(byte_of, blank + 1, rn, buf + a);
    if (b < 0)
        memcpy(buf + a, blank + 1, rn), b = (ptrdiff_t)rn;
    int32_t l = tok_lookup(t, buf, (size_t)a), r = tok_lookup(t, buf + a, (size_t)b);
    *id = tok_lookup(t, buf, (size_t)(a + b));
    if (l < 0 || r < 0 || *id < 0)
        return bad_merge(err, i, "names a token that is not in the vocabulary");
    *key = (uint64_t)(uint32_t)l << 32 | (uint32_t)r;
    return 0;
}

static int fill_merges(struct tokenizer *t, const struct source *s, struct skv_error *err)
{
    int16_t byte_of[324];
    uint32_t size = table_size(s->merges.n);
    if (s->merges.n > MAX_TOKENS)
        return bad(err, "more than 2^24 merges");
    char *buf = malloc(TOK_WORD_MAX);
    t->pair = malloc(size * sizeof(*t->pair));
    if (!t->pair || !buf) {
        free(buf);
        return no_memory(err);
    }
    t->pair_mask = size - 1;
    for (uint32_t i = 0; i < size; i++)
        t->pair[i].key = TOK_NO_PAIR;
    byte_chars(byte_of);
    for (size_t i = 0; i < s->merges.n; i++) {
        uint64_t key = 0;
        int32_t id = -1;
        int rc = s->merges.str[i].len > TOK_WORD_MAX ? bad_merge(err, i, "is longer than 64 KiB")
                                                     : read_merge(t, byte_of, s->merges.str[i], i, buf, &key, &id, err);
        if (rc) {
            free(buf);
            return -1;
        }
        uint32_t at = mix(key);
        while (t->pair[at & t->pair_mask].key != TOK_NO_PAIR && t->pair[at & t->pair_mask].key != key)
            at++;
        if (t->pair[at & t->pair_mask].key == TOK_NO_PAIR)
            t->pair[at & t->pair_mask] = (struct tok_pair){ key, (uint32_t)i, id };
    }
    free(buf);
    return 0;
}

/* ---- special tokens ------------------------------------------------------------------------------------- */

struct by_text {
    const char *s;
    size_t len;
    int32_t id;
};

static int cmp_text(const void *a, const void *b)
{
    const struct by_text *x = a, *y = b;
    int d = memcmp(x->s, y->s, x->len < y->len ? x->len : y->len);
    if (d)
        return d;
    return x->len != y->len ? (x->len > y->len) - (x->len < y->len) : (x->id > y->id) - (x->id < y->id);
}

static bool is_special(const struct tokenizer *t, int i, bool all)
{
    uint8_t type = t->type[i];
    return t->off[i] < t->off[i + 1] &&
           (type == TOK_T_USER || (all && (type == TOK_T_CONTROL || type == TOK_T_UNKNOWN)));
}

static int fill_specials(struct tokenizer *t, struct tok_specials *sp, bool all, struct skv_error *err)
{
    int n = 0;
    free(sp->id);
    memset(sp, 0, sizeof(*sp));
    for (int i = 0; i < t->n; i++)
        n += is_special(t, i, all);
    struct by_text *v = malloc((size_t)(n ? n : 1) * sizeof(*v));
    sp->id = malloc((size_t)(n ? n : 1) * sizeof(*sp->id));
    if (!v || !sp->id) {
        free(v);
        return no_memory(err);
    }
    n = 0;
    for (int i = 0; i < t->n; i++)
        if (is_special(t, i, all))
            v[n++] = (struct by_text){ t->bytes + t->off[i], tok_len(t, i), i };
    qsort(v, (size_t)n, sizeof(*v), cmp_text);
    for (int i = 0; i < n; i++) {
        if (sp->n && !cmp_text(&(struct by_text){ v[i].s, v[i].len, 0 }, &(struct by_text){ v[i - 1].s, v[i - 1].len, 0 }))
            continue;
        sp->id[sp->n++] = v[i].id;
        sp->from[(unsigned char)v[i].s[0] + 1]++;
    }
    for (int b = 0; b < 256; b++) {
        if (sp->from[b + 1])
            sp->n_first++, sp->first = (unsigned char)b;
        sp->from[b + 1] += sp->from[b];
    }
    free(v);
    return 0;
}

size_t tok_special_at(const struct tokenizer *t, const struct tok_specials *sp, const char *s, size_t len,
                      int32_t *id)
{
    /* Narrow the sorted list byte by byte; a token that ends where we are is the first of its range. */
    int lo = sp->from[(unsigned char)s[0]], hi = sp->from[(unsigned char)s[0] + 1];
    size_t found = 0;
    for (size_t k = 1; lo < hi; k++) {
        if (tok_len(t, sp->id[lo]) == k) {
            *id = sp->id[lo++];
            found = k;
        }
        if (k == len)
            break;
        unsigned char c = (unsigned char)s[k];
        int a = lo, b = hi;
        while (a < b) { /* the first with a byte >= c */
            int m = (a + b) / 2;
            if ((unsigned char)t->bytes[t->off[sp->id[m]] + k] < c)
                a = m + 1;
            else
                b = m;
        }
        lo = a;
        b = hi;
        while (a < b) { /* the first with a byte > c */
            int m = (a + b) / 2;
            if ((unsigned char)t->bytes[t->off[sp->id[m]] + k] <= c)
                a = m + 1;
            else
                b = m;
        }
        hi = a;
    }
    return found;
}

/* Tokens that end a generation besides eos, by their published texts. */
static const char *const ends[] = { "<|im_end|>",    "<|eot_id|>",    "<|eom_id|>", "<|end|>",
                                    "<|endoftext|>", "<end_of_turn>", "<EOT>",      "<|end_of_text|>", "</s>" };

static int32_t special_named(const struct tokenizer *t, const char *s)
{
    int32_t id = -1;
    return tok_special_at(t, &t->all, s, strlen(s), &id) == strlen(s) ? id : -1;
}

static int special_id(const struct tokenizer *t, const struct gguf *g, const char *name, int32_t absent,
                      int32_t *out, struct skv_error *err)
{
    char key[64];
    uint32_t v;
    snprintf(key, sizeof(key), "tokenizer.ggml.%s_token_id", name);
    int rc = gguf_get_u32(g, key, &v, err);
    if (rc < 0)
        return -1;
    if (rc == 0) {
        *out = absent < t->n ? absent : -1;
        return 0;
    }
    if (v == UINT32_MAX) { /* how some converters write "none" */
        *out = -1;
        return 0;
    }
    if (v >= (uint32_t)t->n)
        return skv_fail(err, SKV_BAD_MODEL, "tokenizer: %s is %u, but there are %d tokens", key, v, t->n);
    *out = (int32_t)v;
    return 0;
}

static int read_special_ids(struct tokenizer *t, const struct gguf *g, struct skv_error *err)
{
    bool spm = t->kind == TOK_SPM;
    int32_t eot, eom;
    if (special_id(t, g, "bos", spm ? 1 : -1, &t->bos, err) || special_id(t, g, "eos", spm ? 2 : -1, &t->eos, err) ||
        special_id(t, g, "unknown", spm ? 0 : -1, &t->unk, err) || special_id(t, g, "eot", -1, &eot, err) ||
        special_id(t, g, "eom", -1, &eom, err))
        return -1;
    t->add_bos = spm || t->pre == TOK_PRE_LLAMA3;
    t->add_space = spm;
    if (gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &t->add_bos, err) < 0 ||
        gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &t->add_space, err) < 0)
        return -1;
    if (t->bos < 0)
        t->add_bos = false;
    int32_t end[] = { t->eos, eot, eom };
    for (size_t i = 0; i < sizeof(end) / sizeof(end[0]); i++)
        if (end[i] >= 0)
            t->eog[end[i]] = 1;
    for (size_t i = 0; i < sizeof(ends) / sizeof(ends[0]); i++) {
        int32_t id = special_named(t, ends[i]);
        if (id >= 0 && t->type[id] != TOK_T_UNKNOWN)
            t->eog[id] = 1;
    }
    return 0;
}

/* A token that begins or ends a sequence is a control token, whatever type a converter gave it: as a user-defined one it
 * would be parsed out of every plain text, as a normal one never. */
static int retype(struct tokenizer *t, struct skv_error *err)
{
    bool again = false;
    for (int i = 0; i < t->n; i++) {
        const char *s = t->bytes + t->off[i];
        bool marker = tok_len(t, i) > 2 && *s == '<' && s[tok_len(t, i) - 1] == '>';
        if (!(t->eog[i] || i == t->bos) || t->type[i] == TOK_T_CONTROL || t->type[i] == TOK_T_UNKNOWN || !marker)
            continue;
        t->type[i] = TOK_T_CONTROL;
        again = true;
    }
    return again ? fill_specials(t, &t->all, true, err) : 0;
}

/* Phi-3's published tokenizer takes the blanks after a special token with it, all but those after these three. The file
 * format has no place to say so: its vocabulary is known by the spare ones. */
static void read_blanks(struct tokenizer *t)
{
    t->takes_blanks = t->kind == TOK_SPM && special_named(t, "<|placeholder1|>") >= 0 && special_named(t, "<|end|>") >= 0;
    t->keeps_blanks[0] = t->bos;
    t->keeps_blanks[1] = t->unk;
    t->keeps_blanks[2] = special_named(t, "<|endoftext|>");
}

int tok_load(struct tokenizer *t, const struct gguf *g, struct skv_error *err)
{
    struct source s = { .g = g };
    if (read_kind(t, g, err) || read_arrays(t, &s, err) || check_vocab_size(t, g, err))
        return -1;
    size_t n = (size_t)t->n;
    t->off = malloc((n + 1) * sizeof(*t->off));
    t->type = calloc(n, 1);
    t->eog = calloc(n, 1);
    t->key = t->kind == TOK_SPM ? malloc(n * sizeof(*t->key)) : NULL;
    t->itself = calloc(n, sizeof(*t->itself));
    if (!t->off || !t->type || !t->eog || !t->itself || (t->kind == TOK_SPM && !t->key))
        return no_memory(err);
    if (fill_types(t, &s, err) || fill_bytes(t, &s, err) || fill_specials(t, &t->all, true, err) ||
        read_special_ids(t, g, err) || retype(t, err) || fill_specials(t, &t->user, false, err) || fill_lookup(t, err))
        return -1;
    read_blanks(t);
    return t->kind == TOK_GPT2 ? fill_merges(t, &s, err) : fill_follows(t, err);
}
