/* A scripted engine with engine/engine.h's symbols: the daemon's tests run in milliseconds and can make the engine do what a
 * real one does rarely. A thread, a mutex, an eventfd; no model.
 *
 * The script is in the prompt (or the last message): blank-separated `name=value`, all optional, anything else ignored.
 *   n=8        tokens to give, " w0" " w1" ...      delay=0    ms before each
 *   pre=0      ms of "prefill" before the first       big=0      bytes of text in each token instead
 *   fail=CODE  end with that code after n tokens      eos=1      finish with eos rather than length
 *   wedge=MS   the engine's thread sleeps once        touch=1    read the last page of the model file at every token
 *   dead=1     the device is lost from now on         forbidden=1  try what the sandbox forbids, in both threads; the log has errnos
 * A token is a byte; a model is any file. Sessions are remembered by uid and name until killed. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine.h"

#define PAGES_TOTAL 1000
#define VOCAB       256

const double engine_hist_bounds[ENGINE_HIST] = { 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2,  0.5,  1,    2,    5,
                                                 10,    20,    50,    100,  200,  500,  1e3, 2e3,  5e3,  1e4,  2e4,  5e4 };

struct job {
    TAILQ_ENTRY(job) link;
    uint64_t id;
    struct engine_request *r;
    int64_t submitted, next;
    int given, n, delay, big;
    enum skv_code fail;
    bool eos, paused, cancelled, running, prefilled, touch, dead, forbidden;
    int wedge;
    char *text;
    size_t text_len;
};

struct session {
    TAILQ_ENTRY(session) link;
    uint64_t id;
    uint32_t uid;
    char name[64];
};

struct pending {
    STAILQ_ENTRY(pending) link;
    struct engine_event ev;
};

struct engine {
    struct engine_config cfg;
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t cv;
    TAILQ_HEAD(, job) jobs;
    TAILQ_HEAD(, session) sessions;
    STAILQ_HEAD(, pending) events;
    int fd, running;
    bool stop, draining, dead;
    uint64_t next_id;
    struct engine_stats st;
    int64_t started, step_began;
    const volatile char *model;
    size_t model_len;
};

static int64_t clock_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

void engine_config_default(struct engine_config *cfg)
{
    memset(cfg, 0, sizeof *cfg);
    cfg->backend = "cpu";
    cfg->tp = 1;
    cfg->max_sequences = 64;
    cfg->max_batch = 32;
    cfg->queue_len = 256;
    cfg->step_ms = 50;
    cfg->session_idle_s = 600;
    cfg->kv = (struct engine_kv_options){ NULL, -1, -1, -1, -1, -1, -1, -1, NULL };
}

void engine_sampling_default(struct engine_sampling *s)
{
    *s = (struct engine_sampling){ .temperature = 0.8f, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1, .top_k = 40 };
}

struct engine_request *engine_request_new(enum engine_kind kind)
{
    struct engine_request *r = calloc(1, sizeof *r);

    if (r == NULL)
        return NULL;
    r->kind = kind;
    r->n_messages = r->n_tokens = r->n_cont_tokens = -1;
    r->max_tokens = 512;
    engine_sampling_default(&r->sampling);
    return r;
}

void engine_request_free(struct engine_request *r)
{
    if (r == NULL)
        return;
    free(r->text.s);
    for (int i = 0; i < r->n_messages; i++) {
        free(r->messages[i].role.s);
        free(r->messages[i].content.s);
    }
    free(r->messages);
    free(r->tokens);
    for (int i = 0; i < r->n_stop; i++)
        free(r->stop[i].s);
    free(r->stop);
    free(r->session);
    free((char *)(uintptr_t)r->kv.policy);
    free((char *)(uintptr_t)r->kv.dtype);
    free(r->pin);
    free(r->cont_text.s);
    free(r->cont_tokens);
    free(r->cand);
    free(r->cand_from);
    free(r->set_name);
    free(r);
}

/* ---- events ---------------------------------------------------------------------------------------- */

static void emit(struct engine *e, const struct engine_event *ev)
{
    struct pending *p = malloc(sizeof *p);
    uint64_t one = 1;

    while (p == NULL) { /* an END must never be lost, whatever the fault injection says */
        usleep(1000);
        p = malloc(sizeof *p);
    }
    p->ev = *ev;
    STAILQ_INSERT_TAIL(&e->events, p, link);
    if (write(e->fd, &one, sizeof one) < 0)
        abort();
}

int engine_event_fd(const struct engine *e)
{
    return e->fd;
}

int engine_events(struct engine *e, struct engine_event *out, int max)
{
    uint64_t count;
    int n = 0;

    pthread_mutex_lock(&e->mu);
    while (n < max && !STAILQ_EMPTY(&e->events)) {
        struct pending *p = STAILQ_FIRST(&e->events);

        STAILQ_REMOVE_HEAD(&e->events, link);
        out[n++] = p->ev;
        free(p);
    }
    if (STAILQ_EMPTY(&e->events) && read(e->fd, &count, sizeof count) < 0 && errno != EAGAIN)
        abort();
    pthread_mutex_unlock(&e->mu);
    return n;
}

void engine_event_fini(struct engine_event *ev)
{
    free(ev->text.s);
    for (int i = 0; i < ev->n_top; i++)
        free(ev->top[i].text.s);
    free(ev->top);
    free(ev->message);
    if (ev->result != NULL) {
        free(ev->result->text.s);
        free(ev->result->tokens);
        free(ev->result->logprobs);
        free(ev->result->stop.s);
        free(ev->result->score_argmax);
        free(ev->result);
    }
    if (ev->answer != NULL) {
        struct engine_answer *a = ev->answer;

        free(a->tokens);
        free(a->text.s);
        free(a->seq);
        free(a->kv.layer);
        free(a->kept_policy);
        for (int i = 0; a->kept != NULL && i < a->kept_layers * a->kept_heads; i++) {
            free(a->kept[i].pos);
            free(a->kept[i].score);
        }
        free(a->kept);
        free(a);
    }
    memset(ev, 0, sizeof *ev);
}

static struct engine_text text_of(const char *s, size_t n)
{
    struct engine_text t = { malloc(n + 1), n };

    if (t.s == NULL) {
        t.len = 0;
        return t;
    }
    memcpy(t.s, s, n);
    t.s[n] = '\0';
    return t;
}

/* ---- what a break-in would try ---------------------------------------------------------------------- */

static int errno_of(long rc)
{
    return rc < 0 ? errno : 0;
}

static void try_forbidden(struct engine *e, const char *thread)
{
    char *const argv[] = { "true", NULL };
    char line[160];
    int read_file = errno_of(open("/etc/passwd", O_RDONLY | O_CLOEXEC));
    int write_file = errno_of(open("/var/tmp/skvd-forbidden", O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    int inet = errno_of(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int code = errno_of(mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? -1 : 0);
    long child = syscall(SYS_clone, (unsigned long)SIGCHLD, 0, 0, 0, 0);

    if (child == 0)
        _exit(0);
    int process = errno_of(child), exec = errno_of(execve("/nowhere/true", argv, argv + 1));
    snprintf(line, sizeof line, "forbidden thread=%s read=%d write=%d inet=%d code=%d process=%d exec=%d", thread, read_file, write_file,
             inet, code, process, exec);
    e->cfg.log(e->cfg.log_arg, 6, line);
}

/* ---- the script ------------------------------------------------------------------------------------ */

static const char *script_value(const char *s, size_t n, const char *name, char *buf, size_t size)
{
    size_t m = strlen(name);

    for (size_t i = 0; i + m < n; i++)
        if ((i == 0 || s[i - 1] == ' ') && memcmp(s + i, name, m) == 0 && s[i + m] == '=') {
            size_t k = 0;

            for (i += m + 1; i < n && s[i] != ' ' && k + 1 < size; i++)
                buf[k++] = s[i];
            buf[k] = '\0';
            return buf;
        }
    return NULL;
}

static int script_int(const char *s, size_t n, const char *name, int dflt)
{
    char buf[32];

    return script_value(s, n, name, buf, sizeof buf) != NULL ? atoi(buf) : dflt;
}

static int prompt_tokens(const struct engine_request *r)
{
    size_t n = r->has_text ? r->text.len : 0;

    for (int i = 0; i < r->n_messages; i++)
        n += r->messages[i].content.len;
    return (int)n + (r->n_tokens > 0 ? r->n_tokens : 0);
}

static void read_script(struct job *j)
{
    const struct engine_request *r = j->r;
    const char *s = r->has_text ? r->text.s : r->n_messages > 0 ? r->messages[r->n_messages - 1].content.s : "";
    size_t n = r->has_text ? r->text.len : r->n_messages > 0 ? r->messages[r->n_messages - 1].content.len : 0;
    char code[32];

    j->n = script_int(s, n, "n", 8);
    j->delay = script_int(s, n, "delay", 0);
    j->big = script_int(s, n, "big", 0);
    j->eos = script_int(s, n, "eos", 0) != 0;
    j->wedge = script_int(s, n, "wedge", 0);
    j->touch = script_int(s, n, "touch", 0) != 0;
    j->dead = script_int(s, n, "dead", 0) != 0;
    j->forbidden = script_int(s, n, "forbidden", 0) != 0;
    if (script_value(s, n, "fail", code, sizeof code) != NULL)
        j->fail = skv_code_from_name(code);
    j->next = j->submitted + script_int(s, n, "pre", 0);
    if (r->kind == ENGINE_GENERATE && !r->ignore_eos && j->n > r->max_tokens)
        j->n = r->max_tokens;
    if (r->kind == ENGINE_GENERATE && r->ignore_eos)
        j->n = r->max_tokens;
}

/* ---- the engine's thread --------------------------------------------------------------------------- */

static void end_job(struct engine *e, struct job *j, enum skv_code code, const char *why)
{
    struct engine_event ev = { .type = ENGINE_EV_END, .id = j->id, .code = code };
    struct engine_result *res = calloc(1, sizeof *res);

    if (res != NULL && code != SKV_INTERNAL) {
        res->text = text_of(j->text != NULL ? j->text : "", j->text_len);
        res->n_tokens = res->completion_tokens = j->given;
        res->tokens = calloc((size_t)j->given + 1, sizeof *res->tokens);
        for (int i = 0; i < j->given && res->tokens != NULL; i++)
            res->tokens[i] = i % VOCAB;
        if (res->tokens == NULL)
            res->n_tokens = 0;
        res->finish = j->eos ? ENGINE_FINISH_EOS : ENGINE_FINISH_LENGTH;
        res->prompt_tokens = prompt_tokens(j->r);
        res->total_ms = (double)(clock_ms() - j->submitted);
        snprintf(res->policy, sizeof res->policy, "%s", j->r->kv.policy != NULL ? j->r->kv.policy : "full");
        ev.result = res;
    } else {
        free(res);
    }
    if (code != SKV_OK)
        ev.message = strdup(why);
    if (j->running)
        e->running--;
    e->st.finished += code == SKV_OK;
    e->st.cancelled += code == SKV_CANCELLED;
    e->st.failed += code != SKV_OK && code != SKV_CANCELLED;
    emit(e, &ev);
    if (code == SKV_OK && j->r->session != NULL) {
        struct session *s = calloc(1, sizeof *s);

        if (s != NULL) {
            s->id = j->id;
            s->uid = j->r->uid;
            snprintf(s->name, sizeof s->name, "%s", j->r->session);
            TAILQ_INSERT_TAIL(&e->sessions, s, link);
        }
    }
    TAILQ_REMOVE(&e->jobs, j, link);
    engine_request_free(j->r);
    free(j->text);
    free(j);
}

static void give_token(struct engine *e, struct job *j)
{
    struct engine_event ev = { .type = ENGINE_EV_TOKEN, .id = j->id, .i = j->given, .token = j->given % VOCAB };
    char small[32], *grown;
    size_t n = (size_t)snprintf(small, sizeof small, " w%d", j->given);

    if (j->touch && e->model_len > 0)
        (void)e->model[e->model_len - 1];
    if (j->big > 0) {
        n = (size_t)j->big;
        ev.text.s = malloc(n + 1);
        if (ev.text.s != NULL)
            memset(ev.text.s, 'a' + j->given % 26, n);
        ev.text.len = ev.text.s != NULL ? n : 0;
    } else {
        ev.text = text_of(small, n);
    }
    grown = realloc(j->text, j->text_len + n + 1);
    if (grown != NULL && ev.text.s != NULL) {
        memcpy(grown + j->text_len, ev.text.s, n);
        j->text_len += n;
    }
    if (grown != NULL)
        j->text = grown;
    if (j->r->logprobs > 0) {
        ev.has_logprob = true;
        ev.logprob = -0.5f;
        ev.top = calloc(1, sizeof *ev.top);
        if (ev.top != NULL) {
            ev.n_top = 1;
            ev.top[0].token = ev.token;
            ev.top[0].logprob = -0.5f;
            ev.top[0].text = text_of(small, strlen(small));
        }
    }
    emit(e, &ev);
    j->given++;
    e->st.tokens_out++;
    e->st.steps++;
}

static void give_progress(struct engine *e, const struct job *j, enum engine_phase phase, int done)
{
    struct engine_event ev = { .type = ENGINE_EV_PROGRESS, .id = j->id, .phase = phase, .done = done, .total = prompt_tokens(j->r) };

    if (j->r->progress)
        emit(e, &ev);
}

static void score_job(struct engine *e, struct job *j)
{
    struct engine_event ev = { .type = ENGINE_EV_END, .id = j->id };
    const struct engine_request *r = j->r;
    int n = r->has_cont_text ? (int)r->cont_text.len : r->n_cont_tokens;

    ev.result = calloc(1, sizeof *ev.result);
    if (ev.result != NULL) {
        ev.result->tokens = calloc((size_t)n + 1, sizeof(int32_t));
        ev.result->logprobs = calloc((size_t)n + 1, sizeof(float));
        ev.result->n_tokens = ev.result->tokens != NULL && ev.result->logprobs != NULL ? n : 0;
        for (int i = 0; i < ev.result->n_tokens; i++) {
            ev.result->tokens[i] = r->has_cont_text ? (uint8_t)r->cont_text.s[i] : r->cont_tokens[i];
            ev.result->logprobs[i] = -1.0f;
            ev.result->sum -= 1.0;
        }
    }
    emit(e, &ev);
    if (j->running)
        e->running--;
    e->st.finished++;
    TAILQ_REMOVE(&e->jobs, j, link);
    engine_request_free(j->r);
    free(j);
}

/* One look at one job; true when it did something. */
static void run_job(struct engine *e, struct job *j, int64_t now)
{
    if (j->cancelled) {
        end_job(e, j, SKV_CANCELLED, "the request was cancelled");
        return;
    }
    if (j->r->deadline_ms > 0 && now - j->submitted >= j->r->deadline_ms) {
        end_job(e, j, SKV_DEADLINE, "the request's deadline has passed");
        return;
    }
    if (!j->running) {
        if (e->running >= e->cfg.max_batch)
            return;
        j->running = true;
        e->running++;
        give_progress(e, j, ENGINE_QUEUED, 0);
        e->st.tokens_in += prompt_tokens(j->r);
    }
    if (j->paused || now < j->next)
        return;
    if (j->wedge > 0) {
        int ms = j->wedge;

        j->wedge = 0;
        pthread_mutex_unlock(&e->mu);
        usleep((useconds_t)ms * 1000);
        pthread_mutex_lock(&e->mu);
        return;
    }
    if (!j->prefilled) {
        j->prefilled = true;
        if (j->forbidden)
            try_forbidden(e, "engine");
        give_progress(e, j, ENGINE_PREFILL, prompt_tokens(j->r));
    }
    if (j->r->kind == ENGINE_SCORE) {
        score_job(e, j);
        return;
    }
    if (j->given < j->n) {
        give_token(e, j);
        j->next = now + j->delay;
    }
    if (j->given >= j->n)
        end_job(e, j, j->fail, "the script says so");
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;

    pthread_mutex_lock(&e->mu);
    while (!e->stop) {
        struct job *j, *next;
        struct timespec ts;

        e->step_began = TAILQ_EMPTY(&e->jobs) ? 0 : clock_ms();
        for (j = TAILQ_FIRST(&e->jobs); j != NULL; j = next) {
            next = TAILQ_NEXT(j, link);
            run_job(e, j, clock_ms());
        }
        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_nsec += TAILQ_EMPTY(&e->jobs) ? 100000000 : 500000;
        if (ts.tv_nsec >= 1000000000) {
            ts.tv_sec++;
            ts.tv_nsec -= 1000000000;
        }
        pthread_cond_timedwait(&e->cv, &e->mu, &ts);
    }
    while (!TAILQ_EMPTY(&e->jobs))
        end_job(e, TAILQ_FIRST(&e->jobs), SKV_CANCELLED, "the engine stops");
    pthread_mutex_unlock(&e->mu);
    return NULL;
}

/* ---- life ------------------------------------------------------------------------------------------ */

struct engine *engine_start(const struct engine_config *cfg, struct skv_error *err)
{
    struct engine *e = calloc(1, sizeof *e);
    int fd = open(cfg->model, O_RDONLY | O_CLOEXEC);
    struct stat sb;

    if (e == NULL || fd < 0 || fstat(fd, &sb) != 0) {
        skv_fail(err, e == NULL ? SKV_NO_MEMORY : SKV_BAD_MODEL, "model %s: %s", cfg->model, strerror(errno));
        free(e);
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    if (sb.st_size > 0) {
        e->model_len = (size_t)sb.st_size;
        e->model = mmap(NULL, e->model_len, PROT_READ, MAP_SHARED, fd, 0);
    }
    close(fd);
    e->cfg = *cfg;
    e->started = clock_ms();
    TAILQ_INIT(&e->jobs);
    TAILQ_INIT(&e->sessions);
    STAILQ_INIT(&e->events);
    pthread_mutex_init(&e->mu, NULL);
    pthread_cond_init(&e->cv, NULL);
    e->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (e->fd < 0 || pthread_create(&e->thread, NULL, engine_main, e) != 0) {
        skv_fail(err, SKV_NO_MEMORY, "no thread for the engine");
        free(e);
        return NULL;
    }
    return e;
}

void engine_stop(struct engine *e)
{
    pthread_mutex_lock(&e->mu);
    e->stop = true;
    pthread_cond_signal(&e->cv);
    pthread_mutex_unlock(&e->mu);
    pthread_join(e->thread, NULL);
}

void engine_free(struct engine *e)
{
    struct engine_event ev;

    if (e == NULL)
        return;
    while (engine_events(e, &ev, 1) == 1)
        engine_event_fini(&ev);
    while (!TAILQ_EMPTY(&e->sessions)) {
        struct session *s = TAILQ_FIRST(&e->sessions);

        TAILQ_REMOVE(&e->sessions, s, link);
        free(s);
    }
    if (e->model_len > 0)
        munmap((void *)(uintptr_t)e->model, e->model_len);
    close(e->fd);
    pthread_mutex_destroy(&e->mu);
    pthread_cond_destroy(&e->cv);
    free(e);
}

void engine_model_info(const struct engine *e, struct engine_model_info *out)
{
    (void)e;
    *out = (struct engine_model_info){ "fake", "script", "none", 4096, VOCAB, 2, 2, 1, "cpu", "scripted" };
}

/* ---- queries --------------------------------------------------------------------------------------- */

static void add_seq(struct engine_answer *a, int cap, const struct engine_seq_info *q)
{
    if (a->seq != NULL && a->n_seq < cap)
        a->seq[a->n_seq++] = *q;
}

static void answer_sequences(struct engine *e, const struct engine_request *r, struct engine_answer *a)
{
    int cap = 0;
    struct job *j;
    struct session *s;

    TAILQ_FOREACH(j, &e->jobs, link)
        cap++;
    TAILQ_FOREACH(s, &e->sessions, link)
        cap++;
    a->seq = calloc((size_t)cap + 1, sizeof *a->seq);
    TAILQ_FOREACH(j, &e->jobs, link)
        if (r->all_uids || j->r->uid == r->uid) {
            struct engine_seq_info q = { .id = j->id, .uid = j->r->uid, .pid = j->r->pid, .completion_tokens = j->given,
                                         .prompt_tokens = prompt_tokens(j->r), .age_ms = clock_ms() - j->submitted,
                                         .kv_bytes = 1000 };

            q.state = j->paused ? "paused" : !j->running ? "waiting" : j->given > 0 ? "decode" : "prefill";
            snprintf(q.session, sizeof q.session, "%s", j->r->session != NULL ? j->r->session : "");
            snprintf(q.policy, sizeof q.policy, "full");
            add_seq(a, cap, &q);
        }
    TAILQ_FOREACH(s, &e->sessions, link)
        if (r->all_uids || s->uid == r->uid) {
            struct engine_seq_info q = { .id = s->id, .uid = s->uid, .state = "idle", .kv_bytes = 500 };

            snprintf(q.session, sizeof q.session, "%s", s->name);
            snprintf(q.policy, sizeof q.policy, "full");
            add_seq(a, cap, &q);
        }
}

static void answer_kv(struct engine_answer *a)
{
    a->kv = (struct engine_kv_info){ .pages_total = PAGES_TOTAL, .pages_free = PAGES_TOTAL, .page_bytes = 4096,
                                     .slots_per_page = 32, .token_bytes_full = 128, .dtype = "bf16" };
    a->kv.layer = calloc(2, sizeof *a->kv.layer);
    a->kv.n_layers = a->kv.layer != NULL ? 2 : 0;
    for (int i = 0; i < a->kv.n_layers; i++) {
        snprintf(a->kv.layer[i].policy, sizeof a->kv.layer[i].policy, i == 0 ? "full" : "sparse");
        a->kv.layer[i].kept_mass = i == 0 ? -1 : 0.97;
    }
}

static enum skv_code answer_kept(struct engine *e, const struct engine_request *r, struct engine_answer *a)
{
    struct job *j;

    TAILQ_FOREACH(j, &e->jobs, link)
        if (j->id == r->sequence) {
            a->kept_n = 3;
            a->kept_policy = calloc(1, sizeof *a->kept_policy);
            a->kept = calloc(1, sizeof *a->kept);
            if (a->kept_policy == NULL || a->kept == NULL)
                return SKV_INTERNAL;
            a->kept_layers = a->kept_heads = 1;
            a->kept[0].pos = calloc(3, sizeof(int32_t));
            a->kept[0].score = calloc(3, sizeof(float));
            a->kept[0].n = a->kept[0].pos != NULL && a->kept[0].score != NULL ? 3 : 0;
            for (int i = 0; i < a->kept[0].n; i++)
                a->kept[0].pos[i] = i;
            return SKV_OK;
        }
    return SKV_NOT_FOUND;
}

static void answer_tokens(const struct engine_request *r, struct engine_answer *a)
{
    if (r->kind == ENGINE_DETOKENIZE) {
        a->text.s = malloc((size_t)r->n_tokens + 1);
        a->text.len = a->text.s != NULL ? (size_t)r->n_tokens : 0;
        for (size_t i = 0; i < a->text.len; i++)
            a->text.s[i] = (char)(r->tokens[i] & 0x7f);
        return;
    }
    if (r->kind == ENGINE_APPLY_TEMPLATE) {
        size_t n = 0;

        for (int i = 0; i < r->n_messages; i++)
            n += r->messages[i].content.len + 1;
        a->text.s = calloc(1, n + 1);
        for (int i = 0; i < r->n_messages && a->text.s != NULL; i++) {
            memcpy(a->text.s + a->text.len, r->messages[i].content.s, r->messages[i].content.len);
            a->text.len += r->messages[i].content.len;
            a->text.s[a->text.len++] = '\n';
        }
    }
    {
        const struct engine_text *t = r->kind == ENGINE_APPLY_TEMPLATE ? &a->text : &r->text;

        a->tokens = calloc(t->len + 1, sizeof *a->tokens);
        a->n_tokens = a->tokens != NULL ? (int)t->len : 0;
        for (int i = 0; i < a->n_tokens; i++)
            a->tokens[i] = (uint8_t)t->s[i];
    }
}

static enum skv_code answer_set(struct engine *e, const struct engine_request *r)
{
    if (strcmp(r->set_name, "step_ms") == 0)
        e->cfg.step_ms = (int)r->set_value;
    else if (strcmp(r->set_name, "max_kv_user") == 0)
        e->cfg.max_kv_user = (int64_t)r->set_value;
    else if (strcmp(r->set_name, "max_kv_connection") == 0)
        e->cfg.max_kv_connection = (int64_t)r->set_value;
    else if (strcmp(r->set_name, "max_batch") == 0 && r->set_value <= 1000)
        e->cfg.max_batch = (int)r->set_value;
    else if (strcmp(r->set_name, "queue_len") == 0)
        e->cfg.queue_len = (int)r->set_value;
    else if (strcmp(r->set_name, "kv_reserve") == 0)
        e->cfg.kv_reserve = (int)r->set_value;
    else if (strcmp(r->set_name, "session_idle_s") == 0)
        e->cfg.session_idle_s = (int)r->set_value;
    else
        return SKV_BAD_REQUEST;
    return SKV_OK;
}

static void answer(struct engine *e, uint64_t id, const struct engine_request *r)
{
    struct engine_event ev = { .type = ENGINE_EV_END, .id = id };
    struct engine_answer *a = calloc(1, sizeof *a);

    if (a == NULL) {
        ev.code = SKV_INTERNAL;
        emit(e, &ev);
        return;
    }
    a->kind = r->kind;
    if (r->kind == ENGINE_SEQUENCES)
        answer_sequences(e, r, a);
    else if (r->kind == ENGINE_KV)
        answer_kv(a);
    else if (r->kind == ENGINE_KEPT)
        ev.code = answer_kept(e, r, a);
    else if (r->kind == ENGINE_SET)
        ev.code = answer_set(e, r);
    else
        answer_tokens(r, a);
    ev.answer = a;
    if (ev.code != SKV_OK)
        ev.message = strdup("the fake engine says no");
    emit(e, &ev);
}

/* ---- the loop's calls ------------------------------------------------------------------------------ */

int engine_submit(struct engine *e, struct engine_request *r, uint64_t *id, struct skv_error *err)
{
    bool work = r->kind == ENGINE_GENERATE || r->kind == ENGINE_SCORE;
    struct job *j = NULL;
    int waiting = 0, of_user = 0, of_conn = 0, rc = 0;

    if (work && (j = calloc(1, sizeof *j)) == NULL)
        return skv_fail(err, SKV_OVERLOADED, "no memory for the request");
    pthread_mutex_lock(&e->mu);
    if (work) {
        struct job *k;

        TAILQ_FOREACH(k, &e->jobs, link) {
            waiting += !k->running;
            of_user += k->r->uid == r->uid;
            of_conn += k->r->conn == r->conn;
        }
    }
    if (work && e->draining) {
        rc = skv_fail(err, SKV_DRAINING, "the engine is draining");
    } else if (work && waiting >= e->cfg.queue_len) {
        rc = skv_fail(err, SKV_OVERLOADED, "the queue is full (%d, queue-length)", waiting);
        err->retry_after_ms = 500;
    } else if (work && e->cfg.max_kv_user > 0 && 1000 * (of_user + 1) > e->cfg.max_kv_user) {
        rc = skv_fail(err, SKV_OVERLOADED, "%d sequences of 1000 bytes each (max-kv-per-user)", of_user);
    } else if (work && e->cfg.max_kv_connection > 0 && 1000 * (of_conn + 1) > e->cfg.max_kv_connection) {
        rc = skv_fail(err, SKV_OVERLOADED, "%d sequences of 1000 bytes each (max-kv-per-connection)", of_conn);
    } else if (work) {
        j->id = *id = ++e->next_id;
        j->r = r;
        j->submitted = clock_ms();
        read_script(j);
        e->dead = e->dead || j->dead;
        if (j->forbidden)
            try_forbidden(e, "loop");
        TAILQ_INSERT_TAIL(&e->jobs, j, link);
        j = NULL;
    } else {
        *id = ++e->next_id;
        answer(e, *id, r);
        engine_request_free(r);
    }
    pthread_cond_signal(&e->cv);
    pthread_mutex_unlock(&e->mu);
    free(j);
    return rc;
}

enum hint { HINT_CANCEL, HINT_PAUSE, HINT_RESUME };

static void hint(struct engine *e, uint64_t id, enum hint h)
{
    struct job *j;

    pthread_mutex_lock(&e->mu);
    TAILQ_FOREACH(j, &e->jobs, link)
        if (j->id == id) {
            if (h == HINT_CANCEL)
                j->cancelled = true;
            else
                j->paused = h == HINT_PAUSE;
        }
    pthread_cond_signal(&e->cv);
    pthread_mutex_unlock(&e->mu);
}

void engine_cancel(struct engine *e, uint64_t id)
{
    hint(e, id, HINT_CANCEL);
}

void engine_pause(struct engine *e, uint64_t id)
{
    hint(e, id, HINT_PAUSE);
}

void engine_resume(struct engine *e, uint64_t id)
{
    hint(e, id, HINT_RESUME);
}

void engine_kill(struct engine *e, uint64_t sequence)
{
    struct session *s, *next;

    hint(e, sequence, HINT_CANCEL);
    pthread_mutex_lock(&e->mu);
    for (s = TAILQ_FIRST(&e->sessions); s != NULL; s = next) {
        next = TAILQ_NEXT(s, link);
        if (s->id == sequence) {
            TAILQ_REMOVE(&e->sessions, s, link);
            free(s);
        }
    }
    pthread_mutex_unlock(&e->mu);
}

void engine_drain(struct engine *e, bool on)
{
    pthread_mutex_lock(&e->mu);
    e->draining = on;
    pthread_mutex_unlock(&e->mu);
}

bool engine_draining(const struct engine *e)
{
    struct engine *m = (struct engine *)(uintptr_t)e;
    bool on;

    pthread_mutex_lock(&m->mu);
    on = e->draining;
    pthread_mutex_unlock(&m->mu);
    return on;
}

bool engine_follows(const struct engine_config *cfg)
{
    (void)cfg;
    return false;
}

int engine_follow(const struct engine_config *cfg, struct skv_error *err)
{
    (void)cfg;
    return skv_fail(err, SKV_INTERNAL, "the scripted engine never follows");
}

/* A prompt that says dead=1: from then on the device is lost. */
bool engine_failed(const struct engine *e, char *why, size_t size)
{
    struct engine *m = (struct engine *)(uintptr_t)e;

    pthread_mutex_lock(&m->mu);
    bool dead = e->dead;
    pthread_mutex_unlock(&m->mu);
    if (dead)
        snprintf(why, size, "the script said so");
    return dead;
}

void engine_stats(const struct engine *e, struct engine_stats *out)
{
    struct engine *m = (struct engine *)(uintptr_t)e;
    struct job *j;
    struct session *s;

    pthread_mutex_lock(&m->mu);
    *out = e->st;
    out->uptime_ms = clock_ms() - e->started;
    TAILQ_FOREACH(j, &m->jobs, link) {
        out->running += j->running;
        out->waiting += !j->running;
    }
    TAILQ_FOREACH(s, &m->sessions, link)
        out->idle_sessions++;
    out->pages_total = PAGES_TOTAL;
    out->pages_used = out->running;
    out->pages_free = PAGES_TOTAL - out->running;
    out->step_age_ms = e->step_began != 0 && out->running > 0 ? clock_ms() - e->step_began : 0;
    out->kept_mass = -1;
    out->steps_graph = out->steps_plain = -1;
    out->step_ms_mean = 1;
    pthread_mutex_unlock(&m->mu);
}
