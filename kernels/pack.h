/* pack.h - repacking GGUF matrices into the panels of isa_linear.h.
 *
 * Values are kept exactly, in as many bytes as the file has, up to 3 % more (Q4_K, Q5_K) and what fills a last panel.
 */
#ifndef SKVD_KERNELS_PACK_H
#define SKVD_KERNELS_PACK_H

#include "kernels/isa_linear.h"
#include "kernels/ops.h"

/* Everything of *p but `data`, for a matrix of a known type; data needs n_panel * panel_bytes. */
void kern_pack_shape(struct kern_packed *p, const struct kern_tensor *t);

/* Fill one panel of p->data, which must have been zeroed (what hangs over the matrix stays zero). Panels may be
 * filled by different threads at once. */
void kern_pack_panel(const struct kern_packed *p, const struct kern_tensor *t, int panel);

#endif
