/* device.h - the machines whose time the sim backend counts: a roofline and a few overheads, each with its source. */
#ifndef SKVD_KERNELS_SIM_DEVICE_H
#define SKVD_KERNELS_SIM_DEVICE_H

#include <stdint.h>

/* Rates are what well-made kernels sustain: the data sheet's figure times a stated share, or measured. */
struct sim_device {
    const char *name;    /* "rtx4090" */
    const char *title;   /* "NVIDIA RTX 4090, 24 GB" */
    const char *source;  /* where the figures are from, one sentence each */
    int64_t memory;      /* bytes */
    double mem_bw;       /* bytes a second: weights, KV */
    double mm_flops;     /* matrix products with many rows, flop a second */
    double mm_half_rows; /* rows at which half of that is reached (tiles that are not full) */
    double attn_flops;   /* prefill attention: products and softmax */
    double decode_flops; /* decode attention and its scores */
    double row_bw;       /* bytes a second of the passes over rows: norms, RoPE, activation, residual */
    double launch_us;    /* each kernel (CPU: each job of the worker pool) */
    double graph_us;     /* each kernel of a decode step, in a graph */
    double step_us;      /* host work of a step */
    double token_us;     /* host work of a token chosen: sampling, text, events */
};

/* NULL when there is none of that name. */
const struct sim_device *sim_device_find(const char *name);
/* The i-th, NULL past the end. */
const struct sim_device *sim_device_at(int i);

#endif
