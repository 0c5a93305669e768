// fakenccl.cpp - the part of NCCL that the backend uses, over virtual devices of one process.
//
// Over processes of one machine (ncclCommInitRank) the ranks meet in shared memory, and a collective is a piece of work
// that is not done before all have come, so that a stream can be asked about it.
//
// Checks what makes a real run hang or compute nonsense: all ranks of a communicator must be in one group, each once,
// with the same operation, type and count, on a stream of its own; at run time a rank that never reaches the
// operation stops the test.
#include "tests/cuda/hostshim.h"

#include <nccl.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

struct clique {
    int n;
    bool aborted;
};

// What the processes of a communicator share.
struct meeting {
    static const size_t ROOM = 16 << 20; // bytes of a collective at most
    std::atomic<int> attached;
    struct {
        std::atomic<unsigned long> arrived, done;
        size_t n;
        ncclDataType_t type;
        bool gather;
    } of[8];
    alignas(8) unsigned char data[8][ROOM];
};

struct ncclComm {
    std::shared_ptr<clique> all;
    int rank;
    meeting *far; // ranks in other processes
    unsigned long seq;
    bool arrived;
};

namespace
{

struct call {
    std::shared_ptr<clique> all;
    ncclComm *comm;
    const void *in;
    void *out;
    size_t n;
    ncclDataType_t type;
    cudaStream_t st;
    bool gather;
};

// One collective: what each rank brought, and how often each has come by (a graph replays it).
struct collective {
    std::vector<call> of;
    std::vector<long> rounds;
};

bool in_group;
std::vector<call> pending;

// Bytes of a number; 0: a type that is not modelled.
size_t size_of(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : type == ncclInt64 ? 8 : 0;
}

// Sums of what `world` ranks brought, in their order.
template <class T> std::vector<T> sum_as(const void *const *in, int world, size_t n)
{
    std::vector<T> s(n, T(0));
    for (int r = 0; r < world; r++)
        for (size_t i = 0; i < n; i++)
            s[i] += static_cast<const T *>(in[r])[i];
    return s;
}

void sum(const void *const *in, int world, size_t n, ncclDataType_t type, void *const *out, int n_out)
{
    auto give = [&](const auto &s) {
        for (int i = 0; i < n_out; i++)
            memcpy(out[i], s.data(), n * sizeof s[0]);
    };
    if (type == ncclInt64)
        give(sum_as<long long>(in, world, n));
    else
        give(sum_as<float>(in, world, n));
}

void sum(const collective &c)
{
    std::vector<const void *> in;
    std::vector<void *> out;
    for (const call &r : c.of) {
        in.push_back(r.in);
        out.push_back(r.out);
    }
    sum(in.data(), (int)in.size(), c.of[0].n, c.of[0].type, out.data(), (int)out.size());
}

// In place, as the backend does it: each brings its own part of the result.
void gather(const collective &c)
{
    size_t bytes = c.of[0].n * size_of(c.of[0].type);
    for (const call &to : c.of)
        for (size_t k = 0; k < c.of.size(); k++) {
            unsigned char *part = static_cast<unsigned char *>(to.out) + k * bytes;
            if (part != c.of[k].in)
                memcpy(part, c.of[k].in, bytes);
        }
}

void arrive(collective &c, int rank)
{
    if (c.of[0].all->aborted)
        return;
    long round = ++c.rounds[rank];
    bool last = true;
    for (long r : c.rounds)
        last = last && r == round;
    if (last && c.of[0].gather)
        gather(c);
    else if (last)
        sum(c);
    for (size_t o = 0; o < c.of.size(); o++)
        while (c.rounds[o] < round)
            if (!shim::run_one(c.of[o].st))
                shim::die("NCCL: rank %zu never comes, rank %d would hang", o, rank);
}

// A collective whose other ranks are processes of their own: what each brings, then the result, when all are there. False: not
// yet.
bool far_arrive(const call &c)
{
    ncclComm *m = c.comm;
    meeting *f = m->far;
    int world = m->all->n;
    size_t bytes = c.n * size_of(c.type);
    if (m->all->aborted)
        return true;
    if (!m->arrived) {
        for (int i = 0; i < world; i++) // the one before has been read by all
            if (f->of[i].done < m->seq)
                return false;
        if (bytes > meeting::ROOM)
            shim::die("NCCL: %zu numbers are more than the fake has room for", c.n);
        memcpy(f->data[m->rank], c.in, bytes);
        f->of[m->rank].n = c.n;
        f->of[m->rank].type = c.type;
        f->of[m->rank].gather = c.gather;
        f->of[m->rank].arrived = m->seq + 1;
        m->arrived = true;
    }
    for (int i = 0; i < world; i++)
        if (f->of[i].arrived <= m->seq)
            return false;
    for (int i = 0; i < world; i++)
        if (f->of[i].n != c.n || f->of[i].gather != c.gather || f->of[i].type != c.type)
            shim::die("NCCL: processes disagree (rank %d: %zu numbers, rank %d: %zu)", i, f->of[i].n, m->rank, c.n);
    const void *in[8];
    for (int i = 0; i < world; i++)
        in[i] = f->data[i];
    if (!c.gather)
        sum(in, world, c.n, c.type, &c.out, 1);
    for (int i = 0; c.gather && i < world; i++)
        memcpy(static_cast<unsigned char *>(c.out) + i * bytes, in[i], bytes);
    f->of[m->rank].done = ++m->seq;
    m->arrived = false;
    return true;
}

} // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/skvd-fake-nccl-%d-%lx", (int)getpid(), (unsigned long)id);
    int fd = shm_open(id->internal, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(meeting)))
        return ncclSystemError;
    close(fd);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank)
{
    int fd = shm_open(id.internal, O_RDWR, 0600);
    if (fd < 0 || n > 8 || rank < 0 || rank >= n)
        return ncclInvalidArgument;
    void *p = mmap(nullptr, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        return ncclSystemError;
    meeting *far = static_cast<meeting *>(p);
    far->attached++;
    for (int i = 0; far->attached < n; i++) {
        usleep(1000);
        if (i > 60000)
            return ncclSystemError;
    }
    if (rank == 0)
        shm_unlink(id.internal);
    *comm = new ncclComm{ std::make_shared<clique>(clique{ n, false }), rank, far, 0, false };
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e)
{
    *e = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommInitAll(ncclComm_t *comm, int n, const int *device)
{
    auto all = std::make_shared<clique>(clique{ n, false });
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < i; j++)
            if (device[i] == device[j])
                return ncclInvalidUsage;
        comm[i] = new ncclComm{ all, i, nullptr, 0, false };
    }
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (comm->far)
        munmap(comm->far, sizeof(meeting));
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    comm->all->aborted = true;
    if (!comm->far) // else its work may still be in a stream, and asks it
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
    size_t bytes = n * size_of(type);
    if (!size_of(type) || op != ncclSum)
        shim::die("ncclAllReduce: a type or operation that is not modelled");
    if (!shim::device_range(in, bytes) || !shim::device_range(out, bytes))
        shim::die("ncclAllReduce: buffers outside device memory");
    if (!in_group)
        shim::die("ncclAllReduce outside a group: one thread with several ranks would hang");
    pending.push_back({ comm->all, comm, in, out, n, type, st, false });
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t st)
{
    if (type != ncclFloat32)
        shim::die("ncclAllGather: a type that is not modelled");
    if (!shim::device_range(in, n * 4) || !shim::device_range(out, n * 4 * comm->all->n))
        shim::die("ncclAllGather: buffers outside device memory");
    if (in != static_cast<const float *>(out) + comm->rank * n)
        shim::die("ncclAllGather: only in place is modelled");
    if (!in_group)
        shim::die("ncclAllGather outside a group: one thread with several ranks would hang");
    pending.push_back({ comm->all, comm, in, out, n, type, st, true });
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    auto c = std::make_shared<collective>();
    int n = pending.empty() ? 0 : pending[0].comm->all->n;
    in_group = false;
    if (pending.empty())
        return ncclSuccess;
    if (pending[0].comm->far) {
        if (pending.size() != 1)
            shim::die("a process has one rank, but %zu are in a group", pending.size());
        call one = pending[0];
        shim::enqueue_poll(one.st, [one] { return far_arrive(one); });
        (one.gather ? shim::count.gathers : shim::count.reduces)++;
        pending.clear();
        return ncclSuccess;
    }
    c->of.resize(n);
    c->rounds.assign(n, 0);
    if ((int)pending.size() != n)
        shim::die("a collective by %zu of %d ranks", pending.size(), n);
    for (const call &p : pending) {
        call &to = c->of[p.comm->rank];
        if (to.comm || p.comm->all != pending[0].comm->all || p.n != pending[0].n ||
            p.gather != pending[0].gather || p.type != pending[0].type)
            shim::die("NCCL: ranks disagree (rank %d: %zu numbers, first: %zu)", p.comm->rank, p.n, pending[0].n);
        for (const call &q : pending)
            if (&q != &p && q.st == p.st)
                shim::die("NCCL: two ranks on one stream");
        to = p;
    }
    for (const call &p : pending) {
        int rank = p.comm->rank;
        shim::enqueue(p.st, [c, rank] { arrive(*c, rank); });
    }
    (pending[0].gather ? shim::count.gathers : shim::count.reduces)++;
    pending.clear();
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t e)
{
    return e == ncclSuccess ? "success" : "an error of the fake";
}

} // extern "C"
