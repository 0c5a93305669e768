/* conn.c - talking to the daemon, and what to say when that fails. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

volatile sig_atomic_t ctl_interrupted;

static void on_sigint(int sig)
{
    (void)sig;
    ctl_interrupted = 1;
}

void ctl_catch_sigint(void)
{
    struct sigaction sa = { .sa_handler = on_sigint }; /* no SA_RESTART: a wait is to end */
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
}

static void *or_die(void *p)
{
    if (p == NULL) {
        fputs("skvctl: out of memory\n", stderr);
        exit(CTL_FAILED);
    }
    return p;
}

void *ctl_alloc(size_t n, size_t size)
{
    return or_die(calloc(n > 0 ? n : 1, size));
}

void *ctl_grow(void *p, size_t n, size_t size)
{
    return or_die(reallocarray(p, n > 0 ? n : 1, size));
}

struct skv_args *ctl_args(void)
{
    return or_die(skv_args_new());
}

int ctl_error(struct ctl *ctl, const struct skv_error *err)
{
    if (ctl->json) {
        json_t *j = json_pack("{s:{s:s, s:s}}", "error", "code", skv_code_name(err->code), "message", err->msg);
        if (j != NULL && err->code == SKV_OVERLOADED)
            json_object_set_new(json_object_get(j, "error"), "retry_after_ms", json_integer(err->retry_after_ms));
        if (j != NULL)
            json_put(j);
    }
    fputs("skvctl: ", stderr);
    if (err->code < SKV_NO_MEMORY || *err->msg == '\0') /* the wire's codes; the others' text says all */
        fprintf(stderr, "%s%s", skv_code_name(err->code), *err->msg != '\0' ? ": " : "");
    if (*err->msg != '\0') {
        out_text(stderr, err->msg, strlen(err->msg));
    }
    if (err->code == SKV_OVERLOADED && err->retry_after_ms > 0)
        fprintf(stderr, " (try again in %s)", fmt_ms(err->retry_after_ms));
    fputc('\n', stderr);
    return err->code == SKV_NO_DAEMON ? CTL_NO_DAEMON : CTL_FAILED;
}

#define SYSTEM_SOCKET "/run/skvd.sock" /* where systemd listens, and root's default */

struct skv *ctl_connect_again(struct ctl *ctl)
{
    struct skv_error err;
    struct skv *c = skv_connect(ctl->socket, &err);
    char path[256] = "?";

    if (c != NULL)
        return c;
    ctl->status = ctl_error(ctl, &err);
    if (err.code != SKV_NO_DAEMON)
        return NULL;
    if (ctl->socket == NULL)
        skv_default_path(path, sizeof path);
    fprintf(stderr, "Start one with:  skvd --model FILE --socket %s\n"
                    "or name another socket with --socket PATH or SKVD_SOCKET.\n",
            ctl->socket ? ctl->socket : path);
    if (ctl->socket == NULL && strcmp(path, SYSTEM_SOCKET) != 0 && access(SYSTEM_SOCKET, F_OK) == 0)
        fprintf(stderr, "The machine's own is at %s.\n", SYSTEM_SOCKET);
    return NULL;
}

struct skv *ctl_connect(struct ctl *ctl)
{
    if (ctl->c == NULL)
        ctl->c = ctl_connect_again(ctl);
    return ctl->c;
}

struct skv_reply *ctl_call(struct ctl *ctl, const char *method, struct skv_args *take_args, int *exit_status)
{
    struct skv_error err;
    struct skv_reply *r = NULL;

    *exit_status = CTL_OK;
    if (ctl_connect(ctl) == NULL) {
        skv_args_free(take_args);
        *exit_status = ctl->status;
        return NULL;
    }
    if (skv_call(ctl->c, method, take_args, &r, &err) == 0)
        return r;
    skv_reply_free(r);
    *exit_status = ctl_error(ctl, &err);
    return NULL;
}

int ctl_simple(struct ctl *ctl, const char *method, struct skv_args *take_args, void (*print)(const struct skv_value *v))
{
    int status;
    struct skv_reply *r = ctl_call(ctl, method, take_args, &status);

    if (r == NULL)
        return status;
    if (ctl->json)
        json_print(skv_reply_value(r));
    else if (print != NULL)
        print(skv_reply_value(r));
    skv_reply_free(r);
    return status;
}

char *ctl_read_file(const char *path, size_t limit, size_t *len)
{
    FILE *f = path == NULL ? stdin : fopen(path, "rb");
    char *s = NULL;
    size_t n = 0, size = 0, got;

    if (f == NULL) {
        fprintf(stderr, "skvctl: %s: %s\n", path, strerror(errno));
        return NULL;
    }
    do {
        if (size - n < 65536)
            s = ctl_grow(s, size = size * 2 + 65537, 1);
        got = fread(s + n, 1, size - n - 1, f);
        n += got;
    } while (got > 0 && n <= limit);
    s[n] = '\0';
    *len = n;
    if (ferror(f) || n > limit) {
        fprintf(stderr, "skvctl: %s: %s\n", path ? path : "standard input", n > limit ? "too large" : strerror(errno));
        free(s);
        s = NULL;
    }
    if (f != stdin)
        fclose(f);
    return s;
}
