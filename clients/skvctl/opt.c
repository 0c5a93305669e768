/* opt.c - options from tables: parsing, help, and the options that become arguments of a request. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OPTS 96
#define MAX_WIRE 256

/* WIRE_ options in the order given. */
static struct {
    const struct ctl_opt *opt;
    const char *value;
} wire[MAX_WIRE];
static int n_wire;

/* The options of `generate` that every command with generation takes. */
const struct ctl_opt gen_options[] = {
    { "max-tokens", 'n', WIRE_INT, NULL, "N", "end after N tokens (0: only read the prompt)", 0, 1e9 },
    { "temperature", 't', WIRE_NUM, NULL, "X", "0: always the likeliest token", 0, 100 },
    { "top-k", 0, WIRE_INT, NULL, "N", "draw from the N likeliest (0: all)", 0, 1e9 },
    { "top-p", 0, WIRE_NUM, NULL, "X", "draw from the likeliest that make up X together", 0, 1 },
    { "min-p", 0, WIRE_NUM, NULL, "X", "leave out what is less likely than X times the likeliest", 0, 1 },
    { "repeat-penalty", 0, WIRE_NUM, NULL, "X", "against tokens that were there lately (1: none)", 0, 100 },
    { "presence-penalty", 0, WIRE_NUM, NULL, "X", "against tokens that were there at all (0: none)", -100, 100 },
    { "frequency-penalty", 0, WIRE_NUM, NULL, "X", "against tokens by how often they were there (0: none)", -100, 100 },
    { "seed", 0, WIRE_INT, NULL, "N", "the same seed gives the same answer", 0, 9e15 },
    { "stop", 0, WIRE_STRS, NULL, "TEXT", "end before TEXT (up to 16 times)", 0, 0 },
    { "ignore-eos", 0, WIRE_FLAG, NULL, NULL, "go on after the model's end of text", 0, 0 },
    { "logprobs", 0, WIRE_INT, NULL, "N", "N alternatives for each token (in --json)", 0, 64 },
    { "session", 0, WIRE_STR, NULL, "NAME", "keep the KV cache under NAME and go on there", 0, 0 },
    { "priority", 0, WIRE_INT, NULL, "N", "-10 to 10, higher first", -10, 10 },
    { "deadline-ms", 0, WIRE_INT, NULL, "MS", "give up when not done by then", 1, 9e15 },
    { "kv", 0, WIRE_KV, NULL, "KEY=VALUE,...", "policy, budget, sink, recent, alpha, pool, pool_kind, full_layers, dtype", 0, 0 },
    { "pin", 0, WIRE_RANGES, NULL, "FROM-TO", "never evict these tokens of the prompt (repeatable)", 0, 0 },
    { "pin-system", 0, WIRE_FLAG, NULL, NULL, "never evict the system message", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

int ctl_usage(struct ctl *ctl, const char *fmt, ...)
{
    va_list ap;

    fprintf(stderr, "skvctl%s%s: ", ctl->cmd ? " " : "", ctl->cmd ? ctl->cmd->name : "");
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\n");
    return CTL_USAGE;
}

bool opt_number(const char *s, long min, long max, long *out)
{
    char *end;
    errno = 0;
    *out = strtol(s, &end, 10);
    return errno == 0 && end != s && *end == '\0' && *out >= min && *out <= max;
}

static bool real_number(const char *s, double *out)
{
    char *end;
    errno = 0;
    *out = strtod(s, &end);
    return errno == 0 && end != s && *end == '\0' && *out == *out;
}

static bool has_range(const struct ctl_opt *o)
{
    return o->min != 0 || o->max != 0;
}

static int bad_value(struct ctl *ctl, const struct ctl_opt *o, const char *value, const char *what)
{
    if (has_range(o))
        ctl_usage(ctl, "--%s: '%s' is not %s from %.15g to %.15g", o->name, value, what, o->min, o->max);
    else
        ctl_usage(ctl, "--%s: '%s' is not %s", o->name, value, what);
    return -1;
}

static int take_int(struct ctl *ctl, const struct ctl_opt *o, const char *value, long *out)
{
    bool ranged = has_range(o);
    if (!opt_number(value, ranged ? (long)o->min : LONG_MIN, ranged ? (long)o->max : LONG_MAX, out))
        return bad_value(ctl, o, value, "a whole number");
    return 0;
}

static int take_num(struct ctl *ctl, const struct ctl_opt *o, const char *value, double *out)
{
    if (!real_number(value, out) || (has_range(o) && (*out < o->min || *out > o->max)))
        return bad_value(ctl, o, value, "a number");
    return 0;
}

static int take_wire(struct ctl *ctl, const struct ctl_opt *o, const char *value)
{
    long l;
    double d;

    if (o->kind == WIRE_INT && take_int(ctl, o, value, &l) < 0)
        return -1;
    if (o->kind == WIRE_NUM && take_num(ctl, o, value, &d) < 0)
        return -1;
    if (n_wire == MAX_WIRE) {
        ctl_usage(ctl, "more than %d options", MAX_WIRE);
        return -1;
    }
    wire[n_wire].opt = o;
    wire[n_wire++].value = value;
    return 0;
}

static int take(struct ctl *ctl, const struct ctl_opt *o, const char *value)
{
    struct opt_list *list = o->to;

    switch (o->kind) {
    case OPT_FLAG:
        *(bool *)o->to = true;
        return 0;
    case OPT_INT:
        return take_int(ctl, o, value, o->to);
    case OPT_NUM:
        return take_num(ctl, o, value, o->to);
    case OPT_STR:
        *(const char **)o->to = value;
        return 0;
    case OPT_LIST:
        list->v = ctl_grow(list->v, list->n + 1, sizeof *list->v);
        list->v[list->n++] = value;
        return 0;
    default:
        return take_wire(ctl, o, value);
    }
}

/* The tables of a command as one array of pointers. */
static int gather(const struct ctl_command *cmd, const struct ctl_opt **out)
{
    int n = 0;
    for (const struct ctl_opt *o = cmd->opts; o != NULL && o->name != NULL; o++)
        out[n++] = o;
    for (const struct ctl_opt *o = gen_options; cmd->wire_opts && o->name != NULL; o++)
        out[n++] = o;
    return n;
}

static bool valueless(const struct ctl_opt *o)
{
    return o->kind == OPT_FLAG || o->kind == WIRE_FLAG;
}

int opt_parse(struct ctl *ctl, int argc, char **argv)
{
    const struct ctl_opt *opts[MAX_OPTS];
    struct option longs[MAX_OPTS + 3];
    char shorts[2 * MAX_OPTS + 4] = "h";
    int n = gather(ctl->cmd, opts), ch, which = 0;

    for (int i = 0; i < n; i++) {
        size_t len = strlen(shorts);
        longs[i] = (struct option){ opts[i]->name, valueless(opts[i]) ? no_argument : required_argument, NULL, 1000 + i };
        if (opts[i]->letter != 0) {
            shorts[len++] = opts[i]->letter;
            if (!valueless(opts[i]))
                shorts[len++] = ':';
            shorts[len] = '\0';
        }
    }
    longs[n] = (struct option){ "help", no_argument, NULL, 'h' };
    longs[n + 1] = (struct option){ "json", no_argument, NULL, 999 };
    longs[n + 2] = (struct option){ NULL, 0, NULL, 0 };
    optind = 0;
    while ((ch = getopt_long(argc, argv, shorts, longs, &which)) != -1) {
        if (ch == 'h') {
            opt_help(ctl->cmd, stdout);
            exit(CTL_OK);
        }
        if (ch == '?') {
            fprintf(stderr, "'skvctl %s --help' lists the options\n", ctl->cmd->name);
            return -1;
        }
        if (ch == 999) {
            ctl->json = true;
            continue;
        }
        for (int i = 0; ch < 1000 && i < n; i++)
            if (opts[i]->letter == ch)
                ch = 1000 + i;
        if (take(ctl, opts[ch - 1000], optarg) < 0)
            return -1;
    }
    for (int i = optind; i <= argc; i++) /* with the NULL at the end */
        argv[i - optind] = argv[i];
    return argc - optind;
}

void opt_help(const struct ctl_command *cmd, FILE *f)
{
    const struct ctl_opt *opts[MAX_OPTS];
    int n = gather(cmd, opts);

    fprintf(f, "usage: skvctl [--socket PATH] [--json] %s%s%s%s\n\n%s\n", cmd->name, n > 0 ? " [OPTIONS]" : "",
            *cmd->args ? " " : "", cmd->args, cmd->help);
    if (n > 0)
        fprintf(f, "\n");
    for (int i = 0; i < n; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s%c%s--%s%s%s", opts[i]->letter ? "-" : "  ", opts[i]->letter ? opts[i]->letter : ' ',
                 opts[i]->letter ? ", " : " ", opts[i]->name, opts[i]->arg ? " " : "", opts[i]->arg ? opts[i]->arg : "");
        fprintf(f, "  %-30s %s\n", left, opts[i]->help);
    }
}

bool opt_listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p != NULL && *p != '\0'; p += strcspn(p, ","), p += *p == ',')
        if (strcspn(p, ",") == n && strncmp(p, name, n) == 0)
            return true;
    return list == NULL;
}

/* ---- arguments of a request ---- */

const char *opt_wire_given(const char *name)
{
    for (int i = n_wire - 1; i >= 0; i--)
        if (strcmp(wire[i].opt->name, name) == 0)
            return wire[i].value ? wire[i].value : "";
    return NULL;
}

/* key=value: numbers as numbers, anything else as a string. */
int opt_kv_args(struct ctl *ctl, struct skv_args *a, const char *spec)
{
    char key[32], value[64];

    while (*spec != '\0') {
        size_t len = strcspn(spec, ","), eq = strcspn(spec, "=");
        char *end;
        long l;
        double d;
        if (eq == 0 || eq >= len || eq >= sizeof key || len - eq - 1 >= sizeof value) {
            ctl_usage(ctl, "--kv: '%.*s' is not KEY=VALUE", (int)len, spec);
            return -1;
        }
        snprintf(key, sizeof key, "%.*s", (int)eq, spec);
        snprintf(value, sizeof value, "%.*s", (int)(len - eq - 1), spec + eq + 1);
        l = strtol(value, &end, 10);
        if (*value != '\0' && *end == '\0')
            skv_arg_int(a, key, l);
        else if (real_number(value, &d))
            skv_arg_num(a, key, d);
        else
            skv_arg_str(a, key, value);
        spec += len + (spec[len] == ',');
    }
    return 0;
}

static int wire_range(struct ctl *ctl, struct skv_args *a, const char *value)
{
    long from, to;
    char extra;

    if (sscanf(value, "%ld-%ld%c", &from, &to, &extra) != 2 || from < 0 || to <= from) {
        ctl_usage(ctl, "--pin: '%s' is not FROM-TO with FROM less than TO (token positions)", value);
        return -1;
    }
    skv_arg_array(a, NULL);
    skv_arg_int(a, NULL, from);
    skv_arg_int(a, NULL, to);
    skv_arg_end(a);
    return 0;
}

/* All values of a repeated option, at its first. */
static int wire_repeated(struct ctl *ctl, struct skv_args *a, const char *name, int first)
{
    const struct ctl_opt *o = wire[first].opt;

    skv_arg_array(a, name);
    for (int i = first; i < n_wire; i++) {
        if (wire[i].opt != o)
            continue;
        if (o->kind == WIRE_STRS)
            skv_arg_str(a, NULL, wire[i].value);
        else if (wire_range(ctl, a, wire[i].value) < 0)
            return -1;
    }
    skv_arg_end(a);
    return 0;
}

/* Is there the same option further on (repeated: before)? Single values: the last counts; arrays go out at the first. */
static bool elsewhere(int i, bool before)
{
    for (int k = before ? 0 : i + 1; k < (before ? i : n_wire); k++)
        if (wire[k].opt == wire[i].opt)
            return true;
    return false;
}

static int wire_one(struct ctl *ctl, struct skv_args *a, int i)
{
    const struct ctl_opt *o = wire[i].opt;
    const char *value = wire[i].value;
    char name[64];
    double d = 0;
    long l = 0;
    int rc = 0;

    snprintf(name, sizeof name, "%s", o->name);
    for (char *p = name; *p != '\0'; p++)
        if (*p == '-')
            *p = '_';
    if (o->kind == WIRE_STRS || o->kind == WIRE_RANGES)
        return elsewhere(i, true) ? 0 : wire_repeated(ctl, a, name, i);
    if (elsewhere(i, false))
        return 0;
    if (o->kind == WIRE_FLAG)
        skv_arg_bool(a, name, true);
    else if (o->kind == WIRE_INT && take_int(ctl, o, value, &l) == 0)
        skv_arg_int(a, name, l);
    else if (o->kind == WIRE_NUM && take_num(ctl, o, value, &d) == 0)
        skv_arg_num(a, name, d);
    else if (o->kind == WIRE_STR)
        skv_arg_str(a, name, value);
    else if (o->kind == WIRE_KV) {
        skv_arg_map(a, name);
        rc = opt_kv_args(ctl, a, value);
        skv_arg_end(a);
    }
    return rc;
}

int opt_wire(struct ctl *ctl, struct skv_args *a, const char *except)
{
    for (int i = 0; i < n_wire; i++)
        if ((except == NULL || !opt_listed(except, wire[i].opt->name)) && wire_one(ctl, a, i) < 0)
            return -1;
    return 0;
}
