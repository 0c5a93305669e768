/* test_gguf: good files are read right, bad ones refused with a clear word, in little time and memory. */
#include "config.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/gguf.h"
#include "kernels/blocks.h"
#include "tests/gguf_bad.h"
#include "tests/tsv.h"

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static struct gguf *open_good(unsigned char **bytes, uint32_t version)
{
    struct gb b;
    struct skv_error err = { 0 };
    size_t len;
    gb_init(&b);
    b.version = version;
    gguf_good(&b);
    *bytes = gb_finish(&b, &len);
    gb_free(&b);
    struct gguf *g = gguf_open_mem(*bytes, len, "good", &err);
    ck_assert_msg(g != NULL, "%s", err.msg);
    return g;
}

START_TEST(reads_values)
{
    unsigned char *bytes;
    struct gguf *g = open_good(&bytes, _i == 0 ? 2 : 3);
    static const char *const ints[] = { "t.u8", "t.i8", "t.u16", "t.i16", "t.u32", "t.i32", "t.u64", "t.i64" };
    struct gguf_str s;
    struct gguf_arr a;
    uint32_t u;
    float f;
    bool yes;
    for (size_t i = 0; i < sizeof(ints) / sizeof(ints[0]); i++) {
        ck_assert_int_eq(gguf_get_u32(g, ints[i], &u, NULL), 1);
        ck_assert_uint_eq(u, 7);
    }
    ck_assert_int_eq(gguf_get_f32(g, "t.f32", &f, NULL), 1);
    ck_assert(f == 1.5f);
    ck_assert_int_eq(gguf_get_f32(g, "t.f64", &f, NULL), 1);
    ck_assert(f == 0.5f);
    ck_assert_int_eq(gguf_get_bool(g, "t.bool", &yes, NULL), 1);
    ck_assert(yes);
    ck_assert_int_eq(gguf_get_str(g, "general.architecture", &s, NULL), 1);
    ck_assert(s.len == 5 && !memcmp(s.s, "llama", 5));
    ck_assert_int_eq(gguf_get_arr(g, "t.strings", GGUF_T_STR, &a, NULL), 1);
    ck_assert(a.n == 2 && a.str[0].len == 3 && !memcmp(a.str[0].s, "one", 3) && a.str[1].len == 0);
    ck_assert_int_eq(gguf_get_arr(g, "t.floats", GGUF_T_F32, &a, NULL), 1);
    ck_assert(a.n == 2 && gguf_arr_f32(&a, 0) == 1 && gguf_arr_f32(&a, 1) == -2);
    ck_assert_int_eq(gguf_get_arr(g, "t.ints", GGUF_T_I32, &a, NULL), 1);
    ck_assert(a.n == 2 && gguf_arr_i32(&a, 0) == 3 && gguf_arr_i32(&a, 1) == -4);
    ck_assert_int_eq(gguf_get_u32(g, "t.none", &u, NULL), 0);
    gguf_close(g);
    free(bytes);
}
END_TEST

START_TEST(names_wrong_types)
{
    unsigned char *bytes;
    struct gguf *g = open_good(&bytes, 3);
    struct skv_error err = { 0 };
    struct gguf_arr a;
    struct gguf_str s;
    uint32_t u;
    float f;
    bool yes;
    ck_assert_int_eq(gguf_get_u32(g, "t.f32", &u, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.msg, "key t.f32 is of type f32, not an integer"));
    ck_assert_int_eq(err.code, SKV_BAD_MODEL);
    ck_assert_int_eq(gguf_get_u32(g, "t.ints", &u, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.msg, "an array of i32"));
    ck_assert_int_eq(gguf_get_f32(g, "t.u32", &f, &err), -1);
    ck_assert_int_eq(gguf_get_bool(g, "t.u8", &yes, &err), -1);
    ck_assert_int_eq(gguf_get_str(g, "t.u32", &s, &err), -1);
    ck_assert_int_eq(gguf_get_str(g, "t.strings", &s, &err), -1);
    ck_assert_int_eq(gguf_get_arr(g, "t.strings", GGUF_T_F32, &a, &err), -1);
    ck_assert_int_eq(gguf_get_arr(g, "t.u32", GGUF_T_STR, &a, &err), -1);
    gguf_close(g);
    free(bytes);
}
END_TEST

START_TEST(values_out_of_range)
{
    struct gb b;
    struct skv_error err = { 0 };
    size_t len;
    uint32_t u;
    float f, inf = 1.0f / 0.0f;
    struct gguf_str s;
    gb_init(&b);
    gb_key(&b, "negative", GB_I32);
    gb_u32(&b.kv, UINT32_MAX);
    gb_key(&b, "large", GB_U64);
    gb_u64(&b.kv, UINT64_C(1) << 32);
    gb_key(&b, "huge", GB_U64);
    gb_u64(&b.kv, UINT64_MAX);
    gb_kv_f32(&b, "infinite", inf);
    gb_key(&b, "nul", GB_STR);
    gb_str(&b.kv, "a\0b", 3);
    gb_key(&b, "bytes", GB_STR);
    gb_str(&b.kv, "a\xe2\x82", 3);
    unsigned char *bytes = gb_finish(&b, &len);
    struct gguf *g = gguf_open_mem(bytes, len, "range", &err);
    ck_assert_msg(g != NULL, "%s", err.msg);
    ck_assert_int_eq(gguf_get_u32(g, "negative", &u, &err), -1);
    ck_assert_int_eq(gguf_get_u32(g, "large", &u, &err), -1);
    ck_assert_int_eq(gguf_get_u32(g, "huge", &u, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.msg, "huge"));
    ck_assert_int_eq(gguf_get_f32(g, "infinite", &f, &err), -1);
    ck_assert_int_eq(gguf_get_str(g, "nul", &s, &err), -1);
    ck_assert_int_eq(gguf_get_str(g, "bytes", &s, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.msg, "not UTF-8 at byte 1"));
    gguf_close(g);
    gb_free(&b);
    free(bytes);
}
END_TEST

START_TEST(reads_tensors)
{
    unsigned char *bytes;
    struct gguf *g = open_good(&bytes, 3);
    struct kern_tensor t;
    ck_assert_int_eq(gguf_n_tensors(g), 2);
    ck_assert_str_eq(gguf_tensor_name(g, 0), "a.weight");
    ck_assert_ptr_null(gguf_tensor_name(g, 2));
    ck_assert_int_eq(gguf_tensor(g, "a.weight", &t), 1);
    ck_assert(t.type == KERN_Q8_0 && t.rows == 2 && t.cols == 64);
    ck_assert_int_eq(((const unsigned char *)t.data)[5], 5);
    ck_assert_int_eq(((const unsigned char *)t.data - bytes) % 32, 0);
    ck_assert_int_eq(gguf_tensor(g, "b.weight", &t), 1);
    ck_assert(t.type == KERN_F32 && t.rows == 1 && t.cols == 64);
    ck_assert_int_eq(*(const unsigned char *)t.data, 160);
    ck_assert_int_eq(gguf_tensor(g, "c.weight", &t), 0);
    gguf_close(g);
    free(bytes);
}
END_TEST

/* Refused with SKV_BAD_MODEL and `says` in the message, within 50 ms of CPU. */
static void refuse(const unsigned char *p, size_t len, const char *name, const char *says)
{
    struct skv_error err = { 0 };
    double from = cpu_ms();
    struct gguf *g = gguf_open_mem(p, len, name, &err);
    double took = cpu_ms() - from;
    ck_assert_msg(g == NULL, "%s: taken for good", name);
    ck_assert_msg(err.code == SKV_BAD_MODEL, "%s: code %d, %s", name, (int)err.code, err.msg);
    ck_assert_msg(!says || strstr(err.msg, says), "%s: says '%s', not '%s'", name, err.msg, says);
    ck_assert_msg(!strncmp(err.msg, name, strlen(name)), "%s: not named in '%s'", name, err.msg);
    ck_assert_msg(took < 50, "%s: took %.1f ms", name, took);
}

START_TEST(refuses)
{
    struct gb b;
    size_t len;
    gb_init(&b);
    gguf_bad[_i].make(&b);
    unsigned char *p = gb_finish(&b, &len);
    refuse(p, len, gguf_bad[_i].name, gguf_bad[_i].says);
    free(p);
    gb_free(&b);
}
END_TEST

START_TEST(refuses_every_cut)
{
    struct gb b;
    size_t len;
    gb_init(&b);
    gguf_good(&b);
    unsigned char *p = gb_finish(&b, &len);
    for (size_t n = 0; n < len; n++) {
        unsigned char *q = malloc(n ? n : 1);
        ck_assert_ptr_nonnull(q);
        memcpy(q, p, n);
        refuse(q, n, "cut", n == 0 ? "empty" : n < 4 ? "too short" : NULL);
        free(q);
    }
    free(p);
    gb_free(&b);
}
END_TEST

/* Whatever a flipped byte does, it does not crash and what is opened can be walked. */
START_TEST(survives_flips)
{
    struct gb b;
    size_t len;
    uint32_t seed = 1;
    gb_init(&b);
    gguf_good(&b);
    unsigned char *p = gb_finish(&b, &len);
    for (int round = 0; round < 20000; round++) {
        unsigned char *q = malloc(len);
        ck_assert_ptr_nonnull(q);
        memcpy(q, p, len);
        for (int k = 0; k < 1 + round % 3; k++) {
            seed = seed * 1664525u + 1013904223u;
            q[(seed >> 8) % (len - 416)] = (unsigned char)(seed >> 24);
        }
        struct gguf *g = gguf_open_mem(q, len, "flip", NULL);
        for (int i = 0; g && i < gguf_n_tensors(g); i++) {
            struct kern_tensor t;
            ck_assert_int_eq(gguf_tensor(g, gguf_tensor_name(g, i), &t), 1);
            size_t bytes = kern_row_bytes(t.type, t.cols) * (size_t)t.rows;
            ck_assert_uint_gt(bytes, 0);
            ck_assert((const unsigned char *)t.data >= q && (const unsigned char *)t.data + bytes <= q + len);
        }
        gguf_close(g);
        free(q);
    }
    free(p);
    gb_free(&b);
}
END_TEST

/* A million short keys that are all the same: found without comparing each with each, and in bounded memory. */
START_TEST(many_duplicates)
{
    struct gb b;
    struct skv_error err = { 0 };
    size_t len;
    gb_init(&b);
    for (int i = 0; i < 200000; i++)
        gb_kv_u32(&b, "k", 1);
    unsigned char *p = gb_finish(&b, &len);
    double from = cpu_ms();
    ck_assert_ptr_null(gguf_open_mem(p, len, "many", &err));
    double took = cpu_ms() - from;
    ck_assert_ptr_nonnull(strstr(err.msg, "appears twice"));
    ck_assert_msg(took < 1000, "took %.0f ms", took);
    free(p);
    gb_free(&b);
}
END_TEST

START_TEST(opens_files)
{
    char dir[] = "/tmp/skvd-gguf-XXXXXX", path[64];
    struct skv_error err = { 0 };
    struct gb b;
    size_t len;
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/f", dir);
    ck_assert_ptr_null(gguf_open(path, &err));
    ck_assert_ptr_nonnull(strstr(err.msg, "No such file"));
    ck_assert_ptr_null(gguf_open(dir, &err));
    ck_assert_ptr_nonnull(strstr(err.msg, "not a regular file"));
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    ck_assert_ptr_null(gguf_open(path, &err)); /* does not wait for a writer */
    unlink(path);
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    fclose(f);
    ck_assert_ptr_null(gguf_open(path, &err));
    ck_assert_ptr_nonnull(strstr(err.msg, "empty"));

    gb_init(&b);
    gguf_good(&b);
    unsigned char *p = gb_finish(&b, &len);
    f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(p, 1, len, f), len);
    fclose(f);
    struct gguf *g = gguf_open(path, &err);
    ck_assert_msg(g != NULL, "%s", err.msg);
    ck_assert_uint_eq(gguf_size(g), len);
    gguf_dontneed(g);
    ck_assert_int_eq(memcmp(gguf_base(g), p, len), 0);
    gguf_close(g);
    gguf_close(NULL);
    unlink(path);
    rmdir(dir);
    free(p);
    gb_free(&b);
}
END_TEST

START_TEST(opens_the_model)
{
    const char *path = tsv_model_path();
    struct skv_error err = { 0 };
    struct kern_tensor t;
    if (!path)
        return;
    double from = cpu_ms();
    struct gguf *g = gguf_open(path, &err);
    double took = cpu_ms() - from;
    ck_assert_msg(g != NULL, "%s", err.msg);
    ck_assert_int_eq(gguf_n_tensors(g), 272);
    ck_assert_int_eq(gguf_tensor(g, "token_embd.weight", &t), 1);
    ck_assert(t.type == KERN_Q8_0 && t.rows == 49152 && t.cols == 576);
    ck_assert_msg(took < 200, "took %.0f ms", took);
    gguf_close(g);
}
END_TEST

/* All of the bad files together stay small. */
START_TEST(little_memory)
{
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    for (int i = 0; i < gguf_bad_n; i++) {
        struct gb b;
        size_t len;
        gb_init(&b);
        gguf_bad[i].make(&b);
        unsigned char *p = gb_finish(&b, &len);
        gguf_close(gguf_open_mem(p, len, "bad", NULL));
        free(p);
        gb_free(&b);
    }
    getrusage(RUSAGE_SELF, &after);
    ck_assert_int_lt(after.ru_maxrss - before.ru_maxrss, 64 * 1024);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("gguf");
    TCase *t = tcase_create("gguf");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, reads_values, 0, 2);
    tcase_add_test(t, names_wrong_types);
    tcase_add_test(t, values_out_of_range);
    tcase_add_test(t, reads_tensors);
    tcase_add_loop_test(t, refuses, 0, gguf_bad_n);
    tcase_add_test(t, refuses_every_cut);
    tcase_add_test(t, survives_flips);
    tcase_add_test(t, many_duplicates);
    tcase_add_test(t, opens_files);
    tcase_add_test(t, opens_the_model);
    tcase_add_test(t, little_memory);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
