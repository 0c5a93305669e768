/* test_tokenizer: text to ids and back, against the reference data and other tools' results (tests/data). */
#include "config.h"

#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tok_int.h"
#include "tests/gguf_build.h"
#include "tests/tsv.h"

/* ---- making tokenizers --------------------------------------------------------------------------------- */

struct made {
    struct gguf *g;
    unsigned char *bytes;
    struct tokenizer *t;
    struct skv_error err;
};

static struct made make(struct gb *b)
{
    struct made m = { 0 };
    size_t len;
    m.bytes = gb_finish(b, &len);
    m.g = gguf_open_mem(m.bytes, len, "vocab", &m.err);
    ck_assert_msg(m.g != NULL, "%s", m.err.msg);
    m.t = tok_new(m.g, &m.err);
    gb_free(b);
    return m;
}

static void made_free(struct made *m)
{
    tok_free(m->t);
    gguf_close(m->g);
    free(m->bytes);
}

static struct made open_model(void)
{
    struct made m = { 0 };
    const char *path = tsv_model_path();
    if (!path)
        return m;
    m.g = gguf_open(path, &m.err);
    ck_assert_msg(m.g != NULL, "%s", m.err.msg);
    m.t = tok_new(m.g, &m.err);
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    return m;
}

/* text, encoded whole and in pieces of `step` bytes, is `want`. */
static void check_ids(const struct tokenizer *t, const char *what, int row, const struct tsv_field *text, bool special,
                      const struct tsv_field *want)
{
    struct skv_error err = { 0 };
    int n;
    int32_t *ids = tsv_ids(want, &n);
    for (size_t step = 1; step <= 100; step += 33) {
        struct tok_ids out = { 0 };
        struct tok_job job = { .text = text->s, .len = text->len, .special = special };
        int rc = 0;
        while ((rc = tok_encode_some(t, &job, step == 100 ? SIZE_MAX : step, &out, &err)) == 0)
            continue;
        ck_assert_msg(rc == 1, "%s row %d: %s", what, row, err.msg);
        ck_assert_uint_eq(job.done, text->len);
        ck_assert_msg(out.n == n && (n == 0 || !memcmp(out.id, ids, (size_t)n * sizeof(*ids))),
                      "%s row %d: %d ids in place of %d, or other ones: '%s'", what, row, out.n, n, text->s);
        free(out.id);
    }
    free(ids);
}

static void check_text(const struct tokenizer *t, const char *what, int row, const struct tsv_field *ids_field,
                       const struct tsv_field *want)
{
    int n;
    size_t len;
    int32_t *ids = tsv_ids(ids_field, &n);
    char *s = tok_decode(t, ids, n, true, &len, NULL);
    ck_assert_ptr_nonnull(s);
    ck_assert_msg(len == want->len && !memcmp(s, want->s, len), "%s row %d: decoded to '%.*s'", what, row, (int)len, s);
    free(s);
    free(ids);
}

/* ---- the real model -------------------------------------------------------------------------------------- */

START_TEST(reference)
{
    struct made m = open_model();
    struct tsv *v = tsv_read("tokenizer.tsv");
    for (int i = 0; m.t && i < v->n; i++) {
        const struct tsv_field *f = v->row[i].f;
        check_ids(m.t, f[0].s, i, &f[2], strchr(f[1].s, 's') != NULL, &f[3]);
        if (!strchr(f[1].s, 'l'))
            check_text(m.t, f[0].s, i, &f[3], &f[2]);
    }
    ck_assert_int_eq(v->n, 588);
    tsv_free(v);
    made_free(&m);
}
END_TEST

START_TEST(model_facts)
{
    struct made m = open_model();
    size_t len;
    if (!m.t)
        return;
    ck_assert_int_eq(tok_vocab(m.t), 49152);
    ck_assert_int_eq(tok_find(m.t, "<|im_end|>"), 2);
    ck_assert_int_eq(tok_eos(m.t), 2);
    ck_assert_int_eq(tok_bos(m.t), 1);
    ck_assert(!tok_add_bos(m.t));
    ck_assert(tok_is_eog(m.t, 2) && tok_is_eog(m.t, 0) && !tok_is_eog(m.t, 1) && !tok_is_eog(m.t, 100));
    ck_assert(tok_is_control(m.t, 2) && !tok_is_control(m.t, 100));
    ck_assert(!tok_is_eog(m.t, -1) && !tok_is_eog(m.t, 49152) && !tok_is_control(m.t, 49152));
    ck_assert_int_eq(tok_find(m.t, "no such token"), -1);
    tok_bytes(m.t, 2, false, &len);
    ck_assert_uint_eq(len, 0);
    const char *s = tok_bytes(m.t, 2, true, &len);
    ck_assert(len == 10 && !memcmp(s, "<|im_end|>", 10));
    tok_bytes(m.t, 49152, true, &len);
    ck_assert_uint_eq(len, 0);
    tok_bytes(m.t, -1, true, &len);
    ck_assert_uint_eq(len, 0);
    made_free(&m);
}
END_TEST

START_TEST(not_utf8)
{
    static const struct {
        const char *s;
        size_t len, bad;
    } cases[] = { { "abc \xff", 5, 4 },     { "\x80", 1, 0 },        { "ab\xc3", 3, 2 },     { "x\xed\xa0\x80y", 5, 1 },
                  { "\xf4\x90\x80\x80", 4, 0 }, { "a\xc0\x80", 3, 1 }, { "1 \xe2\x82 2", 6, 2 }, { "\xf0\x80\x80\x80", 4, 0 } };
    struct made m = open_model();
    for (size_t i = 0; m.t && i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct skv_error err = { 0 };
        struct tok_ids out = { 0 };
        char want[64];
        snprintf(want, sizeof(want), "not UTF-8 at byte %zu", cases[i].bad);
        ck_assert_int_eq(tok_encode(m.t, cases[i].s, cases[i].len, true, &out, &err), -1);
        ck_assert_msg(strstr(err.msg, want) != NULL, "case %zu: %s", i, err.msg);
        ck_assert_int_eq(err.code, SKV_BAD_REQUEST);
        ck_assert_int_eq(out.n, 0);
        free(out.id);
    }
    made_free(&m);
}
END_TEST

/* A huge word is cut, so its time is bounded; the bytes stay all there. */
START_TEST(long_words)
{
    struct made m = open_model();
    struct skv_error err = { 0 };
    size_t n = 300000, len;
    char *s = malloc(n);
    struct tok_ids out = { 0 };
    ck_assert_ptr_nonnull(s);
    for (size_t i = 0; i < n; i++)
        s[i] = (char)('a' + i * i % 23);
    if (m.t) {
        ck_assert_int_eq(tok_encode(m.t, s, n, false, &out, &err), 0);
        char *back = tok_decode(m.t, out.id, out.n, false, &len, &err);
        ck_assert(len == n && !memcmp(back, s, n));
        free(back);
    }
    free(out.id);
    free(s);
    made_free(&m);
}
END_TEST

struct work {
    const struct tokenizer *t;
    const struct tsv *v;
    int wrong;
};

static void *encode_all(void *arg)
{
    struct work *w = arg;
    for (int i = 0; i < w->v->n; i++) {
        const struct tsv_field *f = w->v->row[i].f;
        struct tok_ids out = { 0 };
        int n;
        int32_t *ids = tsv_ids(&f[3], &n);
        w->wrong += tok_encode(w->t, f[2].s, f[2].len, strchr(f[1].s, 's') != NULL, &out, NULL) || out.n != n ||
                    (n && memcmp(out.id, ids, (size_t)n * sizeof(*ids)));
        free(ids);
        free(out.id);
    }
    return NULL;
}

START_TEST(threads)
{
    struct made m = open_model();
    struct tsv *v = tsv_read("tokenizer.tsv");
    struct work w[3];
    pthread_t th[3];
    for (int i = 0; m.t && i < 3; i++) {
        w[i] = (struct work){ m.t, v, 0 };
        ck_assert_int_eq(pthread_create(&th[i], NULL, encode_all, &w[i]), 0);
    }
    for (int i = 0; m.t && i < 3; i++) {
        pthread_join(th[i], NULL);
        ck_assert_int_eq(w[i].wrong, 0);
    }
    tsv_free(v);
    made_free(&m);
}
END_TEST

/* ---- words against the published patterns ------------------------------------------------------------------ */

static enum tok_pre pre_of(const char *name)
{
    return !strcmp(name, "gpt-2")       ? TOK_PRE_GPT2
           : !strcmp(name, "smollm")    ? TOK_PRE_SMOLLM
           : !strcmp(name, "llama-bpe") ? TOK_PRE_LLAMA3
                                        : TOK_PRE_QWEN2;
}

START_TEST(words)
{
    struct tokenizer *t = calloc(1, sizeof(*t));
    struct tsv *v = tsv_read("pretok.tsv");
    ck_assert_ptr_nonnull(t);
    tok_classes_init(t->bmp);
    for (int i = 0; i < v->n; i++) {
        const struct tsv_field *f = v->row[i].f;
        int n, k = 0;
        int32_t *want = tsv_ids(&f[2], &n);
        t->pre = pre_of(f[0].s);
        for (size_t at = 0, len; at < f[1].len; at += len) {
            len = tok_pre_word(t, f[1].s + at, f[1].len - at);
            ck_assert_msg(k < n && len == (size_t)want[k], "%s row %d word %d: %zu bytes at %zu, '%s'", f[0].s, i, k, len,
                          at, f[1].s);
            k++;
        }
        ck_assert_int_eq(k, n);
        free(want);
    }
    ck_assert_int_gt(v->n, 900);
    tsv_free(v);
    free(t);
}
END_TEST

/* ---- vocabularies trained by other tools ------------------------------------------------------------------- */

static const char *const pres[] = { "gpt-2", "smollm", "llama-bpe", "qwen2" };

static struct made make_bpe(const struct tsv *v, const char *pre)
{
    struct gb_vocab voc = { 0 };
    struct gb b;
    for (int i = 0; i < v->n; i++) {
        const struct tsv_field *f = v->row[i].f;
        if (strcmp(f[1].s, pre))
            continue;
        if (!strcmp(f[0].s, "tok"))
            gb_vocab_add(&voc, f[2].s, f[2].len, atoi(f[3].s), 0);
        else if (!strcmp(f[0].s, "merge"))
            gb_vocab_merge(&voc, f[2].s, f[2].len);
    }
    gb_init(&b);
    gb_vocab_put(&b, &voc, "gpt2", pre);
    gb_vocab_free(&voc);
    return make(&b);
}

START_TEST(bpe)
{
    struct tsv *v = tsv_read("bpe.tsv");
    struct made m = make_bpe(v, pres[_i]);
    int cases = 0;
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    for (int i = 0; i < v->n; i++) {
        const struct tsv_field *f = v->row[i].f;
        if (strcmp(f[0].s, "case") || strcmp(f[1].s, pres[_i]))
            continue;
        check_ids(m.t, pres[_i], i, &f[3], strchr(f[2].s, 's') != NULL, &f[4]);
        check_text(m.t, pres[_i], i, &f[4], &f[3]);
        cases++;
    }
    ck_assert_int_gt(cases, 150);
    made_free(&m);
    tsv_free(v);
}
END_TEST

START_TEST(spm)
{
    struct tsv *v = tsv_read("spm.tsv");
    struct gb_vocab voc = { 0 };
    struct gb b;
    int cases = 0;
    for (int i = 0; i < v->n; i++) {
        const struct tsv_field *f = v->row[i].f;
        if (!strcmp(f[0].s, "tok"))
            gb_vocab_add(&voc, f[1].s, f[1].len, atoi(f[2].s), strtof(f[3].s, NULL));
    }
    gb_init(&b);
    gb_vocab_put(&b, &voc, "llama", NULL);
    gb_vocab_free(&voc);
    struct made m = make(&b);
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    ck_assert(tok_add_bos(m.t) && tok_bos(m.t) == 1 && tok_eos(m.t) == 2 && tok_is_eog(m.t, 2));
    for (int i = 0; i < v->n; i++) {
        const struct tsv_field *f = v->row[i].f;
        if (strcmp(f[0].s, "case"))
            continue;
        check_ids(m.t, "spm", i, &f[1], false, &f[2]);
        if (!strstr(f[1].s, "\xe2\x96\x81")) /* U+2581 comes back as a blank */
            check_text(m.t, "spm", i, &f[2], &f[1]);
        cases++;
    }
    ck_assert_int_gt(cases, 200);
    made_free(&m);
    tsv_free(v);
}
END_TEST

/* With special tokens parsed, the text after one begins with the added blank again, and decoding takes it off. */
START_TEST(spm_special)
{
    struct gb_vocab voc = { 0 };
    struct gb b;
    struct tok_ids out = { 0 };
    size_t len;
    static const int32_t want[] = { 3, 1, 3 };
    gb_vocab_add(&voc, "<unk>", 5, 2, 0);
    gb_vocab_add(&voc, "<s>", 3, 3, 0);
    gb_vocab_add(&voc, "</s>", 4, 3, 0);
    gb_vocab_add(&voc, "\xe2\x96\x81x", 4, 1, -1);
    gb_vocab_add(&voc, "\xe2\x96\x81", 3, 1, -2);
    gb_vocab_add(&voc, "x", 1, 1, -3);
    gb_init(&b);
    gb_vocab_put(&b, &voc, "llama", NULL);
    gb_vocab_free(&voc);
    struct made m = make(&b);
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    ck_assert_int_eq(tok_encode(m.t, "x<s>x", 5, true, &out, NULL), 0);
    ck_assert_int_eq(out.n, 3);
    ck_assert_int_eq(memcmp(out.id, want, sizeof(want)), 0);
    char *s = tok_decode(m.t, out.id, out.n, true, &len, NULL);
    ck_assert(len == 5 && !memcmp(s, "x<s>x", 5));
    free(s);
    out.n = 0;
    ck_assert_int_eq(tok_encode(m.t, "y", 1, true, &out, NULL), 0); /* no byte tokens: the unknown token */
    ck_assert(out.n == 2 && out.id[0] == 4 && out.id[1] == 0);
    free(out.id);
    made_free(&m);
}
END_TEST

/* What ends or begins a sequence is a control token, whatever type a converter gave it: never parsed out of plain text, always
 * with special tokens. */
START_TEST(control_types)
{
    static const int32_t types[] = { 1, 3, 4 };
    for (size_t i = 0; i < 3; i++) {
        struct gb_vocab voc = { 0 };
        struct gb b;
        struct tok_ids out = { 0 };
        gb_vocab_bytes(&voc);
        gb_vocab_add(&voc, "<|end|>", 7, types[i], 0);        /* 256: ends by its text */
        gb_vocab_add(&voc, "<the end>", 9, types[i], 0);      /* 257: ends because the file says so */
        gb_vocab_add(&voc, "<the beginning>", 15, types[i], 0); /* 258 */
        gb_vocab_add(&voc, "<word>", 6, 4, 0);                /* 259: stays user-defined */
        gb_init(&b);
        gb_vocab_put(&b, &voc, "gpt2", "gpt-2");
        gb_kv_u32(&b, "tokenizer.ggml.eos_token_id", 257);
        gb_kv_u32(&b, "tokenizer.ggml.bos_token_id", 258);
        gb_vocab_free(&voc);
        struct made m = make(&b);
        ck_assert_msg(m.t != NULL, "%s", m.err.msg);
        for (int32_t id = 257; id < 259; id++)
            ck_assert(tok_is_control(m.t, id));
        ck_assert(tok_is_control(m.t, 256) == (types[i] != 1) && tok_is_eog(m.t, 256) == (types[i] != 1));
        static const char text[] = "<the beginning><the end><word>";
        ck_assert_int_eq(tok_encode(m.t, text, sizeof(text) - 1, false, &out, NULL), 0);
        ck_assert(out.n == 25 && out.id[24] == 259);
        out.n = 0;
        ck_assert_int_eq(tok_encode(m.t, text, sizeof(text) - 1, true, &out, NULL), 0);
        ck_assert(out.n == 3 && out.id[0] == 258 && out.id[1] == 257 && out.id[2] == 259);
        free(out.id);
        made_free(&m);
    }
}
END_TEST

/* Phi-3's special tokens take the blanks after them, all but three; another vocabulary's do not. */
START_TEST(phi3_blanks)
{
    for (int phi3 = 0; phi3 < 2; phi3++) {
        struct gb_vocab voc = { 0 };
        struct gb b;
        struct tok_ids out = { 0 };
        gb_vocab_add(&voc, "<unk>", 5, 2, 0);
        gb_vocab_add(&voc, "<s>", 3, 3, 0);
        gb_vocab_add(&voc, "</s>", 4, 4, 0);
        gb_vocab_add(&voc, "\xe2\x96\x81", 3, 1, -2);
        gb_vocab_add(&voc, "x", 1, 1, -3);
        gb_vocab_add(&voc, "<0x0A>", 6, 6, 0);
        gb_vocab_add(&voc, "<|end|>", 7, 3, 0);
        gb_vocab_add(&voc, "<|endoftext|>", 13, 3, 0);
        gb_vocab_add(&voc, phi3 ? "<|placeholder1|>" : "<|placeholder|>", phi3 ? 16 : 15, 3, 0);
        gb_init(&b);
        gb_vocab_put(&b, &voc, "llama", NULL);
        gb_vocab_free(&voc);
        struct made m = make(&b);
        static const char text[] = "<|end|>\n  x</s>\nx<s>\n<|endoftext|>\nx";
        static const int32_t takes[] = { 6, 3, 4, 2, 3, 4, 1, 3, 5, 7, 3, 5, 4 };
        static const int32_t keeps[] = { 6, 3, 5, 3, 3, 4, 2, 3, 5, 4, 1, 3, 5, 7, 3, 5, 4 };
        int n = phi3 ? (int)(sizeof(takes) / 4) : (int)(sizeof(keeps) / 4);
        ck_assert_msg(m.t != NULL, "%s", m.err.msg);
        ck_assert_int_eq(tok_encode(m.t, text, sizeof(text) - 1, true, &out, NULL), 0);
        ck_assert_int_eq(out.n, n);
        ck_assert(!memcmp(out.id, phi3 ? takes : keeps, (size_t)n * 4));
        out.n = 0; /* blanks to the end of the text */
        ck_assert_int_eq(tok_encode(m.t, "<|end|> \n", 9, true, &out, NULL), 0);
        ck_assert_int_eq(out.n, phi3 ? 1 : 4);
        free(out.id);
        made_free(&m);
    }
}
END_TEST

/* Vocabularies of code have tokens of a thousand blanks and more. */
START_TEST(long_tokens)
{
    struct gb_vocab voc = { 0 };
    struct gb b;
    char text[4100], merge[4200];
    struct tok_ids out = { 0 };
    gb_vocab_bytes(&voc);
    for (size_t n = 2; n <= 4096; n *= 2) {
        size_t half = n / 2;
        memset(text, 'a', n);
        memset(merge, 'a', n + 1);
        merge[half] = ' ';
        gb_vocab_add(&voc, text, n, 1, 0);
        gb_vocab_merge(&voc, merge, n + 1);
    }
    gb_init(&b);
    gb_vocab_put(&b, &voc, "gpt2", "gpt-2");
    gb_vocab_free(&voc);
    struct made m = make(&b);
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    memset(text, 'a', sizeof(text));
    ck_assert_int_eq(tok_encode(m.t, text, 4099, true, &out, NULL), 0);
    ck_assert_int_eq(out.n, 3);
    ck_assert(out.id[0] == 256 + 11 && out.id[1] == 256 && out.id[2] == 'a');
    free(out.id);
    made_free(&m);
}
END_TEST

/* The longest of the special tokens that begin at the leftmost place. */
START_TEST(specials)
{
    struct gb_vocab voc = { 0 };
    struct gb b;
    size_t at = 0;
    int32_t id = -1;
    gb_vocab_bytes(&voc);
    gb_vocab_add(&voc, "<a>", 3, 3, 0);   /* 256 */
    gb_vocab_add(&voc, "<a>>", 4, 3, 0);  /* 257 */
    gb_vocab_add(&voc, "<ab", 3, 4, 0);   /* 258: user-defined */
    gb_vocab_add(&voc, "[x]", 3, 3, 0);   /* 259 */
    gb_vocab_add(&voc, "", 0, 3, 0);      /* 260: never matches */
    gb_init(&b);
    gb_vocab_put(&b, &voc, "gpt2", "gpt-2");
    gb_vocab_free(&voc);
    struct made m = make(&b);
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    ck_assert_uint_eq(tok_next_special(m.t, "..<a>>", 6, &at, &id), 4);
    ck_assert(at == 2 && id == 257);
    ck_assert_uint_eq(tok_next_special(m.t, "<<a<a>[x]", 9, &at, &id), 3);
    ck_assert(at == 3 && id == 256);
    ck_assert_uint_eq(tok_next_special(m.t, "<a", 2, &at, &id), 0);
    ck_assert_uint_eq(tok_next_special(m.t, "[x[x]", 5, &at, &id), 3);
    ck_assert(at == 2 && id == 259);
    struct tok_ids out = { 0 };
    ck_assert_int_eq(tok_encode(m.t, "<a><ab", 6, false, &out, NULL), 0);
    ck_assert_int_eq(out.n, 4); /* three bytes, and the user-defined token even so */
    ck_assert_int_eq(out.id[3], 258);
    out.n = 0;
    ck_assert_int_eq(tok_encode(m.t, "<a><ab", 6, true, &out, NULL), 0);
    ck_assert(out.n == 2 && out.id[0] == 256 && out.id[1] == 258);
    ck_assert_int_eq(tok_find(m.t, "[x]"), 259);
    free(out.id);
    made_free(&m);
}
END_TEST

/* ---- refusals ---------------------------------------------------------------------------------------------- */

static void plain_vocab(struct gb_vocab *v)
{
    gb_vocab_bytes(v);
    gb_vocab_add(v, "ab", 2, 1, 0);
    gb_vocab_merge(v, "a b", 3);
}

static void v_unknown_model(struct gb *b)
{
    gb_kv_str(b, "tokenizer.ggml.model", "wordpiece");
}
static void v_no_model(struct gb *b)
{
    gb_kv_str(b, "general.architecture", "llama");
}
static void v_model_type(struct gb *b)
{
    gb_kv_u32(b, "tokenizer.ggml.model", 1);
}
static void v_unknown_pre(struct gb *b)
{
    struct gb_vocab v = { 0 };
    plain_vocab(&v);
    gb_vocab_put(b, &v, "gpt2", "chatglm-bpe");
    gb_vocab_free(&v);
}
static void v_no_tokens(struct gb *b)
{
    gb_kv_str(b, "tokenizer.ggml.model", "gpt2");
}
static void v_zero_tokens(struct gb *b)
{
    struct gb_vocab v = { 0 };
    gb_vocab_put(b, &v, "gpt2", NULL);
}
static void v_tokens_type(struct gb *b)
{
    gb_kv_str(b, "tokenizer.ggml.model", "gpt2");
    gb_kv_arr(b, "tokenizer.ggml.tokens", GB_U32, 1);
    gb_u32(&b->kv, 1);
}
static void v_no_merges(struct gb *b)
{
    gb_kv_str(b, "tokenizer.ggml.model", "gpt2");
    gb_kv_arr(b, "tokenizer.ggml.tokens", GB_STR, 1);
    gb_str(&b->kv, "a", 1);
}
static void v_merge(struct gb *b, const char *merge)
{
    struct gb_vocab v = { 0 };
    plain_vocab(&v);
    gb_vocab_merge(&v, merge, strlen(merge));
    gb_vocab_put(b, &v, "gpt2", NULL);
    gb_vocab_free(&v);
}
static void v_merge_unknown(struct gb *b)
{
    v_merge(b, "a xyz");
}
static void v_merge_result(struct gb *b)
{
    v_merge(b, "a c");
}
static void v_merge_one(struct gb *b)
{
    v_merge(b, "ab");
}
static void v_merge_empty(struct gb *b)
{
    v_merge(b, "");
}
static void v_merge_long(struct gb *b)
{
    static char s[65538];
    memset(s, 'a', 65537);
    s[1000] = ' ';
    v_merge(b, s);
}
static void v_types_short(struct gb *b)
{
    gb_kv_arr(b, "tokenizer.ggml.token_type", GB_I32, 1);
    gb_u32(&b->kv, 1);
    struct gb_vocab v = { 0 };
    plain_vocab(&v);
    gb_kv_str(b, "tokenizer.ggml.model", "gpt2");
    gb_kv_arr(b, "tokenizer.ggml.tokens", GB_STR, v.n);
    gb_raw(&b->kv, v.tokens.p, v.tokens.len);
    gb_kv_arr(b, "tokenizer.ggml.merges", GB_STR, 0);
    gb_vocab_free(&v);
}
static void v_type_7(struct gb *b)
{
    struct gb_vocab v = { 0 };
    plain_vocab(&v);
    gb_vocab_add(&v, "q", 1, 7, 0);
    gb_vocab_put(b, &v, "gpt2", NULL);
    gb_vocab_free(&v);
}
static void v_byte_token(struct gb *b)
{
    struct gb_vocab v = { 0 };
    gb_vocab_add(&v, "<0xZZ>", 6, 6, 0);
    gb_vocab_put(b, &v, "llama", NULL);
    gb_vocab_free(&v);
}
static void v_no_scores(struct gb *b)
{
    gb_kv_str(b, "tokenizer.ggml.model", "llama");
    gb_kv_arr(b, "tokenizer.ggml.tokens", GB_STR, 1);
    gb_str(&b->kv, "a", 1);
}
static void v_scores_short(struct gb *b)
{
    v_no_scores(b);
    gb_kv_arr(b, "tokenizer.ggml.scores", GB_F32, 0);
}
static void v_score_nan(struct gb *b)
{
    struct gb_vocab v = { 0 };
    gb_vocab_add(&v, "a", 1, 1, 0.0f / 0.0f);
    gb_vocab_put(b, &v, "llama", NULL);
    gb_vocab_free(&v);
}
static void v_plain(struct gb *b)
{
    struct gb_vocab v = { 0 };
    plain_vocab(&v);
    gb_vocab_put(b, &v, "gpt2", "gpt-2");
    gb_vocab_free(&v);
}
static void v_eos(struct gb *b)
{
    v_plain(b);
    gb_kv_u32(b, "tokenizer.ggml.eos_token_id", 257);
}
static void v_bos(struct gb *b)
{
    v_plain(b);
    gb_kv_u32(b, "tokenizer.ggml.bos_token_id", 1u << 31);
}
static void v_eos_type(struct gb *b)
{
    v_plain(b);
    gb_kv_str(b, "tokenizer.ggml.eos_token_id", "2");
}
static void v_add_bos_type(struct gb *b)
{
    v_plain(b);
    gb_kv_u32(b, "tokenizer.ggml.add_bos_token", 1);
}
static void v_vocab_size(struct gb *b)
{
    v_plain(b);
    gb_kv_str(b, "general.architecture", "llama");
    gb_kv_u32(b, "llama.vocab_size", 258);
}

static const struct {
    void (*make)(struct gb *b);
    const char *says;
} refused[] = {
    { v_unknown_model, "kind 'wordpiece' is not supported" },
    { v_no_model, "no tokenizer.ggml.model" },
    { v_model_type, "tokenizer.ggml.model is of type u32" },
    { v_unknown_pre, "pre-tokenizer 'chatglm-bpe' is not supported" },
    { v_no_tokens, "no tokenizer.ggml.tokens" },
    { v_zero_tokens, "no tokenizer.ggml.tokens" },
    { v_tokens_type, "array of u32" },
    { v_no_merges, "needs tokenizer.ggml.merges" },
    { v_merge_unknown, "merge 1 names a token" },
    { v_merge_result, "merge 1 names a token" },
    { v_merge_one, "merge 1 is not two tokens" },
    { v_merge_empty, "merge 1 is not two tokens" },
    { v_merge_long, "merge 1 is longer" },
    { v_types_short, "1 token types for 257 tokens" },
    { v_type_7, "unknown type 7" },
    { v_byte_token, "byte token" },
    { v_no_scores, "needs tokenizer.ggml.scores" },
    { v_scores_short, "0 scores for 1 tokens" },
    { v_score_nan, "score of token 0" },
    { v_eos, "eos_token_id is 257, but there are 257 tokens" },
    { v_bos, "bos_token_id is 2147483648" },
    { v_eos_type, "eos_token_id is of type string" },
    { v_add_bos_type, "add_bos_token is of type u32" },
    { v_vocab_size, "257 tokens, but llama.vocab_size is 258" },
};

START_TEST(refuses)
{
    struct gb b;
    gb_init(&b);
    refused[_i].make(&b);
    struct made m = make(&b);
    ck_assert_msg(m.t == NULL, "'%s' taken for good", refused[_i].says);
    ck_assert_msg(strstr(m.err.msg, refused[_i].says) != NULL, "says '%s', not '%s'", m.err.msg, refused[_i].says);
    ck_assert_int_eq(m.err.code, SKV_BAD_MODEL);
    made_free(&m);
}
END_TEST

START_TEST(good_one)
{
    struct gb b;
    gb_init(&b);
    v_plain(&b);
    struct made m = make(&b);
    struct tok_ids out = { 0 };
    ck_assert_msg(m.t != NULL, "%s", m.err.msg);
    ck_assert_int_eq(tok_encode(m.t, "abc", 3, false, &out, NULL), 0);
    ck_assert(out.n == 2 && out.id[0] == 256);
    ck_assert_int_eq(tok_bos(m.t), -1);
    ck_assert_int_eq(tok_eos(m.t), -1);
    free(out.id);
    made_free(&m);
}
END_TEST

/* ---- UTF-8 ------------------------------------------------------------------------------------------------- */

START_TEST(utf8)
{
    char out[32];
    size_t bad = 99;
    ck_assert(utf8_valid("", 0, &bad) && utf8_valid("abcdefghij\xc3\xa9", 12, &bad));
    ck_assert(!utf8_valid("abcdefgh\xc3", 9, &bad) && bad == 8);
    ck_assert(!utf8_valid("12345678\xf0\x9f\x98\x80\xbf", 13, NULL));
    ck_assert_uint_eq(utf8_whole("ab\xc3", 3), 2);
    ck_assert_uint_eq(utf8_whole("ab\xe2\x82", 4), 2);
    ck_assert_uint_eq(utf8_whole("ab\xf0\x9f\x98", 5), 2);
    ck_assert_uint_eq(utf8_whole("ab\xc3\xa9", 4), 4);
    ck_assert_uint_eq(utf8_whole("ab\xff", 3), 3);       /* wrong, not unfinished */
    ck_assert_uint_eq(utf8_whole("ab\xed\xa0", 4), 4);   /* a surrogate never becomes valid */
    ck_assert_uint_eq(utf8_whole("\x80\x80\x80\x80", 4), 4);
    ck_assert_uint_eq(utf8_whole("", 0), 0);
    size_t n = utf8_sanitize("a\xff" "b\xe2\x82", 5, out);
    ck_assert(n == 1 + 3 + 1 + 6 && !memcmp(out, "a\xef\xbf\xbd" "b\xef\xbf\xbd\xef\xbf\xbd", n));
    for (uint32_t cp = 0; cp < 0x110000; cp += cp < 0x800 ? 1 : 97) {
        char s[5];
        uint32_t back = 0;
        int k = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
        if (cp >= 0xd800 && cp < 0xe000)
            continue;
        for (int i = 0; i < k; i++)
            s[i] = (char)(i ? 0x80 | (cp >> 6 * (k - 1 - i) & 0x3f)
                          : k == 1 ? cp
                                   : (0xf00u >> k & 0xff) | cp >> 6 * (k - 1));
        ck_assert_int_eq(utf8_decode(s, (size_t)k, &back), k);
        ck_assert_uint_eq(back, cp);
        ck_assert(utf8_valid(s, (size_t)k, NULL));
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("tokenizer");
    TCase *t = tcase_create("tokenizer");
    tcase_set_timeout(t, 120);
    tcase_add_test(t, reference);
    tcase_add_test(t, model_facts);
    tcase_add_test(t, not_utf8);
    tcase_add_test(t, long_words);
    tcase_add_test(t, threads);
    tcase_add_test(t, words);
    tcase_add_loop_test(t, bpe, 0, 4);
    tcase_add_test(t, spm);
    tcase_add_test(t, spm_special);
    tcase_add_test(t, control_types);
    tcase_add_test(t, phi3_blanks);
    tcase_add_test(t, long_tokens);
    tcase_add_test(t, specials);
    tcase_add_loop_test(t, refuses, 0, (int)(sizeof(refused) / sizeof(refused[0])));
    tcase_add_test(t, good_one);
    tcase_add_test(t, utf8);
    suite_add_tcase(s, t);
    SRunner *r = srunner_create(s);
    srunner_run_all(r, CK_ENV);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed != 0;
}
