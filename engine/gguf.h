/* gguf.h - reading a GGUF file by mmap; every number in it is checked before it is used.
 *
 * Format: the GGUF specification, versions 2 and 3, little-endian. A broken file gives SKV_BAD_MODEL with a sentence that
 * names the key or tensor and what is wrong, never a crash, in little time and memory (see tests/data for the kinds).
 */
#ifndef SKVD_ENGINE_GGUF_H
#define SKVD_ENGINE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "protocol/error.h"

struct gguf;

/* Map and parse. NULL with *err. gguf_open_mem parses bytes that stay the caller's (tests, fuzzing). */
struct gguf *gguf_open(const char *path, struct skv_error *err);
struct gguf *gguf_open_mem(const void *data, size_t size, const char *name, struct skv_error *err);
void gguf_close(struct gguf *g);

/* Tell the kernel that the mapped bytes are not needed in memory (after repacking); they stay readable. */
void gguf_dontneed(struct gguf *g);
size_t gguf_size(const struct gguf *g);
const void *gguf_base(const struct gguf *g); /* start of the mapping: SIGBUS handling */

struct gguf_str {
    const char *s; /* in the mapping, not NUL-terminated, valid UTF-8 without NUL */
    size_t len;
};

/* Metadata by key. Return 1 found, 0 absent, -1 present with the wrong type (with *err). Integers of any width and sign
 * are accepted for get_u32 when the value fits. */
int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, struct skv_error *err);
int gguf_get_f32(const struct gguf *g, const char *key, float *out, struct skv_error *err);
int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct skv_error *err);
int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct skv_error *err);

/* Arrays. gguf_arr_* with an index below n. */
struct gguf_arr {
    int type;   /* element type of the file format */
    size_t n;
    const unsigned char *data; /* fixed-size elements, or NULL */
    const struct gguf_str *str; /* strings */
};
int gguf_get_arr(const struct gguf *g, const char *key, int type, struct gguf_arr *out, struct skv_error *err);
float gguf_arr_f32(const struct gguf_arr *a, size_t i);
int32_t gguf_arr_i32(const struct gguf_arr *a, size_t i);
#define GGUF_T_I32 5
#define GGUF_T_F32 6
#define GGUF_T_STR 8
#define GGUF_T_ARR 9

/* A tensor by name: 1 found (rows = product of dims 1.., cols = dim 0), 0 absent. */
int gguf_tensor(const struct gguf *g, const char *name, struct kern_tensor *out);
int gguf_n_tensors(const struct gguf *g);
const char *gguf_tensor_name(const struct gguf *g, int i);

#endif
