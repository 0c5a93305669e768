/* The bounded scan: what it lets pass, what it refuses, and that pieces make no difference. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "protocol/scan.h"

static enum scan_status feed(struct scan *s, const void *p, size_t n, size_t *used, struct skv_error *err)
{
    return scan_feed(s, p, n, used, err);
}

/* Whole, and then byte by byte: the same verdict at the same byte. */
static enum scan_status both(const void *bytes, size_t n, const struct scan_limits *lim, size_t *at, struct skv_error *err)
{
    const uint8_t *p = bytes;
    struct scan s;
    size_t used = 0, total = 0;
    enum scan_status whole, step = SCAN_MORE;

    scan_init(&s, lim);
    whole = feed(&s, p, n, at, err);
    scan_init(&s, lim);
    while (total < n && step == SCAN_MORE) {
        step = feed(&s, p + total, 1, &used, err);
        total += used;
    }
    ck_assert_int_eq(whole, step);
    if (whole == SCAN_DONE)
        ck_assert_uint_eq(total, *at);
    return whole;
}

START_TEST(passes_a_request)
{
    static const char req[] = "\x94\x00\x07\xa5hello\x91\x80\x94"; /* and the beginning of the next */
    struct skv_error err;
    size_t at;

    ck_assert_int_eq(both(req, sizeof req - 1, NULL, &at, &err), SCAN_DONE);
    ck_assert_uint_eq(at, sizeof req - 2);
}
END_TEST

START_TEST(passes_every_type)
{
    static const char msg[] = "\x93\x02\xa1m\xdc\x00\x13"
                              "\xc0\xc2\xc3\xcc\xff\xcd\x01\x02\xce\x01\x02\x03\x04\xcf\x01\x02\x03\x04\x05\x06\x07\x08"
                              "\xd0\x80\xd1\x80\x00\xd2\x80\x00\x00\x00\xd3\x80\x00\x00\x00\x00\x00\x00\x00"
                              "\xca\x00\x00\x00\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00"
                              "\xd9\x03\xe2\x82\xac\xda\x00\x01x\xc4\x02\xff\xfe\xd4\x05\x01\xc7\x01\x05z\x81\xa1k\x90";
    struct skv_error err;
    size_t at;

    ck_assert_int_eq(both(msg, sizeof msg - 1, NULL, &at, &err), SCAN_DONE);
    ck_assert_uint_eq(at, sizeof msg - 1);
}
END_TEST

struct refusal {
    const char *bytes;
    size_t n;
    enum skv_code code;
    const char *says;
};

static const struct refusal refusals[] = {
#define R(s, code, says) { s, sizeof(s) - 1, code, says }
    R("GET / HTTP/1.1\r\n", SKV_BAD_REQUEST, "not MessagePack-RPC"),
    R("\x92", SKV_BAD_REQUEST, "not MessagePack-RPC"),
    R("\xdc\x00\x00", SKV_BAD_REQUEST, "this one has 0"),
    R("\xdc\x00\x05", SKV_BAD_REQUEST, "this one has 5"),
    R("\x94\xc1", SKV_BAD_REQUEST, "0xc1"),
    R("\xdd\xff\xff\xff\xff", SKV_TOO_LARGE, "4294967295 elements"),
    R("\x94\x00\x01\xdd\xff\xff\xff\xff", SKV_TOO_LARGE, "4294967295 elements"),
    R("\x94\x00\x01\xdf\xff\xff\xff\xff", SKV_TOO_LARGE, "8589934590 elements"),
    R("\x94\x00\x01\xdb\xff\xff\xff\xff", SKV_TOO_LARGE, "4294967295 bytes"),
    R("\x94\x00\x01\xc6\xff\xff\xff\xff", SKV_TOO_LARGE, "4294967295 bytes"),
    R("\x94\x00\x01\xc9\xff\xff\xff\xff", SKV_TOO_LARGE, "4294967296 bytes"),
    R("\x94\x00\x01\xdb\x01\x00\x00\x00", SKV_TOO_LARGE, "frame-limit"), /* 16 MiB: its own head is too much */
#undef R
};

START_TEST(refuses)
{
    const struct refusal *r = &refusals[_i];
    struct skv_error err;
    size_t at;

    ck_assert_int_eq(both(r->bytes, r->n, NULL, &at, &err), SCAN_FAIL);
    ck_assert_int_eq(err.code, r->code);
    ck_assert_ptr_nonnull(strstr(err.msg, r->says));
}
END_TEST

START_TEST(depth_is_bounded)
{
    struct scan_limits lim = { 1 << 20, 16, 1 << 20 };
    uint8_t deep[128];
    struct skv_error err;
    size_t at;

    memset(deep, 0x91, sizeof deep);
    deep[0] = 0x94;
    ck_assert_int_eq(both(deep, 64, &lim, &at, &err), SCAN_FAIL);
    ck_assert_ptr_nonnull(strstr(err.msg, "16 levels"));
    ck_assert_int_eq(both(deep, 16, &lim, &at, &err), SCAN_MORE); /* the frame's array and fifteen more */
    lim.depth = 1000; /* the state is fixed: no limit goes beyond it */
    ck_assert_int_eq(both(deep, 64, &lim, &at, &err), SCAN_FAIL);
}
END_TEST

/* Headers that each fit, but together declare more than can come: 93 such bytes cost msgpack-c 62 MiB. */
START_TEST(nested_declarations_add_up)
{
    struct scan_limits lim = { 100000, 16, 1 << 20 };
    uint8_t b[64] = { 0x94, 0x00, 0x01 };
    struct skv_error err;
    size_t at, n = 3;

    for (int i = 0; i < 3; i++) { /* 40000 elements, the first of which has 40000, ... */
        b[n++] = 0xdc;
        b[n++] = 40000 >> 8;
        b[n++] = 40000 & 0xff;
    }
    ck_assert_int_eq(both(b, 6, &lim, &at, &err), SCAN_MORE);
    ck_assert_int_eq(both(b, n, &lim, &at, &err), SCAN_FAIL);
    ck_assert_int_eq(err.code, SKV_TOO_LARGE);
    lim.nodes = 50000;
    lim.frame_bytes = 1 << 20;
    ck_assert_int_eq(both(b, n, &lim, &at, &err), SCAN_FAIL);
    ck_assert_ptr_nonnull(strstr(err.msg, "more than 50000 elements"));
}
END_TEST

/* A frame of exactly the limit passes, one byte more does not. */
START_TEST(frame_limit_is_exact)
{
    struct scan_limits lim = { 4096, 16, 1000 };
    uint8_t *b = calloc(1, 8192);
    struct skv_error err;
    size_t at, text = 4096 - 3 - 3 - 1;

    memcpy(b, "\x94\x00\x01\xda", 4);
    for (size_t extra = 0; extra < 2; extra++) {
        b[4] = (uint8_t)((text + extra) >> 8);
        b[5] = (uint8_t)(text + extra);
        memset(b + 6, 'x', text + extra);
        b[6 + text + extra] = 0x90;
        ck_assert_int_eq(both(b, 7 + text + extra, &lim, &at, &err), extra == 0 ? SCAN_DONE : SCAN_FAIL);
    }
    free(b);
}
END_TEST

struct text_case {
    const char *s;
    bool valid;
};

static const struct text_case texts[] = {
    { "plain ascii, longer than a word", true }, { "gr\xc3\xbc\xc3\x9f", true }, { "\xe2\x82\xac", true },
    { "\xf0\x9f\x98\x80", true },  { "\xf4\x8f\xbf\xbf", true }, { "\xf4\x90\x80\x80", false },
    { "\xc0\x80", false },         { "\xc1\xbf", false },        { "\xe0\x9f\xbf", false },
    { "\xed\xa0\x80", false },     { "\xf0\x8f\xbf\xbf", false }, { "\x80", false },
    { "\xe2\x82", false },         { "12345678\xff", false },    { "\xc3(", false },
};

START_TEST(utf8)
{
    const struct text_case *t = &texts[_i];
    uint8_t b[64] = { 0x94, 0x00, 0x01 };
    size_t n = strlen(t->s), at;
    struct scan s;
    struct skv_error err;

    ck_assert_int_eq(scan_utf8_valid(t->s, n), t->valid);
    at = 0;
    for (int k = 0; at < n && k >= 0; at += k > 0 ? (size_t)k : 0) {
        uint32_t cp;
        k = scan_utf8_next(t->s + at, n - at, &cp);
    }
    ck_assert_int_eq(at == n, t->valid);
    b[3] = (uint8_t)(0xa0 | (n & 0x1f));
    if (n > 31) {
        b[3] = 0xd9;
        b[4] = (uint8_t)n;
    }
    memcpy(b + (n > 31 ? 5 : 4), t->s, n);
    b[(n > 31 ? 5 : 4) + n] = 0x90;
    scan_init(&s, NULL);
    ck_assert_int_eq(feed(&s, b, (n > 31 ? 6 : 5) + n, &at, &err), SCAN_DONE);
    ck_assert_int_eq(s.bad_utf8, !t->valid);
}
END_TEST

/* Whatever the bytes, the scan ends within its limits and never claims more than it was given. */
START_TEST(random_bytes)
{
    struct scan_limits lim = { 4096, 8, 500 };
    unsigned seed = 1;

    for (int round = 0; round < 20000; round++) {
        uint8_t b[256];
        struct scan s;
        struct skv_error err;
        size_t used;

        for (size_t i = 0; i < sizeof b; i++) {
            seed = seed * 1103515245u + 12345u;
            b[i] = (uint8_t)(seed >> 16);
            if (round % 2 == 0 && b[i] >= 0xc0)
                b[i] = (uint8_t)(0x90 + b[i] % 48); /* mostly containers and short strings */
        }
        b[0] = 0x94;
        scan_init(&s, &lim);
        feed(&s, b, sizeof b, &used, &err);
        ck_assert_uint_le(used, sizeof b);
        ck_assert_uint_le(s.depth, lim.depth);
        ck_assert_uint_le(s.nodes, lim.nodes);
        ck_assert_uint_le(s.pos, lim.frame_bytes);
    }
}
END_TEST

int main(void)
{
    Suite *su = suite_create("scan");
    TCase *tc = tcase_create("scan");
    SRunner *sr = srunner_create(su);
    int failed;

    tcase_add_test(tc, passes_a_request);
    tcase_add_test(tc, passes_every_type);
    tcase_add_loop_test(tc, refuses, 0, (int)(sizeof refusals / sizeof *refusals));
    tcase_add_test(tc, depth_is_bounded);
    tcase_add_test(tc, nested_declarations_add_up);
    tcase_add_test(tc, frame_limit_is_exact);
    tcase_add_loop_test(tc, utf8, 0, (int)(sizeof texts / sizeof *texts));
    tcase_add_test(tc, random_bytes);
    suite_add_tcase(su, tc);
    srunner_run_all(sr, CK_NORMAL);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed == 0 ? 0 : 1;
}
