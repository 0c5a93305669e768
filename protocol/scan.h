/* scan.h - a bounded, incremental look at the bytes of a MessagePack-RPC stream.
 *
 * A peer can declare in five bytes what would cost gigabytes to decode, so nothing is decoded before this scan has
 * seen the whole frame. It works byte by byte on whatever has arrived, keeps its whole state in one fixed struct,
 * allocates nothing and does not recurse. What it guarantees of a frame that it lets pass:
 *   - it is one MessagePack array of three or four elements (the only shape MessagePack-RPC has),
 *   - it has at most limits.frame_bytes bytes, limits.nodes elements and limits.depth levels,
 * and every declared length was refused at the moment it was read when it could not be met within those limits.
 *
 * Threads: a struct scan belongs to whoever feeds it.
 */
#ifndef SKVD_PROTOCOL_SCAN_H
#define SKVD_PROTOCOL_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol/error.h"

#define SCAN_DEPTH_CAP 30 /* msgpack-c itself stops at 32 */

struct scan_limits {
    size_t frame_bytes; /* a whole frame */
    unsigned depth;     /* containers inside one another, the frame's own array included; at most SCAN_DEPTH_CAP */
    uint32_t nodes;     /* elements of a frame: each costs 24 bytes once decoded */
};

/* What every daemon and client uses unless told otherwise. */
#define SCAN_FRAME_BYTES_DEFAULT (16u << 20)
#define SCAN_DEPTH_DEFAULT       16u
#define SCAN_NODES_DEFAULT       (1u << 20)

/* Acceptance of UTF-8 over pieces of a string. */
struct scan_utf8 {
    uint8_t need, lo, hi; /* continuation bytes to come; bounds of the next one */
    bool bad;
};

struct scan {
    struct scan_limits lim;
    size_t pos;       /* bytes of this frame so far */
    uint64_t owed;    /* declared elements not begun yet: a byte each at the very least */
    uint64_t payload; /* bytes of the current string, binary or extension still to come */
    uint32_t nodes;
    unsigned depth;
    uint64_t left[SCAN_DEPTH_CAP]; /* elements left in each open container */
    uint8_t head[9];
    unsigned head_len, head_need;
    bool is_text;
    struct scan_utf8 utf8;
    bool bad_utf8; /* a str of this frame is not UTF-8: the frame is sound, the request is not */
};

enum scan_status { SCAN_MORE, SCAN_DONE, SCAN_FAIL };

/* Start a frame. lim NULL: the defaults. */
void scan_init(struct scan *s, const struct scan_limits *lim);

/* Look at n more bytes. *used: how many belong to this frame. SCAN_MORE: all used, not complete. SCAN_DONE: complete;
 * scan_init before the next. SCAN_FAIL with *err (BAD_REQUEST, TOO_LARGE): the stream can't be followed any more. */
enum scan_status scan_feed(struct scan *s, const uint8_t *p, size_t n, size_t *used, struct skv_error *err);

void scan_utf8_init(struct scan_utf8 *u);
void scan_utf8_feed(struct scan_utf8 *u, const uint8_t *p, size_t n);
/* Whole, correct UTF-8 (no surrogates, no overlong forms)? */
bool scan_utf8_valid(const char *p, size_t n);
/* The code point at s (n > 0 bytes): how many bytes it has, -1 when they are no UTF-8. */
int scan_utf8_next(const char *s, size_t n, uint32_t *cp);
/* A control character: a terminal may obey it. */
bool scan_utf8_control(uint32_t cp);
/* Begins a new line or turns the direction of writing: then what stands beside it would be read as something else. */
bool scan_utf8_moves(uint32_t cp);

#endif
