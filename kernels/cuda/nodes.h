// nodes.h - several processes, a rank each, that compute as one: rank 0 leads, the others do what it tells them.
//
// Who is who comes from the environment that torchrun or mpirun sets. The processes talk over TCP (what to do, results of
// selection) and over NCCL (sums and logits). The network is trusted, as torchrun's and NCCL's own is.
#ifndef SKVD_KERNELS_CUDA_NODES_H
#define SKVD_KERNELS_CUDA_NODES_H

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

extern "C" {
#include "protocol/error.h"
}

#define NODES_WAIT_S 120 // for all ranks to come

struct cu_nodes {
    int rank, world;
    std::vector<int> fd;           // leader: [world], -1 for itself; follower: one, the leader's
    std::vector<std::string> name; // whose, for messages
    std::function<bool()> watch;   // called while a message is waited for: looks after the device; true while that works
    std::string out;               // leader: what the followers have yet to hear
    // leader: what the followers have of the host's KV arrays
    std::vector<uint32_t> table;
    std::vector<int32_t> len, cap, victim;
};

// This process's place: true when the environment says that there are several. local: which of its machine's devices.
bool cu_nodes_env(int *rank, int *world, int *local);

// Meet: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others connect. `hello` must be the same in all (it says what is
// computed); the leader's `id` is handed to all. NULL with *err.
cu_nodes *cu_nodes_new(int rank, int world, const std::string &hello, void *id, size_t id_size, skv_error *err);
void cu_nodes_free(cu_nodes *n);

// These throw cu_error when a process is gone, naming it.
void cu_nodes_flush(cu_nodes *n);                                // send `out` to all followers
void cu_nodes_read(cu_nodes *n, int rank, void *to, size_t size); // from one (a follower's only peer is rank 0)
void cu_nodes_write(cu_nodes *n, const void *from, size_t size);  // follower: to the leader
void cu_nodes_check(cu_nodes *n);                                // is everybody there? Does not wait

#endif
