/* replay: run a harness over files and folders of inputs, without a fuzzer. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

static int run_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    uint8_t *data = NULL;
    size_t n = 0, cap = 0, got;

    if (f == NULL) {
        perror(path);
        return -1;
    }
    do {
        if (cap - n < 4096) {
            cap = (cap + 4096) * 2;
            data = realloc(data, cap);
            if (data == NULL)
                abort();
        }
        got = fread(data + n, 1, cap - n, f);
        n += got;
    } while (got > 0);
    fclose(f);
    fprintf(stderr, "%s\n", path); /* the one that crashes is the last that is named */
    uint8_t *exact = malloc(n > 0 ? n : 1); /* so that a sanitizer sees reads past the end */
    if (exact == NULL)
        abort();
    memcpy(exact, data, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    free(data);
    return 1;
}

static int run(const char *path)
{
    struct stat st;
    struct dirent *e;
    DIR *d;
    int n = 0;

    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return run_file(path);
    d = opendir(path);
    if (d == NULL)
        return -1;
    while ((e = readdir(d)) != NULL) {
        char sub[4096];
        if (e->d_name[0] == '.')
            continue;
        snprintf(sub, sizeof sub, "%s/%s", path, e->d_name);
        if (run(sub) < 0) {
            n = -1;
            break;
        }
        n++;
    }
    closedir(d);
    return n;
}

int main(int argc, char **argv)
{
    int n = 0;
    for (int i = 1; i < argc; i++) {
        int k = run(argv[i]);
        if (k < 0)
            return 1;
        n += k;
    }
    printf("%d inputs\n", n);
    return n > 0 ? 0 : 1;
}
