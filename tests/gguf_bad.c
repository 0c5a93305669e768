/* gguf_bad.c - see gguf_bad.h */
#include "config.h"

#include <string.h>

#include "tests/gguf_bad.h"

static const uint64_t dims[4] = { 64, 2, 1, 1 };

static void weights(struct gb *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)i;
        gb_raw(&b->data, &c, 1);
    }
}

void gguf_good(struct gb *b)
{
    static const unsigned char num[8] = { 7, 0, 0, 0, 0, 0, 0, 0 };
    static const struct {
        const char *key;
        uint32_t type, bytes;
    } scalars[] = { { "t.u8", GB_U8, 1 },   { "t.i8", GB_I8, 1 },   { "t.u16", GB_U16, 2 }, { "t.i16", GB_I16, 2 },
                    { "t.i32", GB_I32, 4 }, { "t.u64", GB_U64, 8 }, { "t.i64", GB_I64, 8 } };
    double d = 0.5;
    gb_kv_str(b, "general.architecture", "llama");
    gb_kv_u32(b, "t.u32", 7);
    gb_kv_f32(b, "t.f32", 1.5f);
    gb_kv_bool(b, "t.bool", 1);
    for (size_t i = 0; i < sizeof(scalars) / sizeof(scalars[0]); i++) {
        gb_key(b, scalars[i].key, scalars[i].type);
        gb_raw(&b->kv, num, scalars[i].bytes);
    }
    gb_key(b, "t.f64", GB_F64);
    gb_raw(&b->kv, &d, 8);
    gb_kv_arr(b, "t.strings", GB_STR, 2);
    gb_str(&b->kv, "one", 3);
    gb_str(&b->kv, "", 0);
    gb_kv_arr(b, "t.floats", GB_F32, 2);
    gb_raw(&b->kv, (float[]){ 1, -2 }, 8);
    gb_kv_arr(b, "t.ints", GB_I32, 2);
    gb_raw(&b->kv, (int32_t[]){ 3, -4 }, 8);
    gb_kv_arr(b, "t.bools", GB_BOOL, 2);
    gb_raw(&b->kv, "\0\1", 2);
    gb_tensor(b, "a.weight", 2, dims, 8 /* Q8_0 */, 0);
    gb_tensor(b, "b.weight", 1, dims, 0 /* F32 */, 160);
    weights(b, 160 + 256);
}

/* ---- header ----------------------------------------------------------------------------------------------- */

static void magic(struct gb *b)
{
    memcpy(b->magic, "GGML", 4);
}
static void big_endian(struct gb *b)
{
    b->version = 3u << 24;
}
static void version0(struct gb *b)
{
    b->version = 0;
}
static void version1(struct gb *b)
{
    b->version = 1;
}
static void version4(struct gb *b)
{
    b->version = 4;
}
static void version_max(struct gb *b)
{
    b->version = UINT32_MAX;
}

static void counts(struct gb *b, uint64_t tensors, uint64_t keys)
{
    gguf_good(b);
    b->lie = true;
    b->say_tensor = tensors;
    b->say_kv = keys;
}
static void kv_max(struct gb *b)
{
    counts(b, 0, UINT64_MAX);
}
static void kv_2_63(struct gb *b)
{
    counts(b, 0, UINT64_C(1) << 63);
}
static void kv_2_60(struct gb *b)
{
    counts(b, 0, UINT64_C(1) << 60);
}
static void kv_too_many(struct gb *b)
{
    counts(b, 0, 100000);
}
static void kv_one_more(struct gb *b)
{
    gguf_good(b);
    b->lie = true;
    b->say_kv = b->n_kv + 1;
    b->say_tensor = b->n_tensor;
}
static void tensors_max(struct gb *b)
{
    counts(b, UINT64_MAX, 0);
}
static void tensors_2_63(struct gb *b)
{
    counts(b, UINT64_C(1) << 63, 0);
}
static void tensors_2_60(struct gb *b)
{
    counts(b, UINT64_C(1) << 60, 0);
}
static void tensors_one_more(struct gb *b)
{
    gguf_good(b);
    b->lie = true;
    b->say_kv = b->n_kv;
    b->say_tensor = b->n_tensor + 1;
}

/* ---- keys and values -------------------------------------------------------------------------------------- */

static void key_raw(struct gb *b, uint64_t say, const void *s, size_t len)
{
    static const unsigned char after[32];
    gb_u64(&b->kv, say);
    gb_raw(&b->kv, s, len);
    gb_u32(&b->kv, GB_U32);
    gb_u32(&b->kv, 1);
    gb_raw(&b->kv, after, sizeof(after));
    b->n_kv++;
}
static void key_empty(struct gb *b)
{
    key_raw(b, 0, "", 0);
}
static void key_2_63(struct gb *b)
{
    key_raw(b, UINT64_C(1) << 63, "abc", 3);
}
static void key_max(struct gb *b)
{
    key_raw(b, UINT64_MAX, "abc", 3);
}
static void key_past_end(struct gb *b)
{
    key_raw(b, 4096, "abc", 3);
}
static void key_nul(struct gb *b)
{
    key_raw(b, 3, "a\0c", 3);
}
static void key_utf8(struct gb *b)
{
    key_raw(b, 3, "a\xff" "c", 3);
}
static void key_newline(struct gb *b)
{
    key_raw(b, 3, "a\nc", 3);
}
static void key_twice(struct gb *b)
{
    gguf_good(b);
    gb_kv_u32(b, "t.u32", 8);
}
static void type_13(struct gb *b)
{
    gb_key(b, "k", 13);
    gb_u64(&b->kv, 0);
}
static void type_max(struct gb *b)
{
    gb_key(b, "k", UINT32_MAX);
    gb_u64(&b->kv, 0);
}
static void value_str_long(struct gb *b)
{
    gb_key(b, "k", GB_STR);
    gb_u64(&b->kv, UINT64_MAX);
}
static void value_cut(struct gb *b)
{
    gb_key(b, "long enough", GB_U64);
    gb_u32(&b->kv, 0);
}
static void bool_2(struct gb *b)
{
    gb_kv_bool(b, "k", 2);
}
static void arr_of_arr(struct gb *b)
{
    gb_kv_arr(b, "k", GB_ARR, 1);
    gb_u64(&b->kv, 0);
}
static void arr_type(struct gb *b)
{
    gb_kv_arr(b, "k", 13, 1);
    gb_u64(&b->kv, 0);
}
static void arr_wraps(struct gb *b)
{
    gb_kv_arr(b, "k", GB_U64, (UINT64_C(1) << 61) + 1);
    gb_u64(&b->kv, 0);
}
static void arr_wraps_str(struct gb *b)
{
    gb_kv_arr(b, "k", GB_STR, (UINT64_C(1) << 61) + 1);
    gb_u64(&b->kv, 0);
}
static void arr_long(struct gb *b)
{
    gb_kv_arr(b, "k", GB_U32, 3);
    gb_u64(&b->kv, 0);
}
static void arr_str_long(struct gb *b)
{
    gb_kv_arr(b, "k", GB_STR, 2);
    gb_str(&b->kv, "abcdefgh", 8);
    gb_u64(&b->kv, 100);
}
static void arr_bool_2(struct gb *b)
{
    gb_kv_arr(b, "k", GB_BOOL, 2);
    gb_raw(&b->kv, "\1\2", 2);
}

static void alignment(struct gb *b, uint32_t v)
{
    gb_kv_u32(b, "general.alignment", v);
    gguf_good(b);
}
static void align_0(struct gb *b)
{
    alignment(b, 0);
}
static void align_3(struct gb *b)
{
    alignment(b, 3);
}
static void align_2_31(struct gb *b)
{
    alignment(b, 1u << 31);
}
static void align_type(struct gb *b)
{
    gb_kv_str(b, "general.alignment", "32");
    gguf_good(b);
}

/* ---- tensors ---------------------------------------------------------------------------------------------- */

static void one_tensor(struct gb *b, uint32_t n_dims, uint64_t d0, uint64_t d1, uint64_t d2, uint64_t d3)
{
    uint64_t d[8] = { d0, d1, d2, d3, 1, 1, 1, 1 };
    gb_tensor(b, "a.weight", n_dims, d, 0, 0);
    weights(b, 4096);
}
static void dims_0(struct gb *b)
{
    one_tensor(b, 0, 0, 0, 0, 0);
}
static void dims_5(struct gb *b)
{
    one_tensor(b, 5, 1, 1, 1, 1);
}
static void dims_max(struct gb *b)
{
    one_tensor(b, UINT32_MAX, 1, 1, 1, 1);
}
static void dim_zero(struct gb *b)
{
    one_tensor(b, 2, 32, 0, 0, 0);
}
static void dim_zero_first(struct gb *b)
{
    one_tensor(b, 2, 0, 32, 0, 0);
}
static void dim_2_63(struct gb *b)
{
    one_tensor(b, 1, UINT64_C(1) << 63, 0, 0, 0);
}
static void wrap_01(struct gb *b)
{
    one_tensor(b, 2, UINT64_C(1) << 32, UINT64_C(1) << 32, 0, 0);
}
static void wrap_12(struct gb *b)
{
    one_tensor(b, 3, 1, UINT64_C(1) << 32, UINT64_C(1) << 32, 0);
}
static void wrap_23(struct gb *b)
{
    one_tensor(b, 4, 1, 1, UINT64_C(1) << 32, UINT64_C(1) << 32);
}
static void wrap_bytes(struct gb *b)
{
    one_tensor(b, 1, UINT64_C(1) << 62, 0, 0, 0);
}
static void wrap_all(struct gb *b)
{
    one_tensor(b, 4, UINT64_C(1) << 16, UINT64_C(1) << 16, UINT64_C(1) << 16, UINT64_C(1) << 16);
}
static void block_multiple(struct gb *b)
{
    uint64_t d[2] = { 33, 2 };
    gb_tensor(b, "a.weight", 2, d, 8, 0);
    weights(b, 4096);
}
static void weight_type(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 99, 0);
    weights(b, 4096);
}
static void weight_type_max(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, UINT32_MAX, 0);
    weights(b, 4096);
}
static void offset_odd(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, 4);
    weights(b, 4096);
}
static void offset_past(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, 4096);
    weights(b, 4096);
}
static void offset_wraps(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, UINT64_MAX - 31);
    weights(b, 4096);
}
static void offset_last(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, 4096 - 480);
    weights(b, 4096);
}
static void overlap(struct gb *b)
{
    gb_tensor(b, "b.weight", 2, dims, 0, 480);
    gb_tensor(b, "a.weight", 2, dims, 0, 0);
    weights(b, 4096);
}
static void overlap_same(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, 0);
    gb_tensor(b, "b.weight", 2, dims, 0, 0);
    weights(b, 4096);
}
static void tensor_twice(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, 0);
    gb_tensor(b, "a.weight", 2, dims, 0, 512);
    weights(b, 4096);
}
static void tensor_unnamed(struct gb *b)
{
    gb_tensor(b, "", 2, dims, 0, 0);
    weights(b, 4096);
}
static void tensor_long_name(struct gb *b)
{
    char name[200];
    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    gb_tensor(b, name, 2, dims, 0, 0);
    weights(b, 4096);
}
static void tensor_utf8_name(struct gb *b)
{
    gb_tensor(b, "a\xc0\x80", 2, dims, 0, 0);
    weights(b, 4096);
}
static void no_data(struct gb *b)
{
    gb_tensor(b, "a.weight", 2, dims, 0, 0);
}

const struct gguf_bad gguf_bad[] = {
    { "wrong magic", magic, "not a GGUF file" },
    { "big-endian", big_endian, "big-endian" },
    { "version 0", version0, "version 0" },
    { "version 1", version1, "version 1" },
    { "version 4", version4, "version 4" },
    { "version 2^32-1", version_max, "version 4294967295" },
    { "2^64-1 keys", kv_max, "keys do not fit" },
    { "2^63 keys", kv_2_63, "keys do not fit" },
    { "2^60 keys", kv_2_60, "keys do not fit" },
    { "more keys than bytes", kv_too_many, "keys do not fit" },
    { "one key more", kv_one_more, NULL },
    { "2^64-1 tensors", tensors_max, "tensors do not fit" },
    { "2^63 tensors", tensors_2_63, "tensors do not fit" },
    { "2^60 tensors", tensors_2_60, "tensors do not fit" },
    { "one tensor more", tensors_one_more, NULL },
    { "key length 0", key_empty, "not a name" },
    { "key length 2^63", key_2_63, "past the end" },
    { "key length 2^64-1", key_max, "past the end" },
    { "key past the end", key_past_end, "past the end" },
    { "key with NUL", key_nul, "not a name" },
    { "key not UTF-8", key_utf8, "not a name" },
    { "key with a newline", key_newline, "not a name" },
    { "key twice", key_twice, "t.u32 appears twice" },
    { "value type 13", type_13, "unknown value type 13" },
    { "value type 2^32-1", type_max, "unknown value type" },
    { "string value 2^64-1", value_str_long, "past the end" },
    { "value cut", value_cut, "ends inside" },
    { "bool 2", bool_2, "no boolean" },
    { "array of arrays", arr_of_arr, "arrays of arrays" },
    { "array of type 13", arr_type, "unknown element type 13" },
    { "array whose bytes wrap", arr_wraps, "does not fit" },
    { "string array whose bytes wrap", arr_wraps_str, "does not fit" },
    { "array past the end", arr_long, "does not fit" },
    { "string array past the end", arr_str_long, "past the end" },
    { "bool 2 in an array", arr_bool_2, "no boolean" },
    { "alignment 0", align_0, "general.alignment is 0" },
    { "alignment 3", align_3, "general.alignment is 3" },
    { "alignment 2^31", align_2_31, "general.alignment is 2147483648" },
    { "alignment a string", align_type, "general.alignment is of type string" },
    { "0 dimensions", dims_0, "0 dimensions" },
    { "5 dimensions", dims_5, "5 dimensions" },
    { "2^32-1 dimensions", dims_max, "4294967295 dimensions" },
    { "dimension 0", dim_zero, "dimension 1 is 0" },
    { "first dimension 0", dim_zero_first, "dimension 0 is 0" },
    { "dimension 2^63", dim_2_63, "dimension 0 is 9223372036854775808" },
    { "product wraps at 1", wrap_01, "larger than the file" },
    { "product wraps at 2", wrap_12, "too large" },
    { "product wraps at 3", wrap_23, "too large" },
    { "bytes wrap", wrap_bytes, "larger than the file" },
    { "product wraps at all", wrap_all, "larger than the file" },
    { "row no multiple of the block", block_multiple, "no multiple of Q8_0's block" },
    { "weights of type 99", weight_type, "type 99" },
    { "weights of type 2^32-1", weight_type_max, "type 4294967295" },
    { "offset not aligned", offset_odd, "no multiple of 32" },
    { "offset at the end", offset_past, "past the end" },
    { "offset wraps", offset_wraps, "past the end" },
    { "last tensor past the end", offset_last, "past the end" },
    { "tensors overlap", overlap, "overlap" },
    { "tensors at one place", overlap_same, "overlap" },
    { "tensor twice", tensor_twice, "appears twice" },
    { "tensor without a name", tensor_unnamed, "no name" },
    { "tensor with a long name", tensor_long_name, "no name" },
    { "tensor name not UTF-8", tensor_utf8_name, "no name" },
    { "no data at all", no_data, NULL },
};
const int gguf_bad_n = sizeof(gguf_bad) / sizeof(gguf_bad[0]);
