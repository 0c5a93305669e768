/* users.c - see users.h. */
#include "engine/users.h"

#include <stdlib.h>
#include <string.h>

void users_init(struct users *u)
{
    memset(u, 0, sizeof *u);
    pthread_mutex_init(&u->lock, NULL);
}

void users_fini(struct users *u)
{
    for (int i = 0; i < USERS_BUCKETS; i++)
        for (struct user *w = u->bucket[i], *next; w != NULL; w = next) {
            next = w->next;
            free(w);
        }
    pthread_mutex_destroy(&u->lock);
}

/* Where the user is linked in, or would be. With the lock. */
static struct user **slot_of(struct users *u, uint32_t uid)
{
    struct user **p = &u->bucket[uid % USERS_BUCKETS];

    while (*p != NULL && (*p)->uid != uid)
        p = &(*p)->next;
    return p;
}

/* With the lock. */
static struct user *get(struct users *u, uint32_t uid)
{
    struct user **p = slot_of(u, uid);

    if (*p == NULL && (*p = calloc(1, sizeof **p)) != NULL)
        (*p)->uid = uid;
    return *p;
}

/* With the lock. */
static void drop_if_gone(struct users *u, struct user *who)
{
    struct user **p;

    if (who->waiting > 0 || who->seqs > 0)
        return;
    p = slot_of(u, who->uid);
    *p = who->next;
    free(who);
}

bool users_wait(struct users *u, uint32_t uid)
{
    pthread_mutex_lock(&u->lock);
    struct user *who = get(u, uid);
    if (who != NULL)
        who->waiting++;
    pthread_mutex_unlock(&u->lock);
    return who != NULL;
}

void users_waited(struct users *u, uint32_t uid)
{
    pthread_mutex_lock(&u->lock);
    struct user *who = *slot_of(u, uid);
    who->waiting--;
    drop_if_gone(u, who);
    pthread_mutex_unlock(&u->lock);
}

int users_waiting(struct users *u, uint32_t uid)
{
    pthread_mutex_lock(&u->lock);
    struct user *who = *slot_of(u, uid);
    int n = who != NULL ? who->waiting : 0;
    pthread_mutex_unlock(&u->lock);
    return n;
}

struct user *users_join(struct users *u, uint32_t uid, uint64_t turn)
{
    pthread_mutex_lock(&u->lock);
    struct user *who = get(u, uid);
    if (who != NULL && who->seqs++ == 0)
        who->turn = turn;
    pthread_mutex_unlock(&u->lock);
    return who;
}

void users_leave(struct users *u, struct user *who)
{
    pthread_mutex_lock(&u->lock);
    who->seqs--;
    drop_if_gone(u, who);
    pthread_mutex_unlock(&u->lock);
}
