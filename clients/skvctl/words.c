/* words.c - prompts of an exact length in tokens, none with the beginning of another. */
#include "config.h"

#include "clients/skvctl/words.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *const words[] = {
    "the",    "of",      "and",   "to",     "in",      "that",   "was",    "his",    "with",    "for",    "had",    "not",
    "from",   "they",    "which", "were",   "there",   "would",  "been",   "their",  "when",    "more",   "some",   "could",
    "time",   "other",   "into",  "than",   "only",    "new",    "about",  "these",  "two",     "may",    "then",   "first",
    "any",    "like",    "now",   "such",   "made",    "over",   "must",   "our",    "after",   "many",   "before", "through",
    "years",  "where",   "much",  "way",    "well",    "down",   "should", "because", "each",   "people", "state",  "long",
    "little", "own",     "good",  "great",  "world",   "still",  "work",   "between", "life",   "being",  "under",  "never",
    "day",    "same",    "last",  "place",  "house",   "water",  "letter", "river",  "garden",  "window", "paper",  "number",
    "line",   "winter",  "music", "market", "village", "engine", "memory", "forest", "bridge",  "stone",  "silver", "evening",
    "ship",   "teacher", "glass", "answer", "morning", "copper", "island", "doctor", "kitchen", "mountain", "season", "theory",
};
#define N_WORDS (sizeof words / sizeof words[0])

/* splitmix64: the same prompts for the same seed, on every machine. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static char *make_text(uint64_t *state, size_t n_words, size_t *len)
{
    char *s = ctl_alloc(n_words * 12 + 64, 1);
    unsigned in_sentence = 0;

    /* The number in front makes the first tokens differ even where words repeat. */
    *len = (size_t)sprintf(s, "%llu.", (unsigned long long)(next(state) % 1000000000));
    for (size_t i = 0; i < n_words; i++) {
        *len += (size_t)sprintf(s + *len, " %s", words[next(state) % N_WORDS]);
        if (++in_sentence > 6 + next(state) % 12) {
            s[(*len)++] = '.';
            in_sentence = 0;
        }
    }
    s[*len] = '\0';
    return s;
}

int prompt_make(struct ctl *ctl, uint64_t seed, size_t n, struct prompt *out)
{
    uint64_t state = seed * 0xd1342543de82ef95u + 1;
    size_t n_words = n + 16, have = 0, len;

    while (have < n) {
        struct skv_error err;
        uint64_t s = state;
        char *text = make_text(&s, n_words, &len);
        long got;
        free(out->tokens);
        out->tokens = NULL;
        got = skv_tokenize(ctl->c, text, len, false, false, &out->tokens, &err);
        free(text);
        if (got < 0)
            return ctl_error(ctl, &err);
        have = (size_t)got;
        n_words *= 2;
    }
    out->n = n;
    return CTL_OK;
}

/* {"tokens": [...]} */
static int prompt_of_line(const char *line, struct prompt *out)
{
    json_t *j = json_loads(line, 0, NULL), *t = json_object_get(j, "tokens"), *e;
    size_t i;
    int rc = json_is_array(t) && json_array_size(t) > 0 ? 0 : -1;

    if (rc == 0) {
        out->tokens = ctl_alloc(json_array_size(t), sizeof *out->tokens);
        out->n = json_array_size(t);
        json_array_foreach(t, i, e) {
            if (!json_is_integer(e) || json_integer_value(e) < 0 || json_integer_value(e) > INT32_MAX)
                rc = -1;
            out->tokens[i] = (int32_t)json_integer_value(e);
        }
    }
    json_decref(j);
    return rc;
}

int prompts_read(struct ctl *ctl, const char *path, size_t limit, struct prompt **out, size_t *n)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t size = 0, line_no = 0;
    int status = CTL_OK;

    if (f == NULL)
        return ctl_usage(ctl, "%s: %s", path, strerror(errno));
    *out = NULL;
    *n = 0;
    while (status == CTL_OK && getline(&line, &size, f) >= 0) {
        line_no++;
        if (line[strspn(line, " \t\r\n")] == '\0')
            continue;
        *out = ctl_grow(*out, *n + 1, sizeof **out);
        memset(&(*out)[*n], 0, sizeof **out);
        if (prompt_of_line(line, &(*out)[*n]) < 0)
            status = ctl_usage(ctl, "%s:%zu: a line is {\"tokens\": [...]} with token numbers", path, line_no);
        else if (limit > 0 && (*out)[*n].n > limit)
            (*out)[*n].n = limit;
        (*n)++;
    }
    if (status == CTL_OK && *n == 0)
        status = ctl_usage(ctl, "%s: no prompts", path);
    free(line);
    fclose(f);
    return status;
}

void prompts_free(struct prompt *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(p[i].tokens);
    free(p);
}
