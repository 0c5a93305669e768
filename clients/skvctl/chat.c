/* chat.c - `skvctl chat`: a conversation. The daemon keeps the KV cache of it as a session and is sent only what is new;
 * when the session is gone, the whole conversation is sent again. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef HAVE_LIBEDIT
#include <histedit.h>
#endif

static struct {
    const char *system;
    bool stats, no_session;
} o;

const struct ctl_opt chat_opts[] = {
    { "system", 's', OPT_STR, &o.system, "TEXT", "a system message first", 0, 0 },
    { "stats", 'v', OPT_FLAG, &o.stats, NULL, "figures after each answer", 0, 0 },
    { "no-session", 0, OPT_FLAG, &o.no_session, NULL, "send the whole conversation each time", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

struct message {
    const char *role;
    char *content;
};

struct chat {
    struct ctl *ctl;
    struct message *m;
    size_t n, held; /* messages; how many the daemon's session has */
    char session[64];
    unsigned sessions;
    bool tty;
#ifdef HAVE_LIBEDIT
    EditLine *el;
    History *hist;
    char history_file[PATH_MAX];
#endif
};

/* ---- the conversation ---- */

static void add_message(struct chat *c, const char *role, const char *content)
{
    c->m = ctl_grow(c->m, c->n + 1, sizeof *c->m);
    c->m[c->n].role = role;
    c->m[c->n].content = strdup(content);
    if (c->m[c->n++].content == NULL)
        ctl_grow(NULL, SIZE_MAX, 1); /* says so and ends */
}

static void drop_last(struct chat *c)
{
    free(c->m[--c->n].content);
}

static void new_session(struct chat *c)
{
    const char *named = opt_wire_given("session");
    c->held = 0;
    if (named != NULL && c->sessions == 0)
        snprintf(c->session, sizeof c->session, "%s", named);
    else
        snprintf(c->session, sizeof c->session, "chat-%ld-%u", (long)getpid(), c->sessions);
    c->sessions++;
}

static void restart(struct chat *c)
{
    while (c->n > 0)
        drop_last(c);
    if (o.system != NULL && *o.system != '\0')
        add_message(c, "system", o.system);
    new_session(c);
}

static struct skv_args *next_request(struct chat *c)
{
    struct skv_args *a = ctl_args();
    bool goes_on = c->held > 0;

    skv_arg_array(a, "messages");
    for (size_t i = c->held; i < c->n; i++) {
        skv_arg_map(a, NULL);
        skv_arg_str(a, "role", c->m[i].role);
        skv_arg_str(a, "content", c->m[i].content);
        skv_arg_end(a);
    }
    skv_arg_end(a);
    if (!o.no_session)
        skv_arg_str(a, "session", c->session);
    /* What belongs to the whole sequence is said once. */
    if (opt_wire(c->ctl, a, goes_on ? "session,kv,pin,pin-system" : "session") < 0) {
        skv_args_free(a);
        return NULL;
    }
    return a;
}

static int answer(struct chat *c)
{
    struct gen_result res;
    struct skv_args *a = next_request(c);
    bool again = c->held > 0;
    int status;

    if (a == NULL)
        return CTL_USAGE;
    status = gen_run(c->ctl, a, stdout, &res, again ? SKV_NOT_FOUND : SKV_OK);
    if (again && res.err.code == SKV_NOT_FOUND) {
        gen_result_fini(&res);
        fputs("(the session is gone; sending the conversation again)\n", stderr);
        new_session(c);
        a = next_request(c);
        status = a != NULL ? gen_run(c->ctl, a, stdout, &res, SKV_OK) : CTL_USAGE;
    }
    if (res.text_len > 0 && res.text[res.text_len - 1] != '\n')
        fputc('\n', stdout);
    if (res.interrupted)
        fputs("(stopped)\n", stderr);
    fflush(stdout);
    if (status == CTL_OK || res.interrupted) {
        add_message(c, "assistant", res.text != NULL ? res.text : "");
        c->held = o.no_session || res.interrupted ? 0 : c->n;
        if (res.interrupted)
            new_session(c); /* whether a stopped answer's session stays is not ours to know */
        else if (o.stats)
            gen_summary(stderr, skv_reply_value(res.reply));
    } else {
        drop_last(c); /* the question can be asked again */
        new_session(c);
    }
    gen_result_fini(&res);
    return status;
}

/* ---- lines ---- */

#ifdef HAVE_LIBEDIT
static char *prompt_text(EditLine *el)
{
    static char text[] = "> ";
    (void)el;
    return text;
}

/* $XDG_STATE_HOME/skvd/chat_history, else ~/.local/state/... */
static void history_place(struct chat *c)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char dir[PATH_MAX - 32];

    if (state != NULL && *state == '/')
        snprintf(dir, sizeof dir, "%s", state);
    else if (home != NULL && *home == '/')
        snprintf(dir, sizeof dir, "%.4000s/.local/state", home);
    else
        return;
    for (char *p = strchr(dir + 1, '/'); p != NULL; p = strchr(p + 1, '/')) {
        *p = '\0';
        mkdir(dir, 0700);
        *p = '/';
    }
    mkdir(dir, 0700);
    snprintf(c->history_file, sizeof c->history_file, "%s/skvd", dir);
    mkdir(c->history_file, 0700);
    strcat(c->history_file, "/chat_history");
}

static void lines_start(struct chat *c)
{
    HistEvent ev;

    if (!c->tty)
        return;
    c->el = el_init("skvctl", stdin, stdout, stderr);
    c->hist = history_init();
    if (c->el == NULL || c->hist == NULL)
        return;
    history(c->hist, &ev, H_SETSIZE, 1000);
    history(c->hist, &ev, H_SETUNIQUE, 1);
    history_place(c);
    if (*c->history_file != '\0')
        history(c->hist, &ev, H_LOAD, c->history_file);
    el_set(c->el, EL_PROMPT, prompt_text);
    el_set(c->el, EL_EDITOR, "emacs");
    el_set(c->el, EL_HIST, history, c->hist);
    el_source(c->el, NULL);
}

static void lines_end(struct chat *c)
{
    HistEvent ev;

    if (c->hist != NULL && *c->history_file != '\0') {
        mode_t old = umask(077);
        history(c->hist, &ev, H_SAVE, c->history_file);
        umask(old);
    }
    if (c->el != NULL)
        el_end(c->el);
    if (c->hist != NULL)
        history_end(c->hist);
}

static char *edited_line(struct chat *c)
{
    HistEvent ev;
    const char *s;
    int n;

    for (;;) {
        ctl_interrupted = 0;
        s = el_gets(c->el, &n);
        if (s != NULL && n > 0)
            break;
        if (!ctl_interrupted)
            return NULL;
        fputc('\n', stdout); /* Ctrl-C at the prompt: another line */
        el_reset(c->el);
    }
    if (s[strspn(s, " \t\r\n")] != '\0')
        history(c->hist, &ev, H_ENTER, s);
    return strdup(s);
}
#else
static void lines_start(struct chat *c)
{
    (void)c;
}
static void lines_end(struct chat *c)
{
    (void)c;
}
#endif

/* One line without its end; NULL: no more. */
static char *one_line(struct chat *c)
{
    char *line = NULL;
    size_t size = 0;

#ifdef HAVE_LIBEDIT
    if (c->el != NULL && c->hist != NULL)
        line = edited_line(c);
    else
#endif
    {
        if (c->tty) {
            fputs("> ", stdout);
            fflush(stdout);
        }
        if (getline(&line, &size, stdin) < 0) {
            free(line);
            line = NULL;
        }
    }
    if (line != NULL)
        line[strcspn(line, "\r\n")] = '\0';
    return line;
}

/* A message: lines that end with a backslash go on. */
static char *one_message(struct chat *c)
{
    char *text = one_line(c);
    size_t n = text != NULL ? strlen(text) : 0;

    while (n > 0 && text[n - 1] == '\\') {
        char *more = one_line(c);
        if (more == NULL)
            break;
        text[n - 1] = '\n';
        text = ctl_grow(text, n + strlen(more) + 1, 1);
        strcpy(text + n, more);
        n += strlen(more);
        free(more);
    }
    return text;
}

/* ---- commands ---- */

static const char help[] = "/new           forget the conversation\n"
                           "/system TEXT   forget it and begin with this system message\n"
                           "/stats         figures after each answer, on or off\n"
                           "/quit          end (so does Ctrl-D)\n"
                           "A line that ends with \\ goes on in the next. Ctrl-C stops an answer.\n";

/* True: end. */
static bool command(struct chat *c, const char *line)
{
    static char *system_text;

    if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0)
        return true;
    if (strcmp(line, "/new") == 0)
        restart(c);
    else if (strcmp(line, "/stats") == 0)
        o.stats = !o.stats;
    else if (strncmp(line, "/system", 7) == 0 && (line[7] == ' ' || line[7] == '\0')) {
        free(system_text);
        o.system = system_text = strdup(line + 7 + strspn(line + 7, " "));
        restart(c);
    } else
        fputs(help, stdout);
    return false;
}

int cmd_chat(struct ctl *ctl, int argc, char **argv)
{
    struct chat c = { .ctl = ctl, .tty = isatty(STDIN_FILENO) };
    char *line;
    int status = CTL_OK;

    (void)argc;
    (void)argv;
    if (ctl_connect(ctl) == NULL)
        return ctl->status;
    ctl_catch_sigint();
    lines_start(&c);
    restart(&c);
    if (c.tty)
        fputs("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends.\n", stdout);
    while ((line = one_message(&c)) != NULL) {
        bool end = false;
        if (*line == '/')
            end = command(&c, line);
        else if (line[strspn(line, " \t\n")] != '\0') {
            add_message(&c, "user", line);
            status = answer(&c);
        }
        free(line);
        if (end || status == CTL_USAGE || (status != CTL_OK && (!c.tty || !skv_want_read(ctl->c))))
            break;
        status = CTL_OK; /* what went wrong was said */
    }
    if (c.tty && line == NULL)
        fputc('\n', stdout);
    lines_end(&c);
    while (c.n > 0)
        drop_last(&c);
    free(c.m);
    return status;
}
