// nccl.cu - sums over the ranks of one process; the only place that knows NCCL.
#include <cstdio>
#include <cstdlib>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/nodes.h"

#ifdef SKV_NCCL
#include <nccl.h>

static void must(ncclResult_t e, const char *what)
{
    if (e == ncclSuccess)
        return;
    cu_fail("%s: %s", what, ncclGetErrorString(e));
}

// What must be the same in all processes.
static std::string hello(const cuda *c)
{
    const ops_dims &d = c->d;
    char s[600];
    snprintf(s, sizeof s,
             "%d layers of %d, heads %d, %d, %d, feed-forward %d, vocabulary %d, %d positions; cache %d, %d sequences, %d rows, %d "
             "pages; parts %d, %d; records %zu %zu",
             d.n_layer, d.d_model, d.n_head, d.n_kv, d.head_dim, d.n_ffn, d.n_vocab, d.max_context, (int)c->cfg.kv_dtype,
             c->cfg.max_lanes, c->cfg.max_rows, c->cfg.max_pages, c->out_part, c->ffn_part, sizeof(ops_seg), sizeof(kern_rule));
    return s;
}

static int comm_over_processes(cuda *c, int rank, int world, skv_error *err)
{
    ncclUniqueId id;
    ncclComm_t comm;
    ncclResult_t e = rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (e != ncclSuccess)
        return skv_fail(err, SKV_INTERNAL, "NCCL does not start: %s", ncclGetErrorString(e));
    if (!(c->nodes = cu_nodes_new(rank, world, hello(c), &id, sizeof id, err)))
        return -1;
    cu_use(c->rank[0]);
    e = ncclCommInitRank(&comm, world, id, rank);
    if (e != ncclSuccess)
        return skv_fail(err, SKV_INTERNAL, "NCCL does not connect %d processes: %s", world, ncclGetErrorString(e));
    c->rank[0].comm = comm;
    return 0;
}

int cu_comm_init(cuda *c, skv_error *err)
{
    int n = (int)c->rank.size(), device[CU_MAX_TP], rank, world, local;
    ncclComm_t comm[CU_MAX_TP];
    if (cu_nodes_env(&rank, &world, &local))
        return comm_over_processes(c, rank, world, err);
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
    for (cu_rank &r : c->rank) {
        if (r.comm && c->failed[0])
            ncclCommAbort(static_cast<ncclComm_t>(r.comm));
        else if (r.comm)
            ncclCommDestroy(static_cast<ncclComm_t>(r.comm));
        r.comm = nullptr;
    }
}

void cu_comm_check(cuda *c)
{
    for (cu_rank &r : c->rank) {
        ncclResult_t e = ncclSuccess;
        if (r.comm)
            must(ncclCommGetAsyncError(static_cast<ncclComm_t>(r.comm), &e), "ncclCommGetAsyncError");
        must(e, "NCCL");
    }
}

void cu_all_reduce(cuda *c, size_t n)
{
    if (c->world == 1)
        return;
    must(ncclGroupStart(), "ncclGroupStart");
    for (cu_rank &r : c->rank) {
        void *p = r.sum ? static_cast<void *>(r.sum) : r.y;
        cu_use(r);
        must(ncclAllReduce(p, p, n, r.sum ? ncclInt64 : ncclFloat32, ncclSum, static_cast<ncclComm_t>(r.comm), r.st),
             "ncclAllReduce");
    }
    must(ncclGroupEnd(), "ncclGroupEnd");
}

void cu_gather(cuda *c, int rows)
{
    size_t n = (size_t)rows * c->vocab_part;
    if (c->world == 1)
        return;
    must(ncclGroupStart(), "ncclGroupStart");
    for (cu_rank &r : c->rank) {
        cu_use(r);
        must(ncclAllGather(r.logits + r.global * n, r.logits, n, ncclFloat32, static_cast<ncclComm_t>(r.comm), r.st),
             "ncclAllGather");
    }
    must(ncclGroupEnd(), "ncclGroupEnd");
}

#else

int cu_comm_init(cuda *c, skv_error *err)
{
    if (c->world > 1)
        return skv_fail(err, SKV_BAD_CONFIG, "tensor parallel needs NCCL, which this build is without");
    return 0;
}

void cu_comm_fini(cuda *)
{
}

void cu_comm_check(cuda *)
{
}

void cu_all_reduce(cuda *, size_t)
{
}

void cu_gather(cuda *, int)
{
}

#endif
