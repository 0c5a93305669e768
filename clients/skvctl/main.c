/* main.c - skvctl: the command table and what comes before a command. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <getopt.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

const struct ctl_command ctl_commands[] = {
    { "run", "[PROMPT...]", "Ask once and print the answer. A pipe or --file follows the prompt.", run_opts, true, 0, -1, cmd_run },
    { "chat", "", "A conversation, with history and line editing.", chat_opts, true, 0, 0, cmd_chat },
    { "score", "PROMPT CONTINUATION", "The log-probability of each token of CONTINUATION after PROMPT.", score_opts, false, 2, 2, cmd_score },
    { "tokenize", "[TEXT...]", "Text (or standard input) to token numbers.", tokenize_opts, false, 0, -1, cmd_tokenize },
    { "detokenize", "[TOKEN...]", "Token numbers (or standard input) to text.", NULL, false, 0, -1, cmd_detokenize },
    { "template", "MESSAGE...", "Messages (user, assistant, user, ...) as the model's chat template puts them.", template_opts, false, 1, -1, cmd_template },
    { "status", "", "What the daemon does, and this user's sequences.", NULL, false, 0, 0, cmd_status },
    { "ps", "", "All sequences (others' only for administrators).", NULL, false, 0, 0, cmd_ps },
    { "top", "", "The same, live, with rates and the KV map. q ends.", top_opts, false, 0, 0, cmd_top },
    { "inspect", "SEQ", "Which tokens each layer of a sequence holds, as a map or a picture.", inspect_opts, false, 1, 1, cmd_inspect },
    { "kv", "", "The KV cache, layer by layer: policy, budget, pages, bytes, evictions.", NULL, false, 0, 0, cmd_kv },
    { "bench", "", "A load test: latencies, throughput, and ratios between policies.", bench_opts, false, 0, 0, cmd_bench },
    { "eval", "FILE...", "Accuracy of task files (JSON lines) under KV policies, relative to the full cache.", eval_opts, false, 1, -1, cmd_eval },
    { "plan", "", "What a machine would serve, by a cost model: --model llama3-8b --gpu rtx4090.", plan_opts, false, 0, 0, cmd_plan },
    { "cancel", "[SEQ...]", "End one's own requests by sequence number.", cancel_opts, false, 0, -1, cmd_cancel },
    { "kill", "SEQ...", "End anybody's sequences or idle sessions.", NULL, false, 1, -1, cmd_kill },
    { "drain", "", "Refuse new work, finish the old.", NULL, false, 0, 0, cmd_drain },
    { "resume", "", "Take new work again.", NULL, false, 0, 0, cmd_resume },
    { "set", "NAME=VALUE...", "Change settings while the daemon runs.", NULL, false, 1, -1, cmd_set },
    { "get", "[NAME]", "The settings, or one of them.", NULL, false, 0, 1, cmd_get },
    { "reload", "", "Read the configuration file again.", NULL, false, 0, 0, cmd_reload },
    { "shutdown", "", "End the daemon.", shutdown_opts, false, 0, 0, cmd_shutdown },
    { "events", "[TOPIC...]", "Print what the daemon tells (sequences, evictions, steps), a JSON line each.", NULL, false, 0, -1, cmd_events },
    { "call", "METHOD [JSON]", "Call any method; the result as JSON.", NULL, false, 1, 2, cmd_call },
    { "version", "", "Versions of this program and of the daemon, and its model.", NULL, false, 0, 0, cmd_version },
    { "help", "[COMMAND]", "This list, or a command's options.", NULL, false, 0, 1, cmd_help },
    { NULL, NULL, NULL, NULL, false, 0, 0, NULL },
};

static void usage(FILE *f)
{
    fputs("usage: skvctl [--socket PATH] [--json] COMMAND [OPTIONS] [ARGUMENTS]\n\n", f);
    for (const struct ctl_command *c = ctl_commands; c->name != NULL; c++)
        fprintf(f, "  %-11s %-22s %s\n", c->name, c->args, c->help);
    fputs("\n'skvctl COMMAND --help' lists a command's options.\n"
          "Exit status: 0 well, 1 the daemon refused or failed, 2 usage, 3 no daemon.\n", f);
}

static const struct ctl_command *find_command(const char *name)
{
    for (const struct ctl_command *c = ctl_commands; c->name != NULL; c++)
        if (strcmp(c->name, name) == 0)
            return c;
    return NULL;
}

int cmd_help(struct ctl *ctl, int argc, char **argv)
{
    const struct ctl_command *c = argc > 0 ? find_command(argv[0]) : NULL;

    if (argc > 0 && c == NULL)
        return ctl_usage(ctl, "there is no command '%s'", argv[0]);
    if (c != NULL)
        opt_help(c, stdout);
    else
        usage(stdout);
    return CTL_OK;
}

static int run_command(struct ctl *ctl, int argc, char **argv)
{
    int n, status;

    ctl->cmd = find_command(argv[0]);
    if (ctl->cmd == NULL)
        return ctl_usage(ctl, "there is no command '%s'; 'skvctl help' lists them", argv[0]);
    n = opt_parse(ctl, argc, argv);
    if (n < 0)
        return CTL_USAGE;
    if (n < ctl->cmd->min_args || (ctl->cmd->max_args >= 0 && n > ctl->cmd->max_args))
        return ctl_usage(ctl, "wrong number of arguments; usage: skvctl %s %s", ctl->cmd->name, ctl->cmd->args);
    status = ctl->cmd->run(ctl, n, argv);
    skv_close(ctl->c);
    if (fflush(stdout) != 0 && status == CTL_OK)
        status = CTL_FAILED;
    return status;
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {
        { "socket", required_argument, NULL, 's' }, { "json", no_argument, NULL, 'j' },
        { "help", no_argument, NULL, 'h' },         { "version", no_argument, NULL, 'V' },
        { NULL, 0, NULL, 0 },
    };
    struct ctl ctl = { 0 };
    int ch;

    setlocale(LC_CTYPE, "C.UTF-8");
    signal(SIGPIPE, SIG_IGN);
    while ((ch = getopt_long(argc, argv, "+s:jhV", longs, NULL)) != -1) {
        switch (ch) {
        case 's':
            ctl.socket = optarg;
            break;
        case 'j':
            ctl.json = true;
            break;
        case 'h':
            usage(stdout);
            return CTL_OK;
        case 'V':
            printf("skvctl %s\n", VERSION);
            return CTL_OK;
        default:
            usage(stderr);
            return CTL_USAGE;
        }
    }
    if (optind == argc) {
        usage(stderr);
        return CTL_USAGE;
    }
    return run_command(&ctl, argc - optind, argv + optind);
}
