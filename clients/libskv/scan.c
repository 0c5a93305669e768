#include "config.h"

#include "clients/libskv/scan.h"

#include <stdbool.h>

/* What the first byte of a value says: how many bytes of a length follow, what follows those, and whether the value
 * opens a container. */
struct head {
    unsigned len_bytes; /* of a big-endian length after the first byte */
    uint64_t bytes;     /* payload; the length that was read is added, unless it counts elements */
    unsigned per;       /* values an element has: 0 no container, 1 array, 2 map */
    uint64_t count;     /* elements, when no length follows */
};

/* Rows for 0xc0..0xdf: nil, (never used), false, true, bin, ext, float, uint, int, fixext, str, array, map. */
static const struct head heads[32] = {
    { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 1, 0, 0, 0 },  { 2, 0, 0, 0 }, { 4, 0, 0, 0 },
    { 1, 1, 0, 0 }, { 2, 1, 0, 0 }, { 4, 1, 0, 0 }, { 0, 4, 0, 0 }, { 0, 8, 0, 0 },  { 0, 1, 0, 0 }, { 0, 2, 0, 0 },
    { 0, 4, 0, 0 }, { 0, 8, 0, 0 }, { 0, 1, 0, 0 }, { 0, 2, 0, 0 }, { 0, 4, 0, 0 },  { 0, 8, 0, 0 }, { 0, 2, 0, 0 },
    { 0, 3, 0, 0 }, { 0, 5, 0, 0 }, { 0, 9, 0, 0 }, { 0, 17, 0, 0 }, { 1, 0, 0, 0 }, { 2, 0, 0, 0 }, { 4, 0, 0, 0 },
    { 2, 0, 1, 0 }, { 4, 0, 1, 0 }, { 2, 0, 2, 0 }, { 4, 0, 2, 0 },
};

static bool head_of(unsigned char b, struct head *h)
{
    *h = (struct head){ 0, 0, 0, 0 };
    if (b <= 0x7f || b >= 0xe0)
        return true;
    if (b <= 0x8f)
        h->per = 2, h->count = b & 0x0f;
    else if (b <= 0x9f)
        h->per = 1, h->count = b & 0x0f;
    else if (b <= 0xbf)
        h->bytes = b & 0x1f;
    else
        *h = heads[b - 0xc0];
    return b != 0xc1;
}

/* One value is complete: close the containers that end with it. */
static void close_value(struct scan *s)
{
    while (s->depth > 0 && --s->left[s->depth - 1] == 0)
        s->depth--;
}

static enum scan_result scan_value(struct scan *s, const unsigned char *frame, size_t len, size_t limit)
{
    struct head h;
    uint64_t n = 0, need;

    if (!head_of(frame[s->pos], &h))
        return SCAN_INVALID;
    if (len - s->pos < 1 + h.len_bytes)
        return SCAN_MORE;
    for (unsigned i = 0; i < h.len_bytes; i++)
        n = n << 8 | frame[s->pos + 1 + i];
    if (h.per > 0)
        n = (h.len_bytes ? n : h.count) * h.per;
    else
        h.bytes += n;
    /* n < 2^33, so none of these sums wraps; owed counts this value's first byte already. */
    need = 1 + h.len_bytes + h.bytes;
    if (s->owed + need - 1 + (h.per ? n : 0) > limit - s->pos)
        return SCAN_TOO_LARGE;
    if (len - s->pos < need)
        return SCAN_MORE;
    if (++s->values > SCAN_VALUES)
        return SCAN_TOO_LARGE;
    s->pos += need;
    s->owed -= 1;
    if (h.per > 0 && n > 0) {
        if (s->depth == SCAN_DEPTH)
            return SCAN_TOO_DEEP;
        s->left[s->depth++] = n;
        s->owed += n;
    } else
        close_value(s);
    return SCAN_DONE;
}

enum scan_result scan_frame(struct scan *s, const unsigned char *frame, size_t len, size_t limit)
{
    if (s->pos == 0 && s->depth == 0)
        s->owed = 1;
    while (s->owed > 0) {
        enum scan_result r;
        if (s->pos >= limit)
            return SCAN_TOO_LARGE;
        if (s->pos >= len)
            return SCAN_MORE;
        r = scan_value(s, frame, len, limit);
        if (r != SCAN_DONE)
            return r;
    }
    return SCAN_DONE;
}
