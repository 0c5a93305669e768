// hostshim.cpp - the fiber engine: blocks, warps, barriers, cp.async and the tensor-core twins.
//
// A block's threads are fibers on one OS thread. The scheduler runs one warp as far as it can go before the
// next: that is the order in which a missing barrier shows (a fair rotation hides it).
#include "tests/cuda/hostshim.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define SHIM_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim
{

self cur;

enum state { READY, AT_BARRIER, IN_WARP_OP, DONE };

struct copy {
    char *dst;
    const char *src;
    int bytes;
};

struct fiber {
    void *sp;
    char *stack;
    state st;
    self me;
    unsigned warp;
    const char *what; // what it waits for
    unsigned mask;
    warp_fin fin;
    void *arg;
    void *fake_stack; // ASan's
    std::vector<copy> pending;
    std::deque<std::vector<copy>> groups;
};

struct block {
    std::vector<fiber *> f;
    std::vector<unsigned> live_lanes; // per warp
    unsigned live, waiting;
    const char *bar_file;
    int bar_line;
    const std::function<void()> *body;
    char *smem;
    const char *name;
};

static const size_t STACK = 256 * 1024;
static void *sched_sp;
#ifdef SHIM_ASAN
static void *sched_fake;
static const void *sched_bottom;
static size_t sched_size;
#endif
static std::vector<fiber *> &pool = *new std::vector<fiber *>; // never destroyed: fibers are used until the end

static unsigned long seed()
{
    static const char *s = getenv("SHIM_SEED");
    static unsigned long v = s ? strtoul(s, nullptr, 0) : 0;
    return v;
}

static std::mt19937_64 &rng()
{
    static std::mt19937_64 r(seed());
    return r;
}

void die(const char *fmt, ...)
{
    va_list ap;
    fflush(stdout);
    fprintf(stderr, "shim: kernel %s block (%u,%u,%u): ", cur.b ? cur.b->name : "-", cur.bid.x, cur.bid.y, cur.bid.z);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    int shown = 0;
    if (cur.b)
        for (fiber *f : cur.b->f)
            if (f->st != DONE && shown++ < 6)
                fprintf(stderr, "  thread %u: %s, mask %08x\n", f->me.tid.x,
                        f->st == READY ? "running" : f->what, f->mask);
    _exit(86);
}

extern "C" void shim_switch(void **from, void *to);
#if !defined(__x86_64__)
#error "the host shim's context switch is written for x86-64"
#endif
asm(".text\n.globl shim_switch\nshim_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

static void to_scheduler(fiber *f, bool dying)
{
    (void)dying;
#ifdef SHIM_ASAN
    __sanitizer_start_switch_fiber(dying ? nullptr : &f->fake_stack, sched_bottom, sched_size);
#endif
    shim_switch(&f->sp, sched_sp);
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(f->fake_stack, &sched_bottom, &sched_size);
#endif
}

static void run_fiber(fiber *f)
{
    cur = f->me;
#ifdef SHIM_ASAN
    __sanitizer_start_switch_fiber(&sched_fake, f->stack, STACK);
#endif
    shim_switch(&sched_sp, f->sp);
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(sched_fake, nullptr, nullptr);
#endif
}

static void fiber_main()
{
    fiber *f = cur.f;
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &sched_bottom, &sched_size);
#endif
    block *b = f->me.b;
    (*b->body)();
    f->st = DONE;
    b->live--;
    b->live_lanes[f->warp] &= ~(1u << f->me.lane);
    if (!f->pending.empty() || !f->groups.empty())
        die("thread %u ended with cp.async copies that nobody waited for", f->me.tid.x);
    if (b->waiting && b->waiting == b->live)
        die("divergent __syncthreads: some threads ended, the others wait");
    to_scheduler(f, true);
    abort();
}

void barrier(const char *file, int line)
{
    block *b = cur.b;
    fiber *f = cur.f;
    if (b->waiting && (b->bar_line != line || strcmp(b->bar_file, file) != 0))
        die("threads wait at different barriers: %s:%d and %s:%d", b->bar_file, b->bar_line, file, line);
    b->bar_file = file;
    b->bar_line = line;
    f->what = "__syncthreads";
    f->st = AT_BARRIER;
    if (++b->waiting == b->live) {
        if (b->live != b->f.size())
            die("divergent __syncthreads: some threads ended before it");
        for (fiber *o : b->f)
            o->st = READY;
        b->waiting = 0;
        if (!seed())
            return;
    }
    to_scheduler(f, false);
}

// Complete the operation when every lane of the mask has arrived.
static void warp_try(block *b, fiber *me)
{
    void *args[32] = { nullptr };
    unsigned mask = me->mask;
    if (mask & ~b->live_lanes[me->warp])
        die("%s: the mask %08x names a lane that has ended or never was", me->what, mask);
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1))
            continue;
        fiber *f = b->f[me->warp * 32 + l];
        if (f->st != IN_WARP_OP || f->mask != mask)
            return;
        if (f->fin != me->fin)
            die("lanes of one mask run different warp operations: %s and %s", f->what, me->what);
        args[l] = f->arg;
    }
    if (me->fin)
        me->fin(args, mask);
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1)
            b->f[me->warp * 32 + l]->st = READY;
}

void warp_op(unsigned mask, warp_fin fin, void *arg, const char *what)
{
    fiber *f = cur.f;
    if (!(mask >> cur.lane & 1))
        die("%s: the caller is not in its own mask", what);
    f->mask = mask;
    f->fin = fin;
    f->arg = arg;
    f->what = what;
    f->st = IN_WARP_OP;
    warp_try(cur.b, f);
    if (f->st == IN_WARP_OP || seed())
        to_scheduler(f, false);
}

void *dyn_smem()
{
    return cur.b->smem;
}

void cp_async(void *dst, const void *src, int bytes)
{
    if (((uintptr_t)dst | (uintptr_t)src) % bytes)
        die("cp.async: an address is not a multiple of %d", bytes);
    cur.f->pending.push_back({ static_cast<char *>(dst), static_cast<const char *>(src), bytes });
}

void cp_commit()
{
    cur.f->groups.push_back(std::move(cur.f->pending));
    cur.f->pending.clear();
}

void cp_wait(int groups_left)
{
    while ((int)cur.f->groups.size() > groups_left) {
        for (const copy &c : cur.f->groups.front())
            memcpy(c.dst, c.src, c.bytes);
        cur.f->groups.pop_front();
    }
}

struct ballot_arg {
    bool pred;
    unsigned out;
};

static void ballot_fin(void **a, unsigned mask)
{
    unsigned r = 0;
    for (int l = 0; l < 32; l++)
        if ((mask >> l & 1) && static_cast<ballot_arg *>(a[l])->pred)
            r |= 1u << l;
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1)
            static_cast<ballot_arg *>(a[l])->out = r;
}

unsigned ballot(unsigned mask, bool pred)
{
    ballot_arg b = { pred, 0 };
    warp_op(mask, ballot_fin, &b, "ballot_sync");
    return b.out;
}

struct mma_arg {
    float *d;
    const unsigned *a, *b;
    const float *c;
};

static float half_of(unsigned w, int upper)
{
    return __uint_as_float(upper ? w & 0xffff0000u : w << 16);
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": with group = lane / 4 and t = lane % 4,
// A element i: row = group for i in {0,1,4,5}, else group + 8; col = 2 t + (i & 1), + 8 for i >= 4. B element i:
// row = 2 t + (i & 1), + 8 for i >= 2; col = group. C element i: row = group, + 8 for i >= 2; col = 2 t + (i & 1).
static void mma_fin(void **av, unsigned mask)
{
    static float A[16][16], B[16][8], C[16][8];
    mma_arg **m = reinterpret_cast<mma_arg **>(av);
    if (mask != 0xffffffffu)
        die("mma needs all 32 lanes");
    for (int l = 0; l < 32; l++) {
        int group = l >> 2, t = l & 3;
        for (int i = 0; i < 8; i++)
            A[group + (i & 2 ? 8 : 0)][2 * t + (i & 1) + (i >= 4 ? 8 : 0)] = half_of(m[l]->a[i / 2], i & 1);
        for (int i = 0; i < 4; i++) {
            B[2 * t + (i & 1) + (i >= 2 ? 8 : 0)][group] = half_of(m[l]->b[i / 2], i & 1);
            C[group + (i >= 2 ? 8 : 0)][2 * t + (i & 1)] = m[l]->c[i];
        }
    }
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 8; n++)
                C[r][n] += A[r][k] * B[k][n];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            m[l]->d[i] = C[(l >> 2) + (i >= 2 ? 8 : 0)][2 * (l & 3) + (i & 1)];
}

void mma_bf16_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4])
{
    mma_arg m = { d, a, b, c };
    warp_op(0xffffffffu, mma_fin, &m, "mma.m16n8k16");
}

struct ldm_arg {
    unsigned *r;
    const void *row;
    int count;
    bool trans;
};

static void ldm_fin(void **av, unsigned mask)
{
    ldm_arg **a = reinterpret_cast<ldm_arg **>(av);
    if (mask != 0xffffffffu)
        die("ldmatrix needs all 32 lanes");
    for (int i = 0; i < a[0]->count; i++) {
        const uint16_t *row[8];
        for (int r = 0; r < 8; r++) {
            row[r] = static_cast<const uint16_t *>(a[i * 8 + r]->row);
            if ((uintptr_t)row[r] % 16)
                die("ldmatrix: a row address is not a multiple of 16");
        }
        for (int l = 0; l < 32; l++) {
            int x = l >> 2, y = (l & 3) * 2;
            a[l]->r[i] = a[l]->trans ? (unsigned)row[y][x] | (unsigned)row[y + 1][x] << 16
                                     : (unsigned)row[x][y] | (unsigned)row[x][y + 1] << 16;
        }
    }
}

void ldmatrix(unsigned *r, const void *row, int count, bool trans)
{
    ldm_arg a = { r, row, count, trans };
    warp_op(0xffffffffu, ldm_fin, &a, "ldmatrix");
}

// --- running a grid -----------------------------------------------------------------------------------

static void fiber_start(fiber *f)
{
    if (!f->stack) {
        char *p = static_cast<char *>(mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (p == MAP_FAILED || mprotect(p, 4096, PROT_NONE))
            die("no memory for a fiber's stack");
        f->stack = p + 4096;
    }
#ifdef SHIM_ASAN
    __asan_unpoison_memory_region(f->stack, STACK);
#endif
    void **s = reinterpret_cast<void **>(f->stack + STACK - 64);
    *--s = nullptr; // the return address of fiber_main, which never returns
    *--s = reinterpret_cast<void *>(fiber_main);
    for (int i = 0; i < 6; i++)
        *--s = nullptr;
    f->sp = s;
    f->fake_stack = nullptr;
}

// Shared memory of exactly `bytes`, filled with NaN: a read before the store and one past the end both show.
static char *smem_new(size_t bytes)
{
#ifdef SHIM_ASAN
    // The allocation is aligned like the device's, its end is exact.
    char *p = static_cast<char *>(aligned_alloc(128, (bytes + 127) / 128 * 128 + 128));
    __asan_poison_memory_region(p + bytes, (bytes + 127) / 128 * 128 + 128 - bytes);
#else
    static char *base = nullptr;
    static size_t cap = 0;
    if (!base) {
        cap = 256 * 1024;
        base = static_cast<char *>(mmap(nullptr, cap + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (base == MAP_FAILED || mprotect(base + cap, 4096, PROT_NONE))
            die("no memory for shared memory");
    }
    char *p = base + cap - ((bytes + 15) & ~(size_t)15); // the guard page starts at most 15 bytes past the end
#endif
    memset(p, 0xff, bytes);
    return p;
}

static void smem_free(char *p, size_t bytes)
{
    (void)p;
    (void)bytes;
#ifdef SHIM_ASAN
    __asan_unpoison_memory_region(p, (bytes + 127) / 128 * 128 + 128);
    free(p);
#endif
}

// Let warp w go on until none of its lanes can. True when any ran.
static bool run_warp(block &b, unsigned w, std::vector<unsigned> &lanes)
{
    bool any = false;
    for (bool more = true; more;) {
        more = false;
        if (seed())
            std::shuffle(lanes.begin(), lanes.end(), rng());
        for (unsigned l : lanes) {
            size_t i = (size_t)w * 32 + l;
            if (i >= b.f.size() || b.f[i]->st != READY)
                continue;
            more = any = true;
            run_fiber(b.f[i]);
        }
    }
    return any;
}

static void run_block(dim3 grid, dim3 bdim, uint3 bid, size_t smem, const std::function<void()> &body, const char *name)
{
    unsigned n = bdim.x * bdim.y * bdim.z, n_warp = (n + 31) / 32;
    while (pool.size() < n)
        pool.push_back(new fiber());
    block b = { {}, std::vector<unsigned>(n_warp, 0), n, 0, nullptr, 0, &body, smem_new(smem), name };
    b.f.assign(pool.begin(), pool.begin() + n);
    for (unsigned i = 0; i < n; i++) {
        fiber *f = b.f[i];
        f->st = READY;
        f->what = "start";
        f->mask = 0;
        f->warp = i / 32;
        b.live_lanes[i / 32] |= 1u << i % 32;
        f->me = { { i % bdim.x, i / bdim.x % bdim.y, i / bdim.x / bdim.y }, bid, bdim, grid, i % 32, f, &b };
        fiber_start(f);
    }
    std::vector<unsigned> warps(n_warp), lanes(32);
    for (unsigned i = 0; i < n_warp; i++)
        warps[i] = i;
    for (unsigned i = 0; i < 32; i++)
        lanes[i] = i;
    while (b.live) {
        bool progress = false;
        if (seed())
            std::shuffle(warps.begin(), warps.end(), rng());
        for (unsigned w : warps)
            progress |= run_warp(b, w, lanes);
        if (!progress) {
            cur = b.f[0]->me;
            die("deadlock: no thread can go on (divergent barrier or wrong warp mask)");
        }
    }
    cur = self();
    smem_free(b.smem, smem);
}

void run_grid(const char *name, dim3 grid, dim3 bdim, size_t smem, const std::function<void()> &body)
{
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++)
                run_block(grid, bdim, { x, y, z }, smem, body, name);
}

} // namespace shim
