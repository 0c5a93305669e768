/* seq_text.c - text on its way out: stop strings across tokens, whole characters, nothing lost or doubled. */
#include <stdlib.h>
#include <string.h>

#include "engine/seq.h"

static int reserve(char **buf, size_t *cap, size_t need)
{
    size_t n = *cap != 0 ? *cap : 256;

    if (need <= *cap)
        return 0;
    while (n < need)
        n *= 2;
    char *p = realloc(*buf, n);
    if (p == NULL)
        return -1;
    *buf = p;
    *cap = n;
    return 0;
}

int seq_text_add(struct seq *s, const char *bytes, size_t len)
{
    struct seq_text *t = &s->text;

    if (reserve(&t->raw, &t->cap, t->len + len + 1) < 0)
        return -1;
    if (len > 0)
        memcpy(t->raw + t->len, bytes, len);
    t->len += len;
    return 0;
}

/* The earliest match of any stop string that ends in the unsent part; among those at one place the first given. */
static int find_stop(const struct seq *s, size_t *at)
{
    const struct seq_text *t = &s->text;
    int found = -1;

    for (int i = 0; i < s->req->n_stop; i++) {
        const struct engine_text *stop = &s->req->stop[i];
        size_t left = t->len - t->sent;
        if (stop->len == 0 || stop->len > left)
            continue;
        const char *p = memmem(t->raw + t->sent, left, stop->s, stop->len);
        if (p != NULL && (found < 0 || (size_t)(p - t->raw) < *at)) {
            found = i;
            *at = (size_t)(p - t->raw);
        }
    }
    return found;
}

/* How many bytes at the end could be the beginning of a stop string. */
static size_t held_back(const struct seq *s)
{
    const struct seq_text *t = &s->text;
    size_t most = 0, left = t->len - t->sent;

    for (int i = 0; i < s->req->n_stop; i++) {
        const struct engine_text *stop = &s->req->stop[i];
        size_t k = stop->len > 0 ? stop->len - 1 : 0;
        if (k > left)
            k = left;
        for (; k > most; k--)
            if (memcmp(t->raw + t->len - k, stop->s, k) == 0) {
                most = k;
                break;
            }
    }
    return most;
}

int seq_text_cut(struct seq *s, bool last, size_t *from, size_t *len)
{
    struct seq_text *t = &s->text;
    size_t end = t->len, at = 0;
    int stop = find_stop(s, &at);

    if (stop >= 0)
        end = at;
    else if (!last)
        end = t->len - held_back(s);
    if (stop < 0 && !last)
        end = t->sent + utf8_whole(t->raw + t->sent, end - t->sent);
    if (reserve(&t->out, &t->out_cap, t->out_len + 3 * (end - t->sent) + 1) < 0)
        return -2;
    *from = t->out_len;
    *len = end > t->sent ? utf8_sanitize(t->raw + t->sent, end - t->sent, t->out + t->out_len) : 0;
    t->out_len += *len;
    t->sent = end;
    return stop;
}
