/* listener.h - the socket's path and the way in.
 *
 * A path with a live daemon behind it is respected, a dead daemon's socket is replaced, anything else at the path is left
 * alone. Two that start at once are kept apart by a lock on the directory, which leaves nothing behind. */
#ifndef SKVD_DAEMON_LISTENER_H
#define SKVD_DAEMON_LISTENER_H

#include "daemon/server.h"

/* Where to listen, by the rules of the protocol; returns buf. -1/NULL with BAD_CONFIG: nothing is set. */
const char *listener_path(const struct config *cfg, char *buf, size_t size, struct skv_error *err);

/* Take the path (or systemd's sockets) and listen; nobody is accepted yet. NULL with SOCKET_TAKEN, BAD_CONFIG, IO. */
struct listener *listener_open(const struct config *cfg, struct skv_error *err);
int listener_start(struct listener *l, struct server *s, struct skv_error *err); /* accept, in the loop */
void listener_stop(struct listener *l); /* accept nobody any more; the path is ours no more */
void listener_free(struct listener *l);

const char *listener_name(const struct listener *l); /* the path, for the log */
/* For a signal handler: unlink the path if it is ours. */
void listener_unlink_raw(void);

/* A stream socket bound to a Unix path, with a stale one replaced; also for metrics. -1 with *err. */
int listener_bind_unix(const char *path, int mode, const char *group, struct skv_error *err);

#endif
