/* json.c - between answers and JSON. */
#include "config.h"

#include "clients/skvctl/ctl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static json_t *string_of(const struct skv_value *v)
{
    size_t len;
    const char *s = skv_str(v, &len);
    json_t *j = json_stringn(s, len);
    if (j == NULL) { /* no UTF-8: never from our daemon; shown without its content rather than not at all */
        j = json_string("\ufffd");
    }
    return j;
}

static json_t *map_of(const struct skv_value *v)
{
    json_t *j = json_object();
    for (size_t i = 0; i < skv_len(v); i++) {
        size_t len;
        const char *s = skv_str(skv_key(v, i), &len);
        char *key = ctl_alloc(len + 1, 1);
        memcpy(key, s, len);
        json_object_set_new(j, key, json_of(skv_at(v, i)));
        free(key);
    }
    return j;
}

json_t *json_of(const struct skv_value *v)
{
    json_t *j;
    double d;

    switch (skv_type(v)) {
    case SKV_BOOL:
        return json_boolean(skv_bool(v, false));
    case SKV_INT:
        return json_integer(skv_int(v, 0));
    case SKV_NUM:
        d = skv_num(v, 0);
        return isfinite(d) ? json_real(d) : json_null();
    case SKV_STR:
        return string_of(v);
    case SKV_MAP:
        return map_of(v);
    case SKV_ARRAY:
        j = json_array();
        for (size_t i = 0; i < skv_len(v); i++)
            json_array_append_new(j, json_of(skv_at(v, i)));
        return j;
    default:
        return json_null();
    }
}

void json_put(json_t *take_j)
{
    size_t flags = JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9);

    if (out_tty(stdout)) { /* JSON escapes only the control characters below 0x20 */
        char *s = json_dumps(take_j, flags);
        if (s != NULL)
            out_text(stdout, s, strlen(s));
        free(s);
    } else
        json_dumpf(take_j, stdout, flags);
    fputc('\n', stdout);
    json_decref(take_j);
}

void json_print(const struct skv_value *v)
{
    json_put(json_of(v));
}

void json_to_args(struct skv_args *a, const char *name, const json_t *j)
{
    const char *key;
    json_t *child;
    size_t i;

    switch (json_typeof(j)) {
    case JSON_OBJECT:
        skv_arg_map(a, name);
        json_object_foreach((json_t *)j, key, child)
            json_to_args(a, key, child);
        skv_arg_end(a);
        break;
    case JSON_ARRAY:
        skv_arg_array(a, name);
        json_array_foreach(j, i, child)
            json_to_args(a, NULL, child);
        skv_arg_end(a);
        break;
    case JSON_STRING:
        skv_arg_strn(a, name, json_string_value(j), json_string_length(j));
        break;
    case JSON_INTEGER:
        skv_arg_int(a, name, json_integer_value(j));
        break;
    case JSON_REAL:
        skv_arg_num(a, name, json_real_value(j));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        skv_arg_bool(a, name, json_is_true(j));
        break;
    case JSON_NULL:
        skv_arg_nil(a, name);
        break;
    }
}
