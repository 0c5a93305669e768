/* status.c - `skvctl status`, `ps`, `kv`: what the daemon does and where its memory is. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <pwd.h>
#include <stdlib.h>
#include <string.h>

static double num(const struct skv_value *v, const char *name)
{
    return skv_num(skv_get(v, name), 0);
}

static const char *user_name(int64_t uid)
{
    struct passwd *p = uid >= 0 ? getpwuid((uid_t)uid) : NULL;
    return p != NULL ? fmt("%s", p->pw_name) : fmt("%lld", (long long)uid);
}

static void print_sequences(const struct skv_value *list)
{
    static const char *const heads[] = { "ID",  "USER",   "PID", "STATE",  "PROMPT",  "OUT",
                                         "AGE", "KV",     "POLICY", "SESSION", NULL };
    struct table *t = table_new(heads, "rlrlrrrrll");

    for (size_t i = 0; i < skv_len(list); i++) {
        const struct skv_value *s = skv_at(list, i);
        table_add(t, fmt("%lld", (long long)skv_int(skv_get(s, "id"), -1)));
        table_add(t, user_name(skv_int(skv_get(s, "uid"), -1)));
        table_add(t, fmt("%lld", (long long)skv_int(skv_get(s, "pid"), 0)));
        table_add(t, fmt_str(skv_get(s, "state"), 12));
        table_add(t, fmt("%.0f", num(s, "prompt_tokens")));
        table_add(t, fmt("%.0f", num(s, "completion_tokens")));
        table_add(t, fmt_age(num(s, "age_ms")));
        table_add(t, fmt_bytes(num(s, "kv_bytes")));
        table_add(t, fmt_str(skv_get(s, "policy"), 12));
        table_add(t, fmt_str(skv_get(s, "session"), 40));
    }
    table_print(t, stdout);
}

static void print_status(const struct skv_value *v)
{
    double total = num(v, "pages_total"), used = num(v, "pages_used");
    const struct skv_value *seqs = skv_get(v, "sequences");

    printf("up         %s, %s", fmt_age(num(v, "uptime_ms")), fmt_str(skv_get(v, "state"), 20));
    if (skv_get(v, "backend") != NULL) /* an older daemon doesn't say */
        printf(", computed by %s", fmt_str(skv_get(v, "backend"), 20));
    if (num(v, "step_age_ms") > 2000)
        printf("; the step now running began %s ago", fmt_ms(num(v, "step_age_ms")));
    fputc('\n', stdout);
    printf("requests   %.0f running, %.0f waiting; %s finished, %s failed, %s cancelled\n", num(v, "running"),
           num(v, "waiting"), fmt_count(num(v, "finished")), fmt_count(num(v, "failed")), fmt_count(num(v, "cancelled")));
    printf("tokens     %s in, %s out; over the last 10 s %s in, %s out\n", fmt_count(num(v, "tokens_in")),
           fmt_count(num(v, "tokens_out")), fmt_rate(num(v, "tokens_in_per_s")),
           fmt_rate(num(v, "tokens_out_per_s")));
    if (skv_get(v, "steps_graph") != NULL)
        printf("GPU        %s decode steps as one graph, %s piece by piece; %s prepared during the one before\n",
               fmt_count(num(v, "steps_graph")), fmt_count(num(v, "steps_plain")), fmt_count(num(v, "steps_ahead")));
    printf("KV pages   %s %.0f of %.0f used (%s)\n", fmt_bar(total > 0 ? used / total : 0, 20), used, total,
           fmt_percent(total > 0 ? used / total : 0));
    if (skv_len(seqs) > 0) {
        printf("\n");
        print_sequences(seqs);
    }
}

int cmd_status(struct ctl *ctl, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return ctl_simple(ctl, "status", NULL, print_status);
}

static void print_ps(const struct skv_value *v)
{
    const struct skv_value *list = skv_get(v, "sequences");
    if (skv_len(list) == 0)
        printf("no sequences\n");
    else
        print_sequences(list);
}

/* Everybody's for an administrator, else one's own. */
int cmd_ps(struct ctl *ctl, int argc, char **argv)
{
    struct skv_error err;
    struct skv_reply *r = NULL;
    int rc;

    (void)argc;
    (void)argv;
    if (ctl_connect(ctl) == NULL)
        return ctl->status;
    rc = skv_call(ctl->c, "sequences", NULL, &r, &err);
    if (rc < 0 && err.code == SKV_FORBIDDEN) {
        skv_reply_free(r);
        rc = skv_call(ctl->c, "status", NULL, &r, &err);
    }
    if (rc < 0) {
        skv_reply_free(r);
        return ctl_error(ctl, &err);
    }
    if (ctl->json)
        json_print(skv_get(skv_reply_value(r), "sequences"));
    else
        print_ps(skv_reply_value(r));
    skv_reply_free(r);
    return CTL_OK;
}

/* ---- kv ---- */

static void print_kv_layers(const struct skv_value *layers)
{
    static const char *const heads[] = { "LAYER", "POLICY", "BUDGET", "SINK", "RECENT", "PAGES",
                                         "BYTES", "SLOTS",  "EVICTED", "MASS", "BYTES OF THE LARGEST LAYER", NULL };
    struct table *t = table_new(heads, "rlrrrrrrrrl");
    double most = 1, sum[4] = { 0 };

    for (size_t i = 0; i < skv_len(layers); i++)
        if (num(skv_at(layers, i), "bytes") > most)
            most = num(skv_at(layers, i), "bytes");
    for (size_t i = 0; i < skv_len(layers); i++) {
        const struct skv_value *l = skv_at(layers, i);
        bool full = skv_str_is(skv_get(l, "policy"), "full");
        double mass = skv_num(skv_get(l, "kept_mass"), -1);
        table_add(t, fmt("%zu", i));
        table_add(t, fmt_str(skv_get(l, "policy"), 12));
        table_add(t, full ? "all" : fmt("%.0f", num(l, "budget")));
        table_add(t, full ? "-" : fmt("%.0f", num(l, "sink")));
        table_add(t, full ? "-" : fmt("%.0f", num(l, "recent")));
        table_add(t, fmt("%.0f", num(l, "pages")));
        table_add(t, fmt_bytes(num(l, "bytes")));
        table_add(t, fmt_count(num(l, "slots")));
        table_add(t, fmt_count(num(l, "evicted")));
        table_add(t, mass >= 0 ? fmt_percent(mass) : "-");
        table_add(t, fmt_bar(num(l, "bytes") / most, 26));
        sum[0] += num(l, "pages");
        sum[1] += num(l, "bytes");
        sum[2] += num(l, "slots");
        sum[3] += num(l, "evicted");
    }
    table_rule(t);
    table_add(t, "all");
    for (int i = 0; i < 4; i++)
        table_add(t, "");
    table_add(t, fmt("%.0f", sum[0]));
    table_add(t, fmt_bytes(sum[1]));
    table_add(t, fmt_count(sum[2]));
    table_add(t, fmt_count(sum[3]));
    table_add(t, "");
    table_add(t, "");
    table_print(t, stdout);
}

static void print_kv(const struct skv_value *v)
{
    double total = num(v, "pages_total"), used = num(v, "pages_used");
    double page = num(v, "page_bytes");

    print_kv_layers(skv_get(v, "layers"));
    printf("\npool       %s %.0f of %.0f pages used, %s of %s", fmt_bar(total > 0 ? used / total : 0, 20), used, total,
           fmt_bytes(used * page), fmt_bytes(total * page));
    if (skv_get(v, "dtype") != NULL)
        printf(", %s", fmt_str(skv_get(v, "dtype"), 8));
    printf("\n");
    if (skv_get(v, "fit_plan") != NULL)
        printf("fits       %.0f sequences of %.0f tokens with this plan, %.0f with a full cache\n", num(v, "fit_plan"),
               num(v, "fit_context"), num(v, "fit_full"));
}

int cmd_kv(struct ctl *ctl, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return ctl_simple(ctl, "kv", NULL, print_kv);
}
