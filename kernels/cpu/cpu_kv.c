/* cpu_kv.c - the KV pool and its state arrays: taken once, written by attn_in, cleared page by page. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu_attn.h"

#define KV_CHUNK 16 /* rows that one task stores at most */

struct ops_kv *cpu_kv_init(void *be, uint32_t n_pages, struct skv_error *err)
{
    struct cpu *c = be;
    struct ops_kv *kv = &c->kv;
    size_t n = (size_t)c->cfg.max_lanes * c->d.n_layer * c->d.n_kv;
    size_t bytes;

    assert(!c->pool && n_pages > 0 && c->cfg.max_pages > 0);
    kern_page_layout_init(&kv->page, c->cfg.kv_dtype, c->d.head_dim);
    kv->n_pages = n_pages;
    kv->max_pages = c->cfg.max_pages;
    if (__builtin_mul_overflow((size_t)n_pages, kv->page.bytes, &bytes) || !(c->pool = cpu_map(bytes, err))) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for a KV pool of %u pages of %zu bytes (--kv-memory)", n_pages,
                 kv->page.bytes);
        return NULL;
    }
    kv->table = calloc(n * kv->max_pages, sizeof *kv->table);
    kv->len = calloc(n, sizeof *kv->len);
    kv->cap = calloc(n, sizeof *kv->cap);
    kv->victim = calloc(n, sizeof *kv->victim);
    if (!kv->table || !kv->len || !kv->cap || !kv->victim) {
        cpu_kv_fini(c);
        skv_fail(err, SKV_NO_MEMORY, "no memory for the page tables of %d lanes (--max-seqs)", c->cfg.max_lanes);
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        kv->cap[i] = INT32_MAX;
        kv->victim[i] = -1;
    }
    return kv;
}

void cpu_kv_fini(struct cpu *c)
{
    if (c->pool)
        cpu_unmap(c->pool, (size_t)c->kv.n_pages * c->kv.page.bytes);
    c->pool = NULL;
    free(c->kv.table);
    free(c->kv.len);
    free(c->kv.cap);
    free(c->kv.victim);
    memset(&c->kv, 0, sizeof c->kv);
}

void cpu_page_clear(void *be, const uint32_t *pages, int n)
{
    struct cpu *c = be;
    for (int i = 0; i < n; i++) {
        assert(pages[i] < c->kv.n_pages);
        memset(cpu_page(c, pages[i]), 0, c->kv.page.bytes);
    }
    cpu_panels_forget(c);
}

void cpu_kv_read(void *be, int lane, int layer, int head, int32_t *pos, float *score)
{
    struct cpu *c = be;
    const struct kern_page_layout *pl = &c->kv.page;
    size_t at = cpu_kv_index(c, lane, layer, head);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages;
    int len = c->kv.len[at];

    for (int i = 0; i < len; i += KERN_PAGE_SLOTS) {
        const unsigned char *page = cpu_page(c, table[i / KERN_PAGE_SLOTS]);
        size_t n = len - i < KERN_PAGE_SLOTS ? len - i : KERN_PAGE_SLOTS;
        memcpy(pos + i, page + pl->pos, n * sizeof *pos);
        memcpy(score + i, page + pl->score, n * sizeof *score);
    }
}

/* ---- attn_in's last part -------------------------------------------------------------------------- */

struct kv_store {
    struct cpu *c;
    const struct ops_pass *pass;
    const int32_t *slot;
    int layer, per_item;
};

/* The slot that a row's pair goes to. A victim is used up by the row it is given to. */
static int store_slot(const struct kv_store *s, const struct ops_seg *seg, int row, int head, size_t at)
{
    struct ops_kv *kv = &s->c->kv;
    if (!s->slot)
        return (seg->head_slot0 ? seg->head_slot0[head] : seg->slot0) + (row - seg->row0);
    int slot = s->slot[(size_t)row * s->c->d.n_kv + head];
    if (slot < 0) {
        slot = kv->victim[at];
        kv->victim[at] = -1;
    }
    return slot;
}

static void store_row(const struct kv_store *s, const struct ops_seg *seg, int row)
{
    const struct cpu *c = s->c;
    const struct kern_page_layout *pl = &c->kv.page;
    const float *k = c->qkv + (size_t)row * c->qkv_width + (size_t)c->d.n_head * c->d.head_dim;
    const float *v = k + (size_t)c->d.n_kv * c->d.head_dim;

    for (int head = 0; head < c->d.n_kv; head++) {
        size_t at = cpu_kv_index(c, seg->lane, s->layer, head);
        int slot = store_slot(s, seg, row, head, at);
        assert(slot >= 0 && slot / KERN_PAGE_SLOTS < c->kv.max_pages);
        unsigned char *page = cpu_page(c, c->kv.table[at * c->kv.max_pages + slot / KERN_PAGE_SLOTS]);
        slot %= KERN_PAGE_SLOTS;
        c->isa->att.store(pl, page, slot, k + head * c->d.head_dim, v + head * c->d.head_dim);
        ((int32_t *)(page + pl->pos))[slot] = ops_seg_pos(seg, row);
        ((float *)(page + pl->score))[slot] = 0;
    }
}

static void store_chunk(void *arg, int item, int worker)
{
    const struct kv_store *s = arg;
    const struct ops_seg *seg = s->pass->seg, *last = seg + s->pass->n_seg;
    int row = item * s->per_item;
    int end = row + s->per_item < s->pass->n_row ? row + s->per_item : s->pass->n_row;

    (void)worker;
    for (; row < end; row++) {
        while (seg < last && row >= seg->row0 + seg->n_row)
            seg++;
        if (seg == last)
            return;
        if (row >= seg->row0)
            store_row(s, seg, row);
    }
}

void cpu_kv_store(struct cpu *c, int layer, const struct ops_pass *pass, const int32_t *slot)
{
    struct kv_store s = { c, pass, slot, layer, cpu_rows_item(c, pass->n_row, KV_CHUNK) };
    if (pass->n_row > 0)
        workers_run_shares(c->workers, (pass->n_row + s.per_item - 1) / s.per_item, store_chunk, &s);
}
