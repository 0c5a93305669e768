/* fuzz_config: any text as a configuration file is taken or refused with the line and a sentence; what was taken survives
 * being printed and read again. */
#include "config.h"

#include <stdio.h>
#include <string.h>

#include "daemon/config.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config c, again;
    struct skv_error err = {.code = SKV_OK};
    char *text = NULL;
    size_t len = 0;

    config_init(&c);
    if (config_parse(&c, "fuzz.conf", (const char *)data, size, &err) != 0) {
        FUZZ_CHECK(err.code == SKV_BAD_CONFIG || err.code == SKV_NO_MEMORY);
        FUZZ_CHECK(strncmp(err.msg, "fuzz.conf", 9) == 0 || err.code == SKV_NO_MEMORY);
    } else {
        FILE *f = open_memstream(&text, &len);
        FUZZ_CHECK(f != NULL);
        config_dump(&c, f);
        fclose(f);
        config_init(&again);
        if (config_parse(&again, "dump", text, len, &err) != 0) {
            fprintf(stderr, "%s\n", err.msg);
            abort();
        }
        for (int i = 0; i < config_n_options; i++)
            FUZZ_CHECK(config_same(&c, &again, &config_options[i]));
        config_fini(&again);
        free(text);
    }
    config_fini(&c);
    return 0;
}
