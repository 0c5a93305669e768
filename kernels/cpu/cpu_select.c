/* cpu_select.c - phase 3 after a prefill: what each head of a layer keeps, and the gather to the front of its pages.
 *
 * kept = protected (sink, recent, pins; always) + the best of the rest until the budget. "Best" is a 64-bit key, score
 * above position, so that no two are equal and the set is unique whatever the algorithm: a radix selection, O(n).
 *   Ada-KV (Feng et al. 2024): heads share the layer's budget; each keeps its best head_floor share first.
 *   CriticalKV (Feng et al. 2025): half of a head's choice goes by score, the rest by (score + eps) * |Wo v|_1.
 * Scores of different heads compare because a head's row sums to the number of queries.
 */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu_attn.h"

#define SLOTS       KERN_PAGE_SLOTS
#define VALUE_CHUNK 64 /* slots whose value norms one task computes */

enum keep { DROP = 0, KEEP };

/* One head's arrays, [max_slots] each. */
struct select_head {
    int32_t *pos;
    int32_t *cand; /* slots of the candidates: not protected, not yet chosen */
    float *score;  /* pooled */
    float *norm;   /* value norm of cand[i] */
    uint64_t *key, *tmp;
    uint8_t *keep;
    int n, n_cand, take; /* slots; candidates; how many of them stay */
    int n_protected, n_floor;
    const uint32_t *table;
    size_t at; /* index into the kv arrays */
};

struct cpu_select_work {
    struct select_head *head; /* [n_kv] */
    void *mem;
    uint64_t *all, *all_tmp;  /* [n_kv * max_slots]: the heads' candidates together */
    float *v;                 /* [workers][VALUE_CHUNK][head_dim] */
    unsigned char *spare;     /* [workers] a page */
    int *chunk;               /* [n_kv + 1] first value chunk of each head */
};

struct select_job {
    struct cpu *c;
    const struct kern_rule *rule;
    int lane, layer, n_query;
    float *kept_mass;
};

int cpu_select_init(struct cpu *c)
{
    struct cpu_attn_work *aw = c->aw;
    struct cpu_select_work *sw = calloc(1, sizeof *sw);
    size_t n = ((size_t)aw->max_slots + 63) & ~(size_t)63, n_kv = c->d.n_kv;
    size_t each = n * (2 * sizeof(int32_t) + 2 * sizeof(float) + 2 * sizeof(uint64_t) + 1);
    struct kern_page_layout pl;

    if (!(aw->select = sw))
        return -1;
    kern_page_layout_init(&pl, c->cfg.kv_dtype, c->d.head_dim);
    sw->head = calloc(n_kv, sizeof *sw->head);
    sw->mem = cpu_attn_alloc(aw, n_kv, each);
    sw->all = cpu_attn_alloc(aw, n_kv * n, sizeof *sw->all);
    sw->all_tmp = cpu_attn_alloc(aw, n_kv * n, sizeof *sw->all_tmp);
    sw->v = cpu_attn_alloc(aw, (size_t)c->cfg.n_threads * VALUE_CHUNK * c->d.head_dim, sizeof *sw->v);
    sw->spare = cpu_attn_alloc(aw, c->cfg.n_threads, pl.bytes);
    sw->chunk = cpu_attn_alloc(aw, n_kv + 1, sizeof *sw->chunk);
    if (!sw->head || !sw->mem || !sw->all || !sw->all_tmp || !sw->v || !sw->spare || !sw->chunk)
        return -1;
    for (size_t h = 0; h < n_kv; h++) {
        struct select_head *s = &sw->head[h];
        s->key = (uint64_t *)((char *)sw->mem + h * each);
        s->tmp = s->key + n;
        s->pos = (int32_t *)(s->tmp + n);
        s->cand = s->pos + n;
        s->score = (float *)(s->cand + n);
        s->norm = s->score + n;
        s->keep = (uint8_t *)(s->norm + n);
    }
    return 0;
}

void cpu_select_fini(struct cpu *c)
{
    struct cpu_select_work *sw = c->aw->select;
    if (!sw)
        return;
    free(sw->head);
    free(sw->mem);
    free(sw->all);
    free(sw->all_tmp);
    free(sw->v);
    free(sw->spare);
    free(sw->chunk);
    free(sw);
    c->aw->select = NULL;
}

/* ---- keys ------------------------------------------------------------------------------------------------ */

/* An integer in the order of the float; +0 and -0 are equal. */
static uint32_t float_order(float f)
{
    union { float f; uint32_t u; } v = { .f = f + 0.0f };
    return v.u & 0x80000000u ? ~v.u : v.u | 0x80000000u;
}

/* Larger is better; equal scores: the lower position, then the lower head. */
static uint64_t key_of(float score, int32_t pos, int head)
{
    return (uint64_t)float_order(score) << 32 | (uint64_t)(0xffffffu - (uint32_t)pos) << 8 | (255u - (uint32_t)head);
}

/* The k-th largest of n different keys, 1 <= k <= n: digit by digit from the top, keeping only those that share the
 * digits so far. tmp [n]. */
static uint64_t key_select(const uint64_t *key, int n, int k, uint64_t *tmp)
{
    const uint64_t *from = key;
    for (int shift = 56; shift >= 0 && n > 1; shift -= 8) {
        int count[256] = { 0 }, digit = 255, m = 0;
        for (int i = 0; i < n; i++)
            count[from[i] >> shift & 255]++;
        while (count[digit] < k)
            k -= count[digit--];
        if (count[digit] == n)
            continue;
        for (int i = 0; i < n; i++)
            if ((from[i] >> shift & 255) == (unsigned)digit)
                tmp[m++] = from[i];
        from = tmp;
        n = m;
    }
    return from[0];
}

/* ---- scores and protection ---------------------------------------------------------------------------------- */

static void pool(const struct kern_rule *rule, int width, int shift, const float *in, int n, float *out)
{
    int from = rule->pool_from > 0 ? rule->pool_from : 0, to = rule->pool_to < n ? rule->pool_to : n;
    int half = width / 2;

    memcpy(out, in, (size_t)n * sizeof *out);
    if (width <= 1)
        return;
    for (int i = from; i < to; i++) {
        int at = i - shift;
        int a = at - half > from ? at - half : from, b = at + half < to - 1 ? at + half : to - 1;
        float sum = 0, max = a <= b ? in[a] : 0;
        for (int j = a; j <= b; j++) {
            sum += in[j];
            max = in[j] > max ? in[j] : max;
        }
        out[i] = rule->pool_kind == KERN_POOL_MAX ? max : sum / width;
    }
}

/* Task: one head's positions, scores, protected slots and candidates. */
static void prepare_head(void *arg, int h, int worker)
{
    const struct select_job *job = arg;
    struct cpu *c = job->c;
    const struct kern_page_layout *pl = &c->kv.page;
    const struct kern_rule *rule = job->rule;
    struct select_head *s = &c->aw->select->head[h];
    int32_t newest = 0;

    (void)worker;
    s->at = cpu_kv_index(c, job->lane, job->layer, h);
    s->table = c->kv.table + s->at * c->kv.max_pages;
    s->n = c->kv.len[s->at];
    s->n_cand = s->take = s->n_protected = s->n_floor = 0;
    for (int i = 0; i < s->n; i += SLOTS) {
        int n = s->n - i < SLOTS ? s->n - i : SLOTS;
        memcpy(s->pos + i, cpu_page(c, s->table[i / SLOTS]) + pl->pos, (size_t)n * sizeof *s->pos);
    }
    for (int i = 0; i < s->n; i++)
        newest = s->pos[i] > newest ? s->pos[i] : newest;
    if (rule->use_score)
        pool(rule, rule->pool, rule->pool_shift, cpu_score_row(c, job->lane, h), s->n, s->score);
    else /* the oldest go: the position is the score (exact in f32 up to 2^24) */
        for (int i = 0; i < s->n; i++)
            s->score[i] = (float)s->pos[i];
    for (int i = 0; i < s->n; i++) {
        int32_t pos = s->pos[i];
        bool safe = pos < rule->sink || pos > newest - rule->recent || cpu_pinned(rule, pos);
        s->keep[i] = safe ? KEEP : DROP;
        s->n_protected += safe;
        if (!safe)
            s->cand[s->n_cand++] = i;
    }
}

/* ---- how many each head keeps -------------------------------------------------------------------------------- */

static void head_keys(struct select_head *s, int h)
{
    for (int i = 0; i < s->n_cand; i++)
        s->key[i] = key_of(s->score[s->cand[i]], s->pos[s->cand[i]], h);
}

/* What the heads' floors leave of the layer's budget goes to the best of all. */
static void share_budget(struct cpu *c, int pooled)
{
    struct cpu_select_work *sw = c->aw->select;
    int n = 0;

    for (int h = 0; h < c->d.n_kv; h++) {
        struct select_head *s = &sw->head[h];
        head_keys(s, h);
        uint64_t floor_key = s->n_floor > 0 ? key_select(s->key, s->n_cand, s->n_floor, s->tmp) : UINT64_MAX;
        for (int i = 0; i < s->n_cand; i++)
            if (s->key[i] < floor_key)
                sw->all[n++] = s->key[i];
        s->take = s->n_floor;
    }
    if (pooled >= n) {
        for (int h = 0; h < c->d.n_kv; h++)
            sw->head[h].take = sw->head[h].n_cand;
        return;
    }
    if (pooled == 0)
        return;
    uint64_t cut = key_select(sw->all, n, pooled, sw->all_tmp);
    for (int i = 0; i < n; i++)
        if (sw->all[i] >= cut)
            sw->head[255 - (sw->all[i] & 255)].take++;
}

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

static void budgets(struct cpu *c, const struct kern_rule *rule)
{
    int pooled = 0;
    bool shared = rule->use_score && rule->head_floor < 1;

    for (int h = 0; h < c->d.n_kv; h++) {
        struct select_head *s = &c->aw->select->head[h];
        int budget = rule->budget > s->n_protected ? rule->budget - s->n_protected : 0;
        s->take = min_int(budget, s->n_cand);
        s->n_floor = min_int((int)floorf((float)budget * rule->head_floor), s->n_cand);
        pooled += budget - s->n_floor;
    }
    if (shared)
        share_budget(c, pooled);
}

/* ---- who stays -------------------------------------------------------------------------------------------------- */

/* The best k candidates by the keys move to the kept. */
static void choose(struct select_head *s, int k)
{
    if (k <= 0)
        return;
    uint64_t cut = k < s->n_cand ? key_select(s->key, s->n_cand, k, s->tmp) : 0;
    int m = 0;
    for (int i = 0; i < s->n_cand; i++) {
        if (s->key[i] >= cut)
            s->keep[s->cand[i]] = KEEP;
        else
            s->cand[m++] = s->cand[i];
    }
    s->n_cand = m;
    s->take -= k;
}

/* How many of a head's budget go by the first smoothing alone. */
static int first_part(const struct kern_rule *rule, const struct select_head *s)
{
    if (s->take >= s->n_cand)
        return s->take;
    if (rule->wide > 1 && rule->use_score)
        return (int)((float)s->take * rule->narrow);
    return rule->by_value ? s->take / 2 : s->take;
}

/* Task: the choice by score; all of it, or the first part where the value norms or a wider smoothing have a say. */
static void choose_by_score(void *arg, int h, int worker)
{
    const struct select_job *job = arg;
    struct select_head *s = &job->c->aw->select->head[h];

    (void)worker;
    head_keys(s, h);
    choose(s, first_part(job->rule, s));
}

/* Task: value norms of a chunk of a head's candidates. */
static void value_chunk(void *arg, int item, int worker)
{
    const struct select_job *job = arg;
    struct cpu *c = job->c;
    struct cpu_select_work *sw = c->aw->select;
    int h = 0, head_dim = c->d.head_dim;
    float *v = sw->v + (size_t)worker * VALUE_CHUNK * head_dim;

    while (item >= sw->chunk[h + 1])
        h++;
    struct select_head *s = &sw->head[h];
    int from = (item - sw->chunk[h]) * VALUE_CHUNK, n = min_int(s->n_cand - from, VALUE_CHUNK);
    for (int i = 0; i < n; i++) {
        int slot = s->cand[from + i];
        kern_attn_load_v(&c->kv.page, cpu_page(c, s->table[slot / SLOTS]), slot % SLOTS, v + i * head_dim);
    }
    cpu_value_norm(c, job->layer, h, v, n, s->norm + from, worker);
}

/* Task: the second half, by (score / n_query + eps) * norm. */
static void choose_by_value(void *arg, int h, int worker)
{
    const struct select_job *job = arg;
    struct select_head *s = &job->c->aw->select->head[h];
    float per_query = 1.0f / (job->n_query > 0 ? job->n_query : 1);

    (void)worker;
    if (s->take == 0)
        return;
    for (int i = 0; i < s->n_cand; i++) {
        float score = (s->score[s->cand[i]] * per_query + job->rule->value_eps) * s->norm[i];
        s->key[i] = key_of(score, s->pos[s->cand[i]], h);
    }
    choose(s, s->take);
}

/* Task: the rest, by scores smoothed widely: what lies around and after the best, whole passages. */
static void choose_by_wide(void *arg, int h, int worker)
{
    const struct select_job *job = arg;
    const struct kern_rule *rule = job->rule;
    struct select_head *s = &job->c->aw->select->head[h];

    (void)worker;
    if (s->take == 0)
        return;
    pool(rule, rule->wide, rule->wide_shift, cpu_score_row(job->c, job->lane, h), s->n, s->score);
    head_keys(s, h);
    choose(s, s->take);
}

static void second_half(struct select_job *job)
{
    struct cpu *c = job->c;
    struct cpu_select_work *sw = c->aw->select;

    if (job->rule->wide > 1 && job->rule->use_score) {
        workers_run(c->workers, c->d.n_kv, choose_by_wide, job);
        return;
    }

    sw->chunk[0] = 0;
    for (int h = 0; h < c->d.n_kv; h++) {
        const struct select_head *s = &sw->head[h];
        sw->chunk[h + 1] = sw->chunk[h] + (s->take > 0 ? (s->n_cand + VALUE_CHUNK - 1) / VALUE_CHUNK : 0);
    }
    if (sw->chunk[c->d.n_kv] == 0)
        return;
    workers_run(c->workers, sw->chunk[c->d.n_kv], value_chunk, job);
    workers_run(c->workers, c->d.n_kv, choose_by_value, job);
}

/* ---- gather ----------------------------------------------------------------------------------------------------- */

/* Copy n elements of `size` bytes that lie `stride` bytes apart. */
static void copy_strided(unsigned char *to, const unsigned char *from, int n, size_t stride, size_t size)
{
    for (int i = 0; i < n; i++)
        memcpy(to + i * stride, from + i * stride, size);
}

/* K, V, scales, position and score of a slot. */
static void slot_copy(const struct kern_page_layout *pl, unsigned char *to, int i, const unsigned char *from, int j)
{
    int hd = pl->hd;
    switch (pl->dtype) {
    case KERN_KV_F32:
        copy_strided(to + pl->k + i * 4, from + pl->k + j * 4, hd, SLOTS * 4, 4);
        memcpy(to + pl->v + (size_t)i * hd * 4, from + pl->v + (size_t)j * hd * 4, (size_t)hd * 4);
        break;
    case KERN_KV_BF16:
        copy_strided(to + pl->k + i * 4, from + pl->k + j * 4, hd / 2, SLOTS * 4, 4);
        copy_strided(to + pl->v + ((size_t)i / 2 * hd * 2 + i % 2) * 2,
                     from + pl->v + ((size_t)j / 2 * hd * 2 + j % 2) * 2, hd, 4, 2);
        break;
    default:
        copy_strided(to + pl->k + i * 4, from + pl->k + j * 4, hd / 4, SLOTS * 4, 4);
        memcpy(to + pl->v + (size_t)i * hd, from + pl->v + (size_t)j * hd, hd);
        memcpy(to + pl->k_scale + i * 4, from + pl->k_scale + j * 4, 4);
        memcpy(to + pl->v_scale + i * 4, from + pl->v_scale + j * 4, 4);
    }
    memcpy(to + pl->pos + i * 4, from + pl->pos + j * 4, 4);
    memcpy(to + pl->score + i * 4, from + pl->score + j * 4, 4);
}

static int by_key(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Put slots [0, n) into the order of their positions, one cycle of the permutation after the other. Only a session that
 * went on after decode steps overwrote slots needs it. */
static void sort_slots(struct cpu *c, struct select_head *s, int n, unsigned char *spare)
{
    const struct kern_page_layout *pl = &c->kv.page;
    for (int i = 0; i < n; i++)
        s->key[i] = (uint64_t)s->pos[i] << 32 | (uint32_t)i;
    qsort(s->key, n, sizeof *s->key, by_key);
    for (int i = 0; i < n; i++)
        s->cand[i] = (int32_t)(s->key[i] & 0xffffffffu); /* slot i's pair comes from cand[i] */
    for (int i = 0; i < n; i++) {
        int to = i;
        if (s->cand[i] == i)
            continue;
        slot_copy(pl, spare, 0, cpu_page(c, s->table[i / SLOTS]), i % SLOTS);
        for (int from = s->cand[to]; from != i; from = s->cand[to]) {
            slot_copy(pl, cpu_page(c, s->table[to / SLOTS]), to % SLOTS, cpu_page(c, s->table[from / SLOTS]),
                      from % SLOTS);
            s->cand[to] = to;
            to = from;
        }
        slot_copy(pl, cpu_page(c, s->table[to / SLOTS]), to % SLOTS, spare, 0);
        s->cand[to] = to;
    }
}

/* Task: gather one head's kept slots, in place (no pair moves to a higher slot before the order is restored), each with
 * its unpooled score. */
static void gather_head(void *arg, int h, int worker)
{
    const struct select_job *job = arg;
    struct cpu *c = job->c;
    const struct kern_page_layout *pl = &c->kv.page;
    struct select_head *s = &c->aw->select->head[h];
    const float *score = cpu_score_row(c, job->lane, h);
    double kept = 0, all = 0;
    bool sorted = true;
    int n = 0;

    for (int i = 0; i < s->n; i++) {
        float f = job->rule->use_score ? score[i] : 0;
        all += f;
        if (s->keep[i] == DROP)
            continue;
        kept += f;
        unsigned char *to = cpu_page(c, s->table[n / SLOTS]);
        if (n != i)
            slot_copy(pl, to, n % SLOTS, cpu_page(c, s->table[i / SLOTS]), i % SLOTS);
        ((float *)(to + pl->score))[n % SLOTS] = f;
        s->pos[n] = s->pos[i];
        sorted = sorted && (n == 0 || s->pos[n - 1] < s->pos[n]);
        n++;
    }
    if (!sorted)
        sort_slots(c, s, n, c->aw->select->spare + worker * pl->bytes);
    if (job->kept_mass)
        job->kept_mass[h] = all > 0 ? (float)(kept / all) : s->n > 0 ? (float)n / s->n : 1;
    c->kv.len[s->at] = n;
    c->kv.victim[s->at] = -1;
}

/* ---- the operation --------------------------------------------------------------------------------------------- */

/* What a head may grow to: its budget while the layer is below its own, else what it has now. (Heads that share a budget
 * keep the share that they won.) */
static void set_caps(struct cpu *c, const struct kern_rule *rule)
{
    int64_t total = 0;
    bool shared = rule->use_score && rule->head_floor < 1;

    for (int h = 0; h < c->d.n_kv; h++)
        total += c->kv.len[c->aw->select->head[h].at];
    for (int h = 0; h < c->d.n_kv; h++) {
        size_t at = c->aw->select->head[h].at;
        bool full = shared && total >= (int64_t)rule->budget * c->d.n_kv;
        c->kv.cap[at] = rule->budget == 0 ? INT32_MAX
                        : full || c->kv.len[at] > rule->budget ? c->kv.len[at]
                                                               : rule->budget;
    }
}

void cpu_select(void *be, int lane, int layer, const struct kern_rule *rule, int n_query, float *kept_mass)
{
    struct cpu *c = be;
    struct select_job job = { c, rule, lane, layer, n_query, kept_mass };
    int n_kv = c->d.n_kv;

    assert(n_kv <= 256 && c->d.max_context <= 1 << 24); /* key_of */
    cpu_panels_forget(c);
    workers_run(c->workers, n_kv, prepare_head, &job);
    if (rule->budget > 0) {
        budgets(c, rule);
        workers_run(c->workers, n_kv, choose_by_score, &job);
        if (rule->by_value || rule->wide > 1)
            second_half(&job);
    } else {
        for (int h = 0; h < n_kv; h++)
            memset(c->aw->select->head[h].keep, KEEP, c->aw->select->head[h].n);
    }
    workers_run(c->workers, n_kv, gather_head, &job);
    set_caps(c, rule);
}
