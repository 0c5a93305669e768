/* sandbox.h - what skvd forbids itself, so that a hole in it is worth little.
 *
 * Both are best effort: an old kernel or a build without libseccomp is logged, not refused; systemd's unit has the same
 * limits from outside. `sandbox = off` leaves them out, for debuggers. */
#ifndef SKVD_DAEMON_SANDBOX_H
#define SKVD_DAEMON_SANDBOX_H

#include "daemon/config.h"

/* Before the engine starts its threads, which inherit it: no new privileges, and (Landlock) nothing may be written, made or
 * executed but what skvd itself has to: its socket, its log and, with a GPU, its driver's devices. */
void sandbox_files(const struct config *cfg, const char *socket_path);

/* Once the model is mapped: system calls of all threads are limited to those that serving takes (seccomp), and the loop's
 * thread, which reads what strangers send, can't open any file but its own settings and log (Landlock). backend: the one that is in use. */
void sandbox_calls(const struct config *cfg, const char *backend);

#endif
