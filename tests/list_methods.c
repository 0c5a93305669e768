/* list-methods: the protocol's methods and their arguments, one a line ("generate", "generate kv.budget"), for
 * check_docs.sh. */
#include <stdio.h>

#include "protocol/methods.h"

static void list(const char *method, const char *prefix, const struct field *f)
{
    char deeper[256];

    for (; f->name != NULL; f++) {
        printf("%s %s%s\n", method, prefix, f->name);
        if (f->sub == NULL)
            continue;
        snprintf(deeper, sizeof deeper, "%s%s.", prefix, f->name);
        list(method, deeper, f->sub);
    }
}

int main(void)
{
    for (int i = 0; i < METHOD_COUNT; i++) {
        printf("%s\n", method_table[i].name);
        list(method_table[i].name, "", method_table[i].fields);
    }
    return 0;
}
