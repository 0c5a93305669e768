/* log.h - one line an event, for people and for grep.
 *
 * A line is `time level event key=value ...`, in UTF-8 and without control characters whatever its values are. It leaves in
 * one write, so that lines of several threads don't mix, and never blocks or stops the daemon: when the disk is full or a
 * pipe's reader sleeps the line is counted as lost, and the count is written when there is room again.
 *
 * Threads: any.
 */
#ifndef SKVD_DAEMON_LOG_H
#define SKVD_DAEMON_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <syslog.h> /* LOG_ERR, LOG_WARNING, LOG_INFO, LOG_DEBUG */

#include "protocol/error.h"

enum log_target { LOG_TO_STDERR, LOG_TO_FILE, LOG_TO_SYSLOG };

/* file: NULL or "" for standard error, "syslog" for syslog(3). -1 with BAD_CONFIG when it can't be opened. */
int log_open(const char *file, struct skv_error *err);
/* Open the file again, after a rotation. The old one stays when that fails. */
void log_reopen(void);
void log_set_level(int level); /* the highest syslog level that is written */
int log_level(void);
long log_lost(void); /* lines that could not be written, ever */

void log_line(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* May one more line be written that a stranger can cause as often as he likes? A few dozen a second may; the others are
 * counted as lost. The loop's thread only. */
bool log_allowed(void);

/* Text from outside as a value: a double quote becomes a single one, a backslash '?'; blanks bring quotes around it. Returns
 * buf. */
const char *log_value(const char *s, char *buf, size_t size);

#endif
