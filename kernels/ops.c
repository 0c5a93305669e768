/* ops.c - the backends of this build. */
#include "kernels/ops.h"

#include <stdio.h>
#include <string.h>

static const struct ops *const backends[] = { &ops_cpu, &ops_sim };

/* "auto": the GPU where there is one; that there is none is said once, for whoever expected it. */
static const struct ops *best(void)
{
    static bool said;
    char why[128];

    if (&ops_cuda == NULL || strcmp(ops_cuda.name, "cuda") != 0)
        return &ops_cpu;
    if (ops_cuda_usable(why, sizeof why))
        return &ops_cuda;
    if (!said)
        fprintf(stderr, "skvd: %s: running on the CPU\n", why);
    said = true;
    return &ops_cpu;
}

const struct ops *ops_find(const char *name)
{
    if (!name || strcmp(name, "auto") == 0)
        return best();
    if (&ops_cuda != NULL && strcmp(ops_cuda.name, name) == 0)
        return &ops_cuda;
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++)
        if (strcmp(backends[i]->name, name) == 0)
            return backends[i];
    return NULL;
}
