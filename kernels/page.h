/* page.h - the one page format of the KV pool.
 *
 * A page holds KERN_PAGE_SLOTS slots of ONE KV head of ONE layer: K, V and, per slot, its position and its
 * score. Every page of a pool has the same byte size, so one free list serves all layers and heads.
 *
 * The layout is what a matrix kernel wants as its B panel, so that prefill and decode attention read pages
 * in place: K is grouped by 4 bytes along the head dimension, V by slot pairs (bf16) or plain (f32, int8).
 * hd = head_dim rounded up to 16; the padding has the value zero (or, in a slot never written, the byte).
 *
 *   dtype   K                                     V
 *   f32     f32  [hd]   [32 slots]                f32  [32 slots][hd]
 *   bf16    bf16 [hd/2] [32 slots][2]             bf16 [32/2 slots][hd][2]   (slot = 2 i + j)
 *   int8    u8   [hd/4] [32 slots][4] (q + 128)   s8   [32 slots][hd]
 *
 * K is stored after RoPE at its true position, so the order of slots means nothing to attention. A slot is
 * "in use" when its index is below the (lane, layer, head)'s length; slots at or past the length are never
 * read as scores, but their bytes must be finite (pages are zeroed when they enter a table).
 * int8: value = (q - 128) * k_scale[slot] for K, q * v_scale[slot] for V; symmetric, scale = absmax / 127.
 */
#ifndef SKVD_KERNELS_PAGE_H
#define SKVD_KERNELS_PAGE_H

#include <stddef.h>
#include <stdint.h>

#define KERN_PAGE_SLOTS 32

enum kern_kv_dtype { KERN_KV_F32 = 0, KERN_KV_BF16, KERN_KV_INT8, KERN_KV_DTYPES };

/* Byte offsets inside a page; the same for all pages of a pool. All are multiples of 64. */
struct kern_page_layout {
    enum kern_kv_dtype dtype;
    int head_dim;   /* the model's */
    int hd;         /* rounded up to 16 */
    size_t k, v;    /* K and V blocks, as in the table above */
    size_t k_scale; /* f32 [32]; int8 only, else 0 */
    size_t v_scale; /* f32 [32]; int8 only, else 0 */
    size_t pos;     /* int32 [32]: position in the sequence */
    size_t score;   /* f32 [32]: what the policy knows of the slot */
    size_t bytes;   /* of a whole page, a multiple of 64 */
};

void kern_page_layout_init(struct kern_page_layout *pl, enum kern_kv_dtype dtype, int head_dim);

const char *kern_kv_dtype_name(enum kern_kv_dtype dtype);

/* Bytes of K and V alone of one slot: what "bytes of a full cache" is counted in. */
size_t kern_page_slot_bytes(const struct kern_page_layout *pl);

#endif
