/* fuzz_request: a whole frame through the scan, the reader and the argument tables of every method. */
#include <string.h>

#include "protocol/args.h"
#include "protocol/scan.h"
#include "protocol/wire.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_in in = {data, size};
    const struct method *chosen = &method_table[fuzz_byte(&in) % METHOD_COUNT], *named;
    struct scan s;
    struct skv_error err = {.code = SKV_OK};
    struct wire_msg msg;
    struct args args;
    size_t used;

    scan_init(&s, NULL);
    if (scan_feed(&s, in.p, in.n, &used, &err) != SCAN_DONE || s.bad_utf8 /* refused before it is read */ ||
        wire_parse(in.p, used, &msg, &err) != 0)
        return 0;
    if (msg.kind != WIRE_RESPONSE) {
        named = method_find(msg.method, msg.method_len);
        /* the first byte's method too, so that a mutation of arguments need not find the name as well */
        for (int i = 0; i < 2; i++) {
            const struct method *m = i == 0 ? chosen : named;
            if (m == NULL)
                continue;
            err.code = SKV_OK;
            err.msg[0] = '\0';
            int rc = args_decode(m, msg.params, &args, &err);
            FUZZ_CHECK(rc == 0 || (err.code != SKV_OK && err.msg[0] != '\0' && memchr(err.msg, 0, sizeof err.msg)));
            FUZZ_CHECK(rc == 0 || scan_utf8_valid(err.msg, strlen(err.msg)));
            args_fini(&args);
        }
    }
    wire_msg_fini(&msg);
    return 0;
}
