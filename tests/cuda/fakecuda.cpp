// fakecuda.cpp - the CUDA runtime that the shim build links: memory with guards, lazy streams, events, graphs.
//
// Strict where the real runtime is forgiving or undefined: streams run only when something synchronises (a
// result read too early is wrong), copies check that device pointers are device memory and lie inside one
// allocation, what a capture does not allow stops the test. SHIM_DEVICES=N gives N virtual devices (1).
#include "tests/cuda/hostshim.h"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define SHIM_ASAN 1
#include <sanitizer/asan_interface.h>
#endif

namespace shim
{

// SHIM_FAIL=N: the N-th call that gives work to a stream or waits for one fails, and every such call after it, as after an
// illegal address on a device.
static long calls;
static cudaError_t fate()
{
    const char *s = getenv("SHIM_FAIL");
    long n = s ? atol(s) : 0;
    return n > 0 && ++calls >= n ? cudaErrorIllegalAddress : cudaSuccess;
}

void forget_failures()
{
    calls = 0;
}

void run_grid(const char *name, dim3 grid, dim3 bdim, size_t smem, const std::function<void()> &body);

counts count;

struct stream;

struct op {
    std::function<void()> work;
    stream *after; // an event to wait for: everything up to `mark` of that stream
    size_t mark;
    std::function<bool()> poll; // instead of work: goes on when it says true (another process has to come)
};

struct graph {
    std::vector<op> ops;
};

struct event {
    stream *s;
    size_t mark;
};

struct stream {
    int device;
    std::deque<op> queue;
    size_t done;
    graph *capture;
};

struct allocation {
    size_t bytes;
    int device;
    char *base;
    size_t mapped;
};

static const size_t SMEM_LIMIT = 99 * 1024; // what a block may have on the smallest target (sm_86)
static std::map<const char *, allocation> memory;
static std::map<const void *, size_t> host_memory;
static std::map<const void *, int> smem_set;
static std::vector<stream *> streams;
static stream default_stream;
static int device_now;
static size_t bytes_used;

static int n_devices()
{
    const char *s = getenv("SHIM_DEVICES");
    return s ? atoi(s) : 1;
}

static size_t device_bytes()
{
    const char *s = getenv("SHIM_MEMORY");
    return s ? strtoull(s, nullptr, 0) : (size_t)4 << 30;
}

bool device_range(const void *p, size_t bytes)
{
    auto it = memory.upper_bound(static_cast<const char *>(p));
    if (it == memory.begin())
        return false;
    --it;
    size_t off = static_cast<const char *>(p) - it->first;
    return off <= it->second.bytes && bytes <= it->second.bytes - off;
}

static stream *stream_of(cudaStream_t s)
{
    return s ? reinterpret_cast<stream *>(s) : &default_stream;
}

static void no_capture(const char *what)
{
    for (stream *s : streams)
        if (s->capture)
            die("%s while a stream is being captured", what);
}

// Work up to `mark`. False when it stops at a piece that waits for another process, which `wait` forbids.
static bool drain(stream *s, size_t mark, bool wait = true)
{
    while (s->done < mark && !s->queue.empty()) {
        for (long i = 0; s->queue.front().poll && !s->queue.front().poll(); i++) {
            if (!wait)
                return false;
            usleep(50);
            if (i > 2000000)
                die("a collective waits for a process that does not come");
        }
        op o = std::move(s->queue.front());
        s->queue.pop_front();
        s->done++;
        if (o.after)
            drain(o.after, o.mark);
        if (o.work)
            o.work();
    }
    return true;
}

bool run_one(cudaStream_t st)
{
    stream *s = stream_of(st);
    if (s->queue.empty())
        return false;
    drain(s, s->done + 1);
    return true;
}

static void drain_all()
{
    for (stream *s : streams)
        drain(s, ~(size_t)0);
    drain(&default_stream, ~(size_t)0);
}

static void push(cudaStream_t st, op o)
{
    stream *s = stream_of(st);
    if (s->capture) {
        if (o.after)
            die("an event wait inside a capture is not modelled");
        s->capture->ops.push_back(std::move(o));
        return;
    }
    s->queue.push_back(std::move(o));
}

void enqueue(cudaStream_t st, std::function<void()> work)
{
    if (!stream_of(st)->capture)
        count.kernels++;
    push(st, { std::move(work), nullptr, 0, nullptr });
}

void enqueue_poll(cudaStream_t st, std::function<bool()> poll)
{
    if (!stream_of(st)->capture)
        count.kernels++;
    push(st, { nullptr, nullptr, 0, std::move(poll) });
}

void launch(const void *fn, const char *name, dim3 grid, dim3 bdim, size_t smem, cudaStream_t st,
            std::function<void()> body)
{
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535)
        die("launch of %s: grid (%u,%u,%u)", name, grid.x, grid.y, grid.z);
    if (!bdim.x || bdim.x * bdim.y * bdim.z > 1024)
        die("launch of %s: %u threads a block", name, bdim.x * bdim.y * bdim.z);
    size_t allowed = 48 * 1024;
    auto it = smem_set.find(fn);
    if (it != smem_set.end() && (size_t)it->second > allowed)
        allowed = it->second;
    if (smem > allowed)
        die("launch of %s: %zu bytes of shared memory, %zu allowed (cudaFuncSetAttribute)", name, smem, allowed);
    if (!stream_of(st)->capture)
        count.kernels++;
    push(st, { [=] { run_grid(name, grid, bdim, smem, body); }, nullptr, 0, nullptr });
}

static void check_copy(const void *dst, const void *src, size_t n, cudaMemcpyKind kind)
{
    bool from = device_range(src, n), to = device_range(dst, n);
    if ((kind == cudaMemcpyHostToDevice && (from || !to)) || (kind == cudaMemcpyDeviceToHost && (!from || to)) ||
        (kind == cudaMemcpyDeviceToDevice && (!from || !to)) || kind < 0 || kind > cudaMemcpyDeviceToDevice)
        die("copy of %zu bytes, kind %d: source on the device: %d, destination: %d", n, (int)kind, from, to);
}

} // namespace shim

using namespace shim;

extern "C" {

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = n_devices();
    return *n > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaSetDevice(int d)
{
    if (d < 0 || d >= n_devices())
        return cudaErrorInvalidDevice;
    device_now = d;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *d)
{
    *d = device_now;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int d)
{
    if (d < 0 || d >= n_devices())
        return cudaErrorInvalidDevice;
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor:
        *v = 8;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *v = 6;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *v = 4;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *v = (int)SMEM_LIMIT;
        return cudaSuccess;
    default:
        die("device attribute %d is not modelled", (int)a);
    }
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *total = device_bytes();
    *free_bytes = *total - bytes_used;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n)
{
    no_capture("cudaMalloc");
    if (n > device_bytes() - bytes_used)
        return cudaErrorMemoryAllocation;
    allocation a = { n, device_now, nullptr, 0 };
    size_t cap = (n + 4095) & ~(size_t)4095;
#ifdef SHIM_ASAN
    a.base = static_cast<char *>(aligned_alloc(256, cap + 4096));
    if (!a.base)
        return cudaErrorMemoryAllocation;
    a.mapped = cap + 4096;
    *p = a.base;
    memset(*p, 0xff, n);
    __asan_poison_memory_region(a.base + n, a.mapped - n);
#else
    a.mapped = cap + 4096;
    a.base = static_cast<char *>(mmap(nullptr, a.mapped, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (a.base == MAP_FAILED || mprotect(a.base + cap, 4096, PROT_NONE))
        return cudaErrorMemoryAllocation;
    *p = a.base + cap - ((n + 63) & ~(size_t)63); // the guard page is at most 63 bytes past the end
    memset(*p, 0xff, n);
#endif
    memory[static_cast<char *>(*p)] = a;
    bytes_used += n;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    if (!p)
        return cudaSuccess;
    no_capture("cudaFree");
    drain_all();
    auto it = memory.find(static_cast<char *>(p));
    if (it == memory.end())
        die("cudaFree of what cudaMalloc did not give");
    allocation a = it->second;
    memory.erase(it);
    bytes_used -= a.bytes;
#ifdef SHIM_ASAN
    __asan_unpoison_memory_region(a.base, a.mapped);
    free(a.base);
#else
    munmap(a.base, a.mapped);
#endif
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags)
{
    if (flags != cudaHostAllocDefault && flags != cudaHostAllocPortable)
        die("cudaHostAlloc flags %u are not modelled", flags);
    *p = malloc(n ? n : 1);
    if (!*p)
        return cudaErrorMemoryAllocation;
    host_memory[*p] = n;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p)
{
    if (!p)
        return cudaSuccess;
    if (!host_memory.erase(p))
        die("cudaFreeHost of what cudaHostAlloc did not give");
    drain_all();
    free(p);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t st)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    check_copy(dst, src, n, kind);
    if (!stream_of(st)->capture)
        count.copies++;
    push(st, { [=] { memcpy(dst, src, n); }, nullptr, 0, nullptr });
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, cudaMemcpyKind kind)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    no_capture("cudaMemcpy");
    check_copy(dst, src, n, kind);
    drain_all();
    memcpy(dst, src, n);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t st)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    if (!device_range(p, n))
        die("cudaMemsetAsync outside device memory");
    push(st, { [=] { memset(p, v, n); }, nullptr, 0, nullptr });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    no_capture("cudaDeviceSynchronize");
    drain_all();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    if (flags != cudaStreamNonBlocking && flags != cudaStreamDefault)
        die("stream flags %u are not modelled", flags);
    stream *n = new stream();
    n->device = device_now;
    streams.push_back(n);
    *s = reinterpret_cast<cudaStream_t>(n);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t st)
{
    stream *s = stream_of(st);
    drain(s, ~(size_t)0);
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == s) {
            streams.erase(streams.begin() + (long)i);
            delete s;
            return cudaSuccess;
        }
    die("cudaStreamDestroy of an unknown stream");
}

cudaError_t cudaStreamSynchronize(cudaStream_t st)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    if (stream_of(st)->capture)
        die("cudaStreamSynchronize of a stream that is being captured");
    drain(stream_of(st), ~(size_t)0);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t st)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    if (stream_of(st)->capture)
        die("cudaStreamQuery of a stream that is being captured");
    return drain(stream_of(st), ~(size_t)0, false) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    event *v = reinterpret_cast<event *>(e);
    return !v->s || drain(v->s, v->mark, false) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t st, cudaStreamCaptureMode)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    if (!st || stream_of(st)->capture)
        die("cudaStreamBeginCapture: the default stream or one that is already captured");
    stream_of(st)->capture = new graph();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t st, cudaGraph_t *g)
{
    stream *s = stream_of(st);
    if (!s->capture)
        return cudaErrorIllegalState;
    *g = reinterpret_cast<cudaGraph_t>(s->capture);
    s->capture = nullptr;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    if (flags)
        die("graph flags %llu are not modelled", flags);
    *e = reinterpret_cast<cudaGraphExec_t>(new graph(*reinterpret_cast<graph *>(g)));
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t st)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    if (stream_of(st)->capture)
        die("cudaGraphLaunch into a capture");
    count.graphs++;
    for (const op &o : reinterpret_cast<graph *>(e)->ops)
        push(st, o);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    delete reinterpret_cast<graph *>(g);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e)
{
    delete reinterpret_cast<graph *>(e);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    if (flags != cudaEventDisableTiming)
        die("event flags %u are not modelled", flags);
    *e = reinterpret_cast<cudaEvent_t>(new event());
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t st)
{
    if (fate() != cudaSuccess)
        return cudaErrorIllegalAddress;
    stream *s = stream_of(st);
    if (s->capture)
        die("cudaEventRecord inside a capture is not modelled");
    *reinterpret_cast<event *>(e) = { s, s->done + s->queue.size() };
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    event *v = reinterpret_cast<event *>(e);
    if (v->s)
        drain(v->s, v->mark);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete reinterpret_cast<event *>(e);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t st, cudaEvent_t e, unsigned flags)
{
    event *v = reinterpret_cast<event *>(e);
    if (flags)
        die("event wait flags %u are not modelled", flags);
    if (v->s)
        push(st, { nullptr, v->s, v->mark, nullptr });
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *fn, cudaFuncAttribute a, int v)
{
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize)
        die("function attribute %d is not modelled", (int)a);
    if (v < 0 || (size_t)v > SMEM_LIMIT)
        return cudaErrorInvalidValue;
    smem_set[fn] = v;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t e)
{
    static std::string s;
    s = "error " + std::to_string((int)e);
    return s.c_str();
}

const char *cudaGetErrorString(cudaError_t e)
{
    return cudaGetErrorName(e);
}

} // extern "C"
