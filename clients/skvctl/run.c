/* run.c - `skvctl run`: one question, one answer. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INPUT_LIMIT (15u * 1024 * 1024) /* just below the daemon's default frame limit */

static struct {
    const char *system, *file;
    bool plain, raw, stats, quiet;
} o;

const struct ctl_opt run_opts[] = {
    { "system", 's', OPT_STR, &o.system, "TEXT", "a system message before the prompt", 0, 0 },
    { "file", 'f', OPT_STR, &o.file, "FILE", "read the prompt (or what follows it) from FILE", 0, 0 },
    { "plain", 'p', OPT_FLAG, &o.plain, NULL, "continue the text itself: no chat template", 0, 0 },
    { "raw", 0, OPT_FLAG, &o.raw, NULL, "as --plain, and add or parse no special tokens", 0, 0 },
    { "stats", 'v', OPT_FLAG, &o.stats, NULL, "figures at the end, also when this is no terminal", 0, 0 },
    { "quiet", 'q', OPT_FLAG, &o.quiet, NULL, "no figures", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

/* The prompt: the words given, then what a pipe or --file holds. NULL after a message. */
static char *gather_prompt(struct ctl *ctl, int argc, char **argv)
{
    char *text = ctl_alloc(1, 1), *in = NULL;
    size_t len = 0, in_len = 0;
    bool pipe = o.file == NULL && !isatty(STDIN_FILENO) && argc == 0;

    for (int i = 0; i < argc; i++) {
        size_t n = strlen(argv[i]);
        text = ctl_grow(text, len + n + 2, 1);
        len += (size_t)sprintf(text + len, "%s%s", i > 0 ? " " : "", argv[i]);
    }
    /* Words and a pipe together: only when the pipe has something; a program without a terminal gives an empty one. */
    if (o.file == NULL && argc > 0 && !isatty(STDIN_FILENO))
        pipe = true;
    if (pipe || o.file != NULL) {
        in = ctl_read_file(o.file != NULL && strcmp(o.file, "-") != 0 ? o.file : NULL, INPUT_LIMIT, &in_len);
        if (in == NULL) {
            free(text);
            return NULL;
        }
        text = ctl_grow(text, len + in_len + 3, 1);
        if (in_len > 0)
            sprintf(text + len, "%s%s", len > 0 ? "\n\n" : "", in);
        free(in);
    }
    if (*text == '\0' && opt_wire_given("session") == NULL) {
        ctl_usage(ctl, "no prompt: give one as an argument, through a pipe, or with --file");
        free(text);
        return NULL;
    }
    return text;
}

static void put_message(struct skv_args *a, const char *role, const char *content)
{
    skv_arg_map(a, NULL);
    skv_arg_str(a, "role", role);
    skv_arg_str(a, "content", content);
    skv_arg_end(a);
}

int cmd_run(struct ctl *ctl, int argc, char **argv)
{
    char *prompt = gather_prompt(ctl, argc, argv);
    struct skv_args *a;
    struct gen_result res;
    int status;

    if (prompt == NULL)
        return CTL_USAGE;
    a = ctl_args();
    if (o.plain || o.raw) {
        skv_arg_str(a, "prompt", prompt);
        if (o.raw)
            skv_arg_bool(a, "raw", true);
    } else {
        skv_arg_array(a, "messages");
        if (o.system != NULL)
            put_message(a, "system", o.system);
        put_message(a, "user", prompt);
        skv_arg_end(a);
    }
    free(prompt);
    if (opt_wire(ctl, a, NULL) < 0) {
        skv_args_free(a);
        return CTL_USAGE;
    }
    ctl_catch_sigint();
    status = gen_run(ctl, a, ctl->json ? NULL : stdout, &res, SKV_OK);
    if (ctl->json && res.reply != NULL && skv_reply_value(res.reply) != NULL)
        json_print(skv_reply_value(res.reply));
    if (!ctl->json && (status == CTL_OK || res.interrupted)) {
        if (out_tty(stdout) || res.text_len == 0 || res.text[res.text_len - 1] != '\n')
            fputc('\n', stdout);
        fflush(stdout);
        if (res.interrupted)
            fputs("(stopped)\n", stderr);
        else if (!o.quiet && (o.stats || (out_tty(stdout) && out_tty(stderr))))
            gen_summary(stderr, skv_reply_value(res.reply));
    }
    gen_result_fini(&res);
    return status;
}
