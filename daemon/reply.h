/* reply.h - the engine's results and events as messages (skvd-protocol(7) has the fields). Writes into a wire_buf only. */
#ifndef SKVD_DAEMON_REPLY_H
#define SKVD_DAEMON_REPLY_H

#include "daemon/server.h"

void reply_token(struct wire_buf *b, uint32_t msgid, const struct engine_event *ev);
void reply_progress(struct wire_buf *b, uint32_t msgid, const struct engine_event *ev);
/* What the engine gave at a request's end: its result, its answer, or its error with what there is of a result. */
void reply_answer(struct wire_buf *b, const struct request *r, const struct engine_event *ev);
void reply_hello(struct wire_buf *b, uint32_t msgid, const struct server *s, uint32_t uid, bool admin);
/* seq NULL: the engine did not answer in time. */
void reply_status(struct wire_buf *b, uint32_t msgid, const struct server *s, const struct engine_answer *a);
void reply_settings(struct wire_buf *b, uint32_t msgid, const struct server *s);
void reply_flag(struct wire_buf *b, uint32_t msgid, const char *key, bool value); /* {key: value} */
const char *reply_finish_name(enum engine_finish f);

#endif
