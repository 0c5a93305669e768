/* test_kv.c - what the KV memory promises, promise by promise, with a tiny random model on the CPU: the same kept sets alone and among 20 and
 * however slices fall; that freed pages are never read; the peak of a prefill, and what is held after it; pins and the system turn;
 * heads of different lengths; bytes; a refusal with numbers. With either cache. */
#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/core.h"
#include "engine/step.h"
#include "kernels/cpu/cpu.h"
#include "tests/engine_client.h"
#include "tests/random_model.h"

#define MANY 20

static char dir[] = "/tmp/skvd-kv-XXXXXX";
static char model[64];

static const char *const policies[] = { "full", "streaming", "snapkv", "pyramid", "h2o", "tova", "article", "sparse" };
enum { POLICIES = sizeof policies / sizeof *policies, SPARSE = POLICIES - 1 };
static const char *const dtypes[] = { "bf16", "int8" };

static struct engine_config config(const char *dtype)
{
    struct engine_config c = client_config(model);

    c.kv.dtype = dtype;
    return c;
}

static struct engine_request *ask(int which, int n, int max_tokens, const char *session)
{
    int32_t ids[4096];

    client_prompt(which, n, ids);
    struct engine_request *q = client_generate(ids, n, max_tokens);
    q->session = session != NULL ? strdup(session) : NULL;
    return q;
}

static void ok(const struct client_reply *r)
{
    ck_assert_msg(r->code == SKV_OK, "%s", r->message);
}

static void call(struct engine *e, struct engine_request *take)
{
    struct client_reply *r = client_call(e, take);

    ok(r);
    client_reply_free(r);
}

/* ---- kept sets ------------------------------------------------------------------------------------------------ */

static const int lengths[MANY] = { 1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 200, 255, 256, 257, 300, 511, 512, 513, 700, 900 };

static struct engine_request *one_of_many(int i, const char *policy)
{
    char name[16];

    snprintf(name, sizeof name, "s%d", i);
    struct engine_request *q = ask(i, lengths[i], 30 + i, name);
    client_set_kv(q, policy, strcmp(policy, "full") == 0 ? -1 : 96);
    return q;
}

/* Positions and scores, bit by bit. */
static void same_kept(struct engine *a, struct engine *b, const char *session)
{
    struct client_reply *x = client_kept(a, session), *y = client_kept(b, session);
    int heads = x->answer->kept_layers * x->answer->kept_heads;

    ck_assert_int_eq(x->answer->kept_n, y->answer->kept_n);
    for (int h = 0; h < heads; h++) {
        const struct engine_kept_head *p = &x->answer->kept[h], *q = &y->answer->kept[h];
        ck_assert_int_eq(p->n, q->n);
        ck_assert_mem_eq(p->pos, q->pos, (size_t)p->n * sizeof *p->pos);
        ck_assert_mem_eq(p->score, q->score, (size_t)p->n * sizeof *p->score);
    }
    client_reply_free(x);
    client_reply_free(y);
}

/* One after the other in long slices on one thread, and all at once in the shortest slices on two: the same sets and scores. */
START_TEST(alone_and_among_twenty)
{
    struct engine_config c = config(dtypes[_i % 2]);
    struct engine_request *q[MANY];
    struct client_reply *r[MANY];
    const char *policy = policies[_i / 2];

    c.step_ms = 1;
    struct engine *all = client_start(&c);
    c.step_ms = 10000;
    c.threads = 1;
    struct engine *solo = client_start(&c);
    for (int i = 0; i < MANY; i++) {
        call(solo, one_of_many(i, policy));
        q[i] = one_of_many(i, policy);
    }
    client_call_all(all, q, MANY, r);
    for (int i = 0; i < MANY; i++) {
        char name[16];
        ok(r[i]);
        client_reply_free(r[i]);
        snprintf(name, sizeof name, "s%d", i);
        same_kept(solo, all, name);
    }
    engine_free(solo);
    engine_free(all);
}
END_TEST

/* ---- pages that are free ------------------------------------------------------------------------------------------ */

static struct {
    struct engine *e;
    struct ops ops;
    void (*attn_in)(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot);
    unsigned char *held; /* [n_pages] */
    int64_t pages;       /* spoiled in all */
} spoiler;

/* Every page that is in no table: bytes that are NaN as a number of any kind, and no position. */
static void spoil_free_pages(void)
{
    const struct engine *e = spoiler.e;
    const struct ops_dims *d = &e->model.src.dims;

    memset(spoiler.held, 0, e->kv->n_pages);
    for (int lane = 0; lane < pages_lanes(e->pages); lane++)
        for (int l = 0; l < d->n_layer; l++)
            for (int h = 0; h < d->n_kv; h++) {
                const uint32_t *table = e->kv->table + core_head(e, lane, l, h) * (size_t)e->kv->max_pages;
                for (int64_t k = pages_head_held(e->pages, lane, l, h); k-- > 0;)
                    spoiler.held[table[k]] = 1;
            }
    for (uint32_t i = 0; i < e->kv->n_pages; i++)
        if (!spoiler.held[i]) {
            memset(cpu_page(e->be, i), 0xff, e->kv->page.bytes);
            spoiler.pages++;
        }
}

static void spoil_and_attn_in(void *be, int layer, const struct ops_pass *pass, const float *x, const int32_t *slot)
{
    spoil_free_pages();
    spoiler.attn_in(be, layer, pass, x, slot);
}

/* An engine whose free pages are spoiled before every layer of every pass. */
static struct engine *start_spoiled(const struct engine_config *c)
{
    struct skv_error err;
    struct engine *e = engine_new(c, &err);

    ck_assert_msg(e != NULL, "%s", err.msg);
    spoiler.e = e;
    spoiler.ops = *e->ops;
    spoiler.attn_in = e->ops->attn_in;
    spoiler.ops.attn_in = spoil_and_attn_in;
    spoiler.held = malloc(e->kv->n_pages);
    spoiler.pages = 0;
    e->ops = &spoiler.ops;
    ck_assert_int_eq(pthread_create(&e->thread, NULL, step_thread, e), 0);
    e->thread_started = true;
    return e;
}

static struct engine_request *users_request(uint32_t uid, int i, const char *policy)
{
    struct engine_request *q = one_of_many(i, policy);

    q->uid = uid;
    q->logprobs = 3;
    return q;
}

static void same_answer(const struct client_reply *a, const struct client_reply *b)
{
    ok(a);
    ok(b);
    ck_assert_int_eq(a->n_events, b->n_events);
    for (int i = 0; i < a->n_events; i++) {
        ck_assert_int_eq(a->token[i].token, b->token[i].token);
        ck_assert_mem_eq(&a->token[i].logprob, &b->token[i].logprob, sizeof a->token[i].logprob);
        for (int k = 0; k < 3; k++)
            ck_assert_mem_eq(&a->token[i].top[k].logprob, &b->token[i].top[k].logprob, sizeof a->token[i].top[k].logprob);
    }
}

/* What others left in the pool, or leave there while one is at work, is in nobody's answer, distribution, kept set or scores: free
 * pages full of NaN change no bit of them. Lengths: within a page, its edge, one that prefills in tiles and sheds most of it. */
START_TEST(freed_pages_are_not_read)
{
    static const int mine[] = { 2, 3, 8, 19 }, others[] = { 18, 1, 12 };
    enum { MINE = 4, OTHERS = 3 };
    struct engine_config c = config(_i % 3 < 2 ? dtypes[_i % 3] : NULL);
    const char *policy = policies[_i / 3];
    struct engine_request *q[MINE + OTHERS];
    struct client_reply *r[MINE + OTHERS];

    c.compute_f32 = _i % 3 == 2;
    c.kv_memory = c.compute_f32 ? 8 << 20 : 4 << 20;
    struct engine *plain = client_start(&c), *spoiled = start_spoiled(&c);
    for (int i = 0; i < OTHERS; i++) { /* these have come and gone */
        q[i] = users_request(1, others[i], policy);
        free(q[i]->session);
        q[i]->session = NULL;
    }
    client_call_all(spoiled, q, OTHERS, r);
    for (int i = 0; i < OTHERS; i++)
        client_reply_free(r[i]);
    for (int i = 0; i < MINE + OTHERS; i++)
        q[i] = i < MINE ? users_request(2, mine[i], policy) : users_request(1, others[i - MINE], policy);
    client_call_all(spoiled, q, MINE + OTHERS, r);
    for (int i = 0; i < MINE + OTHERS; i++) {
        if (i < MINE) {
            char name[16];
            struct client_reply *alone = client_call(plain, users_request(2, mine[i], policy));
            same_answer(alone, r[i]);
            client_reply_free(alone);
            snprintf(name, sizeof name, "s%d", mine[i]);
            same_kept(plain, spoiled, name);
        }
        client_reply_free(r[i]);
    }
    ck_assert_int_gt(spoiler.pages, 0);
    engine_free(plain);
    engine_free(spoiled);
    free(spoiler.held);
}
END_TEST

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* An engine without its thread, and one sequence ready for its prefill. */
static struct seq *ready(struct engine *e, struct engine_request *take)
{
    struct skv_error err;
    uint64_t id;

    ck_assert_int_eq(engine_submit(e, take, &id, &err), 0);
    for (int i = 0; i < 1000; i++) {
        struct seq *s = sched_find_request(e, id);
        if (s != NULL && s->state == SEQ_READY)
            return s;
        command_run_all(e);
        text_run(e);
        sched_admit(e);
    }
    ck_abort_msg("not admitted");
    return NULL;
}

/* Unit by unit through a prompt: never more pages than the layers before hold of their budgets, and the layer in hand whole. At the
 * end just what the plan says, or a page a head less where the slot for the next pair opens a page. */
static void watch_prefill(struct engine *e, struct seq *s)
{
    const struct ops_dims *d = &e->model.src.dims;
    int64_t n = s->n_prompt, peak = 0, expect = 0, before = 0, after = 0, open = 0;

    for (int l = 0; l < d->n_layer; l++) {
        int64_t b = s->plan.budget[l], kept = b == 0 || b > n ? n : b;
        int64_t at = before + d->n_kv * pages_for(n);
        expect = at > expect ? at : expect;
        before += d->n_kv * pages_for(kept);
        open += b != 0 && b < n ? d->n_kv * (pages_for(b + 1) - pages_for(b)) : 0;
    }
    after = before;
    while (s->state != SEQ_DECODE) {
        ck_assert(prefill_slice(e, 0));
        int64_t used = pages_used(e->pages);
        peak = used > peak ? used : peak;
        ck_assert(s->state == SEQ_DECODE || used <= s->reserved + s->transient);
    }
    ck_assert_int_eq(peak, expect);
    ck_assert_int_le(expect, kvplan_pages(&s->plan, n) + kvplan_transient(&s->plan, n));
    ck_assert_int_eq(pages_used(e->pages), after);
    ck_assert_int_eq(after + open, kvplan_pages(&s->plan, n));
}

START_TEST(peak_is_one_layer_more)
{
    static const int budgets[] = { 63, 64, 100, 700 };
    struct engine_config c = config(dtypes[_i % 2]);
    const char *policy = policies[_i / 2];
    struct skv_error err;

    for (int k = 0; k < 4; k++)
        for (int full = 0; full < 3; full++) {
            struct engine *e = engine_new(&c, &err);
            ck_assert_msg(e != NULL, "%s", err.msg);
            struct engine_request *q = ask(k, 600, 3, NULL);
            client_set_kv(q, policy, strcmp(policy, "full") == 0 ? -1 : budgets[k]);
            q->kv.full_layers = full;
            watch_prefill(e, ready(e, q));
            step_end(e);
            ck_assert_int_eq(pages_used(e->pages), 0);
            engine_free(e);
        }
}
END_TEST

/* ---- what must stay --------------------------------------------------------------------------------------------- */

static void add_message(struct engine_request *q, const char *role, const char *text)
{
    struct engine_message *m = &q->messages[q->n_messages++];

    m->role = (struct engine_text){ strdup(role), strlen(role) };
    m->content = (struct engine_text){ strdup(text), strlen(text) };
}

static struct engine_request *chat(const char *system, int words, int max_tokens, const char *session)
{
    struct engine_request *q = engine_request_new(ENGINE_GENERATE);
    char text[2000];
    size_t n = 0;

    for (int i = 0; i < words; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%c%d ", 'a' + i * 7 % 26, i * 37 % 100);
    q->messages = calloc(2, sizeof *q->messages);
    q->n_messages = 0;
    if (system != NULL)
        add_message(q, "system", system);
    add_message(q, "user", text);
    q->max_tokens = max_tokens;
    q->sampling.temperature = 0;
    q->ignore_eos = true;
    q->session = strdup(session);
    return q;
}

/* All of [from, to) is in every head of every layer. */
static void holds(struct engine *e, const char *session, int from, int to)
{
    struct client_reply *k = client_kept(e, session);

    for (int h = 0; h < k->answer->kept_layers * k->answer->kept_heads; h++) {
        const struct engine_kept_head *p = &k->answer->kept[h];
        int have = 0;
        for (int i = 0; i < p->n; i++)
            have += p->pos[i] >= from && p->pos[i] < to;
        ck_assert_msg(have == to - from, "head %d holds %d of [%d, %d)", h, have, from, to);
        ck_assert_int_lt(p->n, k->answer->kept_n); /* and something went */
    }
    client_reply_free(k);
}

/* The system turn outlives the prompt's selection, decode steps and the session's next turns under every policy. */
START_TEST(system_turn_stays)
{
    static const char rules[] = "Answer in one word and never name the animal that begins with z.";
    struct engine_config c = config(dtypes[_i % 2]);
    struct engine *e = client_start(&c);
    const char *policy = policies[1 + _i / 2];
    struct engine_request *q = engine_request_new(ENGINE_APPLY_TEMPLATE);

    q->messages = calloc(1, sizeof *q->messages);
    q->n_messages = 0;
    q->add_generation_prompt = false;
    add_message(q, "system", rules);
    struct client_reply *r = client_call(e, q);
    ok(r);
    int turn = r->answer->n_tokens - 1; /* a line break after the turn may join what follows */
    client_reply_free(r);
    q = chat(rules, 150, 0, "talk");
    client_set_kv(q, policy, 96);
    q->kv.full_layers = 0;
    q->pin_system = true;
    call(e, q);
    holds(e, "talk", 0, turn);
    for (int k = 0; k < 3; k++) {
        call(e, chat(NULL, 60, 50, "talk"));
        holds(e, "talk", 0, turn);
    }
    engine_free(e);
}
END_TEST

/* Ranges that are pinned stay through a session, also where there are more of them than the budget holds. */
START_TEST(pins_stay)
{
    struct engine_config c = config(dtypes[_i % 2]);
    struct engine *e = client_start(&c);
    const char *policy = policies[1 + _i / 2];
    static const struct engine_range pin[3] = { { 40, 60 }, { 61, 62 }, { 150, 250 } };
    struct engine_request *q = ask(1, 400, 40, "p");

    client_set_kv(q, policy, 64);
    q->kv.full_layers = 0;
    q->pin = malloc(sizeof pin);
    memcpy(q->pin, pin, sizeof pin);
    q->n_pin = 3;
    call(e, q);
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 3; i++)
            holds(e, "p", pin[i].from, pin[i].to);
        call(e, ask(2, 100, 60, "p"));
    }
    engine_free(e);
}
END_TEST

/* ---- heads that compete -------------------------------------------------------------------------------------------- */

/* Budgets a head (Ada-KV): lengths differ, a layer's sum is exact, what follows is the same in a batch, and all pages come back. */
START_TEST(heads_of_different_lengths)
{
    struct engine_config c = config(dtypes[_i]);
    struct engine_request *q[6];
    struct client_reply *r[6];
    int differ = 0;

    c.kv.policy = "snapkv";
    c.kv.budget = 80;
    struct engine *solo = client_start(&c), *all = client_start(&c);
    solo->params.head_floor = all->params.head_floor = 0.25f; /* before anything was asked of them */
    for (int i = 0; i < 6; i++) {
        char name[16];
        snprintf(name, sizeof name, "h%d", i);
        call(solo, ask(i, 300 + i, 50, name));
        q[i] = ask(i, 300 + i, 50, name);
    }
    client_call_all(all, q, 6, r);
    for (int i = 0; i < 6; i++) {
        char name[16];
        ok(r[i]);
        client_reply_free(r[i]);
        snprintf(name, sizeof name, "h%d", i);
        same_kept(solo, all, name);
        struct client_reply *k = client_kept(all, name);
        for (int l = 0; l < k->answer->kept_layers; l++) {
            int sum = 0;
            for (int h = 0; h < k->answer->kept_heads; h++) {
                sum += k->answer->kept[l * k->answer->kept_heads + h].n;
                differ += k->answer->kept[l * k->answer->kept_heads + h].n != 80;
            }
            ck_assert_int_eq(sum, 80 * k->answer->kept_heads);
        }
        client_reply_free(k);
    }
    ck_assert_int_gt(differ, 0);
    engine_free(solo);
    engine_free(all);
}
END_TEST

/* ---- bytes ------------------------------------------------------------------------------------------------------------- */

/* The default plan at 4000 tokens of the default model's shape: at most a fifth of the slots, and with the int8 cache at most 1/9.5 of
 * a 16-bit full cache's bytes, whole pages with all that is in them counted. */
START_TEST(bytes_of_the_default_plan)
{
    struct ops_dims d = { .n_layer = 30, .n_head = 9, .n_kv = 3, .head_dim = 64, .max_context = 8192 };
    struct kern_page_layout bf16, int8;
    struct kvplan plan, full;

    ck_assert_int_eq(kvplan_init(&plan, &policy_sparse, &policy_sparse.defaults, NULL, 0, &d, NULL), 0);
    ck_assert_int_eq(kvplan_init(&full, &policy_full, &policy_full.defaults, NULL, 0, &d, NULL), 0);
    kern_page_layout_init(&bf16, KERN_KV_BF16, d.head_dim);
    kern_page_layout_init(&int8, KERN_KV_INT8, d.head_dim);
    double slots = (double)kvplan_slots(&full, 4000) / (double)kvplan_slots(&plan, 4000);
    double bytes = (double)kvplan_slots(&full, 4000) * (double)kern_page_slot_bytes(&bf16);
    double less = bytes / ((double)kvplan_pages(&plan, 4000) * (double)int8.bytes);
    printf("default plan at 4000 tokens: 1/%.2f of the slots, with int8 1/%.2f of the bytes, with bf16 1/%.2f\n", slots, less,
           bytes / ((double)kvplan_pages(&plan, 4000) * (double)bf16.bytes));
    ck_assert(slots >= 5);
    ck_assert(less >= 9.5);
    kvplan_fini(&plan);
    kvplan_fini(&full);
}
END_TEST

/* What a request's result says it held is what the plan says, and what the pool counts. */
START_TEST(results_say_what_is_held)
{
    struct engine_config c = config(dtypes[_i]);
    struct engine *e = client_start(&c);
    struct engine_request *q = ask(3, 2000, 1, "big");

    client_set_kv(q, "sparse", 127);
    struct client_reply *r = client_call(e, q);
    ok(r);
    int heads = e->model.src.dims.n_layer * e->model.src.dims.n_kv;
    ck_assert_int_eq(r->result->slots_full, (int64_t)heads * 2000);
    ck_assert_int_eq(r->result->slots_kept, (int64_t)heads * 127);
    ck_assert_int_eq(r->result->kv_bytes, client_pages_used(e) * (int64_t)e->kv->page.bytes);
    ck_assert_int_eq(client_pages_used(e), heads * 4);
    client_reply_free(r);
    engine_free(e);
}
END_TEST

/* ---- phase 1 speaks ---------------------------------------------------------------------------------------------------- */

struct lines {
    char text[8192];
    size_t n;
};

static void take_line(void *arg, int level, const char *msg)
{
    struct lines *l = arg;

    (void)level;
    l->n += (size_t)snprintf(l->text + l->n, sizeof l->text - l->n, "%s\n", msg);
    l->n = l->n < sizeof l->text ? l->n : sizeof l->text - 1;
}

START_TEST(plan_is_logged_or_refused)
{
    struct engine_config c = config("bf16");
    struct lines l = { .n = 0 };
    struct skv_error err;

    c.log = take_line;
    c.log_arg = &l;
    c.kv.policy = "article";
    c.kv.budget = 128;
    struct engine *e = engine_new(&c, &err);
    ck_assert_msg(e != NULL, "%s", err.msg);
    char want[128];
    snprintf(want, sizeof want, "sequences of 2048 tokens that fit: %lld (a full cache: %lld)",
             (long long)kvplan_fit(&e->plan, pages_total(e->pages), 2048),
             (long long)(pages_total(e->pages) / (pages_for(2048) * e->model.src.dims.n_layer * e->model.src.dims.n_kv)));
    ck_assert_ptr_nonnull(strstr(l.text, "policy article, 3 of 4 layers full, budget 128"));
    ck_assert_msg(strstr(l.text, want) != NULL, "\"%s\" is not in:\n%s", want, l.text);
    step_end(e);
    engine_free(e);
    c.kv_memory = 5000;
    ck_assert_ptr_null(engine_new(&c, &err));
    ck_assert_int_eq(err.code, SKV_NO_MEMORY);
    int heads = 4 * 2; /* the test model's: a page each for 32 tokens */
    snprintf(want, sizeof want, "32 tokens need %d pages", heads);
    ck_assert_msg(strstr(err.msg, want) != NULL, "%s", err.msg);
    ck_assert_ptr_nonnull(strstr(err.msg, "4 KiB is"));
    ck_assert_ptr_nonnull(strstr(err.msg, "--kv-memory"));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kv");
    TCase *c = tcase_create("kv");
    struct random_model m;
    struct skv_error err;

    if (mkdtemp(dir) == NULL)
        return 99;
    snprintf(model, sizeof model, "%s/tiny.gguf", dir);
    random_model_default(&m);
    m.context = 4096;
    m.layers = 4;
    if (random_model_write(&m, model, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 99;
    }
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, alone_and_among_twenty, 0, 2 * POLICIES);
    tcase_add_loop_test(c, freed_pages_are_not_read, 0, 3 * POLICIES);
    tcase_add_loop_test(c, peak_is_one_layer_more, 0, 2 * POLICIES);
    tcase_add_loop_test(c, system_turn_stays, 0, 2 * SPARSE);
    tcase_add_loop_test(c, pins_stay, 0, 2 * SPARSE);
    tcase_add_loop_test(c, heads_of_different_lengths, 0, 2);
    tcase_add_test(c, bytes_of_the_default_plan);
    tcase_add_loop_test(c, results_say_what_is_held, 0, 2);
    tcase_add_test(c, plan_is_logged_or_refused);
    suite_add_tcase(s, c);
    SRunner *sr = srunner_create(s);
    srunner_set_fork_status(sr, CK_NOFORK);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    unlink(model);
    rmdir(dir);
    return failed == 0 ? 0 : 1;
}
