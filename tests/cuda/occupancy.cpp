// occupancy.cpp - blocks a multiprocessor of the attention kernels, by NVIDIA's own calculator and figures of the CUDA
// programming guide ("Technical Specifications per Compute Capability"). Arguments: triples REGISTERS SHARED THREADS
// with a NAME in front. Prints a table; fails when a kernel of prefill gets fewer than two blocks.
#include <cuda_occupancy.h>

#include <cstdio>
#include <cstdlib>

struct target {
    const char *name;
    int major, minor, smem_sm, smem_block, threads;
};

static const target targets[] = { { "sm_80", 8, 0, 167936, 166912, 2048 }, { "sm_86", 8, 6, 102400, 101376, 1536 },
                                  { "sm_89", 8, 9, 102400, 101376, 1536 }, { "sm_90", 9, 0, 233472, 232448, 2048 },
                                  { "sm_100", 10, 0, 233472, 232448, 2048 }, { "sm_120", 12, 0, 102400, 101376, 1536 } };

static int blocks_of(const target &t, int regs, int smem, int threads)
{
    cudaOccDeviceProp p;
    cudaOccFuncAttributes a;
    cudaOccDeviceState s;
    cudaOccResult r;
    p.computeMajor = t.major;
    p.computeMinor = t.minor;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = t.threads;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32;
    p.sharedMemPerBlock = 49152;
    p.sharedMemPerMultiprocessor = t.smem_sm;
    p.numSms = 1;
    p.sharedMemPerBlockOptin = t.smem_block;
    p.reservedSharedMemPerBlock = 1024;
    a.maxThreadsPerBlock = 1024;
    a.numRegs = regs;
    a.sharedSizeBytes = 0;
    a.partitionedGCConfig = PARTITIONED_GC_OFF;
    a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = smem;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, smem) != CUDA_OCC_SUCCESS)
        return -1;
    return r.activeBlocksPerMultiprocessor;
}

int main(int argc, char **argv)
{
    int bad = 0, n = 0;
    for (int i = 1; i + 3 < argc; i += 4) {
        int regs = atoi(argv[i + 1]), smem = atoi(argv[i + 2]), threads = atoi(argv[i + 3]);
        printf("%-16s %3d registers %6d bytes %3d threads:", argv[i], regs, smem, threads);
        for (const target &t : targets) {
            int b = blocks_of(t, regs, smem, threads);
            printf("  %s %d (%d warps)", t.name, b, b * threads / 32);
            n++;
            bad += b < 2;
        }
        putchar('\n');
    }
    printf("%d passed, %d failed\n", n - bad, bad);
    return bad != 0;
}
