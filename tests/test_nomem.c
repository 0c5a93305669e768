/* test_nomem: files, tokenizers, chats and sampling when the n-th allocation fails, for every n that is reached: an error
 * that says so, nothing lost, nothing broken. The linker puts the functions below in front of the allocator (--wrap). */
#include "config.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat.h"
#include "engine/sampler.h"
#include "tests/gguf_build.h"

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t m);
void *__real_realloc(void *p, size_t n);
char *__real_strdup(const char *s);
char *__real_strndup(const char *s, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t m);
void *__wrap_realloc(void *p, size_t n);
char *__wrap_strdup(const char *s);
char *__wrap_strndup(const char *s, size_t n);

static long countdown = -1; /* allocations until one fails; below 0: none fails */

static bool fails(void)
{
    return countdown >= 0 && countdown-- == 0;
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t m)
{
    return fails() ? NULL : __real_calloc(n, m);
}
void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}
char *__wrap_strdup(const char *s)
{
    return fails() ? NULL : __real_strdup(s);
}
char *__wrap_strndup(const char *s, size_t n)
{
    return fails() ? NULL : __real_strndup(s, n);
}

/* ---- what is done, from a file to a token ------------------------------------------------------------------- */

static const char *const templates[] = {
    "{{ bos_token }}{% if x %}{{ '<|im_start|>system\nDefault.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m }}",
    "{{ bos_token }}{{ '[INST] ' + message['content'] + ' [/INST]' }}{{ ' ' + message['content'] + eos_token }}",
    "{% set date_string = \"26 Jul 2024\" %}{{ '<|start_header_id|><|eot_id|>Cutting Knowledge Date: May 2023\\n' }}",
};

static unsigned char *file(bool spm, const char *template, size_t *len)
{
    struct gb b;
    struct gb_vocab v = { 0 };
    gb_init(&b);
    gb_vocab_add(&v, "<unk>", 5, 2, 0);
    gb_vocab_add(&v, "<s>", 3, 3, 0);
    gb_vocab_add(&v, "<|im_end|>", 10, 3, 0);
    gb_vocab_bytes(&v);
    gb_vocab_add(&v, "ab", 2, 1, -1);
    gb_vocab_merge(&v, "a b", 3);
    gb_kv_str(&b, "tokenizer.chat_template", template);
    gb_vocab_put(&b, &v, spm ? "llama" : "gpt2", NULL);
    gb_kv_u32(&b, "tokenizer.ggml.bos_token_id", 1);
    gb_kv_u32(&b, "tokenizer.ggml.eos_token_id", 2);
    unsigned char *p = gb_finish(&b, len);
    gb_vocab_free(&v);
    gb_free(&b);
    return p;
}

static int chat(const struct gguf *g, const struct tokenizer *tok, struct skv_error *err)
{
    char user[] = "user", text[3001];
    struct engine_message m = { { user, 4 }, { text, 3000 } };
    struct chat_template *t = chat_new(g, NULL, err);
    struct chat_text c;
    struct chat_job job;
    struct tok_ids out = { 0 };
    size_t len;
    int rc = -1;
    if (!t)
        return -1;
    memset(text, 'a', 3000);
    if (chat_render(t, &m, 1, true, false, &c, err) == 0) {
        if (chat_job_init(&job, tok, &c, err) == 0) {
            while ((rc = chat_job_some(&job, tok, 10, &out, err)) == 0)
                continue;
            chat_job_fini(&job);
        }
        chat_text_free(&c);
    }
    char *back = rc == 1 ? tok_decode(tok, out.id, out.n, true, &len, err) : NULL;
    free(back);
    free(out.id);
    chat_free(t);
    return back ? 0 : -1;
}

static int all(const unsigned char *p, size_t len, struct skv_error *err)
{
    static const struct engine_sampling set = { .temperature = 1, .top_k = 5, .top_p = 1, .repeat_penalty = 1, .seed_set = true };
    struct gguf *g = gguf_open_mem(p, len, "file", err);
    struct tokenizer *tok = g ? tok_new(g, err) : NULL;
    int rc = tok ? chat(g, tok, err) : -1;
    if (rc == 0) {
        struct sampler *s = sampler_new(&set, 100);
        if (!s)
            rc = skv_fail(err, SKV_NO_MEMORY, "no sampler");
        sampler_free(s);
    }
    tok_free(tok);
    gguf_close(g);
    return rc;
}

START_TEST(each_fails_once)
{
    size_t len;
    unsigned char *p = file(_i % 2, templates[_i / 2], &len);
    long n = 0;
    for (;; n++) {
        struct skv_error err = { 0 };
        countdown = n;
        int rc = all(p, len, &err);
        bool reached = countdown < 0;
        countdown = -1;
        if (!reached) {
            ck_assert_msg(rc == 0, "%s", err.msg);
            break;
        }
        ck_assert_msg(rc < 0 && err.code == SKV_NO_MEMORY, "allocation %ld: code %d, '%s'", n, (int)err.code, err.msg);
    }
    ck_assert_int_gt(n, 25);
    free(p);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("nomem");
    TCase *t = tcase_create("nomem");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, each_fails_once, 0, 6);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
