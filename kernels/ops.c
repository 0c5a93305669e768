/* ops.c - the backends of this build. */
#include "kernels/ops.h"

#include <string.h>

static const struct ops *const backends[] = { &ops_cpu, &ops_sim };

const struct ops *ops_find(const char *name)
{
    if (!name || strcmp(name, "auto") == 0)
        return backends[0];
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++)
        if (strcmp(backends[i]->name, name) == 0)
            return backends[i];
    return NULL;
}
