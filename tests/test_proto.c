/* Messages out and in: wire_* against themselves, and args_decode against every kind of argument. */
#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "protocol/args.h"
#include "protocol/scan.h"
#include "protocol/wire.h"

/* Parse what b holds; it must be one sound frame. */
static void parse(const struct wire_buf *b, struct wire_msg *m)
{
    struct scan s;
    struct skv_error err;
    size_t used;

    ck_assert(!b->failed);
    scan_init(&s, NULL);
    ck_assert_int_eq(scan_feed(&s, b->p, b->len, &used, &err), SCAN_DONE);
    ck_assert_uint_eq(used, b->len);
    ck_assert_msg(wire_parse(b->p, b->len, m, &err) == 0, "%s", err.msg);
}

START_TEST(request_and_back)
{
    struct wire_buf b;
    struct wire_msg m;
    const struct wire_value *args;
    int64_t i;
    double d;
    bool t;

    wire_buf_init(&b);
    wire_request(&b, 4294967295u, "generate");
    wire_params(&b, 4);
    wire_kv_str(&b, "prompt", "h\xc3\xa9");
    wire_kv_int(&b, "max_tokens", -3);
    wire_kv_double(&b, "temperature", 0.5);
    wire_kv_bool(&b, "stream", false);
    parse(&b, &m);
    ck_assert_int_eq(m.kind, WIRE_REQUEST);
    ck_assert_uint_eq(m.msgid, 4294967295u);
    ck_assert_uint_eq(m.method_len, 8);
    args = wire_at(m.params, 0);
    ck_assert_uint_eq(wire_count(args), 4);
    ck_assert(wire_str_is(wire_find(args, "prompt"), "h\xc3\xa9"));
    ck_assert(wire_get_int(wire_find(args, "max_tokens"), &i) && i == -3);
    ck_assert(wire_get_double(wire_find(args, "temperature"), &d) && d == 0.5);
    ck_assert(wire_get_bool(wire_find(args, "stream"), &t) && !t);
    ck_assert_ptr_null(wire_find(args, "nothing"));
    wire_msg_fini(&m);
    wire_buf_fini(&b);
}
END_TEST

/* An array of any length and kind of numbers is what its elements are one by one. */
START_TEST(many_ints)
{
    static const int32_t edges[] = { 0, 127, 128, 255, 256, 65535, 65536, INT32_MAX, -1, -32, -33, -128, -129, -32768, -32769, INT32_MIN };
    static const int lengths[] = { 0, 1, 15, 16, 817, 818, 819, 820, 821, 65535, 65536, 100000 };
    int32_t *v = malloc(100000 * sizeof *v);
    struct wire_buf many, single;

    ck_assert_ptr_nonnull(v);
    wire_buf_init(&many);
    wire_buf_init(&single);
    for (int i = 0; i < 100000; i++)
        v[i] = i < 2 ? 0 : i < 1000 || i % 5 < 4 ? INT32_MAX - i : edges[i % 16];
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        wire_buf_clear(&many);
        wire_buf_clear(&single);
        wire_ints(&many, v, lengths[k]);
        wire_array(&single, (uint32_t)lengths[k]);
        for (int i = 0; i < lengths[k]; i++)
            wire_int(&single, v[i]);
        ck_assert(!many.failed && !single.failed);
        ck_assert_uint_eq(many.len, single.len);
        ck_assert_mem_eq(many.p, single.p, single.len);
    }
    wire_buf_fini(&many);
    wire_buf_fini(&single);
    free(v);
}
END_TEST

/* What one large message took is not held by a buffer that is used again and again. */
START_TEST(large_once)
{
    static const int32_t ints[1 << 20];
    struct wire_buf b;

    wire_buf_init(&b);
    for (int i = 0; i < 8; i++)
        wire_ints(&b, ints, 1 << 20);
    ck_assert_uint_ge(b.len, 8 << 20);
    wire_buf_clear(&b);
    ck_assert_uint_le(b.cap, 1 << 20);
    wire_ints(&b, ints, 10000);
    wire_buf_clear(&b);
    ck_assert_uint_ge(b.cap, 10000);
    wire_buf_fini(&b);
}
END_TEST

START_TEST(errors_and_notifications)
{
    struct skv_error e = { SKV_OVERLOADED, 250, "busy" };
    struct wire_buf b;
    struct wire_msg m;
    int64_t ms;

    wire_buf_init(&b);
    wire_response_error(&b, 5, &e);
    parse(&b, &m);
    ck_assert_int_eq(m.kind, WIRE_RESPONSE);
    ck_assert(wire_str_is(wire_find(m.error, "code"), "overloaded"));
    ck_assert(wire_get_int(wire_find(m.error, "retry_after_ms"), &ms) && ms == 250);
    wire_msg_fini(&m);

    wire_buf_clear(&b);
    e.code = SKV_TOO_LARGE;
    wire_notify_error(&b, &e);
    parse(&b, &m);
    ck_assert_int_eq(m.kind, WIRE_NOTIFICATION);
    ck_assert_uint_eq(wire_count(wire_at(m.params, 0)), 2);
    ck_assert(wire_str_is(wire_find(wire_at(m.params, 0), "message"), "busy"));
    wire_msg_fini(&m);

    wire_buf_clear(&b);
    wire_response(&b, 1);
    wire_array(&b, 3);
    wire_double(&b, INFINITY);
    wire_double(&b, NAN);
    wire_uint(&b, UINT64_MAX);
    parse(&b, &m);
    ck_assert_int_eq(wire_type(wire_at(m.result, 0)), WIRE_NIL);
    ck_assert_int_eq(wire_type(wire_at(m.result, 1)), WIRE_NIL);
    ck_assert(!wire_get_int(wire_at(m.result, 2), &ms));
    wire_msg_fini(&m);
    wire_buf_fini(&b);
}
END_TEST

START_TEST(bad_shapes)
{
    static const char *const frames[] = {
        "\x94\x03\x01\xa1m\x90", "\x94\x02\x01\xa1m\x90", "\x93\x00\x01\xa1m", "\x94\x00\xff\xa1m\x90",
        "\x94\x00\xa1x\xa1m\x90", "\x94\x00\x01\x05\x90", "\x94\x00\x01\xa1m\x80", "\x94\xa1x\x01\xa1m\x90",
    };

    for (size_t i = 0; i < sizeof frames / sizeof *frames; i++) {
        static const size_t len[] = { 6, 6, 5, 6, 7, 5, 6, 7 };
        struct wire_msg m;
        struct skv_error err;

        ck_assert_int_eq(wire_parse((const uint8_t *)frames[i], i == 2 ? 5 : len[i], &m, &err), -1);
        ck_assert_int_eq(err.code, SKV_BAD_REQUEST);
    }
}
END_TEST

/* One request, its arguments written by a function; decodes into a, 0 or -1. */
static int decode(const char *method, void (*write)(struct wire_buf *b), struct args *a, struct skv_error *err)
{
    struct wire_buf b;
    struct wire_msg m;
    int rc;

    wire_buf_init(&b);
    wire_request(&b, 1, method);
    write(&b);
    parse(&b, &m);
    rc = args_decode(method_find(method, strlen(method)), m.params, a, err);
    wire_msg_fini(&m);
    wire_buf_fini(&b);
    return rc;
}

static void full_generate(struct wire_buf *b)
{
    wire_params(b, 12);
    wire_str(b, "messages");
    wire_array(b, 1);
    wire_map(b, 2);
    wire_kv_str(b, "role", "user");
    wire_kv_strn(b, "content", "a\0b", 3);
    wire_kv_bool(b, "stream", false);
    wire_kv_double(b, "max_tokens", 7.0); /* from a language with one kind of number */
    wire_kv_int(b, "temperature", 0);
    wire_str(b, "seed");
    wire_uint(b, UINT64_MAX);
    wire_str(b, "stop");
    wire_array(b, 2);
    wire_str(b, "\n");
    wire_str(b, "END");
    wire_kv_str(b, "session", "chat-1");
    wire_kv_int(b, "priority", -10);
    wire_kv_int(b, "deadline_ms", 1000);
    wire_str(b, "kv");
    wire_map(b, 3);
    wire_kv_str(b, "policy", "snapkv");
    wire_kv_int(b, "budget", 256);
    wire_kv_str(b, "pool_kind", "max");
    wire_str(b, "pin");
    wire_array(b, 1);
    wire_array(b, 2);
    wire_int(b, 3);
    wire_int(b, 9);
    wire_str(b, "logprobs");
    wire_nil(b);
}

START_TEST(generate_in_full)
{
    struct args a;
    struct skv_error err;

    ck_assert_msg(decode("generate", full_generate, &a, &err) == 0, "%s", err.msg);
    ck_assert_int_eq(a.messages.n, 1);
    ck_assert_uint_eq(a.messages.v[0].content.len, 3);
    ck_assert_mem_eq(a.messages.v[0].content.s, "a\0b", 3);
    ck_assert(!a.stream && !a.raw && !a.progress);
    ck_assert_int_eq(a.max_tokens, 7);
    ck_assert(a.temperature == 0 && a.top_k == 40 && fabsf(a.top_p - 0.95f) < 1e-6f);
    ck_assert(a.seed_set && a.seed == UINT64_MAX);
    ck_assert_int_eq(a.stop.n, 2);
    ck_assert_str_eq(a.stop.v[1].s, "END");
    ck_assert_str_eq(a.session, "chat-1");
    ck_assert_int_eq(a.priority, -10);
    ck_assert_int_eq(a.deadline_ms, 1000);
    ck_assert_str_eq(a.kv.policy, "snapkv");
    ck_assert(a.kv.budget == 256 && a.kv.pool_kind == 1 && a.kv.sink == -1 && a.kv.full_layers == -1);
    ck_assert(a.pin.n == 1 && a.pin.v[0].from == 3 && a.pin.v[0].to == 9);
    ck_assert_int_eq(a.logprobs, 0);
    args_fini(&a);
}
END_TEST

/* One argument beside a prompt. */
static const char *one_name;
static void (*one_value)(struct wire_buf *b);

static void prompt_and_one(struct wire_buf *b)
{
    wire_params(b, 2);
    wire_kv_str(b, "prompt", "x");
    wire_str(b, one_name);
    one_value(b);
}

static void v_minus_one(struct wire_buf *b) { wire_int(b, -1); }
static void v_eleven(struct wire_buf *b) { wire_int(b, 11); }
static void v_two(struct wire_buf *b) { wire_int(b, 2); }
static void v_huge(struct wire_buf *b) { wire_uint(b, UINT64_MAX); }
static void v_half(struct wire_buf *b) { wire_double(b, 0.5); }
static void v_str(struct wire_buf *b) { wire_str(b, "x"); }
static void v_empty(struct wire_buf *b) { wire_str(b, ""); }
static void v_ctrl(struct wire_buf *b) { wire_str(b, "a\nb"); }
static void v_long(struct wire_buf *b) { wire_str(b, "0123456789012345678901234567890123456789012345678901234567890123"); }
static void v_stops17(struct wire_buf *b)
{
    wire_array(b, 17);
    for (int i = 0; i < 17; i++)
        wire_str(b, "s");
}
static void v_empty_stop(struct wire_buf *b)
{
    wire_array(b, 1);
    wire_str(b, "");
}
static void v_even_pool(struct wire_buf *b)
{
    wire_map(b, 1);
    wire_kv_int(b, "pool", 4);
}
static void v_budget15(struct wire_buf *b)
{
    wire_map(b, 1);
    wire_kv_int(b, "budget", 15);
}
static void v_kv_typo(struct wire_buf *b)
{
    wire_map(b, 1);
    wire_kv_int(b, "bugdet", 64);
}
static void v_backward(struct wire_buf *b)
{
    wire_array(b, 1);
    wire_array(b, 2);
    wire_int(b, 5);
    wire_int(b, 5);
}
static void v_nan(struct wire_buf *b)
{
    static const uint8_t nan64[9] = { 0xcb, 0x7f, 0xf8 };

    for (size_t i = 0; i < sizeof nan64; i++) {
        wire_nil(b); /* makes room, the byte is then ours */
        b->p[b->len - 1] = nan64[i];
    }
}

struct bad_arg {
    const char *name;
    void (*value)(struct wire_buf *b);
    const char *says;
};

static const struct bad_arg bad_args[] = {
    { "max_token", v_two, "did you mean 'max_tokens'?" },
    { "temprature", v_two, "did you mean 'temperature'?" },
    { "zzzzzzzz", v_two, "has no argument 'zzzzzzzz'" },
    { "prompt", v_str, "'prompt' twice" },
    { "messages", v_str, "messages is a string, it must be an array" },
    { "tokens", v_half, "tokens is a float, it must be an array" },
    { "max_tokens", v_minus_one, "max_tokens is -1, it must be from 0 to" },
    { "max_tokens", v_half, "max_tokens must be an integer" },
    { "max_tokens", v_huge, "max_tokens must be an integer" },
    { "max_tokens", v_str, "max_tokens is a string" },
    { "temperature", v_minus_one, "temperature is -1, it must be from 0 to 100" },
    { "temperature", v_nan, "temperature is nan" },
    { "top_p", v_two, "top_p is 2" },
    { "seed", v_minus_one, "seed must be an integer from 0" },
    { "priority", v_eleven, "priority is 11, it must be from -10 to 10" },
    { "stream", v_two, "stream is an integer, it must be true or false" },
    { "session", v_empty, "session has 0 bytes" },
    { "session", v_long, "session has 64 bytes" },
    { "session", v_ctrl, "control character" },
    { "stop", v_stops17, "stop has 17 elements" },
    { "stop", v_empty_stop, "stop[0] must be a string of 1 to" },
    { "stop", v_str, "stop is a string, it must be an array of strings" },
    { "kv", v_even_pool, "pool is 4, it must be odd" },
    { "kv", v_budget15, "budget is 15" },
    { "kv", v_kv_typo, "kv has no argument 'bugdet'; did you mean 'budget'?" },
    { "kv", v_two, "kv is an integer, it must be a map" },
    { "pin", v_backward, "pin[0] must be [from, to]" },
    { "deadline_ms", v_minus_one, "deadline_ms is -1" },
};

START_TEST(bad_argument)
{
    const struct bad_arg *t = &bad_args[_i];
    struct args a;
    struct skv_error err;

    one_name = t->name;
    one_value = t->value;
    ck_assert_int_eq(decode("generate", prompt_and_one, &a, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_REQUEST);
    ck_assert_msg(strstr(err.msg, t->says) != NULL, "'%s' does not say '%s'", err.msg, t->says);
    args_fini(&a);
}
END_TEST

static void no_params(struct wire_buf *b) { wire_array(b, 0); }
static void two_maps(struct wire_buf *b)
{
    wire_array(b, 2);
    wire_map(b, 0);
    wire_map(b, 0);
}
static void bad_tokens(struct wire_buf *b)
{
    wire_params(b, 1);
    wire_str(b, "tokens");
    wire_array(b, 3);
    wire_int(b, 1);
    wire_int(b, 2);
    wire_int(b, -1);
}
static void big_tokens(struct wire_buf *b)
{
    wire_params(b, 1);
    wire_str(b, "tokens");
    wire_array(b, 1);
    wire_uint(b, 2147483648u);
}
static void message_typo(struct wire_buf *b)
{
    wire_params(b, 1);
    wire_str(b, "messages");
    wire_array(b, 1);
    wire_map(b, 2);
    wire_kv_str(b, "role", "user");
    wire_kv_str(b, "text", "hi");
}
static void message_short(struct wire_buf *b)
{
    wire_params(b, 1);
    wire_str(b, "messages");
    wire_array(b, 1);
    wire_map(b, 1);
    wire_kv_str(b, "role", "user");
}

struct bad_call {
    const char *method;
    void (*write)(struct wire_buf *b);
    const char *says;
};

static const struct bad_call bad_calls[] = {
    { "generate", no_params, "exactly one of prompt, messages and tokens; none" },
    { "generate", two_maps, "an array with one map" },
    { "generate", bad_tokens, "tokens[2] is -1" },
    { "generate", big_tokens, "tokens[0] is 2147483648" },
    { "generate", message_typo, "messages[0] has the unknown key 'text'" },
    { "apply_template", message_short, "messages[0] has no content" },
    { "score", bad_tokens, "tokens[2] is -1" },
    { "cancel", bad_tokens, "cancel has no argument 'tokens'" },
    { "tokenize", no_params, "tokenize needs the argument 'text'" },
    { "kv", bad_tokens, "kv has no argument 'tokens': it takes none" },
};

START_TEST(bad_call)
{
    const struct bad_call *t = &bad_calls[_i];
    struct args a;
    struct skv_error err;

    ck_assert_int_eq(decode(t->method, t->write, &a, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_REQUEST);
    ck_assert_msg(strstr(err.msg, t->says) != NULL, "'%s' does not say '%s'", err.msg, t->says);
    args_fini(&a);
}
END_TEST

static void score_args(struct wire_buf *b)
{
    static const int32_t cont[] = { 4, 5, 6 };

    wire_params(b, 4);
    wire_str(b, "candidates");
    wire_array(b, 3);
    wire_ints(b, cont, 2);
    wire_array(b, 0);
    wire_ints(b, cont + 1, 2);
    wire_kv_str(b, "prompt", "");
    wire_str(b, "continuation");
    wire_ints(b, cont, 3);
    wire_kv_bool(b, "refeed", true);
}

static void set_args(struct wire_buf *b)
{
    wire_params(b, 4);
    wire_kv_int(b, "max-connections", 12);
    wire_kv_bool(b, "sandbox", true);
    wire_kv_double(b, "x", 0.25);
    wire_kv_str(b, "log-level", "debug");
}

START_TEST(other_methods)
{
    struct args a;
    struct skv_error err;

    ck_assert_msg(decode("score", score_args, &a, &err) == 0, "%s", err.msg);
    ck_assert(a.prompt.s != NULL && a.prompt.len == 0 && a.cont_tokens.n == 3 && a.cont_tokens.v[2] == 6 && a.refeed);
    ck_assert(a.candidates.n == 3 && a.candidates.from[1] == 2 && a.candidates.from[2] == 2 && a.candidates.from[3] == 4);
    ck_assert(a.candidates.v[0] == 4 && a.candidates.v[3] == 6);
    args_fini(&a);
    ck_assert_msg(decode("set", set_args, &a, &err) == 0, "%s", err.msg);
    ck_assert_int_eq(a.n_settings, 4);
    ck_assert_str_eq(a.settings[0].value, "12");
    ck_assert_str_eq(a.settings[1].value, "on");
    ck_assert_str_eq(a.settings[2].value, "0.25");
    ck_assert_str_eq(a.settings[3].value, "debug");
    args_fini(&a);
    ck_assert_int_eq(decode("shutdown", no_params, &a, &err), 0);
    ck_assert_int_eq(a.grace_ms, -1);
    args_fini(&a);
    ck_assert_ptr_null(method_find("Hello", 5));
    ck_assert_ptr_null(method_find("hell", 4));
}
END_TEST

int main(void)
{
    Suite *su = suite_create("proto");
    TCase *tc = tcase_create("proto");
    SRunner *sr = srunner_create(su);
    int failed;

    tcase_add_test(tc, request_and_back);
    tcase_add_test(tc, many_ints);
    tcase_add_test(tc, large_once);
    tcase_add_test(tc, errors_and_notifications);
    tcase_add_test(tc, bad_shapes);
    tcase_add_test(tc, generate_in_full);
    tcase_add_loop_test(tc, bad_argument, 0, (int)(sizeof bad_args / sizeof *bad_args));
    tcase_add_loop_test(tc, bad_call, 0, (int)(sizeof bad_calls / sizeof *bad_calls));
    tcase_add_test(tc, other_methods);
    suite_add_tcase(su, tc);
    srunner_run_all(sr, CK_NORMAL);
    failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed == 0 ? 0 : 1;
}
