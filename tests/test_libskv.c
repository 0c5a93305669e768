/* libskv against the other end of a socketpair, played by hand. */
#include "config.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clients/libskv/skv.h"
#include "protocol/scan.h"
#include "protocol/wire.h"

static struct skv *c;
static int peer;

static void setup(void)
{
    int sv[2];
    struct skv_error err;

    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
    c = skv_attach(sv[0], &err);
    ck_assert_ptr_nonnull(c);
    peer = sv[1];
}

static void teardown(void)
{
    skv_close(c);
    if (peer >= 0)
        close(peer);
}

/* ---- the daemon's side ---- */

static uint8_t inbox[8 << 20];
static size_t inbox_len;

/* Read one request from the client; the message refers to inbox. */
static void get_request(struct wire_msg *m)
{
    struct scan s;
    struct skv_error err;
    size_t used = 0;
    enum scan_status r;

    scan_init(&s, NULL);
    inbox_len = 0;
    do { /* a byte at a time: what follows belongs to the next */
        ck_assert_int_eq(recv(peer, inbox + inbox_len, 1, MSG_DONTWAIT), 1);
        r = scan_feed(&s, inbox + inbox_len, 1, &used, &err);
        ck_assert_int_ne(r, SCAN_FAIL);
        inbox_len++;
    } while (r == SCAN_MORE);
    ck_assert_int_eq(wire_parse(inbox, inbox_len, m, &err), 0);
    ck_assert_int_eq(m->kind, WIRE_REQUEST);
}

static void put(const void *p, size_t n)
{
    ck_assert_int_eq(send(peer, p, n, MSG_NOSIGNAL), (ssize_t)n);
}

static void put_buf(struct wire_buf *b)
{
    ck_assert(!b->failed);
    put(b->p, b->len);
    wire_buf_fini(b);
}

static void put_result_int(uint32_t id, int64_t v)
{
    struct wire_buf b;
    wire_buf_init(&b);
    wire_response(&b, id);
    wire_int(&b, v);
    put_buf(&b);
}

static void put_token(struct wire_buf *b, uint32_t id, const char *text)
{
    wire_notify(b, "token");
    wire_array(b, 2);
    wire_uint(b, id);
    wire_map(b, 1);
    wire_kv_str(b, "text", text);
}

/* ---- the program's side ---- */

/* Requests that are still open are ended by teardown, when the frame of the test is gone: so these are static. */
struct heard {
    int notes, dones;
    int64_t value;
    enum skv_code code;
    int retry_after_ms;
    char text[64], msg[SKV_ERROR_MSG], partial[64];
    bool probe_blocking;
    int blocking_rc;
};

static void on_note(struct skv *cc, int64_t id, const char *method, const struct skv_value *v, void *arg)
{
    struct heard *h = arg;
    size_t len;
    const char *s = skv_str(skv_get(v, "text"), &len);
    struct skv_error err;

    (void)id;
    ck_assert_str_eq(method, "token");
    strncat(h->text, s, len);
    h->notes++;
    if (h->probe_blocking)
        h->blocking_rc = skv_call(cc, "status", NULL, NULL, &err);
}

static void on_done(struct skv *cc, int64_t id, struct skv_reply *take_reply, void *arg)
{
    struct heard *h = arg;
    const struct skv_error *e = skv_reply_error(take_reply);
    size_t len;
    const char *s = skv_str(skv_get(skv_get(skv_reply_detail(take_reply), "result"), "text"), &len);

    (void)cc;
    (void)id;
    h->dones++;
    h->value = skv_int(skv_reply_value(take_reply), -1);
    if (e != NULL) {
        h->code = e->code;
        h->retry_after_ms = e->retry_after_ms;
        strcpy(h->msg, e->msg);
        memcpy(h->partial, s, len);
    }
    skv_reply_free(take_reply);
}

static const struct skv_handler handler = { on_note, on_done };

static int64_t start(const char *method, struct skv_args *a, struct heard *h)
{
    struct skv_error err;
    int64_t id = skv_start(c, method, a, &handler, h, &err);
    ck_assert_msg(id >= 0, "%s", id < 0 ? err.msg : "");
    return id;
}

/* ---- arguments ---- */

START_TEST(args_arrive_as_put)
{
    static const int32_t tokens[] = { 1, 70000, -1 };
    struct skv_args *a = skv_args_new();
    static struct heard h;
    struct wire_msg m;
    const struct wire_value *map, *v;
    int64_t i, id;
    double d;
    bool b;

    skv_arg_str(a, "prompt", "Gr\xc3\xbc\xc3\x9f""e");
    skv_arg_int(a, "max_tokens", 5);
    skv_arg_num(a, "temperature", 0.5);
    skv_arg_bool(a, "stream", false);
    skv_arg_nil(a, "nothing");
    skv_arg_tokens(a, "tokens", tokens, 3);
    skv_arg_map(a, "kv");
    skv_arg_str(a, "policy", "full");
    skv_arg_end(a);
    skv_arg_array(a, "pin");
    skv_arg_array(a, NULL);
    skv_arg_int(a, NULL, 3);
    skv_arg_int(a, NULL, 9);
    skv_arg_end(a);
    skv_arg_end(a);
    id = start("generate", a, &h);
    get_request(&m);
    ck_assert_uint_eq(m.msgid, (uint32_t)id);
    ck_assert_uint_eq(wire_count(m.params), 1);
    map = wire_at(m.params, 0);
    ck_assert_uint_eq(wire_count(map), 8);
    ck_assert(wire_str_is(wire_find(map, "prompt"), "Gr\xc3\xbc\xc3\x9f""e"));
    ck_assert(wire_get_int(wire_find(map, "max_tokens"), &i) && i == 5);
    ck_assert(wire_get_double(wire_find(map, "temperature"), &d) && d == 0.5);
    ck_assert(wire_get_bool(wire_find(map, "stream"), &b) && !b);
    ck_assert_int_eq(wire_type(wire_find(map, "nothing")), WIRE_NIL);
    v = wire_find(map, "tokens");
    ck_assert_uint_eq(wire_count(v), 3);
    ck_assert(wire_get_int(wire_at(v, 1), &i) && i == 70000);
    ck_assert(wire_get_int(wire_at(v, 2), &i) && i == -1);
    ck_assert(wire_str_is(wire_find(wire_find(map, "kv"), "policy"), "full"));
    v = wire_at(wire_find(map, "pin"), 0);
    ck_assert(wire_get_int(wire_at(v, 1), &i) && i == 9);
    wire_msg_fini(&m);
}
END_TEST

START_TEST(no_args_is_an_empty_array)
{
    static struct heard h;
    struct wire_msg m;

    start("status", NULL, &h);
    get_request(&m);
    ck_assert_uint_eq(wire_count(m.params), 0);
    wire_msg_fini(&m);
}
END_TEST

static void unclosed(struct skv_args *a)
{
    skv_arg_array(a, "x");
}
static void bad_utf8(struct skv_args *a)
{
    skv_arg_str(a, "x", "\xc0\xaf");
}
static void no_name(struct skv_args *a)
{
    skv_arg_int(a, NULL, 1);
}
static void name_in_array(struct skv_args *a)
{
    skv_arg_array(a, "x");
    skv_arg_int(a, "y", 1);
    skv_arg_end(a);
}
static void end_of_nothing(struct skv_args *a)
{
    skv_arg_end(a);
}
static void too_deep(struct skv_args *a)
{
    skv_arg_array(a, "x");
    for (int i = 0; i < 40; i++)
        skv_arg_array(a, NULL);
}
static void (*const mistakes[])(struct skv_args *) = { unclosed, bad_utf8, no_name, name_in_array, end_of_nothing, too_deep };

START_TEST(mistakes_in_args_come_out_of_the_call)
{
    struct skv_args *a = skv_args_new();
    struct skv_error err = { 0 };
    char byte;

    mistakes[_i](a);
    skv_arg_int(a, "later", 1); /* ignored */
    ck_assert_int_eq(skv_start(c, "generate", a, &handler, NULL, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_REQUEST);
    ck_assert_uint_gt(strlen(err.msg), 0);
    ck_assert_int_eq(recv(peer, &byte, 1, MSG_DONTWAIT), -1); /* and nothing was sent */
    ck_assert_uint_eq(skv_in_flight(c), 0);
}
END_TEST

START_TEST(a_large_request_waits_for_room)
{
    size_t n = 4 << 20, got = 0;
    char *text = malloc(n + 1);
    struct skv_args *a = skv_args_new();
    static struct heard h;
    struct skv_error err;
    ssize_t r;

    memset(text, 'x', n);
    text[n] = '\0';
    skv_arg_str(a, "prompt", text);
    start("generate", a, &h);
    ck_assert(skv_want_write(c));
    while (got < n + 20) {
        r = recv(peer, inbox, sizeof inbox, MSG_DONTWAIT);
        if (r > 0)
            got += (size_t)r;
        if (!skv_want_write(c) && r < 0)
            break;
        ck_assert_int_eq(skv_dispatch(c, &err), 0);
    }
    ck_assert_uint_gt(got, n + 20);
    ck_assert(!skv_want_write(c));
    free(text);
}
END_TEST

/* ---- answers ---- */

START_TEST(answers_in_any_order_reach_their_request)
{
    static struct heard h[3];
    struct skv_error err;
    int64_t id[3];

    for (int i = 0; i < 3; i++)
        id[i] = start("generate", NULL, &h[i]);
    ck_assert_uint_eq(skv_in_flight(c), 3);
    put_result_int((uint32_t)id[2], 12);
    put_result_int((uint32_t)id[0], 10);
    put_result_int(99999, 0); /* nobody's */
    ck_assert_int_eq(skv_dispatch(c, &err), 0);
    ck_assert_int_eq(h[0].value, 10);
    ck_assert_int_eq(h[2].value, 12);
    ck_assert_int_eq(h[1].dones, 0);
    put_result_int((uint32_t)id[1], 11);
    ck_assert_int_eq(skv_dispatch(c, &err), 0);
    ck_assert_int_eq(h[1].value, 11);
    ck_assert_uint_eq(skv_in_flight(c), 0);
}
END_TEST

START_TEST(tokens_reach_their_request_however_the_bytes_come)
{
    static struct heard a, b;
    struct skv_error err;
    int64_t ia = start("generate", NULL, &a), ib = start("generate", NULL, &b);
    struct wire_buf w;

    wire_buf_init(&w);
    put_token(&w, (uint32_t)ia, "x");
    put_token(&w, (uint32_t)ib, "y");
    put_token(&w, 12345, "stranger");
    put_token(&w, (uint32_t)ia, "z");
    for (size_t i = 0; i < w.len; i++) {
        put(w.p + i, 1);
        ck_assert_int_eq(skv_dispatch(c, &err), 0);
    }
    wire_buf_fini(&w);
    ck_assert_str_eq(a.text, "xz");
    ck_assert_str_eq(b.text, "y");
    put_result_int((uint32_t)ia, 1);
    ck_assert_int_eq(skv_dispatch(c, &err), 0);
    ck_assert_int_eq(a.dones, 1);
    ck_assert_int_eq(b.dones, 0);
}
END_TEST

START_TEST(an_error_keeps_its_fields)
{
    static const struct skv_error full = { SKV_OVERLOADED, 250, "the queue is full" };
    static const struct skv_error cancelled = { SKV_CANCELLED, 0, "as asked" };
    static struct heard h, k;
    struct skv_error err;
    struct wire_buf w;

    wire_buf_init(&w);
    wire_response_error(&w, (uint32_t)start("generate", NULL, &h), &full);
    wire_response_error_more(&w, (uint32_t)start("generate", NULL, &k), &cancelled, 1);
    wire_str(&w, "result");
    wire_map(&w, 1);
    wire_kv_str(&w, "text", "until here");
    wire_nil(&w);
    put_buf(&w);
    ck_assert_int_eq(skv_dispatch(c, &err), 0);
    ck_assert_int_eq(h.code, SKV_OVERLOADED);
    ck_assert_int_eq(h.retry_after_ms, 250);
    ck_assert_str_eq(h.msg, "the queue is full");
    ck_assert_int_eq(k.code, SKV_CANCELLED);
    ck_assert_str_eq(k.partial, "until here");
}
END_TEST

START_TEST(values_are_read_safely)
{
    ck_assert_int_eq(skv_type(NULL), SKV_NIL);
    ck_assert_int_eq(skv_int(skv_get(skv_get(NULL, "a"), "b"), 7), 7);
    ck_assert_uint_eq(skv_len(NULL), 0);
    ck_assert_ptr_null(skv_at(NULL, 0));
    ck_assert_ptr_null(skv_key(NULL, 3));
    ck_assert_str_eq(skv_str(NULL, NULL), "");
    ck_assert(!skv_str_is(NULL, ""));
    ck_assert(skv_bool(NULL, true));
    ck_assert_ptr_null(skv_reply_error(NULL));
    ck_assert_ptr_null(skv_reply_value(NULL));
    skv_reply_free(NULL);
    skv_close(NULL);
    skv_args_free(NULL);
}
END_TEST

/* ---- ends ---- */

START_TEST(a_hang_up_ends_every_request)
{
    static struct heard a, b;
    struct skv_error err;

    start("generate", NULL, &a);
    start("generate", NULL, &b);
    close(peer);
    peer = -1;
    ck_assert_int_eq(skv_dispatch(c, &err), -1);
    ck_assert_int_eq(err.code, SKV_IO);
    ck_assert_int_eq(a.code, SKV_IO);
    ck_assert_int_eq(b.dones, 1);
    ck_assert(!skv_want_read(c));
    ck_assert(!skv_want_write(c));
    ck_assert_int_eq(skv_start(c, "status", NULL, NULL, NULL, &err), -1);
    ck_assert_int_eq(skv_dispatch(c, &err), -1);
}
END_TEST

START_TEST(the_daemons_last_words_are_the_reason)
{
    static const struct skv_error why = { SKV_TOO_LARGE, 0, "a frame of 20 MiB; 16 MiB is the limit" };
    static struct heard h;
    struct skv_error err;
    struct wire_buf w;

    start("generate", NULL, &h);
    wire_buf_init(&w);
    wire_notify_error(&w, &why);
    put_buf(&w);
    close(peer);
    peer = -1;
    ck_assert_int_eq(skv_dispatch(c, &err), -1);
    ck_assert_str_eq(h.msg, why.msg);
}
END_TEST

START_TEST(closing_ends_what_is_open)
{
    static struct heard h;

    start("generate", NULL, &h);
    skv_close(c);
    c = NULL;
    ck_assert_int_eq(h.dones, 1);
    ck_assert_int_eq(h.code, SKV_CANCELLED);
}
END_TEST

/* What a hostile or broken daemon may send: bytes and their number. */
static const struct {
    const char *bytes;
    size_t n;
} bad[] = {
    { "\xdd\xff\xff\xff\xff", 5 },                                 /* 4 Gi elements declared */
    { "\x94\x01\x01\xc0\xdb\xff\xff\xff\xff", 9 },                 /* a string of 4 GiB */
    { "\x94\x01\x01\xc0\xdf\x7f\xff\xff\xff", 9 },                 /* a map of 2 Gi pairs */
    { "\xc1", 1 },                                                 /* no MessagePack */
    { "HTTP/1.1 400 Bad Request\r\n\r\n", 28 },                    /* another protocol */
    { "\x94\x00\x01\xa6status\x90", 11 },                          /* a request */
    { "\x93\x01\x02\x03", 4 },                                     /* a response of three elements */
    { "\x94\x01\xa1x\xc0\xc0", 6 },                                /* a msgid that is no number */
    { "\x94\x01\x01\xc0\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91"
      "\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91", 39 },            /* nested too deep */
};

START_TEST(bad_bytes_end_the_connection)
{
    static struct heard h;
    struct skv_error err = { 0 };

    start("generate", NULL, &h);
    put(bad[_i].bytes, bad[_i].n);
    ck_assert_int_eq(skv_dispatch(c, &err), -1);
    ck_assert_int_eq(err.code, SKV_IO);
    ck_assert_int_eq(h.dones, 1);
    ck_assert_int_eq(h.code, SKV_IO);
}
END_TEST

START_TEST(a_frame_above_the_limit_is_refused_when_declared)
{
    static struct heard h;
    struct skv_error err;

    skv_set_frame_limit(c, 1000);
    start("generate", NULL, &h);
    put("\x94\x01\x01\xc0\xda\x04\x00", 7); /* a string of 1024 bytes, not one of which has come */
    ck_assert_int_eq(skv_dispatch(c, &err), -1);
    ck_assert_int_eq(h.dones, 1);
}
END_TEST

/* ---- blocking use ---- */

static void *answer_two(void *arg)
{
    struct wire_buf w;
    struct wire_msg m;
    struct timespec t = { 0, 30 * 1000 * 1000 };

    (void)arg;
    nanosleep(&t, NULL);
    get_request(&m);
    wire_buf_init(&w);
    put_token(&w, m.msgid, "one ");
    put_token(&w, m.msgid, "two");
    wire_response(&w, m.msgid);
    wire_int(&w, 42);
    put_buf(&w);
    wire_msg_fini(&m);
    return NULL;
}

static bool collect(const char *s, size_t len, void *arg)
{
    strncat(arg, s, len);
    return true;
}

START_TEST(a_blocking_generate)
{
    char text[32] = "";
    struct skv_reply *r = NULL;
    struct skv_error err;
    pthread_t t;

    pthread_create(&t, NULL, answer_two, NULL);
    ck_assert_int_eq(skv_generate(c, skv_args_new(), collect, text, &r, &err), 0);
    pthread_join(t, NULL);
    ck_assert_str_eq(text, "one two");
    ck_assert_int_eq(skv_int(skv_reply_value(r), 0), 42);
    ck_assert_ptr_null(skv_reply_error(r));
    skv_reply_free(r);
}
END_TEST

START_TEST(a_silent_daemon_is_given_up)
{
    struct skv_reply *r = NULL;
    struct skv_error err;

    skv_set_timeout(c, 20);
    ck_assert_int_eq(skv_call(c, "status", NULL, &r, &err), -1);
    ck_assert_int_eq(err.code, SKV_IO);
    ck_assert_ptr_null(r);
    put_result_int(1, 5); /* late: nobody's any more */
    ck_assert_int_eq(skv_dispatch(c, &err), 0);
    ck_assert_uint_eq(skv_in_flight(c), 0);
}
END_TEST

START_TEST(callbacks_may_not_block)
{
    static struct heard h = { .probe_blocking = true };
    struct skv_error err;
    struct wire_buf w;

    wire_buf_init(&w);
    put_token(&w, (uint32_t)start("generate", NULL, &h), "x");
    put_buf(&w);
    ck_assert_int_eq(skv_dispatch(c, &err), 0);
    ck_assert_int_eq(h.notes, 1);
    ck_assert_int_eq(h.blocking_rc, -1);
}
END_TEST

START_TEST(nobody_there)
{
    struct skv_error err;
    char path[200], longpath[300];

    ck_assert_ptr_null(skv_connect("/nonexistent/skvd.sock", &err));
    ck_assert_int_eq(err.code, SKV_NO_DAEMON);
    ck_assert_ptr_nonnull(strstr(err.msg, "/nonexistent/skvd.sock"));
    memset(longpath, 'x', sizeof longpath - 1);
    longpath[sizeof longpath - 1] = '\0';
    ck_assert_ptr_null(skv_connect(longpath, &err));
    ck_assert_int_eq(err.code, SKV_NO_DAEMON);
    setenv("SKVD_SOCKET", "/some/where", 1);
    ck_assert_int_eq(skv_default_path(path, sizeof path), 0);
    ck_assert_str_eq(path, "/some/where");
    ck_assert_int_eq(skv_default_path(path, 5), -1);
    unsetenv("SKVD_SOCKET");
}
END_TEST

int main(void)
{
    Suite *s = suite_create("libskv");
    TCase *t = tcase_create("libskv");
    SRunner *r;
    int failed;

    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, args_arrive_as_put);
    tcase_add_test(t, no_args_is_an_empty_array);
    tcase_add_loop_test(t, mistakes_in_args_come_out_of_the_call, 0, (int)(sizeof mistakes / sizeof mistakes[0]));
    tcase_add_test(t, a_large_request_waits_for_room);
    tcase_add_test(t, answers_in_any_order_reach_their_request);
    tcase_add_test(t, tokens_reach_their_request_however_the_bytes_come);
    tcase_add_test(t, an_error_keeps_its_fields);
    tcase_add_test(t, values_are_read_safely);
    tcase_add_test(t, a_hang_up_ends_every_request);
    tcase_add_test(t, the_daemons_last_words_are_the_reason);
    tcase_add_test(t, closing_ends_what_is_open);
    tcase_add_loop_test(t, bad_bytes_end_the_connection, 0, (int)(sizeof bad / sizeof bad[0]));
    tcase_add_test(t, a_frame_above_the_limit_is_refused_when_declared);
    tcase_add_test(t, a_blocking_generate);
    tcase_add_test(t, a_silent_daemon_is_given_up);
    tcase_add_test(t, callbacks_may_not_block);
    tcase_add_test(t, nobody_there);
    suite_add_tcase(s, t);
    r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
