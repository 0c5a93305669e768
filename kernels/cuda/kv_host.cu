// kv_host.cu - the host's side of the KV state: mirrors, what changed since the device last heard, the pool.
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/backend.h"

static void kv_view_set(const cuda *c, cu_rank &r, unsigned char *pool)
{
    const kern_page_layout &pl = c->page;
    r.kv.pool = pool;
    r.kv.page_bytes = pl.bytes;
    r.kv.k = (uint32_t)pl.k;
    r.kv.v = (uint32_t)pl.v;
    r.kv.k_scale = (uint32_t)pl.k_scale;
    r.kv.v_scale = (uint32_t)pl.v_scale;
    r.kv.pos = (uint32_t)pl.pos;
    r.kv.score = (uint32_t)pl.score;
    r.kv.n_layer = c->d.n_layer;
    r.kv.n_kv = r.n_kv;
    r.kv.max_pages = c->cfg.max_pages;
}

static int rank_init(const cuda *c, cu_rank &r, uint32_t n_pages, skv_error *err)
{
    size_t heads = (size_t)c->cfg.max_lanes * c->d.n_layer * r.n_kv, free_bytes = 0, total = 0;
    size_t pool = (size_t)n_pages * c->page.bytes, rest = heads * (12 + 4 * (size_t)c->cfg.max_pages);
    cu_use(r);
    if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess || pool + rest > free_bytes)
        return skv_fail(err, SKV_NO_MEMORY,
                        "device %d has %zu MiB free, the KV pool of %u pages needs %zu MiB (kv-memory)", r.device,
                        free_bytes >> 20, n_pages, (pool + rest) >> 20);
    unsigned char *p = static_cast<unsigned char *>(cu_alloc(r, pool, false, err));
    r.work_bytes -= p ? pool : 0; // the pool is the engine's to count
    if (!p || !(r.kv.table = static_cast<uint32_t *>(cu_alloc(r, heads * c->cfg.max_pages * 4, false, err))) ||
        !(r.kv.len = static_cast<int32_t *>(cu_alloc(r, heads * 4, false, err))) ||
        !(r.kv.cap = static_cast<int32_t *>(cu_alloc(r, heads * 4, false, err))) ||
        !(r.kv.victim = static_cast<int32_t *>(cu_alloc(r, heads * 4, false, err))))
        return -1;
    kv_view_set(c, r, p);
    std::vector<int32_t> cap(heads, INT32_MAX);
    CU_MUST(cudaMemsetAsync(p, 0, pool, r.st));
    CU_MUST(cudaMemsetAsync(r.kv.table, 0, heads * c->cfg.max_pages * 4, r.st));
    CU_MUST(cudaMemsetAsync(r.kv.len, 0, heads * 4, r.st));
    CU_MUST(cudaMemsetAsync(r.kv.victim, 0xff, heads * 4, r.st));
    CU_MUST(cudaStreamSynchronize(r.st));
    CU_MUST(cudaMemcpy(r.kv.cap, cap.data(), heads * 4, cudaMemcpyHostToDevice));
    return 0;
}

ops_kv *cu_kv_init(void *be, uint32_t n_pages, skv_error *err)
{
    cuda *c = static_cast<cuda *>(be);
    size_t heads = (size_t)c->cfg.max_lanes * c->d.n_layer * c->d.n_kv;
    cu_tell_kv_init(c, n_pages);
    kern_page_layout_init(&c->page, c->cfg.kv_dtype, c->d.head_dim);
    for (cu_rank &r : c->rank)
        if (rank_init(c, r, n_pages, err))
            return nullptr;
    c->kv.page = c->page;
    c->kv.n_pages = n_pages;
    c->kv.max_pages = c->cfg.max_pages;
    c->kv.table = static_cast<uint32_t *>(calloc(heads * c->cfg.max_pages, 4));
    c->kv.len = static_cast<int32_t *>(calloc(heads, 4));
    c->kv.cap = static_cast<int32_t *>(malloc(heads * 4));
    c->kv.victim = static_cast<int32_t *>(malloc(heads * 4));
    if (!c->kv.table || !c->kv.len || !c->kv.cap || !c->kv.victim) {
        cu_kv_fini(c);
        skv_fail(err, SKV_NO_MEMORY, "no memory for the page tables");
        return nullptr;
    }
    for (size_t i = 0; i < heads; i++) {
        c->kv.cap[i] = INT32_MAX;
        c->kv.victim[i] = -1;
    }
    c->s_table.assign(heads * c->cfg.max_pages, 0);
    c->s_len.assign(heads, 0);
    c->s_cap.assign(heads, INT32_MAX);
    c->s_victim.assign(heads, -1);
    return &c->kv;
}

void cu_kv_fini(cuda *c)
{
    free(c->kv.table);
    free(c->kv.len);
    free(c->kv.cap);
    free(c->kv.victim);
    memset(&c->kv, 0, sizeof c->kv);
}

void cu_page_clear(void *be, const uint32_t *pages, int n)
{
    cuda *c = static_cast<cuda *>(be);
    cu_tell_clear(c, pages, n);
    c->clear.insert(c->clear.end(), pages, pages + n);
}

// To every rank that has the head. `sub`: which of `of` numbers of the head (a table has many).
static void note_change(cuda *c, int lane, int layer, int head, int kind, size_t of, size_t sub, uint32_t value)
{
    for (const cu_rank &r : c->rank)
        if (head >= r.kv0 && head < r.kv0 + r.n_kv) {
            size_t local = ((size_t)lane * c->d.n_layer + layer) * r.n_kv + (head - r.kv0);
            c->change[r.index].push_back({ kind, (uint32_t)(local * of + sub), value });
        }
}

void cu_kv_diff(cuda *c, int lane, int layer)
{
    for (int h = 0; h < c->d.n_kv; h++) {
        size_t at = cu_kv_at(c, lane, layer, h), most = c->kv.max_pages;
        const struct {
            int kind;
            int32_t now, *then;
        } one[] = { { KV_LEN, c->kv.len[at], &c->s_len[at] },
                    { KV_CAP, c->kv.cap[at], &c->s_cap[at] },
                    { KV_VICTIM, c->kv.victim[at], &c->s_victim[at] } };
        for (const auto &o : one) {
            if (o.now == *o.then)
                continue;
            note_change(c, lane, layer, h, o.kind, 1, 0, (uint32_t)o.now);
            cu_kv_has(c, *o.then, o.now);
        }
        size_t pages = (size_t)(c->kv.len[at] + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS;
        uint32_t *table = c->kv.table + at * most, *then = &c->s_table[at * most];
        if (memcmp(table, then, pages * 4) == 0)
            continue;
        for (size_t i = 0; i < pages; i++) {
            if (table[i] == then[i])
                continue;
            note_change(c, lane, layer, h, KV_TABLE, most, i, table[i]);
            cu_kv_has(c, then[i], table[i]);
        }
    }
}

// Copy a list, and its count behind it, to r.meta; returns where the list is.
template <class T> static const T *send(cuda *c, cu_rank &r, const T *list, int n)
{
    cu_stage &s = cu_stage_take(c, r);
    memcpy(s.host, list, (size_t)n * sizeof(T));
    memcpy(s.host + (size_t)n * sizeof(T), &n, sizeof n);
    cu_stage_send(r, s, (size_t)n * sizeof(T) + sizeof n);
    return reinterpret_cast<const T *>(r.meta);
}

void cu_kv_push(cuda *c)
{
    for (cu_rank &r : c->rank) {
        std::vector<kv_change> &list = c->change[r.index];
        size_t room = r.meta_bytes - 16;
        cu_use(r);
        for (size_t i = 0; i < list.size();) {
            int n = (int)std::min(list.size() - i, room / sizeof(kv_change));
            const kv_change *d = send(c, r, &list[i], n);
            cu_kv_apply(r.st, r.kv, d, reinterpret_cast<const int32_t *>(d + n), n);
            i += (size_t)n;
        }
        list.clear();
        for (size_t i = 0; i < c->clear.size();) {
            int n = (int)std::min(c->clear.size() - i, std::min(room / 4, (size_t)4096));
            const uint32_t *d = send(c, r, &c->clear[i], n);
            cu_kv_clear(r.st, r.kv, d, reinterpret_cast<const int32_t *>(d + n), n);
            i += (size_t)n;
        }
    }
    c->clear.clear();
}

void cu_kv_read(void *be, int lane, int layer, int head, int32_t *pos, float *score)
{
    cuda *c = static_cast<cuda *>(be);
    cu_step_flush(c);
    cu_kv_diff(c, lane, layer);
    cu_kv_push(c);
    int n = c->kv.len[cu_kv_at(c, lane, layer, head)];
    if (n == 0 || cu_kv_read_far(c, lane, layer, head, pos, score))
        return;
    for (cu_rank &r : c->rank) {
        if (head < r.kv0 || head >= r.kv0 + r.n_kv)
            continue;
        cu_use(r);
        cu_sel_room(c, r, (size_t)n * 8);
        int32_t *d_pos = reinterpret_cast<int32_t *>(r.sel_work);
        float *d_score = reinterpret_cast<float *>(d_pos + n);
        cu_kv_slots(r.st, r.kv, ((size_t)lane * c->d.n_layer + layer) * r.n_kv + (head - r.kv0), n, d_pos, d_score);
        cu_wait(c, r);
        CU_MUST(cudaMemcpy(pos, d_pos, (size_t)n * 4, cudaMemcpyDeviceToHost));
        CU_MUST(cudaMemcpy(score, d_score, (size_t)n * 4, cudaMemcpyDeviceToHost));
        return;
    }
}
