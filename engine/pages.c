/* pages.c - see pages.h. The free list is a stack: a page just freed is warm and goes out first. */
#include "engine/pages.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct pages {
    const struct ops *ops;
    void *be;
    struct ops_kv *kv;
    int n_layer, n_kv, n_lane, lanes_free;
    int64_t n_free, reserved;
    uint32_t *free_page;  /* [n_pages] stack */
    int32_t *held;        /* [lane][layer][head] pages in the table */
    int64_t *lane_held;   /* [lane] */
    bool *lane_used;
    unsigned char *seen;  /* [n_pages] for pages_check */
};

static size_t head_index(const struct pages *p, int lane, int layer, int head)
{
    return ((size_t)lane * p->n_layer + layer) * p->n_kv + head;
}

struct pages *pages_new(const struct ops *ops, void *be, struct ops_kv *kv, const struct ops_dims *dims, int n_lane,
                        struct skv_error *err)
{
    struct pages *p = calloc(1, sizeof *p);
    size_t heads = (size_t)n_lane * dims->n_layer * dims->n_kv;

    if (p != NULL) {
        p->ops = ops;
        p->be = be;
        p->kv = kv;
        p->n_layer = dims->n_layer;
        p->n_kv = dims->n_kv;
        p->n_lane = p->lanes_free = n_lane;
        p->free_page = malloc((size_t)kv->n_pages * sizeof *p->free_page);
        p->held = calloc(heads, sizeof *p->held);
        p->lane_held = calloc((size_t)n_lane, sizeof *p->lane_held);
        p->lane_used = calloc((size_t)n_lane, sizeof *p->lane_used);
        p->seen = calloc(kv->n_pages, 1);
    }
    if (p == NULL || p->free_page == NULL || p->held == NULL || p->lane_held == NULL || p->lane_used == NULL ||
        p->seen == NULL) {
        pages_free(p);
        skv_fail(err, SKV_NO_MEMORY, "no memory for the page tables of %u pages", kv->n_pages);
        return NULL;
    }
    for (uint32_t i = 0; i < kv->n_pages; i++) /* low ids go out first */
        p->free_page[i] = kv->n_pages - 1 - i;
    p->n_free = kv->n_pages;
    return p;
}

void pages_free(struct pages *p)
{
    if (p == NULL)
        return;
    free(p->free_page);
    free(p->held);
    free(p->lane_held);
    free(p->lane_used);
    free(p->seen);
    free(p);
}

int pages_lane_get(struct pages *p)
{
    for (int lane = 0; lane < p->n_lane; lane++) {
        if (p->lane_used[lane])
            continue;
        p->lane_used[lane] = true;
        p->lanes_free--;
        for (size_t i = head_index(p, lane, 0, 0); i < head_index(p, lane + 1, 0, 0); i++) {
            p->kv->len[i] = 0;
            p->kv->cap[i] = INT32_MAX;
            p->kv->victim[i] = -1;
        }
        return lane;
    }
    return -1;
}

void pages_lane_put(struct pages *p, int lane)
{
    assert(p->lane_used[lane]);
    for (int layer = 0; layer < p->n_layer; layer++)
        for (int head = 0; head < p->n_kv; head++) {
            pages_trim(p, lane, layer, head, 0);
            p->kv->len[head_index(p, lane, layer, head)] = 0;
        }
    assert(p->lane_held[lane] == 0);
    p->lane_used[lane] = false;
    p->lanes_free++;
}

int pages_lanes(const struct pages *p)
{
    return p->n_lane;
}

int pages_lanes_free(const struct pages *p)
{
    return p->lanes_free;
}

void pages_grow(struct pages *p, int lane, int layer, int head, int n)
{
    size_t i = head_index(p, lane, layer, head);
    uint32_t *table = p->kv->table + i * p->kv->max_pages;
    int need = (int)pages_for(n), first = p->held[i];

    if (need <= first)
        return;
    assert(need <= p->kv->max_pages);
    assert(need - first <= p->n_free); /* the reservation's promise */
    while (p->held[i] < need)
        table[p->held[i]++] = p->free_page[--p->n_free];
    p->lane_held[lane] += need - first;
    p->ops->page_clear(p->be, table + first, need - first);
}

void pages_trim(struct pages *p, int lane, int layer, int head, int n)
{
    size_t i = head_index(p, lane, layer, head);
    const uint32_t *table = p->kv->table + i * p->kv->max_pages;
    int need = (int)pages_for(n);

    while (p->held[i] > need) {
        p->free_page[p->n_free++] = table[--p->held[i]];
        p->lane_held[lane]--;
    }
}

bool pages_reserve(struct pages *p, int64_t n)
{
    if (n > (int64_t)p->kv->n_pages - p->reserved)
        return false;
    p->reserved += n;
    return true;
}

void pages_unreserve(struct pages *p, int64_t n)
{
    assert(n <= p->reserved);
    p->reserved -= n;
}

int64_t pages_total(const struct pages *p)
{
    return p->kv->n_pages;
}

int64_t pages_used(const struct pages *p)
{
    return p->kv->n_pages - p->n_free;
}

int64_t pages_reserved(const struct pages *p)
{
    return p->reserved;
}

int64_t pages_lane_held(const struct pages *p, int lane)
{
    return p->lane_held[lane];
}

int64_t pages_head_held(const struct pages *p, int lane, int layer, int head)
{
    return p->held[head_index(p, lane, layer, head)];
}

static const char *check_lane(struct pages *p, int lane, int64_t *held)
{
    int64_t lane_sum = 0;

    for (int layer = 0; layer < p->n_layer; layer++)
        for (int head = 0; head < p->n_kv; head++) {
            size_t i = head_index(p, lane, layer, head);
            const uint32_t *table = p->kv->table + i * p->kv->max_pages;
            if (p->held[i] < pages_for(p->kv->len[i]))
                return "a head has more slots than its pages hold";
            for (int k = 0; k < p->held[i]; k++) {
                if (table[k] >= p->kv->n_pages || p->seen[table[k]])
                    return "a page is in two places";
                p->seen[table[k]] = 1;
            }
            lane_sum += p->held[i];
        }
    if (lane_sum != p->lane_held[lane])
        return "a lane's count of pages is off";
    if (!p->lane_used[lane] && lane_sum != 0)
        return "a free lane holds pages";
    *held += lane_sum;
    return NULL;
}

const char *pages_check(struct pages *p)
{
    int64_t held = 0;

    memset(p->seen, 0, p->kv->n_pages);
    for (int64_t i = 0; i < p->n_free; i++) {
        if (p->seen[p->free_page[i]])
            return "a page is free twice";
        p->seen[p->free_page[i]] = 1;
    }
    for (int lane = 0; lane < p->n_lane; lane++) {
        const char *wrong = check_lane(p, lane, &held);
        if (wrong != NULL)
            return wrong;
    }
    if (held + p->n_free != p->kv->n_pages)
        return "free and held pages do not add up to the pool";
    return NULL;
}
