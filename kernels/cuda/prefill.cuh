// prefill.cuh - FlashAttention-2 over pages, and the score pass.
//
// Queries are packed for GQA: packed row R of a segment is (row R / g, head R % g of the KV head's group), so a
// page of K and V is read once for its whole group. Page layout needs no rearranging: a word of K holds dimensions
// (2 kp, 2 kp + 1) of a slot and a word of V the slots (2 p, 2 p + 1) of a dimension, which is what a lane's B
// fragment of mma.m16n8k16 holds. Only Q goes through ldmatrix.
//
// Two blocks a multiprocessor hide each other's waits, so a block must fit into half of the least shared memory there is (100 KB,
// 1 KB of it the system's a block). With heads past 128 the tiles of Q and K therefore have their columns shuffled by row
// instead of padding, and K and V take turns in one.
#ifndef SKVD_KERNELS_CUDA_PREFILL_CUH
#define SKVD_KERNELS_CUDA_PREFILL_CUH

#include "kernels/cuda/params.h"

#define FA_ROWS 64                      // packed rows a block
#define FA_WIDE(HD) ((HD) > 128)        // one tile for K and V in turn, no padding in those of K and Q
#define FA_KLD(HD) (KERN_PAGE_SLOTS + (FA_WIDE(HD) ? 0 : 8)) // words a row of the K tile: bank = 8 t + group, no conflicts
#define FA_VLD(HD) ((HD) + 8)           // words a row of the V tile
#define FA_QLD(HD) (FA_WIDE(HD) ? (HD) : (HD) + 8) // bf16 a row of the Q tile
#define SC_QLD(HD) ((HD) + 8)           // and of the score pass's
// Head sizes past 128 split O's dimensions over two warps, so that it stays in registers.
#define FA_DSPLIT(HD) (FA_WIDE(HD) ? 2 : 1)
#define FA_THREADS(HD) (FA_ROWS / 16 * 32 * FA_DSPLIT(HD))
#define FA_KWORDS(HD) ((HD) / 2 * FA_KLD(HD))
#define FA_VWORDS(HD) (KERN_PAGE_SLOTS / 2 * FA_VLD(HD))
#define FA_SMEM(HD)                                                                                \
    (FA_ROWS * FA_QLD(HD) * 2 + 2 * KERN_PAGE_SLOTS * 4 +                                          \
     4 * (FA_WIDE(HD) ? FA_VWORDS(HD) : FA_KWORDS(HD) + FA_VWORDS(HD)))

// Where the word of dimensions (2 kp, 2 kp + 1) of a slot is in the K tile. Shuffled: the four rows (kp = t mod 4) of eight slots
// that a fragment takes lie in 32 banks, and eight words stay together, of which cp16 copies four.
template <int HD> __device__ __forceinline__ int fa_k_at(int kp, int slot)
{
    return kp * FA_KLD(HD) + (FA_WIDE(HD) ? slot ^ (kp & 3) << 3 : slot);
}

// Where a run of eight dimensions of a row of Q is in its tile. Shuffled: one run of eight rows, a matrix of ldmatrix, lies in 32
// banks.
template <int HD> __device__ __forceinline__ int fa_q_at(int row, int run)
{
    return row * FA_QLD(HD) + (FA_WIDE(HD) ? run ^ (row & 7) : run) * 8;
}

// Copies of a loop that are laid out: their addresses take registers, which wide heads need for O.
template <int HD> constexpr int fa_copies = FA_WIDE(HD) ? 1 : 4;

// Start (bf16) or do (int8) the copy of a page's K into the tile kt [HD/2][FA_KLD] and its scales into ks [32].
template <int HD, int DT>
__device__ __forceinline__ void fa_load_k(const kv_view &kv, const unsigned char *page, unsigned *kt, float *ks)
{
    if constexpr (DT == KERN_KV_BF16) {
        const unsigned *src = reinterpret_cast<const unsigned *>(page + kv.k);
#pragma unroll(fa_copies<HD>)
        for (int i = threadIdx.x; i < HD / 2 * 8; i += FA_THREADS(HD))
            cp16(kt + fa_k_at<HD>(i >> 3, (i & 7) * 4), src + (i >> 3) * KERN_PAGE_SLOTS + (i & 7) * 4);
    } else {
#pragma unroll(fa_copies<HD>)
        for (int i = threadIdx.x; i < HD / 2 * KERN_PAGE_SLOTS; i += FA_THREADS(HD))
            kt[fa_k_at<HD>(i >> 5, i & 31)] = page_k_pair<DT>(kv, page, i >> 5, i & 31);
        if (threadIdx.x < KERN_PAGE_SLOTS)
            ks[threadIdx.x] = page_k_scale<DT>(kv, page, threadIdx.x);
    }
}

// The same for V: vt [16][FA_VLD].
template <int HD, int DT>
__device__ __forceinline__ void fa_load_v(const kv_view &kv, const unsigned char *page, unsigned *vt, float *vs)
{
    if constexpr (DT == KERN_KV_BF16) {
        const unsigned *src = reinterpret_cast<const unsigned *>(page + kv.v);
#pragma unroll(fa_copies<HD>)
        for (int i = threadIdx.x; i < KERN_PAGE_SLOTS / 2 * (HD / 4); i += FA_THREADS(HD)) {
            int p = i / (HD / 4), c = i % (HD / 4) * 4;
            cp16(vt + p * FA_VLD(HD) + c, src + p * HD + c);
        }
    } else {
#pragma unroll(fa_copies<HD>)
        for (int i = threadIdx.x; i < KERN_PAGE_SLOTS / 2 * HD; i += FA_THREADS(HD))
            vt[i / HD * FA_VLD(HD) + i % HD] = page_v_pair<DT, HD>(kv, page, i / HD, i % HD);
        if (threadIdx.x < KERN_PAGE_SLOTS)
            vs[threadIdx.x] = page_v_scale<DT>(kv, page, threadIdx.x);
    }
}

// s[4][4] = Q K^T of the 16 rows from row0 and the tile's 32 slots.
template <int HD>
__device__ __forceinline__ void fa_scores(const unsigned short *qt, int row0, const unsigned *kt, float s[4][4])
{
    int lane = threadIdx.x & 31, group = lane >> 2, t = lane & 3;
    for (int n = 0; n < 4; n++)
        for (int j = 0; j < 4; j++)
            s[n][j] = 0.0f;
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        unsigned a[4];
        ldm_x4(a, qt + fa_q_at<HD>(row0 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            unsigned b[2] = { kt[fa_k_at<HD>(k * 8 + t, n * 8 + group)], kt[fa_k_at<HD>(k * 8 + t + 4, n * 8 + group)] };
            mma_bf16(s[n], a, b, s[n]);
        }
    }
}

// Online softmax of one 16 x 32 tile: scales and masks s (slot0: the tile's first slot; lim: last visible slot of
// the lane's two rows), turns it into exp(s - m), updates m and l, and gives the factors for O.
template <int DT>
__device__ __forceinline__ void fa_softmax(float s[4][4], const float *ks, float scale, int slot0, const int lim[2],
                                           float m[2], float l[2], float factor[2])
{
    int t = threadIdx.x & 3;
    float top[2] = { -INFINITY, -INFINITY };
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int c = n * 8 + t * 2 + (j & 1), i = j >> 1;
            float v = s[n][j] * scale * (DT == KERN_KV_INT8 ? ks[c] : 1.0f);
            s[n][j] = slot0 + c <= lim[i] ? v : -INFINITY;
            top[i] = fmaxf(top[i], s[n][j]);
        }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], 2));
        float next = fmaxf(m[i], top[i]);
        factor[i] = m[i] == -INFINITY ? 0.0f : expf(m[i] - next);
        m[i] = next;
        l[i] *= factor[i];
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float p = s[n][j] == -INFINITY ? 0.0f : expf(s[n][j] - m[j >> 1]);
            s[n][j] = p;
            l[j >> 1] += p;
        }
}

// o += P V for the warp's dimensions [d0, d0 + 8 ND).
template <int HD, int DT, int ND>
__device__ __forceinline__ void fa_output(const float s[4][4], const unsigned *vt, const float *vs, int d0,
                                          float o[ND][4])
{
    int lane = threadIdx.x & 31, group = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int n = 2 * k + (i >> 1), j = (i & 1) * 2, c = n * 8 + t * 2;
            float f0 = DT == KERN_KV_INT8 ? vs[c] : 1.0f, f1 = DT == KERN_KV_INT8 ? vs[c + 1] : 1.0f;
            a[i] = bf16_pack(s[n][j] * f0, s[n][j + 1] * f1);
        }
#pragma unroll
        for (int n = 0; n < ND; n++) {
            unsigned b[2] = { vt[(k * 8 + t) * FA_VLD(HD) + d0 + n * 8 + group],
                              vt[(k * 8 + t + 4) * FA_VLD(HD) + d0 + n * 8 + group] };
            mma_bf16(o[n], a, b, o[n]);
        }
    }
}

// Pass 1. Grid: (ceil(most rows of a segment * g / 64), n_kv, n_seg).
template <int HD, int DT>
__global__ void __launch_bounds__(FA_THREADS(HD)) fa_prefill(fa_params p)
{
    DYN_SMEM(unsigned short, qt);
    unsigned *kt = reinterpret_cast<unsigned *>(qt + FA_ROWS * FA_QLD(HD));
    unsigned *vt = kt + (FA_WIDE(HD) ? 0 : FA_KWORDS(HD));
    float *ks = reinterpret_cast<float *>(vt + FA_VWORDS(HD)), *vs = ks + KERN_PAGE_SLOTS;
    const int ND = HD / 8 / FA_DSPLIT(HD), ahead = FA_WIDE(HD) ? 0 : 1; // copies under way while one is read
    int sg = blockIdx.z, kh = blockIdx.y, packed0 = (int)blockIdx.x * FA_ROWS;
    int row0 = p.seg.row0[sg], n_packed = p.seg.n_row[sg] * p.g;
    if (packed0 >= n_packed)
        return;
    int warp = (threadIdx.x >> 5) / FA_DSPLIT(HD), half = (threadIdx.x >> 5) % FA_DSPLIT(HD);
    int lane = threadIdx.x & 31, group = lane >> 2, t = lane & 3, d0 = half * ND * 8;
    size_t idx = kv_index(p.kv, p.seg.lane[sg], p.layer, kh);

    for (int i = threadIdx.x; i < FA_ROWS * (HD / 8); i += FA_THREADS(HD)) {
        int r = i / (HD / 8), c = i % (HD / 8), packed = min(packed0 + r, n_packed - 1);
        size_t src = ((size_t)(row0 + packed / p.g) * p.n_head + kh * p.g + packed % p.g) * HD + c * 8;
        cp16(qt + fa_q_at<HD>(r, c), p.q + src);
    }
    int lim[2], last = min(packed0 + FA_ROWS, n_packed) - 1;
    for (int i = 0; i < 2; i++) {
        int packed = min(packed0 + warp * 16 + group + 8 * i, n_packed - 1);
        lim[i] = p.pass.slot[(row0 + packed / p.g) * p.kv.n_kv + kh];
    }
    int n_page = p.pass.slot[(row0 + last / p.g) * p.kv.n_kv + kh] / KERN_PAGE_SLOTS + 1;
    fa_load_k<HD, DT>(p.kv, kv_page(p.kv, idx, 0), kt, ks);
    cp_commit();
    if constexpr (!FA_WIDE(HD))
        fa_load_v<HD, DT>(p.kv, kv_page(p.kv, idx, 0), vt, vs);
    cp_commit();

    float o[ND][4], m[2] = { -INFINITY, -INFINITY }, l[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int n = 0; n < ND; n++)
        for (int j = 0; j < 4; j++)
            o[n][j] = 0.0f;
    for (int pg = 0; pg < n_page; pg++) {
        float s[4][4], factor[2];
        const unsigned char *next = pg + 1 < n_page ? kv_page(p.kv, idx, pg + 1) : NULL;
        cp_wait<ahead>(); // K of this page (and Q) has come; V may be under way
        __syncthreads();
        fa_scores<HD>(qt, warp * 16, kt, s);
        if constexpr (!FA_WIDE(HD))
            fa_softmax<DT>(s, ks, p.scale, pg * KERN_PAGE_SLOTS, lim, m, l, factor);
        __syncthreads(); // all warps are done with K
        if constexpr (FA_WIDE(HD)) {
            fa_load_v<HD, DT>(p.kv, kv_page(p.kv, idx, pg), vt, vs);
            cp_commit();
            fa_softmax<DT>(s, ks, p.scale, pg * KERN_PAGE_SLOTS, lim, m, l, factor);
        } else {
            if (next)
                fa_load_k<HD, DT>(p.kv, next, kt, ks);
            cp_commit();
        }
#pragma unroll
        for (int n = 0; n < ND; n++)
            for (int j = 0; j < 4; j++)
                o[n][j] *= factor[j >> 1];
        cp_wait<ahead>(); // V of this page
        __syncthreads();
        fa_output<HD, DT, ND>(s, vt, vs, d0, o);
        __syncthreads();
        if (next) {
            if constexpr (FA_WIDE(HD))
                fa_load_k<HD, DT>(p.kv, next, kt, ks);
            else
                fa_load_v<HD, DT>(p.kv, next, vt, vs);
        }
        cp_commit();
    }
    cp_wait<0>();
    for (int i = 0; i < 2; i++) {
        l[i] += __shfl_xor_sync(FULL_WARP, l[i], 1);
        l[i] += __shfl_xor_sync(FULL_WARP, l[i], 2);
        int packed = packed0 + warp * 16 + group + 8 * i, row = row0 + packed / p.g;
        if (packed >= n_packed)
            continue;
        int head = kh * p.g + packed % p.g;
        float inv = 1.0f / l[i];
        unsigned *out = reinterpret_cast<unsigned *>(p.out + ((size_t)row * p.n_head + head) * HD + d0);
#pragma unroll
        for (int n = 0; n < ND; n++)
            out[n * 4 + t] = bf16_pack(o[n][2 * i] * inv, o[n][2 * i + 1] * inv);
        if (t == 0 && half == 0 && row >= p.seg.score_from[sg])
            p.lse[(size_t)head * p.lse_rows + row] = m[i] + logf(l[i]);
    }
}

// --- pass 2: scores -------------------------------------------------------------------------------------

#define SC_WARPS 4
#define SC_ROWS 32                       // packed query rows a step
#define SC_SLOTS (SC_WARPS * KERN_PAGE_SLOTS) // slots a block: one page a warp
#define SC_SMEM(HD) (2 * SC_ROWS * SC_QLD(HD) * 2 + 2 * SC_ROWS * 8)

// Start the copy of the packed rows [at, at + 32) and their lse and limits into one buffer.
template <int HD>
__device__ __forceinline__ void sc_load(const score_params &p, int kh, int from, int at, int n, unsigned short *qt,
                                        float *lse, int *lim)
{
    for (int i = threadIdx.x; i < SC_ROWS * (HD / 8); i += SC_WARPS * 32) {
        int r = i / (HD / 8), c = i % (HD / 8) * 8, packed = min(at + r, n - 1);
        cp16(qt + r * SC_QLD(HD) + c,
             p.q + ((size_t)(from + packed / p.g) * p.n_head + kh * p.g + packed % p.g) * HD + c);
    }
    if (threadIdx.x < SC_ROWS) {
        int packed = at + threadIdx.x, row = from + packed / p.g;
        bool in = packed < n;
        lse[threadIdx.x] = in ? p.lse[(size_t)(kh * p.g + packed % p.g) * p.lse_rows + row] : 0.0f;
        lim[threadIdx.x] = in ? p.pass.slot[row * p.kv.n_kv + kh] : -1;
    }
}

// score[head][slot] += mean over the group, sum over the scored rows, of exp(q k scale - lse). A warp keeps the K of
// its page and the sums of its 32 slots in registers while the query rows pass by: no atomics, a fixed order.
// Grid: (ceil(most slots / 128), n_kv, n_seg).
template <int HD, int DT>
__global__ void __launch_bounds__(SC_WARPS * 32) score_pass(score_params p)
{
    DYN_SMEM(unsigned short, qt);
    float *lse = reinterpret_cast<float *>(qt + 2 * SC_ROWS * SC_QLD(HD));
    int *lim = reinterpret_cast<int *>(lse + 2 * SC_ROWS);
    int sg = blockIdx.z, kh = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int group = lane >> 2, t = lane & 3, slot0 = (int)blockIdx.x * SC_SLOTS + warp * KERN_PAGE_SLOTS;
    int row0 = p.seg.row0[sg], end = row0 + p.seg.n_row[sg], from = max(p.seg.score_from[sg], row0);
    int n = (end - from) * p.g;
    if (n <= 0)
        return;
    int last = p.pass.slot[(end - 1) * p.kv.n_kv + kh];
    if ((int)blockIdx.x * SC_SLOTS > last)
        return;
    size_t idx = kv_index(p.kv, p.seg.lane[sg], p.layer, kh);
    bool mine = slot0 <= last; // a warp past the end only helps with the copies
    unsigned kf[HD / 16][4][2];
    float ks[4][2], sum[4][2];
    const unsigned char *page = kv_page(p.kv, idx, min(slot0, last) / KERN_PAGE_SLOTS);
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int k = 0; k < HD / 16; k++) {
            kf[k][c][0] = page_k_pair<DT>(p.kv, page, k * 8 + t, c * 8 + group);
            kf[k][c][1] = page_k_pair<DT>(p.kv, page, k * 8 + t + 4, c * 8 + group);
        }
        for (int j = 0; j < 2; j++) {
            ks[c][j] = p.scale * page_k_scale<DT>(p.kv, page, c * 8 + t * 2 + j);
            sum[c][j] = 0.0f;
        }
    }
    sc_load<HD>(p, kh, from, 0, n, qt, lse, lim);
    cp_commit();
    for (int at = 0, buf = 0; at < n; at += SC_ROWS, buf ^= 1) {
        if (at + SC_ROWS < n)
            sc_load<HD>(p, kh, from, at + SC_ROWS, n, qt + (buf ^ 1) * SC_ROWS * SC_QLD(HD), lse + (buf ^ 1) * SC_ROWS,
                        lim + (buf ^ 1) * SC_ROWS);
        cp_commit();
        cp_wait<1>();
        __syncthreads();
#pragma unroll
        for (int half = 0; half < SC_ROWS / 16; half++) {
            float s[4][4];
            for (int c = 0; c < 4; c++)
                for (int j = 0; j < 4; j++)
                    s[c][j] = 0.0f;
#pragma unroll
            for (int k = 0; k < HD / 16; k++) {
                unsigned a[4];
                ldm_x4(a, qt + (buf * SC_ROWS + half * 16 + (lane & 15)) * SC_QLD(HD) + k * 16 + (lane >> 4) * 8);
#pragma unroll
                for (int c = 0; c < 4; c++)
                    mma_bf16(s[c], a, kf[k][c], s[c]);
            }
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int r = buf * SC_ROWS + half * 16 + group + (j >> 1) * 8;
                    if (mine && slot0 + c * 8 + t * 2 + (j & 1) <= lim[r])
                        sum[c][j & 1] += expf(s[c][j] * ks[c][j & 1] - lse[r]);
                }
        }
        __syncthreads();
    }
    cp_wait<0>();
    float *out = p.row[p.seg.lane[sg]] + (size_t)kh * p.stride[p.seg.lane[sg]];
#pragma unroll
    for (int c = 0; c < 4; c++)
        for (int j = 0; j < 2; j++) {
            float v = sum[c][j];
            for (int o = 4; o < 32; o <<= 1)
                v += __shfl_xor_sync(FULL_WARP, v, o);
            int slot = slot0 + c * 8 + t * 2 + j;
            if (group == 0 && slot <= last)
                out[slot] += v / (float)p.g;
        }
}

#endif
