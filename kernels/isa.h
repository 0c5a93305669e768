/* isa.h - instruction sets: what this CPU has, and the micro-kernels of each, chosen at run time.
 *
 * A micro-kernel is single-threaded and works on one task's range; kernels/cpu cuts passes into tasks. scalar/ is
 * the definition and the oracle of the tests; avx2/ and avx512/ hold only what is faster and are compiled with
 * flags of their own (one convenience library per ISA). An entry that an ISA leaves NULL is filled from the one below.
 * The environment variable SKVD_ISA forces one like --isa does.
 */
#ifndef SKVD_KERNELS_ISA_H
#define SKVD_KERNELS_ISA_H

#include "kernels/isa_attn.h"
#include "kernels/isa_linear.h"
#include "protocol/error.h"

struct kern_isa {
    const char *name; /* "scalar", "avx2", "avx512" */
    struct kern_linear_fns lin;
    struct kern_attn_fns att;
};

/* The table for a name (NULL or "auto": the best this CPU has). NULL with *err when this CPU or build lacks it;
 * the message lists what there is. */
const struct kern_isa *kern_isa_get(const char *name, struct skv_error *err);

/* All that this CPU can run, best last; for tests and benches. Returns how many (at most 4). */
int kern_isa_list(const struct kern_isa *out[4]);

#endif
