/* cpu_panels.c - pages in panel form for all of a pass: what several tasks of prefill attention read is made once.
 *
 * A layer's tiles follow one another, so the panels of a lone segment are kept: its next tile in the same layer adds its own
 * slots only. Whatever else changes a cache's pages says cpu_panels_forget. A pass that needs more slots than there is room
 * for goes without: its tasks make their own panels, block by block.
 */
#include <assert.h>
#include <stdlib.h>

#include "kernels/cpu/cpu_attn.h"

#define PANELS_MAX ((size_t)64 << 20) /* bytes */

struct cpu_panels {
    unsigned char *mem; /* [n_kv][n_block][block_bytes] */
    size_t bytes, block_bytes;
    int n_block;    /* of 256 slots, of each head */
    int *base;      /* [max_rows] first block of each segment of this pass */
    bool ready;     /* this pass's are there */
    int lane, layer; /* whose panels are kept, lane -1: nobody's, */
    int32_t *done;  /* [n_kv] and of how many slots */
};

static int blocks_of(int n_slot)
{
    return (n_slot + KERN_ATTN_BLOCK - 1) / KERN_ATTN_BLOCK;
}

static const struct kern_attn_form *form_of(const struct cpu *c)
{
    return &c->isa->att.prefill[c->cfg.kv_dtype];
}

size_t cpu_panels_block_bytes(const struct cpu *c)
{
    const struct kern_attn_form *form = form_of(c);
    int hd = (c->d.head_dim + 15) & ~15;
    return form->block_bytes ? form->block_bytes(hd) : KERN_ATTN_PAGES * KERN_ATTN_PANEL_BYTES(hd);
}

int cpu_panels_init(struct cpu *c)
{
    struct cpu_panels *p = c->aw->panels = calloc(1, sizeof *p);
    struct skv_error err;

    if (!p)
        return -1;
    p->lane = -1;
    if (!form_of(c)->panel)
        return 0;
    p->block_bytes = cpu_panels_block_bytes(c);
    p->n_block = blocks_of(c->aw->max_slots);
    int most = (int)(PANELS_MAX / p->block_bytes / (size_t)c->d.n_kv);
    p->n_block = p->n_block < most ? p->n_block : most;
    p->bytes = p->block_bytes * (size_t)p->n_block * (size_t)c->d.n_kv;
    p->base = calloc((size_t)c->cfg.max_rows, sizeof *p->base);
    p->done = calloc((size_t)c->d.n_kv, sizeof *p->done);
    p->mem = cpu_map(p->bytes, &err);
    c->aw->bytes += p->bytes;
    return p->base && p->done && p->mem ? 0 : -1;
}

void cpu_panels_fini(struct cpu *c)
{
    struct cpu_panels *p = c->aw->panels;
    if (!p)
        return;
    cpu_unmap(p->mem, p->bytes);
    free(p->base);
    free(p->done);
    free(p);
    c->aw->panels = NULL;
}

void cpu_panels_forget(struct cpu *c)
{
    c->aw->panels->lane = -1;
    c->aw->panels->ready = false;
}

static unsigned char *panels_at(const struct cpu_panels *p, int seg, int head, int block)
{
    return p->mem + ((size_t)head * (size_t)p->n_block + (size_t)(p->base[seg] + block)) * p->block_bytes;
}

const unsigned char *cpu_panels_at(const struct cpu *c, int seg, int head, int slot0)
{
    const struct cpu_panels *p = c->aw->panels;
    return p->ready ? panels_at(p, seg, head, slot0 / KERN_ATTN_BLOCK) : NULL;
}

/* Slots of a segment's head once the pass's rows are there. */
static int slots_of(const struct ops_seg *seg, int head)
{
    return (seg->head_slot0 ? seg->head_slot0[head] : seg->slot0) + seg->n_row;
}

struct panels_job {
    struct cpu *c;
    const struct ops_seg *seg;
    int n_unit, layer;
    bool goes_on;
};

/* The first block that has to be made. */
static int block_from(const struct panels_job *j, int seg, int head)
{
    int had = slots_of(&j->seg[seg], head) - j->seg[seg].n_row;
    return j->goes_on && j->c->aw->panels->done[head] == had ? had / KERN_ATTN_BLOCK : 0;
}

static void panels_task(void *arg, int item, int worker)
{
    const struct panels_job *j = arg;
    const struct cpu *c = j->c;
    int unit = cpu_attn_unit(c->aw, j->n_unit, item), seg = unit / c->d.n_kv, head = unit % c->d.n_kv;
    int block = block_from(j, seg, head) + item - c->aw->first[unit];
    int slot0 = block * KERN_ATTN_BLOCK, left = slots_of(&j->seg[seg], head) - slot0;
    const uint32_t *table = c->kv.table + cpu_kv_index(c, j->seg[seg].lane, j->layer, head) * c->kv.max_pages;

    (void)worker;
    for (int i = 0; i < KERN_ATTN_PAGES && i * KERN_PAGE_SLOTS < left; i++)
        form_of(c)->panel(&c->kv.page, cpu_page(c, table[slot0 / KERN_PAGE_SLOTS + i]), i,
                          panels_at(c->aw->panels, seg, head, block));
}

/* Where each segment's blocks begin; false: they don't all fit. */
static bool place(const struct cpu *c, const struct ops_pass *pass)
{
    struct cpu_panels *p = c->aw->panels;
    int n = 0;
    for (int s = 0; s < pass->n_seg; s++) {
        int most = 0;
        for (int h = 0; h < c->d.n_kv; h++)
            most = slots_of(&pass->seg[s], h) > most ? slots_of(&pass->seg[s], h) : most;
        p->base[s] = n;
        n += blocks_of(most);
        if (n > p->n_block)
            return false;
    }
    return true;
}

bool cpu_panels_make(struct cpu *c, int layer, const struct ops_pass *pass)
{
    struct cpu_panels *p = c->aw->panels;
    struct panels_job j = { c, pass->seg, pass->n_seg * c->d.n_kv, layer, false };
    int *first = c->aw->first;

    j.goes_on = pass->n_seg == 1 && p->lane == pass->seg->lane && p->layer == layer;
    p->ready = p->mem && place(c, pass);
    p->lane = -1;
    if (!p->ready)
        return false;
    first[0] = 0;
    for (int u = 0; u < j.n_unit; u++) {
        int seg = u / c->d.n_kv, head = u % c->d.n_kv;
        first[u + 1] = first[u] + blocks_of(slots_of(&pass->seg[seg], head)) - block_from(&j, seg, head);
    }
    workers_run(c->workers, first[j.n_unit], panels_task, &j);
    if (pass->n_seg == 1) {
        p->lane = pass->seg->lane;
        p->layer = layer;
        for (int h = 0; h < c->d.n_kv; h++)
            p->done[h] = slots_of(pass->seg, h);
    }
    return true;
}
