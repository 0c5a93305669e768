/* avx512/linear.h - what the files of the AVX-512 linear kernels share. */
#ifndef SKVD_KERNELS_AVX512_LINEAR_H
#define SKVD_KERNELS_AVX512_LINEAR_H

#include "kernels/isa_linear.h"

/* kern_linear_fns.mul for PBF16 with the bf16 products of AVX512_BF16 (linear_bf16.c, compiled for it). */
void kern_mul_pbf16_avx512bf16(const struct kern_packed *w, int panel, int g0, const struct kern_input *a, int row0,
                               int n_row, float *acc);

#endif
