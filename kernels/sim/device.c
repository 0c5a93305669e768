/* device.c - see device.h.
 *
 * GPUs: nothing here was measured on one. Bandwidth, memory and the bf16 rate (dense, f32 accumulation) are the vendors' data
 * sheets'; the shares sustained are assumptions that are written beside them.
 */
#include "kernels/sim/device.h"

#include <stddef.h>
#include <string.h>

#define GIB ((int64_t)1 << 30)

static const struct sim_device device_table[] = {
    {
        .name = "zen4-2core",
        .title = "two Zen 4 cores, AVX2",
        .source = "Twice zen4-1core, the memory at its measured 31 GB/s; not checked with two threads",
        .memory = 16 * GIB, .mem_bw = 31e9, .mm_flops = 572e9, .mm_half_rows = 1.35, .attn_flops = 212e9, .decode_flops = 91.8e9,
        .row_bw = 5.52e9, .launch_us = 0.01, .graph_us = 0.01, .step_us = 20, .token_us = 275,
    },
    {
        .name = "zen4-1core",
        .title = "one Zen 4 core, AVX2",
        .source = "Fitted to eight of the CPU backend's measured times (SmolLM2-135M, Q4_1, bf16 cache; tests/bench_sim "
                  "--threads 1 --fit); ten others, prefills of 120 to 4096 tokens and decode steps of 1 to 16 sequences, were "
                  "then predicted within 9 %. The bandwidth never decides there: it is above the 22 to 37 GB/s that were measured "
                  "from memory, as a third of these weights stay in the L3",
        .memory = 16 * GIB, .mem_bw = 45e9, .mm_flops = 286e9, .mm_half_rows = 1.35, .attn_flops = 106e9, .decode_flops = 45.9e9,
        .row_bw = 2.76e9, .launch_us = 0.01, .graph_us = 0.01, .step_us = 20, .token_us = 549,
    },
    {
        .name = "rtx4090",
        .title = "NVIDIA RTX 4090, 24 GB",
        .source = "NVIDIA Ada architecture white paper, appendix A: 1008 GB/s, 165.2 bf16 TFLOP/s dense with f32 accumulation, 24 GB. "
                  "Shares: 0.90 of the bandwidth, 0.80 of the rate in products (half of it at 64 rows), 0.50 in attention. "
                  "Launches: a stream's kernels follow each other at about 1 us more than their run time, a graph's at 0.5 us "
                  "(NVIDIA, \"Getting Started with CUDA Graphs\"), and a small kernel runs 2 us whatever it does",
        .memory = 24 * GIB, .mem_bw = 1008e9 * 0.90, .mm_flops = 165.2e12 * 0.80, .mm_half_rows = 64,
        .attn_flops = 165.2e12 * 0.50, .decode_flops = 40e12, .row_bw = 1008e9 * 0.90, .launch_us = 3, .graph_us = 2.5,
        .step_us = 60, .token_us = 8,
    },
    {
        .name = "h100",
        .title = "NVIDIA H100 SXM, 80 GB",
        .source = "NVIDIA H100 data sheet: 3.35 TB/s, 989 bf16 TFLOP/s dense, 80 GB. Shares as for rtx4090, "
                  "products half of their rate at 128 rows (tiles of 128, 132 multiprocessors)",
        .memory = 80 * GIB, .mem_bw = 3350e9 * 0.90, .mm_flops = 989e12 * 0.80, .mm_half_rows = 128,
        .attn_flops = 989e12 * 0.50, .decode_flops = 60e12, .row_bw = 3350e9 * 0.90, .launch_us = 3, .graph_us = 2.5,
        .step_us = 60, .token_us = 8,
    },
    {
        .name = "h200",
        .title = "NVIDIA H200 SXM, 141 GB",
        .source = "NVIDIA H200 data sheet: 4.8 TB/s, 989 bf16 TFLOP/s dense, 141 GB. Shares as for h100",
        .memory = 141000000000, .mem_bw = 4800e9 * 0.90, .mm_flops = 989e12 * 0.80, .mm_half_rows = 128,
        .attn_flops = 989e12 * 0.50, .decode_flops = 60e12, .row_bw = 4800e9 * 0.90, .launch_us = 3, .graph_us = 2.5,
        .step_us = 60, .token_us = 8,
    },
};
#define N_DEVICE (sizeof device_table / sizeof *device_table)

const struct sim_device *sim_device_at(int i)
{
    return i >= 0 && (size_t)i < N_DEVICE ? &device_table[i] : NULL;
}

const struct sim_device *sim_device_find(const char *name)
{
    for (size_t i = 0; i < N_DEVICE; i++)
        if (strcmp(device_table[i].name, name) == 0)
            return &device_table[i];
    return NULL;
}
