/* text.c - `skvctl tokenize`, `detokenize`, `template`, `score`: what the model makes of text. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INPUT_LIMIT (15u * 1024 * 1024)

static struct {
    bool no_special, bos, count, table;
} tok;

const struct ctl_opt tokenize_opts[] = {
    { "no-special", 0, OPT_FLAG, &tok.no_special, NULL, "what looks like a control token is plain text", 0, 0 },
    { "bos", 0, OPT_FLAG, &tok.bos, NULL, "put the model's first token in front", 0, 0 },
    { "count", 'c', OPT_FLAG, &tok.count, NULL, "print only how many", 0, 0 },
    { "table", 'T', OPT_FLAG, &tok.table, NULL, "one line a token, with its text", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

static char *words_or_stdin(int argc, char **argv, size_t *len)
{
    char *s;
    size_t n = 0;

    if (argc == 0)
        return ctl_read_file(NULL, INPUT_LIMIT, len);
    for (int i = 0; i < argc; i++)
        n += strlen(argv[i]) + 1;
    s = ctl_alloc(n + 1, 1);
    *len = 0;
    for (int i = 0; i < argc; i++)
        *len += (size_t)sprintf(s + *len, "%s%s", i > 0 ? " " : "", argv[i]);
    return s;
}

static int token_table(struct ctl *ctl, const struct skv_value *tokens)
{
    static const char *const heads[] = { "#", "token", "text", NULL };
    struct table *t = table_new(heads, "rrl");
    struct skv_error err;

    for (size_t i = 0; i < skv_len(tokens); i++) {
        int32_t id = (int32_t)skv_int(skv_at(tokens, i), -1);
        size_t len;
        char *text = skv_detokenize(ctl->c, &id, 1, &len, &err);
        json_t *j;
        char *quoted;
        if (text == NULL) {
            table_print(t, stdout);
            return ctl_error(ctl, &err);
        }
        j = json_stringn(text, len);
        quoted = j ? json_dumps(j, JSON_ENCODE_ANY) : NULL;
        table_add(t, fmt("%zu", i));
        table_add(t, fmt("%d", id));
        table_add(t, quoted ? quoted : "(part of a character)");
        free(quoted);
        free(text);
        json_decref(j);
    }
    table_print(t, stdout);
    return CTL_OK;
}

int cmd_tokenize(struct ctl *ctl, int argc, char **argv)
{
    size_t len;
    char *text = words_or_stdin(argc, argv, &len);
    struct skv_args *a;
    struct skv_reply *r;
    const struct skv_value *v;
    int status;

    if (text == NULL)
        return CTL_FAILED;
    a = ctl_args();
    skv_arg_strn(a, "text", text, len);
    skv_arg_bool(a, "special", !tok.no_special);
    skv_arg_bool(a, "bos", tok.bos);
    free(text);
    r = ctl_call(ctl, "tokenize", a, &status);
    if (r == NULL)
        return status;
    v = skv_get(skv_reply_value(r), "tokens");
    if (ctl->json)
        json_print(skv_reply_value(r));
    else if (tok.count)
        printf("%zu\n", skv_len(v));
    else if (tok.table)
        status = token_table(ctl, v);
    else {
        for (size_t i = 0; i < skv_len(v); i++)
            printf("%s%lld", i > 0 ? " " : "", (long long)skv_int(skv_at(v, i), -1));
        printf("\n");
    }
    skv_reply_free(r);
    return status;
}

static void print_text(const struct skv_value *v)
{
    size_t len;
    const char *s = skv_str(skv_get(v, "text"), &len);
    out_text(stdout, s, len);
    if (len == 0 || s[len - 1] != '\n')
        fputc('\n', stdout);
}

int cmd_detokenize(struct ctl *ctl, int argc, char **argv)
{
    size_t len;
    char *text = words_or_stdin(argc, argv, &len), *save = NULL;
    struct skv_args *a = ctl_args();

    if (text == NULL)
        return CTL_FAILED;
    skv_arg_array(a, "tokens");
    for (char *w = strtok_r(text, " \t\r\n,[]", &save); w != NULL; w = strtok_r(NULL, " \t\r\n,[]", &save)) {
        long id;
        if (!opt_number(w, 0, INT32_MAX, &id)) {
            int status = ctl_usage(ctl, "'%s' is not a token number", w);
            skv_args_free(a);
            free(text);
            return status;
        }
        skv_arg_int(a, NULL, id);
    }
    skv_arg_end(a);
    free(text);
    return ctl_simple(ctl, "detokenize", a, print_text);
}

/* ---- template ---- */

static struct {
    const char *system;
    bool no_prompt;
} tpl;

const struct ctl_opt template_opts[] = {
    { "system", 's', OPT_STR, &tpl.system, "TEXT", "a system message first", 0, 0 },
    { "no-generation-prompt", 0, OPT_FLAG, &tpl.no_prompt, NULL, "leave out the beginning of the answer", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

int cmd_template(struct ctl *ctl, int argc, char **argv)
{
    static const char *const roles[] = { "user", "assistant" };
    struct skv_args *a = ctl_args();

    skv_arg_array(a, "messages");
    for (int i = tpl.system != NULL ? -1 : 0; i < argc; i++) {
        skv_arg_map(a, NULL);
        skv_arg_str(a, "role", i < 0 ? "system" : roles[i % 2]);
        skv_arg_str(a, "content", i < 0 ? tpl.system : argv[i]);
        skv_arg_end(a);
    }
    skv_arg_end(a);
    skv_arg_bool(a, "add_generation_prompt", !tpl.no_prompt);
    return ctl_simple(ctl, "apply_template", a, print_text);
}

/* ---- score ---- */

static struct {
    bool refeed, chat;
} sc;

const struct ctl_opt score_opts[] = {
    { "chat", 0, OPT_FLAG, &sc.chat, NULL, "PROMPT is a user's message, CONTINUATION the answer", 0, 0 },
    { "refeed", 0, OPT_FLAG, &sc.refeed, NULL, "read the last prompt token again over the sparsified cache", 0, 0 },
    { "kv", 0, WIRE_KV, NULL, "KEY=VALUE,...", "policy, budget, sink, recent, alpha, pool, pool_kind, full_layers, dtype", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

static int print_score(struct ctl *ctl, const struct skv_value *v)
{
    static const char *const heads[] = { "token", "logprob", "probability", "text", NULL };
    const struct skv_value *ids = skv_get(v, "tokens"), *lp = skv_get(v, "logprobs");
    struct table *t = table_new(heads, "rrrl");
    size_t n = skv_len(ids);
    double sum = skv_num(skv_get(v, "sum"), NAN);

    for (size_t i = 0; i < n; i++) {
        int32_t id = (int32_t)skv_int(skv_at(ids, i), -1);
        double l = skv_num(skv_at(lp, i), NAN);
        struct skv_error err;
        char *text = skv_detokenize(ctl->c, &id, 1, NULL, &err);
        json_t *j = json_string(text ? text : "");
        char *quoted = j ? json_dumps(j, JSON_ENCODE_ANY) : NULL;
        table_add(t, fmt("%d", id));
        table_add(t, fmt("%.4f", l));
        table_add(t, fmt_percent(exp(l)));
        table_add(t, quoted ? quoted : "(part of a character)");
        free(quoted);
        free(text);
        json_decref(j);
    }
    table_print(t, stdout);
    printf("sum %.4f, %.4f a token, perplexity %.3f\n", sum, n ? sum / (double)n : 0, n ? exp(-sum / (double)n) : 1);
    return CTL_OK;
}

int cmd_score(struct ctl *ctl, int argc, char **argv)
{
    struct skv_args *a = ctl_args();
    struct skv_reply *r;
    int status;

    (void)argc;
    if (sc.chat) {
        skv_arg_array(a, "messages");
        skv_arg_map(a, NULL);
        skv_arg_str(a, "role", "user");
        skv_arg_str(a, "content", argv[0]);
        skv_arg_end(a);
        skv_arg_end(a);
    } else
        skv_arg_str(a, "prompt", argv[0]);
    skv_arg_str(a, "continuation", argv[1]);
    if (sc.refeed)
        skv_arg_bool(a, "refeed", true);
    if (opt_wire(ctl, a, NULL) < 0) {
        skv_args_free(a);
        return CTL_USAGE;
    }
    r = ctl_call(ctl, "score", a, &status);
    if (r == NULL)
        return status;
    if (ctl->json)
        json_print(skv_reply_value(r));
    else
        status = print_score(ctl, skv_reply_value(r));
    skv_reply_free(r);
    return status;
}
