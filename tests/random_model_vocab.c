/* random_model_vocab.c - vocabularies: bytes with merges, pieces with scores, or another file's. */
#include "tests/random_model_vocab.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { T_U8, T_I8, T_U16, T_I16, T_U32, T_I32, T_F32, T_BOOL, T_STR, T_ARR, T_U64, T_I64, T_F64 };
enum { TOK_NORMAL = 1, TOK_UNKNOWN = 2, TOK_CONTROL = 3, TOK_BYTE = 6 };

void meta_bytes(struct meta *b, const void *p, size_t n)
{
    if (n > b->cap - b->len) {
        b->cap = (b->len + n) * 2;
        b->data = realloc(b->data, b->cap);
        if (!b->data)
            abort(); /* a test tool: nothing to save */
    }
    memcpy(b->data + b->len, p, n);
    b->len += n;
}

static void put_u32(struct meta *b, uint32_t v)
{
    meta_bytes(b, &v, sizeof v);
}

static void put_u64(struct meta *b, uint64_t v)
{
    meta_bytes(b, &v, sizeof v);
}

static void put_str(struct meta *b, const char *s)
{
    put_u64(b, strlen(s));
    meta_bytes(b, s, strlen(s));
}

static void put_key(struct meta *b, const char *key, uint32_t type)
{
    put_str(b, key);
    put_u32(b, type);
    b->n++;
}

void meta_u32(struct meta *b, const char *key, uint32_t v)
{
    put_key(b, key, T_U32);
    put_u32(b, v);
}

void meta_f32(struct meta *b, const char *key, float v)
{
    put_key(b, key, T_F32);
    meta_bytes(b, &v, sizeof v);
}

void meta_bool(struct meta *b, const char *key, int v)
{
    unsigned char c = v != 0;
    put_key(b, key, T_BOOL);
    meta_bytes(b, &c, 1);
}

void meta_str(struct meta *b, const char *key, const char *s)
{
    put_key(b, key, T_STR);
    put_str(b, s);
}

static void put_array(struct meta *b, const char *key, uint32_t type, uint64_t n)
{
    put_key(b, key, T_ARR);
    put_u32(b, type);
    put_u64(b, n);
}

/* ---- vocabularies made here ------------------------------------------------------------------------- */

struct vocab {
    struct meta tokens, types, scores, merges; /* array elements; .n counts them */
    int want;
};

static void vocab_add(struct vocab *v, const char *s, int32_t type, float score)
{
    put_str(&v->tokens, s);
    meta_bytes(&v->types, &type, sizeof type);
    meta_bytes(&v->scores, &score, sizeof score);
    v->tokens.n++;
}

/* A token made of two others; false when the vocabulary is full. */
static bool vocab_join(struct vocab *v, const char *left, const char *right)
{
    char s[64];
    if (v->tokens.n >= (uint64_t)v->want)
        return false;
    snprintf(s, sizeof s, "%s %s", left, right);
    put_str(&v->merges, s);
    v->merges.n++;
    snprintf(s, sizeof s, "%s%s", left, right);
    vocab_add(v, s, TOK_NORMAL, -(float)v->tokens.n);
    return true;
}

/* Fill up with joined letters: " a", "ab", " ab", "abc", "abcd", each made of two that came before. */
static void vocab_fill(struct vocab *v, const char *space)
{
    char a[8], b[8];
    const int n = 26 * 26;
    for (int i = 0; i < 26; i++) {
        snprintf(b, sizeof b, "%c", 'a' + i);
        if (!vocab_join(v, space, b))
            return;
    }
    for (int i = 0; i < n; i++) {
        snprintf(a, sizeof a, "%c", 'a' + i / 26);
        snprintf(b, sizeof b, "%c", 'a' + i % 26);
        if (!vocab_join(v, a, b))
            return;
    }
    for (int i = 0; i < n; i++) {
        snprintf(b, sizeof b, "%c%c", 'a' + i / 26, 'a' + i % 26);
        if (!vocab_join(v, space, b))
            return;
    }
    for (int i = 0; i < n * 26; i++) {
        snprintf(a, sizeof a, "%c%c", 'a' + i / 26 / 26, 'a' + i / 26 % 26);
        snprintf(b, sizeof b, "%c", 'a' + i % 26);
        if (!vocab_join(v, a, b))
            return;
    }
    for (int i = 0; i < n * n; i++) {
        snprintf(a, sizeof a, "%c%c", 'a' + i / n / 26, 'a' + i / n % 26);
        snprintf(b, sizeof b, "%c%c", 'a' + i % n / 26, 'a' + i % n % 26);
        if (!vocab_join(v, a, b))
            return;
    }
}

static void utf8_put(char *out, unsigned c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        out[1] = 0;
    } else {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        out[2] = 0;
    }
}

/* GPT-2's printable stand-ins: bytes that are visible Latin-1 stand for themselves, the others for 256, 257, ... */
static void add_bytes(struct vocab *v)
{
    unsigned next = 256;
    for (unsigned c = 0; c < 256; c++) {
        bool visible = (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || c >= 174;
        char s[4];
        utf8_put(s, visible ? c : next++);
        vocab_add(v, s, TOK_NORMAL, 0);
    }
}

static const char chatml[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
static const char llama3[] =
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";
static const char zephyr[] =
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + eos_token }}"
    "\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}"
    "\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}"
    "\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}";

static void make_gpt2(struct meta *b, struct vocab *v, const struct random_model *m)
{
    static const char *const ml[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", NULL};
    static const char *const l3[] = {"<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                                     "<|end_header_id|>", "<|eot_id|>", NULL};
    bool is_l3 = strcmp(m->pre, "llama-bpe") == 0;
    for (const char *const *s = is_l3 ? l3 : ml; *s; s++)
        vocab_add(v, *s, TOK_CONTROL, 0);
    add_bytes(v);
    vocab_fill(v, "\304\240"); /* U+0120, the space's stand-in */
    meta_str(b, "tokenizer.ggml.pre", m->pre);
    meta_u32(b, "tokenizer.ggml.bos_token_id", 0);
    meta_u32(b, "tokenizer.ggml.eos_token_id", is_l3 ? 4 : 2);
    meta_bool(b, "tokenizer.ggml.add_bos_token", is_l3);
    meta_str(b, "tokenizer.chat_template", is_l3 ? llama3 : chatml);
    put_array(b, "tokenizer.ggml.merges", T_STR, v->merges.n);
    meta_bytes(b, v->merges.data, v->merges.len);
}

static void make_llama(struct meta *b, struct vocab *v)
{
    vocab_add(v, "<unk>", TOK_UNKNOWN, 0);
    vocab_add(v, "<s>", TOK_CONTROL, 0);
    vocab_add(v, "</s>", TOK_CONTROL, 0);
    for (int c = 0; c < 256; c++) {
        char s[8];
        snprintf(s, sizeof s, "<0x%02X>", c);
        vocab_add(v, s, TOK_BYTE, 0);
    }
    vocab_add(v, "\342\226\201", TOK_NORMAL, -1e6f); /* U+2581, the space's stand-in */
    for (char c = '!'; c <= '~'; c++)
        vocab_add(v, (char[]){c, 0}, TOK_NORMAL, -1e6f);
    vocab_fill(v, "\342\226\201");
    meta_u32(b, "tokenizer.ggml.bos_token_id", 1);
    meta_u32(b, "tokenizer.ggml.eos_token_id", 2);
    meta_u32(b, "tokenizer.ggml.unknown_token_id", 0);
    meta_bool(b, "tokenizer.ggml.add_bos_token", 1);
    meta_str(b, "tokenizer.chat_template", zephyr);
    put_array(b, "tokenizer.ggml.scores", T_F32, v->tokens.n);
    meta_bytes(b, v->scores.data, v->scores.len);
}

int vocab_make(struct meta *b, const struct random_model *m, struct skv_error *err)
{
    struct vocab v = {.want = m->vocab};
    if (m->vocab < 384 || m->vocab > 400000)
        return skv_fail(err, SKV_BAD_CONFIG, "vocab %d: 384 to 400000 is possible", m->vocab);
    meta_str(b, "tokenizer.ggml.model", m->tokenizer);
    if (strcmp(m->tokenizer, "gpt2") == 0)
        make_gpt2(b, &v, m);
    else if (strcmp(m->tokenizer, "llama") == 0)
        make_llama(b, &v);
    else
        return skv_fail(err, SKV_BAD_CONFIG, "tokenizer '%s': gpt2 or llama", m->tokenizer);
    put_array(b, "tokenizer.ggml.tokens", T_STR, v.tokens.n);
    meta_bytes(b, v.tokens.data, v.tokens.len);
    put_array(b, "tokenizer.ggml.token_type", T_I32, v.tokens.n);
    meta_bytes(b, v.types.data, v.types.len);
    free(v.tokens.data);
    free(v.types.data);
    free(v.scores.data);
    free(v.merges.data);
    return 0;
}

/* ---- another file's --------------------------------------------------------------------------------- */

/* A reader over the head of a file; `bad` latches. */
struct cursor {
    const unsigned char *p;
    size_t left;
    bool bad;
};

static const unsigned char *cur_take(struct cursor *c, uint64_t n)
{
    const unsigned char *p = c->p;
    if (c->bad || n > c->left) {
        c->bad = true;
        return NULL;
    }
    c->p += n;
    c->left -= n;
    return p;
}

static uint64_t cur_int(struct cursor *c, size_t size)
{
    uint64_t v = 0;
    const unsigned char *p = cur_take(c, size);
    if (p)
        memcpy(&v, p, size); /* little-endian machines only, as the whole of skvd */
    return v;
}

static void cur_skip_value(struct cursor *c, uint32_t type, uint64_t *n_arr)
{
    static const unsigned char size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    uint64_t n = 1;
    if (type == T_ARR) {
        type = (uint32_t)cur_int(c, 4);
        n = cur_int(c, 8);
        *n_arr = n;
    }
    if (type >= sizeof size || type == T_ARR) {
        c->bad = true;
    } else if (type == T_STR) {
        for (uint64_t i = 0; i < n && !c->bad; i++)
            cur_take(c, cur_int(c, 8));
    } else if (n > c->left) {
        c->bad = true;
    } else {
        cur_take(c, n * size[type]);
    }
}

static int copy_entries(struct meta *b, struct cursor *c, int *n_vocab)
{
    static const char prefix[] = "tokenizer.", tokens[] = "tokenizer.ggml.tokens";
    cur_take(c, 16);
    uint64_t n_kv = cur_int(c, 8);
    *n_vocab = 0;
    for (uint64_t i = 0; i < n_kv && !c->bad; i++) {
        const unsigned char *start = c->p;
        uint64_t n_arr = 0, len = cur_int(c, 8);
        const char *key = (const char *)cur_take(c, len);
        cur_skip_value(c, (uint32_t)cur_int(c, 4), &n_arr);
        if (c->bad || len < strlen(prefix) || memcmp(key, prefix, strlen(prefix)) != 0)
            continue;
        meta_bytes(b, start, (size_t)(c->p - start));
        b->n++;
        if (len == strlen(tokens) && memcmp(key, tokens, len) == 0)
            *n_vocab = (int)n_arr;
    }
    return c->bad || *n_vocab == 0 ? -1 : 0;
}

int vocab_copy(struct meta *b, const char *path, int *n_vocab, struct skv_error *err)
{
    enum { HEAD = 64 << 20 }; /* metadata is far smaller */
    FILE *f = fopen(path, "rb");
    unsigned char *head = malloc(HEAD);
    int rc = -1;
    if (!f || !head) {
        skv_fail(err, SKV_IO, "%s: %s", path, strerror(errno));
    } else {
        struct cursor c = {.p = head, .left = fread(head, 1, HEAD, f)};
        rc = copy_entries(b, &c, n_vocab);
        if (rc < 0)
            skv_fail(err, SKV_BAD_MODEL, "%s: not a GGUF file with a vocabulary", path);
    }
    free(head);
    if (f)
        fclose(f);
    return rc;
}
