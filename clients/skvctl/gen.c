/* gen.c - one answer: its text as it comes, Ctrl-C, and the line of figures after it. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <stdlib.h>
#include <string.h>

#define WAIT_MS 100 /* a Ctrl-C between two looks at the flag is seen this late */
#define QUICK_MS 500 /* what is there by then needs no sign that something happens */

struct gen {
    struct gen_result *res;
    FILE *to;
    bool done;
    double began;
};

/* The way to the first token: a long queue, a long prompt. */
static void show_progress(const struct gen *g, const struct skv_value *v)
{
    double done = skv_num(skv_get(v, "done"), 0), total = skv_num(skv_get(v, "total"), 0);

    if (now_ms() - g->began < QUICK_MS)
        return;
    if (skv_str_is(skv_get(v, "phase"), "prefill"))
        progress(done, total, fmt("%s of %s prompt tokens read", fmt_count(done), fmt_count(total)));
    else
        progress(done, total, "waiting in the queue");
}

static void on_note(struct skv *c, int64_t id, const char *method, const struct skv_value *v, void *arg)
{
    struct gen *g = arg;
    size_t len;
    const char *s = skv_str(skv_get(v, "text"), &len);

    (void)c;
    (void)id;
    if (strcmp(method, "progress") == 0)
        show_progress(g, v);
    if (strcmp(method, "token") != 0 || len == 0)
        return;
    if (g->res->text_len == 0)
        progress_end();
    g->res->text = ctl_grow(g->res->text, g->res->text_len + len + 1, 1);
    memcpy(g->res->text + g->res->text_len, s, len);
    g->res->text_len += len;
    g->res->text[g->res->text_len] = '\0';
    if (g->to != NULL) {
        out_text(g->to, s, len);
        fflush(g->to);
    }
}

static void on_done(struct skv *c, int64_t id, struct skv_reply *take_reply, void *arg)
{
    struct gen *g = arg;

    (void)c;
    (void)id;
    g->res->reply = take_reply;
    g->done = true;
}

int gen_run(struct ctl *ctl, struct skv_args *take_args, FILE *to, struct gen_result *res, enum skv_code quiet)
{
    static const struct skv_handler h = { on_note, on_done };
    struct gen g = { .res = res, .to = to };
    int64_t id;

    memset(res, 0, sizeof *res);
    if (ctl_connect(ctl) == NULL) {
        skv_args_free(take_args);
        res->err.code = SKV_NO_DAEMON;
        return ctl->status;
    }
    ctl_interrupted = 0;
    g.began = now_ms();
    skv_arg_bool(take_args, "progress", true);
    id = skv_start(ctl->c, "generate", take_args, &h, &g, &res->err);
    if (id < 0)
        return ctl_error(ctl, &res->err);
    while (!g.done) {
        struct skv_error err;
        if (ctl_interrupted && !res->interrupted) {
            res->interrupted = true;
            skv_cancel(ctl->c, id, NULL);
        }
        if (skv_wait(ctl->c, WAIT_MS, &err) < 0 && !g.done)
            return progress_end(), ctl_error(ctl, &err);
    }
    progress_end();
    if (skv_reply_error(res->reply) == NULL)
        return CTL_OK;
    res->err = *skv_reply_error(res->reply);
    if ((res->interrupted && res->err.code == SKV_CANCELLED) || (res->err.code == quiet && quiet != SKV_OK))
        return CTL_FAILED;
    if (to != NULL && res->text_len > 0)
        fputc('\n', to);
    return ctl_error(ctl, &res->err);
}

void gen_result_fini(struct gen_result *res)
{
    skv_reply_free(res->reply);
    free(res->text);
    memset(res, 0, sizeof *res);
}

void gen_summary(FILE *f, const struct skv_value *r)
{
    const struct skv_value *t = skv_get(r, "timing"), *kv = skv_get(r, "kv");
    double n = skv_num(skv_get(r, "completion_tokens"), 0), decode = skv_num(skv_get(t, "decode_ms"), 0);
    double prompt = skv_num(skv_get(r, "prompt_tokens"), 0), prefill = skv_num(skv_get(t, "prefill_ms"), 0);
    double cached = skv_num(skv_get(r, "cached_tokens"), 0);
    double kept = skv_num(skv_get(kv, "slots_kept"), 0), full = skv_num(skv_get(kv, "slots_full"), 0);

    fprintf(f, "%s tokens in", fmt_count(prompt));
    if (cached > 0)
        fprintf(f, " (%s cached)", fmt_count(cached));
    if (prefill > 0)
        fprintf(f, " at %s", fmt_rate(1000 * (prompt - cached) / prefill));
    fprintf(f, ", first token after %s, %s tokens out", fmt_ms(skv_num(skv_get(t, "ttft_ms"), -1)), fmt_count(n));
    if (n > 1 && decode > 0)
        fprintf(f, " at %s", fmt_rate(1000 * (n - 1) / decode));
    fprintf(f, ", %s in all", fmt_ms(skv_num(skv_get(t, "total_ms"), -1)));
    if (full > 0 && kept >= full) /* its bytes are whole pages, so they may be more than the slots' own */
        fprintf(f, "; %s keeps all of the KV cache (%s)", fmt_str(skv_get(kv, "policy"), 16),
                fmt_bytes(skv_num(skv_get(kv, "bytes"), 0)));
    else if (full > 0)
        fprintf(f, "; %s keeps %s of the KV cache (%s of %s)", fmt_str(skv_get(kv, "policy"), 16), fmt_percent(kept / full),
                fmt_bytes(skv_num(skv_get(kv, "bytes"), 0)), fmt_bytes(skv_num(skv_get(kv, "bytes_full_cache"), 0)));
    fprintf(f, "; %s\n", fmt_str(skv_get(r, "finish"), 16));
}
