/* random_model_vocab.h - the vocabularies of random_model.c. Private to it. */
#ifndef SKVD_TESTS_RANDOM_MODEL_VOCAB_H
#define SKVD_TESTS_RANDOM_MODEL_VOCAB_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "tests/random_model.h"

/* Metadata entries as they stand in the file, growing. */
struct meta {
    unsigned char *data;
    size_t len, cap;
    uint64_t n; /* entries */
};

void meta_bytes(struct meta *b, const void *p, size_t n);
void meta_u32(struct meta *b, const char *key, uint32_t v);
void meta_f32(struct meta *b, const char *key, float v);
void meta_bool(struct meta *b, const char *key, int v);
void meta_str(struct meta *b, const char *key, const char *s);

/* tokenizer.* entries for m->vocab tokens of m->tokenizer. */
int vocab_make(struct meta *b, const struct random_model *m, struct skv_error *err);
/* The tokenizer.* entries of another file, copied; *n_vocab set. */
int vocab_copy(struct meta *b, const char *path, int *n_vocab, struct skv_error *err);

#endif
