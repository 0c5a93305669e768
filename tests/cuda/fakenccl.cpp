// fakenccl.cpp - the part of NCCL that the backend uses, over virtual devices of one process.
//
// Checks what makes a real run hang or compute nonsense: all ranks of a communicator must be in one group, each once,
// with the same operation, type and count, on a stream of its own; at run time a rank that never reaches the
// operation stops the test.
#include "tests/cuda/hostshim.h"

#include <nccl.h>

#include <memory>
#include <vector>

struct clique {
    int n;
};

struct ncclComm {
    std::shared_ptr<clique> all;
    int rank;
};

namespace
{

struct call {
    ncclComm *comm;
    const float *in;
    float *out;
    size_t n;
    cudaStream_t st;
};

// One collective: what each rank brought, and how often each has come by (a graph replays it).
struct collective {
    std::vector<call> of;
    std::vector<long> rounds;
};

bool in_group;
std::vector<call> pending;

void sum(const collective &c)
{
    size_t n = c.of[0].n;
    std::vector<float> s(n, 0.0f);
    for (const call &r : c.of)
        for (size_t i = 0; i < n; i++)
            s[i] += r.in[i];
    for (const call &r : c.of)
        memcpy(r.out, s.data(), n * sizeof(float));
}

void arrive(collective &c, int rank)
{
    long round = ++c.rounds[rank];
    bool last = true;
    for (long r : c.rounds)
        last = last && r == round;
    if (last)
        sum(c);
    for (size_t o = 0; o < c.of.size(); o++)
        while (c.rounds[o] < round)
            if (!shim::run_one(c.of[o].st))
                shim::die("ncclAllReduce: rank %zu never comes, rank %d would hang", o, rank);
}

} // namespace

extern "C" {

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int n, const int *device)
{
    auto all = std::make_shared<clique>(clique{ n });
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < i; j++)
            if (device[i] == device[j])
                return ncclInvalidUsage;
        comm[i] = new ncclComm{ all, i };
    }
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    if (in_group)
        shim::die("nested ncclGroupStart is not modelled");
    in_group = true;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t st)
{
    if (type != ncclFloat32 || op != ncclSum)
        shim::die("ncclAllReduce: a type or operation that is not modelled");
    if (!shim::device_range(in, n * 4) || !shim::device_range(out, n * 4))
        shim::die("ncclAllReduce: buffers outside device memory");
    if (!in_group)
        shim::die("ncclAllReduce outside a group: one thread with several ranks would hang");
    pending.push_back({ comm, static_cast<const float *>(in), static_cast<float *>(out), n, st });
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    auto c = std::make_shared<collective>();
    int n = pending.empty() ? 0 : pending[0].comm->all->n;
    in_group = false;
    c->of.resize(n);
    c->rounds.assign(n, 0);
    if ((int)pending.size() != n)
        shim::die("ncclAllReduce by %zu of %d ranks", pending.size(), n);
    for (const call &p : pending) {
        call &to = c->of[p.comm->rank];
        if (to.comm || p.comm->all != pending[0].comm->all || p.n != pending[0].n)
            shim::die("ncclAllReduce: ranks disagree (rank %d: %zu numbers, first: %zu)", p.comm->rank, p.n, pending[0].n);
        for (const call &q : pending)
            if (&q != &p && q.st == p.st)
                shim::die("ncclAllReduce: two ranks on one stream");
        to = p;
    }
    for (const call &p : pending) {
        int rank = p.comm->rank;
        shim::enqueue(p.st, [c, rank] { arrive(*c, rank); });
    }
    pending.clear();
    shim::count.reduces++;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t e)
{
    return e == ncclSuccess ? "success" : "an error of the fake";
}

} // extern "C"
