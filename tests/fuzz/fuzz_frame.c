/* fuzz_frame: the bytes of a connection. The scan's verdict must not depend on how they are cut into reads, and what it
 * lets pass must be readable. */
#include <stdlib.h>
#include <string.h>

#include "protocol/scan.h"
#include "protocol/wire.h"
#include "tests/fuzz/fuzz.h"

static const struct scan_limits limits = {.frame_bytes = 1 << 16, .depth = SCAN_DEPTH_DEFAULT, .nodes = 1 << 12};

/* Follow the stream in pieces of `step` bytes; how many frames passed, plus a big number when it failed. */
static int follow(const uint8_t *data, size_t size, size_t step, bool parse)
{
    struct scan s;
    size_t at = 0, begin = 0, used;
    int frames = 0;

    scan_init(&s, &limits);
    while (at < size) {
        struct skv_error err;
        size_t n = size - at < step ? size - at : step;
        enum scan_status st = scan_feed(&s, data + at, n, &used, &err);

        FUZZ_CHECK(used <= n);
        at += used;
        if (st == SCAN_FAIL)
            return frames + 1000000;
        FUZZ_CHECK(st == SCAN_DONE || used == n);
        if (st != SCAN_DONE)
            continue;
        FUZZ_CHECK(at - begin <= limits.frame_bytes);
        if (parse) {
            struct wire_msg m;
            if (wire_parse(data + begin, at - begin, &m, &err) == 0)
                wire_msg_fini(&m);
        }
        frames++;
        begin = at;
        scan_init(&s, &limits);
    }
    return frames;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int whole = follow(data, size, size > 0 ? size : 1, true);

    FUZZ_CHECK(whole == follow(data, size, 1, false));
    FUZZ_CHECK(whole == follow(data, size, 7, false));
    return 0;
}
