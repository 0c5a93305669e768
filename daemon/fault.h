/* fault.h - make the n-th allocation fail (--enable-fault-injection).
 *
 * The build then has its own malloc, calloc and realloc in front of libc's, so that the allocations of our libraries can
 * fail, too. SKVD_FAIL_ALLOC=N fails the N-th of the process from the beginning of main, SKVD_FAIL_ALLOC_READY=N the N-th
 * after the daemon can serve. Each once: what is tested is that one failure harms one request. */
#ifndef SKVD_DAEMON_FAULT_H
#define SKVD_DAEMON_FAULT_H

#ifdef SKV_FAULT_INJECTION
#include <stdbool.h>

void fault_arm(const char *env); /* count from now, to what the variable says; nothing if it is not set */
void fault_hold(bool on);        /* a stretch without failures, where a library is known not to survive one */
#else
#define fault_arm(env) ((void)0)
#define fault_hold(on) ((void)0)
#endif

#endif
