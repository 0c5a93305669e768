// nccl.cu - sums over the ranks of one process; the only place that knows NCCL.
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/backend.h"

#ifdef SKV_NCCL
#include <nccl.h>

static void must(ncclResult_t e, const char *what)
{
    if (e == ncclSuccess)
        return;
    fprintf(stderr, "skvd: cuda: %s: %s\n", what, ncclGetErrorString(e));
    abort();
}

int cu_comm_init(cuda *c, skv_error *err)
{
    int n = (int)c->rank.size(), device[CU_MAX_TP];
    ncclComm_t comm[CU_MAX_TP];
    if (n == 1)
        return 0;
    for (const cu_rank &r : c->rank)
        device[r.index] = r.device;
    ncclResult_t e = ncclCommInitAll(comm, n, device);
    if (e != ncclSuccess)
        return skv_fail(err, SKV_INTERNAL, "NCCL does not start on %d devices: %s", n, ncclGetErrorString(e));
    for (cu_rank &r : c->rank)
        r.comm = comm[r.index];
    return 0;
}

void cu_comm_fini(cuda *c)
{
    for (cu_rank &r : c->rank)
        if (r.comm)
            ncclCommDestroy(static_cast<ncclComm_t>(r.comm));
}

void cu_reduce(cuda *c, size_t n)
{
    if (c->rank.size() == 1)
        return;
    must(ncclGroupStart(), "ncclGroupStart");
    for (cu_rank &r : c->rank) {
        cu_use(r);
        must(ncclAllReduce(r.y, r.y, n, ncclFloat32, ncclSum, static_cast<ncclComm_t>(r.comm), r.st), "ncclAllReduce");
    }
    must(ncclGroupEnd(), "ncclGroupEnd");
}

#else

int cu_comm_init(cuda *c, skv_error *err)
{
    if (c->rank.size() > 1)
        return skv_fail(err, SKV_BAD_CONFIG, "tensor parallel needs NCCL, which this build is without");
    return 0;
}

void cu_comm_fini(cuda *)
{
}

void cu_reduce(cuda *, size_t)
{
}

#endif
