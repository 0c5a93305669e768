/* lab_pool.c - the CPU backend's pages, for copying one lane to another. */
#include "kernels/cpu/cpu.h"

unsigned char *lab_pool(void *be);
unsigned char *lab_pool(void *be)
{
    return ((struct cpu *)be)->pool;
}
