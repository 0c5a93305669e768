/* skvd: options in, one line `ready` out, and an exit status that says why it ended. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/admin.h"
#include "daemon/config.h"
#include "daemon/fault.h"
#include "daemon/listener.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "daemon/notify.h"
#include "daemon/sandbox.h"
#include "daemon/server.h"

enum { EXIT_WELL = 0, EXIT_OTHER = 1, EXIT_CONFIG = 2, EXIT_MODEL = 3, EXIT_MEMORY = 4, EXIT_TAKEN = 5 };

static int exit_status(enum skv_code code)
{
    switch (code) {
    case SKV_OK:
        return EXIT_WELL;
    case SKV_BAD_CONFIG:
    case SKV_BAD_REQUEST:
        return EXIT_CONFIG;
    case SKV_BAD_MODEL:
        return EXIT_MODEL;
    case SKV_NO_MEMORY:
        return EXIT_MEMORY;
    case SKV_SOCKET_TAKEN:
        return EXIT_TAKEN;
    default:
        return EXIT_OTHER;
    }
}

static int fail(const struct skv_error *err)
{
    log_line(LOG_ERR, "exit code=%s detail=\"%s\"", skv_code_name(err->code), err->msg);
    notify_send("STATUS=%s\nERRNO=1", err->msg);
    return exit_status(err->code);
}

/* ---- signals --------------------------------------------------------------------------------------- */

/* While the model loads there is no loop yet that could answer. */
static void early_end(int sig)
{
    (void)sig;
    listener_unlink_raw();
    _exit(EXIT_WELL);
}

/* The model is mapped: when somebody truncates its file the next touch of a page is a SIGBUS, in any thread. */
static void on_bus(int sig)
{
    static const char msg[] = "skvd: SIGBUS: the model file was truncated, or its disk failed, while it was in use; exiting\n";

    (void)sig;
    if (write(STDERR_FILENO, msg, sizeof msg - 1) < 0)
        _exit(EXIT_MODEL);
    listener_unlink_raw();
    _exit(EXIT_MODEL);
}

static void set_signals(void)
{
    struct sigaction sa;

    memset(&sa, 0, sizeof sa);
    sigemptyset(&sa.sa_mask);
    sa.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL); /* until the loop takes it over */
    sa.sa_handler = on_bus;
    sigaction(SIGBUS, &sa, NULL);
    sa.sa_handler = early_end;
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGINT, &sa, NULL);
}

/* ---- background ------------------------------------------------------------------------------------ */

static int ready_pipe = -1;

/* The parent stays until the child can serve, and exits with what it says. */
static int to_background(struct skv_error *err)
{
    int p[2];
    pid_t pid;

    if (pipe2(p, O_CLOEXEC) != 0 || (pid = fork()) < 0)
        return skv_fail(err, SKV_IO, "can't go to the background: %s", strerror(errno));
    if (pid > 0) {
        unsigned char code = EXIT_OTHER;
        int st;
        ssize_t r;

        close(p[1]);
        do {
            r = read(p[0], &code, 1);
        } while (r < 0 && errno == EINTR);
        if (r != 1 && waitpid(pid, &st, 0) == pid && WIFEXITED(st))
            code = (unsigned char)WEXITSTATUS(st);
        _exit(code);
    }
    close(p[0]);
    setsid();
    ready_pipe = p[1];
    return 0;
}

static void background_ready(void)
{
    unsigned char ok = EXIT_WELL;
    int null;

    if (ready_pipe < 0)
        return;
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        for (int fd = 0; fd <= 2; fd++)
            dup2(null, fd);
        close(null);
    }
    if (write(ready_pipe, &ok, 1) < 0)
        log_line(LOG_DEBUG, "the parent is gone");
    close(ready_pipe);
}

/* ---- start ----------------------------------------------------------------------------------------- */

static void engine_log(void *arg, int level, const char *msg)
{
    (void)arg;
    log_line(level, "engine %s", msg);
}

/* As many descriptors as we may have: each connection is one. */
static void raise_descriptors(void)
{
    struct rlimit r;

    if (getrlimit(RLIMIT_NOFILE, &r) == 0 && r.rlim_cur < r.rlim_max) {
        r.rlim_cur = r.rlim_max;
        setrlimit(RLIMIT_NOFILE, &r);
    }
}

static int become_user(const char *name, struct skv_error *err)
{
    const struct passwd *pw;

    if (name == NULL || *name == '\0')
        return 0;
    pw = getpwnam(name);
    if (pw == NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "user: there is no user '%.64s'", name);
    if (pw->pw_uid == geteuid())
        return 0;
    if (initgroups(pw->pw_name, pw->pw_gid) != 0 || setgid(pw->pw_gid) != 0 || setuid(pw->pw_uid) != 0)
        return skv_fail(err, SKV_BAD_CONFIG, "can't become user '%.64s': %s", name, strerror(errno));
    if (setuid(0) == 0)
        return skv_fail(err, SKV_INTERNAL, "privileges could be taken back after they were dropped");
    return 0;
}

/* From a checked configuration to the loop and back. */
static int serve(struct server *s, struct skv_error *err)
{
    int metrics_fd, rc;

    if (admin_init(s, err) != 0 || (s->listener = listener_open(&s->cfg, err)) == NULL)
        return -1;
    metrics_fd = metrics_bind(&s->cfg, err);
    if (metrics_fd < 0 && err->code != SKV_OK)
        return -1;
    if (become_user(s->cfg.user, err) != 0)
        return -1;
    if (s->cfg.sandbox)
        sandbox_files(&s->cfg, listener_name(s->listener));
    s->cfg.engine.log = engine_log;
    notify_send("STATUS=loading the model");
    s->engine = engine_start(&s->cfg.engine, err);
    if (s->engine == NULL)
        return -1;
    engine_model_info(s->engine, &s->model);
    if (server_init(s, err) != 0 || listener_start(s->listener, s, err) != 0 ||
        (metrics_fd >= 0 && metrics_start(s, metrics_fd, err) != 0))
        return -1;
    if (s->cfg.sandbox)
        sandbox_calls(&s->cfg, s->model.backend);
    log_line(LOG_INFO, "ready socket=%s pid=%d model=\"%s\" context=%d backend=%s %s", listener_name(s->listener), (int)getpid(),
             s->model.name != NULL ? s->model.name : "", s->model.context, s->model.backend, s->model.detail);
    notify_send("READY=1\nSTATUS=serving\nMAINPID=%d", (int)getpid());
    background_ready();
    fault_arm("SKVD_FAIL_ALLOC_READY");
    rc = server_run(s);
    metrics_stop(s);
    return rc;
}

/* One process of several that compute as one, and not the first: no socket and no clients, only the leader's orders. It ends when
 * the leader does, so that an answer under way is not cut by the signal that all of them get. */
static int follow(struct server *s, struct skv_error *err)
{
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    s->cfg.engine.log = engine_log;
    if (engine_follow(&s->cfg.engine, err) != 0)
        return -1;
    log_line(LOG_INFO, "stopped: the leader has");
    return EXIT_WELL;
}

static int print_only(const struct config *cfg)
{
    if (cfg->help)
        config_usage(stdout);
    else if (cfg->version)
        printf("skvd %s\n", PACKAGE_VERSION);
    else
        config_dump(cfg, stdout);
    return fflush(stdout) == 0 ? EXIT_WELL : EXIT_OTHER;
}

/* What is asked for, and whether it makes sense; the log is open afterwards. */
static int configure(int argc, char **argv, struct config_args *args, struct config *cfg, struct skv_error *err)
{
    const char *log_to;

    if (config_read_args(argc, argv, args, err) != 0 || config_load(args, cfg, err) != 0)
        return -1;
    if (cfg->help || cfg->version || cfg->check_only)
        return 0;
    if (cfg->engine.model == NULL || *cfg->engine.model == '\0') {
        config_fini(cfg);
        return skv_fail(err, SKV_BAD_CONFIG, "no model is given: --model FILE, or model = FILE in skvd.conf");
    }
    log_to = cfg->background && (cfg->log_file == NULL || *cfg->log_file == '\0') ? "syslog" : cfg->log_file;
    log_set_level(config_syslog_level(cfg));
    if ((cfg->background && to_background(err) != 0) || log_open(log_to, err) != 0) {
        config_fini(cfg);
        return -1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    static struct server s; /* zero; large */
    struct config_args args;
    struct skv_error err = { 0 };
    int rc;

    fault_arm("SKVD_FAIL_ALLOC");
    if (configure(argc, argv, &args, &s.cfg, &err) != 0) {
        fprintf(stderr, "skvd: %s\n", err.msg);
        config_args_fini(&args);
        return exit_status(err.code);
    }
    if (s.cfg.help || s.cfg.version || s.cfg.check_only) {
        rc = print_only(&s.cfg);
    } else {
        s.args = &args;
        set_signals();
        notify_init();
        raise_descriptors();
        rc = engine_follows(&s.cfg.engine) ? follow(&s, &err) : serve(&s, &err);
        if (rc < 0) {
            rc = fail(&err);
            if (s.engine != NULL)
                engine_stop(s.engine); /* server_run has done it otherwise */
        }
        engine_free(s.engine);
        listener_free(s.listener);
        if (s.base != NULL)
            server_fini(&s);
    }
    config_fini(&s.cfg);
    config_args_fini(&args);
    return rc;
}
