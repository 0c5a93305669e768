/* test_workers.c - the worker pool: every item once, many small jobs, more threads than CPUs, silence when idle. */
#include <check.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "kernels/workers.h"

#define ITEMS 1000

/* The two ways to hand items out. */
static void (*const ways[])(struct workers *, int, void (*)(void *, int, int), void *) = { workers_run, workers_run_shares };

struct count {
    atomic_int each[ITEMS];
    atomic_int bad_worker;
    int threads;
};

static void count_item(void *arg, int item, int worker)
{
    struct count *c = arg;
    atomic_fetch_add(&c->each[item], 1);
    if (worker < 0 || worker >= c->threads)
        atomic_store(&c->bad_worker, 1);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

START_TEST(test_every_item_once)
{
    struct skv_error err;
    static const int threads[] = { 1, 2, 3, 16 };
    for (int k = 0; k < 4; k++) {
        struct workers *w = workers_new(threads[k], &err);
        ck_assert_ptr_nonnull(w);
        ck_assert_int_eq(workers_count(w), threads[k]);
        for (int n = 0; n <= ITEMS; n = n < 20 ? n + 1 : n * 2) {
            struct count *c = calloc(1, sizeof *c);
            c->threads = threads[k];
            ways[_i](w, n, count_item, c);
            for (int i = 0; i < ITEMS; i++)
                ck_assert_int_eq(c->each[i], i < n);
            ck_assert_int_eq(c->bad_worker, 0);
            free(c);
        }
        workers_free(w);
    }
}
END_TEST

struct sum {
    long value[8];
    int job;
};

/* Plain memory: a late or doubled item, or a job seen too early, gives a wrong sum. */
static void sum_item(void *arg, int item, int worker)
{
    struct sum *s = arg;
    (void)worker;
    s->value[item] += s->job;
}

START_TEST(test_many_small_jobs)
{
    struct skv_error err;
    struct workers *w = workers_new(2 + 2 * (_i / 2), &err); /* 2: spinning; 4 and more: crowded here */
    struct sum s[2] = { { { 0 }, 0 } };
    const int jobs = 20000;
    for (int k = 0; k < jobs; k++) {
        s[k & 1].job = k;
        ways[_i % 2](w, 2 + k % 7, sum_item, &s[k & 1]);
        if (k % 5000 == 4999)
            usleep(3000); /* long enough for the workers to go to sleep */
    }
    long want[2][8] = { { 0 } };
    for (int k = 0; k < jobs; k++)
        for (int i = 0; i < 2 + k % 7; i++)
            want[k & 1][i] += k;
    for (int i = 0; i < 16; i++)
        ck_assert_int_eq(s[i / 8].value[i % 8], want[i / 8][i % 8]);
    workers_free(w);
}
END_TEST

struct order {
    int n[2], item[2][ITEMS]; /* what each worker took */
    atomic_bool begun;        /* worker 0 has its first item, */
    atomic_int left;          /* and holds it while worker 1 has so many to take */
};

static void order_item(void *arg, int item, int worker)
{
    struct order *o = arg;
    o->item[worker][o->n[worker]++] = item;
    if (worker == 0)
        atomic_store(&o->begun, true);
    else
        atomic_fetch_sub(&o->left, 1);
    while (worker == 0 ? atomic_load(&o->left) > 0 : !atomic_load(&o->begun))
        usleep(100);
}

/* A worker takes its own share in order, then the other's from its end: here all of it but the first, which worker 0 is held up
 * with. */
START_TEST(test_shares)
{
    struct skv_error err;
    struct workers *w = workers_new(2, &err);
    struct order *o = calloc(1, sizeof *o);
    atomic_store(&o->left, ITEMS - 1);
    workers_run_shares(w, ITEMS, order_item, o);
    ck_assert_int_eq(o->n[0], 1);
    ck_assert_int_eq(o->item[0][0], 0);
    ck_assert_int_eq(o->n[1], ITEMS - 1);
    for (int i = 0; i < ITEMS - 1; i++)
        ck_assert_int_eq(o->item[1][i], i < ITEMS / 2 ? ITEMS / 2 + i : ITEMS - 1 - i);
    free(o);
    workers_free(w);
}
END_TEST

START_TEST(test_idle_uses_no_cpu)
{
    struct skv_error err;
    struct workers *w = workers_new(4, &err);
    struct count *c = calloc(1, sizeof *c);
    c->threads = 4;
    workers_run(w, ITEMS, count_item, c);
    usleep(20000);
    double before = cpu_seconds();
    usleep(300000);
    ck_assert_double_lt(cpu_seconds() - before, 0.01);
    workers_run(w, ITEMS, count_item, c); /* and they wake again */
    for (int i = 0; i < ITEMS; i++)
        ck_assert_int_eq(c->each[i], 2);
    workers_free(w);
    free(c);
}
END_TEST

START_TEST(test_bad_count)
{
    struct skv_error err = { 0 };
    ck_assert_ptr_null(workers_new(0, &err));
    ck_assert_int_eq(err.code, SKV_BAD_CONFIG);
    workers_free(NULL);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("workers");
    TCase *t = tcase_create("workers");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, test_every_item_once, 0, 2);
    tcase_add_loop_test(t, test_many_small_jobs, 0, 6);
    tcase_add_test(t, test_shares);
    tcase_add_test(t, test_idle_uses_no_cpu);
    tcase_add_test(t, test_bad_count);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_NORMAL);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? 1 : 0;
}
