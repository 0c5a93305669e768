/* isa.c - detection of instruction sets and the registry of their tables. */
#include "kernels/isa.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#ifdef SKV_X86
#include <cpuid.h>
#endif

static bool have_scalar(void)
{
    return true;
}

static void fill_scalar(struct kern_isa *t)
{
    kern_linear_scalar(&t->lin);
    kern_attn_scalar(&t->att);
}

#ifdef SKV_X86
/* clang 14 does not know this name in __builtin_cpu_supports. */
static bool have_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool have_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && have_f16c();
}

/* VNNI is asked for as well: without it AVX2's 16-bit products are as good. BF16 is looked for by the kernels. */
static bool have_avx512(void)
{
    return have_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

static void fill_avx2(struct kern_isa *t)
{
    kern_linear_avx2(&t->lin);
    kern_attn_avx2(&t->att);
}

static void fill_avx512(struct kern_isa *t)
{
    kern_linear_avx512(&t->lin);
    kern_attn_avx512(&t->att);
}
#endif

/* Ascending: each is filled over a copy of the one before it, so what it leaves alone stays. */
static const struct {
    const char *name;
    bool (*have)(void);
    void (*fill)(struct kern_isa *t);
} known[] = {
    { "scalar", have_scalar, fill_scalar },
#ifdef SKV_X86
    { "avx2", have_avx2, fill_avx2 },
    { "avx512", have_avx512, fill_avx512 },
#endif
};

static struct kern_isa tables[4];
static int n_tables;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill_tables(void)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0] && known[i].have(); i++) {
        if (n_tables > 0)
            tables[n_tables] = tables[n_tables - 1];
        known[i].fill(&tables[n_tables]);
        tables[n_tables++].name = known[i].name;
    }
}

int kern_isa_list(const struct kern_isa *out[4])
{
    pthread_once(&once, fill_tables);
    for (int i = 0; i < n_tables; i++)
        out[i] = &tables[i];
    return n_tables;
}

const struct kern_isa *kern_isa_get(const char *name, struct skv_error *err)
{
    const struct kern_isa *list[4];
    int n = kern_isa_list(list);
    const char *forced = getenv("SKVD_ISA");
    if ((!name || strcmp(name, "auto") == 0) && forced && *forced)
        name = forced;
    if (!name || strcmp(name, "auto") == 0)
        return list[n - 1];
    char have[64] = "";
    for (int i = 0; i < n; i++) {
        if (strcmp(list[i]->name, name) == 0)
            return list[i];
        strcat(strcat(have, i ? ", " : ""), list[i]->name);
    }
    skv_fail(err, SKV_BAD_CONFIG, "isa \"%s\" is not available on this machine (there is: %s)", name, have);
    return NULL;
}
