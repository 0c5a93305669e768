#include "daemon/admin.h"

#include <errno.h>
#include <grp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/client.h"
#include "daemon/log.h"
#include "daemon/reply.h"
#include "daemon/requests.h"

#ifndef SO_PEERGROUPS
#define SO_PEERGROUPS 59
#endif

#define GROUPS_MAX 1024

int admin_init(struct server *s, struct skv_error *err)
{
    const struct group *g;

    if (s->cfg.admin_group == NULL || *s->cfg.admin_group == '\0')
        return 0;
    errno = 0;
    g = getgrnam(s->cfg.admin_group);
    if (g == NULL)
        return skv_fail(err, SKV_BAD_CONFIG, "admin-group: there is no group '%.64s'", s->cfg.admin_group);
    s->admin_gid = g->gr_gid;
    s->have_admin_gid = true;
    return 0;
}

bool admin_is(const struct server *s, int fd, uint32_t uid, gid_t gid)
{
    gid_t groups[GROUPS_MAX];
    socklen_t n = sizeof groups;

    if (uid == 0 || uid == geteuid())
        return true;
    if (!s->have_admin_gid)
        return false;
    if (gid == s->admin_gid)
        return true;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &n) != 0)
        return false;
    for (size_t i = 0; i < n / sizeof *groups; i++)
        if (groups[i] == s->admin_gid)
            return true;
    return false;
}

/* ---- set, get, reload ------------------------------------------------------------------------------ */

/* Take one live setting over from `from`. */
static void apply(struct server *s, const struct config *from, const struct option_row *o)
{
    config_copy(&s->cfg, from, o);
    if (strcmp(o->name, "log-level") == 0)
        log_set_level(config_syslog_level(&s->cfg));
}

/* Tell the engine one value; the answer goes to parent. */
static int tell_engine(struct server *s, struct request *parent, const struct option_row *o, int64_t old, struct skv_error *err)
{
    struct engine_request *er;
    struct request *r;
    double v;

    if (!config_number(&s->cfg, o, &v))
        return 0;
    er = engine_request_new(ENGINE_SET);
    if (er == NULL || (er->set_name = strdup(o->engine_name)) == NULL) {
        engine_request_free(er);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
    }
    er->set_value = v;
    r = requests_submit(s, NULL, 0, &method_table[METHOD_SET], er, err);
    if (r == NULL)
        return -1;
    r->parent = parent;
    r->option = o;
    r->old = old;
    parent->pending++;
    return 0;
}

static uint64_t bit_of(const struct option_row *o)
{
    return (uint64_t)1 << (o - config_options);
}

void admin_refused(struct request *p, const struct option_row *o, enum skv_code code, const char *message)
{
    if (message == NULL)
        message = skv_code_name(code);
    log_line(LOG_WARNING, "%s name=%s refused detail=\"%s\"", p->method->name, o->name, message);
    p->refused |= bit_of(o);
    if (p->failed.code == SKV_OK)
        skv_fail(&p->failed, code, "%s", message);
}

/* Apply one value of `from` and, if it is the engine's, tell it. */
static void apply_and_tell(struct server *s, struct request *p, const struct config *from, const struct option_row *o)
{
    int64_t old = o->where & OPTION_ENGINE ? config_get_number(&s->cfg, o) : 0;
    struct skv_error err;

    apply(s, from, o);
    if ((o->where & OPTION_ENGINE) && tell_engine(s, p, o, old, &err) != 0) {
        config_set_number(&s->cfg, o, old);
        admin_refused(p, o, err.code, err.msg);
    }
}

static void name_list(struct wire_buf *b, const char *key, uint64_t bits)
{
    wire_str(b, key);
    wire_array(b, (uint32_t)__builtin_popcountll(bits));
    for (int i = 0; i < config_n_options; i++)
        if (bits & (uint64_t)1 << i)
            wire_str(b, config_options[i].name);
}

void admin_settings_done(struct request *p)
{
    struct server *s = p->srv;
    struct wire_buf *b = &s->out;
    struct client *c = p->c;
    struct skv_error e;

    wire_buf_clear(b);
    if (p->method->id == METHOD_RELOAD) {
        wire_response(b, p->msgid);
        wire_map(b, 3);
        name_list(b, "applied", p->applied & ~p->refused);
        name_list(b, "restart", p->restart);
        name_list(b, "refused", p->refused);
    } else if (p->failed.code != SKV_OK) {
        client_wire_error(s, &p->failed, &e);
        wire_response_error(b, p->msgid, &e);
    } else {
        reply_settings(b, p->msgid, s);
    }
    requests_end(p);
    if (c != NULL)
        client_send(c, b);
}

/* Check every pair on a copy first: all are applied or none. */
static int check_settings(const struct server *s, const struct args *a, struct config *trial, struct skv_error *err)
{
    for (int i = 0; i < config_n_options; i++)
        if (config_copy(trial, &s->cfg, &config_options[i]) != 0)
            return skv_fail(err, SKV_NO_MEMORY, "no memory for the settings");
    for (int i = 0; i < a->n_settings; i++) {
        const struct option_row *o = config_find(a->settings[i].name);

        if (o == NULL)
            return skv_fail(err, SKV_BAD_REQUEST, "'%.64s' is not a setting; get lists them", a->settings[i].name);
        if (!(o->where & OPTION_LIVE))
            return skv_fail(err, SKV_BAD_REQUEST, "%s can't change while skvd runs: set it in skvd.conf and restart", o->name);
        if (config_set(trial, o, a->settings[i].value, err) != 0) {
            err->code = SKV_BAD_REQUEST;
            return -1;
        }
    }
    if (trial->output_low >= trial->output_high || trial->output_high >= trial->output_limit)
        return skv_fail(err, SKV_BAD_REQUEST, "output-low, output-high and output-limit must be in ascending order");
    return 0;
}

#define SET_MAX 64

static int method_set(struct client *c, uint32_t msgid, const struct method *m, const struct args *a, struct skv_error *err)
{
    struct server *s = c->srv;
    struct config trial;
    struct request *r = NULL;
    int rc;

    if (a->n_settings > SET_MAX)
        return skv_fail(err, SKV_BAD_REQUEST, "set takes at most %d settings at once", SET_MAX);
    memset(&trial, 0, sizeof trial);
    rc = check_settings(s, a, &trial, err);
    if (rc == 0 && (r = requests_new(s, c, msgid, m)) == NULL)
        rc = skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
    if (rc == 0)
        r->pending = 1; /* ours, until all commands are on their way */
    for (int i = 0; i < a->n_settings && rc == 0; i++) {
        const struct option_row *o = config_find(a->settings[i].name);

        log_line(LOG_INFO, "set uid=%u pid=%d name=%s value=%s", c->uid, (int)c->pid, o->name, a->settings[i].value);
        apply_and_tell(s, r, &trial, o);
    }
    config_fini(&trial);
    if (rc == 0 && --r->pending == 0)
        admin_settings_done(r); /* else the last command's end does it */
    return rc;
}

int admin_reload(struct server *s, struct client *c, uint32_t msgid, struct skv_error *err)
{
    struct config fresh;
    struct request *r;

    if (config_load(s->args, &fresh, err) != 0) {
        log_line(LOG_WARNING, "reload failed detail=\"%s\"", err->msg);
        return -1;
    }
    r = requests_new(s, c, msgid, &method_table[METHOD_RELOAD]);
    if (r == NULL) {
        config_fini(&fresh);
        return skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
    }
    r->pending = 1;
    for (int i = 0; i < config_n_options && i < 64; i++) {
        const struct option_row *o = &config_options[i];

        if (!(o->where & OPTION_FILE) || config_same(&s->cfg, &fresh, o))
            continue;
        if (!(o->where & OPTION_LIVE)) {
            r->restart |= bit_of(o);
            log_line(LOG_WARNING, "reload name=%s needs=restart", o->name);
            continue;
        }
        r->applied |= bit_of(o);
        log_line(LOG_INFO, "reload name=%s applied", o->name);
        apply_and_tell(s, r, &fresh, o);
    }
    config_fini(&fresh);
    log_reopen();
    if (--r->pending == 0)
        admin_settings_done(r);
    return 0;
}

/* ---- subscribe ------------------------------------------------------------------------------------- */

static int method_subscribe(struct client *c, const struct args *a, struct skv_error *err)
{
    static const char *const names[] = { "sequences", "evictions", "steps" };
    unsigned topics = 0;

    for (int i = 0; i < a->topics.n; i++) {
        unsigned bit = 0;

        for (unsigned k = 0; k < 3; k++)
            if (strcmp(a->topics.v[i].s, names[k]) == 0)
                bit = 1u << k;
        if (bit == 0)
            return skv_fail(err, SKV_BAD_REQUEST, "'%.64s' is no topic: there are sequences, evictions and steps",
                            a->topics.v[i].s);
        topics |= bit;
    }
    c->srv->subscribers += (topics != 0) - (c->topics != 0);
    c->topics = topics;
    return 0;
}

static void send_to(struct server *s, unsigned topic)
{
    struct client *c, *next;

    for (c = TAILQ_FIRST(&s->clients); c != NULL; c = next) {
        next = TAILQ_NEXT(c, link);
        if (c->topics & topic)
            client_send(c, &s->out);
    }
}

static void event_begin(struct server *s, const char *topic, uint32_t pairs)
{
    wire_buf_clear(&s->out);
    wire_notify(&s->out, "event");
    wire_array(&s->out, 1);
    wire_map(&s->out, pairs + 1);
    wire_kv_str(&s->out, "topic", topic);
}

void admin_event_sequence(struct server *s, bool started, const struct request *r, const char *reason,
                          const struct engine_result *res)
{
    struct wire_buf *b = &s->out;

    if (s->subscribers == 0)
        return;
    event_begin(s, "sequences", started ? 5 : 9);
    wire_kv_str(b, "event", started ? "started" : "ended");
    wire_str(b, "request");
    wire_uint(b, r->id);
    wire_kv_str(b, "method", r->method->name);
    wire_kv_int(b, "uid", r->uid);
    wire_kv_int(b, "pid", r->pid);
    if (!started) {
        wire_kv_str(b, "reason", reason);
        wire_kv_int(b, "prompt_tokens", res != NULL ? res->prompt_tokens : 0);
        wire_kv_int(b, "completion_tokens", res != NULL ? res->completion_tokens : 0);
        wire_kv_double(b, "total_ms", res != NULL ? res->total_ms : (double)(now_ms() - r->started_ms));
    }
    send_to(s, TOPIC_SEQUENCES);
}

void admin_event_tick(struct server *s)
{
    struct wire_buf *b = &s->out;
    struct engine_stats st;

    engine_stats(s->engine, &st);
    if (s->subscribers > 0 && st.evicted != s->last_evicted) {
        event_begin(s, "evictions", 3);
        wire_kv_int(b, "evicted", st.evicted - s->last_evicted);
        wire_kv_int(b, "evicted_total", st.evicted);
        wire_kv_int(b, "bytes_saved", st.bytes_saved);
        send_to(s, TOPIC_EVICTIONS);
    }
    if (s->subscribers > 0 && st.steps != s->last_steps) {
        event_begin(s, "steps", 6);
        wire_kv_int(b, "steps", st.steps - s->last_steps);
        wire_kv_double(b, "step_ms_last", st.step_ms_last);
        wire_kv_double(b, "step_ms_mean", st.step_ms_mean);
        wire_kv_int(b, "running", st.running);
        wire_kv_int(b, "waiting", st.waiting);
        wire_kv_double(b, "tokens_out_per_s", st.out_per_s);
        send_to(s, TOPIC_STEPS);
    }
    s->last_evicted = st.evicted;
    s->last_steps = st.steps;
}

/* ---- the rest -------------------------------------------------------------------------------------- */

/* The engine takes a kill as a hint; to tell the truth about it, its list of sequences is asked for first. */
static int method_kill(struct client *c, uint32_t msgid, const struct method *m, const struct args *a, struct skv_error *err)
{
    struct engine_request *er = engine_request_new(ENGINE_SEQUENCES);
    struct request *r;

    if (er == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for another request");
    er->all_uids = true;
    er->uid = c->uid;
    r = requests_submit(c->srv, c, msgid, m, er, err);
    if (r == NULL)
        return -1;
    r->sequence = a->sequence;
    return 0;
}

void admin_end_sequence(struct request *r, const struct engine_answer *a)
{
    bool cancel = r->method->id == METHOD_CANCEL;
    struct server *s = r->srv;
    struct client *c = r->c;
    bool found = false;
    struct skv_error err;

    for (int i = 0; a != NULL && i < a->n_seq; i++)
        found = found || a->seq[i].id == r->sequence;
    if (found) {
        engine_kill(s->engine, r->sequence);
        log_line(LOG_INFO, "%s sequence=%llu uid=%u pid=%d", r->method->name, (unsigned long long)r->sequence, r->uid, (int)r->pid);
    }
    if (c == NULL)
        return;
    requests_answered(r);
    if (found || cancel) {
        wire_buf_clear(&s->out);
        reply_flag(&s->out, r->msgid, cancel ? "cancelled" : "killed", found);
        client_send(c, &s->out);
    } else {
        skv_fail(&err, SKV_NOT_FOUND, "there is no sequence %llu; sequences lists them", (unsigned long long)r->sequence);
        client_send_error(c, r->msgid, &err);
    }
}

static void answer_flag(struct client *c, uint32_t msgid, const char *key, bool v)
{
    wire_buf_clear(&c->srv->out);
    reply_flag(&c->srv->out, msgid, key, v);
    client_send(c, &c->srv->out);
}

void admin_method(struct client *c, uint32_t msgid, const struct method *m, struct args *a)
{
    struct server *s = c->srv;
    struct skv_error err;
    int rc = 0;

    switch (m->id) {
    case METHOD_SET:
        rc = method_set(c, msgid, m, a, &err);
        break;
    case METHOD_GET:
        wire_buf_clear(&s->out);
        reply_settings(&s->out, msgid, s);
        client_send(c, &s->out);
        break;
    case METHOD_DRAIN:
    case METHOD_RESUME:
        if (s->state == SERVER_STOPPING) {
            rc = skv_fail(&err, SKV_DRAINING, "skvd is shutting down");
            break;
        }
        log_line(LOG_INFO, "%s uid=%u pid=%d", m->name, c->uid, (int)c->pid);
        server_drain(s, m->id == METHOD_DRAIN);
        answer_flag(c, msgid, "draining", m->id == METHOD_DRAIN);
        break;
    case METHOD_SHUTDOWN:
        answer_flag(c, msgid, "stopping", true);
        server_shutdown(s, a->grace_ms >= 0 ? a->grace_ms : s->cfg.drain_timeout_ms, "shutdown by an administrator");
        break;
    case METHOD_KILL:
        rc = method_kill(c, msgid, m, a, &err);
        break;
    case METHOD_RELOAD:
        rc = admin_reload(s, c, msgid, &err);
        if (rc != 0 && err.code != SKV_NO_MEMORY)
            err.code = SKV_BAD_REQUEST; /* the file's line is in the message */
        break;
    case METHOD_SUBSCRIBE:
        rc = method_subscribe(c, a, &err);
        if (rc == 0)
            answer_flag(c, msgid, "subscribed", c->topics != 0);
        break;
    default:
        rc = skv_fail(&err, SKV_INTERNAL, "%s is not served", m->name);
    }
    if (rc != 0)
        client_send_error(c, msgid, &err);
}
