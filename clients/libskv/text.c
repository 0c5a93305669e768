/* text.c - tokenize and detokenize, blocking. */
#include "config.h"

#include "clients/libskv/skv.h"

#include <stdlib.h>
#include <string.h>

long skv_tokenize(struct skv *c, const char *text, size_t len, bool special, bool bos, int32_t **tokens, struct skv_error *err)
{
    struct skv_args *a = skv_args_new();
    struct skv_reply *r = NULL;
    const struct skv_value *v;
    size_t n;

    if (a == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a request");
    *tokens = NULL;
    skv_arg_strn(a, "text", text, len);
    skv_arg_bool(a, "special", special);
    skv_arg_bool(a, "bos", bos);
    if (skv_call(c, "tokenize", a, &r, err) < 0) {
        skv_reply_free(r);
        return -1;
    }
    v = skv_get(skv_reply_value(r), "tokens");
    n = skv_len(v);
    *tokens = calloc(n + 1, sizeof **tokens);
    for (size_t i = 0; *tokens != NULL && i < n; i++)
        (*tokens)[i] = (int32_t)skv_int(skv_at(v, i), -1);
    skv_reply_free(r);
    return *tokens == NULL ? skv_fail(err, SKV_NO_MEMORY, "no memory for %zu tokens", n) : (long)n;
}

char *skv_detokenize(struct skv *c, const int32_t *tokens, size_t n, size_t *len, struct skv_error *err)
{
    struct skv_args *a = skv_args_new();
    struct skv_reply *r = NULL;
    const char *s;
    char *text;
    size_t size;

    if (a == NULL) {
        skv_fail(err, SKV_NO_MEMORY, "no memory for a request");
        return NULL;
    }
    skv_arg_tokens(a, "tokens", tokens, n);
    if (skv_call(c, "detokenize", a, &r, err) < 0) {
        skv_reply_free(r);
        return NULL;
    }
    s = skv_str(skv_get(skv_reply_value(r), "text"), &size);
    text = malloc(size + 1);
    if (text == NULL)
        skv_fail(err, SKV_NO_MEMORY, "no memory for %zu bytes of text", size);
    else {
        memcpy(text, s, size);
        text[size] = '\0';
        if (len != NULL)
            *len = size;
    }
    skv_reply_free(r);
    return text;
}
