/* tsv.h - tests: tables of expected values (tests/data, written by tests/tools; the format is described there). */
#ifndef SKVD_TESTS_TSV_H
#define SKVD_TESTS_TSV_H

#include <stddef.h>
#include <stdint.h>

struct tsv_field {
    char *s; /* unescaped bytes, NUL-terminated too */
    size_t len;
};
struct tsv_row {
    struct tsv_field *f;
    int n;
};
struct tsv {
    struct tsv_row *row;
    int n;
    char *text;
};

/* Read $srcdir/tests/data/NAME; a missing or broken file ends the program. */
struct tsv *tsv_read(const char *name);
void tsv_free(struct tsv *t);

/* A field of numbers with blanks between; malloc'd, *n set. */
int32_t *tsv_ids(const struct tsv_field *f, int *n);

/* Path of the real model for tests, NULL (after saying so) when it is not there. */
const char *tsv_model_path(void);

#endif
