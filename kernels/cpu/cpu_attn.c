/* cpu_attn.c - attention over pages: how passes are cut into tasks. The arithmetic is in the ISA's micro-kernels
 * (kernels/isa_attn.h).
 *
 * A unit is (segment, KV head). Its query rows are packed query-major, row = query * g + j for the j-th head of the
 * group, so that K and V are read once for the whole group.
 *
 *   prefill          pages become panels where the form wants them (cpu_panels.c)
 *   prefill pass 1   tasks (unit, block of queries): FlashAttention-2 over the key blocks in page order
 *   prefill pass 2   tasks (unit, key block): the block stays, the scored rows pass by in ascending order; one task
 *                    owns a column of the score row, so the sum needs no atomics and has one order
 *   decode           tasks (unit, split of 256 slots): partial m, l, o and the logits go to a record; whoever ends a
 *                    unit's last split merges its records in split order, updates scores (or the ring: cpu_ring.c) and victim
 *
 * Splits and key blocks start at multiples of 256 slots whatever the batch, and no task's result depends on which
 * worker runs it: that is the whole of batch invariance here.
 */
#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu_attn.h"

#define SLOTS       KERN_PAGE_SLOTS
#define BLOCK_ROWS  96                  /* packed rows of a pass-1 task that finds its panels; else at least, */
#define BLOCK_MAX   384                 /* at most (their o and q stay in L2), */
#define BLOCK_TASKS 4                   /* and about so that each thread gets this many tasks */
#define DECODE_WORK ((size_t)16 << 20)  /* bytes of split records, unless one lane needs more */

/* A pass's view that the tasks share. */
struct attn_job {
    struct cpu *c;
    const struct ops_pass *pass;
    const struct kern_rule *rule; /* [n_seg]; decode only, may be NULL */
    const struct ops_seg *seg;    /* the segments of this job: unit / n_kv indexes it */
    int n_unit, layer;
};

/* ---- memory ------------------------------------------------------------------------------------------ */

static size_t align64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

void *cpu_attn_alloc(struct cpu_attn_work *aw, size_t n, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes))
        return NULL;
    bytes = align64(bytes);
    aw->bytes += bytes;
    return aligned_alloc(64, bytes);
}

/* Queries whose packed rows are about `rows`. */
static int block_queries(const struct cpu *c, int rows)
{
    return c->g < rows ? rows / c->g : 1;
}

static int scratch_init(struct cpu *c, struct cpu_attn_work *aw)
{
    int n = c->cfg.n_threads;
    size_t rows = (size_t)block_queries(c, BLOCK_MAX) * c->g;
    size_t panel = KERN_ATTN_PAGES * KERN_ATTN_PANEL_BYTES(aw->hd); /* enough for prefill's and decode's form */
    size_t q = (size_t)(c->g > KERN_ATTN_TILE ? c->g : KERN_ATTN_TILE) * KERN_ATTN_Q_BYTES(aw->hd);
    size_t p = KERN_ATTN_WORK_BYTES;
    size_t s = sizeof(float) * KERN_ATTN_TILE * KERN_ATTN_BLOCK;
    size_t o = align64(rows * aw->hd * sizeof(float)), ml = align64(rows * sizeof(float));
    size_t each = panel + q + p + s + o + 2 * ml;

    aw->scratch = calloc(n, sizeof *aw->scratch);
    aw->scratch_mem = cpu_attn_alloc(aw, n, each);
    if (!aw->scratch || !aw->scratch_mem)
        return -1;
    for (int i = 0; i < n; i++) {
        struct attn_scratch *t = &aw->scratch[i];
        unsigned char *at = (unsigned char *)aw->scratch_mem + i * each;
        t->panel = at;
        t->q = at += panel;
        t->p = at += q;
        t->s = (float *)(at += p);
        t->o = (float *)(at += s);
        t->m = (float *)(at += o);
        t->l = (float *)(at + ml);
    }
    return 0;
}

int cpu_attn_init(struct cpu *c, struct skv_error *err)
{
    struct cpu_attn_work *aw = calloc(1, sizeof *aw);
    size_t rows = (size_t)c->cfg.max_rows * c->d.n_head, units = (size_t)c->cfg.max_rows * c->d.n_kv;

    if (!(c->aw = aw))
        return skv_fail(err, SKV_NO_MEMORY, "no memory for attention");
    aw->hd = (c->d.head_dim + 15) & ~15;
    aw->max_slots = c->cfg.max_pages * SLOTS;
    /* A record: logits [g][256], o [g][hd], m [g], l [g], w [g]. */
    aw->rec_floats = align64((c->g * (KERN_ATTN_BLOCK + aw->hd + 3)) * sizeof(float)) / sizeof(float);
    size_t lane = (size_t)c->d.n_kv * ((aw->max_slots + KERN_ATTN_BLOCK - 1) / KERN_ATTN_BLOCK);
    aw->n_rec = DECODE_WORK / (aw->rec_floats * sizeof(float));
    aw->n_rec = aw->n_rec > lane ? aw->n_rec : lane;

    aw->q = cpu_attn_alloc(aw, rows, KERN_ATTN_Q_BYTES(aw->hd));
    aw->m = cpu_attn_alloc(aw, rows, sizeof *aw->m);
    aw->inv_l = cpu_attn_alloc(aw, rows, sizeof *aw->inv_l);
    aw->score = cpu_attn_alloc(aw, (size_t)c->cfg.max_lanes * c->d.n_kv * aw->max_slots, sizeof *aw->score);
    aw->rec = cpu_attn_alloc(aw, aw->n_rec * aw->rec_floats, sizeof *aw->rec);
    aw->first = cpu_attn_alloc(aw, units + 1, sizeof *aw->first);
    aw->left = cpu_attn_alloc(aw, units, sizeof *aw->left);
    if (!aw->q || !aw->m || !aw->inv_l || !aw->score || !aw->rec || !aw->first || !aw->left ||
        scratch_init(c, aw) || cpu_select_init(c) || cpu_panels_init(c) || cpu_ring_init(c)) {
        cpu_attn_fini(c);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for attention (%zu bytes)", aw->bytes);
    }
    return 0;
}

void cpu_attn_fini(struct cpu *c)
{
    struct cpu_attn_work *aw = c->aw;
    if (!aw)
        return;
    cpu_select_fini(c);
    cpu_panels_fini(c);
    free(aw->ring);
    free(aw->scratch);
    free(aw->scratch_mem);
    free(aw->q);
    free(aw->m);
    free(aw->inv_l);
    free(aw->score);
    free(aw->rec);
    free(aw->first);
    free(aw->left);
    free(aw);
    c->aw = NULL;
}

size_t cpu_attn_bytes(const struct cpu *c)
{
    return c->aw ? c->aw->bytes : 0;
}

/* ---- units, blocks, tiles ---------------------------------------------------------------------------- */

int cpu_attn_unit(const struct cpu_attn_work *aw, int n_unit, int item)
{
    int lo = 0, hi = n_unit;
    while (hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        if (aw->first[mid] <= item)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

/* Slot of row `row` of a prefill segment in `head`. */
static int own_slot(const struct ops_seg *seg, int head, int row)
{
    return (seg->head_slot0 ? seg->head_slot0[head] : seg->slot0) + (row - seg->row0);
}

void cpu_attn_block(const struct cpu *c, const struct kern_attn_form *form, const uint32_t *table, int slot0, int n,
                    const unsigned char *made, unsigned char *panel, struct kern_attn_block *b)
{
    const struct kern_page_layout *pl = &c->kv.page;
    size_t panel_bytes = KERN_ATTN_PANEL_BYTES(pl->hd);

    b->hd = pl->hd;
    b->n_page = ceil_div(n < KERN_ATTN_BLOCK ? n : KERN_ATTN_BLOCK, SLOTS);
    for (int i = 0; i < b->n_page; i++) {
        const unsigned char *page = cpu_page(c, table[slot0 / SLOTS + i]);
        bool scaled = pl->dtype == KERN_KV_INT8;
        b->k_scale[i] = scaled ? (const float *)(page + pl->k_scale) : NULL;
        b->v_scale[i] = scaled ? (const float *)(page + pl->v_scale) : NULL;
        if (form->panel) {
            if (!made)
                form->panel(pl, page, i, panel);
            b->k[i] = (made ? made : panel) + i * panel_bytes;
            b->v[i] = b->k[i] + panel_bytes / 2;
        } else {
            b->k[i] = page + pl->k;
            b->v[i] = page + pl->v;
        }
    }
    int last = b->n_page - 1;
    b->k[last + 1] = b->v[0];
    b->k[last + 2] = b->v[last > 0];
    b->v[last + 1] = b->v[last + 2] = b->v[last];
}

/* What the n packed rows from `row` on (row = query * g + j, query 0 at slot `own`) see of the block at slot0; returns
 * the pages that the last of them reaches, 0: none. */
static int tile_seen(int own, int g, int row, int n, int slot0, int32_t *seen)
{
    for (int i = 0; i < n; i++)
        seen[i] = own + (row + i) / g + 1 - slot0;
    int last = seen[n - 1];
    return last <= 0 ? 0 : ceil_div(last < KERN_ATTN_BLOCK ? last : KERN_ATTN_BLOCK, SLOTS);
}

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

/* ---- prefill, pass 1 ----------------------------------------------------------------------------------- */

struct attn_rows {
    const struct ops_seg *seg;
    int head, row0, n; /* queries [row0, row0 + n) of the pass */
    unsigned char *q;  /* [n * g] packed */
    float *m, *inv_l;  /* [n * g] */
};

static void rows_at(const struct attn_job *job, int unit, int row0, int n, struct attn_rows *t)
{
    const struct cpu *c = job->c;
    const struct cpu_attn_work *aw = c->aw;
    t->seg = &job->seg[unit / c->d.n_kv];
    t->head = unit % c->d.n_kv;
    t->row0 = row0;
    t->n = n;
    size_t at = ((size_t)t->head * c->cfg.max_rows + row0) * c->g;
    t->q = aw->q + at * KERN_ATTN_Q_BYTES(aw->hd);
    t->m = aw->m + at;
    t->inv_l = aw->inv_l + at;
}

/* The g query rows of (row, head) to out. */
static void pack_group(const struct cpu *c, const struct kern_attn_form *form, int row, int head, unsigned char *out)
{
    const float *q = c->qkv + (size_t)row * c->qkv_width + (size_t)head * c->g * c->d.head_dim;
    for (int j = 0; j < c->g; j++)
        form->pack_q(q + j * c->d.head_dim, c->d.head_dim, c->aw->hd, c->d.attn_scale * CPU_LOG2_E,
                     out + j * KERN_ATTN_Q_BYTES(c->aw->hd));
}

/* out = o / l, into the attention output of (row, head)'s group. */
static void put_group(const struct cpu *c, int row, int head, const float *o, const float *inv_l)
{
    float *out = c->att + (size_t)row * c->d.n_head * c->d.head_dim + (size_t)head * c->g * c->d.head_dim;
    for (int j = 0; j < c->g; j++)
        c->isa->att.scaled(o + j * c->aw->hd, inv_l[j], c->d.head_dim, out + j * c->d.head_dim);
}

static void prefill_block(const struct cpu *c, const struct kern_attn_form *form, const struct attn_rows *t,
                          struct kern_attn_block *b, int slot0, struct attn_scratch *w)
{
    int own = own_slot(t->seg, t->head, t->row0), n_row = t->n * c->g;
    int tile = form->attend ? KERN_ATTN_ROWS : KERN_ATTN_TILE;
    int32_t seen[KERN_ATTN_ROWS];
    float alpha[KERN_ATTN_TILE];

    for (int r = 0; r < n_row; r += tile) {
        int n = min_int(n_row - r, tile);
        const unsigned char *q = t->q + r * KERN_ATTN_Q_BYTES(b->hd);
        float *o = w->o + (size_t)r * b->hd;
        b->n_page = tile_seen(own, c->g, r, n, slot0, seen);
        if (b->n_page == 0)
            continue;
        if (form->attend) {
            form->attend(b, q, n, seen, w->m + r, w->l + r, o, w->p);
            continue;
        }
        form->qk(b, q, n, w->s);
        form->softmax(b, w->s, n, seen, w->m + r, w->l + r, alpha, w->p);
        form->pv(b, w->p, n, alpha, o);
    }
}

static void prefill_task(void *arg, int item, int worker)
{
    const struct attn_job *job = arg;
    const struct cpu *c = job->c;
    const struct kern_attn_form *form = &c->isa->att.prefill[c->kv.page.dtype];
    struct attn_scratch *w = &c->aw->scratch[worker];
    int unit = cpu_attn_unit(c->aw, job->n_unit, item);
    const struct ops_seg *seg = &job->seg[unit / c->d.n_kv];
    /* The last block of queries sees most keys: it goes first. */
    int block = c->aw->first[unit + 1] - 1 - item;
    int row0 = seg->row0 + block * c->aw->block_q;
    struct attn_rows t;

    rows_at(job, unit, row0, min_int(c->aw->block_q, seg->row0 + seg->n_row - row0), &t);
    for (int i = 0; i < t.n; i++)
        pack_group(c, form, row0 + i, t.head, t.q + i * c->g * KERN_ATTN_Q_BYTES(c->aw->hd));
    int n_row = t.n * c->g, n_slot = own_slot(seg, t.head, row0 + t.n - 1) + 1;
    memset(w->o, 0, (size_t)n_row * c->aw->hd * sizeof *w->o);
    for (int i = 0; i < n_row; i++) {
        w->m[i] = -INFINITY;
        w->l[i] = 0;
    }
    const uint32_t *table = c->kv.table + cpu_kv_index(c, seg->lane, job->layer, t.head) * c->kv.max_pages;
    for (int slot0 = 0; slot0 < n_slot; slot0 += KERN_ATTN_BLOCK) {
        struct kern_attn_block b;
        const unsigned char *made = cpu_panels_at(c, unit / c->d.n_kv, t.head, slot0);
        cpu_attn_block(c, form, table, slot0, n_slot - slot0, made, w->panel, &b);
        prefill_block(c, form, &t, &b, slot0, w);
    }
    for (int i = 0; i < n_row; i++) {
        t.m[i] = w->m[i];
        t.inv_l[i] = 1 / w->l[i];
    }
    for (int i = 0; i < t.n; i++)
        put_group(c, row0 + i, t.head, w->o + (size_t)i * c->g * c->aw->hd, t.inv_l + i * c->g);
}

/* ---- prefill, pass 2 ----------------------------------------------------------------------------------- */

/* First row of a segment that is scored. */
static int scored_from(const struct ops_seg *seg)
{
    return seg->score_from > seg->row0 ? seg->score_from : seg->row0;
}

/* The sum over queries and the mean over the group are made here and in kern_attn_fns.colsum; another kind of score
 * (a maximum over queries, say) is another colsum. */
static void score_task(void *arg, int item, int worker)
{
    const struct attn_job *job = arg;
    const struct cpu *c = job->c;
    const struct kern_attn_form *form = &c->isa->att.prefill[c->kv.page.dtype];
    struct attn_scratch *w = &c->aw->scratch[worker];
    int unit = cpu_attn_unit(c->aw, job->n_unit, item);
    int slot0 = (item - c->aw->first[unit]) * KERN_ATTN_BLOCK;
    const struct ops_seg *seg = &job->seg[unit / c->d.n_kv];
    int head = unit % c->d.n_kv, end = seg->row0 + seg->n_row;
    int row0 = scored_from(seg), above = slot0 - own_slot(seg, head, row0);
    struct kern_attn_block b;
    struct attn_rows t;
    float acc[KERN_ATTN_BLOCK] = { 0 };
    int32_t seen[KERN_ATTN_TILE];

    row0 += above > 0 ? above : 0; /* rows before it end before this block */
    rows_at(job, unit, row0, end - row0, &t);
    int n_slot = own_slot(seg, head, end - 1) + 1 - slot0, own = own_slot(seg, head, row0);
    const uint32_t *table = c->kv.table + cpu_kv_index(c, seg->lane, job->layer, head) * c->kv.max_pages;
    cpu_attn_block(c, form, table, slot0, n_slot, cpu_panels_at(c, unit / c->d.n_kv, head, slot0), w->panel, &b);
    for (int r = 0, n; r < t.n * c->g; r += n) {
        n = min_int(t.n * c->g - r, KERN_ATTN_TILE);
        b.n_page = tile_seen(own, c->g, r, n, slot0, seen);
        form->qk(&b, t.q + r * KERN_ATTN_Q_BYTES(b.hd), n, w->s);
        c->isa->att.colsum(w->s, n, b.n_page * SLOTS, seen, t.m + r, t.inv_l + r, acc);
    }
    float *score = cpu_score_row(c, seg->lane, head) + slot0;
    for (int i = 0; i < min_int(n_slot, KERN_ATTN_BLOCK); i++)
        score[i] += acc[i] * (1.0f / c->g);
}

void cpu_attn_rows(struct cpu *c, int layer, const struct ops_pass *pass)
{
    int *first = c->aw->first, n_kv = c->d.n_kv;
    struct attn_job job = { c, pass, NULL, pass->seg, pass->n_seg * n_kv, layer };

    /* Long blocks of queries where each makes its panels. No result depends on where they are cut. */
    int rows = (int)((int64_t)pass->n_row * c->d.n_head / (BLOCK_TASKS * c->cfg.n_threads));
    if (cpu_panels_make(c, layer, pass) || rows < BLOCK_ROWS)
        rows = BLOCK_ROWS;
    rows = min_int(rows, BLOCK_MAX);
    c->aw->block_q = block_queries(c, rows);
    first[0] = 0;
    for (int u = 0; u < job.n_unit; u++)
        first[u + 1] = first[u] + ceil_div(pass->seg[u / n_kv].n_row, c->aw->block_q);
    workers_run(c->workers, first[job.n_unit], prefill_task, &job);
}

void cpu_attn_score(struct cpu *c, int layer, const struct ops_pass *pass)
{
    int *first = c->aw->first, n_kv = c->d.n_kv;
    struct attn_job job = { c, pass, NULL, pass->seg, pass->n_seg * n_kv, layer };

    first[0] = 0;
    for (int u = 0; u < job.n_unit; u++) {
        const struct ops_seg *seg = &pass->seg[u / n_kv];
        int end = seg->row0 + seg->n_row;
        int n_slot = scored_from(seg) < end ? own_slot(seg, u % n_kv, end - 1) + 1 : 0;
        first[u + 1] = first[u] + ceil_div(n_slot, KERN_ATTN_BLOCK);
    }
    if (first[job.n_unit] > 0)
        workers_run(c->workers, first[job.n_unit], score_task, &job);
}

void cpu_attn_prefill(void *be, int layer, const struct ops_pass *pass)
{
    cpu_attn_rows(be, layer, pass);
    cpu_attn_score(be, layer, pass);
}

void cpu_score_begin(void *be, int lane, int n_slot)
{
    struct cpu *c = be;
    assert(n_slot <= c->aw->max_slots);
    for (int head = 0; head < c->d.n_kv; head++)
        memset(cpu_score_row(c, lane, head), 0, (size_t)n_slot * sizeof(float));
}

void cpu_score_read(void *be, int lane, int n_slot, float *out)
{
    struct cpu *c = be;
    assert(n_slot <= c->aw->max_slots);
    for (int head = 0; head < c->d.n_kv; head++)
        memcpy(out + (size_t)head * n_slot, cpu_score_row(c, lane, head), (size_t)n_slot * sizeof(float));
}

/* ---- decode ----------------------------------------------------------------------------------------------- */

/* The parts of a split record. */
struct attn_rec {
    float *s; /* [g][KERN_ATTN_BLOCK]: logits, then 2^(s - m) */
    float *o; /* [g][hd] */
    float *m, *l; /* [g] */
    float *w; /* [g]: 2^(m - maximum of all), once the splits are merged */
};

static struct attn_rec rec_at(const struct cpu *c, int i)
{
    float *f = c->aw->rec + (size_t)i * c->aw->rec_floats;
    float *o = f + c->g * KERN_ATTN_BLOCK, *m = o + c->g * c->aw->hd;
    return (struct attn_rec){ f, o, m, m + c->g, m + 2 * c->g };
}

/* o and 1/l of a unit from its splits, left in record 0's o and l; record 0's m becomes the maximum of all. */
static void decode_merge(const struct cpu *c, int rec0, int n_split)
{
    int hd = c->aw->hd;
    struct attn_rec to = rec_at(c, rec0);
    for (int j = 0; j < c->g; j++) {
        float max = to.m[j];
        for (int i = 1; i < n_split; i++) {
            float m = rec_at(c, rec0 + i).m[j];
            max = m > max ? m : max;
        }
        for (int i = 0; i < n_split; i++) {
            struct attn_rec from = rec_at(c, rec0 + i);
            float w = from.w[j] = exp2f(from.m[j] - max);
            if (i == 0) {
                to.l[j] *= w;
                for (int d = 0; d < hd; d++)
                    to.o[j * hd + d] *= w;
                continue;
            }
            to.l[j] += from.l[j] * w;
            for (int d = 0; d < hd; d++)
                to.o[j * hd + d] += from.o[j * hd + d] * w;
        }
        to.m[j] = max;
        to.l[j] = 1 / to.l[j];
    }
}

static void decode_score(const struct cpu *c, const struct kern_rule *rule, const uint32_t *table, int len, int rec0)
{
    const struct kern_page_layout *pl = &c->kv.page;
    const float *inv_l = rec_at(c, rec0).l;
    for (int i = 0; i < len; i += SLOTS) {
        struct attn_rec rec = rec_at(c, rec0 + i / KERN_ATTN_BLOCK);
        if (i % KERN_ATTN_BLOCK == 0)
            for (int j = 0; j < c->g; j++)
                rec.w[j] = rec.w[j] * inv_l[j] * (rule->weight / c->g);
        float *score = (float *)(cpu_page(c, table[i / SLOTS]) + pl->score);
        c->isa->att.probs(rec.s + i % KERN_ATTN_BLOCK, c->g, min_int(len - i, SLOTS), rec.w, rule->decay, score);
    }
}

/* The slot with the lowest score among those whose position is in [sink, pos - recent] and not pinned; ties: the lowest
 * position. -1: there is none. A page is looked through only if its lowest score is as low as any before. */
static int32_t decode_victim(const struct cpu *c, const struct kern_rule *rule, const uint32_t *table, int len,
                             int32_t pos)
{
    const struct kern_page_layout *pl = &c->kv.page;
    int32_t best = -1, best_pos = 0, last = pos - rule->recent;
    float best_score = INFINITY;

    for (int i = 0; i < len; i += SLOTS) {
        const unsigned char *page = cpu_page(c, table[i / SLOTS]);
        const int32_t *p = (const int32_t *)(page + pl->pos);
        const float *score = (const float *)(page + pl->score);
        int n = min_int(len - i, SLOTS);
        if (c->isa->att.lowest(score, p, n, rule->sink, last) > best_score)
            continue;
        for (int j = 0; j < n; j++) {
            if (score[j] > best_score || p[j] < rule->sink || p[j] > last || cpu_pinned(rule, p[j]))
                continue;
            if (best >= 0 && score[j] == best_score && p[j] > best_pos)
                continue;
            best = i + j;
            best_pos = p[j];
            best_score = score[j];
        }
    }
    return best;
}

static void decode_end(const struct attn_job *job, int unit, struct attn_scratch *w)
{
    struct cpu *c = job->c;
    const struct ops_seg *seg = &job->seg[unit / c->d.n_kv];
    const struct kern_rule *rule = job->rule ? &job->rule[seg - job->pass->seg] : NULL;
    int head = unit % c->d.n_kv, rec0 = c->aw->first[unit];
    size_t at = cpu_kv_index(c, seg->lane, job->layer, head);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages;

    decode_merge(c, rec0, c->aw->first[unit + 1] - rec0);
    struct attn_rec all = rec_at(c, rec0);
    put_group(c, seg->row0, head, all.o, all.l);
    if (!rule)
        return;
    if (rule->ring > 0) {
        cpu_ring_put(c, rule, job->layer, seg, head, all.m, all.l);
        if (rule->burst)
            cpu_ring_score(c, rule, job->layer, seg, head, w);
    } else if (rule->weight != 0 || rule->decay != 1)
        decode_score(c, rule, table, c->kv.len[at], rec0);
    if (c->kv.len[at] >= c->kv.cap[at])
        c->kv.victim[at] = decode_victim(c, rule, table, c->kv.len[at], seg->pos0);
}

/* This worker's next split is likely that of task `item`, the one after the other workers': its first pages are what the block's
 * last ones prefetch. */
static void prefetch_from(const struct attn_job *job, int item, struct kern_attn_block *b)
{
    const struct cpu *c = job->c;
    if (item >= c->aw->first[job->n_unit])
        return;
    int unit = cpu_attn_unit(c->aw, job->n_unit, item), slot0 = (item - c->aw->first[unit]) * KERN_ATTN_BLOCK;
    size_t at = cpu_kv_index(c, job->seg[unit / c->d.n_kv].lane, job->layer, unit % c->d.n_kv);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages + slot0 / SLOTS;
    for (int i = 0; i < 2 && slot0 + i * SLOTS < c->kv.len[at]; i++)
        b->v[b->n_page + i] = cpu_page(c, table[i]) + c->kv.page.k;
}

static void decode_task(void *arg, int item, int worker)
{
    const struct attn_job *job = arg;
    const struct cpu *c = job->c;
    const struct kern_attn_form *form = &c->isa->att.decode[c->kv.page.dtype];
    struct attn_scratch *w = &c->aw->scratch[worker];
    int unit = cpu_attn_unit(c->aw, job->n_unit, item);
    const struct ops_seg *seg = &job->seg[unit / c->d.n_kv];
    int head = unit % c->d.n_kv, slot0 = (item - c->aw->first[unit]) * KERN_ATTN_BLOCK;
    size_t at = cpu_kv_index(c, seg->lane, job->layer, head);
    const uint32_t *table = c->kv.table + at * c->kv.max_pages;
    struct attn_rec rec = rec_at(c, item);
    struct kern_attn_block b;
    int32_t seen[KERN_ATTN_TILE];
    float alpha[KERN_ATTN_TILE];

    cpu_attn_block(c, form, table, slot0, c->kv.len[at] - slot0, NULL, w->panel, &b);
    if (!form->panel)
        prefetch_from(job, item + workers_count(c->workers), &b);
    pack_group(c, form, seg->row0, head, w->q);
    memset(rec.o, 0, (size_t)c->g * b.hd * sizeof *rec.o);
    for (int r = 0, n; r < c->g; r += n) {
        n = min_int(c->g - r, KERN_ATTN_TILE);
        for (int i = 0; i < n; i++) {
            seen[i] = c->kv.len[at] - slot0;
            rec.m[r + i] = -INFINITY;
            rec.l[r + i] = 0;
        }
        form->qk(&b, w->q + r * KERN_ATTN_Q_BYTES(b.hd), n, rec.s + r * KERN_ATTN_BLOCK);
        form->softmax(&b, rec.s + r * KERN_ATTN_BLOCK, n, seen, rec.m + r, rec.l + r, alpha, w->p);
        form->pv(&b, w->p, n, alpha, rec.o + (size_t)r * b.hd);
    }
    if (atomic_fetch_sub_explicit(&c->aw->left[unit], 1, memory_order_acq_rel) == 1)
        decode_end(job, unit, w);
}

void cpu_attn_decode(void *be, int layer, const struct ops_pass *pass, const struct kern_rule *rule)
{
    struct cpu *c = be;
    struct cpu_attn_work *aw = c->aw;
    int n_kv = c->d.n_kv, done = 0;

    cpu_panels_forget(c);
    /* As many segments at a time as there are records for: all of them, unless they are very long. */
    while (done < pass->n_seg) {
        struct attn_job job = { c, pass, rule, pass->seg + done, 0, layer };
        int seg = done, task = 0;
        for (; seg < pass->n_seg; seg++) {
            int at_seg = task;
            for (int h = 0; h < n_kv; h++) {
                int u = (seg - done) * n_kv + h, len = c->kv.len[cpu_kv_index(c, pass->seg[seg].lane, layer, h)];
                assert(len > 0 && len <= aw->max_slots);
                aw->first[u] = task;
                atomic_store_explicit(&aw->left[u], ceil_div(len, KERN_ATTN_BLOCK), memory_order_relaxed);
                task += ceil_div(len, KERN_ATTN_BLOCK);
            }
            if ((size_t)task > aw->n_rec) {
                task = at_seg;
                break;
            }
        }
        job.n_unit = (seg - done) * n_kv;
        aw->first[job.n_unit] = task;
        workers_run_shares(c->workers, task, decode_task, &job);
        done = seg;
    }
}
