/* notify.h - systemd's notification protocol and socket activation, by hand: a datagram and two environment variables. */
#ifndef SKVD_DAEMON_NOTIFY_H
#define SKVD_DAEMON_NOTIFY_H

#include <stdint.h>

/* Read NOTIFY_SOCKET and WATCHDOG_USEC, and remove them from the environment. The socket is opened here once: later the
 * sandbox may not let us. */
void notify_init(void);
void notify_send(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Milliseconds between two signs of life that systemd wants, halved; 0: it wants none. */
int64_t notify_watchdog_ms(void);

/* Sockets that systemd passed: the first descriptor and *n of them; 0 if there are none. */
int notify_listen_fds(int *n);

#endif
