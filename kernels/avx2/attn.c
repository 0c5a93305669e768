/* attn.c - attention's micro-kernels for avx2: none that beats the ISA below is in the table. */
#include "kernels/isa_attn.h"

void kern_attn_avx2(struct kern_attn_fns *f)
{
    (void)f;
}
