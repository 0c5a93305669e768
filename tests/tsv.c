/* tsv.c - see tsv.h */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/tsv.h"

static void die(const char *what, const char *name)
{
    fprintf(stderr, "%s: %s\n", name, what);
    exit(99);
}

static char *read_all(const char *name)
{
    char path[1024];
    const char *src = getenv("top_srcdir");
    if (name[0] == '/')
        snprintf(path, sizeof(path), "%s", name);
    else
        snprintf(path, sizeof(path), "%s/tests/data/%s", src ? src : ".", name);
    FILE *f = fopen(path, "rb");
    if (!f)
        die("not there (set top_srcdir)", path);
    size_t cap = 1 << 16, len = 0, n;
    char *s = malloc(cap);
    while (s && (n = fread(s + len, 1, cap - len - 1, f)) > 0) {
        len += n;
        if (cap - len < 2)
            s = realloc(s, cap *= 2);
    }
    if (!s)
        die("no memory", path);
    s[len] = '\0';
    fclose(f);
    return s;
}

static int hex(char c)
{
    return c >= 'a' ? c - 'a' + 10 : c - '0';
}

/* In place; the result is never longer. */
static size_t unescape(char *s)
{
    char *o = s;
    for (const char *p = s; *p; p++) {
        if (*p == '\\' && p[1] == 'x' && p[2] && p[3]) {
            *o++ = (char)(hex(p[2]) << 4 | hex(p[3]));
            p += 3;
        } else {
            *o++ = *p;
        }
    }
    *o = '\0';
    return (size_t)(o - s);
}

static void split(struct tsv_row *row, char *line)
{
    int n = 1;
    for (const char *p = line; *p; p++)
        n += *p == '\t';
    row->f = calloc((size_t)n, sizeof(*row->f));
    if (!row->f)
        die("no memory", "tsv");
    for (row->n = 0; row->n < n; row->n++) {
        char *end = strchr(line, '\t');
        if (end)
            *end = '\0';
        row->f[row->n].s = line;
        row->f[row->n].len = unescape(line);
        line = end ? end + 1 : NULL;
    }
}

struct tsv *tsv_read(const char *name)
{
    struct tsv *t = calloc(1, sizeof(*t));
    if (!t)
        die("no memory", name);
    t->text = read_all(name);
    int lines = 0;
    for (const char *p = t->text; *p; p++)
        lines += *p == '\n';
    t->row = calloc((size_t)lines + 1, sizeof(*t->row));
    if (!t->row)
        die("no memory", name);
    for (char *p = t->text, *end; (end = strchr(p, '\n')); p = end + 1) {
        *end = '\0';
        split(&t->row[t->n++], p);
    }
    if (t->n == 0)
        die("has no rows", name);
    return t;
}

void tsv_free(struct tsv *t)
{
    for (int i = 0; i < t->n; i++)
        free(t->row[i].f);
    free(t->row);
    free(t->text);
    free(t);
}

int32_t *tsv_ids(const struct tsv_field *f, int *n)
{
    int32_t *id = malloc((f->len / 2 + 1) * sizeof(*id));
    char *p = f->s, *end;
    if (!id)
        die("no memory", "tsv");
    for (*n = 0; *p; p = end) {
        id[*n] = (int32_t)strtol(p, &end, 10);
        if (end == p)
            die("not a number", f->s);
        ++*n;
    }
    return id;
}

const char *tsv_model_path(void)
{
    static char path[1024];
    const char *env = getenv("SKVD_TEST_MODEL"), *home = getenv("HOME");
    if (env)
        snprintf(path, sizeof(path), "%s", env);
    else
        snprintf(path, sizeof(path), "%s/.cache/skvd/SmolLM2-135M-Instruct.Q4_1.gguf", home ? home : "");
    if (access(path, R_OK) == 0)
        return path;
    printf("skipped what needs the model: %s is not there\n", path);
    return NULL;
}
