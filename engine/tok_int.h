/* tok_int.h - what the tokenizer's files share. Private to them (and to their tests).
 *
 * tokenizer.c  the public face: the encode loop over special tokens and words, decoding
 * tok_vocab.c  vocabulary, merges and special tokens out of the file, hash tables, all checks
 * tok_pre.c    "gpt2" kind: text -> words (the published pre-tokenizer patterns, matched by hand)
 * tok_spm.c    "llama" kind: text -> words
 * tok_bpe.c    word -> ids, both kinds
 */
#ifndef SKVD_ENGINE_TOK_INT_H
#define SKVD_ENGINE_TOK_INT_H

#include <stdatomic.h>

#include "engine/tokenizer.h"

/* A word longer than this is cut (at a character): it bounds memory and the time of one step. Real words are far below. */
#define TOK_WORD_MAX 65536

enum tok_kind { TOK_GPT2 = 0, TOK_SPM };
enum tok_pre { TOK_PRE_GPT2 = 0, TOK_PRE_SMOLLM, TOK_PRE_LLAMA3, TOK_PRE_QWEN2 };

/* Token types of the file format. */
enum tok_type {
    TOK_T_NORMAL = 1,
    TOK_T_UNKNOWN = 2,
    TOK_T_CONTROL = 3,
    TOK_T_USER = 4, /* always parsed as one token, special or not */
    TOK_T_UNUSED = 5,
    TOK_T_BYTE = 6,
};

/* Unicode classes of the patterns. BAD: not UTF-8; END: nothing left. */
enum tok_class { TOK_C_OTHER = 0, TOK_C_LETTER, TOK_C_NUMBER, TOK_C_SPACE, TOK_C_BAD, TOK_C_END };

struct tok_range {
    uint32_t first, last;
};
extern const struct tok_range tok_letter[], tok_number[], tok_space[];
extern const int tok_letter_n, tok_number_n, tok_space_n;

struct tok_slot {
    uint32_t id1; /* id + 1; 0: empty */
    uint32_t tag; /* high half of the hash */
};

struct tok_pair {
    uint64_t key; /* left id << 32 | right id; TOK_NO_PAIR: empty */
    uint32_t rank;
    int32_t id;
};
#define TOK_NO_PAIR UINT64_MAX
#define TOK_NO_RANK UINT32_MAX

/* Tokens that are parsed out of the text before it is split into words, sorted by their bytes. */
struct tok_specials {
    int32_t *id;
    int n;
    int from[257]; /* those that begin with byte b are [from[b], from[b + 1]) */
    int n_first;   /* different first bytes */
    unsigned char first;
};

struct tokenizer {
    enum tok_kind kind;
    enum tok_pre pre;
    bool ignore_merges; /* a word that is a token is that token, whatever the merges say (Llama 3) */
    bool add_bos, add_space;
    bool takes_blanks; /* special tokens take the blanks after them, but for those in keeps_blanks */
    int32_t keeps_blanks[3];
    int n;
    int32_t bos, eos, unk;
    char *bytes;   /* every token's bytes as they appear in text, joined */
    uint32_t *off; /* [n + 1] into bytes */
    uint8_t *type; /* [n] */
    uint8_t *eog;  /* [n] */
    uint32_t *key; /* [n], SPM: order of merging by score, lower first */
    int32_t byte_id[256];

    struct tok_slot *slot; /* text -> id of the tokens that text can become */
    uint32_t slot_mask;
    struct tok_pair *pair; /* GPT2: merges */
    uint32_t pair_mask;
    uint8_t *follows;        /* SPM: [65536 / 8] bit a * 256 + b: some token has byte b right after byte a */
    _Atomic uint8_t *itself; /* [n] does merging a token's own bytes give the token? 0 not known yet, 1 yes, 2 no */
    struct tok_specials user, all;
    uint8_t bmp[65536 / 4]; /* class of each code point below U+10000, 2 bits */
};

/* Length of the character at s and its code point; 0 where it is not UTF-8 (len > 0). */
int utf8_decode(const char *s, size_t len, uint32_t *cp);

/* ---- tok_vocab.c */
int tok_load(struct tokenizer *t, const struct gguf *g, struct skv_error *err);
/* The token of these bytes among those that text can become; -1: none. */
int32_t tok_lookup(const struct tokenizer *t, const char *s, size_t len);
/* Longest of the special tokens at s; its length, 0: none. */
size_t tok_special_at(const struct tokenizer *t, const struct tok_specials *sp, const char *s, size_t len,
                      int32_t *id);

/* ---- tok_pre.c */
void tok_classes_init(uint8_t *bmp);
enum tok_class tok_class_of(const struct tokenizer *t, uint32_t cp);
/* Bytes of the next word of s[0..len), len > 0; 0: s does not begin with UTF-8. */
size_t tok_pre_word(const struct tokenizer *t, const char *s, size_t len);

/* ---- tok_spm.c */
struct tok_word {
    char *s;
    size_t len, cap;
    char small[256];
};
/* The next word with its blanks as the vocabulary has them; *used = bytes of s that it took (0 is possible when
 * `lead` is set: the blank alone). Returns 1, 0 where s is not UTF-8, -1 when out of memory. */
int tok_spm_word(const struct tokenizer *t, const char *s, size_t len, bool lead, struct tok_word *w,
                 size_t *used);

/* ---- tok_bpe.c */
/* Append a word's ids. */
int tok_word_ids(const struct tokenizer *t, const char *s, size_t len, struct tok_ids *out,
                 struct skv_error *err);

static inline size_t tok_len(const struct tokenizer *t, int32_t id)
{
    return t->off[id + 1] - t->off[id];
}

#endif
