/* fuzz.h - the harnesses' common face.
 *
 * Each fuzz_*.c has libFuzzer's entry point. Configured with --enable-fuzzers (clang), they are fuzzers; otherwise replay.c
 * gives them a main that runs files, so that every input that was once trouble stays a test.
 */
#ifndef SKVD_TESTS_FUZZ_H
#define SKVD_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A property that must hold for every input. */
#define FUZZ_CHECK(cond)                                                              \
    do {                                                                              \
        if (!(cond)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #cond); \
            abort();                                                                  \
        }                                                                             \
    } while (0)

/* Parts of the input, taken from its front. */
struct fuzz_in {
    const uint8_t *p;
    size_t n;
};

static inline unsigned fuzz_byte(struct fuzz_in *in)
{
    if (in->n == 0)
        return 0;
    in->n--;
    return *in->p++;
}

#endif
