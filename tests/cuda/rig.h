// rig.h - what the shim tests share: counting, random numbers, device arrays, a KV pool.
#ifndef SKVD_TESTS_CUDA_RIG_H
#define SKVD_TESTS_CUDA_RIG_H

#include "kernels/cuda/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

extern "C" {
#include "kernels/blocks.h"
#include "kernels/isa_attn.h"
}

namespace rig
{

inline int passed, failed;

inline float from_bf16(unsigned h)
{
    return kern_bf16_to_f32((uint16_t)h);
}

inline unsigned short to_bf16(float f)
{
    return kern_f32_to_bf16(f);
}

inline void check(bool ok, const char *what, const char *file, int line)
{
    if (ok) {
        passed++;
        return;
    }
    failed++;
    printf("%s:%d: %s\n", file, line, what);
}
#define CHECK(cond) rig::check((cond), #cond, __FILE__, __LINE__)

// Report |got - want| <= tol with the case's name.
inline void close_to(const char *name, double got, double want, double tol)
{
    if (fabs(got - want) <= tol) {
        passed++;
        return;
    }
    failed++;
    printf("%s: got %.9g, want %.9g, tolerance %.3g\n", name, got, want, tol);
}

// worst = the larger; not a number is the largest of all (std::max would lose it).
inline void worsen(double &worst, double v)
{
    if (!(v <= worst))
        worst = v;
}

// The last line of a test program, and its exit status. What tests print must be small: the first 40 failures say
// enough.
inline int done()
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

inline std::mt19937 rng(12345);

inline float uniform(float lo = -1.0f, float hi = 1.0f)
{
    return lo + (hi - lo) * (float)(rng() >> 8) / 16777216.0f;
}

inline int between(int lo, int hi) // both included
{
    return lo + (int)(rng() % (unsigned)(hi - lo + 1));
}

inline std::vector<float> randoms(size_t n, float scale = 1.0f)
{
    std::vector<float> v(n);
    for (float &x : v)
        x = uniform(-scale, scale);
    return v;
}

inline void cuda_ok(cudaError_t e, const char *file, int line)
{
    if (e != cudaSuccess) {
        printf("%s:%d: CUDA error %d\n", file, line, (int)e);
        exit(2);
    }
}
#define OK(call) rig::cuda_ok((call), __FILE__, __LINE__)

// A device array that frees itself.
template <class T> struct dev {
    T *p = nullptr;
    size_t n = 0;

    dev() = default;
    explicit dev(size_t count) : n(count)
    {
        OK(cudaMalloc(reinterpret_cast<void **>(&p), (n ? n : 1) * sizeof(T)));
    }
    explicit dev(const std::vector<T> &v) : dev(v.size())
    {
        put(v);
    }
    dev(const dev &) = delete;
    dev &operator=(const dev &) = delete;
    dev &operator=(dev &&o) noexcept
    {
        std::swap(p, o.p);
        std::swap(n, o.n);
        return *this;
    }
    dev(dev &&o) noexcept : p(o.p), n(o.n)
    {
        o.p = nullptr;
    }
    ~dev()
    {
        cudaFree(p);
    }
    void put(const std::vector<T> &v)
    {
        if (!v.empty())
            OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> get() const
    {
        std::vector<T> v(n);
        if (n)
            OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

// A pool with its tables: `lanes` lanes of one layer, pages in a shuffled order. The host copy of the pool is the
// truth before put() and what get() brings back after kernels ran.
struct kv_rig {
    kern_page_layout pl;
    int lanes, n_kv, max_pages;
    std::vector<unsigned char> pool;
    std::vector<uint32_t> table;
    std::vector<int32_t> len, cap, victim;
    dev<unsigned char> d_pool;
    dev<uint32_t> d_table;
    dev<int32_t> d_len, d_cap, d_victim;
    kv_view view;

    kv_rig(kern_kv_dtype dtype, int hd, int n_lane, int kv_heads, int pages)
        : lanes(n_lane), n_kv(kv_heads), max_pages(pages)
    {
        size_t heads = (size_t)lanes * n_kv, n_page = heads * pages;
        kern_page_layout_init(&pl, dtype, hd);
        pool.assign(n_page * pl.bytes, 0);
        table.resize(n_page);
        for (size_t i = 0; i < n_page; i++)
            table[i] = (uint32_t)i;
        std::shuffle(table.begin(), table.end(), rng);
        len.assign(heads, 0);
        cap.assign(heads, INT32_MAX);
        victim.assign(heads, -1);
        d_pool = make<unsigned char>(pool.size());
        d_table = make<uint32_t>(n_page);
        d_len = make<int32_t>(heads);
        d_cap = make<int32_t>(heads);
        d_victim = make<int32_t>(heads);
        view = { d_pool.p,         pl.bytes, (uint32_t)pl.k, (uint32_t)pl.v, (uint32_t)pl.k_scale, (uint32_t)pl.v_scale,
                 (uint32_t)pl.pos, (uint32_t)pl.score, 1, n_kv, max_pages, d_table.p, d_len.p, d_cap.p, d_victim.p };
    }
    template <class T> static dev<T> make(size_t n)
    {
        return dev<T>(n);
    }
    size_t index(int lane, int head) const
    {
        return (size_t)lane * n_kv + head;
    }
    unsigned char *page(int lane, int head, int slot)
    {
        return &pool[table[index(lane, head) * max_pages + slot / KERN_PAGE_SLOTS] * pl.bytes];
    }
    int32_t &pos(int lane, int head, int slot)
    {
        return reinterpret_cast<int32_t *>(page(lane, head, slot) + pl.pos)[slot % KERN_PAGE_SLOTS];
    }
    float &score(int lane, int head, int slot)
    {
        return reinterpret_cast<float *>(page(lane, head, slot) + pl.score)[slot % KERN_PAGE_SLOTS];
    }
    std::vector<float> k(int lane, int head, int slot)
    {
        std::vector<float> v(pl.head_dim);
        kern_attn_load_k(&pl, page(lane, head, slot), slot % KERN_PAGE_SLOTS, v.data());
        return v;
    }
    std::vector<float> v(int lane, int head, int slot)
    {
        std::vector<float> v(pl.head_dim);
        kern_attn_load_v(&pl, page(lane, head, slot), slot % KERN_PAGE_SLOTS, v.data());
        return v;
    }
    // Random K and V in the first n slots of a head, positions ascending, scores random.
    void fill(int lane, int head, int n, float k_size)
    {
        kern_attn_fns f;
        memset(&f, 0, sizeof f);
        kern_attn_scalar(&f);
        for (int s = 0; s < n; s++) {
            std::vector<float> a = randoms(pl.head_dim, k_size), b = randoms(pl.head_dim);
            f.store(&pl, page(lane, head, s), s % KERN_PAGE_SLOTS, a.data(), b.data());
            pos(lane, head, s) = s;
            score(lane, head, s) = uniform(0.0f, 1.0f);
        }
        len[index(lane, head)] = n;
    }
    void put()
    {
        d_pool.put(pool);
        d_table.put(table);
        d_len.put(len);
        d_cap.put(cap);
        d_victim.put(victim);
    }
    void get()
    {
        pool = d_pool.get();
        len = d_len.get();
        cap = d_cap.get();
        victim = d_victim.get();
    }
};

} // namespace rig

#endif
