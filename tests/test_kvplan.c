/* test_kvplan.c - phase 1: budgets add up, page counts are exact, options are checked. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kvplan.h"
#include "engine/pages.h"

static struct ops_dims dims(int layers, int heads)
{
    return (struct ops_dims){ .n_layer = layers, .n_kv = heads, .head_dim = 64, .max_context = 8192 };
}

START_TEST(pyramid_adds_up)
{
    for (int layers = 1; layers <= 96; layers++)
        for (int budget = 128; budget <= 4096; budget = budget * 3 / 2 + 1) {
            struct ops_dims d = dims(layers, 3);
            struct policy_params p = policy_pyramid.defaults;
            struct kvplan plan;
            long sum = 0;
            p.budget = budget;
            ck_assert_int_eq(kvplan_init(&plan, &policy_pyramid, &p, NULL, 0, &d, NULL), 0);
            for (int l = 0; l < layers; l++) {
                sum += plan.budget[l];
                ck_assert_int_ge(plan.budget[l], p.sink + p.recent);
                ck_assert(l == 0 || plan.budget[l] <= plan.budget[l - 1] + 1);
            }
            ck_assert_int_eq(sum, (long)layers * budget);
            kvplan_fini(&plan);
        }
}
END_TEST

START_TEST(full_layers_and_pins)
{
    struct ops_dims d = dims(30, 3);
    struct policy_params p = policy_article.defaults;
    struct kern_range pin = { 10, 2000 };
    struct kvplan plan;

    ck_assert_int_eq(kvplan_init(&plan, &policy_article, &p, &pin, 1, &d, NULL), 0);
    for (int l = 0; l < 30; l++) {
        ck_assert_int_eq(plan.budget[l], l < 3 ? 0 : 4 + 32 + 1990);
        ck_assert_int_eq(plan.rule[l].budget, plan.budget[l]);
        ck_assert_int_eq(plan.rule[l].pin[0].to, 2000);
    }
    kvplan_fini(&plan);
}
END_TEST

START_TEST(pages_are_exact)
{
    struct ops_dims d = dims(30, 3);
    struct policy_params p = policy_snapkv.defaults;
    struct kvplan plan, full;

    ck_assert_int_eq(kvplan_init(&full, &policy_full, &policy_full.defaults, NULL, 0, &d, NULL), 0);
    ck_assert_int_eq(kvplan_pages(&full, 4500), 30 * 3 * 141);
    ck_assert_int_eq(kvplan_slots(&full, 4500), 30 * 3 * 4500);
    ck_assert_int_eq(kvplan_transient(&full, 4500), 0);
    ck_assert_int_eq(kvplan_fit(&full, 10 * 30 * 3 * 141, 4500), 10);
    ck_assert_int_eq(kvplan_fit(&full, 10 * 30 * 3 * 141 - 1, 4500), 9);
    p.budget = 511;
    ck_assert_int_eq(kvplan_init(&plan, &policy_snapkv, &p, NULL, 0, &d, NULL), 0);
    ck_assert_int_eq(kvplan_pages(&plan, 4500), 30 * 3 * 16); /* 511 and the new one */
    ck_assert_int_eq(kvplan_pages(&plan, 100), 30 * 3 * 4);
    ck_assert_int_eq(kvplan_transient(&plan, 4500), 3 * (141 - 16));
    for (int64_t n = 1; n < 2000; n += 37) {
        int64_t pages = kvplan_pages(&plan, n) + kvplan_transient(&plan, n);
        ck_assert_int_ge(kvplan_longest(&plan, pages, 8192), n);
        if (kvplan_longest(&plan, pages - 1, 8192) >= n)
            ck_assert_int_eq(kvplan_pages(&plan, n), kvplan_pages(&plan, n - 1));
    }
    kvplan_fini(&plan);
    kvplan_fini(&full);
}
END_TEST

START_TEST(options_are_checked)
{
    struct engine_kv_options o = { NULL, -1, -1, -1, -1, -1, -1, -1, NULL };
    struct policy_params p;
    struct skv_error err;

    for (int i = 0; policy_table[i] != NULL; i++)
        ck_assert_int_eq(policy_resolve(policy_table[i], &o, 8192, &p, SKV_BAD_REQUEST, &err), 0);
    o.budget = 15;
    ck_assert_int_eq(policy_resolve(&policy_sparse, &o, 8192, &p, SKV_BAD_REQUEST, &err), -1);
    ck_assert_ptr_nonnull(strstr(err.msg, "budget"));
    o.budget = 8193;
    ck_assert_int_eq(policy_resolve(&policy_sparse, &o, 8192, &p, SKV_BAD_REQUEST, &err), -1);
    o.budget = 64;
    ck_assert_int_eq(policy_resolve(&policy_sparse, &o, 8192, &p, SKV_BAD_REQUEST, &err), 0);
    ck_assert_int_le(p.recent + p.sink, 64);
    o.recent = 63;
    ck_assert_int_eq(policy_resolve(&policy_sparse, &o, 8192, &p, SKV_BAD_REQUEST, &err), -1);
    o.recent = -1;
    o.pool = 4;
    ck_assert_int_eq(policy_resolve(&policy_sparse, &o, 8192, &p, SKV_BAD_REQUEST, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_REQUEST);
    ck_assert_ptr_null(policy_find("nothing"));
}
END_TEST

/* alpha 0 is the last message; a chat's closing header comes on top of a count; never more than the prompt. */
START_TEST(windows)
{
    struct policy_params p = { .alpha = 12 };
    struct policy_prompt q = { .n_slot = 1000, .n_new = 1000, .n_last = 40, .n_tail = 5 };

    ck_assert_int_eq(policy_window(&p, &q, 0), 12);
    ck_assert_int_eq(policy_window(&p, &q, q.n_tail), 17);
    p.alpha = 0;
    ck_assert_int_eq(policy_window(&p, &q, q.n_tail), 40);
    q.n_last = 0;
    ck_assert_int_eq(policy_window(&p, &q, 0), POLICY_ALPHA_PLAIN);
    q.n_new = 7;
    ck_assert_int_eq(policy_window(&p, &q, 5), 7);
    p.alpha = POLICY_ALL;
    ck_assert_int_eq(policy_window(&p, &q, 0), 7);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvplan");
    TCase *c = tcase_create("kvplan");

    tcase_add_test(c, pyramid_adds_up);
    tcase_add_test(c, full_layers_and_pins);
    tcase_add_test(c, pages_are_exact);
    tcase_add_test(c, options_are_checked);
    tcase_add_test(c, windows);
    suite_add_tcase(s, c);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed == 0 ? 0 : 1;
}
