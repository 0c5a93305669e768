#include "protocol/args.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Names from the wire are quoted in messages: cut, and with what could harm a terminal replaced. */
#define QUOTE_LEN 40

struct quoted {
    char s[QUOTE_LEN + 4];
};

static struct quoted quote(const char *p, size_t n)
{
    struct quoted q;
    size_t m = n < QUOTE_LEN ? n : QUOTE_LEN;

    /* do not cut a character in two */
    while (m < n && m > 0 && ((uint8_t)p[m] & 0xc0) == 0x80)
        m--;
    for (size_t i = 0; i < m; i++)
        q.s[i] = (uint8_t)p[i] < 0x20 || p[i] == 0x7f ? '?' : p[i];
    snprintf(q.s + m, 4, "%s", m < n ? "..." : "");
    return q;
}

static int no_memory(struct skv_error *err)
{
    return skv_fail(err, SKV_NO_MEMORY, "no memory for the request's arguments");
}

static int wrong_type(const char *name, const char *want, const struct wire_value *v, struct skv_error *err)
{
    return skv_fail(err, SKV_BAD_REQUEST, "%s is %s, it must be %s", name, wire_type_name(wire_type(v)), want);
}

static void *field_at(struct args *a, size_t off)
{
    return (char *)a + off;
}

/* ---- one value ------------------------------------------------------------------------------------- */

static int get_range(const struct field *f, const struct wire_value *v, int64_t *out, struct skv_error *err)
{
    if (!wire_get_int(v, out)) {
        if (wire_type(v) != WIRE_INT && wire_type(v) != WIRE_FLOAT)
            return wrong_type(f->name, "an integer", v, err);
    } else if ((double)*out >= f->min && (double)*out <= f->max) {
        return 0;
    } else {
        return skv_fail(err, SKV_BAD_REQUEST, "%s is %lld, it must be from %.0f to %.0f%s%s", f->name, (long long)*out,
                        f->min, f->max, f->unit != NULL ? " " : "", f->unit != NULL ? f->unit : "");
    }
    return skv_fail(err, SKV_BAD_REQUEST, "%s must be an integer from %.0f to %.0f%s%s", f->name, f->min, f->max,
                    f->unit != NULL ? " " : "", f->unit != NULL ? f->unit : "");
}

static int get_int(const struct field *f, const struct wire_value *v, struct args *a, struct skv_error *err)
{
    int64_t n;

    if (get_range(f, v, &n, err) != 0)
        return -1;
    if (f->type == FIELD_INT64)
        *(int64_t *)field_at(a, f->off) = n;
    else
        *(int *)field_at(a, f->off) = (int)n;
    return 0;
}

static int get_float(const struct field *f, const struct wire_value *v, struct args *a, struct skv_error *err)
{
    double d;

    if (!wire_get_double(v, &d))
        return wrong_type(f->name, "a number", v, err);
    if (!(d >= f->min && d <= f->max)) /* NaN too */
        return skv_fail(err, SKV_BAD_REQUEST, "%s is %g, it must be from %g to %g", f->name, d, f->min, f->max);
    *(float *)field_at(a, f->off) = (float)d;
    return 0;
}

static int copy_str(const char *p, size_t n, struct args_str *out, struct skv_error *err)
{
    char *s = malloc(n + 1);

    *out = (struct args_str){ NULL, 0 };
    if (s == NULL)
        return no_memory(err);
    if (n > 0)
        memcpy(s, p, n);
    s[n] = '\0';
    out->s = s;
    out->len = n;
    return 0;
}

static int get_text(const struct field *f, const struct wire_value *v, struct args_str *out, struct skv_error *err)
{
    const char *p;
    size_t n;

    if (!wire_get_str(v, &p, &n))
        return wrong_type(f->name, "a string", v, err);
    if ((double)n < f->min || (double)n > f->max)
        return skv_fail(err, SKV_BAD_REQUEST, "%s has %zu bytes, it must have from %.0f to %.0f", f->name, n, f->min, f->max);
    return copy_str(p, n, out, err);
}

static int get_name(const struct field *f, const struct wire_value *v, char **out, struct skv_error *err)
{
    struct args_str s;

    if (get_text(f, v, &s, err) != 0)
        return -1;
    for (size_t i = 0; i < s.len; i++)
        if ((uint8_t)s.s[i] < 0x20 || s.s[i] == 0x7f) {
            free(s.s);
            return skv_fail(err, SKV_BAD_REQUEST, "%s has a control character in it", f->name);
        }
    *out = s.s;
    return 0;
}

static int get_choice(const struct field *f, const struct wire_value *v, struct args *a, struct skv_error *err)
{
    char list[128] = "";
    size_t len = 0;

    for (int i = 0; f->choices[i] != NULL; i++) {
        if (wire_str_is(v, f->choices[i])) {
            *(int *)field_at(a, f->off) = i;
            return 0;
        }
        len += (size_t)snprintf(list + len, sizeof list - len, "%s\"%s\"", i > 0 ? " or " : "", f->choices[i]);
        if (len >= sizeof list)
            break;
    }
    return skv_fail(err, SKV_BAD_REQUEST, "%s must be %s", f->name, list);
}

/* ---- arrays ---------------------------------------------------------------------------------------- */

/* The length of an array within the row's bounds; -1 with *err. */
static int get_count(const struct field *f, const struct wire_value *v, const char *what, struct skv_error *err)
{
    uint32_t n;

    if (wire_type(v) != WIRE_ARRAY) {
        char want[64];

        snprintf(want, sizeof want, "an array of %s", what);
        return wrong_type(f->name, want, v, err);
    }
    n = wire_count(v);
    if ((double)n < f->min || (double)n > f->max)
        return skv_fail(err, SKV_BAD_REQUEST, "%s has %u elements, it must have from %.0f to %.0f %s", f->name, n, f->min,
                        f->max, what);
    return (int)n;
}

#define STOP_BYTES_MAX 1024

static int get_texts(const struct field *f, const struct wire_value *v, struct args_texts *out, struct skv_error *err)
{
    int n = get_count(f, v, "strings", err);

    if (n <= 0)
        return n;
    out->v = calloc((size_t)n, sizeof *out->v);
    if (out->v == NULL)
        return no_memory(err);
    out->n = n;
    for (int i = 0; i < n; i++) {
        const char *p;
        size_t len;

        if (!wire_get_str(wire_at(v, (uint32_t)i), &p, &len) || len < 1 || len > STOP_BYTES_MAX)
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] must be a string of 1 to %d bytes", f->name, i, STOP_BYTES_MAX);
        if (copy_str(p, len, &out->v[i], err) != 0)
            return -1;
    }
    return 0;
}

static int get_token(const char *name, int i, const struct wire_value *e, int32_t *out, struct skv_error *err)
{
    int64_t t;

    if (!wire_get_int(e, &t))
        return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] is %s, it must be a token id", name, i, wire_type_name(wire_type(e)));
    if (t < 0 || t > INT32_MAX)
        return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] is %lld, which is no token id of the model", name, i, (long long)t);
    *out = (int32_t)t;
    return 0;
}

static int get_tokens(const struct field *f, const struct wire_value *v, struct args_tokens *out, struct skv_error *err)
{
    int n = get_count(f, v, "token ids", err);

    if (n < 0)
        return -1;
    out->v = malloc(((size_t)n + 1) * sizeof *out->v);
    if (out->v == NULL)
        return no_memory(err);
    out->n = n;
    for (int i = 0; i < n; i++)
        if (get_token(f->name, i, wire_at(v, (uint32_t)i), &out->v[i], err) < 0)
            return -1;
    return 0;
}

static int get_token_lists(const struct field *f, const struct wire_value *v, struct args_token_lists *out, struct skv_error *err)
{
    int n = get_count(f, v, "arrays of token ids", err), at = 0;
    double sum = 0;

    if (n < 0)
        return -1;
    for (int i = 0; i < n; i++) {
        const struct wire_value *list = wire_at(v, (uint32_t)i);
        if (wire_type(list) != WIRE_ARRAY)
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] is %s, it must be an array of token ids", f->name, i,
                            wire_type_name(wire_type(list)));
        sum += wire_count(list);
    }
    if (sum > f->max)
        return skv_fail(err, SKV_BAD_REQUEST, "%s has %.0f token ids in all, it may have %.0f", f->name, sum, f->max);
    out->v = malloc(((size_t)sum + 1) * sizeof *out->v);
    out->from = malloc(((size_t)n + 1) * sizeof *out->from);
    if (out->v == NULL || out->from == NULL)
        return no_memory(err);
    out->n = n;
    for (int i = 0; i < n; i++) {
        const struct wire_value *list = wire_at(v, (uint32_t)i);
        out->from[i] = at;
        for (uint32_t k = 0; k < wire_count(list); k++)
            if (get_token(f->name, i, wire_at(list, k), &out->v[at++], err) < 0)
                return -1;
    }
    out->from[n] = at;
    return 0;
}

static int get_message(const struct field *f, int i, const struct wire_value *v, struct args_message *out,
                       struct skv_error *err)
{
    if (!wire_is_map(v))
        return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] is %s, it must be a map {role, content}", f->name, i,
                        wire_type_name(wire_type(v)));
    for (uint32_t k = 0; k < wire_count(v); k++) {
        const struct wire_value *key = wire_key(v, k);
        struct args_str *to = wire_str_is(key, "role") ? &out->role : wire_str_is(key, "content") ? &out->content : NULL;
        const char *p = "";
        size_t n = 0;

        if (to == NULL) {
            wire_get_str(key, &p, &n);
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] has the unknown key '%s'; a message is {role, content}", f->name,
                            i, quote(p, n).s);
        }
        if (to->s != NULL)
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] has its %s twice", f->name, i,
                            to == &out->role ? "role" : "content");
        if (!wire_get_str(wire_val(v, k), &p, &n))
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d].%s is %s, it must be a string", f->name, i,
                            to == &out->role ? "role" : "content", wire_type_name(wire_type(wire_val(v, k))));
        if (copy_str(p, n, to, err) != 0)
            return -1;
    }
    if (out->role.s == NULL || out->content.s == NULL)
        return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] has no %s; a message is {role, content}", f->name, i,
                        out->role.s == NULL ? "role" : "content");
    return 0;
}

static int get_messages(const struct field *f, const struct wire_value *v, struct args_messages *out,
                        struct skv_error *err)
{
    int n = get_count(f, v, "messages {role, content}", err);

    if (n < 0)
        return -1;
    out->v = calloc((size_t)n + 1, sizeof *out->v);
    if (out->v == NULL)
        return no_memory(err);
    out->n = n;
    for (int i = 0; i < n; i++)
        if (get_message(f, i, wire_at(v, (uint32_t)i), &out->v[i], err) != 0)
            return -1;
    return 0;
}

static int get_ranges(const struct field *f, const struct wire_value *v, struct args_ranges *out, struct skv_error *err)
{
    int n = get_count(f, v, "ranges [from, to]", err);

    if (n <= 0)
        return n;
    out->v = calloc((size_t)n, sizeof *out->v);
    if (out->v == NULL)
        return no_memory(err);
    out->n = n;
    for (int i = 0; i < n; i++) {
        const struct wire_value *r = wire_at(v, (uint32_t)i);
        int64_t from, to;

        if (wire_type(r) != WIRE_ARRAY || wire_count(r) != 2 || !wire_get_int(wire_at(r, 0), &from) ||
            !wire_get_int(wire_at(r, 1), &to) || from < 0 || to <= from || to > INT32_MAX)
            return skv_fail(err, SKV_BAD_REQUEST, "%s[%d] must be [from, to] with 0 <= from < to, token positions", f->name,
                            i);
        out->v[i] = (struct args_range){ (int32_t)from, (int32_t)to };
    }
    return 0;
}

/* ---- maps ------------------------------------------------------------------------------------------ */

static int decode_map(const char *where, const struct field *fields, const struct wire_value *map, struct args *a,
                      struct skv_error *err);

static int decode_field(const struct field *f, const struct wire_value *v, struct args *a, struct skv_error *err)
{
    void *to = field_at(a, f->off);

    switch (f->type) {
    case FIELD_BOOL:
        return wire_get_bool(v, to) ? 0 : wrong_type(f->name, "true or false", v, err);
    case FIELD_INT:
    case FIELD_INT64:
        return get_int(f, v, a, err);
    case FIELD_UINT64:
        if (!wire_get_uint(v, to))
            return skv_fail(err, SKV_BAD_REQUEST, "%s must be an integer from 0 to 18446744073709551615", f->name);
        *(bool *)field_at(a, f->off_set) = true;
        return 0;
    case FIELD_FLOAT:
        return get_float(f, v, a, err);
    case FIELD_TEXT:
        return get_text(f, v, to, err);
    case FIELD_NAME:
        return get_name(f, v, to, err);
    case FIELD_CHOICE:
        return get_choice(f, v, a, err);
    case FIELD_TEXTS:
        return get_texts(f, v, to, err);
    case FIELD_TOKENS:
        return get_tokens(f, v, to, err);
    case FIELD_TOKEN_LISTS:
        return get_token_lists(f, v, to, err);
    case FIELD_TEXT_OR_TOKENS:
        if (wire_type(v) == WIRE_ARRAY)
            return get_tokens(f, v, field_at(a, f->off_set), err);
        if (wire_type(v) != WIRE_STR)
            return wrong_type(f->name, "a string or an array of token ids", v, err);
        {
            struct field text = *f;

            text.max = INT_MAX;
            return get_text(&text, v, to, err);
        }
    case FIELD_MESSAGES:
        return get_messages(f, v, to, err);
    case FIELD_RANGES:
        return get_ranges(f, v, to, err);
    case FIELD_MAP:
        if (!wire_is_map(v))
            return wrong_type(f->name, "a map", v, err);
        return decode_map(f->name, f->sub, v, a, err);
    }
    return skv_fail(err, SKV_INTERNAL, "%s has no decoder", f->name);
}

static const char *next_field(void *arg)
{
    const struct field **f = arg;

    return (*f)->name != NULL ? (*f)++->name : NULL;
}

static int unknown_name(const char *where, const struct field *fields, const char *p, size_t n, struct skv_error *err)
{
    const struct field *it = fields;
    const char *near = method_nearest(p, n, next_field, &it);

    if (near != NULL)
        return skv_fail(err, SKV_BAD_REQUEST, "%s has no argument '%s'; did you mean '%s'?", where, quote(p, n).s, near);
    if (fields->name == NULL)
        return skv_fail(err, SKV_BAD_REQUEST, "%s has no argument '%s': it takes none", where, quote(p, n).s);
    return skv_fail(err, SKV_BAD_REQUEST, "%s has no argument '%s' (skvd-protocol(7) lists them)", where, quote(p, n).s);
}

static int decode_map(const char *where, const struct field *fields, const struct wire_value *map, struct args *a,
                      struct skv_error *err)
{
    uint64_t given = 0;

    for (uint32_t i = 0; i < wire_count(map); i++) {
        const struct wire_value *key = wire_key(map, i);
        const struct field *f = fields;
        const char *p;
        size_t n;

        if (!wire_get_str(key, &p, &n))
            return skv_fail(err, SKV_BAD_REQUEST, "argument names of %s are strings, not %s", where,
                            wire_type_name(wire_type(key)));
        while (f->name != NULL && !(strlen(f->name) == n && memcmp(f->name, p, n) == 0))
            f++;
        if (f->name == NULL)
            return unknown_name(where, fields, p, n, err);
        if (given & 1ull << (f - fields))
            return skv_fail(err, SKV_BAD_REQUEST, "%s has the argument '%s' twice", where, f->name);
        given |= 1ull << (f - fields);
        if (wire_type(wire_val(map, i)) == WIRE_NIL)
            continue; /* nil: as if not given, for languages whose records have all their fields */
        if (decode_field(f, wire_val(map, i), a, err) != 0)
            return -1;
    }
    for (const struct field *f = fields; f->name != NULL; f++)
        if (f->required && (!(given & 1ull << (f - fields)) || wire_type(wire_find(map, f->name)) == WIRE_NIL))
            return skv_fail(err, SKV_BAD_REQUEST, "%s needs the argument '%s': %s", where, f->name, f->doc);
    return 0;
}

/* set: any names; values as text, so that one checker serves the wire, the command line and the file. */
static int decode_settings(const struct wire_value *map, struct args *a, struct skv_error *err)
{
    uint32_t n = wire_count(map);

    a->settings = calloc((size_t)n + 1, sizeof *a->settings);
    if (a->settings == NULL)
        return no_memory(err);
    for (uint32_t i = 0; i < n; i++) {
        const struct wire_value *v = wire_val(map, i);
        struct args_setting *st = &a->settings[i];
        char num[40];
        const char *p = num;
        size_t len = 0;
        struct args_str s;
        const char *key;
        int64_t iv;
        double dv;
        bool bv;

        if (!wire_get_str(wire_key(map, i), &key, &len) || len == 0 || len > 64)
            return skv_fail(err, SKV_BAD_REQUEST, "names of settings are strings of 1 to 64 bytes");
        a->n_settings = (int)i + 1;
        if (copy_str(key, len, &s, err) != 0)
            return -1;
        st->name = s.s;
        if (wire_get_bool(v, &bv))
            snprintf(num, sizeof num, "%s", bv ? "on" : "off");
        else if (wire_get_int(v, &iv))
            snprintf(num, sizeof num, "%lld", (long long)iv);
        else if (wire_get_double(v, &dv) && isfinite(dv))
            snprintf(num, sizeof num, "%.17g", dv);
        else if (!wire_get_str(v, &p, &len) || len > 4096)
            return skv_fail(err, SKV_BAD_REQUEST, "%s must be a number, a boolean or a string", quote(key, strlen(st->name)).s);
        if (copy_str(p, p == num ? strlen(num) : len, &s, err) != 0)
            return -1;
        st->value = s.s;
    }
    return 0;
}

static void set_defaults(const struct field *fields, struct args *a)
{
    for (const struct field *f = fields; f->name != NULL; f++) {
        void *to = field_at(a, f->off);

        switch (f->type) {
        case FIELD_BOOL:
            *(bool *)to = f->dflt != 0;
            break;
        case FIELD_INT:
        case FIELD_CHOICE:
            *(int *)to = (int)f->dflt;
            break;
        case FIELD_INT64:
            *(int64_t *)to = (int64_t)f->dflt;
            break;
        case FIELD_FLOAT:
            *(float *)to = (float)f->dflt;
            break;
        case FIELD_MAP:
            set_defaults(f->sub, a);
            break;
        default:
            break;
        }
    }
}

static int check_prompt(const struct method *m, const struct args *a, struct skv_error *err)
{
    int given = (a->prompt.s != NULL) + (a->messages.n >= 0) + (a->tokens.n >= 0);

    if (given != 1)
        return skv_fail(err, SKV_BAD_REQUEST, "%s takes exactly one of prompt, messages and tokens; %s", m->name,
                        given == 0 ? "none was given" : "more than one was given");
    if (a->raw && a->prompt.s == NULL)
        return skv_fail(err, SKV_BAD_REQUEST, "raw goes with prompt only");
    if (a->kv.pool >= 0 && a->kv.pool % 2 == 0)
        return skv_fail(err, SKV_BAD_REQUEST, "pool is %d, it must be odd", a->kv.pool);
    if (m->id == METHOD_SCORE && a->cont_text.s == NULL && a->cont_tokens.n < 0)
        return skv_fail(err, SKV_BAD_REQUEST, "score needs a continuation");
    return 0;
}

int args_decode(const struct method *m, const struct wire_value *params, struct args *out, struct skv_error *err)
{
    const struct wire_value *map = wire_at(params, 0);

    memset(out, 0, sizeof *out);
    out->messages.n = out->tokens.n = out->cont_tokens.n = -1;
    out->grace_ms = -1;
    set_defaults(m->fields, out);
    if (wire_type(params) != WIRE_ARRAY || wire_count(params) > 1 || (map != NULL && !wire_is_map(map)))
        return skv_fail(err, SKV_BAD_REQUEST,
                        "the parameters of %s must be an array with one map of named arguments, [{name: value}], or []",
                        m->name);
    if (m->any_args)
        return decode_settings(map, out, err);
    if (decode_map(m->name, m->fields, map, out, err) != 0)
        return -1;
    if (m->id == METHOD_GENERATE || m->id == METHOD_SCORE)
        return check_prompt(m, out, err);
    return 0;
}

static void texts_free(struct args_texts *t)
{
    for (int i = 0; i < t->n && t->v != NULL; i++)
        free(t->v[i].s);
    free(t->v);
}

void args_fini(struct args *a)
{
    free(a->prompt.s);
    free(a->text.s);
    free(a->cont_text.s);
    for (int i = 0; i < a->messages.n && a->messages.v != NULL; i++) {
        free(a->messages.v[i].role.s);
        free(a->messages.v[i].content.s);
    }
    free(a->messages.v);
    free(a->tokens.v);
    free(a->cont_tokens.v);
    free(a->candidates.v);
    free(a->candidates.from);
    texts_free(&a->stop);
    texts_free(&a->topics);
    free(a->session);
    free(a->kv.policy);
    free(a->kv.dtype);
    free(a->pin.v);
    free(a->client);
    free(a->version);
    for (int i = 0; i < a->n_settings; i++) {
        free(a->settings[i].name);
        free(a->settings[i].value);
    }
    free(a->settings);
    memset(a, 0, sizeof *a);
}
