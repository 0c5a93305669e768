/* preset.c - see preset.h. Shapes: the models' published config.json files. */
#include "engine/preset.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/blocks.h"

#define PREFIX "preset:"
#define N_BYTES 256 /* tokens that are bytes; then <|im_start|> and <|im_end|> */

struct preset {
    const char *name;
    int n_layer, d_model, n_head, n_kv, head_dim, n_ffn, n_vocab, context;
    int type;  /* of the matrices */
    bool tied; /* the output matrix is the embedding */
};

static const struct preset preset_table[] = {
    { "tiny", 4, 64, 4, 2, 16, 128, 258, 16384, KERN_BF16, true },
    { "smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, KERN_Q4_1, true },
    { "smollm2-1.7b", 24, 2048, 32, 32, 64, 8192, 49152, 8192, KERN_BF16, true },
    { "llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, KERN_BF16, false },
    { "llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, KERN_BF16, false },
    { "llama3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072, KERN_BF16, false },
    { "llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, KERN_BF16, false },
    { "mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, 32768, KERN_BF16, false },
    { "qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 32768, KERN_BF16, false },
    { "qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960, KERN_BF16, false },
};
#define N_PRESET (sizeof preset_table / sizeof *preset_table)

static const char no_weights[2] = { 0 }; /* a tensor that is there has data; nobody reads it */

bool preset_named(const char *model)
{
    return strncmp(model, PREFIX, sizeof PREFIX - 1) == 0;
}

const char *preset_name(int i)
{
    return i >= 0 && (size_t)i < N_PRESET ? preset_table[i].name : NULL;
}

/* ---- the vocabulary, as the metadata of a GGUF file ---------------------------------------------------------- */

struct out {
    unsigned char *p; /* NULL: only counting */
    size_t n;
};

static void put(struct out *o, const void *bytes, size_t n)
{
    if (o->p != NULL)
        memcpy(o->p + o->n, bytes, n);
    o->n += n;
}

static void put_u32(struct out *o, uint32_t v)
{
    unsigned char b[4] = { v & 255, v >> 8 & 255, v >> 16 & 255, v >> 24 };

    put(o, b, 4);
}

static void put_u64(struct out *o, uint64_t v)
{
    put_u32(o, (uint32_t)v);
    put_u32(o, (uint32_t)(v >> 32));
}

static void put_str(struct out *o, const char *s)
{
    put_u64(o, strlen(s));
    put(o, s, strlen(s));
}

static void put_key(struct out *o, const char *key, uint32_t type)
{
    put_str(o, key);
    put_u32(o, type);
}

/* A byte as GPT-2's byte-level vocabularies write it: printable Latin-1 is itself, the others in order from U+0100. */
static void byte_token(int byte, char s[4])
{
    int cp = 256;

    for (int b = 0; b < byte; b++)
        cp += !((b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae);
    if ((byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae)
        cp = byte;
    memset(s, 0, 4);
    if (cp < 0x80) {
        s[0] = (char)cp;
    } else {
        s[0] = (char)(0xc0 | cp >> 6);
        s[1] = (char)(0x80 | (cp & 63));
    }
}

static void write_vocabulary(struct out *o)
{
    enum { U32 = 4, CONTROL = 3, NORMAL = 1, FORMAT = 3, N_KEYS = 6 };
    char s[4];

    put(o, "GGUF", 4);
    put_u32(o, FORMAT);
    put_u64(o, 0); /* tensors */
    put_u64(o, N_KEYS);
    put_key(o, "general.architecture", GGUF_T_STR);
    put_str(o, "llama");
    put_key(o, "tokenizer.ggml.model", GGUF_T_STR);
    put_str(o, "gpt2");
    put_key(o, "tokenizer.ggml.tokens", GGUF_T_ARR);
    put_u32(o, GGUF_T_STR);
    put_u64(o, N_BYTES + 2);
    for (int b = 0; b < N_BYTES; b++) {
        byte_token(b, s);
        put_str(o, s);
    }
    put_str(o, "<|im_start|>");
    put_str(o, "<|im_end|>");
    put_key(o, "tokenizer.ggml.token_type", GGUF_T_ARR);
    put_u32(o, GGUF_T_I32);
    put_u64(o, N_BYTES + 2);
    for (int i = 0; i < N_BYTES + 2; i++)
        put_u32(o, i < N_BYTES ? NORMAL : CONTROL);
    put_key(o, "tokenizer.ggml.merges", GGUF_T_ARR);
    put_u32(o, GGUF_T_STR);
    put_u64(o, 0);
    put_key(o, "tokenizer.ggml.eos_token_id", U32);
    put_u32(o, N_BYTES + 1);
}

static int open_vocabulary(struct model *m, struct skv_error *err)
{
    struct out o = { NULL, 0 };

    write_vocabulary(&o);
    m->bytes = malloc(o.n);
    if (m->bytes == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for a vocabulary");
    o = (struct out){ m->bytes, 0 };
    write_vocabulary(&o);
    m->gguf = gguf_open_mem(m->bytes, o.n, "preset", err);
    if (m->gguf == NULL)
        return -1;
    m->tok = tok_new(m->gguf, err);
    if (m->tok == NULL)
        return -1;
    m->chat = chat_new(m->gguf, "chatml", err);
    return m->chat != NULL ? 0 : -1;
}

/* ---- shapes ---------------------------------------------------------------------------------------------------- */

static struct kern_tensor tensor(int type, int64_t rows, int64_t cols)
{
    return (struct kern_tensor){ no_weights, type, rows, cols };
}

static int fill(struct model *m, const struct preset *p, int type, struct skv_error *err)
{
    int64_t q = (int64_t)p->n_head * p->head_dim, kv = (int64_t)p->n_kv * p->head_dim;

    m->src.dims = (struct ops_dims){
        .n_layer = p->n_layer, .d_model = p->d_model, .n_head = p->n_head, .n_kv = p->n_kv, .head_dim = p->head_dim,
        .n_ffn = p->n_ffn, .n_vocab = tok_vocab(m->tok), .rot_dim = p->head_dim, .max_context = p->context,
        .norm_eps = 1e-5f, .attn_scale = 1 / sqrtf((float)p->head_dim), .rope_base = 10000, .rope = KERN_ROPE_INTERLEAVED,
        .act = KERN_ACT_SILU, .embed_scale = 1,
    };
    m->layer = calloc((size_t)p->n_layer, sizeof *m->layer);
    if (m->layer == NULL)
        return skv_fail(err, SKV_NO_MEMORY, "no memory for %d layers", p->n_layer);
    for (int l = 0; l < p->n_layer; l++)
        m->layer[l] = (struct ops_layer_src){
            .attn_norm = tensor(KERN_F32, 1, p->d_model), .ffn_norm = tensor(KERN_F32, 1, p->d_model),
            .wq = tensor(type, q, p->d_model), .wk = tensor(type, kv, p->d_model), .wv = tensor(type, kv, p->d_model),
            .wo = tensor(type, p->d_model, q), .w_gate = tensor(type, p->n_ffn, p->d_model),
            .w_up = tensor(type, p->n_ffn, p->d_model), .w_down = tensor(type, p->d_model, p->n_ffn),
        };
    m->src.layer = m->layer;
    m->src.embed = tensor(type, p->n_vocab, p->d_model);
    m->src.output = m->src.embed;
    if (!p->tied)
        m->src.output.data = &no_weights[1];
    m->src.out_norm = tensor(KERN_F32, 1, p->d_model);
    return 0;
}

static const struct preset *find(const char *name, size_t len)
{
    for (size_t i = 0; i < N_PRESET; i++)
        if (strlen(preset_table[i].name) == len && memcmp(preset_table[i].name, name, len) == 0)
            return &preset_table[i];
    return NULL;
}

static int find_type(const struct preset *p, const char *name, struct skv_error *err)
{
    for (int t = KERN_F16; t <= KERN_BF16; t++) {
        const char *known = kern_type_known(t) ? kern_type_name(t) : "";
        size_t i = 0;
        while (known[i] != '\0' && tolower((unsigned char)known[i]) == tolower((unsigned char)name[i]))
            i++;
        if (i == 0 || known[i] != '\0' || name[i] != '\0')
            continue;
        if (p->d_model % kern_type_block(t) == 0 && p->n_ffn % kern_type_block(t) == 0)
            return t;
        return skv_fail(err, SKV_BAD_CONFIG, "%s has rows of %d and %d, no multiples of a %s block", p->name, p->d_model,
                        p->n_ffn, known);
    }
    return skv_fail(err, SKV_BAD_CONFIG, "\"%s\" is no type of weights; bf16, f16, q8_0, q4_0, q4_k and their like are", name);
}

static int unknown(const char *name, struct skv_error *err)
{
    char list[256];
    size_t n = 0;

    for (size_t i = 0; i < N_PRESET && n < sizeof list; i++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i > 0 ? ", " : "", preset_table[i].name);
    return skv_fail(err, SKV_BAD_CONFIG, "there is no preset \"%s\"; there are %s", name, list);
}

int preset_open(struct model *m, const char *model, int context, struct skv_error *err)
{
    const char *name = model + sizeof PREFIX - 1, *slash = strchr(name, '/');
    const struct preset *p = find(name, slash != NULL ? (size_t)(slash - name) : strlen(name));
    int type;

    memset(m, 0, sizeof *m);
    if (p == NULL)
        return unknown(name, err);
    type = slash != NULL ? find_type(p, slash + 1, err) : p->type;
    if (type < 0)
        return -1;
    if (context != 0 && (context < KERN_PAGE_SLOTS || context > p->context))
        return skv_fail(err, SKV_BAD_CONFIG, "context %d cannot be: %s takes from %d to %d positions", context, p->name,
                        KERN_PAGE_SLOTS, p->context);
    if (open_vocabulary(m, err) < 0 || fill(m, p, type, err) < 0) {
        model_close(m);
        return -1;
    }
    if (context != 0)
        m->src.dims.max_context = context;
    snprintf(m->name, sizeof m->name, "%s (%s, shapes only)", p->name, kern_type_name(type));
    snprintf(m->arch, sizeof m->arch, "llama");
    return 0;
}
