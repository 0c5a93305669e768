/* tokenizer.h - text <-> token ids, from the GGUF's own vocabulary.
 *
 * Kinds: "gpt2" (byte-level BPE; pre-tokenizers smollm, llama-bpe, qwen2, gpt-2 / default) and "llama" (SentencePiece-like
 * BPE by score with byte fallback). All functions are pure after tok_new; several threads may use one tokenizer.
 */
#ifndef SKVD_ENGINE_TOKENIZER_H
#define SKVD_ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/gguf.h"

struct tokenizer;

struct tokenizer *tok_new(const struct gguf *g, struct skv_error *err);
void tok_free(struct tokenizer *t);

int tok_vocab(const struct tokenizer *t);
int32_t tok_bos(const struct tokenizer *t); /* -1: none */
int32_t tok_eos(const struct tokenizer *t); /* -1: none */
bool tok_add_bos(const struct tokenizer *t); /* the file asks for BOS before a prompt */
bool tok_is_eog(const struct tokenizer *t, int32_t id); /* ends a generation: eos, eot, end-of-message tokens */
bool tok_is_control(const struct tokenizer *t, int32_t id);
/* The id of a token by its exact text (e.g. "<|im_end|>"), -1 if there is none. */
int32_t tok_find(const struct tokenizer *t, const char *s);

/* The first control or user-defined token's text in s: its length, *at and *id; 0: none. Of those that begin at the same
 * place the longest counts. */
size_t tok_next_special(const struct tokenizer *t, const char *s, size_t len, size_t *at, int32_t *id);

struct tok_ids {
    int32_t *id; /* malloc'd, grows */
    int n, cap;
};

/* Make room for `more` ids. 0, or -1 with *err (NO_MEMORY). */
int tok_ids_reserve(struct tok_ids *out, size_t more, struct skv_error *err);

/* Encoding in bounded pieces, so that a huge text never holds up a step: start with job = {text, len, special}, call
 * until it returns 1. special: control tokens' texts are parsed as the tokens; else they are plain text. Input that is not
 * UTF-8 is refused (BAD_REQUEST, naming the byte offset). Appends to out. -1 with *err (also NO_MEMORY). */
struct tok_mark { /* [at, at + len) of the text is the token id, whatever the tokenizer says */
    size_t at, len;
    int32_t id;
};
struct tok_job {
    const char *text;
    size_t len;
    bool special;
    const struct tok_mark *mark; /* [n_mark] ascending, apart from one another; not with special. NULL: none */
    int n_mark;
    size_t done;       /* bytes so far: progress */
    /* private, zero at first */
    bool not_first;    /* "llama" kind: the leading space was handled */
    bool searched;     /* next is known */
    size_t next, next_len; /* place and length of the next special token; next == len: none */
    int32_t next_id;
    int mark_at;
};
int tok_encode_some(const struct tokenizer *t, struct tok_job *job, size_t max_bytes, struct tok_ids *out,
                    struct skv_error *err);
/* The whole at once. */
int tok_encode(const struct tokenizer *t, const char *text, size_t len, bool special, struct tok_ids *out,
               struct skv_error *err);

/* The bytes of one token as they appear in text: *len bytes at the returned pointer (the tokenizer's memory). Control
 * tokens give their text when `special`, else nothing. Bytes may be part of a character. */
const char *tok_bytes(const struct tokenizer *t, int32_t id, bool special, size_t *len);

/* All ids' bytes joined; malloc'd, *len set. NULL with *err. ("llama": without the space that encoding added.) */
char *tok_decode(const struct tokenizer *t, const int32_t *ids, int n, bool special, size_t *len, struct skv_error *err);

/* UTF-8 helpers used wherever text is cut. */
/* Length of the longest prefix of s that does not end inside a character (an unfinished but so far valid one). */
size_t utf8_whole(const char *s, size_t len);
/* True when s is valid UTF-8; else *bad is the offset of the first wrong byte. */
bool utf8_valid(const char *s, size_t len, size_t *bad);
/* Copy src to dst (3 * len bytes are always enough), each bad byte replaced by U+FFFD; returns the length. */
size_t utf8_sanitize(const char *src, size_t len, char *dst);

#endif
