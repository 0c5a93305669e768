/* test_sched_random.c - random workloads under the real scheduler and block manager, on the sim backend's clock.
 *
 * Each seed makes an engine (policy, pool, batch, lanes, step_ms, device) and a script of requests, cancels, pauses and kills at
 * random times, and runs it to its end. What must hold after every step is in sched_rig.c; here besides: every request
 * ends once and in a way that its own numbers explain, finished texts are those of a run alone, and every page comes back.
 *
 *   test_sched_random [FIRST [LAST]]   seeds; a failure says its seed
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sched_rig.h"

#define SEEDS_DEFAULT   600
#ifdef __SANITIZE_THREAD__
#define SEEDS_SANITIZED 30
#else
#define SEEDS_SANITIZED 120
#endif
#define REQUESTS 24

enum act { ACT_CANCEL = 0, ACT_PAUSE, ACT_RESUME, ACT_KILL, ACT_KINDS };

struct job {
    int64_t at;      /* microseconds after the start */
    int index;       /* in the rig, -1: not yet submitted */
    enum engine_kind kind;
    int prompt, answer;
    uint32_t seed, uid;
    int priority;
    int64_t deadline_ms;
    char session[8];
    char policy[12]; /* "" the server's */
    int budget;
    bool eos, refeed, touched; /* touched: cancelled or killed by the script */
    int pin_from, pin_to;
    int n_act;
    struct {
        enum act act;
        int64_t at;
        bool done;
    } act[3];
};

struct scenario {
    struct engine_config cfg;
    struct job job[REQUESTS];
    int n;
};

static const char *const policies[] = { "full", "streaming", "snapkv", "pyramid", "h2o", "tova", "article", "sparse" };

static void make_config(struct scenario *sc, uint64_t *x)
{
    struct engine_config *c = &sc->cfg;
    static const char *const device[] = { "zen4-2core", "rtx4090", "h100" };

    rig_config(c);
    c->kv.policy = policies[rig_range(x, 0, 7)];
    c->kv.budget = strcmp(c->kv.policy, "full") == 0 ? -1 : rig_range(x, 2, 8) * 32 + rig_range(x, 0, 31);
    if (c->kv.budget > 0 && rig_range(x, 0, 1)) {
        c->kv.sink = rig_range(x, 0, 8);
        c->kv.recent = rig_range(x, 1, 40);
    }
    c->kv.full_layers = rig_range(x, 0, 2) == 0 ? rig_range(x, 0, 4) : -1;
    c->kv.dtype = rig_range(x, 0, 3) == 0 ? "int8" : NULL;
    c->context = rig_range(x, 0, 3) == 0 ? 512 : 2048;
    c->max_sequences = rig_range(x, 1, 12);
    c->max_batch = rig_range(x, 1, 12);
    c->queue_len = rig_range(x, 0, 4) == 0 ? 4 : 64;
    c->step_ms = rig_range(x, 1, 40);
    c->session_idle_s = rig_range(x, 0, 2) == 0 ? 1 : 1800;
    c->kv_reserve = rig_range(x, 0, 2) * 150;
    c->device = device[rig_range(x, 0, 2)];
    /* from pools that hold one small request to pools that hold all */
    c->kv_memory = (int64_t)rig_range(x, 40, 400) * (rig_range(x, 0, 3) == 0 ? 4000 : 1500);
}

static void make_job(struct job *j, uint64_t *x, int i)
{
    static const int prompts[] = { 1, 31, 32, 33, 255, 256, 257, 600 };

    memset(j, 0, sizeof *j);
    j->index = -1;
    j->at = rig_range(x, 0, 3) == 0 ? 0 : rig_range(x, 0, 60000);
    j->kind = rig_range(x, 0, 7) == 0 ? ENGINE_SCORE : ENGINE_GENERATE;
    j->prompt = rig_range(x, 0, 2) == 0 ? prompts[rig_range(x, 0, 7)] : rig_range(x, 1, 500);
    if (rig_range(x, 0, 30) == 0)
        j->prompt = rig_range(x, 0, 1) ? 0 : 2100;
    j->answer = rig_range(x, 0, 8) == 0 ? rig_range(x, 0, 1) : rig_range(x, 1, 60);
    if (rig_range(x, 0, 25) == 0)
        j->answer = 100000; /* to the context's end */
    j->seed = (uint32_t)i + 1;
    j->uid = (uint32_t)rig_range(x, 1, 4);
    j->priority = rig_range(x, 0, 3) == 0 ? rig_range(x, -2, 2) : 0;
    j->deadline_ms = rig_range(x, 0, 7) == 0 ? rig_range(x, 1, 60) : 0;
    if (j->kind == ENGINE_GENERATE && rig_range(x, 0, 2) == 0)
        snprintf(j->session, sizeof j->session, "s%d", rig_range(x, 0, 3));
    if (rig_range(x, 0, 2) == 0) {
        snprintf(j->policy, sizeof j->policy, "%s", policies[rig_range(x, 0, 7)]);
        j->budget = rig_range(x, 0, 1) ? rig_range(x, 48, 300) : -1;
    }
    j->eos = rig_range(x, 0, 3) == 0;
    j->refeed = rig_range(x, 0, 1);
    if (rig_range(x, 0, 5) == 0 && j->prompt > 20) {
        j->pin_from = rig_range(x, 0, j->prompt - 10);
        j->pin_to = j->pin_from + rig_range(x, 1, 9);
    }
    j->n_act = rig_range(x, 0, 3) == 0 ? rig_range(x, 1, 3) : 0;
    for (int k = 0; k < j->n_act; k++) {
        j->act[k].act = (enum act)rig_range(x, 0, ACT_KINDS - 1);
        j->act[k].at = j->at + rig_range(x, 0, 40000);
        j->touched = j->touched || j->act[k].act == ACT_CANCEL || j->act[k].act == ACT_KILL;
    }
}

static void make_scenario(struct scenario *sc, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;

    memset(sc, 0, sizeof *sc);
    rig_rand(&x);
    make_config(sc, &x);
    sc->n = rig_range(&x, 1, REQUESTS);
    for (int i = 0; i < sc->n; i++)
        make_job(&sc->job[i], &x, i);
}

static struct engine_request *make_request(const struct job *j)
{
    struct engine_request *q = rig_generate(j->prompt, j->seed, j->answer);

    q->kind = j->kind;
    q->uid = j->uid;
    q->priority = j->priority;
    q->deadline_ms = j->deadline_ms;
    q->ignore_eos = !j->eos;
    if (j->session[0] != '\0')
        q->session = strdup(j->session);
    if (j->policy[0] != '\0') {
        q->kv.policy = strdup(j->policy);
        q->kv.budget = j->budget;
    }
    if (j->pin_to > 0 && (q->pin = malloc(sizeof *q->pin)) != NULL) {
        q->pin[0] = (struct engine_range){ j->pin_from, j->pin_to };
        q->n_pin = 1;
    }
    if (j->kind == ENGINE_SCORE) {
        int n = j->answer < 20 ? j->answer : 20;
        q->refeed = j->refeed;
        q->cont_tokens = calloc((size_t)n + 1, sizeof *q->cont_tokens);
        q->n_cont_tokens = n;
        for (int i = 0; q->cont_tokens != NULL && i < n; i++)
            q->cont_tokens[i] = 40 + i;
    }
    return q;
}

/* ---- running the script ----------------------------------------------------------------------------------------------- */

static void act(struct rig *r, const struct job *j, enum act a)
{
    uint64_t id = r->req[j->index].id;

    if (a == ACT_CANCEL)
        engine_cancel(r->e, id);
    else if (a == ACT_PAUSE)
        engine_pause(r->e, id);
    else if (a == ACT_RESUME)
        engine_resume(r->e, id);
    else
        engine_kill(r->e, id); /* a fresh sequence has its first request's id */
}

/* Do what is due; the time of what comes next, INT64_MAX: nothing. */
static int64_t play(struct rig *r, struct scenario *sc, int64_t now)
{
    int64_t next = INT64_MAX;

    for (int i = 0; i < sc->n; i++) {
        struct job *j = &sc->job[i];
        if (j->index < 0 && j->at <= now)
            j->index = rig_submit(r, make_request(j));
        else if (j->index < 0 && j->at < next)
            next = j->at;
        for (int k = 0; k < j->n_act; k++) {
            if (j->act[k].done)
                continue;
            if (j->index >= 0 && j->act[k].at <= now) {
                j->act[k].done = true;
                act(r, j, j->act[k].act);
            } else if (j->act[k].at < next) {
                next = j->act[k].at > j->at ? j->act[k].at : j->at;
            }
        }
    }
    return next;
}

static int open_requests(const struct rig *r)
{
    int n = 0;

    for (int i = 0; i < r->n; i++)
        n += r->req[i].n_end == 0;
    return n;
}

static void resume_all(struct rig *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->req[i].n_end == 0)
            engine_resume(r->e, r->req[i].id);
}

static void run(struct rig *r, struct scenario *sc)
{
    int64_t t0 = rig_now(r);
    bool resumed = false;

    for (int n = 0; r->wrong[0] == '\0'; n++) {
        int64_t next = play(r, sc, rig_now(r) - t0);
        int ms = -1;
        bool more = rig_step(r, &ms);
        if (next == INT64_MAX && open_requests(r) == 0)
            return;
        if (n > 200000)
            snprintf(r->wrong, sizeof r->wrong, "no end");
        if (more)
            continue;
        int64_t wait = next != INT64_MAX ? next - (rig_now(r) - t0) : INT64_MAX;
        if (ms >= 0 && (int64_t)ms * 1000 < wait)
            wait = (int64_t)ms * 1000;
        if (wait != INT64_MAX) {
            rig_idle(r, wait);
        } else if (!resumed) { /* all that is left is paused */
            resumed = true;
            resume_all(r);
        } else {
            snprintf(r->wrong, sizeof r->wrong, "%d requests are open and nothing moves", open_requests(r));
        }
    }
}

/* ---- judging ------------------------------------------------------------------------------------------------------------- */

static bool others_session(const struct scenario *sc, const struct job *j)
{
    for (int i = 0; i < sc->n; i++)
        if (sc->job[i].session[0] != '\0' && sc->job[i].uid != j->uid)
            return true;
    return false;
}

static bool explained(const struct scenario *sc, const struct job *j, const struct rig_req *q, char *why, size_t size)
{
    int room = sc->cfg.context - j->prompt + 1; /* the last token needs no place */
    bool session = j->session[0] != '\0', ok = true;

    switch (q->code) {
    case SKV_OK: /* all its tokens, fewer only at an end token, at the context's end, or with a session's past before it */
        ok = (j->prompt > 0 || session) && (j->kind == ENGINE_SCORE || q->n_token == (j->answer < room ? j->answer : room) ||
                               (q->n_token < j->answer && (j->eos || session)));
        break;
    case SKV_BAD_REQUEST: /* empty, odd options, a pin outside, a busy or differently begun session */
        ok = j->prompt == 0 || j->policy[0] != '\0' || j->pin_to > 0 || session || (j->kind == ENGINE_SCORE && j->answer == 0);
        break;
    case SKV_CONTEXT_OVERFLOW:
        ok = j->prompt + j->answer > sc->cfg.context || session;
        break;
    case SKV_DEADLINE:
        ok = j->deadline_ms > 0;
        break;
    case SKV_CANCELLED: /* a session may have been killed by its first request's id */
        ok = j->touched || session;
        break;
    case SKV_NOT_FOUND:
        ok = session;
        break;
    case SKV_OVERLOADED: /* the queue is full, or another user's session has its share of the memory */
        ok = sc->cfg.queue_len == 4 || others_session(sc, j);
        break;
    case SKV_TOO_LARGE:
        break; /* the next test decides: alone it is refused too */
    default:
        ok = false;
    }
    if (!ok)
        snprintf(why, size, "ended with %s: %s (%d tokens in, %d of %d out)", skv_code_name(q->code), q->message, j->prompt,
                 q->n_token, j->answer);
    return ok;
}

/* The same request alone in an engine of the same settings: the same end and the same tokens. */
static bool same_alone(const struct scenario *sc, const struct job *j, const struct rig_req *q, char *why, size_t size)
{
    struct rig one;
    bool same = true;

    rig_start(&one, &sc->cfg);
    struct engine_request *req = make_request(j);
    req->deadline_ms = 0;
    rig_submit(&one, req);
    rig_run(&one);
    if (one.req[0].code != q->code) {
        same = false;
        snprintf(why, size, "ended with %s, alone with %s: %s", skv_code_name(q->code), skv_code_name(one.req[0].code), one.req[0].message);
    } else if (one.req[0].n_token != q->n_token ||
               (q->n_token > 0 && memcmp(one.req[0].token, q->token, (size_t)q->n_token * sizeof *q->token) != 0)) {
        same = false;
        snprintf(why, size, "gave other tokens than alone (%d and %d)", q->n_token, one.req[0].n_token);
    }
    rig_stop(&one);
    if (same && one.wrong[0] != '\0') {
        same = false;
        snprintf(why, size, "alone: %.200s", one.wrong);
    }
    return same;
}

static bool judge(const struct scenario *sc, const struct rig *r, char *why, size_t size)
{
    int alone = 3;
    char what[320];

    for (int i = 0; i < sc->n; i++) {
        const struct job *j = &sc->job[i];
        const struct rig_req *q = &r->req[j->index];
        bool ok = explained(sc, j, q, what, sizeof what);
        if (ok && (q->code == SKV_TOO_LARGE || (q->code == SKV_OK && alone > 0)) && j->session[0] == '\0') {
            alone--;
            ok = same_alone(sc, j, q, what, sizeof what);
        }
        if (!ok) {
            snprintf(why, size, "request %d of %d %s", i, sc->n, what);
            return false;
        }
    }
    return true;
}

static bool run_seed(uint64_t seed, int *count)
{
    struct scenario *sc = malloc(sizeof *sc);
    struct skv_error err;
    char why[512] = "";
    struct rig r;

    if (sc == NULL)
        return false;
    make_scenario(sc, seed);
    struct engine *try = engine_new(&sc->cfg, &err);
    if (try == NULL) { /* a pool that holds nothing, a window above its budget: said so */
        bool ok = err.code == SKV_NO_MEMORY || err.code == SKV_BAD_CONFIG;
        if (!ok)
            printf("seed %llu: engine_new: %s\n", (unsigned long long)seed, err.msg);
        free(sc);
        return ok;
    }
    engine_free(try);
    rig_start(&r, &sc->cfg);
    run(&r, sc);
    if (r.wrong[0] == '\0') {
        judge(sc, &r, why, sizeof why);
        for (int i = 0; i < r.n; i++)
            count[r.req[i].code]++;
    }
    if (r.wrong[0] == '\0' || r.e != NULL)
        rig_stop(&r);
    if (r.wrong[0] != '\0')
        snprintf(why, sizeof why, "%s", r.wrong);
    if (why[0] != '\0')
        printf("seed %llu: %s\n", (unsigned long long)seed, why);
    free(sc);
    return why[0] == '\0';
}

int main(int argc, char **argv)
{
    const char *san = getenv("SKVD_SANITIZED");
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t last = argc > 2 ? strtoull(argv[2], NULL, 10) : argc > 1 ? first : first + (san != NULL && san[0] != '\0' ? SEEDS_SANITIZED : SEEDS_DEFAULT) - 1;
    int passed = 0, failed = 0, count[SKV_CODE_COUNT] = { 0 };

    for (uint64_t seed = first; seed <= last; seed++) {
        bool ok = run_seed(seed, count);
        passed += ok;
        failed += !ok;
    }
    for (int c = 0; c < SKV_CODE_COUNT; c++)
        if (count[c] > 0)
            printf("%6d requests ended with %s\n", count[c], skv_code_name((enum skv_code)c));
    printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
