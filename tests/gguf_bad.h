/* gguf_bad.h - tests: GGUF files that must be refused, one a kind of fault, with a part of the message that is due. */
#ifndef SKVD_TESTS_GGUF_BAD_H
#define SKVD_TESTS_GGUF_BAD_H

#include <stddef.h>

#include "tests/gguf_build.h"

struct gguf_bad {
    const char *name;
    void (*make)(struct gb *b); /* b: gb_init'ed, changed here */
    const char *says;
};
extern const struct gguf_bad gguf_bad[];
extern const int gguf_bad_n;

/* A small good file: keys of every type, two tensors. */
void gguf_good(struct gb *b);

#endif
