/* metrics.h - Prometheus text over HTTP, on a Unix socket or the loopback address.
 *
 * Names follow vLLM's where the meaning is the same, with our prefix. */
#ifndef SKVD_DAEMON_METRICS_H
#define SKVD_DAEMON_METRICS_H

#include "daemon/server.h"
#include "protocol/methods.h"

/* Bind what `metrics` says ("unix:PATH" or "127.0.0.1:PORT"), before privileges are dropped. -1: nothing is asked for, or
 * *err is set (err->code is SKV_OK in the first case). */
int metrics_bind(const struct config *cfg, struct skv_error *err);
/* Serve it from the loop. Takes fd. */
int metrics_start(struct server *s, int fd, struct skv_error *err);
void metrics_stop(struct server *s);

void metrics_request_end(struct server *s, const struct method *m, const char *reason);

/* The layers as the engine last told them; the server asks once a second while somebody may read the metrics. Connections that are
 * over are let go, too. */
void metrics_kv(const struct engine_kv_info *kv);

/* The whole text; returns its length. Exposed for tests. */
size_t metrics_text(const struct server *s, char *buf, size_t size);

#endif
