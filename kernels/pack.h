/* pack.h - repacking GGUF matrices into the panels of isa_linear.h.
 *
 * Values are kept exactly, but for the scales of the K types (a half times a small integer, up to 19 bits), which are
 * rounded to half precision: at most 2^-11 of a weight.
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
