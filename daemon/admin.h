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

/* kill, or cancel of a sequence, once the engine has listed those that may be meant. */
void admin_end_sequence(struct request *r, const struct engine_answer *a);

/* Read the file again and apply what may change; c (NULL: nobody waits) is answered once the engine has agreed. -1 with *err: not. */
int admin_reload(struct server *s, struct client *c, uint32_t msgid, struct skv_error *err);

/* Of a set or reload: the engine said no to one value; nothing is open any more (answers, and frees p). */
void admin_refused(struct request *p, const struct option_row *o, enum skv_code code, const char *message);
void admin_settings_done(struct request *p);

/* Notifications `event` to those who subscribed. */
void admin_event_sequence(struct server *s, bool started, const struct request *r, const char *reason,
                          const struct engine_result *res);
void admin_event_tick(struct server *s);

#endif
