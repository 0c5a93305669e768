/* avx2/linear_k.c - tiles of the K types. */
#include "kernels/avx2/linear_tile.h"

#define TILE_k4(R, how) tile_packed(s, t, n_group, out, R, 4, how, SUPER)
#define TILE_k5(R, how) tile_packed(s, t, n_group, out, R, 5, how, SUPER)
#define TILE_k6(R, how) tile_packed(s, t, n_group, out, R, 6, how, SUPER)
TILE_KIND(k4)
TILE_KIND(k5)
TILE_KIND(k6)
tile_fn *const kern_tiles_k_avx2[3][3][TILE] = { TILES(k4), TILES(k5), TILES(k6) };
