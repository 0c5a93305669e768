/* test_random_model: the weights that random_model.c writes are what it promises, for every block type. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/blocks.h"
#include "tests/random_model.h"

static char path[] = "/tmp/skvd-random-model-XXXXXX";

static unsigned char *slurp(size_t *size)
{
    FILE *f = fopen(path, "rb");
    ck_assert_ptr_nonnull(f);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    unsigned char *p = malloc(*size);
    ck_assert_ptr_nonnull(p);
    ck_assert_int_eq(fread(p, *size, 1, f), 1);
    fclose(f);
    return p;
}

static const char *const types[] = {"F32",  "F16",  "BF16", "Q8_0", "Q4_0", "Q4_1",
                                    "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"};

/* The last tensor of the file is the last layer's ffn_down [width][ffn]. */
START_TEST(deviation)
{
    struct random_model m;
    struct skv_error err = {0};
    random_model_preset(&m, "tiny-gqa");
    m.type = types[_i];
    m.embed_type = types[_i];
    ck_assert_msg(random_model_write(&m, path, &err) == 0, "%s", err.msg);
    int type = -1;
    for (int t = 0; t < 40; t++)
        if (kern_type_known(t) && strcmp(kern_type_name(t), types[_i]) == 0)
            type = t;
    ck_assert_int_ge(type, 0);
    size_t size, bytes = kern_row_bytes(type, m.ffn) * (size_t)m.width;
    unsigned char *file = slurp(&size);
    ck_assert_int_eq(memcmp(file, "GGUF", 4), 0);
    float *w = malloc((size_t)m.ffn * (size_t)m.width * sizeof *w);
    const int64_t n = (int64_t)m.ffn * m.width;
    double sum = 0, sq = 0, want = 1 / sqrt(2.0 * m.layers * m.ffn);
    kern_dequant(type, file + size - bytes, w, n);
    for (int64_t i = 0; i < n; i++) {
        ck_assert(isfinite(w[i]));
        sum += w[i];
        sq += (double)w[i] * w[i];
    }
    ck_assert_msg(fabs(sum / (double)n) < 0.02 * want, "%s: mean %g, deviation wanted %g", types[_i], sum / (double)n, want);
    double dev = sqrt(sq / (double)n);
    ck_assert_msg(dev > 0.9 * want && dev < 1.1 * want, "%s: deviation %g, wanted %g", types[_i], dev, want);
    free(w);
    free(file);
}
END_TEST

START_TEST(same_settings_same_bytes)
{
    struct random_model m;
    size_t a_size, b_size;
    random_model_default(&m);
    ck_assert_int_eq(random_model_write(&m, path, NULL), 0);
    unsigned char *a = slurp(&a_size);
    ck_assert_int_eq(random_model_write(&m, path, NULL), 0);
    unsigned char *b = slurp(&b_size);
    ck_assert_uint_eq(a_size, b_size);
    ck_assert_int_eq(memcmp(a, b, a_size), 0);
    free(b);
    m.seed++;
    ck_assert_int_eq(random_model_write(&m, path, NULL), 0);
    b = slurp(&b_size);
    ck_assert_int_ne(memcmp(a, b, a_size), 0);
    free(a);
    free(b);
}
END_TEST

START_TEST(refusals)
{
    struct random_model m;
    struct skv_error err;
    random_model_default(&m);
    m.type = "Q4_K"; /* width 64 is no multiple of 256 */
    ck_assert_int_eq(random_model_write(&m, path, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_CONFIG);
    random_model_default(&m);
    m.kv_heads = 3;
    ck_assert_int_eq(random_model_write(&m, path, &err), -1);
    random_model_default(&m);
    m.vocab_from = "/nonexistent/model.gguf";
    ck_assert_int_eq(random_model_write(&m, path, &err), -1);
    ck_assert_int_eq(err.code, SKV_IO);
}
END_TEST

int main(void)
{
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    Suite *s = suite_create("random_model");
    TCase *t = tcase_create("random_model");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, deviation, 0, (int)(sizeof types / sizeof *types));
    tcase_add_test(t, same_settings_same_bytes);
    tcase_add_test(t, refusals);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    unlink(path);
    return failed != 0;
}
