#include "engine/mailbox.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int mailbox_init(struct mailbox *b, struct skv_error *err)
{
    atomic_init(&b->head, NULL);
    b->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (b->fd < 0)
        return skv_fail(err, SKV_IO, "eventfd: %s", strerror(errno));
    return 0;
}

void mailbox_fini(struct mailbox *b)
{
    if (b->fd >= 0)
        close(b->fd);
    b->fd = -1;
}

void mailbox_signal(struct mailbox *b)
{
    uint64_t one = 1;

    /* The counter can't overflow and the descriptor is ours: a failed write has no cause. */
    if (write(b->fd, &one, sizeof one) < 0)
        return;
}

void mailbox_push(struct mailbox *b, struct mail *m)
{
    struct mail *old = atomic_load_explicit(&b->head, memory_order_relaxed);

    do
        m->next = old;
    while (!atomic_compare_exchange_weak_explicit(&b->head, &old, m, memory_order_release, memory_order_relaxed));
    if (old == NULL) /* only the first one wakes */
        mailbox_signal(b);
}

struct mail *mailbox_take(struct mailbox *b)
{
    uint64_t count;
    struct mail *m, *out = NULL;

    /* Clear the descriptor first: a push between the two sets it again, and costs one empty wake-up. */
    if (read(b->fd, &count, sizeof count) < 0 && errno != EAGAIN)
        return NULL;
    m = atomic_exchange_explicit(&b->head, NULL, memory_order_acquire);
    while (m != NULL) {
        struct mail *next = m->next;
        m->next = out;
        out = m;
        m = next;
    }
    return out;
}

void mailbox_wait(struct mailbox *b, int timeout_ms)
{
    struct pollfd p = { .fd = b->fd, .events = POLLIN };

    if (!mailbox_any(b))
        poll(&p, 1, timeout_ms);
}
