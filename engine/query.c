/* query.c - requests that are answered at once, from what the engine thread knows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/core.h"

static int detokenize(struct engine *e, struct engine_request *r, struct engine_answer *a, struct skv_error *err)
{
    int vocab = tok_vocab(e->model.tok);
    char *bytes;
    size_t len;

    for (int i = 0; i < r->n_tokens; i++)
        if (r->tokens[i] < 0 || r->tokens[i] >= vocab)
            return skv_fail(err, SKV_BAD_REQUEST, "tokens[%d] is %d; token ids of this model are 0 to %d", i, r->tokens[i],
                            vocab - 1);
    bytes = tok_decode(e->model.tok, r->tokens, r->n_tokens > 0 ? r->n_tokens : 0, true, &len, err);
    if (bytes == NULL)
        return -1;
    a->text.s = malloc(3 * len + 1);
    if (a->text.s != NULL)
        a->text.len = utf8_sanitize(bytes, len, a->text.s);
    free(bytes);
    return a->text.s != NULL ? 0 : skv_fail(err, SKV_INTERNAL, "no memory");
}

static int sequences(struct engine *e, struct engine_request *r, struct engine_answer *a, struct skv_error *err)
{
    int64_t now = core_now_us(e);
    struct seq *s;
    int n = 0;

    TAILQ_FOREACH(s, &e->seqs, link)
        n++;
    a->seq = calloc((size_t)n + 1, sizeof *a->seq);
    if (a->seq == NULL)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    TAILQ_FOREACH(s, &e->seqs, link) {
        if (!r->all_uids && s->uid != r->uid)
            continue;
        struct engine_seq_info *i = &a->seq[a->n_seq++];
        i->id = s->id;
        i->uid = s->uid;
        i->pid = s->pid;
        memcpy(i->session, s->session, sizeof i->session);
        i->state = seq_state_name(s);
        i->prompt_tokens = s->n_prompt != 0 ? s->n_prompt : s->tokens.n;
        i->completion_tokens = s->n_answer;
        i->age_ms = (now - s->t_submit) / 1000;
        i->kv_bytes = s->lane >= 0 ? pages_lane_held(e->pages, s->lane) * (int64_t)e->kv->page.bytes : 0;
        snprintf(i->policy, sizeof i->policy, "%s", s->has_plan ? s->plan.policy->name : e->policy->name);
    }
    return 0;
}

static void layer_use(struct engine *e, int layer, struct engine_kv_layer *out)
{
    int n_kv = e->model.src.dims.n_kv;
    struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        for (int h = 0; s->lane >= 0 && h < n_kv; h++) {
            out->pages += pages_head_held(e->pages, s->lane, layer, h);
            out->slots += e->kv->len[core_head(e, s->lane, layer, h)];
        }
    out->bytes = out->pages * (int64_t)e->kv->page.bytes;
}

static int kv(struct engine *e, struct engine_request *r, struct engine_answer *a, struct skv_error *err)
{
    const struct ops_dims *d = &e->model.src.dims;
    int64_t total = pages_total(e->pages);
    struct kvplan full;
    struct policy_params p = policy_full.defaults;

    (void)r;
    a->kv.layer = calloc((size_t)d->n_layer, sizeof *a->kv.layer);
    if (a->kv.layer == NULL || kvplan_init(&full, &policy_full, &p, NULL, 0, d, err) < 0)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    a->kv.n_layers = d->n_layer;
    for (int l = 0; l < d->n_layer; l++) {
        struct engine_kv_layer *o = &a->kv.layer[l];
        bool is_full = e->plan.budget[l] == 0;
        snprintf(o->policy, sizeof o->policy, "%s", is_full ? "full" : e->plan.policy->name);
        o->budget = e->plan.budget[l];
        o->sink = is_full ? 0 : e->plan.params.sink;
        o->recent = is_full ? 0 : e->plan.params.recent;
        o->evicted = e->layer_evicted[l];
        o->kept_mass = e->layer_mass[l];
        layer_use(e, l, o);
    }
    a->kv.pages_total = total;
    a->kv.pages_used = pages_used(e->pages);
    a->kv.pages_free = total - a->kv.pages_used;
    a->kv.page_bytes = (int64_t)e->kv->page.bytes;
    a->kv.slots_per_page = KERN_PAGE_SLOTS;
    a->kv.token_bytes_full = (int64_t)kern_page_slot_bytes(&e->kv->page) * d->n_layer * d->n_kv;
    a->kv.fit_context = d->max_context;
    a->kv.fit_plan = (int)kvplan_fit(&e->plan, core_pages(e), d->max_context);
    a->kv.fit_full = (int)kvplan_fit(&full, core_pages(e), d->max_context);
    snprintf(a->kv.dtype, sizeof a->kv.dtype, "%s", e->dtype);
    kvplan_fini(&full);
    return 0;
}

struct held {
    int32_t pos;
    float score;
};

static int held_compare(const void *a, const void *b)
{
    int32_t x = ((const struct held *)a)->pos, y = ((const struct held *)b)->pos;

    return (x > y) - (x < y);
}

/* Positions ascending with their scores, without the slot that the next pair will overwrite. */
static int kept_head(struct engine *e, const struct seq *s, int layer, int head, struct engine_kept_head *out)
{
    size_t k = core_head(e, s->lane, layer, head);
    int len = e->kv->len[k], n = 0;
    struct held *held = malloc(((size_t)len + 1) * sizeof *held);

    out->pos = malloc(((size_t)len + 1) * sizeof *out->pos);
    out->score = malloc(((size_t)len + 1) * sizeof *out->score);
    if (held == NULL || out->pos == NULL || out->score == NULL) {
        free(held);
        return -1;
    }
    e->ops->kv_read(e->be, s->lane, layer, head, out->pos, out->score);
    for (int i = 0; i < len; i++)
        if (i != e->kv->victim[k])
            held[n++] = (struct held){ out->pos[i], out->score[i] };
    qsort(held, (size_t)n, sizeof *held, held_compare);
    for (int i = 0; i < n; i++) {
        out->pos[i] = held[i].pos;
        out->score[i] = held[i].score;
    }
    out->n = n;
    free(held);
    return 0;
}

static int kept(struct engine *e, struct engine_request *r, struct engine_answer *a, struct skv_error *err)
{
    const struct ops_dims *d = &e->model.src.dims;
    struct seq *s = sched_find_sequence(e, r->sequence);

    decode_forget(e);
    if (s == NULL || s->lane < 0)
        return skv_fail(err, SKV_NOT_FOUND, "no sequence %llu holds KV memory; `sequences` lists those that are there",
                        (unsigned long long)r->sequence);
    a->kept_n = s->n_kv;
    a->kept_layers = d->n_layer;
    a->kept_heads = d->n_kv;
    a->kept = calloc((size_t)d->n_layer * d->n_kv, sizeof *a->kept);
    a->kept_policy = calloc((size_t)d->n_layer, sizeof *a->kept_policy);
    if (a->kept == NULL || a->kept_policy == NULL)
        return skv_fail(err, SKV_INTERNAL, "no memory");
    for (int l = 0; l < d->n_layer; l++) {
        snprintf(a->kept_policy[l], sizeof a->kept_policy[l], "%s", s->plan.budget[l] == 0 ? "full" : s->plan.policy->name);
        for (int h = 0; h < d->n_kv; h++)
            if (kept_head(e, s, l, h, &a->kept[l * d->n_kv + h]) < 0)
                return skv_fail(err, SKV_INTERNAL, "no memory");
    }
    return 0;
}

static int set(struct engine *e, struct engine_request *r, struct engine_answer *a, struct skv_error *err)
{
    const struct {
        const char *name;
        int *value, lo, hi;
    } setting[] = {
        { "step_ms", &e->cfg.step_ms, 1, 10000 },
        { "max_batch", &e->cfg.max_batch, 1, DECODE_BATCH_MAX },
        { "session_idle_s", &e->cfg.session_idle_s, 0, 86400 * 365 },
        { "kv_reserve", &e->cfg.kv_reserve, 0, 1 << 24 },
    };
    const struct {
        const char *name;
        int64_t *value;
    } bytes[] = { { "max_kv_user", &e->cfg.max_kv_user }, { "max_kv_connection", &e->cfg.max_kv_connection } };

    (void)a;
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        if (r->set_name != NULL && strcmp(r->set_name, bytes[i].name) == 0 && r->set_value >= 0 && r->set_value < 0x1p62) {
            *bytes[i].value = (int64_t)r->set_value;
            return 0;
        }
    for (size_t i = 0; i < sizeof setting / sizeof *setting; i++) {
        if (r->set_name == NULL || strcmp(setting[i].name, r->set_name) != 0)
            continue;
        int hi = strcmp(r->set_name, "max_batch") == 0 ? e->batch_cap : setting[i].hi;
        if (!(r->set_value >= setting[i].lo && r->set_value <= hi))
            return skv_fail(err, SKV_BAD_REQUEST, "%s is %g; it must be from %d to %d", r->set_name, r->set_value,
                            setting[i].lo, hi);
        *setting[i].value = (int)r->set_value;
        return 0;
    }
    return skv_fail(err, SKV_BAD_REQUEST, "\"%s\" cannot be set while running; step_ms, max_batch, session_idle_s, kv_reserve, max_kv_user and "
                    "max_kv_connection can",
                    r->set_name != NULL ? r->set_name : "");
}

void query_answer(struct engine *e, uint64_t id, struct engine_request *take)
{
    static int (*const answer[])(struct engine *, struct engine_request *, struct engine_answer *, struct skv_error *) = {
        [ENGINE_DETOKENIZE] = detokenize, [ENGINE_SEQUENCES] = sequences, [ENGINE_KV] = kv, [ENGINE_KEPT] = kept,
        [ENGINE_SET] = set,
    };
    struct engine_answer *a = calloc(1, sizeof *a);
    struct skv_error err;
    struct engine_event drop = { .answer = a };

    if (a == NULL) {
        skv_fail(&err, SKV_INTERNAL, "no memory");
        emit_error(e, take, id, &err);
    } else {
        a->kind = take->kind;
        if (answer[take->kind](e, take, a, &err) < 0) {
            engine_event_fini(&drop);
            emit_error(e, take, id, &err);
        } else {
            emit_answer(e, take, id, a);
        }
    }
    engine_request_free(take);
}
