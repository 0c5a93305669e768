/* workers.c - fork-join worker pool; see workers.h.
 *
 * A job is published by one 64-bit word, the ticket: the number of items and the next item to hand out. A worker
 * takes an item by adding one to it. An item number below the count can only belong to the job that is running
 * (the caller doesn't return before that item is done), so `fn` and `arg` are stable when they are read; an item
 * number past the end is ignored. Nobody has to acknowledge a job: a worker that sleeps through a short one costs
 * nothing.
 */
#include "kernels/workers.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_US      80 /* how long a worker looks for the next job before it sleeps */
#define TICKET_COUNT 32 /* shift of the item count */
#define SHARE_END    32 /* shift of the end of what is left of a share */

struct share {
    _Alignas(64) _Atomic uint64_t left; /* items [low half, high half) */
};

struct workers {
    /* written at each job by the caller, added to by all */
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t wake; /* futex word */
    _Atomic uint32_t sleepers;
    _Atomic bool stop;
    _Alignas(64) void (*fn)(void *arg, int item, int worker);
    void *arg;
    int n;             /* threads, the caller included */
    int n_started;     /* of the others */
    bool crowded;      /* more threads than CPUs: yield instead of spinning */
    struct share *share; /* [n] of workers_run_shares */
    pthread_t *thread; /* [n - 1] */
    struct start {
        struct workers *w;
        int id;
    } *start; /* [n - 1] */
};

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static bool ticket_open(uint64_t t)
{
    return (uint32_t)t < (uint32_t)(t >> TICKET_COUNT);
}

/* Work on the current job until no item is left. */
static void take_items(struct workers *w, int id)
{
    while (ticket_open(atomic_load_explicit(&w->ticket, memory_order_relaxed))) {
        uint64_t t = atomic_fetch_add_explicit(&w->ticket, 1, memory_order_acquire);
        if (!ticket_open(t))
            return;
        w->fn(w->arg, (int)(uint32_t)t, id);
        atomic_fetch_add_explicit(&w->done, 1, memory_order_release);
    }
}

/* Return when there is a job or the pool ends. */
static void wait_job(struct workers *w)
{
    int64_t until = 0;
    for (unsigned i = 1;; i++) {
        if (ticket_open(atomic_load_explicit(&w->ticket, memory_order_acquire)) ||
            atomic_load_explicit(&w->stop, memory_order_relaxed))
            return;
        if (w->crowded)
            break;
        cpu_relax();
        if (i % 64 == 0) {
            int64_t t = now_us();
            if (until == 0)
                until = t + SPIN_US;
            else if (t >= until)
                break;
        }
    }
    uint32_t seen = atomic_load(&w->wake);
    atomic_fetch_add(&w->sleepers, 1);
    /* The order (sleepers, then look again) against the caller's (ticket, then sleepers) loses no wake-up. */
    if (!ticket_open(atomic_load(&w->ticket)) && !atomic_load(&w->stop))
        syscall(SYS_futex, &w->wake, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
}

static void *worker_main(void *p)
{
    struct start *s = p;
    while (!atomic_load_explicit(&s->w->stop, memory_order_acquire)) {
        take_items(s->w, s->id);
        wait_job(s->w);
    }
    return NULL;
}

static void wake_all(struct workers *w)
{
    atomic_fetch_add(&w->wake, 1);
    syscall(SYS_futex, &w->wake, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void workers_run(struct workers *w, int n, void (*fn)(void *arg, int item, int worker), void *arg)
{
    if (n <= 1 || w->n == 1) {
        for (int i = 0; i < n; i++)
            fn(arg, i, 0);
        return;
    }
    w->fn = fn;
    w->arg = arg;
    atomic_store_explicit(&w->done, 0, memory_order_relaxed);
    atomic_store(&w->ticket, (uint64_t)(uint32_t)n << TICKET_COUNT);
    if (atomic_load(&w->sleepers) > 0)
        wake_all(w);
    take_items(w, 0);
    for (unsigned i = 1; atomic_load_explicit(&w->done, memory_order_acquire) != (uint32_t)n; i++) {
        cpu_relax();
        if (w->crowded || i % 4096 == 0) /* the one that holds the last item may need this CPU */
            sched_yield();
    }
}

struct share_job {
    struct workers *w;
    void (*fn)(void *arg, int item, int worker);
    void *arg;
};

/* An item of what is left of a share: its owner takes the first, others the last. -1: none is left. */
static int share_take(struct share *s, bool own)
{
    uint64_t left = atomic_load_explicit(&s->left, memory_order_relaxed), then;
    uint32_t from, end;
    do {
        from = (uint32_t)left;
        end = (uint32_t)(left >> SHARE_END);
        if (from >= end)
            return -1;
        then = own ? left + 1 : left - ((uint64_t)1 << SHARE_END);
    } while (!atomic_compare_exchange_weak_explicit(&s->left, &left, then, memory_order_relaxed, memory_order_relaxed));
    return (int)(own ? from : end - 1);
}

/* One call for each worker; it ends when nothing is left to be taken anywhere. */
static void share_work(void *arg, int call, int worker)
{
    const struct share_job *j = arg;
    int n = j->w->n, item;
    (void)call;
    for (int i = 0; i < n; i++)
        while ((item = share_take(&j->w->share[(worker + i) % n], i == 0)) >= 0)
            j->fn(j->arg, item, worker);
}

void workers_run_shares(struct workers *w, int n, void (*fn)(void *arg, int item, int worker), void *arg)
{
    struct share_job j = { w, fn, arg };
    if (n <= 1) { /* not worth waking anyone */
        workers_run(w, n, fn, arg);
        return;
    }
    for (int i = 0; i < w->n; i++) {
        uint64_t from = (uint64_t)n * (uint64_t)i / (uint64_t)w->n, end = (uint64_t)n * (uint64_t)(i + 1) / (uint64_t)w->n;
        atomic_store_explicit(&w->share[i].left, end << SHARE_END | from, memory_order_relaxed);
    }
    workers_run(w, w->n, share_work, &j);
}

/* Pin worker `id` to the id-th CPU that this process may use. Pinning is a hint: a failure changes nothing. */
static void pin(pthread_t t, const cpu_set_t *allowed, int id)
{
    for (int cpu = 0, k = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, allowed) && k++ == id) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(t, sizeof one, &one);
            return;
        }
}

struct workers *workers_new(int n, struct skv_error *err)
{
    if (n < 1) {
        skv_fail(err, SKV_BAD_CONFIG, "%d worker threads: there must be at least 1", n);
        return NULL;
    }
    struct workers *w = aligned_alloc(64, (sizeof *w + 63) / 64 * 64);
    if (!w) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for the worker pool");
        return NULL;
    }
    memset(w, 0, sizeof *w);
    w->n = n;
    w->thread = calloc((size_t)n, sizeof *w->thread);
    w->start = calloc((size_t)n, sizeof *w->start);
    w->share = aligned_alloc(64, (size_t)n * sizeof *w->share);
    if (!w->thread || !w->start || !w->share) {
        workers_free(w);
        skv_fail(err, SKV_NO_MEMORY, "no memory for the worker pool");
        return NULL;
    }
    cpu_set_t allowed;
    bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    w->crowded = known && n > CPU_COUNT(&allowed);
    for (int i = 0; i < n - 1; i++) {
        w->start[i] = (struct start){ w, i + 1 };
        int rc = pthread_create(&w->thread[i], NULL, worker_main, &w->start[i]);
        if (rc != 0) {
            workers_free(w);
            skv_fail(err, SKV_NO_MEMORY, "cannot start worker thread %d: %s", i + 1, strerror(rc));
            return NULL;
        }
        w->n_started++;
        if (known && !w->crowded)
            pin(w->thread[i], &allowed, i + 1);
    }
    return w;
}

void workers_free(struct workers *w)
{
    if (!w)
        return;
    atomic_store(&w->stop, true);
    wake_all(w);
    for (int i = 0; i < w->n_started; i++)
        pthread_join(w->thread[i], NULL);
    free(w->thread);
    free(w->start);
    free(w->share);
    free(w);
}

int workers_count(const struct workers *w)
{
    return w->n;
}
