/* tokenizer.c - the tokenizer's public face: encoding by special tokens and words, decoding, questions.
 *
 * See tok_int.h for the other files. A tokenizer does not change after tok_new, but for `itself`, which is a memory of
 * answers that every thread computes alike.
 */
#include "config.h"

#include <stdlib.h>
#include <string.h>

#include "engine/tok_int.h"

struct tokenizer *tok_new(const struct gguf *g, struct skv_error *err)
{
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (!t) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the tokenizer");
        return NULL;
    }
    tok_classes_init(t->bmp);
    if (tok_load(t, g, err)) {
        tok_free(t);
        return NULL;
    }
    return t;
}

void tok_free(struct tokenizer *t)
{
    if (!t)
        return;
    free(t->bytes);
    free(t->off);
    free(t->type);
    free(t->eog);
    free(t->key);
    free(t->slot);
    free(t->pair);
    free(t->follows);
    free((void *)t->itself);
    free(t->user.id);
    free(t->all.id);
    free(t);
}

int tok_vocab(const struct tokenizer *t)
{
    return t->n;
}

int32_t tok_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tok_eos(const struct tokenizer *t)
{
    return t->eos;
}

bool tok_add_bos(const struct tokenizer *t)
{
    return t->add_bos;
}

static bool in_vocab(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && id < t->n;
}

bool tok_is_eog(const struct tokenizer *t, int32_t id)
{
    return in_vocab(t, id) && t->eog[id];
}

bool tok_is_control(const struct tokenizer *t, int32_t id)
{
    return in_vocab(t, id) && (t->type[id] == TOK_T_CONTROL || t->type[id] == TOK_T_UNKNOWN);
}

int32_t tok_find(const struct tokenizer *t, const char *s)
{
    size_t len = strlen(s);
    int32_t id = -1;
    if (len && tok_special_at(t, &t->all, s, len, &id) == len)
        return id;
    return len ? tok_lookup(t, s, len) : -1;
}

/* ---- encoding ------------------------------------------------------------------------------------------- */

static size_t next_special(const struct tokenizer *t, const struct tok_specials *sp, const char *s, size_t len,
                           size_t *at, int32_t *id)
{
    const char *end = s + len;
    for (const char *p = s; sp->n && p < end; p++) {
        if (sp->n_first == 1) {
            p = memchr(p, sp->first, (size_t)(end - p));
            if (!p)
                break;
        } else if (sp->from[(unsigned char)*p] == sp->from[(unsigned char)*p + 1]) {
            continue;
        }
        size_t n = tok_special_at(t, sp, p, (size_t)(end - p), id);
        if (n) {
            *at = (size_t)(p - s);
            return n;
        }
    }
    return 0;
}

size_t tok_next_special(const struct tokenizer *t, const char *s, size_t len, size_t *at, int32_t *id)
{
    return next_special(t, &t->all, s, len, at, id);
}

/* Look for the next special token from job->done on, once for each; a mark is one. */
static void find_special(const struct tokenizer *t, struct tok_job *job)
{
    const struct tok_specials *sp = job->special ? &t->all : &t->user;
    const struct tok_mark *m = job->mark_at < job->n_mark ? &job->mark[job->mark_at] : NULL;
    size_t at = 0, end = m ? m->at : job->len;
    job->searched = true;
    job->next_len = next_special(t, sp, job->text + job->done, end - job->done, &at, &job->next_id);
    job->next = job->next_len ? job->done + at : end;
    if (!job->next_len && m) {
        job->next_len = m->len;
        job->next_id = m->id;
        job->mark_at++;
    }
}

static int not_utf8(const struct tok_job *job, struct skv_error *err)
{
    return skv_fail(err, SKV_BAD_REQUEST, "the text is not UTF-8 at byte %zu", job->done);
}

static int one_word_spm(const struct tokenizer *t, struct tok_job *job, struct tok_word *w,
                        struct tok_ids *out, struct skv_error *err)
{
    size_t used = 0;
    bool lead = t->add_space && !job->not_first;
    int rc = tok_spm_word(t, job->text + job->done, job->next - job->done, lead, w, &used);
    if (rc == 0)
        return not_utf8(job, err);
    if (rc < 0)
        return skv_fail(err, SKV_NO_MEMORY, "no memory to tokenize");
    job->not_first = true;
    job->done += used;
    return tok_word_ids(t, w->s, w->len, out, err);
}

static int one_word(const struct tokenizer *t, struct tok_job *job, struct tok_ids *out, struct skv_error *err)
{
    size_t n = tok_pre_word(t, job->text + job->done, job->next - job->done);
    if (n == 0)
        return not_utf8(job, err);
    if (tok_word_ids(t, job->text + job->done, n, out, err))
        return -1;
    job->done += n;
    return 0;
}

/* Blanks that belong to the special token before them. */
static size_t blanks_taken(const struct tokenizer *t, int32_t id, const char *s, size_t len)
{
    size_t o = 0;
    uint32_t cp;
    int n;
    if (!t->takes_blanks || id == t->keeps_blanks[0] || id == t->keeps_blanks[1] || id == t->keeps_blanks[2])
        return 0;
    while (o < len && (n = utf8_decode(s + o, len - o, &cp)) && tok_class_of(t, cp) == TOK_C_SPACE)
        o += (size_t)n;
    return o;
}

int tok_encode_some(const struct tokenizer *t, struct tok_job *job, size_t max_bytes, struct tok_ids *out,
                    struct skv_error *err)
{
    struct tok_word w = { .s = w.small, .cap = sizeof(w.small) };
    size_t from = job->done;
    int rc = 0;
    while (!rc && job->done < job->len && job->done - from < max_bytes) {
        if (!job->searched)
            find_special(t, job);
        if (job->done < job->next) {
            rc = t->kind == TOK_SPM ? one_word_spm(t, job, &w, out, err) : one_word(t, job, out, err);
            continue;
        }
        rc = tok_ids_reserve(out, 1, err);
        if (!rc)
            out->id[out->n++] = job->next_id;
        job->done += job->next_len;
        job->done += blanks_taken(t, job->next_id, job->text + job->done, job->len - job->done);
        job->searched = false;
        job->not_first = false; /* the text after a special token begins anew */
    }
    if (w.s != w.small)
        free(w.s);
    return rc ? -1 : job->done >= job->len;
}

int tok_encode(const struct tokenizer *t, const char *text, size_t len, bool special, struct tok_ids *out,
               struct skv_error *err)
{
    struct tok_job job = { .text = text, .len = len, .special = special };
    int n = out->n;
    if (tok_encode_some(t, &job, SIZE_MAX, out, err) < 0) {
        out->n = n;
        return -1;
    }
    return 0;
}

/* ---- decoding ------------------------------------------------------------------------------------------- */

const char *tok_bytes(const struct tokenizer *t, int32_t id, bool special, size_t *len)
{
    *len = 0;
    if (!in_vocab(t, id))
        return "";
    if (special || !tok_is_control(t, id))
        *len = tok_len(t, id);
    return t->bytes + t->off[id];
}

char *tok_decode(const struct tokenizer *t, const int32_t *ids, int n, bool special, size_t *len,
                 struct skv_error *err)
{
    size_t total = 0, k, o = 0;
    for (int i = 0; i < n; i++) {
        tok_bytes(t, ids[i], special, &k);
        total += k;
    }
    char *s = malloc(total ? total : 1);
    if (!s) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for a text of %zu bytes", total);
        return NULL;
    }
    bool strip = t->add_space; /* the blank that encoding put before the text */
    for (int i = 0; i < n; i++) {
        const char *b = tok_bytes(t, ids[i], special, &k);
        if (in_vocab(t, ids[i]) && (tok_is_control(t, ids[i]) || t->type[ids[i]] == TOK_T_USER)) {
            strip = t->add_space; /* the text after it began anew */
        } else {
            bool blank = strip && k > 0 && *b == ' '; /* one of them, though more may follow */
            strip = strip && k == 0;
            if (blank)
                b++, k--;
        }
        memcpy(s + o, b, k);
        o += k;
    }
    *len = o;
    return s;
}
