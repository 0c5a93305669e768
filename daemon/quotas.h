/* quotas.h - how much one connection, one user and all of them may have at once.
 *
 * The engine's queue is fair between users; these limits keep one user from filling the queue, the memory for prompts and
 * messages or the table of connections in the first place. Every refusal is `overloaded`, names its setting and says when to come back.
 */
#ifndef SKVD_DAEMON_QUOTAS_H
#define SKVD_DAEMON_QUOTAS_H

#include "daemon/server.h"

/* Count a connection, or refuse it with OVERLOADED. On success c->user is set. */
int quotas_connect(struct server *s, struct client *c, struct skv_error *err);
void quotas_disconnect(struct server *s, struct client *c);

/* Count a request of prompt_bytes. On success *user is to be given to quotas_end, also after the connection is gone; what the
 * connection has (c->prompt_bytes) is given back when the request leaves it. */
int quotas_begin(struct server *s, struct client *c, int64_t prompt_bytes, bool generates, struct user **user,
                 struct skv_error *err);
void quotas_end(struct server *s, struct user *user, int64_t prompt_bytes);

/* May the connection's buffers grow by `more` bytes? OVERLOADED when that is too much for its user or for all; what every
 * connection needs is never refused. */
int quotas_may_buffer(const struct server *s, const struct client *c, size_t more, struct skv_error *err);
/* The connection's buffers (in_cap, out_bytes) have changed: count what they hold now. */
void quotas_buffered(struct server *s, struct client *c);

/* An estimate of when it pays to come back. */
int quotas_retry_ms(const struct server *s);

#endif
