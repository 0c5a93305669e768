/* config.h - every setting of skvd, from one table.
 *
 * The table (config_options) drives the command line, /etc/skvd.conf, --help, --check-config, the methods set, get and
 * reload, and the test that holds the man pages against the program. A value comes from, in this order: `set` while
 * running, the command line, the config file, the default.
 *
 * Threads: the loop's.
 */
#ifndef SKVD_DAEMON_CONFIG_H
#define SKVD_DAEMON_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "engine/engine.h"
#include "protocol/error.h"

#define CONFIG_FILE_DEFAULT "/etc/skvd.conf"

struct config {
    struct engine_config engine; /* its strings belong to the config */
    int compute;                 /* 0 auto, 1 f32 */
    char *socket, *socket_group, *user, *admin_group, *log_file, *metrics, *config_file;
    int socket_mode;
    int log_level; /* index of config_log_levels */
    bool sandbox, background, check_only, help, version;
    int pool_kind; /* 0 auto, 1 avg, 2 max */

    int max_connections, max_connections_per_user;
    int max_requests, max_requests_per_user, max_requests_per_connection;
    int64_t max_prompt, max_prompt_per_user, max_prompt_per_connection; /* bytes of prompts in flight */
    int64_t max_buffer, max_buffer_per_user; /* bytes of messages that are not whole yet, and of output that waits */
    int64_t frame_limit;
    int nesting_limit;
    int64_t frame_timeout_ms, idle_timeout_ms, reader_timeout_ms, drain_timeout_ms, max_deadline_ms, step_limit_ms;
    int64_t output_high, output_low, output_limit;
};

enum option_type {
    OPTION_BOOL,   /* bool: on, off */
    OPTION_INT,    /* int */
    OPTION_OCTAL,  /* int */
    OPTION_SIZE,   /* int64_t, bytes: 512K, 2G */
    OPTION_TIME,   /* int64_t, ms: 250ms, 30s, 5m, 1h */
    OPTION_SECONDS, /* int, seconds: as OPTION_TIME */
    OPTION_STRING, /* char * */
    OPTION_CHOICE, /* int */
};

enum option_where {
    OPTION_FILE = 1,   /* in the file and on the command line; otherwise the command line only */
    OPTION_LIVE = 2,   /* set and reload may change it */
    OPTION_ENGINE = 4, /* and the engine is told, by the name in `engine_name` */
};

struct option_row {
    const char *name, *arg; /* arg NULL: a flag */
    enum option_type type;
    unsigned where;
    size_t off;
    double min, max;
    const char *dflt;       /* as text; NULL: none, or what the engine takes */
    const char *engine_name;
    const char *const *choices;
    const char *doc;
};

extern const struct option_row config_options[];
extern const int config_n_options;

/* Where a command line's values are kept, to be applied again over a file that was read again. */
struct config_args {
    const char **name, **value; /* of argv: not owned */
    int n;
};

void config_init(struct config *c); /* the defaults */
void config_fini(struct config *c);

/* Read argv into args, checking names only. -1 with BAD_CONFIG. */
int config_read_args(int argc, char **argv, struct config_args *args, struct skv_error *err);
void config_args_fini(struct config_args *args);

/* Defaults, the file (args' or the default one, which may be absent), args. -1 with BAD_CONFIG; *out then needs no fini. */
int config_load(const struct config_args *args, struct config *out, struct skv_error *err);
/* The same from text: `file` is its name in messages. Does not stop at the first wrong line; tells the first. */
int config_parse(struct config *c, const char *file, const char *text, size_t len, struct skv_error *err);

const struct option_row *config_find(const char *name); /* '_' is as good as '-'; NULL: no such option */
/* Set one value from text. -1 with BAD_CONFIG: says what is allowed. */
int config_set(struct config *c, const struct option_row *o, const char *text, struct skv_error *err);
/* The value as text that config_set would take; returns buf. */
const char *config_get(const struct config *c, const struct option_row *o, char *buf, size_t size);
/* Its value as a number, for the engine and the wire; false: it has none (a string, not given). */
bool config_number(const struct config *c, const struct option_row *o, double *out);
bool config_same(const struct config *a, const struct config *b, const struct option_row *o);
int config_copy(struct config *to, const struct config *from, const struct option_row *o); /* one value */

/* Of a number, but not of OPTION_BOOL. */
int64_t config_get_number(const struct config *c, const struct option_row *o);
void config_set_number(struct config *c, const struct option_row *o, int64_t v);

void config_dump(const struct config *c, FILE *f); /* a file that gives the same settings */
void config_usage(FILE *f);
int config_syslog_level(const struct config *c);

#endif
