/* test_sched_users.c - what users share under a scripted clock (sched_rig.h): places in the step, memory, idle sessions, and the
 * word that a session is lost. Nothing that one does takes another's part. */
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

static int submit_of(struct rig *r, uint32_t uid, int n, uint32_t seed, int max_tokens)
{
    struct engine_request *q = rig_generate(n, seed, max_tokens);

    q->uid = uid;
    return rig_submit(r, q);
}

static int submit_session(struct rig *r, uint32_t uid, int n, uint32_t seed, const char *name)
{
    struct engine_request *q = rig_generate(n, seed, 4);

    q->uid = uid;
    q->session = strdup(name);
    return rig_submit(r, q);
}

/* Steps until request i has its first token. */
static int steps_to_first(struct rig *r, int i)
{
    int n = 0, ms;

    while (r->req[i].n_token == 0 && !rig_ended(r, i) && n < 1000) {
        rig_step(r, &ms);
        n++;
    }
    fine(r);
    return n;
}

/* One user fills the batch with long answers, most important of all. Another's request has a place in the next step, with a
 * single place when the one who has it had its turn; the first user's texts are the same as without it. */
START_TEST(full_batch_shared)
{
    enum { FLOOD = 12, LONG = 150 };
    int32_t *text[FLOOD];

    for (int batch = 1; batch <= 4; batch++)
        for (int late = 0; late < 2; late++) {
            struct engine_config cfg;
            struct rig r;
            rig_config(&cfg);
            cfg.max_batch = batch;
            rig_start(&r, &cfg);
            for (int i = 0; i < FLOOD; i++) {
                struct engine_request *q = rig_generate(40, (uint32_t)i, LONG);
                q->uid = 1;
                q->priority = 10;
                rig_submit(&r, q);
            }
            rig_run_tokens(&r, batch - 1, late ? 40 : 3);
            for (int k = 0; late && k < 5; k++) {
                struct engine_request *q = rig_generate(30, 50, 5);
                q->uid = 2;
                q->priority = -10;
                int i = rig_submit(&r, q), steps = 0, ms;
                do {
                    rig_step(&r, &ms);
                    steps++;
                } while (r.req[i].n_end == 0 && !seq_active(sched_find_request(r.e, r.req[i].id)));
                ck_assert_int_le(steps, batch == 1 ? 40 : 1); /* admit.c: TURN_STEPS, and a prompt */
                ck_assert_int_le(steps_to_first(&r, i), 8); /* others' prompts, if some are being read */
                rig_run_tokens(&r, i, 5);
            }
            rig_run(&r);
            for (int i = 0; i < FLOOD; i++) {
                ck_assert_int_eq(r.req[i].n_token, LONG);
                if (batch > 1 || late)
                    ck_assert_mem_eq(text[i], r.req[i].token, LONG * sizeof(int32_t));
                else
                    memcpy(text[i] = malloc(LONG * sizeof(int32_t)), r.req[i].token, LONG * sizeof(int32_t));
            }
            stop(&r);
        }
    for (int i = 0; i < FLOOD; i++)
        free(text[i]);
}
END_TEST

/* A user, and a connection, may have so much memory, in sequences and in those that wait; their own idle sessions make room. */
START_TEST(limits_of_memory)
{
    static const struct {
        int uid, conn;
        enum skv_code of_user, of_conn; /* under which limit it ends how */
    } asked[] = {
        { 1, 1, SKV_OK, SKV_OK },         { 1, 1, SKV_OK, SKV_OK },
        { 1, 1, SKV_OVERLOADED, SKV_OVERLOADED }, { 1, 2, SKV_OVERLOADED, SKV_OK },
        { 2, 3, SKV_OK, SKV_OK },
    };
    enum { N = sizeof asked / sizeof *asked };
    int64_t one = rig_pages_needed("full", -1, 300 + 20) * (int64_t)rig_page_bytes();

    for (int by_conn = 0; by_conn < 2; by_conn++) {
        struct engine_config cfg;
        struct rig r;
        int k[N];

        rig_config(&cfg);
        cfg.kv.policy = "full";
        cfg.kv_memory = 16 * one;
        *(by_conn ? &cfg.max_kv_connection : &cfg.max_kv_user) = 5 * one / 2;
        rig_start(&r, &cfg);
        for (int i = 0; i < N; i++) {
            struct engine_request *q = rig_generate(300, (uint32_t)i, 20);
            q->uid = (uint32_t)asked[i].uid;
            q->conn = (uint64_t)asked[i].conn;
            k[i] = rig_submit(&r, q);
        }
        rig_run(&r);
        for (int i = 0; i < N; i++)
            ck_assert_int_eq(r.req[k[i]].code, by_conn ? asked[i].of_conn : asked[i].of_user);
        int large = submit_of(&r, 1, 900, 7, 20);
        rig_run(&r);
        ck_assert_int_eq(r.req[large].code, SKV_TOO_LARGE);
        for (int i = 0; i < 4; i++) { /* each leaves a session, the oldest of which goes */
            static const char *const name[] = { "a", "b", "c", "a" };
            int s = submit_session(&r, 1, 290, (uint32_t)(20 + i), name[i]);
            rig_run(&r);
            ck_assert_int_eq(r.req[s].code, i < 3 ? SKV_OK : SKV_NOT_FOUND);
        }
        stop(&r);
    }
}
END_TEST

/* Users whose ids have the last bits in common are not one: neither in the queue nor in the step. */
START_TEST(ids_told_apart)
{
    static const uint32_t alike[] = { 1 + 256, 1 + 1024, 1 + 65536, 1 + (1u << 20), 1 + (1u << 31) };
    enum { N = sizeof alike / sizeof *alike };
    struct engine_config cfg;
    struct rig r;
    int late[N], ms;

    rig_config(&cfg);
    cfg.max_batch = 8;
    cfg.max_sequences = 64;
    cfg.queue_len = 32;
    rig_start(&r, &cfg);
    for (int i = 0; i < 40; i++)
        submit_of(&r, 1, 20, (uint32_t)i, 200);
    ck_assert_int_eq(r.req[23].n_end, 0); /* three quarters of the queue */
    ck_assert_int_eq(r.req[24].code, SKV_OVERLOADED);
    for (int k = 0; k < N; k++)
        ck_assert(!rig_ended(&r, late[k] = submit_of(&r, alike[k], 20, (uint32_t)(100 + k), 200)));
    for (int i = 0; i < 3; i++)
        rig_step(&r, &ms);
    for (int k = 0; k < N; k++) /* six users, eight places */
        ck_assert(seq_active(sched_find_request(r.e, r.req[late[k]].id)));
    rig_run(&r);
    for (int i = 0; i < USERS_BUCKETS; i++)
        ck_assert_ptr_null(r.e->users.bucket[i]); /* all have left */
    stop(&r);
}
END_TEST

/* Users who come, ask one thing and leave, one after the other, with a single place: who stays and waits has his turn still. */
START_TEST(passers_by)
{
    struct engine_config cfg;
    struct rig r;
    int ms, last = -1, n = 0;

    rig_config(&cfg);
    cfg.max_batch = 1;
    cfg.max_sequences = 32;
    rig_start(&r, &cfg);
    for (int i = 0; i < 5; i++)
        submit_of(&r, 1, 20, (uint32_t)i, 8);
    while (!rig_ended(&r, 4) && n < 100) {
        if (last < 0 || r.req[last].n_token > 0) { /* the next is there before this one is done */
            last = submit_of(&r, (uint32_t)(2 + n), 20, (uint32_t)(100 + n), 8);
            n++;
        }
        rig_step(&r, &ms);
    }
    ck_assert_int_le(n, 16); /* one or two of theirs to each of his */
    rig_run(&r);
    stop(&r);
}
END_TEST

/* More users than places, in long answers, and one of them with many: all get as many tokens, within a turn. */
START_TEST(turns)
{
    for (int batch = 1; batch <= 3; batch++) {
        struct engine_config cfg;
        struct rig r;
        int ms, user[4], first;
        rig_config(&cfg);
        cfg.max_batch = batch;
        cfg.max_sequences = 32;
        rig_start(&r, &cfg);
        for (int i = 0; i < 5; i++)
            submit_of(&r, 1, 20, (uint32_t)i, 600);
        rig_run_tokens(&r, 0, 10);
        for (int u = 0; u < 3; u++)
            user[u] = submit_of(&r, (uint32_t)(2 + u), 20, (uint32_t)(10 + u), 400);
        while (r.req[user[0]].n_token < 300)
            rig_step(&r, &ms);
        fine(&r);
        first = 0;
        for (int i = 0; i < 5; i++)
            first += r.req[i].n_token;
        ck_assert_int_ge(first, 300 - 40);
        ck_assert_int_le(first, 300 + 64 * batch);
        for (int u = 1; u < 3; u++) {
            ck_assert_int_ge(r.req[user[u]].n_token, 300 - 40);
            ck_assert_int_le(r.req[user[u]].n_token, 300 + 64);
        }
        rig_run(&r);
        for (int i = 0; i < r.n; i++)
            ck_assert_int_eq(r.req[i].code, SKV_OK);
        stop(&r);
    }
}
END_TEST

/* Sequences whose reader has stopped fill the batch: others don't wait for it. */
START_TEST(paused_give_place)
{
    struct engine_config cfg;
    struct rig r;
    int ms;

    rig_config(&cfg);
    cfg.max_batch = 3;
    rig_start(&r, &cfg);
    for (int i = 0; i < 3; i++)
        submit_of(&r, 1, 20, (uint32_t)i, 50);
    rig_run_tokens(&r, 2, 5);
    for (int i = 0; i < 3; i++)
        engine_pause(r.e, r.req[i].id);
    for (int i = 0; i < 3; i++)
        submit_of(&r, 2, 20, (uint32_t)(10 + i), 30);
    ck_assert_int_le(steps_to_first(&r, 5), 2);
    while (!rig_ended(&r, 3) || !rig_ended(&r, 4) || !rig_ended(&r, 5))
        rig_step(&r, &ms);
    for (int i = 0; i < 3; i++)
        engine_resume(r.e, r.req[i].id);
    rig_run(&r);
    for (int i = 0; i < 6; i++)
        ck_assert_int_eq(r.req[i].n_token, i < 3 ? 50 : 30);
    stop(&r);
}
END_TEST

/* Long answers of one user take all the memory that one user may. Once there is another one, that is not all: its request
 * starts at once. Alone, the first may have everything. */
START_TEST(pool_left_to_others)
{
    for (int others = 0; others < 2; others++) {
        struct engine_config cfg;
        struct rig r;
        int ms, running = 0;
        const struct seq *s;
        rig_config(&cfg);
        cfg.kv.policy = "full";
        cfg.max_sequences = cfg.max_batch = 64;
        cfg.kv_memory = 16 * rig_pages_needed("full", -1, 320) * (int64_t)rig_page_bytes();
        rig_start(&r, &cfg);
        if (others) {
            submit_of(&r, 2, 10, 99, 1);
            rig_run(&r);
        }
        for (int i = 0; i < 40; i++)
            submit_of(&r, 1, 20, (uint32_t)i, 300);
        rig_step(&r, &ms);
        TAILQ_FOREACH(s, &r.e->seqs, link)
            running += seq_running(s);
        ck_assert_int_eq(running, others ? 14 : 16);
        int late = submit_of(&r, 2, 20, 100, 200);
        if (others)
            ck_assert_int_le(steps_to_first(&r, late), 2);
        rig_run(&r);
        ck_assert_int_eq(r.req[late].code, SKV_OK);
        stop(&r);
    }
}
END_TEST

static int count_running(const struct rig *r)
{
    const struct seq *s;
    int n = 0;

    TAILQ_FOREACH(s, &r->e->seqs, link)
        n += seq_running(s);
    return n;
}

/* One user takes all the memory, or all the lanes, that one may; the other was never seen before. Its first token is there in the
 * second step; without a reserve it waits for an end. The reserve costs the one a lane, but nothing of kv_memory. */
START_TEST(stranger_has_room)
{
    static const char *const policy[] = { "full", "sparse" };

    for (int p = 0; p < 2; p++)
        for (int by_lanes = 0; by_lanes < 2; by_lanes++) {
            int most = 0;
            for (int reserve = 0; reserve < 2; reserve++) {
                struct engine_config cfg;
                struct rig r;
                int ms;
                rig_config(&cfg);
                cfg.kv.policy = policy[p];
                cfg.kv.budget = p == 0 ? -1 : 64;
                cfg.kv_reserve = reserve ? 320 : 0;
                cfg.max_sequences = cfg.max_batch = by_lanes ? 16 : 64;
                int64_t each = rig_pages_needed(policy[p], cfg.kv.budget, 320);
                cfg.kv_memory = (by_lanes ? 64 : 16) * each * (int64_t)rig_page_bytes();
                rig_start(&r, &cfg);
                for (int i = 0; i < 60; i++)
                    submit_of(&r, 1, 20, (uint32_t)i, 300);
                for (int i = 0; i < 5; i++)
                    rig_step(&r, &ms);
                int had = count_running(&r);
                if (reserve)
                    ck_assert_int_eq(had, most - by_lanes);
                most = had;
                int late = submit_of(&r, 2, 20, 100, 290);
                int steps = steps_to_first(&r, late);
                ck_assert_msg(reserve ? steps <= 2 : steps > 100, "%s, lanes %d, reserve %d: %d steps", policy[p], by_lanes, reserve,
                              steps);
                rig_run(&r);
                ck_assert_int_eq(r.req[late].code, SKV_OK);
                stop(&r);
            }
        }
}
END_TEST

/* With a reserve larger than the pool: an eighth is what it comes to, beside kv_memory when it was there from the start, of it when it
 * was set later; and who is alone may still ask for everything at once. */
START_TEST(reserve_is_bounded)
{
    for (int later = 0; later < 2; later++) {
        struct engine_config cfg;
        struct rig r;
        int ms;

        rig_config(&cfg);
        cfg.kv.policy = "full";
        cfg.kv_reserve = later ? 0 : 1 << 20;
        cfg.max_sequences = cfg.max_batch = 64;
        cfg.kv_memory = 16 * rig_pages_needed("full", -1, 128) * (int64_t)rig_page_bytes();
        rig_start(&r, &cfg);
        ck_assert_int_eq(pages_total(r.e->pages), core_pages(r.e) * (later ? 8 : 9) / 8);
        r.e->cfg.kv_reserve = 1 << 20;
        int all = submit_of(&r, 1, 2000, 1, 48);
        rig_run(&r);
        ck_assert_int_eq(r.req[all].code, SKV_OK);
        for (int i = 0; i < 40; i++)
            submit_of(&r, 1, 28, (uint32_t)i, 100);
        rig_step(&r, &ms);
        ck_assert_int_eq(count_running(&r), later ? 14 : 16);
        rig_run(&r);
        stop(&r);
    }
}
END_TEST

/* One user's sessions hold the whole pool, and all of them go on at once: one runs, the others wait with what they hold. A
 * stranger has room at once all the same; whose session it cost is told. */
START_TEST(stranger_before_waiting_sessions)
{
    enum { SESSIONS = 16 };
    struct engine_config cfg;
    struct rig r;
    char name[16];
    int ms, first, failed = 0;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.max_sequences = cfg.max_batch = 64;
    cfg.kv_memory = SESSIONS * rig_pages_needed("full", -1, 320) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    for (int i = 0; i < SESSIONS; i++) {
        snprintf(name, sizeof name, "s%d", i);
        submit_session(&r, 1, 316, (uint32_t)i, name);
        rig_run(&r);
    }
    first = r.n;
    for (int i = 0; i < SESSIONS; i++) {
        struct engine_request *q = rig_generate(20, (uint32_t)i, 300);
        q->uid = 1;
        snprintf(name, sizeof name, "s%d", i);
        q->session = strdup(name);
        rig_submit(&r, q);
    }
    for (int i = 0; i < 3; i++)
        rig_step(&r, &ms);
    ck_assert_int_le(count_running(&r), 2);
    int late = submit_of(&r, 2, 20, 100, 290);
    ck_assert_int_le(steps_to_first(&r, late), 2);
    rig_run(&r);
    ck_assert_int_eq(r.req[late].code, SKV_OK);
    for (int i = first; i < late; i++)
        failed += r.req[i].code == SKV_NOT_FOUND;
    ck_assert_int_ge(failed, 1);
    stop(&r);
}
END_TEST

/* One user's longest prompts are being read, one after the other. Another's first prompt, too long to be called short, is read
 * beside them, a unit of theirs to each of its own. */
START_TEST(strangers_long_prompt)
{
    enum { LONG = 2000, LATE = 900 };
    int64_t alone = 0;

    for (int flood = 0; flood < 2; flood++) {
        struct engine_config cfg;
        struct rig r;
        int ms;
        rig_config(&cfg);
        cfg.context = 4096;
        cfg.step_ms = 1;
        cfg.kv_reserve = 1024;
        rig_start(&r, &cfg);
        for (int i = 0; flood && i < 6; i++)
            submit_of(&r, 1, LONG, (uint32_t)i, 20);
        for (int i = 0; flood && i < 3; i++)
            rig_step(&r, &ms);
        int late = submit_of(&r, 2, LATE, 100, 10);
        rig_run(&r);
        int64_t took = r.req[late].t_first - r.req[late].t_submit;
        if (flood) {
            ck_assert_int_lt(took, 3 * alone); /* the longer one's units are the longer ones */
            for (int i = 0; i < 6; i++)
                ck_assert_int_gt(r.req[i].order, r.req[late].order);
        }
        alone = took;
        stop(&r);
    }
}
END_TEST

/* A request for the whole pool that waits for its own user's long answers does not hold up other users. */
START_TEST(giant_stops_its_own)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = rig_pages_needed("full", -1, 1300) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    submit_of(&r, 1, 20, 1, 500);
    rig_run_tokens(&r, 0, 3);
    for (int i = 0; i < 20; i++) /* more than are tried in a round */
        submit_of(&r, 1, 1250, (uint32_t)(2 + i), 20);
    for (int i = 0; i < 60; i++) { /* more than pass it by */
        int k = submit_of(&r, 2, 20, (uint32_t)(100 + i), 2);
        ck_assert_int_le(steps_to_first(&r, k), 3);
    }
    ck_assert(!rig_ended(&r, 0));
    rig_run(&r);
    for (int i = 0; i < r.n; i++)
        ck_assert_int_eq(r.req[i].code, SKV_OK);
    stop(&r);
}
END_TEST

/* A user begins session after session: pages or lanes run out, and its own oldest go. The other's one session stays. */
START_TEST(own_sessions_give_way)
{
    for (int by_lanes = 0; by_lanes < 2; by_lanes++) {
        struct engine_config cfg;
        struct rig r;
        char name[16];
        rig_config(&cfg);
        cfg.kv.policy = "full";
        cfg.max_sequences = by_lanes ? 8 : 64;
        cfg.kv_memory = 16 * rig_pages_needed("full", -1, 256) * (int64_t)rig_page_bytes();
        rig_start(&r, &cfg);
        int kept = submit_session(&r, 1, 200, 1, "mine");
        rig_run(&r);
        for (int i = 0; i < 40; i++) {
            snprintf(name, sizeof name, "s%d", i);
            int k = submit_session(&r, 2, by_lanes ? 20 : 200, (uint32_t)i, name);
            rig_run(&r);
            ck_assert_int_eq(r.req[k].code, SKV_OK);
        }
        int all = submit_of(&r, 2, 1900, 77, 100); /* more than is left beside it: its own can't make room enough */
        rig_run(&r);
        ck_assert_int_eq(r.req[all].code, SKV_OK);
        kept = submit_session(&r, 1, 10, 2, "mine");
        int lost = submit_session(&r, 2, 10, 2, "s0");
        rig_run(&r);
        ck_assert_int_eq(r.req[kept].code, SKV_OK);
        ck_assert_int_eq(r.req[lost].code, SKV_NOT_FOUND);
        stop(&r);
    }
}
END_TEST

/* What is beside another user's session is not enough for a request, and nothing runs that could end: it is refused, at once. */
START_TEST(no_room_beside_sessions)
{
    struct engine_config cfg;
    struct rig r;

    rig_config(&cfg);
    cfg.kv.policy = "full";
    cfg.kv_memory = rig_pages_needed("full", -1, 1500) * (int64_t)rig_page_bytes();
    rig_start(&r, &cfg);
    submit_session(&r, 1, 300, 1, "mine");
    rig_run(&r);
    int all = submit_of(&r, 2, 1400, 2, 20), some = submit_of(&r, 2, 700, 3, 20);
    rig_run(&r);
    ck_assert_int_eq(r.req[all].code, SKV_OVERLOADED);
    ck_assert_int_eq(r.req[some].code, SKV_OK);
    int mine = submit_session(&r, 1, 1000, 4, "mine"); /* its own may grow */
    rig_run(&r);
    ck_assert_int_eq(r.req[mine].code, SKV_OK);
    some = submit_of(&r, 2, 700, 5, 20); /* now it has more than half, and goes */
    rig_run(&r);
    ck_assert_int_eq(r.req[some].code, SKV_OK);
    mine = submit_session(&r, 1, 10, 6, "mine");
    rig_run(&r);
    ck_assert_int_eq(r.req[mine].code, SKV_NOT_FOUND);
    stop(&r);
}
END_TEST

/* One user loses more sessions than are remembered: another's lost one is still told. */
START_TEST(lost_sessions_remembered)
{
    struct engine_config cfg;
    struct rig r;
    char name[16];
    int ms;

    rig_config(&cfg);
    rig_start(&r, &cfg);
    for (int i = 0; i < 2 * LOST_SESSIONS + 4; i++) {
        snprintf(name, sizeof name, "s%d", i);
        int k = submit_session(&r, i < 4 ? 1 : 2, 10, (uint32_t)i, name);
        rig_run(&r);
        engine_kill(r.e, r.req[k].id);
        rig_step(&r, &ms);
    }
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "s%d", i);
        for (int again = 0; again < 2; again++) { /* said once */
            int k = submit_session(&r, 1, 10, 1, name);
            rig_run(&r);
            ck_assert_int_eq(r.req[k].code, again ? SKV_OK : SKV_NOT_FOUND);
        }
    }
    for (int i = 4; i < 2 * LOST_SESSIONS + 4; i += 2 * LOST_SESSIONS - 1) { /* the oldest is forgotten, not the newest */
        snprintf(name, sizeof name, "s%d", i);
        int k = submit_session(&r, 2, 10, 1, name);
        rig_run(&r);
        ck_assert_int_eq(r.req[k].code, i < LOST_SESSIONS ? SKV_OK : SKV_NOT_FOUND);
    }
    stop(&r);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sched_users");
    TCase *c = tcase_create("sched_users");
    SRunner *runner;
    int failed;

    tcase_set_timeout(c, 240);
    tcase_add_test(c, full_batch_shared);
    tcase_add_test(c, ids_told_apart);
    tcase_add_test(c, passers_by);
    tcase_add_test(c, turns);
    tcase_add_test(c, paused_give_place);
    tcase_add_test(c, pool_left_to_others);
    tcase_add_test(c, stranger_has_room);
    tcase_add_test(c, reserve_is_bounded);
    tcase_add_test(c, stranger_before_waiting_sessions);
    tcase_add_test(c, strangers_long_prompt);
    tcase_add_test(c, giant_stops_its_own);
    tcase_add_test(c, own_sessions_give_way);
    tcase_add_test(c, no_room_beside_sessions);
    tcase_add_test(c, limits_of_memory);
    tcase_add_test(c, lost_sessions_remembered);
    suite_add_tcase(s, c);
    runner = srunner_create(s);
    srunner_run_all(runner, CK_NORMAL);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? 0 : 1;
}
