/* pages.h - the block manager: one pool of pages, a table per (lane, layer, KV head), exact reservations.
 *
 * Engine thread only. "lane" is a row of the KV state arrays (kernels/ops.h). Reservations are counted in pages and made at
 * admission, so that taking a page for a running sequence never fails.
 */
#ifndef SKVD_ENGINE_PAGES_H
#define SKVD_ENGINE_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "protocol/error.h"

struct pages;

/* n_lane lanes over a backend's KV arrays. NULL with *err. */
struct pages *pages_new(const struct ops *ops, void *be, struct ops_kv *kv, const struct ops_dims *dims, int n_lane,
                        struct skv_error *err);
void pages_free(struct pages *p);

/* A free lane with empty tables (len 0, cap INT32_MAX, victim -1), or -1. */
int pages_lane_get(struct pages *p);
int pages_lanes(const struct pages *p);
int pages_lanes_free(const struct pages *p);
/* Give a lane and all its pages back. */
void pages_lane_put(struct pages *p, int lane);

/* Make room for slots [0, n) of one head: takes and clears pages. The reservation must cover it. */
void pages_grow(struct pages *p, int lane, int layer, int head, int n);
/* Free the pages that hold no slot below n. */
void pages_trim(struct pages *p, int lane, int layer, int head, int n);

/* Pages that a head needs for n slots. */
static inline int64_t pages_for(int64_t n)
{
    return (n + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS;
}

/* Reservations: take n pages out of what may be promised; false when they are not there. */
bool pages_reserve(struct pages *p, int64_t n);
void pages_unreserve(struct pages *p, int64_t n);

int64_t pages_total(const struct pages *p);
int64_t pages_used(const struct pages *p);
int64_t pages_reserved(const struct pages *p);
int64_t pages_lane_held(const struct pages *p, int lane);
int64_t pages_head_held(const struct pages *p, int lane, int layer, int head);

/* free + held = total, no page in two tables, nothing held by a free lane. NULL when it adds up, else what is wrong.
 * Run after every step in debug and sanitizer builds. */
const char *pages_check(struct pages *p);

#endif
