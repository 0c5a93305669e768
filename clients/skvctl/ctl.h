/* ctl.h - what skvctl's files share: the command table, options, talking to the daemon, printing for people. */
#ifndef SKVD_CLIENTS_SKVCTL_CTL_H
#define SKVD_CLIENTS_SKVCTL_CTL_H

#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "clients/libskv/skv.h"

/* Exit statuses. */
enum { CTL_OK = 0, CTL_FAILED = 1, CTL_USAGE = 2, CTL_NO_DAEMON = 3 };

struct ctl_command;

struct ctl {
    const char *socket; /* NULL: the default path */
    bool json;
    const struct ctl_command *cmd;
    struct skv *c;
    int status; /* exit status of a connection that failed */
};

/* ---- options (opt.c) ---------------------------------------------------------------------------------- */

enum opt_kind {
    OPT_FLAG, /* bool */
    OPT_INT,  /* long, within [min, max] */
    OPT_NUM,  /* double, within [min, max] */
    OPT_STR,  /* const char * */
    OPT_LIST, /* struct opt_list: may be given again and again */
    /* Arguments of a request, sent only when given, under the option's name with '_' for '-' (`to` is unused). */
    WIRE_FLAG,
    WIRE_INT,
    WIRE_NUM,
    WIRE_STR,
    WIRE_STRS,   /* repeated: an array of strings */
    WIRE_RANGES, /* repeated FROM-TO: an array of pairs */
    WIRE_KV,     /* key=value,...: a map */
};

struct opt_list {
    const char **v;
    size_t n;
};

struct ctl_opt {
    const char *name; /* NULL ends a table */
    char letter;      /* 0: none */
    enum opt_kind kind;
    void *to;
    const char *arg; /* how help calls the value */
    const char *help;
    double min, max; /* both 0: no range */
};

struct ctl_command {
    const char *name, *args, *help;
    const struct ctl_opt *opts;
    bool wire_opts; /* takes the options of generation too (gen_options) */
    int min_args, max_args; /* positional; max -1: any number */
    int (*run)(struct ctl *ctl, int argc, char **argv); /* argv: positional arguments only */
};

extern const struct ctl_command ctl_commands[]; /* ends with a NULL name */
extern const struct ctl_opt gen_options[];

/* Parse the command's options; positional arguments are moved to argv[0..]. Their number, or -1 after a message. */
int opt_parse(struct ctl *ctl, int argc, char **argv);
void opt_help(const struct ctl_command *cmd, FILE *f);
/* Put the WIRE_ options that were given into a request; `except` (may be NULL): a,b,... to leave out. -1: a message was
 * printed. */
int opt_wire(struct ctl *ctl, struct skv_args *a, const char *except);
const char *opt_wire_given(const char *name); /* the last value of a WIRE_ option; NULL: not given */
/* key=value,... into the map that is open. -1 after a message. */
int opt_kv_args(struct ctl *ctl, struct skv_args *a, const char *spec);
/* A message "skvctl COMMAND: ..." on stderr, and CTL_USAGE. */
int ctl_usage(struct ctl *ctl, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Is name one of a,b,...? NULL: no list, so it is. */
bool opt_listed(const char *list, const char *name);
/* A whole number within [min, max]; false: it is none. */
bool opt_number(const char *s, long min, long max, long *out);

/* ---- the daemon (conn.c) ------------------------------------------------------------------------------- */

/* Connect once. NULL after a message that names the path and says how to start a daemon. */
struct skv *ctl_connect(struct ctl *ctl);
/* A further connection to the same daemon. */
struct skv *ctl_connect_again(struct ctl *ctl);
/* A fresh map of arguments; out of memory ends the program. */
struct skv_args *ctl_args(void);
/* Call and hand the result over; NULL after a message. args is taken. *exit_status is set in both cases. */
struct skv_reply *ctl_call(struct ctl *ctl, const char *method, struct skv_args *take_args, int *exit_status);
/* Print an error as a person wants it; returns the exit status. */
int ctl_error(struct ctl *ctl, const struct skv_error *err);
/* A command that sends one request and prints its result (as JSON, or with print). */
int ctl_simple(struct ctl *ctl, const char *method, struct skv_args *take_args, void (*print)(const struct skv_value *v));
/* Set by SIGINT after ctl_catch_sigint. */
extern volatile sig_atomic_t ctl_interrupted;
void ctl_catch_sigint(void);
/* Memory, or a message and exit status 1. */
void *ctl_alloc(size_t n, size_t size);
void *ctl_grow(void *p, size_t n, size_t size);
/* All of a file (NULL: standard input), NUL-terminated, at most limit bytes. NULL after a message. */
char *ctl_read_file(const char *path, size_t limit, size_t *len);

/* Run one generate, printing its text as it comes (to NULL: nothing). Ctrl-C cancels it. *reply is always set on 0 and may
 * be on failure. Returns the exit status after printing errors (but not a cancel by Ctrl-C, nor the error `quiet`). */
struct gen_result {
    struct skv_reply *reply;
    struct skv_error err; /* code SKV_OK: well */
    char *text;           /* all that came, NUL-terminated */
    size_t text_len;
    bool interrupted;
};
int gen_run(struct ctl *ctl, struct skv_args *take_args, FILE *to, struct gen_result *res, enum skv_code quiet);
void gen_result_fini(struct gen_result *res);
/* One line of timings and KV figures for people. */
void gen_summary(FILE *f, const struct skv_value *result);

/* ---- printing (out.c) ------------------------------------------------------------------------------------ */

/* Text from the daemon: control characters are made harmless when f is a terminal, bad UTF-8 is always. */
void out_text(FILE *f, const char *s, size_t len);
/* Columns of the terminal behind f (80 when it has none) and rows. */
int out_width(FILE *f);
int out_height(FILE *f);
bool out_tty(FILE *f);
/* Figures with units, into a ring of static buffers (16 live at a time). */
const char *fmt_bytes(double bytes);
const char *fmt_ms(double ms);
const char *fmt_count(double n); /* 12345 -> 12.3k, units: k M G */
const char *fmt_rate(double per_s);
const char *fmt_age(double ms); /* 3h12m */
const char *fmt_percent(double share);
const char *fmt_str(const struct skv_value *v, size_t max_columns); /* "-" for nil */
const char *fmt(const char *f, ...) __attribute__((format(printf, 1, 2)));
/* Columns that UTF-8 text takes on a terminal. */
int out_columns(const char *s, size_t len);
/* A bar of `cells` characters, filled by share (0..1) in eighths of a cell. */
const char *fmt_bar(double share, int cells);

/* A table of text: fill row by row, then print; columns get the width they need, the last is cut to the terminal. */
struct table;
struct table *table_new(const char *const *heads, const char *align); /* align: one of 'l' 'r' a column; heads NULL-ended */
void table_add(struct table *t, const char *cell);
void table_rule(struct table *t); /* a line between rows */
void table_print(struct table *t, FILE *f); /* and free */

/* Milliseconds of a clock that is never set. */
double now_ms(void);
/* A progress line on stderr; where that is no terminal, a line of its own every ten seconds ($SKVCTL_PROGRESS; 0: none). */
void progress(double done, double total, const char *note);
void progress_end(void);

/* ---- JSON (json.c) ----------------------------------------------------------------------------------------- */

json_t *json_of(const struct skv_value *v);
void json_print(const struct skv_value *v);
void json_put(json_t *take_j); /* print and free */
void json_to_args(struct skv_args *a, const char *name, const json_t *j);

/* ---- commands ------------------------------------------------------------------------------------------------ */

int cmd_run(struct ctl *ctl, int argc, char **argv);
int cmd_chat(struct ctl *ctl, int argc, char **argv);
int cmd_score(struct ctl *ctl, int argc, char **argv);
int cmd_tokenize(struct ctl *ctl, int argc, char **argv);
int cmd_detokenize(struct ctl *ctl, int argc, char **argv);
int cmd_template(struct ctl *ctl, int argc, char **argv);
int cmd_status(struct ctl *ctl, int argc, char **argv);
int cmd_ps(struct ctl *ctl, int argc, char **argv);
int cmd_kv(struct ctl *ctl, int argc, char **argv);
int cmd_top(struct ctl *ctl, int argc, char **argv);
int cmd_inspect(struct ctl *ctl, int argc, char **argv);
int cmd_bench(struct ctl *ctl, int argc, char **argv);
int cmd_eval(struct ctl *ctl, int argc, char **argv);
int cmd_plan(struct ctl *ctl, int argc, char **argv);
int cmd_cancel(struct ctl *ctl, int argc, char **argv);
int cmd_drain(struct ctl *ctl, int argc, char **argv);
int cmd_resume(struct ctl *ctl, int argc, char **argv);
int cmd_set(struct ctl *ctl, int argc, char **argv);
int cmd_get(struct ctl *ctl, int argc, char **argv);
int cmd_kill(struct ctl *ctl, int argc, char **argv);
int cmd_reload(struct ctl *ctl, int argc, char **argv);
int cmd_shutdown(struct ctl *ctl, int argc, char **argv);
int cmd_events(struct ctl *ctl, int argc, char **argv);
int cmd_call(struct ctl *ctl, int argc, char **argv);
int cmd_version(struct ctl *ctl, int argc, char **argv);
int cmd_help(struct ctl *ctl, int argc, char **argv);

extern const struct ctl_opt run_opts[], chat_opts[], score_opts[], tokenize_opts[], template_opts[], top_opts[],
    inspect_opts[], bench_opts[], eval_opts[], plan_opts[], shutdown_opts[], cancel_opts[];

#endif
