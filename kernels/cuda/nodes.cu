// nodes.cu - see nodes.h: the environment, the meeting, bytes back and forth.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/nodes.h"

#define GONE_MS 10000 // a machine that answers no packet for so long is gone

// --- who we are --------------------------------------------------------------------------------------------

static bool env_int(const char *name, int *v)
{
    const char *s = getenv(name);
    char *end;
    long l = s ? strtol(s, &end, 10) : -1;
    if (!s || end == s || *end || l < 0 || l > 4096)
        return false;
    *v = (int)l;
    return true;
}

bool cu_nodes_env(int *rank, int *world, int *local)
{
    // torchrun; Open MPI; MPICH and what is made from it; Slurm
    static const char *const names[][3] = { { "RANK", "WORLD_SIZE", "LOCAL_RANK" },
                                            { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK" },
                                            { "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID" },
                                            { "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID" } };
    for (const auto &n : names) {
        if (!env_int(n[0], rank) || !env_int(n[1], world) || *rank >= *world)
            continue;
        if (!env_int(n[2], local))
            *local = 0;
        return *world > 1;
    }
    *rank = *local = 0;
    *world = 1;
    return false;
}

// --- the meeting --------------------------------------------------------------------------------------------

static addrinfo *master(bool listen, std::string *name, skv_error *err)
{
    const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    addrinfo hints, *res = nullptr;
    if (!host || !port) {
        skv_fail(err, SKV_BAD_CONFIG,
                 "several ranks, but MASTER_ADDR and MASTER_PORT don't say where rank 0 listens (torchrun sets them; mpirun -x "
                 "passes them on)");
        return nullptr;
    }
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = listen ? AI_PASSIVE : 0;
    int rc = getaddrinfo(host, port, &hints, &res);
    if (rc) {
        skv_fail(err, SKV_BAD_CONFIG, "MASTER_ADDR %s, MASTER_PORT %s: %s", host, port, gai_strerror(rc));
        return nullptr;
    }
    *name = std::string(host) + ":" + port;
    return res;
}

static double now_s()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void tune(int fd)
{
    int on = 1, idle = GONE_MS / 3000, gone = GONE_MS;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &gone, sizeof gone);
}

// All of it, or false.
static bool read_all(int fd, void *to, size_t n)
{
    for (char *p = static_cast<char *>(to); n;) {
        ssize_t k = read(fd, p, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

static bool write_all(int fd, const void *from, size_t n)
{
    for (const char *p = static_cast<const char *>(from); n;) {
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

struct greeting {
    char magic[8];
    int32_t rank, world;
    uint32_t hello_size;
};

// One follower's greeting: 0 taken; 1: nobody of ours, go on; -1 refused.
static int greet(cu_nodes *n, int fd, const std::string &hello, const void *id, size_t id_size, skv_error *err)
{
    greeting g;
    timeval limit = { 5, 0 }, none = { 0, 0 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (!read_all(fd, &g, sizeof g) || memcmp(g.magic, "skvdtp1", 8) || g.world != n->world || g.rank < 1 ||
        g.rank >= n->world || n->fd[g.rank] >= 0 || g.hello_size > 4096)
        return 1;
    std::string theirs(g.hello_size, '\0');
    if (!read_all(fd, &theirs[0], theirs.size()))
        return 1;
    if (theirs != hello)
        return skv_fail(err, SKV_BAD_CONFIG, "rank %d computes something else: %s; here: %s", g.rank, theirs.c_str(), hello.c_str());
    if (!write_all(fd, id, id_size))
        return 1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    tune(fd);
    n->fd[g.rank] = fd;
    char host[128] = "?";
    sockaddr_storage a;
    socklen_t len = sizeof a;
    if (!getpeername(fd, reinterpret_cast<sockaddr *>(&a), &len))
        getnameinfo(reinterpret_cast<sockaddr *>(&a), len, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
    n->name[g.rank] = "rank " + std::to_string(g.rank) + " (" + host + ")";
    return 0;
}

static int missing(const cu_nodes *n)
{
    for (int i = 1; i < n->world; i++)
        if (n->fd[i] < 0)
            return i;
    return 0;
}

static int lead(cu_nodes *n, const std::string &hello, const void *id, size_t id_size, skv_error *err)
{
    std::string where;
    addrinfo *a = master(true, &where, err);
    if (!a)
        return -1;
    int on = 1, s = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s >= 0)
        setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    bool open = s >= 0 && !bind(s, a->ai_addr, a->ai_addrlen) && !listen(s, 64);
    freeaddrinfo(a);
    if (!open) {
        int e = errno;
        if (s >= 0)
            close(s);
        return skv_fail(err, SKV_BAD_CONFIG, "rank 0 can't listen at %s: %s", where.c_str(), strerror(e));
    }
    int rc = 0;
    for (double end = now_s() + NODES_WAIT_S; !rc && missing(n);) {
        pollfd p = { s, POLLIN, 0 };
        double left = end - now_s();
        if (left <= 0) {
            rc = skv_fail(err, SKV_INTERNAL, "rank %d did not come to %s within %d s", missing(n), where.c_str(), NODES_WAIT_S);
        } else if (poll(&p, 1, (int)(left * 1000) + 1) > 0) {
            int fd = accept4(s, nullptr, nullptr, SOCK_CLOEXEC);
            int got = fd >= 0 ? greet(n, fd, hello, id, id_size, err) : 1;
            if (got && fd >= 0)
                close(fd);
            rc = got < 0 ? -1 : 0;
        }
    }
    close(s);
    return rc;
}

static int join(cu_nodes *n, const std::string &hello, void *id, size_t id_size, skv_error *err)
{
    std::string where;
    addrinfo *a = master(false, &where, err);
    int fd = -1;
    if (!a)
        return -1;
    for (double end = now_s() + NODES_WAIT_S; fd < 0 && now_s() < end;) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && !connect(fd, a->ai_addr, a->ai_addrlen))
            break;
        if (fd >= 0)
            close(fd);
        fd = -1;
        usleep(100000);
    }
    freeaddrinfo(a);
    if (fd < 0)
        return skv_fail(err, SKV_INTERNAL, "rank 0 did not answer at %s within %d s", where.c_str(), NODES_WAIT_S);
    greeting g = { "skvdtp1", n->rank, n->world, (uint32_t)hello.size() };
    n->fd[0] = fd;
    n->name[0] = "rank 0 (" + where + ")";
    tune(fd);
    if (!write_all(fd, &g, sizeof g) || !write_all(fd, hello.data(), hello.size()) || !read_all(fd, id, id_size))
        return skv_fail(err, SKV_BAD_CONFIG, "rank 0 at %s did not take us: its log says why", where.c_str());
    return 0;
}

cu_nodes *cu_nodes_new(int rank, int world, const std::string &hello, void *id, size_t id_size, skv_error *err)
{
    cu_nodes *n = new cu_nodes();
    n->rank = rank;
    n->world = world;
    n->fd.assign((size_t)(rank == 0 ? world : 1), -1);
    n->name.resize(n->fd.size());
    if (rank == 0 ? lead(n, hello, id, id_size, err) : join(n, hello, id, id_size, err)) {
        cu_nodes_free(n);
        return nullptr;
    }
    return n;
}

void cu_nodes_free(cu_nodes *n)
{
    if (!n)
        return;
    for (int fd : n->fd)
        if (fd >= 0)
            close(fd);
    delete n;
}

// --- bytes ---------------------------------------------------------------------------------------------------

void cu_nodes_flush(cu_nodes *n)
{
    std::string out;
    out.swap(n->out);
    for (size_t i = 0; !out.empty() && i < n->fd.size(); i++)
        if (n->fd[i] >= 0 && !write_all(n->fd[i], out.data(), out.size()))
            cu_fail("%s is gone", n->name[i].c_str());
}

void cu_nodes_read(cu_nodes *n, int rank, void *to, size_t size)
{
    pollfd p = { n->fd[rank], POLLIN, 0 };
    for (int ms = 0; n->watch && poll(&p, 1, ms) == 0;)
        ms = n->watch() ? 1 : 100;
    if (!read_all(n->fd[rank], to, size))
        cu_fail("%s is gone", n->name[rank].c_str());
}

void cu_nodes_write(cu_nodes *n, const void *from, size_t size)
{
    if (!write_all(n->fd[0], from, size))
        cu_fail("%s is gone", n->name[0].c_str());
}

void cu_nodes_check(cu_nodes *n)
{
    for (size_t i = 0; i < n->fd.size(); i++) {
        pollfd p = { n->fd[i], POLLIN, 0 };
        char c;
        if (n->fd[i] < 0 || poll(&p, 1, 0) <= 0)
            continue;
        // Bytes that wait are fine, an end is not.
        if ((p.revents & (POLLERR | POLLNVAL)) || recv(n->fd[i], &c, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
            cu_fail("%s is gone", n->name[i].c_str());
    }
}
