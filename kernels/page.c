/* page.c - offsets inside a page. */
#include "kernels/page.h"

#include <string.h>

static size_t page_align(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

static size_t page_element_bytes(enum kern_kv_dtype dtype)
{
    switch (dtype) {
    case KERN_KV_F32:
        return 4;
    case KERN_KV_BF16:
        return 2;
    default:
        return 1;
    }
}

void kern_page_layout_init(struct kern_page_layout *pl, enum kern_kv_dtype dtype, int head_dim)
{
    memset(pl, 0, sizeof *pl);
    pl->dtype = dtype;
    pl->head_dim = head_dim;
    pl->hd = (head_dim + 15) & ~15;

    size_t block = page_align((size_t)pl->hd * KERN_PAGE_SLOTS * page_element_bytes(dtype));
    size_t row = page_align(KERN_PAGE_SLOTS * 4);
    size_t at = 0;
    pl->k = at;
    at += block;
    pl->v = at;
    at += block;
    if (dtype == KERN_KV_INT8) {
        pl->k_scale = at;
        at += row;
        pl->v_scale = at;
        at += row;
    }
    pl->pos = at;
    at += row;
    pl->score = at;
    at += row;
    pl->bytes = at;
}

const char *kern_kv_dtype_name(enum kern_kv_dtype dtype)
{
    static const char *const name[KERN_KV_DTYPES] = { "f32", "bf16", "int8" };
    return (unsigned)dtype < KERN_KV_DTYPES ? name[dtype] : "?";
}

size_t kern_page_slot_bytes(const struct kern_page_layout *pl)
{
    size_t scales = pl->dtype == KERN_KV_INT8 ? 2 * sizeof(float) : 0;
    return 2 * (size_t)pl->head_dim * page_element_bytes(pl->dtype) + scales;
}
