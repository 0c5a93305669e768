/* mailbox.h - a lock-free queue between two threads that wakes its reader by an eventfd.
 *
 * Writers push one message at a time; the reader takes all there is, in order. A push onto an empty box writes the eventfd,
 * later ones cost one compare-and-swap (the pattern of memcached's thread.c). No limit of its own: what may be in
 * it is bounded by those who push (requests by the queue limit, tokens by pausing).
 */
#ifndef SKVD_ENGINE_MAILBOX_H
#define SKVD_ENGINE_MAILBOX_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "protocol/error.h"

struct mail {
    struct mail *next; /* embed as the first member */
};

struct mailbox {
    _Atomic(struct mail *) head; /* newest first */
    int fd;                      /* eventfd, readable when something was pushed */
};

int mailbox_init(struct mailbox *b, struct skv_error *err);
void mailbox_fini(struct mailbox *b); /* messages left are the caller's: take them first */
void mailbox_push(struct mailbox *b, struct mail *m);
/* Everything, oldest first; NULL when empty. Also clears the eventfd. */
struct mail *mailbox_take(struct mailbox *b);
/* Make the descriptor readable although nothing was pushed: the reader left something for later. */
void mailbox_signal(struct mailbox *b);
static inline bool mailbox_any(struct mailbox *b)
{
    return atomic_load_explicit(&b->head, memory_order_relaxed) != NULL;
}
/* Wait until something is there, at most timeout_ms (-1: for ever). */
void mailbox_wait(struct mailbox *b, int timeout_ms);

#endif
