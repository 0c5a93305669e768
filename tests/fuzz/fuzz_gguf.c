/* fuzz_gguf: a model file of any content is used or refused with a sentence: metadata, tensors, vocabulary, template. */
#include "config.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/model.h"
#include "kernels/blocks.h"
#include "tests/fuzz/fuzz.h"

/* What passed the checks must be readable to its end. */
static unsigned touch(const struct kern_tensor *t, size_t bytes)
{
    const unsigned char *p = t->data;
    return bytes > 0 ? (unsigned)p[0] + p[bytes - 1] : 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    struct skv_error err = {.code = SKV_OK};
    struct model m;

    if (fd < 0) {
        fd = memfd_create("fuzz_gguf", 0);
        FUZZ_CHECK(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    FUZZ_CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    if (model_open(&m, path, NULL, 0, &err) != 0) {
        FUZZ_CHECK(err.code == SKV_BAD_MODEL || err.code == SKV_NO_MEMORY || err.code == SKV_BAD_CONFIG);
        FUZZ_CHECK(err.msg[0] != '\0' && utf8_valid(err.msg, strlen(err.msg), NULL));
        return 0;
    }
    unsigned sum = 0;
    for (int i = 0; i < gguf_n_tensors(m.gguf); i++) {
        struct kern_tensor t;
        if (gguf_tensor(m.gguf, gguf_tensor_name(m.gguf, i), &t) == 1)
            sum += touch(&t, (size_t)t.rows * kern_row_bytes(t.type, t.cols));
    }
    struct tok_ids ids = {0};
    size_t len;
    FUZZ_CHECK(tok_encode(m.tok, "Hello, w\303\266rld! 123", 19, true, &ids, &err) == 0);
    free(tok_decode(m.tok, ids.id, ids.n, true, &len, &err));
    free(ids.id);
    model_close(&m);
    FUZZ_CHECK(sum < UINT32_MAX); /* the reads happen */
    return 0;
}
