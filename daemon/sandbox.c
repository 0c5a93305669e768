#include "daemon/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <linux/landlock.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef HAVE_SECCOMP
#include <seccomp.h>
#endif

#include "daemon/fault.h"
#include "daemon/log.h"

/* ---- Landlock -------------------------------------------------------------------------------------- */

#define FS_WRITE                                                                                                        \
    (LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR | LANDLOCK_ACCESS_FS_REMOVE_FILE |                    \
     LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_MAKE_REG |                          \
     LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_FIFO | LANDLOCK_ACCESS_FS_MAKE_BLOCK |                       \
     LANDLOCK_ACCESS_FS_MAKE_SYM)

static int ruleset_new(uint64_t handled)
{
    struct landlock_ruleset_attr attr = { .handled_access_fs = handled };

    return (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
}

/* A path that does not exist needs no rule. */
static void allow(int rules, const char *path, uint64_t access)
{
    struct landlock_path_beneath_attr attr = { .allowed_access = access };

    attr.parent_fd = open(path, O_PATH | O_CLOEXEC);
    if (attr.parent_fd < 0)
        return;
    if (syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &attr, 0) != 0)
        log_line(LOG_DEBUG, "sandbox landlock path=%s error=\"%s\"", path, strerror(errno));
    close(attr.parent_fd);
}

static void allow_dir_of(int rules, const char *file, uint64_t access)
{
    char copy[4096];

    if (file == NULL || *file == '\0' || strlen(file) >= sizeof copy)
        return;
    strcpy(copy, file);
    allow(rules, dirname(copy), access);
}

static const char *enforce(int rules)
{
    int rc = (int)syscall(SYS_landlock_restrict_self, rules, 0);

    close(rules);
    return rc == 0 ? "on" : strerror(errno);
}

static bool uses_gpu(const char *backend)
{
#ifdef SKV_CUDA
    return backend == NULL || strcmp(backend, "auto") == 0 || strncmp(backend, "cuda", 4) == 0;
#else
    (void)backend;
    return false;
#endif
}

void sandbox_files(const struct config *cfg, const char *socket_path)
{
    int rules;

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
        log_line(LOG_WARNING, "sandbox no-new-privs error=\"%s\"", strerror(errno));
    rules = ruleset_new(FS_WRITE);
    if (rules < 0) {
        log_line(LOG_INFO, "sandbox landlock=unavailable");
        return;
    }
    allow_dir_of(rules, socket_path, LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_SOCK);
    if (cfg->metrics != NULL && strncmp(cfg->metrics, "unix:", 5) == 0)
        allow_dir_of(rules, cfg->metrics + 5, LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_SOCK);
    allow_dir_of(rules, cfg->log_file, LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_MAKE_REG);
    allow(rules, "/dev", LANDLOCK_ACCESS_FS_WRITE_FILE);
    if (uses_gpu(cfg->engine.backend)) { /* the driver writes its threads' names and keeps a cache of compiled kernels */
        allow(rules, "/proc", LANDLOCK_ACCESS_FS_WRITE_FILE);
        allow(rules, "/tmp", FS_WRITE);
        allow(rules, "/dev/shm", FS_WRITE);
    }
    log_line(LOG_INFO, "sandbox landlock=%s", enforce(rules));
}

/* The loop's thread alone; what it needs of files is its settings, its log and its socket's name. */
static void close_files(const struct config *cfg)
{
    int rules = ruleset_new(LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_DIR);

    if (rules < 0)
        return;
    allow_dir_of(rules, cfg->config_file != NULL ? cfg->config_file : CONFIG_FILE_DEFAULT,
                 LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR);
    allow_dir_of(rules, cfg->log_file, LANDLOCK_ACCESS_FS_READ_FILE);
    allow(rules, "/dev", LANDLOCK_ACCESS_FS_READ_FILE);
    allow(rules, "/usr/share/zoneinfo", LANDLOCK_ACCESS_FS_READ_FILE);
    enforce(rules);
}

/* ---- seccomp --------------------------------------------------------------------------------------- */

#if defined(HAVE_SECCOMP) && !defined(SKV_SANITIZED)

/* What serving takes on a CPU. All else fails with EPERM: a library that tries something odd gets an error it knows how to
 * handle, and an exploit gets neither a shell nor a new program. */
static const int allowed[] = {
    /* bytes */
    SCMP_SYS(read), SCMP_SYS(write), SCMP_SYS(readv), SCMP_SYS(writev), SCMP_SYS(pread64), SCMP_SYS(close), SCMP_SYS(lseek),
    SCMP_SYS(fcntl), SCMP_SYS(dup), SCMP_SYS(dup2), SCMP_SYS(dup3), SCMP_SYS(pipe2), SCMP_SYS(fsync), SCMP_SYS(fdatasync),
    /* files */
    SCMP_SYS(open), SCMP_SYS(openat), SCMP_SYS(stat), SCMP_SYS(lstat), SCMP_SYS(fstat), SCMP_SYS(newfstatat), SCMP_SYS(statx),
    SCMP_SYS(access), SCMP_SYS(faccessat), SCMP_SYS(faccessat2), SCMP_SYS(readlink), SCMP_SYS(readlinkat),
    SCMP_SYS(getdents64), SCMP_SYS(unlink), SCMP_SYS(unlinkat), SCMP_SYS(getcwd), SCMP_SYS(fstatfs), SCMP_SYS(statfs),
    /* sockets that are there, and syslog's */
    SCMP_SYS(accept), SCMP_SYS(accept4), SCMP_SYS(recvfrom), SCMP_SYS(recvmsg), SCMP_SYS(sendto), SCMP_SYS(sendmsg),
    SCMP_SYS(getsockopt), SCMP_SYS(setsockopt), SCMP_SYS(getsockname), SCMP_SYS(getpeername), SCMP_SYS(shutdown),
    SCMP_SYS(connect),
    /* waiting */
    SCMP_SYS(epoll_wait), SCMP_SYS(epoll_pwait), SCMP_SYS(epoll_pwait2), SCMP_SYS(epoll_ctl), SCMP_SYS(epoll_create1),
    SCMP_SYS(poll), SCMP_SYS(ppoll), SCMP_SYS(select), SCMP_SYS(pselect6), SCMP_SYS(eventfd2), SCMP_SYS(timerfd_create),
    SCMP_SYS(timerfd_settime), SCMP_SYS(nanosleep), SCMP_SYS(clock_nanosleep), SCMP_SYS(clock_gettime),
    SCMP_SYS(clock_getres), SCMP_SYS(gettimeofday), SCMP_SYS(time), SCMP_SYS(alarm), SCMP_SYS(setitimer),
    /* memory */
    SCMP_SYS(munmap), SCMP_SYS(mremap), SCMP_SYS(madvise), SCMP_SYS(brk), SCMP_SYS(mlock), SCMP_SYS(munlock),
    SCMP_SYS(mincore), SCMP_SYS(msync),
    /* threads and signals */
    SCMP_SYS(futex), SCMP_SYS(futex_waitv), SCMP_SYS(sched_yield), SCMP_SYS(sched_getaffinity), SCMP_SYS(sched_setaffinity),
    SCMP_SYS(sched_getparam), SCMP_SYS(sched_getscheduler), SCMP_SYS(getcpu), SCMP_SYS(set_robust_list), SCMP_SYS(rseq),
    SCMP_SYS(membarrier), SCMP_SYS(rt_sigaction), SCMP_SYS(rt_sigprocmask), SCMP_SYS(rt_sigreturn), SCMP_SYS(rt_sigtimedwait),
    SCMP_SYS(sigaltstack), SCMP_SYS(tgkill), SCMP_SYS(gettid), SCMP_SYS(restart_syscall), SCMP_SYS(set_tid_address),
    SCMP_SYS(arch_prctl), SCMP_SYS(prctl), SCMP_SYS(exit), SCMP_SYS(exit_group),
    /* about ourselves */
    SCMP_SYS(getpid), SCMP_SYS(getppid), SCMP_SYS(getuid), SCMP_SYS(geteuid), SCMP_SYS(getgid), SCMP_SYS(getegid),
    SCMP_SYS(getrusage), SCMP_SYS(getrlimit), SCMP_SYS(prlimit64), SCMP_SYS(sysinfo), SCMP_SYS(uname), SCMP_SYS(getrandom),
    SCMP_SYS(umask),
};

/* With a GPU the driver does what it likes, so only what nothing here ever needs is refused. */
static const int refused[] = {
    SCMP_SYS(execve), SCMP_SYS(execveat), SCMP_SYS(ptrace), SCMP_SYS(process_vm_readv), SCMP_SYS(process_vm_writev),
    SCMP_SYS(mount), SCMP_SYS(umount2), SCMP_SYS(pivot_root), SCMP_SYS(chroot), SCMP_SYS(bpf), SCMP_SYS(perf_event_open),
    SCMP_SYS(userfaultfd), SCMP_SYS(io_uring_setup), SCMP_SYS(io_uring_enter), SCMP_SYS(io_uring_register),
    SCMP_SYS(init_module), SCMP_SYS(finit_module), SCMP_SYS(delete_module), SCMP_SYS(kexec_load), SCMP_SYS(reboot),
    SCMP_SYS(keyctl), SCMP_SYS(add_key), SCMP_SYS(request_key), SCMP_SYS(setuid), SCMP_SYS(setgid), SCMP_SYS(setreuid),
    SCMP_SYS(setregid), SCMP_SYS(setresuid), SCMP_SYS(setresgid), SCMP_SYS(setns), SCMP_SYS(unshare), SCMP_SYS(swapon),
    SCMP_SYS(swapoff), SCMP_SYS(settimeofday), SCMP_SYS(clock_settime), SCMP_SYS(personality),
};

static int cpu_rules(scmp_filter_ctx f)
{
    int rc = 0;

    for (size_t i = 0; i < sizeof allowed / sizeof *allowed && rc == 0; i++)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, allowed[i], 0);
    /* No memory becomes a program. */
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(mmap), 1, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(mprotect), 1, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
    /* Threads, not processes. clone3 hides its flags from a filter: told that it does not exist, libc uses clone. */
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(clone), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, 0x10000, 0x10000));
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(socket), 1, SCMP_A0(SCMP_CMP_EQ, AF_UNIX, 0));
    /* What libevent and stdio ask of a descriptor; no terminal can be typed into. */
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1, SCMP_A1(SCMP_CMP_EQ, FIONREAD, 0));
    if (rc == 0)
        rc = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1, SCMP_A1(SCMP_CMP_EQ, FIONBIO, 0));
    return rc;
}

static int gpu_rules(scmp_filter_ctx f)
{
    int rc = 0;

    for (size_t i = 0; i < sizeof refused / sizeof *refused && rc == 0; i++)
        rc = seccomp_rule_add(f, SCMP_ACT_ERRNO(EPERM), refused[i], 0);
    return rc;
}

static void filter_calls(const char *backend)
{
    bool gpu = uses_gpu(backend);
    scmp_filter_ctx f;
    int rc;

    fault_hold(true); /* libseccomp 2.5.4 loads a broken filter when it runs out of memory while it makes one */
    f = seccomp_init(gpu ? SCMP_ACT_ALLOW : SCMP_ACT_ERRNO(EPERM));
    if (f == NULL) {
        log_line(LOG_WARNING, "sandbox seccomp error=\"no memory\"");
        return;
    }
    rc = seccomp_attr_set(f, SCMP_FLTATR_CTL_TSYNC, 1); /* the engine's threads, too */
    if (rc == 0)
        rc = gpu ? gpu_rules(f) : cpu_rules(f);
    if (rc == 0)
        rc = seccomp_load(f);
    seccomp_release(f);
    fault_hold(false);
    if (rc != 0)
        log_line(LOG_WARNING, "sandbox seccomp error=\"%s\"", strerror(-rc));
    else
        log_line(LOG_INFO, "sandbox seccomp=%s", gpu ? "gpu" : "on");
}

#else

static void filter_calls(const char *backend)
{
    (void)backend;
    log_line(LOG_INFO, "sandbox seccomp=%s", "not in this build");
}

#endif

void sandbox_calls(const struct config *cfg, const char *backend)
{
#ifndef SKV_SANITIZED
    close_files(cfg); /* a sanitizer looks into /proc when the program ends */
#else
    (void)close_files;
    (void)cfg;
#endif
    filter_calls(backend);
}
