/* evalbase.c - what records scored with the full cache, kept between runs of `skvctl eval`: half the work of trying one
 * variant. A JSON line a record; it is found again by its prompt and answer, so an edited task file is no danger. That
 * the model and the build are the same is for the one who names the file to see to. */
#include "config.h"

#include "clients/skvctl/eval.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct baseline {
    FILE *f;
    json_t *known; /* key -> record */
    const char *how;
};

static uint64_t hash_tokens(uint64_t h, const struct tokens *t)
{
    for (size_t i = 0; i < t->n; i++)
        h = (h ^ (uint32_t)t->v[i]) * 0x100000001b3u;
    return h;
}

static const char *key_of(const struct baseline *b, const struct eval_rec *r)
{
    return fmt("%016llx %s %zu", (unsigned long long)hash_tokens(hash_tokens(0xcbf29ce484222325u, &r->prompt), &r->cont),
               b->how, r->answer.n);
}

struct baseline *baseline_open(const char *path, const char *how)
{
    struct baseline *b;
    FILE *f = fopen(path, "a+");
    char *line = NULL;
    size_t size = 0;
    ssize_t len;
    bool cut = false;

    if (f == NULL) {
        fprintf(stderr, "skvctl: %s: %s\n", path, strerror(errno));
        return NULL;
    }
    b = ctl_alloc(1, sizeof *b);
    b->f = f;
    b->how = strdup(how);
    b->known = json_object();
    rewind(f);
    while ((len = getline(&line, &size, f)) >= 0) {
        json_t *j = json_loads(line, 0, NULL);
        const char *key = json_string_value(json_object_get(j, "key"));
        if (key != NULL) /* a line cut short by an interrupted run is just not known */
            json_object_set(b->known, key, j);
        json_decref(j);
        cut = len > 0 && line[len - 1] != '\n';
    }
    free(line);
    fseek(f, 0, SEEK_END);
    if (cut)
        fputc('\n', f);
    return b;
}

/* [id, logprob, id, logprob, ...] for each position */
static void take_dists(struct eval_rec *r, const json_t *top)
{
    r->full = ctl_alloc(r->answer.n, sizeof *r->full);
    for (size_t k = 0; k < r->answer.n; k++) {
        const json_t *row = json_array_get(top, k);
        struct dist *d = &r->full[k];
        d->n = json_array_size(row) / 2;
        d->id = ctl_alloc(d->n, sizeof *d->id);
        d->lp = ctl_alloc(d->n, sizeof *d->lp);
        for (size_t i = 0; i < d->n; i++) {
            d->id[i] = (int32_t)json_integer_value(json_array_get(row, 2 * i));
            d->lp[i] = (float)json_number_value(json_array_get(row, 2 * i + 1));
        }
    }
}

bool baseline_get(const struct baseline *b, struct eval_rec *r)
{
    const json_t *j = b != NULL ? json_object_get(b->known, key_of(b, r)) : NULL;
    const json_t *top = json_object_get(j, "top");

    if (j == NULL)
        return false;
    r->res[0].state = json_is_true(json_object_get(j, "unknown")) ? RES_UNKNOWN : RES_DONE;
    r->res[0].score = json_number_value(json_object_get(j, "score"));
    r->res[0].kl = json_is_array(top) ? 0 : NAN;
    r->res[0].kept = 1;
    if (json_array_size(top) == r->answer.n)
        take_dists(r, top);
    return true;
}

void baseline_put(struct baseline *b, const struct eval_rec *r)
{
    json_t *j;

    if (b == NULL || (r->res[0].state != RES_DONE && r->res[0].state != RES_UNKNOWN))
        return;
    j = json_pack("{s:s, s:s, s:f, s:b}", "key", key_of(b, r), "id", r->id, "score", r->res[0].score, "unknown",
                  r->res[0].state == RES_UNKNOWN);
    if (r->full != NULL) {
        json_t *top = json_array();
        for (size_t k = 0; k < r->answer.n; k++) {
            json_t *row = json_array();
            for (size_t i = 0; i < r->full[k].n; i++) {
                json_array_append_new(row, json_integer(r->full[k].id[i]));
                json_array_append_new(row, json_real((double)r->full[k].lp[i]));
            }
            json_array_append_new(top, row);
        }
        json_object_set_new(j, "top", top);
    }
    json_dumpf(j, b->f, JSON_COMPACT | JSON_REAL_PRECISION(12));
    fputc('\n', b->f);
    fflush(b->f);
    json_decref(j);
}

void baseline_close(struct baseline *b)
{
    if (b == NULL)
        return;
    fclose(b->f);
    json_decref(b->known);
    free((char *)b->how);
    free(b);
}
