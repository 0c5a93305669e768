/* scan.h - where does a MessagePack value end? A look at the bytes only, before any memory is taken for it. */
#ifndef SKVD_CLIENTS_LIBSKV_SCAN_H
#define SKVD_CLIENTS_LIBSKV_SCAN_H

#include <stddef.h>
#include <stdint.h>

#define SCAN_DEPTH 24                  /* nesting taken; msgpack-c's own unpacker ends at 32 */
#define SCAN_VALUES (8u * 1024 * 1024) /* values in one frame: 24 bytes each once unpacked */

/* One frame's scan, kept between calls so that bytes are looked at once. All zero: at a frame's beginning. */
struct scan {
    size_t pos;                   /* bytes looked at, from the frame's first */
    uint64_t left[SCAN_DEPTH];    /* values still to come at each open level */
    unsigned depth;
    uint64_t owed;                /* bytes that must come at least: one for each declared value */
    uint64_t values;
};

enum scan_result { SCAN_MORE = 0, SCAN_DONE, SCAN_TOO_LARGE, SCAN_TOO_DEEP, SCAN_INVALID };

/* Look at frame[0..len), which must begin with the same bytes as in the call before. SCAN_DONE: the frame is s->pos bytes
 * long. Nothing is allocated; a frame that declares more than limit bytes is refused as soon as it does. */
enum scan_result scan_frame(struct scan *s, const unsigned char *frame, size_t len, size_t limit);

#endif
