/* admin.h - the methods for administrators, and who is one. */
#ifndef SKVD_DAEMON_ADMIN_H
#define SKVD_DAEMON_ADMIN_H

#include "daemon/server.h"
#include "protocol/args.h"

enum admin_topic { TOPIC_SEQUENCES = 1, TOPIC_EVICTIONS = 2, TOPIC_STEPS = 4 };

/* Root, our own uid, or a member of the admin group (by the kernel's word on the peer, not by name). */
bool admin_is(const struct server *s, int fd, uint32_t uid, gid_t gid);

/* The group's id; -1 with BAD_CONFIG. Called before the sandbox closes the way to /etc/group. */
int admin_init(struct server *s, struct skv_error *err);

/* set, get, drain, resume, shutdown, reload, subscribe, kill: answers, or puts a request in flight. */
void admin_method(struct client *c, uint32_t msgid, const struct method *m, struct args *a);

/* kill, once the engine has listed its sequences. */
void admin_kill(struct request *r, const struct engine_answer *a);

/* Read the file again and apply what may change. Returns 0, or -1 with *err; the lists are for the answer (NULL: log). */
int admin_reload(struct server *s, struct wire_buf *answer, uint32_t msgid, struct skv_error *err);

/* Notifications `event` to those who subscribed. */
void admin_event_sequence(struct server *s, bool started, const struct request *r, const char *reason,
                          const struct engine_result *res);
void admin_event_tick(struct server *s);

#endif
