/* test_sched.c - the scheduler, admission and the block manager under a scripted clock (sched_rig.h).
 *
 * Who runs when: fairness, priorities, deadlines, nobody starved, step_ms kept. What memory does: pools of every size, cancels
 * at every point, sessions under pressure; every request ends once and every page comes back. test_sched_users.c: what several
 * users share. test_sched_random.c adds random workloads.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sched_rig.h"

static void fine(const struct rig *r)
{
    ck_assert_msg(r->wrong[0] == '\0', "%s", r->wrong);
}

static void stop(struct rig *r)
{
    rig_stop(r);
    fine(r);
}

static void kv(struct engine_request *q, const char *policy, int budget)
{
    q->kv.policy = strdup(policy);
    q->kv.budget = budget;
}

/* ---- who runs -------------------------------------------------------------------------------------------------------- */

/* Tokens depend on what the tables hold, and are the same alone, in a batch and with other slices. */
START_TEST(same_tokens)
{
    static const char *const policy[] = { "full", "streaming", "snapkv", "pyramid", "h2o", "tova", "article", "sparse" };
    struct engine_config cfg;
    struct rig one, all;

    rig_config(&cfg);
    rig_start(&all, &cfg);
    for (int i = 0; i < 8; i++) {
        struct engine_request *q = rig_generate(100 + 150 * i, (uint32_t)i, 40);
        kv(q, policy[i], 64);
        rig_submit(&all, q);
    }
    rig_run(&all);
    for (int i = 0; i < 8; i++) {
        cfg.step_ms = 1 + 20 * i;
        rig_start(&one, &cfg);
        struct engine_request *q = rig_generate(100 + 150 * i, (uint32_t)i, 40);
        kv(q, policy[i], 64);
        rig_submit(&one, q);
        rig_run(&one);
        ck_assert_int_eq(one.req[0].n_token, 40);
        ck_assert_int_eq(all.req[i].n_token, 40);
        ck_assert_mem_eq(one.req[0].token, all.req[i].token, 40 * sizeof(int32_t));
        stop(&one);
    }
    /* and they do depend on it: another budget, another text */
    rig_start(&one, &cfg);
    struct engine_request *q = rig_generate(100 + 150 * 7, 7, 40);
    kv(q, "sparse", 128);
    rig_submit(&one, q);
    rig_run(&one);
    ck_assert_mem_ne(one.req[0].token, all.req[7].token, 40 * sizeof(int32_t));
    stop(&one);
    stop(&all);
}
END_TEST

START_TEST(priority_first)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.max_batch = 2;
    rig_start(&r, &cfg);
    for (int i = 0; i < 12; i++) {
        struct engine_request *q = rig_generate(50, (uint32_t)i, 20);
        q->priority = i % 3;
        rig_submit(&r, q);
    }
    rig_run(&r);
    /* all are there when the first step begins: the highest first, among equals the order of arrival */
    int expect[12], n = 0;
    for (int p = 2; p >= 0; p--)
        for (int i = p; i < 12; i += 3)
            expect[n++] = i;
    for (int k = 1; k < 12; k++)
        ck_assert_int_ge(r.req[expect[k]].t_start, r.req[expect[k - 1]].t_start);
    stop(&r);
}
END_TEST

/* Prompts that have their memory already are read by priority too, and one client's many don't keep another's waiting. */
START_TEST(prompts_in_order)
{
    for (int by_uid = 0; by_uid < 2; by_uid++) {
        struct engine_config cfg;
        struct rig r;
        int ms, before = 0;
        rig_config(&cfg);
        cfg.max_batch = 16;
        cfg.step_ms = 1;
        rig_start(&r, &cfg);
        for (int i = 0; i < 6; i++) {
            struct engine_request *q = rig_generate(1500, (uint32_t)i, 300);
            q->uid = 1;
            rig_submit(&r, q);
        }
        rig_step(&r, &ms);
        rig_step(&r, &ms);
        struct engine_request *q = rig_generate(1500, 50, 10);
        q->uid = by_uid ? 2 : 1;
        q->priority = by_uid ? 0 : 1;
        int late = rig_submit(&r, q);
        rig_run(&r);
        for (int i = 0; i < 6; i++)
            before += r.req[i].t_first < r.req[late].t_first;
        ck_assert_int_eq(before, 1); /* the one that was being read */
        stop(&r);
    }
}
END_TEST

/* One client with forty requests and one with a single one that comes later: it is not behind the forty. */
START_TEST(fair_between_uids)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.max_batch = 4;
    rig_start(&r, &cfg);
    for (int i = 0; i < 40; i++) {
        struct engine_request *q = rig_generate(60, (uint32_t)i, 30);
        q->uid = 1000;
        rig_submit(&r, q);
    }
    rig_run_tokens(&r, 0, 5);
    struct engine_request *q = rig_generate(60, 99, 30);
    q->uid = 1001;
    int late = rig_submit(&r, q);
    rig_run(&r);
    int before = 0;
    for (int i = 0; i < 40; i++)
        before += r.req[i].t_start < r.req[late].t_start;
    ck_assert_int_le(before, 4); /* those that ran already */
    stop(&r);
}
END_TEST

/* Two clients that always have requests waiting share the places evenly, whoever came first. */
START_TEST(fair_share)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.max_batch = 4;
    rig_start(&r, &cfg);
    for (int i = 0; i < 60; i++) {
        struct engine_request *q = rig_generate(40, (uint32_t)i, 20);
        q->uid = i < 30 ? 1 : 2;
        rig_submit(&r, q);
    }
    int done[2] = { 0, 0 };
    while (done[0] + done[1] < 30) {
        int ms;
        rig_step(&r, &ms);
        fine(&r);
        done[0] = done[1] = 0;
        for (int i = 0; i < 60; i++)
            done[i >= 30] += rig_ended(&r, i);
    }
    ck_assert_int_ge(done[0], 13);
    ck_assert_int_ge(done[1], 13);
    rig_run(&r);
    stop(&r);
}
END_TEST

/* A request that needs 60 % of the pool, and small ones that never stop coming: it gets its turn. */
START_TEST(large_not_starved)
{
    struct engine_config cfg;
    struct rig r;
    int64_t total = rig_pages_needed("full", -1, 1024);

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = total * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    uint32_t seed = 0;
    for (int i = 0; i < 8; i++)
        rig_submit(&r, rig_generate(100, seed++, 20));
    rig_run_tokens(&r, 0, 3);
    int large = rig_submit(&r, rig_generate(600, 1000, 14)), passed = 0;
    for (int i = 0; i < 6; i++)
        rig_submit(&r, rig_generate(100, seed++, 20));
    while (r.req[large].n_token == 0 && r.n < 500) {
        int ms, open = 0;
        rig_step(&r, &ms);
        fine(&r);
        for (int i = 0; i < r.n; i++)
            open += !rig_ended(&r, i);
        if (open < 15)
            rig_submit(&r, rig_generate(100, seed++, 20));
    }
    for (int i = large + 1; i < r.n; i++)
        passed += r.req[i].t_start != 0 && r.req[i].t_start < r.req[large].t_start;
    ck_assert_int_eq(r.req[large].n_token > 0, 1);
    ck_assert_int_le(passed, 40); /* admit.c: BYPASS_MAX, and those of the same round */
    rig_run(&r);
    stop(&r);
}
END_TEST

/* A deadline ends a request wherever it is: waiting, in its prompt, in its answer, and not later than a step after it. */
START_TEST(deadlines)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.model = "preset:smollm2-135m"; /* so that a prompt takes many steps */
    cfg.slot_values = false;
    cfg.kv_memory = (int64_t)1 << 30;
    cfg.max_batch = 1;
    cfg.step_ms = 5;
    rig_start(&r, &cfg);
    int run = rig_submit(&r, rig_generate(1500, 1, 400));
    struct engine_request *q = rig_generate(100, 2, 10);
    q->deadline_ms = 8;
    int waits = rig_submit(&r, q);
    rig_run_tokens(&r, run, 2);
    ck_assert_int_eq(r.req[waits].code, SKV_DEADLINE);
    rig_run(&r);
    ck_assert_int_eq(r.req[run].code, SKV_OK);
    int64_t prompt_us = r.req[run].t_first - r.req[run].t_submit, all_us = r.req[run].t_end - r.req[run].t_submit;
    ck_assert_int_gt(prompt_us, 100 * 1000 * cfg.step_ms / 5);
    for (int part = 1; part < 10; part++) { /* within the prompt, then within the answer */
        q = rig_generate(1500, 1, 400);
        q->deadline_ms = part < 5 ? prompt_us * part / 5000 : (prompt_us + (all_us - prompt_us) * (part - 4) / 7) / 1000;
        int i = rig_submit(&r, q);
        int64_t deadline = r.req[i].t_submit + q->deadline_ms * 1000;
        r.worst_step = 0;
        rig_run(&r);
        ck_assert_int_eq(r.req[i].code, SKV_DEADLINE);
        ck_assert_int_ge(r.req[i].t_end, deadline);
        ck_assert_int_le(r.req[i].t_end - deadline, r.worst_step + 1000);
        ck_assert_int_eq(r.req[i].n_token > 0, part >= 5);
    }
    stop(&r);
}
END_TEST

/* ---- pace -------------------------------------------------------------------------------------------------------------- */

/* The largest gap of a decoding client while a prompt of 7000 tokens is prefilled, on several machines. */
START_TEST(step_ms_kept)
{
    static const struct {
        const char *model, *device;
        int step_ms;
    } on[] = { { "preset:smollm2-135m", "zen4-2core", 60 }, { "preset:llama3-8b", "rtx4090", 20 },
               { "preset:llama3-8b", "h100", 10 }, { "preset:llama3-70b/q4_0", "h200", 60 } };
    struct engine_config cfg;
    struct rig r;

    for (size_t k = 0; k < sizeof on / sizeof *on; k++) {
        rig_config(&cfg);
        cfg.model = on[k].model;
        cfg.device = on[k].device;
        cfg.slot_values = false;
        cfg.step_ms = on[k].step_ms;
        cfg.context = 8192;
        cfg.kv_memory = (int64_t)8 << 30;
        rig_start(&r, &cfg);
        rig_submit(&r, rig_generate(200, 1, 2000));
        rig_run_tokens(&r, 0, 10);
        r.req[0].worst_gap = 0;
        int prompt = rig_submit(&r, rig_generate(7000, 2, 1));
        int first = r.req[0].n_token;
        rig_run_tokens(&r, prompt, 1);
        fine(&r);
        ck_assert_int_eq(r.req[prompt].n_token, 1);
        ck_assert_int_gt(r.req[0].n_token, first + 5);
        ck_assert_msg(r.req[0].worst_gap < 3000 * on[k].step_ms, "%s on %s: a gap of %lld us, step_ms %d", on[k].model,
                      on[k].device, (long long)r.req[0].worst_gap, on[k].step_ms);
        stop(&r);
    }
}
END_TEST

/* Short prompts that come while a long one is prefilled don't wait for its end, nor does it wait for ever for them. */
START_TEST(short_overtakes_long)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.model = "preset:smollm2-135m";
    cfg.slot_values = false;
    cfg.context = 8192;
    cfg.kv_memory = (int64_t)4 << 30;
    rig_start(&r, &cfg);
    int long_one = rig_submit(&r, rig_generate(7000, 1, 5));
    int ms, n = 0;
    for (int i = 0; i < 5; i++)
        rig_step(&r, &ms);
    int short_one = rig_submit(&r, rig_generate(60, 2, 5));
    rig_run_tokens(&r, short_one, 1);
    ck_assert_int_eq(r.req[long_one].n_token, 0);
    while (r.req[long_one].n_token == 0 && n < 400) { /* a new short one whenever one ends */
        int i = rig_submit(&r, rig_generate(200, (uint32_t)(10 + n++), 2));
        while (!rig_ended(&r, i) && r.req[long_one].n_token == 0 && r.wrong[0] == '\0')
            rig_step(&r, &ms);
    }
    ck_assert_int_gt(r.req[long_one].n_token, 0);
    ck_assert_int_lt(n, 400);
    rig_run(&r);
    stop(&r);
}
END_TEST

/* ---- memory -------------------------------------------------------------------------------------------------------------- */

/* Every pool size from too small on: a clear refusal, or the requests finish; and what fits fits. */
START_TEST(pool_sizes)
{
    static const char *const policy[] = { "full", "sparse", "article", "streaming" };
    struct engine_config cfg;
    struct rig r;

    for (int p = 0; p < 4; p++) {
        int budget = p == 0 ? -1 : 48;
        int64_t one = rig_pages_needed(policy[p], budget, 300 + 20), step = one / 7;
        for (int64_t n = 8; n < 4 * one; n += n < 2 * one ? 1 + step / 4 : step) {
            struct skv_error err;
            rig_config(&cfg);
            cfg.kv.policy = policy[p];
            cfg.kv.budget = budget;
            cfg.kv_memory = n * (int64_t)rig_page_bytes();
            struct engine *try = engine_new(&cfg, &err);
            if (try == NULL) {
                ck_assert_int_eq(err.code, SKV_NO_MEMORY);
                continue;
            }
            engine_free(try);
            rig_start(&r, &cfg);
            for (int i = 0; i < 6; i++)
                rig_submit(&r, rig_generate(300 - 40 * (i % 3), (uint32_t)i, 20));
            rig_run(&r);
            for (int i = 0; i < 6; i += 3) /* those of 300: exactly when the pool holds one */
                ck_assert_int_eq(r.req[i].code, n >= one ? SKV_OK : SKV_TOO_LARGE);
            stop(&r);
        }
    }
}
END_TEST

/* As many run at a time as the plan says fit. */
START_TEST(as_many_as_fit)
{
    static const char *const policy[] = { "full", "sparse", "article" };
    struct engine_config cfg;
    struct rig r;

    for (int p = 0; p < 3; p++) {
        rig_config(&cfg);
        cfg.kv.policy = policy[p];
        cfg.kv.budget = p == 0 ? -1 : 64;
        cfg.max_batch = cfg.max_sequences = 64;
        cfg.kv_memory = rig_pages_needed("full", -1, 520) * 5 * (int64_t)rig_page_bytes() + 1;
        rig_start(&r, &cfg);
        int64_t fit = kvplan_fit(&r.e->plan, pages_total(r.e->pages), 500 + 20);
        int most = 0;
        for (int i = 0; i < 40; i++)
            rig_submit(&r, rig_generate(500, (uint32_t)i, 20));
        for (int ms = 0; !rig_ended(&r, 0);) {
            int active = 0;
            const struct seq *s;
            rig_step(&r, &ms);
            fine(&r);
            TAILQ_FOREACH(s, &r.e->seqs, link)
                active += seq_active(s);
            most = active > most ? active : most;
        }
        ck_assert_int_eq(most, fit < 40 ? fit : 40);
        ck_assert_int_ge(fit, p == 1 ? 10 : 5);
        rig_run(&r);
        stop(&r);
    }
}
END_TEST

/* Cancel after each step of a request's life, under every policy, with others beside it: nothing of the others changes. */
START_TEST(cancel_anywhere)
{
    static const char *const policy[] = { "full", "sparse", "h2o", "streaming" };
    struct engine_config cfg;
    struct rig r;
    int32_t beside[4][30];
    int cancelled = 0;

    for (int at = -1; at < 60; at++) {
        rig_config(&cfg);
        cfg.step_ms = 1;
        rig_start(&r, &cfg);
        for (int i = 0; i < 4; i++) {
            struct engine_request *q = rig_generate(200 + 90 * i, (uint32_t)i, 30);
            kv(q, policy[i], 48);
            rig_submit(&r, q);
        }
        int gone = rig_submit(&r, rig_generate(700, 77, 20));
        for (int i = 0, ms; i <= at; i++)
            rig_step(&r, &ms);
        if (at >= 0) {
            int ms;
            engine_cancel(r.e, r.req[gone].id);
            rig_step(&r, &ms);
            ck_assert(rig_ended(&r, gone)); /* within one step */
            cancelled += r.req[gone].code == SKV_CANCELLED;
        }
        rig_run(&r);
        for (int i = 0; i < 4; i++) {
            ck_assert_int_eq(r.req[i].n_token, 30);
            if (at < 0)
                memcpy(beside[i], r.req[i].token, sizeof beside[i]);
            else
                ck_assert_mem_eq(beside[i], r.req[i].token, sizeof beside[i]);
        }
        stop(&r);
    }
    ck_assert_int_gt(cancelled, 20);
}
END_TEST

/* Sessions hold memory between requests; new work takes the least recently used one's, never a running text's. */
START_TEST(sessions_give_way)
{
    struct engine_config cfg;
    struct rig r;
    char name[16];

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = rig_pages_needed("full", -1, 1300) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    for (int i = 0; i < 4; i++) {
        struct engine_request *q = rig_generate(250, (uint32_t)i, 20);
        snprintf(name, sizeof name, "s%d", i);
        q->session = strdup(name);
        rig_submit(&r, q);
        rig_run(&r);
        rig_idle(&r, 1000);
    }
    int big = rig_submit(&r, rig_generate(600, 50, 20)); /* room for it: the two oldest go */
    rig_run(&r);
    ck_assert_int_eq(r.req[big].code, SKV_OK);
    for (int i = 0; i < 4; i++) {
        struct engine_request *q = rig_generate(10, (uint32_t)(60 + i), 5);
        snprintf(name, sizeof name, "s%d", i);
        q->session = strdup(name);
        int k = rig_submit(&r, q);
        rig_run(&r);
        ck_assert_msg(r.req[k].code == (i < 2 ? SKV_NOT_FOUND : SKV_OK), "session %d: %d %s", i, r.req[k].code, r.req[k].message);
    }
    stop(&r);
}
END_TEST

/* A request that would not fit even without the idle sessions ends none of them: it waits for what runs. */
START_TEST(sessions_not_dropped_in_vain)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = rig_pages_needed("full", -1, 1000) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    struct engine_request *q = rig_generate(200, 1, 10);
    q->session = strdup("s");
    rig_submit(&r, q);
    rig_run(&r);
    int runs = rig_submit(&r, rig_generate(400, 2, 80));
    rig_run_tokens(&r, runs, 2);
    int waits = rig_submit(&r, rig_generate(600, 3, 10)); /* 210 + 480 + 610: not even without the session; later beside it */
    rig_run(&r);
    ck_assert_int_eq(r.req[waits].code, SKV_OK);
    q = rig_generate(10, 4, 5);
    q->session = strdup("s");
    int again = rig_submit(&r, q);
    rig_run(&r);
    ck_assert_msg(r.req[again].code == SKV_OK, "%s", r.req[again].message);
    stop(&r);
}
END_TEST

/* Sessions that together want more than there is: each request ends, with its text or with a clear word, and none hangs. */
START_TEST(sessions_standstill)
{
    struct engine_config cfg;
    struct rig r;
    int ok = 0, lost = 0;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = rig_pages_needed("full", -1, 1000) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 4; i++) {
            char name[16];
            struct engine_request *q = rig_generate(round == 0 ? 200 : 500, (uint32_t)(round * 4 + i), 10);
            snprintf(name, sizeof name, "s%d", i);
            q->session = strdup(name);
            rig_submit(&r, q);
            if (round == 0)
                rig_run(&r);
        }
    rig_run(&r);
    fine(&r);
    for (int i = 4; i < 8; i++) {
        ok += r.req[i].code == SKV_OK;
        lost += r.req[i].code == SKV_NOT_FOUND;
    }
    ck_assert_int_eq(ok + lost, 4);
    ck_assert_int_ge(ok, 1);
    stop(&r);
}
END_TEST

/* Commands for a request that is no more, or that never was, find nothing: also not an idle session, which serves none. */
START_TEST(stale_ids)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    rig_start(&r, &cfg);
    struct engine_request *q = rig_generate(50, 1, 5);
    q->session = strdup("s");
    rig_submit(&r, q);
    rig_run(&r);
    uint64_t stale[] = { 0, r.req[0].id, r.req[0].id + 100 };
    for (int i = 0; i < 3; i++) {
        int ms;
        engine_cancel(r.e, stale[i]);
        engine_pause(r.e, stale[i]);
        rig_step(&r, &ms);
    }
    q = rig_generate(10, 2, 5);
    q->session = strdup("s");
    int next = rig_submit(&r, q);
    rig_run(&r);
    ck_assert_int_eq(r.req[next].code, SKV_OK);
    ck_assert_int_eq(r.req[next].n_token, 5);
    stop(&r);
}
END_TEST

/* The same with more sessions than are tried in a round. */
START_TEST(sessions_standstill_many)
{
    enum { N = 24 };
    struct engine_config cfg;
    struct rig r;
    int ok = 0;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.max_sequences = 32;
    cfg.kv_memory = rig_pages_needed("full", -1, N * 64) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N; i++) {
            char name[16];
            struct engine_request *q = rig_generate(round == 0 ? 50 : 500, (uint32_t)(round * N + i), 10);
            snprintf(name, sizeof name, "s%d", i);
            q->session = strdup(name);
            rig_submit(&r, q);
        }
        rig_run(&r);
        fine(&r);
    }
    for (int i = N; i < 2 * N; i++)
        ok += r.req[i].code == SKV_OK;
    ck_assert_int_ge(ok, 3);
    stop(&r);
}
END_TEST

/* Two prompts of 70 % of the pool: one after the other, and progress never goes back (the rig checks). */
START_TEST(two_large_prompts)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = rig_pages_needed("full", -1, 1000) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    rig_submit(&r, rig_generate(690, 1, 10));
    rig_submit(&r, rig_generate(690, 2, 10));
    rig_run(&r);
    ck_assert_int_eq(r.req[0].code, SKV_OK);
    ck_assert_int_eq(r.req[1].code, SKV_OK);
    ck_assert_int_ge(r.req[1].t_start, r.req[0].t_end);
    stop(&r);
}
END_TEST

/* A paused request keeps its place and costs nothing; the others go on at their pace. */
START_TEST(paused)
{
    struct engine_config cfg;
    struct rig r;
    int ms;

    rig_config(&cfg);
    rig_start(&r, &cfg);
    rig_submit(&r, rig_generate(100, 1, 60));
    rig_submit(&r, rig_generate(100, 2, 60));
    rig_run_tokens(&r, 0, 10);
    engine_pause(r.e, r.req[0].id);
    rig_step(&r, &ms);
    int at = r.req[0].n_token;
    rig_run_tokens(&r, 1, 60);
    ck_assert_int_eq(r.req[0].n_token, at);
    ck_assert(rig_ended(&r, 1));
    ck_assert(!rig_step(&r, &ms)); /* nothing to do, and no deadline */
    ck_assert_int_eq(ms, -1);
    engine_resume(r.e, r.req[0].id);
    rig_run(&r);
    ck_assert_int_eq(r.req[0].n_token, 60);
    stop(&r);
}
END_TEST

/* ---- a device that fails ---------------------------------------------------------------------------------------------- */

static int passes_left;

static const char *fails_later(void *be)
{
    (void)be;
    return passes_left-- > 0 ? NULL : "it fell off the bus";
}

/* Whenever it happens: every request ends once, no page stays, what comes later is refused with the reason. */
START_TEST(lost_device)
{
    for (int n = 0; n < 60; n++) {
        struct engine_config cfg;
        struct ops broken;
        struct rig r;
        char why[256];

        rig_config(&cfg);
        rig_start(&r, &cfg);
        broken = *r.e->ops;
        broken.failed = fails_later;
        r.e->ops = &broken;
        passes_left = 1 << 30;
        struct engine_request *q = rig_generate(100, 99, 4);
        q->session = strdup("s");
        rig_submit(&r, q);
        rig_run(&r);
        ck_assert_int_eq(r.req[0].code, SKV_OK);
        passes_left = n;
        for (int i = 0; i < 6; i++)
            rig_submit(&r, rig_generate(i % 3 == 0 ? 700 : 30, (uint32_t)i, 20));
        rig_run(&r);
        ck_assert(engine_failed(r.e, why, sizeof why));
        ck_assert_str_eq(why, "it fell off the bus");
        for (int i = 1; i < r.n; i++) {
            ck_assert_int_eq(r.req[i].code, SKV_INTERNAL);
            ck_assert_ptr_nonnull(strstr(r.req[i].message, why));
        }
        int late = rig_submit(&r, rig_generate(10, 1, 1));
        ck_assert_int_eq(r.req[late].code, SKV_INTERNAL);
        ck_assert_ptr_null(TAILQ_FIRST(&r.e->seqs));
        stop(&r);
    }
}
END_TEST

/* ---- a device that works by itself ------------------------------------------------------------------------------------ */

/* sim, with tokens chosen as a device would: asked for, and there when they are collected, not before. What it is told of the next
 * step in between is kept, and done once the tokens come. */
#define EARLY_LAYERS 8
#define EARLY_ROWS   3
#define EARLY_SLOTS  32
static struct device {
    const struct ops *sim;
    const struct engine *e;
    const float *x;
    const int32_t *row;
    struct ops_sample *s;
    float *logits;
    int n, n_vocab;
    int64_t launched, grown, texts, admitted; /* grown: pages taken in flight; texts, sequences that moved on in flight */
    bool collecting;                          /* or nothing is in flight */
    struct {
        bool is;
        int n_row, layers;
        float *x;
        struct ops_seg seg[EARLY_ROWS];
        int32_t slot[EARLY_LAYERS][EARLY_SLOTS];
        struct kern_rule rule[EARLY_LAYERS][EARLY_ROWS];
    } early;
    int64_t taken, dropped;
} device = { .collecting = true };

static int in_state(enum seq_state state)
{
    const struct seq *s;
    int n = 0;

    TAILQ_FOREACH(s, &device.e->seqs, link)
        n += s->state == state;
    return n;
}

static int texts_before, waiting_before, running_before;
static int64_t pages_before;

static void device_sample(void *be, const float *x, const int32_t *row, int n, struct ops_sample *s, float *logits)
{
    (void)be;
    ck_assert(device.collecting && !device.early.is);
    device.collecting = false;
    device.launched++;
    device.x = x;
    device.row = row;
    device.n = n;
    device.s = s;
    device.logits = logits;
    for (int i = 0; i < n; i++)
        s[i].token = -1;
    texts_before = in_state(SEQ_TEXT);
    waiting_before = in_state(SEQ_WAITING);
    running_before = in_state(SEQ_DECODE);
    pages_before = pages_used(device.e->pages);
}

static void device_collect(void *be)
{
    float *l = malloc((size_t)device.n * device.n_vocab * sizeof *l);
    int64_t more = pages_used(device.e->pages) - pages_before;

    ck_assert(!device.collecting);
    device.collecting = true;
    device.grown += more > 0 ? more : 0;
    device.texts += texts_before - in_state(SEQ_TEXT);
    device.admitted += waiting_before > 0 && in_state(SEQ_WAITING) < waiting_before;
    ck_assert_int_eq(in_state(SEQ_DECODE), running_before); /* nobody leaves, nobody joins a step that runs */
    device.sim->logits(be, device.x, device.row, device.n, l);
    for (int i = 0; i < device.n; i++) {
        const float *r = l + (size_t)i * device.n_vocab;
        int best = 0;
        for (int t = 1; t < device.n_vocab; t++)
            best = r[t] > r[best] ? t : best;
        device.s[i].token = best;
        if (device.s[i].host)
            memcpy(device.logits + (size_t)i * device.n_vocab, r, (size_t)device.n_vocab * sizeof *r);
    }
    free(l);
}

static void device_select(void *be, int lane, int layer, const struct kern_rule *rule, int n_query, float *kept_mass)
{
    ck_assert(device.collecting && !device.early.is);
    device.sim->select(be, lane, layer, rule, n_query, kept_mass);
}

static void device_embed(void *be, const struct ops_pass *pass, float *x)
{
    ck_assert(device.collecting == (pass->token != NULL) && !device.early.is);
    if (pass->token != NULL) {
        device.sim->embed(be, pass, x);
        return;
    }
    ck_assert_int_le(pass->n_row, EARLY_ROWS);
    device.early.is = true;
    device.early.n_row = pass->n_row;
    device.early.layers = 0;
    device.early.x = x;
    memcpy(device.early.seg, pass->seg, (size_t)pass->n_seg * sizeof *pass->seg);
}

static void device_attn_in(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot)
{
    int n = pass->n_row * device.e->model.src.dims.n_kv;

    ck_assert(device.collecting != device.early.is);
    if (!device.early.is) {
        device.sim->attn_in(be, layer, pass, x, slot);
        return;
    }
    ck_assert(layer == device.early.layers++ && layer < EARLY_LAYERS && n <= EARLY_SLOTS);
    memcpy(device.early.slot[layer], slot, (size_t)n * sizeof *slot);
}

static void device_attn_decode(void *be, int layer, const struct ops_pass *pass, const struct kern_rule *rule)
{
    if (device.early.is)
        memcpy(device.early.rule[layer], rule, (size_t)pass->n_row * sizeof *rule);
    else
        device.sim->attn_decode(be, layer, pass, rule);
}

static void device_attn_out_mlp(void *be, int layer, const struct ops_pass *pass, float *x)
{
    if (!device.early.is)
        device.sim->attn_out_mlp(be, layer, pass, x);
}

static void device_ahead(void *be, const int32_t *token)
{
    int n = device.early.n_row;
    struct ops_pass pass = { n, n, token, device.early.seg };

    ck_assert(device.collecting && device.early.is);
    device.early.is = false;
    device.taken += token != NULL;
    device.dropped += token == NULL;
    if (token == NULL)
        return;
    ck_assert_int_eq(device.early.layers, device.e->model.src.dims.n_layer);
    device.sim->embed(be, &pass, device.early.x);
    for (int layer = 0; layer < device.early.layers; layer++) {
        device.sim->attn_in(be, layer, &pass, device.early.x, device.early.slot[layer]);
        device.sim->attn_decode(be, layer, &pass, device.early.rule[layer]);
        device.sim->attn_out_mlp(be, layer, &pass, device.early.x);
    }
}

static void device_state_free(void *be, float *x)
{
    ck_assert(!device.early.is);
    device.sim->state_free(be, x);
}

static void device_kv_read(void *be, int lane, int layer, int head, int32_t *pos, float *score)
{
    ck_assert(device.collecting && !device.early.is);
    device.sim->kv_read(be, lane, layer, head, pos, score);
}

/* No sequence holds a page that it has no pair in once its request is over. */
static void pages_exact(const struct rig *r)
{
    const struct ops_dims *d = &r->e->model.src.dims;
    const struct seq *s;

    TAILQ_FOREACH(s, &r->e->seqs, link)
        for (int layer = 0; s->state == SEQ_IDLE && layer < d->n_layer; layer++)
            for (int h = 0; h < d->n_kv; h++)
                ck_assert_int_eq(pages_head_held(r->e->pages, s->lane, layer, h),
                                 (r->e->kv->len[core_head(r->e, s->lane, layer, h)] + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS);
}

/* Texts, admission, the next pages and the next step but for its tokens are done while the device works; what is answered is what it
 * was without, from requests that come, end at a token and are broken off at any moment. */
START_TEST(works_ahead)
{
    static const char *const policy[] = { "full", "sparse", "streaming", "article" };
    struct engine_config cfg;
    struct rig r[2];
    struct ops ops;

    rig_config(&cfg);
    cfg.max_batch = 3;
    for (int k = 0; k < 2; k++) {
        rig_start(&r[k], &cfg);
        device = (struct device){ .sim = r[k].e->ops, .e = r[k].e, .n_vocab = r[k].e->model.src.dims.n_vocab, .collecting = true };
        ops = *r[k].e->ops;
        ops.sample = device_sample;
        ops.collect = device_collect;
        ops.select = device_select;
        ops.embed = device_embed;
        ops.attn_in = device_attn_in;
        ops.attn_decode = device_attn_decode;
        ops.attn_out_mlp = device_attn_out_mlp;
        ops.ahead = device_ahead;
        ops.state_free = device_state_free;
        ops.kv_read = device_kv_read;
        if (k == 1)
            r[k].e->ops = &ops;
        for (int i = 0; i < 12; i++) {
            struct engine_request *q = rig_generate(40 + 37 * i, (uint32_t)i, 30 + 11 * i);
            kv(q, policy[i % 4], 64);
            if (i % 3 == 0) {
                char name[8];
                snprintf(name, sizeof name, "s%d", i);
                q->session = strdup(name);
            }
            q->ignore_eos = i % 2 == 0;
            rig_submit(&r[k], q);
            rig_run_tokens(&r[k], i / 2, 7);
            if (i % 5 == 4)
                engine_cancel(r[k].e, r[k].req[i - 2].id);
        }
        rig_run(&r[k]);
        for (int n = 1; n <= KERN_PAGE_SLOTS; n++) { /* sessions broken off at every place in a page */
            struct engine_request *q = rig_generate(20, (uint32_t)n, 100);
            char name[8];
            q->kv.policy = strdup("full");
            snprintf(name, sizeof name, "p%d", n);
            q->session = strdup(name);
            int i = rig_submit(&r[k], q);
            rig_run_tokens(&r[k], i, n);
            engine_cancel(r[k].e, r[k].req[i].id);
            rig_run(&r[k]);
            ck_assert_int_eq(r[k].req[i].code, SKV_CANCELLED);
            pages_exact(&r[k]);
        }
    }
    ck_assert_int_gt(device.launched, 100);
    ck_assert_int_gt(device.grown, 100);
    ck_assert_int_gt(device.texts, 3);
    ck_assert_int_gt(device.admitted, 0);
    ck_assert_int_gt(device.taken, 100);
    ck_assert_int_gt(device.dropped, 20);
    ck_assert_int_eq(device.taken, atomic_load(&r[1].e->stats.steps_ahead));
    ck_assert_int_eq(atomic_load(&r[0].e->stats.evicted), atomic_load(&r[1].e->stats.evicted));
    int compared = 0;
    for (int i = 0; i < 12; i++) {
        int n = r[0].req[i].n_token < r[1].req[i].n_token ? r[0].req[i].n_token : r[1].req[i].n_token;
        if (r[0].req[i].code == SKV_OK) { /* one that is broken off has as many tokens as there were */
            ck_assert_int_eq(r[0].req[i].code, r[1].req[i].code);
            ck_assert_int_eq(r[0].req[i].n_token, r[1].req[i].n_token);
        }
        if (n > 0) /* else there may be no array */
            ck_assert_mem_eq(r[0].req[i].token, r[1].req[i].token, (size_t)n * sizeof(int32_t));
        compared += n;
    }
    ck_assert_int_gt(compared, 300);
    for (int k = 0; k < 2; k++)
        stop(&r[k]);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sched");
    TCase *c = tcase_create("sched");
    SRunner *runner;
    int failed;

    tcase_set_timeout(c, 240);
    tcase_add_test(c, same_tokens);
    tcase_add_test(c, priority_first);
    tcase_add_test(c, prompts_in_order);
    tcase_add_test(c, fair_between_uids);
    tcase_add_test(c, fair_share);
    tcase_add_test(c, large_not_starved);
    tcase_add_test(c, deadlines);
    tcase_add_test(c, step_ms_kept);
    tcase_add_test(c, short_overtakes_long);
    tcase_add_test(c, pool_sizes);
    tcase_add_test(c, as_many_as_fit);
    tcase_add_test(c, cancel_anywhere);
    tcase_add_test(c, sessions_give_way);
    tcase_add_test(c, sessions_not_dropped_in_vain);
    tcase_add_test(c, sessions_standstill);
    tcase_add_test(c, sessions_standstill_many);
    tcase_add_test(c, stale_ids);
    tcase_add_test(c, two_large_prompts);
    tcase_add_test(c, paused);
    tcase_add_test(c, lost_device);
    tcase_add_test(c, works_ahead);
    suite_add_tcase(s, c);
    runner = srunner_create(s);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}
