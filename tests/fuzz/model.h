/* model.h - a small random model for harnesses that need a tokenizer: made once, in memory. */
#ifndef SKVD_TESTS_FUZZ_MODEL_H
#define SKVD_TESTS_FUZZ_MODEL_H

#include <stdlib.h>
#include <unistd.h>

#include "engine/gguf.h"
#include "tests/fuzz/fuzz.h"
#include "tests/random_model.h"

static inline struct gguf *fuzz_model(const char *tokenizer, const char *pre)
{
    char path[] = "/tmp/skvd-fuzz-XXXXXX";
    struct random_model m;
    struct skv_error err;
    int fd = mkstemp(path);

    FUZZ_CHECK(fd >= 0);
    close(fd);
    random_model_default(&m);
    m.tokenizer = tokenizer;
    m.pre = pre;
    m.layers = 1;
    FUZZ_CHECK(random_model_write(&m, path, &err) == 0);
    struct gguf *g = gguf_open(path, &err);
    FUZZ_CHECK(g != NULL);
    unlink(path);
    return g;
}

#endif
