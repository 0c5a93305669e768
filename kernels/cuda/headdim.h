// headdim.h - the head sizes that attention kernels are compiled for.
#ifndef SKVD_KERNELS_CUDA_HEADDIM_H
#define SKVD_KERNELS_CUDA_HEADDIM_H

// GO(HD) for the head size at hand; nothing for one that is not compiled (cu_head_dim_ok says which are).
#ifdef CU_FEW_HEAD_SIZES // tests that are to be built quickly
#define BY_HEAD_DIM(hd, GO)                                                                        \
    switch (hd) {                                                                                  \
    case 64: GO(64); break;                                                                        \
    case 80: GO(80); break;                                                                        \
    }
#else
#define BY_HEAD_DIM(hd, GO)                                                                        \
    switch (hd) {                                                                                  \
    case 64: GO(64); break;                                                                        \
    case 80: GO(80); break;                                                                        \
    case 96: GO(96); break;                                                                        \
    case 128: GO(128); break;                                                                      \
    case 256: GO(256); break;                                                                      \
    }
#endif

#endif
