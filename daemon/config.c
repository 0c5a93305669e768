#include "daemon/config.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "daemon/log.h"
#include "protocol/methods.h"
#include "protocol/scan.h"

#define FILE_BYTES_MAX (1 << 20)

static void *at(const struct config *c, const struct option_row *o)
{
    return (char *)c + o->off;
}

/* ---- values ---------------------------------------------------------------------------------------- */

struct unit {
    const char *suffix;
    double factor;
};

static const struct unit sizes[] = { { "", 1 }, { "K", 1024 }, { "M", 1048576 }, { "G", 1073741824 }, { "T", 1099511627776.0 },
                                     { NULL, 0 } };
static const struct unit times[] = { { "ms", 1 }, { "s", 1e3 }, { "m", 60e3 }, { "h", 3600e3 }, { "d", 86400e3 }, { "", 1 },
                                     { NULL, 0 } };

/* A number and a unit; false where it is neither. */
static bool with_unit(const char *text, const struct unit *units, double *out)
{
    char *end;
    double v;

    if (!isdigit((unsigned char)*text))
        return false; /* no sign, no blanks, no "inf" */
    errno = 0;
    v = strtod(text, &end);
    if (errno != 0 || !isfinite(v))
        return false;
    for (const struct unit *u = units; u->suffix != NULL; u++)
        if (strcasecmp(end, u->suffix) == 0) {
            *out = v * u->factor;
            return true;
        }
    return false;
}

static bool number_of(const struct option_row *o, const char *text, double *out)
{
    char *end;

    switch (o->type) {
    case OPTION_SIZE:
        return with_unit(text, sizes, out);
    case OPTION_TIME:
        return with_unit(text, times, out);
    case OPTION_SECONDS: {
        /* a bare number means seconds here, as the unit of the setting says */
        bool bare = *text != '\0' && strspn(text, "0123456789") == strlen(text);

        if (!with_unit(text, times, out))
            return false;
        *out = bare ? *out : *out / 1000;
        return true;
    }
    case OPTION_OCTAL:
        *out = (double)strtol(text, &end, 8);
        return isdigit((unsigned char)*text) && *end == '\0';
    default:
        errno = 0;
        *out = (double)strtoll(text, &end, 10);
        return errno == 0 && end != text && *end == '\0' && !isspace((unsigned char)*text);
    }
}

static const char *number_text(const struct option_row *o, double v, char *buf, size_t size)
{
    switch (o->type) {
    case OPTION_SIZE:
        for (int i = 4; i >= 0; i--)
            if (i == 0 || (v >= sizes[i].factor && fmod(v, sizes[i].factor) == 0)) {
                snprintf(buf, size, "%.0f%s", v / sizes[i].factor, sizes[i].suffix);
                break;
            }
        break;
    case OPTION_TIME:
        if (v == 0 || fmod(v, 1000) != 0)
            snprintf(buf, size, v == 0 ? "0" : "%.0fms", v);
        else
            snprintf(buf, size, "%.0fs", v / 1000);
        break;
    case OPTION_SECONDS:
        snprintf(buf, size, "%.0fs", v);
        break;
    case OPTION_OCTAL:
        snprintf(buf, size, "%04o", (unsigned)v);
        break;
    default:
        snprintf(buf, size, "%.0f", v);
    }
    return buf;
}

static int set_string(struct config *c, const struct option_row *o, const char *text, struct skv_error *err)
{
    char **to = at(c, o), *copy = strdup(text);

    if (copy == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the settings");
    if (!scan_utf8_valid(text, strlen(text)) || strpbrk(text, "\n\r") != NULL) {
        free(copy);
        return skv_fail(err, SKV_BAD_CONFIG, "%s: the value must be one line of UTF-8 text", o->name);
    }
    free(*to);
    *to = copy;
    return 0;
}

static int set_bool(struct config *c, const struct option_row *o, const char *text, struct skv_error *err)
{
    static const char *const yes[] = { "on", "yes", "true", "1" }, *const no[] = { "off", "no", "false", "0" };

    for (int i = 0; i < 4; i++)
        if (strcasecmp(text, yes[i]) == 0 || strcasecmp(text, no[i]) == 0) {
            *(bool *)at(c, o) = strcasecmp(text, yes[i]) == 0;
            return 0;
        }
    return skv_fail(err, SKV_BAD_CONFIG, "%s: '%.64s' is neither on nor off", o->name, text);
}

static int set_choice(struct config *c, const struct option_row *o, const char *text, struct skv_error *err)
{
    char list[128] = "";
    size_t n = 0;

    for (int i = 0; o->choices[i] != NULL; i++) {
        if (strcmp(text, o->choices[i]) == 0) {
            *(int *)at(c, o) = i;
            return 0;
        }
        if (n < sizeof list)
            n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i > 0 ? ", " : "", o->choices[i]);
    }
    return skv_fail(err, SKV_BAD_CONFIG, "%s: '%.64s' is none of %s", o->name, text, list);
}

static const char *kind_text(const struct option_row *o)
{
    switch (o->type) {
    case OPTION_SIZE:
        return "a size in bytes, or with K, M, G or T,";
    case OPTION_TIME:
    case OPTION_SECONDS:
        return "a time with ms, s, m, h or d";
    case OPTION_OCTAL:
        return "an octal mode";
    default:
        return "an integer";
    }
}

int config_set(struct config *c, const struct option_row *o, const char *text, struct skv_error *err)
{
    double v;

    if (o->type == OPTION_STRING)
        return set_string(c, o, text, err);
    if (o->type == OPTION_BOOL)
        return set_bool(c, o, text, err);
    if (o->type == OPTION_CHOICE)
        return set_choice(c, o, text, err);
    if (!number_of(o, text, &v) || v < o->min || v > o->max || v != floor(v)) {
        char lo[32], hi[32];

        return skv_fail(err, SKV_BAD_CONFIG, "%s: '%.64s' is not %s from %s to %s", o->name, text, kind_text(o),
                        number_text(o, o->min, lo, sizeof lo), number_text(o, o->max, hi, sizeof hi));
    }
    if (o->type == OPTION_SIZE || o->type == OPTION_TIME)
        *(int64_t *)at(c, o) = (int64_t)v;
    else
        *(int *)at(c, o) = (int)v;
    return 0;
}

bool config_number(const struct config *c, const struct option_row *o, double *out)
{
    switch (o->type) {
    case OPTION_SIZE:
    case OPTION_TIME:
        *out = (double)*(int64_t *)at(c, o);
        return true;
    case OPTION_INT:
    case OPTION_SECONDS:
        *out = *(int *)at(c, o);
        return *out >= o->min; /* -1: the engine's own choice */
    case OPTION_BOOL:
        *out = *(bool *)at(c, o);
        return true;
    default:
        return false;
    }
}

const char *config_get(const struct config *c, const struct option_row *o, char *buf, size_t size)
{
    double v;

    buf[0] = '\0';
    if (o->type == OPTION_STRING)
        snprintf(buf, size, "%s", *(char **)at(c, o) != NULL ? *(char **)at(c, o) : "");
    else if (o->type == OPTION_BOOL)
        snprintf(buf, size, "%s", *(bool *)at(c, o) ? "on" : "off");
    else if (o->type == OPTION_CHOICE)
        snprintf(buf, size, "%s", o->choices[*(int *)at(c, o)]);
    else if (o->type == OPTION_OCTAL)
        number_text(o, *(int *)at(c, o), buf, size);
    else if (config_number(c, o, &v))
        number_text(o, v, buf, size);
    return buf;
}

bool config_same(const struct config *a, const struct config *b, const struct option_row *o)
{
    char x[1024], y[1024];

    return strcmp(config_get(a, o, x, sizeof x), config_get(b, o, y, sizeof y)) == 0;
}

int config_copy(struct config *to, const struct config *from, const struct option_row *o)
{
    switch (o->type) {
    case OPTION_STRING: {
        char *s = *(char **)at(from, o), *copy = s != NULL ? strdup(s) : NULL;

        if (s != NULL && copy == NULL)
            return -1;
        free(*(char **)at(to, o));
        *(char **)at(to, o) = copy;
        return 0;
    }
    case OPTION_SIZE:
    case OPTION_TIME:
        *(int64_t *)at(to, o) = *(int64_t *)at(from, o);
        return 0;
    case OPTION_BOOL:
        *(bool *)at(to, o) = *(bool *)at(from, o);
        return 0;
    default:
        *(int *)at(to, o) = *(int *)at(from, o);
        return 0;
    }
}

int64_t config_get_number(const struct config *c, const struct option_row *o)
{
    return o->type == OPTION_SIZE || o->type == OPTION_TIME ? *(int64_t *)at(c, o) : *(int *)at(c, o);
}

void config_set_number(struct config *c, const struct option_row *o, int64_t v)
{
    if (o->type == OPTION_SIZE || o->type == OPTION_TIME)
        *(int64_t *)at(c, o) = v;
    else
        *(int *)at(c, o) = (int)v;
}

const struct option_row *config_find(const char *name)
{
    for (int i = 0; i < config_n_options; i++) {
        const char *a = config_options[i].name, *b = name;

        while (*a != '\0' && (*a == *b || (*a == '-' && *b == '_'))) {
            a++;
            b++;
        }
        if (*a == '\0' && *b == '\0')
            return &config_options[i];
    }
    return NULL;
}

int config_syslog_level(const struct config *c)
{
    static const int level[] = { LOG_ERR, LOG_WARNING, LOG_INFO, LOG_DEBUG };

    return level[c->log_level];
}

/* ---- the whole ------------------------------------------------------------------------------------- */

void config_init(struct config *c)
{
    struct skv_error err;

    memset(c, 0, sizeof *c);
    engine_config_default(&c->engine);
    for (int i = 0; i < config_n_options; i++) {
        const struct option_row *o = &config_options[i];
        char **s = at(c, o);

        if (o->type == OPTION_STRING && *s != NULL)
            *s = strdup(*s); /* a literal of the engine's: make it ours */
        if (o->dflt != NULL)
            config_set(c, o, o->dflt, &err);
    }
}

void config_fini(struct config *c)
{
    for (int i = 0; i < config_n_options; i++)
        if (config_options[i].type == OPTION_STRING)
            free(*(char **)at(c, &config_options[i]));
    memset(c, 0, sizeof *c);
}

static const char *next_option(void *arg)
{
    int *i = arg;

    return *i < config_n_options ? config_options[(*i)++].name : NULL;
}

static int unknown(const char *where, const char *name, struct skv_error *err)
{
    int i = 0;
    const char *near = method_nearest(name, strlen(name), next_option, &i);

    if (near != NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "%s'%.64s' is not a setting; did you mean '%s'?", where, name, near);
    return skv_fail(err, SKV_BAD_CONFIG, "%s'%.64s' is not a setting; skvd --help lists them", where, name);
}

static char *trim(char *s)
{
    size_t n;

    while (*s == ' ' || *s == '\t')
        s++;
    n = strlen(s);
    while (n > 0 && strchr(" \t\r", s[n - 1]) != NULL)
        s[--n] = '\0';
    return s;
}

/* One line: `name value` or `name = value`; the value may stand in double quotes. */
static int parse_line(struct config *c, char *line, struct skv_error *err)
{
    const struct option_row *o;
    char *name = trim(line), *value = name + strcspn(name, " \t="), *end;
    size_t n;

    if (*name == '\0' || *name == '#')
        return 0;
    if (*value != '\0') {
        bool eq = *value == '=';

        *value++ = '\0';
        value = trim(value);
        if (!eq && *value == '=')
            value = trim(value + 1);
    }
    o = config_find(name);
    if (o == NULL)
        return unknown("", name, err);
    if (!(o->where & OPTION_FILE))
        return skv_fail(err, SKV_BAD_CONFIG, "%s belongs on the command line, not into a file", o->name);
    n = strlen(value);
    if (*value == '"') {
        end = strchr(value + 1, '"');
        if (end == NULL || end[1] != '\0')
            return skv_fail(err, SKV_BAD_CONFIG, "%s: a quoted value ends with the line's second quote", o->name);
        value[n - 1] = '\0';
        value++;
    } else if (n == 0) {
        return skv_fail(err, SKV_BAD_CONFIG, "%s needs a value: %s", o->name, o->doc);
    }
    return config_set(c, o, value, err);
}

int config_parse(struct config *c, const char *file, const char *text, size_t len, struct skv_error *err)
{
    char *copy = malloc(len + 1), *line, *rest;
    int n = 0, rc = 0;

    if (copy == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %s", file);
    memcpy(copy, text, len);
    copy[len] = '\0';
    if (memchr(copy, '\0', len) != NULL) {
        free(copy);
        return skv_fail(err, SKV_BAD_CONFIG, "%s is not a text file: it has a NUL byte", file);
    }
    rest = copy;
    while (rc == 0 && (line = strsep(&rest, "\n")) != NULL) {
        struct skv_error why;

        n++;
        if (parse_line(c, line, &why) != 0)
            rc = skv_fail(err, why.code, "%.200s:%d: %.280s", file, n, why.msg);
    }
    free(copy);
    return rc;
}

static int read_file(struct config *c, const char *path, bool must_exist, struct skv_error *err)
{
    FILE *f = fopen(path, "re");
    char *text;
    size_t n;
    int rc;

    if (f == NULL) {
        if (errno == ENOENT && !must_exist)
            return 0;
        return skv_fail(err, SKV_BAD_CONFIG, "%.200s: %s", path, strerror(errno));
    }
    text = malloc(FILE_BYTES_MAX + 1);
    if (text == NULL) {
        fclose(f);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %.200s", path);
    }
    n = fread(text, 1, FILE_BYTES_MAX + 1, f);
    if (ferror(f))
        rc = skv_fail(err, SKV_BAD_CONFIG, "%.200s: %s", path, strerror(errno));
    else if (n > FILE_BYTES_MAX)
        rc = skv_fail(err, SKV_BAD_CONFIG, "%.200s is larger than %d bytes", path, FILE_BYTES_MAX);
    else
        rc = config_parse(c, path, text, n, err);
    free(text);
    fclose(f);
    return rc;
}

/* What one value alone does not show. */
static int check_whole(const struct config *c, struct skv_error *err)
{
    if (c->output_low >= c->output_high || c->output_high >= c->output_limit)
        return skv_fail(err, SKV_BAD_CONFIG, "output-low, output-high and output-limit must be in ascending order");
    if (c->engine.kv.pool >= 0 && c->engine.kv.pool % 2 == 0)
        return skv_fail(err, SKV_BAD_CONFIG, "kv-pool: %d is even, it must be odd", c->engine.kv.pool);
    return 0;
}

int config_load(const struct config_args *args, struct config *out, struct skv_error *err)
{
    const char *file = NULL;
    int rc;

    config_init(out);
    for (int i = 0; i < args->n; i++)
        if (strcmp(args->name[i], "config") == 0)
            file = args->value[i];
    rc = read_file(out, file != NULL ? file : CONFIG_FILE_DEFAULT, file != NULL, err);
    for (int i = 0; i < args->n && rc == 0; i++)
        rc = config_set(out, config_find(args->name[i]), args->value[i], err);
    if (rc == 0)
        rc = check_whole(out, err);
    out->engine.compute_f32 = out->compute == 1;
    if (out->pool_kind > 0)
        out->engine.kv.pool_kind = out->pool_kind - 1;
    if (rc != 0)
        config_fini(out);
    return rc;
}

int config_read_args(int argc, char **argv, struct config_args *args, struct skv_error *err)
{
    memset(args, 0, sizeof *args);
    args->name = calloc((size_t)argc + 1, sizeof *args->name);
    args->value = calloc((size_t)argc + 1, sizeof *args->value);
    if (args->name == NULL || args->value == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for the command line");
    for (int i = 1; i < argc; i++) {
        const struct option_row *o;
        char name[64];
        const char *eq = strchr(argv[i], '=');
        size_t n = eq != NULL ? (size_t)(eq - argv[i]) : strlen(argv[i]);

        if (strncmp(argv[i], "--", 2) != 0 || n < 3 || n - 2 >= sizeof name)
            return skv_fail(err, SKV_BAD_CONFIG, "'%.64s' is not an option; skvd --help lists them", argv[i]);
        memcpy(name, argv[i] + 2, n - 2);
        name[n - 2] = '\0';
        o = config_find(name);
        if (o == NULL)
            return unknown("--", name, err);
        args->name[args->n] = o->name;
        if (o->arg == NULL && eq != NULL)
            return skv_fail(err, SKV_BAD_CONFIG, "--%s takes no value", o->name);
        if (o->arg == NULL)
            args->value[args->n] = "on";
        else if (eq != NULL)
            args->value[args->n] = eq + 1;
        else if (i + 1 < argc)
            args->value[args->n] = argv[++i];
        else
            return skv_fail(err, SKV_BAD_CONFIG, "--%s needs a value: %s", o->name, o->doc);
        args->n++;
    }
    return 0;
}

void config_args_fini(struct config_args *args)
{
    free(args->name);
    free(args->value);
    memset(args, 0, sizeof *args);
}

void config_dump(const struct config *c, FILE *f)
{
    for (int i = 0; i < config_n_options; i++) {
        const struct option_row *o = &config_options[i];
        char v[1024];

        if (!(o->where & OPTION_FILE))
            continue;
        config_get(c, o, v, sizeof v);
        if (*v == '\0')
            fprintf(f, "# %s is not set\n", o->name);
        else if (strpbrk(v, " \t") != NULL && strchr(v, '"') == NULL)
            fprintf(f, "%s = \"%s\"\n", o->name, v);
        else
            fprintf(f, "%s = %s\n", o->name, v);
    }
}

void config_usage(FILE *f)
{
    fprintf(f, "usage: skvd --model FILE [OPTION...]\n\n");
    for (int i = 0; i < config_n_options; i++) {
        const struct option_row *o = &config_options[i];
        char left[64];

        snprintf(left, sizeof left, "--%s%s%s", o->name, o->arg != NULL ? " " : "", o->arg != NULL ? o->arg : "");
        fprintf(f, "  %-34s %s%s%s%s\n", left, o->doc, o->dflt != NULL ? " (" : "", o->dflt != NULL ? o->dflt : "",
                o->dflt != NULL ? ")" : "");
    }
    fprintf(f, "\nAll but the last five may stand in the configuration file, as `name = value`: skvd.conf(5).\n");
}
