/* test_model: a small whole model file is taken, and each way in which its numbers can disagree is refused by name. */
#include "config.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/model.h"
#include "tests/gguf_build.h"

enum { WIDTH = 32, HEADS = 2, KV_HEADS = 1, HEAD_DIM = 16, FFN = 64, VOCAB = 257, LAYERS = 2 };

/* One thing that differs from the good file. */
struct change {
    const char *says; /* in the message; NULL: it is taken */
    const char *key;  /* this key is left out, or has ... */
    uint32_t type;    /* GB_U32: `v`; GB_F32: `f`; GB_STR: `s`; 0 (GB_U8): left out */
    uint32_t v;
    float f;
    const char *s;
    const char *tensor; /* this tensor is left out, or is of [dims] (and of `weights`) */
    uint64_t rows, cols;
    uint32_t weights;
    bool more_layers, cut;
};

static bool changed(struct gb *b, const struct change *c, const char *key)
{
    if (!c->key || strcmp(c->key, key))
        return false;
    if (c->type == GB_U32)
        gb_kv_u32(b, key, c->v);
    else if (c->type == GB_F32)
        gb_kv_f32(b, key, c->f);
    else if (c->type == GB_STR)
        gb_kv_str(b, key, c->s);
    return true;
}

static void key_u32(struct gb *b, const struct change *c, const char *key, uint32_t v)
{
    if (!changed(b, c, key))
        gb_kv_u32(b, key, v);
}

static void put_tensor(struct gb *b, const struct change *c, const char *name, uint64_t rows, uint64_t cols)
{
    static const unsigned char zero[64];
    uint32_t type = 0;
    if (c->tensor && !strcmp(c->tensor, name)) {
        if (c->rows == 0)
            return;
        rows = c->rows;
        cols = c->cols;
        type = c->weights;
    }
    uint64_t dims[2] = { cols, rows };
    uint64_t bytes = rows * (type == 1 ? cols * 2 : type == 8 ? cols / 32 * 34 : cols * 4);
    gb_tensor(b, name, rows == 1 ? 1 : 2, dims, type, b->data.len);
    for (uint64_t k = 0; k < (bytes + 31) / 32; k++)
        gb_raw(&b->data, zero, 32);
}

static void put_layer(struct gb *b, const struct change *c, int l)
{
    static const struct {
        const char *name;
        uint64_t rows, cols;
    } t[] = { { "attn_norm", 1, WIDTH },  { "attn_q", HEADS * HEAD_DIM, WIDTH },   { "attn_k", KV_HEADS * HEAD_DIM, WIDTH },
              { "attn_v", KV_HEADS * HEAD_DIM, WIDTH }, { "attn_output", WIDTH, HEADS * HEAD_DIM }, { "ffn_norm", 1, WIDTH },
              { "ffn_gate", FFN, WIDTH }, { "ffn_up", FFN, WIDTH }, { "ffn_down", WIDTH, FFN } };
    for (size_t i = 0; i < sizeof(t) / sizeof(t[0]); i++) {
        char name[64];
        snprintf(name, sizeof(name), "blk.%d.%s.weight", l, t[i].name);
        put_tensor(b, c, name, t[i].rows, t[i].cols);
    }
}

static void put_model(struct gb *b, const struct change *c)
{
    struct gb_vocab v = { 0 };
    if (!changed(b, c, "general.architecture"))
        gb_kv_str(b, "general.architecture", "llama");
    key_u32(b, c, "llama.block_count", LAYERS);
    key_u32(b, c, "llama.context_length", 128);
    key_u32(b, c, "llama.embedding_length", WIDTH);
    key_u32(b, c, "llama.feed_forward_length", FFN);
    key_u32(b, c, "llama.attention.head_count", HEADS);
    key_u32(b, c, "llama.attention.head_count_kv", KV_HEADS);
    key_u32(b, c, "llama.vocab_size", VOCAB);
    changed(b, c, "llama.rope.dimension_count");
    changed(b, c, "llama.attention.key_length");
    changed(b, c, "llama.attention.value_length");
    changed(b, c, "llama.attention.layer_norm_rms_epsilon");
    changed(b, c, "llama.rope.freq_base");
    changed(b, c, "llama.rope.scaling.type");
    gb_vocab_bytes(&v);
    gb_vocab_add(&v, "ab", 2, 1, 0);
    gb_vocab_merge(&v, "a b", 3);
    gb_vocab_put(b, &v, "gpt2", "gpt-2");
    gb_vocab_free(&v);
    put_tensor(b, c, "token_embd.weight", VOCAB, WIDTH);
    put_tensor(b, c, "output_norm.weight", 1, WIDTH);
    for (int l = 0; l < LAYERS + c->more_layers; l++)
        put_layer(b, c, l);
    if (c->tensor && (!strcmp(c->tensor, "output.weight") || !strcmp(c->tensor, "rope_freqs.weight")))
        put_tensor(b, c, c->tensor, 1, 1);
}

static const struct change changes[] = {
    { .says = NULL },
    { .key = "llama.attention.head_count_kv", .says = NULL, .type = GB_U32, .v = KV_HEADS },
    { "lacks llama.block_count", .key = "llama.block_count" },
    { "lacks llama.context_length", .key = "llama.context_length" },
    { "lacks llama.embedding_length", .key = "llama.embedding_length" },
    { "lacks llama.feed_forward_length", .key = "llama.feed_forward_length" },
    { "lacks llama.attention.head_count", .key = "llama.attention.head_count" },
    { "no general.architecture", .key = "general.architecture" },
    { "\"mamba\" is not supported", .key = "general.architecture", .type = GB_STR, .s = "mamba" },
    { "general.architecture is of type u32", .key = "general.architecture", .type = GB_U32 },
    { "llama.block_count is of type f32", .key = "llama.block_count", .type = GB_F32, .f = 2 },
    { "llama.context_length is of type string", .key = "llama.context_length", .type = GB_STR, .s = "128" },
    { "rms_epsilon is of type u32", .key = "llama.attention.layer_norm_rms_epsilon", .type = GB_U32 },
    { "rope.freq_base is -1", .key = "llama.rope.freq_base", .type = GB_F32, .f = -1 },
    { "block_count is 0", .key = "llama.block_count", .type = GB_U32, .v = 0 },
    { "block_count is 4294967295", .key = "llama.block_count", .type = GB_U32, .v = UINT32_MAX },
    { "embedding_length is 0", .key = "llama.embedding_length", .type = GB_U32, .v = 0 },
    { "embedding_length is 2147483648", .key = "llama.embedding_length", .type = GB_U32, .v = 1u << 31 },
    { "head_count is 0", .key = "llama.attention.head_count", .type = GB_U32, .v = 0 },
    { "head_count_kv is 0", .key = "llama.attention.head_count_kv", .type = GB_U32, .v = 0 },
    { "context_length is 0", .key = "llama.context_length", .type = GB_U32, .v = 0 },
    { "cannot share", .key = "llama.attention.head_count_kv", .type = GB_U32, .v = 3 },
    { "lacks llama.attention.key_length", .key = "llama.attention.head_count", .type = GB_U32, .v = 3 },
    { "hyperparameters say", .key = "llama.attention.head_count", .type = GB_U32, .v = 4 },
    { "rotated", .key = "llama.rope.dimension_count", .type = GB_U32, .v = 18 },
    { "rotated", .key = "llama.rope.dimension_count", .type = GB_U32, .v = 7 },
    { "key", .key = "llama.attention.value_length", .type = GB_U32, .v = 8 },
    { "hyperparameters say", .key = "llama.attention.key_length", .type = GB_U32, .v = 8 },
    { "rope.scaling.type \"yarn\"", .key = "llama.rope.scaling.type", .type = GB_STR, .s = "yarn" },
    { "257 tokens, but llama.vocab_size is 300", .key = "llama.vocab_size", .type = GB_U32, .v = 300 },
    { "token_embd.weight is 256 x 32; the hyperparameters say 257 x 32", .tensor = "token_embd.weight", .rows = 256, .cols = 32 },
    { "token_embd.weight is missing", .tensor = "token_embd.weight" },
    { "output_norm.weight is missing", .tensor = "output_norm.weight" },
    { "output.weight is 256 x 32", .tensor = "output.weight", .rows = 256, .cols = 32 },
    { NULL, .tensor = "output.weight", .rows = VOCAB, .cols = WIDTH },
    { NULL, .tensor = "output.weight", .rows = VOCAB, .cols = WIDTH, .weights = 8 },
    { "rope_freqs.weight is 1 x 16", .tensor = "rope_freqs.weight", .rows = 1, .cols = 16 },
    { NULL, .tensor = "rope_freqs.weight", .rows = 1, .cols = 8 },
    { "blk.1.attn_v.weight is missing", .tensor = "blk.1.attn_v.weight" },
    { "blk.0.ffn_down.weight is 32 x 32", .tensor = "blk.0.ffn_down.weight", .rows = 32, .cols = 32 },
    { "norms and biases must be F32", .tensor = "blk.0.ffn_norm.weight", .rows = 1, .cols = 32, .weights = 1 },
    { "blk.2.attn_norm.weight is missing", .key = "llama.block_count", .type = GB_U32, .v = 3 },
    { "more layers than its block_count of 2", .more_layers = true },
    { "past the end of the file", .cut = true },
};

START_TEST(takes_or_refuses)
{
    const struct change *c = &changes[_i];
    char path[] = "/tmp/skvd-model-XXXXXX";
    struct skv_error err = { 0 };
    struct model m;
    struct gb b;
    size_t len;
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    gb_init(&b);
    put_model(&b, c);
    unsigned char *p = gb_finish(&b, &len);
    if (c->cut)
        len -= 100;
    ck_assert_int_eq(write(fd, p, len), (ssize_t)len);
    close(fd);
    int rc = model_open(&m, path, NULL, 0, &err);
    unlink(path);
    if (c->says) {
        ck_assert_msg(rc < 0, "'%s': taken for good", c->says);
        ck_assert_int_eq(err.code, SKV_BAD_MODEL);
        ck_assert_msg(strstr(err.msg, c->says) != NULL, "says '%s', not '%s'", err.msg, c->says);
    } else {
        ck_assert_msg(rc == 0, "%s", err.msg);
        ck_assert_int_eq(m.src.dims.n_layer, LAYERS);
        ck_assert_int_eq(m.src.dims.head_dim, HEAD_DIM);
        ck_assert_int_eq(m.src.dims.n_vocab, VOCAB);
        ck_assert_ptr_null(m.chat); /* the file has none, and says so */
        ck_assert_ptr_nonnull(strstr(m.chat_error.msg, "no chat template"));
        model_close(&m);
    }
    free(p);
    gb_free(&b);
}
END_TEST

START_TEST(settings)
{
    static const struct change none = { 0 };
    char path[] = "/tmp/skvd-model-XXXXXX";
    struct skv_error err = { 0 };
    struct model m;
    struct gb b;
    size_t len;
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    gb_init(&b);
    put_model(&b, &none);
    unsigned char *p = gb_finish(&b, &len);
    ck_assert_int_eq(write(fd, p, len), (ssize_t)len);
    close(fd);
    ck_assert_int_eq(model_open(&m, path, "vicuna", 0, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_CONFIG);
    ck_assert_int_eq(model_open(&m, path, NULL, 129, &err), -1);
    ck_assert_int_eq(err.code, SKV_BAD_CONFIG);
    ck_assert_msg(model_open(&m, path, "gemma", 64, &err) == 0, "%s", err.msg);
    ck_assert_int_eq(m.src.dims.max_context, 64);
    ck_assert_str_eq(chat_name(m.chat), "gemma");
    model_close(&m);
    unlink(path);
    free(p);
    gb_free(&b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("model");
    TCase *t = tcase_create("model");
    tcase_add_loop_test(t, takes_or_refuses, 0, (int)(sizeof(changes) / sizeof(changes[0])));
    tcase_add_test(t, settings);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
