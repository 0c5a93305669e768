/* isa_attn.h - the micro-kernels of attention: one task's tile of query rows against a block of pages.
 *
 * A block is up to KERN_ATTN_PAGES pages (256 slots). kernels/cpu/cpu_attn.c walks the blocks and calls, per tile
 * of at most KERN_ATTN_TILE query rows (the g query heads of one KV head times queries):
 *
 *   qk       s[row][slot] = q_row . k_slot, in units of log2: q was scaled by attn_scale * log2(e) when packed
 *   softmax  m, l, p: the online softmax of FlashAttention-2 (Dao 2023), p = 2^(s - m), per row
 *   pv       o[row] = o[row] * alpha[row] + sum over slots of p v
 *
 * and for scores colsum (prefill's pass 2) or probs (decode). The form of q, p and of the K and V they meet
 * (`struct kern_attn_form`) belongs to one ISA and cache dtype; nobody else looks inside.
 *
 * Numeric contract: what a row gets depends on that row, its pages and its `seen` only: every row has accumulators
 * of its own, added up in slot order whatever the tile; a slot that a row does not see gives it exact zeros. scalar/ is the
 * definition. Against it, for logits s of size |s| <= 32:
 *   f32   every ISA: o within 2e-6 * max|v|, l within 1e-5 relative
 *   bf16  scalar, and avx2's decode, use f32 for q and p: as f32. avx2's prefill has 16-bit integers for all four:
 *         o within 2^-11 * max|v|; avx512 rounds q and p to bf16: 2^-7 * max|v|
 *   int8  as bf16; decode in avx2 and avx512 has 15-bit integers for q: 2^-15 * max|v|
 */
#ifndef SKVD_KERNELS_ISA_ATTN_H
#define SKVD_KERNELS_ISA_ATTN_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/page.h"

#define KERN_ATTN_PAGES 8                                   /* pages of a block */
#define KERN_ATTN_BLOCK (KERN_ATTN_PAGES * KERN_PAGE_SLOTS) /* slots of a block: the stride of s and p */
#define KERN_ATTN_TILE  12                                  /* query rows of a tile at most, */
#define KERN_ATTN_ROWS  24                                  /* and of one that `attend` takes */

/* Bytes of a packed query row, of a row of p and of a panel: enough for every form. Multiples of 64. */
#define KERN_ATTN_Q_BYTES(hd)     ((size_t)(hd) * 4 + 64)
#define KERN_ATTN_P_BYTES         ((size_t)KERN_ATTN_BLOCK * 4 + 64)
#define KERN_ATTN_PANEL_BYTES(hd) ((size_t)(hd) * KERN_PAGE_SLOTS * 8)
#define KERN_ATTN_WORK_BYTES      (KERN_ATTN_TILE * KERN_ATTN_P_BYTES)

/* The pages of a block, as the form wants them. */
struct kern_attn_block {
    int hd;     /* head_dim rounded up to 16 */
    int n_page; /* 1 .. KERN_ATTN_PAGES */
    /* k[i], v[i]: K and V of page i, in the page or in a panel. The two that follow the last are valid addresses to
     * prefetch from: where the work goes on, or an earlier one again. */
    const unsigned char *k[KERN_ATTN_PAGES + 2], *v[KERN_ATTN_PAGES + 2];
    const float *k_scale[KERN_ATTN_PAGES], *v_scale[KERN_ATTN_PAGES]; /* [32] each; int8 only, else NULL */
};

struct kern_attn_form {
    /* Bring page i of a block into panel form: K at panels + i * KERN_ATTN_PANEL_BYTES, V half of that behind it, unscaled
     * for int8; or the form's own way into block_bytes(hd), a multiple of 64. A block's pages come in order. NULL: pages are
     * read in place. */
    void (*panel)(const struct kern_page_layout *pl, const unsigned char *page, int i, void *panels);
    size_t (*block_bytes)(int hd); /* at most KERN_ATTN_PAGES * KERN_ATTN_PANEL_BYTES(hd), which NULL says */
    /* One query row [head_dim] times scale, zero padded to hd; out: KERN_ATTN_Q_BYTES, 64-byte aligned. */
    void (*pack_q)(const float *q, int head_dim, int hd, float scale, void *out);
    /* s [n_row][KERN_ATTN_BLOCK], the first 32 n_page columns written; q rows KERN_ATTN_Q_BYTES(hd) apart. */
    void (*qk)(const struct kern_attn_block *b, const void *q, int n_row, float *s);
    /* Row r sees the first seen[r] slots of the block (<= 0: none, m and l stay; a row's first block must show it at
     * least one). m, l [n_row]: running maximum and sum, m = -INFINITY before the first block.
     * alpha [n_row] = 2^(old m - new m). p rows KERN_ATTN_P_BYTES apart. s becomes 2^(s - new m), 0 where nothing is seen. */
    void (*softmax)(const struct kern_attn_block *b, float *s, int n_row, const int32_t *seen, float *m,
                    float *l, float *alpha, void *p);
    /* o [n_row][hd] f32. */
    void (*pv)(const struct kern_attn_block *b, const void *p, int n_row, const float *alpha, float *o);
    /* qk, softmax and pv in one, of at most KERN_ATTN_ROWS rows, where a form has a better order for them than one after the other
     * (softmax and pv are NULL then); else NULL. seen doesn't fall from row to row. work: KERN_ATTN_WORK_BYTES, 64-byte
     * aligned. */
    void (*attend)(const struct kern_attn_block *b, const void *q, int n_row, const int32_t *seen, float *m, float *l,
                   float *o, void *work);
};

struct kern_attn_fns {
    struct kern_attn_form prefill[KERN_KV_DTYPES], decode[KERN_KV_DTYPES];
    /* acc [n_slot] += sum over rows, ascending, of 2^(s - m[row]) * inv_l[row] over the slots that the row sees. */
    void (*colsum)(const float *s, int n_row, int n_slot, const int32_t *seen, const float *m, const float *inv_l,
                   float *acc);
    /* score[j] = decay * score[j] + sum over rows of e[row][j] * w[row], j in [0, n), n <= 32: e is what softmax left of s, its
     * rows KERN_ATTN_BLOCK apart; w = 2^(m of then - m of all) / l of all, times what the policy wants. */
    void (*probs)(const float *e, int n_row, int n, const float *w, float decay, float *score);
    /* The lowest score among those of n <= 32 slots whose position is in [from, to]; INFINITY: there is none. score and pos have
     * 32 valid entries. */
    float (*lowest)(const float *score, const int32_t *pos, int n, int32_t from, int32_t to);
    /* out[i] = o[i] * f, n values. */
    void (*scaled)(const float *o, float f, int n, float *out);
    /* K and V rows [head_dim] f32 of one head into slot 0..31 of a page: round to nearest even; int8: scale = absmax / 127,
     * stored beside. */
    void (*store)(const struct kern_page_layout *pl, unsigned char *page, int slot, const float *k, const float *v);
};

/* Each fills or overrides the entries that it has something better for: call scalar first, then in ascending
 * order. Only for ISAs that this CPU has. */
void kern_attn_scalar(struct kern_attn_fns *f);
void kern_attn_avx2(struct kern_attn_fns *f);
void kern_attn_avx512(struct kern_attn_fns *f);

/* One slot of a page back as f32 [head_dim]; for selection and tests. Plain C: kernels/scalar/attn.c. */
void kern_attn_load_v(const struct kern_page_layout *pl, const unsigned char *page, int slot, float *v);
void kern_attn_load_k(const struct kern_page_layout *pl, const unsigned char *page, int slot, float *k);

#endif
