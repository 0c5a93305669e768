/* plan.c - skvctl plan: what a machine would serve, asked of skvd-plan, which has the engine in it (a client does not). */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROGRAM "skvd-plan"

static const char *text[8];
static long number[5];
static bool list;

enum { MODEL = 0, GPU, POLICY, CLIENTS, KV_MEMORY, SHARE, DTYPE, N_TEXT };
enum { INPUT = 0, OUTPUT, BUDGET, STEP_MS, ROUNDS, N_NUMBER };

const struct ctl_opt plan_opts[] = {
    { "model", 'm', OPT_STR, &text[MODEL], "NAME[/TYPE]", "a preset such as llama3-8b, its weights as TYPE, or a GGUF file", 0, 0 },
    { "gpu", 'g', OPT_STR, &text[GPU], "DEVICE", "the machine: rtx4090, h100, h200, zen4-2core (rtx4090)", 0, 0 },
    { "input", 0, OPT_INT, &number[INPUT], "N", "tokens of a prompt (4000)", 1, 1 << 20 },
    { "output", 0, OPT_INT, &number[OUTPUT], "N", "tokens of an answer (500)", 1, 1 << 20 },
    { "policy", 0, OPT_STR, &text[POLICY], "NAME,...", "KV policies to compare (full,article,sparse)", 0, 0 },
    { "budget", 0, OPT_INT, &number[BUDGET], "N", "slots a head in their sparse layers (each policy's own)", 16, 1 << 20 },
    { "concurrency", 'c', OPT_STR, &text[CLIENTS], "N,...", "clients at a time (1,2,4,8,10,12,16,20,24,32,40)", 0, 0 },
    { "kv-memory", 0, OPT_STR, &text[KV_MEMORY], "BYTES", "of KV memory, such as 6G (what the device has left)", 0, 0 },
    { "share", 0, OPT_STR, &text[SHARE], "X", "of the device's memory may be used (0.9)", 0, 0 },
    { "kv-dtype", 0, OPT_STR, &text[DTYPE], "NAME", "bf16 or int8 (bf16)", 0, 0 },
    { "step-ms", 0, OPT_INT, &number[STEP_MS], "N", "the scheduler's target for a step (60)", 1, 10000 },
    { "rounds", 0, OPT_INT, &number[ROUNDS], "N", "requests that each client sends (4)", 1, 1000 },
    { "list", 0, OPT_FLAG, &list, NULL, "the presets and devices, with the sources of their figures", 0, 0 },
    { NULL, 0, 0, NULL, NULL, NULL, 0, 0 },
};

/* A build tree's skvd-plan: beside this program, or beside the folder libtool keeps that in. */
static void path_beside(char *path, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", path, size - 1);
    char *slash;

    path[n > 0 ? n : 0] = '\0';
    slash = strrchr(path, '/');
    if (slash == NULL)
        return;
    *slash = '\0';
    slash = strrchr(path, '/');
    if (slash != NULL && strcmp(slash, "/.libs") == 0)
        *slash = '\0';
    n = (ssize_t)strlen(path);
    if ((size_t)n + sizeof "/" PROGRAM <= size)
        memcpy(path + n, "/" PROGRAM, sizeof "/" PROGRAM);
}

int cmd_plan(struct ctl *ctl, int argc, char **argv)
{
    static const char *const text_name[] = { "--model", "--gpu", "--policy", "--concurrency", "--kv-memory", "--share", "--kv-dtype" };
    static const char *const number_name[] = { "--input", "--output", "--budget", "--step-ms", "--rounds" };
    char path[PATH_MAX], digits[N_NUMBER][24];
    const char *arg[2 * (N_TEXT + N_NUMBER) + 4];
    int n = 0;

    (void)argc;
    (void)argv;
    if (text[MODEL] == NULL && !list)
        return ctl_usage(ctl, "which model? For example --model llama3-8b --gpu rtx4090 (--list shows what there is)");
    arg[n++] = PROGRAM;
    for (int i = 0; i < N_TEXT; i++)
        if (text[i] != NULL) {
            arg[n++] = text_name[i];
            arg[n++] = text[i];
        }
    for (int i = 0; i < N_NUMBER; i++)
        if (number[i] != 0) {
            snprintf(digits[i], sizeof digits[i], "%ld", number[i]);
            arg[n++] = number_name[i];
            arg[n++] = digits[i];
        }
    if (list)
        arg[n++] = "--list";
    if (ctl->json)
        arg[n++] = "--json";
    arg[n] = NULL;
    path_beside(path, sizeof path);
    execv(path, (char **)arg);
    execv(PKGLIBEXECDIR "/" PROGRAM, (char **)arg);
    fprintf(stderr, "skvctl plan: %s is neither beside this program nor in %s: %s\n", PROGRAM, PKGLIBEXECDIR, strerror(errno));
    return CTL_FAILED;
}
