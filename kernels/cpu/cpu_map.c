/* cpu_map.c - big allocations of the CPU backend. */
#include <stdint.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"

#define HUGE_PAGE ((size_t)2 << 20)

/* Small allocations are rounded to small pages only, so that they don't take 2 MiB each. */
static size_t map_size(size_t bytes)
{
    size_t to = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;
    return (bytes + to - 1) / to * to;
}

void *cpu_map(size_t bytes, struct skv_error *err)
{
    if (bytes > SIZE_MAX / 2) {
        skv_fail(err, SKV_NO_MEMORY, "no memory: %zu bytes are too many", bytes);
        return NULL;
    }
    size_t size = map_size(bytes ? bytes : 1);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        skv_fail(err, SKV_NO_MEMORY, "no memory: %zu bytes for the CPU backend", bytes);
        return NULL;
    }
    if (size >= HUGE_PAGE)
        madvise(p, size, MADV_HUGEPAGE); /* a hint */
    return p;
}

void cpu_unmap(void *p, size_t bytes)
{
    if (p)
        munmap(p, map_size(bytes ? bytes : 1));
}
