/* users.h - the users who have something here just now, told apart by their whole ids.
 *
 * A user is there while one of his requests waits or a sequence of his exists, so there are never more of them than requests
 * and sessions together, and nobody has to be pushed out.
 *
 * Threads: joining, leaving and the count of those who wait take a lock, that nobody holds for longer than a look into a short
 * list. Everything else of a user belongs to the engine thread.
 */
#ifndef SKVD_ENGINE_USERS_H
#define SKVD_ENGINE_USERS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define USERS_BUCKETS 256

/* What a user has just now; admit.c counts it. */
struct usage {
    int active;             /* sequences with a place in the step */
    int running;            /* those, and those that rest */
    int lanes;              /* idle and waiting sessions' too */
    int64_t pages;          /* promised to all of these */
    int64_t running_pages;  /* to those that run */
};

struct user {
    struct user *next;      /* in its bucket */
    uint32_t uid;
    int waiting;            /* requests in the box, encoding or waiting */
    int seqs;               /* sequences, idle sessions too */
    struct usage usage;
    uint64_t turn;          /* when it was given a place last, counted */
    int begun;              /* sequences whose prompt has begun; prefill.c counts it */
};

struct users {
    pthread_mutex_t lock;
    struct user *bucket[USERS_BUCKETS];
};

void users_init(struct users *u);
/* Forgets all. */
void users_fini(struct users *u);

/* One more request of this user waits; false: no memory. Any thread. */
bool users_wait(struct users *u, uint32_t uid);
/* One less. Any thread. */
void users_waited(struct users *u, uint32_t uid);
/* How many do. Any thread. */
int users_waiting(struct users *u, uint32_t uid);

/* One more sequence of this user: valid until as many users_leave. `turn` is a new one's first. NULL: no memory. Engine thread. */
struct user *users_join(struct users *u, uint32_t uid, uint64_t turn);
void users_leave(struct users *u, struct user *who);

#endif
