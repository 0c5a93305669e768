/* tok_bpe.c - word -> ids by merging neighbours, the lowest rank first (ties: leftmost).
 *
 * "gpt2": symbols are bytes, a merge is a pair of ids in the table. "llama": symbols are characters, two neighbours merge
 * when their joined text is a token, the best score first; what stays unknown falls back to byte tokens.
 * Short words (nearly all) are merged by scanning, O(n^2) on a few entries; long ones by a heap, O(n log n).
 */
#include "config.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tok_int.h"

#define SHORT 48 /* symbols up to which scanning is faster than a heap */

int tok_ids_reserve(struct tok_ids *out, size_t more, struct skv_error *err)
{
    size_t need = (size_t)out->n + more;
    if (need <= (size_t)out->cap)
        return 0;
    size_t cap = (size_t)out->cap + (size_t)out->cap / 2;
    if (cap < need)
        cap = need + 64;
    int32_t *p = cap < INT_MAX ? realloc(out->id, cap * sizeof(*p)) : NULL;
    if (!p)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %zu tokens", need);
    out->id = p;
    out->cap = (int)cap;
    return 0;
}

static inline uint32_t mix(uint64_t key)
{
    key *= 0x9e3779b97f4a7c15u;
    return (uint32_t)(key >> 32) ^ (uint32_t)(key >> 52);
}

/* A symbol: bytes [start, start + len) of the word. */
struct sym {
    uint32_t start, len;
    int32_t id;
    int32_t prev, next; /* heap path; -1: none */
};

/* The rank at which neighbours a and b merge, TOK_NO_RANK: they don't; *id = what they give. */
static inline uint32_t merge_rank(const struct tokenizer *t, const char *w, const struct sym *a,
                                  const struct sym *b, int32_t *id)
{
    if (t->kind == TOK_SPM) {
        *id = tok_lookup(t, w + a->start, a->len + b->len);
        return *id < 0 ? TOK_NO_RANK : t->key[*id];
    }
    if (a->id < 0 || b->id < 0)
        return TOK_NO_RANK;
    uint64_t key = (uint64_t)(uint32_t)a->id << 32 | (uint32_t)b->id;
    for (uint32_t i = mix(key);; i++) {
        const struct tok_pair *p = &t->pair[i & t->pair_mask];
        if (p->key == key) {
            *id = p->id;
            return p->rank;
        }
        if (p->key == TOK_NO_PAIR)
            return TOK_NO_RANK;
    }
}

/* The symbols to begin with; returns how many (sym has room for one a byte). */
static size_t first_symbols(const struct tokenizer *t, const char *w, size_t len, struct sym *sym)
{
    size_t n = 0;
    uint32_t cp;
    for (size_t i = 0; i < len; n++) {
        size_t k = t->kind == TOK_SPM ? (size_t)utf8_decode(w + i, len - i, &cp) : 1;
        sym[n].start = (uint32_t)i;
        sym[n].len = (uint32_t)k;
        sym[n].id = t->kind == TOK_SPM ? tok_lookup(t, w + i, k) : t->byte_id[(unsigned char)w[i]];
        i += k;
    }
    return n;
}

/* Append a symbol's ids; the room is reserved. */
static void emit(const struct tokenizer *t, const char *w, const struct sym *s, struct tok_ids *out)
{
    if (s->id >= 0) {
        out->id[out->n++] = s->id;
        return;
    }
    if (t->kind == TOK_GPT2)
        return; /* a byte without a token gives nothing, as in the model's own tokenizer */
    for (uint32_t i = 0; i < s->len; i++)
        if (t->byte_id[(unsigned char)w[s->start + i]] < 0) {
            if (t->unk >= 0)
                out->id[out->n++] = t->unk;
            return;
        }
    for (uint32_t i = 0; i < s->len; i++)
        out->id[out->n++] = t->byte_id[(unsigned char)w[s->start + i]];
}

static void merge_short(const struct tokenizer *t, const char *w, size_t len, struct tok_ids *out)
{
    struct sym sym[SHORT];
    uint32_t rank[SHORT];
    int32_t id[SHORT];
    size_t n = first_symbols(t, w, len, sym);
    for (size_t i = 0; i + 1 < n; i++)
        rank[i] = merge_rank(t, w, &sym[i], &sym[i + 1], &id[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == TOK_NO_RANK)
            break;
        sym[best].len += sym[best + 1].len;
        sym[best].id = id[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            sym[i] = sym[i + 1];
            rank[i] = rank[i + 1];
            id[i] = id[i + 1];
        }
        if (best + 1 < n)
            rank[best] = merge_rank(t, w, &sym[best], &sym[best + 1], &id[best]);
        if (best)
            rank[best - 1] = merge_rank(t, w, &sym[best - 1], &sym[best], &id[best - 1]);
    }
    for (size_t i = 0; i < n; i++)
        emit(t, w, &sym[i], out);
}

/* ---- long words ------------------------------------------------------------------------------------------- */

/* A merge that was possible when it was pushed: of the symbol at `at` and its neighbour, `size` bytes together. If the
 * two still have that size they are still the same two. */
struct cand {
    uint32_t rank, at, size;
    int32_t id;
};

struct heap {
    struct cand *c;
    size_t n;
};

static inline bool before(const struct cand *a, const struct cand *b)
{
    return a->rank < b->rank || (a->rank == b->rank && a->at < b->at);
}

static void heap_push(struct heap *h, struct cand c)
{
    size_t i = h->n++;
    for (; i && before(&c, &h->c[(i - 1) / 2]); i = (i - 1) / 2)
        h->c[i] = h->c[(i - 1) / 2];
    h->c[i] = c;
}

static struct cand heap_pop(struct heap *h)
{
    struct cand top = h->c[0], last = h->c[--h->n];
    size_t i = 0;
    for (;;) {
        size_t k = 2 * i + 1;
        if (k >= h->n)
            break;
        if (k + 1 < h->n && before(&h->c[k + 1], &h->c[k]))
            k++;
        if (!before(&h->c[k], &last))
            break;
        h->c[i] = h->c[k];
        i = k;
    }
    h->c[i] = last;
    return top;
}

static void push_pair(const struct tokenizer *t, const char *w, const struct sym *sym, int32_t a,
                      struct heap *h)
{
    if (a < 0 || sym[a].next < 0)
        return;
    const struct sym *l = &sym[a], *r = &sym[l->next];
    struct cand c = { .at = (uint32_t)a, .size = l->len + r->len };
    c.rank = merge_rank(t, w, l, r, &c.id);
    if (c.rank != TOK_NO_RANK)
        heap_push(h, c);
}

static int merge_long(const struct tokenizer *t, const char *w, size_t len, struct tok_ids *out,
                      struct skv_error *err)
{
    /* n - 1 pairs to begin with and at most two new ones for each of n - 1 merges. */
    struct sym *sym = malloc(len * sizeof(*sym));
    struct heap h = { malloc(3 * len * sizeof(*h.c)), 0 };
    if (!sym || !h.c) {
        free(sym);
        free(h.c);
        return skv_fail(err, SKV_NO_MEMORY, "no memory to tokenize a word of %zu bytes", len);
    }
    size_t n = first_symbols(t, w, len, sym);
    for (size_t i = 0; i < n; i++) {
        sym[i].prev = (int32_t)i - 1;
        sym[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
    for (size_t i = 0; i + 1 < n; i++)
        push_pair(t, w, sym, (int32_t)i, &h);
    while (h.n) {
        struct cand c = heap_pop(&h);
        struct sym *l = &sym[c.at];
        if (l->len == 0 || l->next < 0 || l->len + sym[l->next].len != c.size)
            continue;
        struct sym *r = &sym[l->next];
        l->len = c.size;
        l->id = c.id;
        l->next = r->next;
        r->len = 0;
        if (l->next >= 0)
            sym[l->next].prev = (int32_t)c.at;
        push_pair(t, w, sym, l->prev, &h);
        push_pair(t, w, sym, (int32_t)c.at, &h);
    }
    for (int32_t i = 0; i >= 0; i = sym[i].next)
        emit(t, w, &sym[i], out);
    free(sym);
    free(h.c);
    return 0;
}

int tok_word_ids(const struct tokenizer *t, const char *s, size_t len, struct tok_ids *out,
                 struct skv_error *err)
{
    if (tok_ids_reserve(out, len, err))
        return -1;
    int32_t whole = tok_lookup(t, s, len);
    if (whole >= 0) {
        uint8_t known = atomic_load_explicit(&t->itself[whole], memory_order_relaxed);
        if (known == 1 || t->ignore_merges) {
            out->id[out->n++] = whole;
            return 0;
        }
    }
    int before_n = out->n;
    if (len <= SHORT)
        merge_short(t, s, len, out);
    else if (merge_long(t, s, len, out, err))
        return -1;
    if (whole >= 0) /* every thread that gets here finds the same answer */
        atomic_store_explicit(&t->itself[whole],
                              out->n == before_n + 1 && out->id[before_n] == whole ? 1 : 2,
                              memory_order_relaxed);
    return 0;
}
