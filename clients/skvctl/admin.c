/* admin.c - the administrator's short commands: one request each. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static void say_map(const struct skv_value *v)
{
    for (size_t i = 0; i < skv_len(v) && skv_type(v) == SKV_MAP; i++) {
        json_t *j = json_of(skv_at(v, i));
        char *s = json_dumps(j, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
        printf("%-24s %s\n", fmt_str(skv_key(v, i), 60), s ? s : "");
        free(s);
        json_decref(j);
    }
}

static int id_request(struct ctl *ctl, const char *method, const char *field, const char *value,
                      void (*print)(const struct skv_value *))
{
    struct skv_args *a;
    long id;

    if (!opt_number(value, 0, LONG_MAX, &id))
        return ctl_usage(ctl, "'%s' is not a sequence number ('skvctl ps' lists them)", value);
    a = ctl_args();
    skv_arg_int(a, field, id);
    return ctl_simple(ctl, method, a, print);
}

static void say_done(const struct skv_value *v)
{
    if (skv_len(v) > 0 && skv_type(v) == SKV_MAP)
        say_map(v);
    else
        printf("done\n");
}

int cmd_kill(struct ctl *ctl, int argc, char **argv)
{
    int status = CTL_OK;
    for (int i = 0; i < argc && status == CTL_OK; i++)
        status = id_request(ctl, "kill", "sequence", argv[i], say_done);
    return status;
}

static struct {
    bool mine;
} can;

const struct ctl_opt cancel_opts[] = {
    { "mine", 0, OPT_FLAG, &can.mine, NULL, "all of this user's sequences that are in work", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

static int cancel_one(struct ctl *ctl, int64_t id)
{
    struct skv_args *a = ctl_args();
    struct skv_reply *r;
    int status;

    skv_arg_int(a, "sequence", id);
    r = ctl_call(ctl, "cancel", a, &status);
    if (r == NULL)
        return status;
    if (ctl->json) {
        json_print(skv_reply_value(r));
    } else if (skv_bool(skv_get(skv_reply_value(r), "cancelled"), false)) {
        printf("cancelled\n");
    } else {
        fprintf(stderr, "skvctl: none of your sequences has the number %lld (skvctl ps; kill ends others')\n", (long long)id);
        status = CTL_FAILED;
    }
    skv_reply_free(r);
    return status;
}

static int cancel_mine(struct ctl *ctl)
{
    int status, n = 0;
    struct skv_reply *r = ctl_call(ctl, "status", NULL, &status);
    const struct skv_value *seqs = skv_get(skv_reply_value(r), "sequences");

    for (size_t i = 0; i < skv_len(seqs) && status == CTL_OK; i++) {
        const struct skv_value *s = skv_at(seqs, i);
        if (skv_str_is(skv_get(s, "state"), "idle"))
            continue;
        status = cancel_one(ctl, skv_int(skv_get(s, "id"), -1));
        n++;
    }
    if (r != NULL && n == 0 && !ctl->json)
        printf("nothing is in work\n");
    skv_reply_free(r);
    return status;
}

int cmd_cancel(struct ctl *ctl, int argc, char **argv)
{
    int status = CTL_OK;

    if (can.mine == (argc > 0))
        return ctl_usage(ctl, "give sequence numbers ('skvctl ps' lists them), or --mine");
    if (can.mine)
        return cancel_mine(ctl);
    for (int i = 0; i < argc && status == CTL_OK; i++) {
        long id;
        if (!opt_number(argv[i], 0, LONG_MAX, &id))
            return ctl_usage(ctl, "'%s' is not a sequence number ('skvctl ps' lists them)", argv[i]);
        status = cancel_one(ctl, id);
    }
    return status;
}

int cmd_drain(struct ctl *ctl, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return ctl_simple(ctl, "drain", NULL, say_done);
}

int cmd_resume(struct ctl *ctl, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return ctl_simple(ctl, "resume", NULL, say_done);
}

int cmd_reload(struct ctl *ctl, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return ctl_simple(ctl, "reload", NULL, say_done);
}

int cmd_get(struct ctl *ctl, int argc, char **argv)
{
    int status;
    struct skv_reply *r = ctl_call(ctl, "get", NULL, &status);
    const struct skv_value *v = skv_reply_value(r), *one = argc > 0 ? skv_get(v, argv[0]) : NULL;

    if (r == NULL)
        return status;
    if (argc > 0 && one == NULL) {
        fprintf(stderr, "skvctl: there is no setting '%s'; 'skvctl get' lists them\n", argv[0]);
        status = CTL_FAILED;
    } else if (argc > 0 || ctl->json)
        json_print(argc > 0 ? one : v);
    else
        say_map(v);
    skv_reply_free(r);
    return status;
}

/* name=value ...: a value that reads as JSON is sent as that, anything else as a string. */
int cmd_set(struct ctl *ctl, int argc, char **argv)
{
    struct skv_args *a = ctl_args();

    for (int i = 0; i < argc; i++) {
        char *eq = strchr(argv[i], '=');
        json_t *j;
        if (eq == NULL || eq == argv[i]) {
            skv_args_free(a);
            return ctl_usage(ctl, "'%s' is not NAME=VALUE", argv[i]);
        }
        *eq = '\0';
        j = json_loads(eq + 1, JSON_DECODE_ANY, NULL);
        if (j != NULL)
            json_to_args(a, argv[i], j);
        else
            skv_arg_str(a, argv[i], eq + 1);
        json_decref(j);
    }
    return ctl_simple(ctl, "set", a, say_done);
}

static struct {
    long grace_ms;
} down = { -1 };

const struct ctl_opt shutdown_opts[] = {
    { "grace-ms", 'g', OPT_INT, &down.grace_ms, "MS", "let running answers end for so long (0: stop now)", 0, 1e9 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

int cmd_shutdown(struct ctl *ctl, int argc, char **argv)
{
    struct skv_args *a = ctl_args();

    (void)argc;
    (void)argv;
    if (down.grace_ms >= 0)
        skv_arg_int(a, "grace_ms", down.grace_ms);
    return ctl_simple(ctl, "shutdown", a, say_done);
}

int cmd_version(struct ctl *ctl, int argc, char **argv)
{
    struct skv_error err;
    struct skv_reply *r = NULL;
    struct skv *c = skv_connect(ctl->socket, &err);
    struct skv_args *a = ctl_args();
    const struct skv_value *v, *m;

    (void)argc;
    (void)argv;
    skv_arg_str(a, "client", "skvctl");
    if (c == NULL)
        skv_args_free(a);
    else if (skv_call(c, "hello", a, &r, &err) < 0) {
        skv_reply_free(r);
        r = NULL;
    }
    v = skv_reply_value(r);
    if (ctl->json) {
        json_t *j = json_pack("{s:s}", "skvctl", VERSION);
        json_object_set_new(j, "daemon", json_of(v));
        json_put(j);
    } else {
        printf("skvctl %s\n", VERSION);
        m = skv_get(v, "model");
        if (r != NULL)
            printf("skvd %s, protocol %lld\n%s: %s, %lld layers, %lld heads (%lld KV), context %lld, vocabulary %lld\n",
                   fmt_str(skv_get(v, "version"), 30), (long long)skv_int(skv_get(v, "protocol"), 0),
                   fmt_str(skv_get(m, "name"), 60), fmt_str(skv_get(m, "arch"), 30),
                   (long long)skv_int(skv_get(m, "layers"), 0), (long long)skv_int(skv_get(m, "heads"), 0),
                   (long long)skv_int(skv_get(m, "kv_heads"), 0), (long long)skv_int(skv_get(m, "context"), 0),
                   (long long)skv_int(skv_get(m, "vocab"), 0));
        else
            printf("no daemon: %s\n", err.msg); /* the program's own version is an answer all the same */
    }
    skv_reply_free(r);
    skv_close(c);
    return CTL_OK;
}

/* ---- events: what the daemon tells while it runs ---- */

static void on_event(struct skv *c, const char *method, const struct skv_value *v, void *arg)
{
    (void)c;
    (void)arg;
    if (strcmp(method, "event") == 0)
        json_print(v);
    fflush(stdout);
}

int cmd_events(struct ctl *ctl, int argc, char **argv)
{
    static const char *const all[] = { "sequences", "evictions", "steps" };
    struct skv_args *a = ctl_args();
    struct skv_error err;
    int status;

    if (ctl_connect(ctl) == NULL) {
        skv_args_free(a);
        return ctl->status;
    }
    skv_arg_array(a, "topics");
    for (int i = 0; i < (argc > 0 ? argc : 3); i++)
        skv_arg_str(a, NULL, argc > 0 ? argv[i] : all[i]);
    skv_arg_end(a);
    skv_on_event(ctl->c, on_event, NULL);
    skv_reply_free(ctl_call(ctl, "subscribe", a, &status));
    if (status != CTL_OK)
        return status;
    ctl_catch_sigint();
    while (!ctl_interrupted)
        if (skv_wait(ctl->c, 200, &err) < 0)
            return ctl_error(ctl, &err);
    return CTL_OK;
}

/* ---- call: any method, arguments as JSON ---- */

int cmd_call(struct ctl *ctl, int argc, char **argv)
{
    struct skv_args *a = NULL;
    json_error_t je;
    json_t *j;
    const char *key;
    json_t *value;

    ctl->json = true;
    if (argc > 1) {
        j = json_loads(argv[1], 0, &je);
        if (!json_is_object(j)) {
            int status = ctl_usage(ctl, "the arguments are not a JSON object%s%s", j ? "" : ": ", j ? "" : je.text);
            json_decref(j);
            return status;
        }
        a = ctl_args();
        json_object_foreach(j, key, value)
            json_to_args(a, key, value);
        json_decref(j);
    }
    return ctl_simple(ctl, argv[0], a, NULL);
}
