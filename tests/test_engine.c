/* test_engine.c - the engine's behaviour with a tiny random model: the same text whatever runs beside it, memory that adds up,
 * sessions, limits, ends. Without a socket. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/step.h"
#include "engine/thin.h"
#include "tests/engine_client.h"
#include "tests/random_model.h"

static char dir[] = "/tmp/skvd-test-XXXXXX";
static char model[64];

static struct engine_config config(void)
{
    struct engine_config c = client_config(model);

    c.step_ms = 5;
    c.thin = "1:1.5,3:1.2"; /* sparse only; no shape is known of a random model */
    return c;
}

static struct engine_request *ask(int which, int n, int max_tokens)
{
    int32_t ids[4096];

    client_prompt(which, n, ids);
    return client_generate(ids, n, max_tokens);
}

static void same_tokens(const struct client_reply *a, const struct client_reply *b)
{
    ck_assert_msg(a->code == SKV_OK, "%s", a->message);
    ck_assert_msg(b->code == SKV_OK, "%s", b->message);
    ck_assert_int_eq(a->result->n_tokens, b->result->n_tokens);
    ck_assert_mem_eq(a->result->tokens, b->result->tokens, (size_t)a->result->n_tokens * sizeof(int32_t));
}

/* A spread of lengths around pages, tiles and budgets. ThreadSanitizer, which makes all of it tens of times slower, looks for races,
 * and a few requests side by side have those of many. */
#ifdef __SANITIZE_THREAD__
#define MANY 6
static const int lengths[MANY] = { 1, 33, 100, 257, 513, 900 };
#else
#define MANY 20
static const int lengths[MANY] = { 1, 2, 31, 32, 33, 63, 64, 65, 100, 127, 200, 255, 256, 257, 300, 511, 512, 513, 700, 900 };
#endif

static struct engine_request *vary(int i, const char *policy, bool sampled)
{
    struct engine_request *q = ask(i, lengths[i], 24 + i);

    client_set_kv(q, policy, strcmp(policy, "full") == 0 ? -1 : 96);
    if (sampled) {
        q->sampling.temperature = 0.9f;
        q->sampling.seed = 77 + (uint64_t)i;
        q->sampling.seed_set = true;
    }
    return q;
}

static const char *const policies[] = { "full", "streaming", "snapkv", "pyramid", "h2o", "tova", "article", "sparse" };

/* Alone, among 20, and with other slices: the same tokens, by greedy and by seed. */
START_TEST(batch_invariance)
{
    struct engine_config c = config();
    struct engine *e = client_start(&c);
    struct client_reply *solo[MANY], *all[MANY];
    struct engine_request *q[MANY];

    c.step_ms = 1000;
    c.threads = 1;
    struct engine *other = client_start(&c);
    for (int sampled = 0; sampled < 2; sampled++) {
        for (int i = 0; i < MANY; i++)
            solo[i] = client_call(e, vary(i, policies[_i], sampled));
        for (int i = 0; i < MANY; i++)
            q[i] = vary(i, policies[_i], sampled);
        client_call_all(e, q, MANY, all);
        for (int i = 0; i < MANY; i++) {
            struct client_reply *r = client_call(other, vary(i, policies[_i], sampled));
            same_tokens(solo[i], all[i]);
            same_tokens(solo[i], r);
            client_reply_free(r);
            client_reply_free(solo[i]);
            client_reply_free(all[i]);
        }
    }
    ck_assert_int_eq(client_pages_used(e), 0);
    engine_free(e);
    engine_free(other);
}
END_TEST

/* A budget at least as long as the sequence: bit-equal to a full cache, log-probabilities included, with either cache. */
START_TEST(large_budget_is_full)
{
    struct engine_config c = config();

    c.kv.dtype = _i % 2 ? "int8" : "bf16";
    struct engine *e = client_start(&c);
    for (int i = 0; i < MANY; i += 3) {
        struct engine_request *q = vary(i, policies[_i / 2], false), *f = vary(i, "full", false);
        q->kv.budget = lengths[i] + 64 > 520 ? lengths[i] + 64 : 520;
        q->logprobs = f->logprobs = 1;
        struct client_reply *a = client_call(e, q), *b = client_call(e, f);
        same_tokens(a, b);
        ck_assert_mem_eq(a->lp, b->lp, (size_t)a->n_events * sizeof *a->lp);
        client_reply_free(a);
        client_reply_free(b);
    }
    engine_free(e);
}
END_TEST

/* Under a budget: no head above it, protected positions there, alone as in a batch, all pages back at the end. */
START_TEST(budgets_hold)
{
    struct engine_config c = config();
    struct engine *e = client_start(&c);
    struct engine_request *q[6];
    struct client_reply *r[6];

    for (int round = 0; round < 2; round++) {
        int n = round == 0 ? 1 : 6;
        for (int i = 0; i < n; i++) {
            char name[16];
            snprintf(name, sizeof name, "r%d-%d", round, i);
            q[i] = ask(i, 400 + i, 60);
            client_set_kv(q[i], policies[_i], 64);
            q[i]->kv.sink = 4;
            q[i]->kv.recent = 16;
            q[i]->session = strdup(name);
            q[i]->pin = malloc(sizeof *q[i]->pin);
            q[i]->pin[0] = (struct engine_range){ 100, 110 };
            q[i]->n_pin = 1;
        }
        client_call_all(e, q, n, r);
        for (int i = 0; i < n; i++) {
            ck_assert_msg(r[i]->code == SKV_OK, "%s", r[i]->message);
            client_reply_free(r[i]);
        }
    }
    struct client_reply *a = client_kept(e, "r0-0"), *b = client_kept(e, "r1-0");
    int heads = a->answer->kept_layers * a->answer->kept_heads, sum = 0;
    for (int h = 0; h < heads; h++) {
        struct engine_kept_head *k = &a->answer->kept[h], *same = &b->answer->kept[h];
        int have = 0;
        sum += k->n;
        ck_assert_int_eq(k->n, same->n);
        ck_assert_mem_eq(k->pos, same->pos, (size_t)k->n * sizeof *k->pos);
        for (int i = 0; i < k->n; i++) {
            int p = k->pos[i];
            ck_assert(i == 0 || p > k->pos[i - 1]);
            have += p < 4 || (p >= 100 && p < 110) || p > a->answer->kept_n - 1 - 16;
        }
        ck_assert_int_eq(have, 4 + 10 + 16);
    }
    if (_i != 0 && strcmp(policies[_i], "pyramid") != 0 && strcmp(policies[_i], "article") != 0)
        ck_assert_int_eq(sum, heads * 64);
    client_reply_free(a);
    client_reply_free(b);
    engine_free(e);
}
END_TEST

/* A long prompt gets thinner where the setting says: above, heads hold only what a head of the layer below kept or what was among
 * the last; the layers it goes by have more, the sum is the same; without the setting every layer holds its budget. */
START_TEST(thinning)
{
    struct engine_config c = config();
    static bool below[4096];
    int n[2][4], n_prompt = 1200;

    c.kv.policy = "sparse";
    c.kv.budget = 200;
    for (int off = 0; off < 2; off++) {
        c.thin = off ? "off" : "2:1.5";
        struct engine *e = client_start(&c);
        struct engine_request *q = ask(3, n_prompt, 1);
        int above_only = 0;
        q->session = strdup("thin");
        client_reply_free(client_call(e, q));
        struct client_reply *r = client_kept(e, "thin");
        int heads = r->answer->kept_heads;
        ck_assert_int_eq(r->answer->kept_layers, 4);
        memset(below, 0, sizeof below);
        for (int l = 0; l < 4; l++) {
            n[off][l] = 0;
            for (int h = 0; h < heads; h++) {
                struct engine_kept_head *k = &r->answer->kept[l * heads + h];
                n[off][l] += k->n;
                for (int i = 0; i < k->n; i++) {
                    if (l == 1)
                        below[k->pos[i]] = true;
                    above_only += l >= 2 && !below[k->pos[i]] && k->pos[i] < n_prompt - 32;
                }
            }
        }
        ck_assert(off ? above_only > 0 : above_only == 0);
        client_reply_free(r);
        engine_free(e);
    }
    for (int l = 0; l < 4; l++)
        ck_assert_int_eq(n[1][l], 2 * 200);
    ck_assert_int_eq(n[0][0] + n[0][1] + n[0][2] + n[0][3], 4 * 2 * 200);
    ck_assert_int_eq(n[0][1], 2 * 267); /* 3 of 9 shares of 4 * 200, fractions carried */
}
END_TEST

/* Prompts that get thinner, in sessions, beside each other and with other slices. */
START_TEST(thinning_sessions)
{
    struct engine_config c = config();

    c.kv.policy = "sparse";
    c.kv.budget = 100;
    struct engine *e = client_start(&c);
    c.step_ms = 1000;
    c.threads = 1;
    struct engine *other = client_start(&c);
    for (int turn = 0; turn < 3; turn++) {
        struct engine_request *q[4];
        struct client_reply *r[4], *one;
        for (int i = 0; i < 4; i++) {
            q[i] = ask(10 * turn + i, turn == 1 ? 7 : 300 + 200 * i, 30);
            q[i]->session = strdup((const char *const[]){ "a", "b", "c", "d" }[i]);
        }
        client_call_all(e, q, 4, r);
        for (int i = 0; i < 4; i++) {
            struct engine_request *again = ask(10 * turn + i, turn == 1 ? 7 : 300 + 200 * i, 30);
            again->session = strdup((const char *const[]){ "a", "b", "c", "d" }[i]);
            one = client_call(other, again);
            same_tokens(r[i], one);
            client_reply_free(one);
            client_reply_free(r[i]);
        }
    }
    engine_free(e);
    engine_free(other);
}
END_TEST

/* What a setting may say. */
START_TEST(thin_setting)
{
    static const char *const wrong[] = { "", "on", "0:2", "4:2", "2", "2:0.5", "2:x", "2:2,2:2", "3:2,1:2", "1:2,2:2,3:2", "1:2,", "1:2;2:2" };
    struct ops_dims d = { .n_layer = 4 }, smol = { .n_layer = 30, .d_model = 576, .n_head = 9, .n_kv = 3, .n_vocab = 49152 };
    struct policy_thin t[POLICY_THIN];
    struct skv_error err;

    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert_msg(thin_resolve(wrong[i], &d, t, &err) < 0, "\"%s\"", wrong[i]);
        ck_assert_int_eq(err.code, SKV_BAD_CONFIG);
    }
    ck_assert_int_eq(thin_resolve("1:2,3:1.5", &d, t, &err), 0);
    ck_assert_int_eq(t[0].layer * 10 + t[1].layer, 13);
    ck_assert_int_eq(thin_resolve("off", &smol, t, &err), 0);
    ck_assert_int_eq(t[0].layer, 0);
    ck_assert_int_eq(thin_resolve("auto", &d, t, &err), 0);
    ck_assert_int_eq(t[0].layer, 0);
    ck_assert_int_eq(thin_resolve(NULL, &smol, t, &err), 0);
    ck_assert_int_eq(t[0].layer, 8);
}
END_TEST

/* A session's second request gives what one request over all the tokens gives. */
/* In exact arithmetic: what the first answer's steps stored differs from what a prompt stores by how decode and prefill round,
 * and a random model's likeliest tokens are close to one another. */
START_TEST(session_continues)
{
    struct engine_config c = config();
    c.compute_f32 = true;
    struct engine *e = client_start(&c);
    int32_t ids[512];
    struct engine_request *q = ask(1, 150, 20);

    q->session = strdup("talk");
    struct client_reply *a = client_call(e, q);
    ck_assert_msg(a->code == SKV_OK, "%s", a->message);
    q = ask(2, 70, 20);
    q->session = strdup("talk");
    struct client_reply *b = client_call(e, q);
    ck_assert_msg(b->code == SKV_OK, "%s", b->message);
    ck_assert_int_eq(b->result->cached_tokens, 150 + 19);
    client_prompt(1, 150, ids);
    memcpy(ids + 150, a->result->tokens, 20 * sizeof *ids);
    client_prompt(2, 70, ids + 170);
    struct client_reply *whole = client_call(e, client_generate(ids, 240, 20));
    same_tokens(b, whole);

    /* somebody else's session of that name is another one */
    q = ask(3, 10, 5);
    q->session = strdup("talk");
    q->uid = 99;
    struct client_reply *other = client_call(e, q);
    ck_assert_int_eq(other->result->cached_tokens, 0);
    client_reply_free(other);
    client_reply_free(a);
    client_reply_free(b);
    client_reply_free(whole);
    engine_free(e);
}
END_TEST

/* A pool for three at a time: twenty finish all the same, each as if alone; one too large for it is refused at once. */
START_TEST(small_pool)
{
    struct engine_config c = config();
    struct engine *big = client_start(&c);
    struct engine_request *q[MANY];
    struct client_reply *r[MANY];

    c.kv_memory = 300 << 10;
    struct engine *e = client_start(&c);
    for (int i = 0; i < MANY; i++)
        q[i] = ask(i, 60 + i, 30);
    q[5]->max_tokens = 3000;
    client_call_all(e, q, MANY, r);
    for (int i = 0; i < MANY; i++) {
        if (i == 5) {
            ck_assert_int_eq(r[i]->code, SKV_TOO_LARGE);
        } else {
            struct client_reply *solo = client_call(big, ask(i, 60 + i, 30));
            same_tokens(r[i], solo);
            client_reply_free(solo);
        }
        client_reply_free(r[i]);
    }
    ck_assert_int_eq(client_pages_used(e), 0);
    engine_free(e);
    engine_free(big);
}
END_TEST

START_TEST(sessions_make_room)
{
    struct engine_config c = config();
    struct client_reply *r;
    struct engine_request *q;

    c.kv_memory = 300 << 10;
    struct engine *e = client_start(&c);
    for (int i = 0; i < 30; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        q = ask(i, 60, 10);
        q->session = strdup(name);
        r = client_call(e, q);
        ck_assert_msg(r->code == SKV_OK, "%s", r->message);
        client_reply_free(r);
    }
    q = ask(0, 5, 5);
    q->session = strdup("s0");
    r = client_call(e, q);
    ck_assert_int_eq(r->code, SKV_NOT_FOUND); /* said once */
    client_reply_free(r);
    q = ask(0, 5, 5);
    q->session = strdup("s0");
    r = client_call(e, q);
    ck_assert_int_eq(r->code, SKV_OK);
    client_reply_free(r);
    q = ask(0, 5, 5);
    q->session = strdup("s29");
    r = client_call(e, q);
    ck_assert_int_eq(r->code, SKV_OK);
    ck_assert_int_eq(r->result->cached_tokens, 69);
    client_reply_free(r);
    engine_free(e);
}
END_TEST

/* Cancelled before its turn, in its prompt, in its answer: it ends so, the others are unchanged, the pages are back. */
START_TEST(cancel)
{
    struct engine_config c = config();
    struct engine *e = client_start(&c);
    struct engine_request *q[4];
    struct client_reply *r[4], *solo = client_call(e, ask(1, 300, 40));

    for (int i = 0; i < 4; i++) /* the one that is cancelled would go on for long, so that the cancel is in time */
        q[i] = ask(i, i == 0 ? 1500 : 300, i == 2 && _i > 0 ? 3500 : 40);
    client_call_cancel(e, q, 4, r, _i == 0 ? 0 : 2, _i == 0 ? 0 : _i == 1 ? 1 : 20);
    for (int i = 0; i < 4; i++) {
        if (i == (_i == 0 ? 0 : 2)) {
            ck_assert_int_eq(r[i]->code, SKV_CANCELLED);
            ck_assert_int_eq(r[i]->result->n_tokens, r[i]->n_events);
            ck_assert_int_lt(r[i]->n_events, 3500);
        } else if (i == 1) {
            same_tokens(r[i], solo);
        } else {
            ck_assert_int_eq(r[i]->code, SKV_OK);
        }
        client_reply_free(r[i]);
    }
    client_reply_free(solo);
    ck_assert_int_eq(client_pages_used(e), 0);
    engine_free(e);
}
END_TEST

/* Steps by hand until nothing is left to do; the tokens of request id, as they come, go to token [cap]. */
static void step_all(struct engine *e, int steps, uint64_t id, int32_t *token, int *n, int cap)
{
    struct engine_event ev[16];
    int ms, k;

    while (steps-- != 0 && step_once(e, &ms))
        while ((k = engine_events(e, ev, 16)) > 0)
            for (int i = 0; i < k; i++) {
                if (ev[i].type == ENGINE_EV_TOKEN && ev[i].id == id && *n < cap)
                    token[(*n)++] = ev[i].token;
                engine_event_fini(&ev[i]);
            }
}

static uint64_t submit(struct engine *e, struct engine_request *q, const char *session)
{
    struct skv_error err;
    uint64_t id;

    q->session = session != NULL ? strdup(session) : NULL;
    ck_assert_msg(engine_submit(e, q, &id, &err) == 0, "%s", err.msg);
    return id;
}

/* Prompts share a tile and one of them leaves between two layers: the rows of the others stay theirs. The one that is looked at
 * continues a session, so a pair stored in the wrong place would fall on what it holds already. */
START_TEST(leave_among_packed)
{
    static const int len[4] = { 20, 33, 40, 7 };
    struct engine_config c = config();
    struct skv_error err;
    int32_t want[16], got[16];

    for (int leaves = -1; leaves < 4; leaves++)
        for (int stays = 0; stays < 4; stays++) {
            if (leaves == stays || (leaves < 0 && stays > 0))
                continue;
            struct engine *e = engine_new(&c, &err);
            ck_assert_msg(e != NULL, "%s", err.msg);
            e->cfg.step_ms = 0; /* one layer a step */
            for (int at = 1; at < e->model.src.dims.n_layer; at++) {
                uint64_t id[4];
                char name[16];
                int n = 0;
                snprintf(name, sizeof name, "s%d", at);
                submit(e, ask(9, 70, 4), name);
                step_all(e, -1, 0, NULL, &n, 0);
                for (int i = 0; i < 4; i++)
                    id[i] = submit(e, ask(i == stays ? 5 : i, i == stays ? 25 : len[i], 16), i == stays ? name : NULL);
                step_all(e, at, id[stays], got, &n, 16);
                ck_assert_int_eq(n, 0); /* they are on their way through the layers */
                if (leaves >= 0)
                    engine_cancel(e, id[leaves]);
                step_all(e, -1, id[stays], got, &n, 16);
                ck_assert_int_eq(n, 16);
                if (leaves < 0)
                    memcpy(want, got, sizeof want);
                ck_assert_mem_eq(got, want, sizeof want);
            }
            step_end(e);
            engine_free(e);
        }
}
END_TEST

static struct engine_request *text(enum engine_kind kind, uint32_t uid, size_t len)
{
    struct engine_request *q = engine_request_new(kind);
    struct engine_text t = { malloc(len), len };

    ck_assert(q != NULL && t.s != NULL);
    for (size_t i = 0; i < len; i++)
        t.s[i] = "some text "[i % 10];
    q->uid = uid;
    if (kind == ENGINE_APPLY_TEMPLATE) {
        q->messages = calloc(1, sizeof *q->messages);
        q->messages[0].role = (struct engine_text){ strdup("user"), 4 };
        q->messages[0].content = t;
        q->n_messages = 1;
    } else if (kind == ENGINE_DETOKENIZE) {
        free(t.s);
        q->tokens = malloc(len * sizeof *q->tokens);
        ck_assert_ptr_nonnull(q->tokens);
        for (size_t i = 0; i < len; i++)
            q->tokens[i] = (int32_t)(40 + i % 150);
        q->n_tokens = (int)len;
    } else if (kind == ENGINE_SCORE) {
        q->has_text = q->has_cont_text = true;
        q->text = (struct engine_text){ strdup("a"), 1 };
        q->cont_text = t;
    } else {
        q->has_text = true;
        q->text = t;
        q->max_tokens = 2;
        q->ignore_eos = true;
    }
    return q;
}

/* However much text one user has waiting to be encoded, and in whatever kind of request: another's is next. */
START_TEST(texts_take_turns)
{
    static const enum engine_kind kind[] = { ENGINE_TOKENIZE, ENGINE_APPLY_TEMPLATE, ENGINE_SCORE, ENGINE_GENERATE,
                                             ENGINE_DETOKENIZE };
    struct engine_config c = config();
    struct skv_error err;
    struct engine *e = engine_new(&c, &err);
    int32_t got[2];
    int n = 0, steps, ms;

    ck_assert_msg(e != NULL, "%s", err.msg);
    for (int i = 0; i < 16; i++)
        submit(e, text(kind[_i], 1, 1 << 20), NULL);
    step_once(e, &ms);
    uint64_t id = submit(e, text(ENGINE_GENERATE, 2, 300), NULL);
    for (steps = 0; n == 0 && steps < 40; steps++)
        step_all(e, 1, id, got, &n, 2);
    ck_assert_int_eq(n > 0, 1);
    ck_assert_int_le(steps, 6); /* 2 where encoding is quick; behind the other's texts it would be hundreds */
    ck_assert_int_eq(text_pending(e) || kind[_i] == ENGINE_GENERATE, 1); /* there was something to wait behind */
    step_end(e);
    engine_free(e);
}
END_TEST

/* A user whose requests fill the queue does not keep another's out. */
START_TEST(queue_has_room_for_others)
{
    struct engine_config c = config();
    struct engine_request *q;
    struct skv_error err;
    uint64_t id;
    int taken = 0;

    c.queue_len = 16;
    struct engine *e = engine_new(&c, &err); /* nobody steps: what is submitted waits */
    ck_assert_msg(e != NULL, "%s", err.msg);
    for (int i = 0; i < 40; i++) {
        q = ask(i, 20, 2);
        q->uid = 1000;
        if (engine_submit(e, q, &id, &err) == 0) {
            taken++;
            continue;
        }
        ck_assert_int_eq(err.code, SKV_OVERLOADED);
        ck_assert_int_gt(err.retry_after_ms, 0);
        engine_request_free(q);
    }
    ck_assert_int_eq(taken, 12);
    for (int i = 0; i < 4; i++) {
        q = ask(i, 20, 2);
        q->uid = 1001;
        submit(e, q, NULL);
    }
    q = ask(0, 20, 2);
    q->uid = 1002;
    ck_assert_int_eq(engine_submit(e, q, &id, &err), -1); /* now it is full for all */
    engine_request_free(q);
    step_all(e, -1, 0, NULL, &taken, 0);
    for (int i = 0; i < 12; i++) { /* and empty again */
        q = ask(i, 20, 2);
        q->uid = 1000;
        submit(e, q, NULL);
    }
    step_end(e);
    engine_free(e);
}
END_TEST

START_TEST(limits)
{
    struct engine_config c = config();
    int32_t bad[3] = { 5, 1 << 30, 6 };

    c.context = 256;
    struct engine *e = client_start(&c);
    for (int n = 254; n <= 258; n++) { /* the last token of an answer needs no position of its own */
        struct client_reply *r = client_call(e, ask(1, n, 100000));
        if (n <= 256) {
            ck_assert_msg(r->code == SKV_OK, "%s", r->message);
            ck_assert_int_eq(r->result->n_tokens, 256 - n + 1);
            ck_assert_int_eq(r->result->finish, ENGINE_FINISH_LENGTH);
        } else {
            char count[16];
            snprintf(count, sizeof count, "%d", n);
            ck_assert_int_eq(r->code, SKV_CONTEXT_OVERFLOW);
            ck_assert_ptr_nonnull(strstr(r->message, count));
            ck_assert_ptr_nonnull(strstr(r->message, "256"));
        }
        client_reply_free(r);
    }
    struct client_reply *r = client_call(e, client_generate(bad, 3, 1));
    ck_assert_int_eq(r->code, SKV_BAD_REQUEST);
    ck_assert_ptr_nonnull(strstr(r->message, "tokens[1]"));
    client_reply_free(r);
    r = client_call(e, client_generate(bad, 0, 1));
    ck_assert_int_eq(r->code, SKV_BAD_REQUEST);
    client_reply_free(r);
    r = client_call(e, ask(1, 20, 0));
    ck_assert_int_eq(r->code, SKV_OK);
    ck_assert_int_eq(r->result->n_tokens, 0);
    client_reply_free(r);
    struct engine_request *q = ask(1, 250, 1000000);
    q->deadline_ms = 1;
    q->max_tokens = 6;
    r = client_call(e, q);
    ck_assert(r->code == SKV_DEADLINE || r->code == SKV_OK);
    client_reply_free(r);
    ck_assert_int_eq(client_pages_used(e), 0);
    engine_free(e);
}
END_TEST

/* What score says of a continuation is what generate said when it chose it. */
START_TEST(score_is_generate)
{
    struct engine_config c = config();
    struct engine *e = client_start(&c);
    struct engine_request *q = vary(MANY - 2, policies[_i], false);

    q->logprobs = 3;
    struct client_reply *g = client_call(e, q);
    q = vary(MANY - 2, policies[_i], false);
    q->kind = ENGINE_SCORE;
    q->n_cont_tokens = g->result->n_tokens;
    q->cont_tokens = malloc((size_t)g->result->n_tokens * sizeof(int32_t));
    memcpy(q->cont_tokens, g->result->tokens, (size_t)g->result->n_tokens * sizeof(int32_t));
    q->logprobs = 3;
    q->n_cand_from = q->n_cont_tokens; /* ask about the tokens that generate named, each twice */
    q->cand = malloc((size_t)q->n_cand_from * 6 * sizeof *q->cand);
    q->cand_from = malloc(((size_t)q->n_cand_from + 1) * sizeof *q->cand_from);
    for (int i = 0; i <= q->n_cand_from; i++)
        q->cand_from[i] = 6 * i;
    for (int i = 0; i < q->n_cand_from * 6; i++)
        q->cand[i] = g->token[i / 6].top[i % 3].token;
    struct client_reply *s = client_call(e, q);
    same_tokens(g, s);
    ck_assert_mem_eq(g->lp, s->result->logprobs, (size_t)g->n_events * sizeof *g->lp);
    for (int i = 0; i < g->n_events; i++)
        ck_assert_int_eq(s->result->top[3 * i].token, g->token[i].top[0].token);
    ck_assert_int_eq(s->result->n_cand_from, g->n_events);
    for (int i = 0; i < g->n_events * 6; i++)
        ck_assert_float_eq_tol(s->result->cand_lp[i], s->result->top[i / 6 * 3 + i % 3].logprob, 1e-4f);
    client_reply_free(g);
    client_reply_free(s);
    engine_free(e);
}
END_TEST

/* Stop strings taken from the text itself: the text ends exactly before the first, and is what was streamed. */
START_TEST(stop_strings)
{
    struct engine_config c = config();
    struct engine *e = client_start(&c);
    struct client_reply *plain = client_call(e, ask(7, 40, 60));
    const char *text = plain->streamed;
    size_t len = plain->streamed_len;

    ck_assert_msg(plain->code == SKV_OK, "%s", plain->message);
    ck_assert_uint_eq(plain->result->text.len, len);
    ck_assert_uint_gt(len, 20);
    for (size_t at = len / 4; at + 12 < len; at += 7)
        for (size_t k = 1; k <= 9; k += 4) {
            struct engine_request *q = ask(7, 40, 60);
            char stop[16] = "";
            memcpy(stop, text + at, k);
            const char *first = memmem(text, len, stop, k);
            q->stop = calloc(2, sizeof *q->stop);
            q->stop[0] = (struct engine_text){ strdup("never there \x01"), 13 };
            q->stop[1] = (struct engine_text){ malloc(k), k };
            memcpy(q->stop[1].s, stop, k);
            q->n_stop = 2;
            struct client_reply *r = client_call(e, q);
            ck_assert_int_eq(r->code, SKV_OK);
            ck_assert_uint_eq(r->result->text.len, r->streamed_len);
            ck_assert_mem_eq(r->result->text.s, r->streamed, r->streamed_len);
            if (memchr(text, '\xef', len) == NULL) { /* replaced bytes do not compare with raw ones */
                ck_assert_int_eq(r->result->finish, ENGINE_FINISH_STOP);
                ck_assert_uint_eq(r->streamed_len, (size_t)(first - text));
                ck_assert_mem_eq(r->streamed, text, r->streamed_len);
            }
            client_reply_free(r);
        }
    client_reply_free(plain);
    engine_free(e);
}
END_TEST

START_TEST(overload_and_drain)
{
    struct engine_config c = config();
    struct engine_request *q[12];
    struct client_reply *r[12];
    int refused = 0;

    c.queue_len = 4;
    struct engine *e = client_start(&c);
    for (int i = 0; i < 12; i++)
        q[i] = ask(i, 900, 5);
    client_call_all(e, q, 12, r);
    for (int i = 0; i < 12; i++) {
        refused += r[i]->code == SKV_OVERLOADED;
        ck_assert(r[i]->code == SKV_OVERLOADED || r[i]->code == SKV_OK);
        client_reply_free(r[i]);
    }
    ck_assert_int_gt(refused, 0);
    engine_drain(e, true);
    struct client_reply *d = client_call(e, ask(1, 5, 5));
    ck_assert_int_eq(d->code, SKV_DRAINING);
    client_reply_free(d);
    engine_drain(e, false);
    d = client_call(e, ask(1, 5, 5));
    ck_assert_int_eq(d->code, SKV_OK);
    client_reply_free(d);
    engine_free(e);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("engine");
    TCase *c = tcase_create("engine");
    struct random_model m;
    struct skv_error err;
    SRunner *sr;
    int n_policy = (int)(sizeof policies / sizeof *policies);

    if (mkdtemp(dir) == NULL)
        return 99;
    snprintf(model, sizeof model, "%s/tiny.gguf", dir);
    random_model_default(&m);
    m.context = 4096;
    m.layers = 4;
    m.tied = false; /* one that is says its last token for ever, whatever it was asked */
    if (random_model_write(&m, model, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 99;
    }
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, batch_invariance, 0, n_policy);
    tcase_add_loop_test(c, large_budget_is_full, 0, 2 * n_policy);
    tcase_add_loop_test(c, budgets_hold, 1, n_policy);
    tcase_add_test(c, thinning);
    tcase_add_test(c, thinning_sessions);
    tcase_add_test(c, thin_setting);
    tcase_add_test(c, session_continues);
    tcase_add_test(c, small_pool);
    tcase_add_test(c, sessions_make_room);
    tcase_add_loop_test(c, cancel, 0, 3);
    tcase_add_test(c, limits);
    tcase_add_loop_test(c, score_is_generate, 0, n_policy);
    tcase_add_test(c, stop_strings);
    tcase_add_test(c, overload_and_drain);
    suite_add_tcase(s, c);
    c = tcase_create("others");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, leave_among_packed);
    tcase_add_loop_test(c, texts_take_turns, 0, 5);
    tcase_add_test(c, queue_has_room_for_others);
    suite_add_tcase(s, c);
    sr = srunner_create(s);
    srunner_set_fork_status(sr, CK_NOFORK);
    srunner_run_all(sr, CK_NORMAL);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    unlink(model);
    rmdir(dir);
    return failed == 0 ? 0 : 1;
}
