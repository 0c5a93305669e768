// follow.cu - what the leader tells, and how a follower does it.
//
// A follower is the same backend with other heads: it gets the operations' arguments in the order in which the leader's
// engine calls them, with what changed of the host's KV arrays in between, and calls the same functions. Decode steps are
// therefore noted, captured and replayed by each process for itself.
#include <cstring>
#include <map>
#include <new>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/nodes.h"

enum told {
    T_END = 1, // the leader closes
    T_KV_INIT,
    T_CLEAR,
    T_KV_SET,
    T_STATE_NEW,
    T_STATE_FREE,
    T_STATE_THIN,
    T_EMBED,
    T_ATTN_IN,
    T_ATTN_PREFILL,
    T_ATTN_DECODE,
    T_OUT_MLP,
    T_SCORE_BEGIN,
    T_SELECT,
    T_CHOOSE,
    T_COLLECT,
    T_AHEAD,
    T_KV_READ,
    T_FLUSH,
};

struct told_head {
    uint32_t what, size;
};

// Where in which hidden states a pointer points.
struct told_x {
    uint32_t state, offset;
};

struct kv_set {
    uint32_t kind, index, value; // KV_TABLE, ...; index over all lanes, layers, heads (and pages)
};

struct kept_head {
    int32_t len, cap;
    float mass;
};

// --- telling -------------------------------------------------------------------------------------------------

namespace
{

// One message; goes to the others' buffer when it goes out of scope.
struct message {
    cu_nodes *n;
    size_t at;
    message(cuda *c, told what) : n(c->nodes), at(n->out.size())
    {
        put(told_head{ (uint32_t)what, 0 });
    }
    ~message()
    {
        told_head h;
        memcpy(&h, &n->out[at], sizeof h);
        h.size = (uint32_t)(n->out.size() - at - sizeof h);
        memcpy(&n->out[at], &h, sizeof h);
    }
    template <class T> void put(const T &v)
    {
        put(&v, sizeof v);
    }
    void put(const void *p, size_t size)
    {
        n->out.append(static_cast<const char *>(p), size);
    }
    void put_x(const cuda *c, const float *x)
    {
        for (const cu_state &s : c->states)
            if (x >= s.x[0] && x < s.x[0] + (size_t)s.n_row * c->d.d_model) {
                put(told_x{ s.id, (uint32_t)(x - s.x[0]) });
                return;
            }
        put(told_x{ 0, 0 });
    }
    void put_pass(const cuda *c, const ops_pass *p)
    {
        int32_t n_row = p->n_row, n_seg = p->n_seg, has_token = p->token != nullptr;
        put(n_row);
        put(n_seg);
        put(has_token);
        if (has_token)
            put(p->token, (size_t)n_row * 4);
        for (int i = 0; i < n_seg; i++) {
            put(p->seg[i]);
            if (p->seg[i].head_slot0)
                put(p->seg[i].head_slot0, (size_t)c->d.n_kv * 4);
            if (p->seg[i].pos)
                put(p->seg[i].pos, (size_t)p->seg[i].n_row * 4);
        }
    }
    void put_rule(const kern_rule &r)
    {
        put(r);
        put(r.pin, (size_t)r.n_pin * sizeof(kern_range));
    }
};

} // namespace

static bool leads(const cuda *c)
{
    return c->nodes && c->nodes->rank == 0;
}

void cu_tell_kv_init(cuda *c, uint32_t n_pages)
{
    if (!leads(c))
        return;
    size_t heads = (size_t)c->cfg.max_lanes * c->d.n_layer * c->d.n_kv;
    c->nodes->table.assign(heads * c->cfg.max_pages, 0);
    c->nodes->len.assign(heads, 0);
    c->nodes->cap.assign(heads, INT32_MAX);
    c->nodes->victim.assign(heads, -1);
    message(c, T_KV_INIT).put(n_pages);
}

void cu_tell_clear(cuda *c, const uint32_t *pages, int n)
{
    if (leads(c))
        message(c, T_CLEAR).put(pages, (size_t)n * 4);
}

template <class T> static void set_one(message &m, int kind, size_t index, T host, T &theirs)
{
    if (host == theirs)
        return;
    theirs = host;
    m.put(kv_set{ (uint32_t)kind, (uint32_t)index, (uint32_t)host });
}

void cu_tell_kv(cuda *c, int lane, int layer)
{
    if (!leads(c))
        return;
    message m(c, T_KV_SET);
    cu_nodes *n = c->nodes;
    for (int h = 0; h < c->d.n_kv; h++) {
        size_t at = cu_kv_at(c, lane, layer, h);
        int pages = (c->kv.len[at] + KERN_PAGE_SLOTS - 1) / KERN_PAGE_SLOTS;
        set_one(m, KV_LEN, at, c->kv.len[at], n->len[at]);
        set_one(m, KV_CAP, at, c->kv.cap[at], n->cap[at]);
        set_one(m, KV_VICTIM, at, c->kv.victim[at], n->victim[at]);
        for (size_t i = at * c->kv.max_pages, end = i + pages; i < end; i++)
            set_one(m, KV_TABLE, i, c->kv.table[i], n->table[i]);
    }
}

void cu_tell_state(cuda *c, uint32_t id, int n_row)
{
    if (!leads(c))
        return;
    message m(c, n_row ? T_STATE_NEW : T_STATE_FREE);
    m.put(id);
    m.put((int32_t)n_row);
}

void cu_tell_thin(cuda *c, const float *state, const int32_t *row, int n)
{
    if (!leads(c))
        return;
    message m(c, T_STATE_THIN);
    m.put_x(c, state);
    m.put((int32_t)n);
    m.put(row, (size_t)n * 4);
}

void cu_tell_embed(cuda *c, const ops_pass *pass, const float *x)
{
    if (!leads(c))
        return;
    message m(c, T_EMBED);
    m.put_x(c, x);
    m.put_pass(c, pass);
}

void cu_tell_attn_in(cuda *c, int layer, const ops_pass *pass, const float *x, const int32_t *slot)
{
    if (!leads(c))
        return;
    for (int i = 0; i < pass->n_seg; i++)
        cu_tell_kv(c, pass->seg[i].lane, layer);
    message m(c, T_ATTN_IN);
    m.put((int32_t)layer);
    m.put_x(c, x);
    m.put_pass(c, pass);
    m.put((int32_t)(slot != nullptr));
    if (slot)
        m.put(slot, (size_t)pass->n_row * c->d.n_kv * 4);
}

void cu_tell_attn_prefill(cuda *c, int layer, const ops_pass *pass)
{
    if (!leads(c))
        return;
    message m(c, T_ATTN_PREFILL);
    m.put((int32_t)layer);
    m.put_pass(c, pass);
}

void cu_tell_attn_decode(cuda *c, int layer, const ops_pass *pass, const kern_rule *rule)
{
    if (!leads(c))
        return;
    message m(c, T_ATTN_DECODE);
    m.put((int32_t)layer);
    m.put_pass(c, pass);
    m.put((int32_t)(rule != nullptr));
    for (int i = 0; rule && i < pass->n_seg; i++)
        m.put_rule(rule[i]);
}

void cu_tell_out_mlp(cuda *c, int layer, const ops_pass *pass, const float *x)
{
    if (!leads(c))
        return;
    {
        message m(c, T_OUT_MLP);
        m.put((int32_t)layer);
        m.put_x(c, x);
        m.put_pass(c, pass);
    }
    if (c->noted.empty() || (c->ahead && layer + 1 == c->d.n_layer)) // they work while we do
        cu_nodes_flush(c->nodes);
}

void cu_tell_score(cuda *c, int lane, int n_slot)
{
    if (!leads(c))
        return;
    message m(c, T_SCORE_BEGIN);
    m.put((int32_t)lane);
    m.put((int32_t)n_slot);
}

void cu_tell_select(cuda *c, int lane, int layer, const kern_rule *rule, int n_query)
{
    if (!leads(c))
        return;
    cu_tell_kv(c, lane, layer);
    {
        message m(c, T_SELECT);
        m.put((int32_t)lane);
        m.put((int32_t)layer);
        m.put((int32_t)n_query);
        m.put_rule(*rule);
    }
    cu_nodes_flush(c->nodes);
}

void cu_tell_choose(cuda *c, const float *x, const int32_t *row, int n)
{
    if (!leads(c))
        return;
    {
        message m(c, T_CHOOSE);
        m.put_x(c, x);
        m.put((int32_t)n);
        m.put(row, (size_t)n * 4);
    }
    cu_nodes_flush(c->nodes);
}

// At once: a sum that we wait for may need them.
void cu_tell_collect(cuda *c)
{
    if (!leads(c))
        return;
    {
        message m(c, T_COLLECT);
    }
    cu_nodes_flush(c->nodes);
}

void cu_tell_ahead(cuda *c, const int32_t *token)
{
    if (!leads(c))
        return;
    message m(c, T_AHEAD);
    m.put((int32_t)(token ? c->step_rows : 0));
    if (token)
        m.put(token, (size_t)c->step_rows * 4);
}

void cu_tell_flush(cuda *c)
{
    if (!leads(c))
        return;
    {
        message m(c, T_FLUSH);
    }
    cu_nodes_flush(c->nodes);
}

void cu_tell_end(cuda *c)
{
    if (!leads(c))
        return;
    {
        message m(c, T_END);
    }
    try {
        cu_nodes_flush(c->nodes);
    } catch (const cu_error &) { // gone already
    }
}

// --- answers: what a follower's heads did ------------------------------------------------------------------------

// After a selection: the leader learns what the others' heads kept; both know then that the followers know.
void cu_kept_exchange(cuda *c, int lane, int layer, float *kept_mass)
{
    cu_nodes *n = c->nodes;
    if (!n)
        return;
    if (n->rank) {
        const cu_rank &r = c->rank[0];
        for (int h = 0; h < r.n_kv; h++) {
            size_t at = cu_kv_at(c, lane, layer, r.kv0 + h);
            kept_head k = { c->kv.len[at], c->kv.cap[at], kept_mass[r.kv0 + h] };
            cu_nodes_write(n, &k, sizeof k);
        }
        return;
    }
    for (int rank = 1; rank < n->world; rank++) {
        cu_rank cut;
        cu_rank_cut(c, rank, &cut);
        for (int h = 0; h < cut.n_kv; h++) {
            size_t at = cu_kv_at(c, lane, layer, cut.kv0 + h);
            kept_head k;
            cu_nodes_read(n, rank, &k, sizeof k);
            c->kv.len[at] = k.len;
            c->kv.cap[at] = k.cap;
            c->kv.victim[at] = -1;
            if (kept_mass)
                kept_mass[cut.kv0 + h] = k.mass;
        }
    }
    for (int h = 0; h < c->d.n_kv; h++) {
        size_t at = cu_kv_at(c, lane, layer, h);
        n->len[at] = c->kv.len[at];
        n->cap[at] = c->kv.cap[at];
        n->victim[at] = -1;
    }
}

// Which process has a head.
static int owner_of(const cuda *c, int head)
{
    for (int rank = 0; rank < c->world; rank++) {
        cu_rank cut;
        cu_rank_cut(c, rank, &cut);
        if (head >= cut.kv0 && head < cut.kv0 + cut.n_kv)
            return rank;
    }
    return 0;
}

// Leader: positions and scores of a head that another process has. False when it is this one's.
bool cu_kv_read_far(cuda *c, int lane, int layer, int head, int32_t *pos, float *score)
{
    int rank = leads(c) ? owner_of(c, head) : 0, n = c->kv.len[cu_kv_at(c, lane, layer, head)];
    if (rank == 0)
        return false;
    cu_tell_kv(c, lane, layer);
    {
        message m(c, T_KV_READ);
        for (int32_t v : { lane, layer, head, rank })
            m.put(v);
    }
    cu_nodes_flush(c->nodes);
    cu_nodes_read(c->nodes, rank, pos, (size_t)n * 4);
    cu_nodes_read(c->nodes, rank, score, (size_t)n * 4);
    return true;
}

// --- following -----------------------------------------------------------------------------------------------------

namespace
{

// A message being read. What the leader sends is ours; sizes are checked all the same.
struct reader {
    std::vector<unsigned char> b;
    size_t at = 0;
    template <class T> T get()
    {
        T v;
        memcpy(&v, take(sizeof v), sizeof v);
        return v;
    }
    const unsigned char *take(size_t size)
    {
        if (size > b.size() - at)
            cu_fail("a message of the leader ends too soon");
        at += size;
        return b.data() + at - size;
    }
};

// A follower between messages.
struct follower {
    cuda *c;
    reader r;
    std::map<uint32_t, float *> state;
    // of the pass at hand
    std::vector<int32_t> token, slot;
    std::vector<ops_seg> seg;
    std::vector<std::vector<int32_t>> slot0, pos;
    ops_pass pass;
    std::vector<ops_sample> choice;
    // pins live until the step is launched; rules that shared them still do
    std::map<const kern_range *, std::vector<kern_range>> pins;

    std::vector<int32_t> ints(size_t n)
    {
        std::vector<int32_t> v(n);
        if (n)
            memcpy(v.data(), r.take(n * 4), n * 4);
        return v;
    }
    float *get_x()
    {
        told_x t = r.get<told_x>();
        return state[t.state] ? state[t.state] + t.offset : nullptr;
    }
    void get_pass()
    {
        int n_row = r.get<int32_t>(), n_seg = r.get<int32_t>(), has_token = r.get<int32_t>();
        if (n_row < 0 || n_row > c->R || n_seg < 0 || n_seg > n_row)
            cu_fail("a pass of %d rows in %d runs", n_row, n_seg);
        token = ints(has_token ? (size_t)n_row : 0);
        seg.clear();
        slot0.clear();
        slot0.reserve((size_t)n_seg);
        pos.clear();
        pos.reserve((size_t)n_seg);
        for (int i = 0; i < n_seg; i++) {
            ops_seg s = r.get<ops_seg>();
            if (s.n_row < 0 || s.row0 < 0 || s.row0 + s.n_row > n_row)
                cu_fail("a run of rows [%d, + %d) in a pass of %d", s.row0, s.n_row, n_row);
            if (s.head_slot0) {
                slot0.push_back(ints((size_t)c->d.n_kv));
                s.head_slot0 = slot0.back().data();
            }
            if (s.pos) {
                pos.push_back(ints((size_t)s.n_row));
                s.pos = pos.back().data();
            }
            seg.push_back(s);
        }
        pass = { n_row, n_seg, has_token ? token.data() : nullptr, seg.data() };
    }
    kern_rule get_rule(std::map<const kern_range *, std::vector<kern_range>> &keep)
    {
        kern_rule u = r.get<kern_rule>();
        if (u.n_pin == 0)
            return u;
        const unsigned char *p = r.take((size_t)u.n_pin * sizeof(kern_range));
        std::vector<kern_range> &mine = keep[u.pin];
        if (mine.empty()) {
            mine.resize((size_t)u.n_pin);
            memcpy(mine.data(), p, mine.size() * sizeof(kern_range));
        }
        u.pin = mine.data();
        return u;
    }
    void kv_apply()
    {
        while (r.at < r.b.size()) {
            kv_set s = r.get<kv_set>();
            size_t heads = c->s_len.size();
            if (s.index >= (s.kind == KV_TABLE ? heads * c->kv.max_pages : heads))
                cu_fail("a table entry %u that there is not", s.index);
            if (s.kind == KV_TABLE)
                c->kv.table[s.index] = s.value;
            else if (s.kind == KV_LEN)
                c->kv.len[s.index] = (int32_t)s.value;
            else if (s.kind == KV_CAP)
                c->kv.cap[s.index] = (int32_t)s.value;
            else
                c->kv.victim[s.index] = (int32_t)s.value;
        }
    }
    void kv_read()
    {
        int lane = r.get<int32_t>(), layer = r.get<int32_t>(), head = r.get<int32_t>();
        if (r.get<int32_t>() != c->nodes->rank)
            return;
        size_t n = (size_t)c->kv.len[cu_kv_at(c, lane, layer, head)];
        std::vector<int32_t> pos(n);
        std::vector<float> score(n);
        cu_kv_read(c, lane, layer, head, pos.data(), score.data());
        cu_nodes_write(c->nodes, pos.data(), n * 4);
        cu_nodes_write(c->nodes, score.data(), n * 4);
    }
    void choose()
    {
        float *x = get_x();
        int n = r.get<int32_t>();
        std::vector<int32_t> row = ints((size_t)n);
        cu_collect(c);
        choice.assign((size_t)n, ops_sample()); // the leader chooses
        cu_choose(c, x, row.data(), n, choice.data(), nullptr);
        pins.clear();
    }
    void ahead()
    {
        int n = r.get<int32_t>();
        if (n != 0 && n != c->step_rows)
            cu_fail("%d tokens for a step of %d", n, c->step_rows);
        cu_ahead(c, n ? ints((size_t)n).data() : nullptr);
        if (n == 0)
            pins.clear();
    }
    void select()
    {
        int lane = r.get<int32_t>(), layer = r.get<int32_t>(), n_query = r.get<int32_t>();
        std::map<const kern_range *, std::vector<kern_range>> own;
        kern_rule u = get_rule(own);
        std::vector<float> mass((size_t)c->d.n_kv);
        cu_select_op(c, lane, layer, &u, n_query, mass.data());
    }
    void decode()
    {
        int layer = r.get<int32_t>();
        get_pass();
        std::vector<kern_rule> rule;
        for (int i = r.get<int32_t>() ? 0 : pass.n_seg; i < pass.n_seg; i++)
            rule.push_back(get_rule(pins));
        cu_step_attn_decode(c, layer, &pass, rule.empty() ? nullptr : rule.data());
    }
    void states(told what)
    {
        skv_error err;
        uint32_t id = r.get<uint32_t>();
        int n_row = r.get<int32_t>();
        if (what == T_STATE_NEW) {
            if (!(state[id] = cu_state_new(c, n_row, &err)))
                cu_fail("%s", err.msg);
        } else {
            cu_state_free(c, state[id]);
            state.erase(id);
        }
    }
    void thin()
    {
        float *x = get_x();
        int n = r.get<int32_t>();
        cu_state_thin(c, x, ints((size_t)std::max(n, 0)).data(), n);
    }
    bool obey(told what);
};

// One message; false: the end.
bool follower::obey(told what)
{
    skv_error err;
    int layer, lane;
    float *x;
    switch (what) {
    case T_END:
        return false;
    case T_KV_INIT:
        if (!cu_kv_init(c, r.get<uint32_t>(), &err))
            cu_fail("%s", err.msg);
        return true;
    case T_CLEAR:
        cu_page_clear(c, reinterpret_cast<const uint32_t *>(r.take(r.b.size())), (int)(r.b.size() / 4));
        return true;
    case T_KV_SET:
        kv_apply();
        return true;
    case T_STATE_NEW:
    case T_STATE_FREE:
        states(what);
        return true;
    case T_STATE_THIN:
        thin();
        return true;
    case T_EMBED:
        x = get_x();
        get_pass();
        cu_embed_op(c, &pass, x);
        return true;
    case T_ATTN_IN:
        layer = r.get<int32_t>();
        x = get_x();
        get_pass();
        slot = ints(r.get<int32_t>() ? (size_t)pass.n_row * c->d.n_kv : 0);
        cu_attn_in_op(c, layer, &pass, x, slot.empty() ? nullptr : slot.data());
        return true;
    case T_ATTN_PREFILL:
        layer = r.get<int32_t>();
        get_pass();
        cu_attn_prefill_op(c, layer, &pass);
        return true;
    case T_ATTN_DECODE:
        decode();
        return true;
    case T_OUT_MLP:
        layer = r.get<int32_t>();
        x = get_x();
        get_pass();
        cu_out_mlp_op(c, layer, &pass, x);
        return true;
    case T_SCORE_BEGIN:
        lane = r.get<int32_t>();
        cu_score_begin(c, lane, r.get<int32_t>());
        return true;
    case T_SELECT:
        select();
        return true;
    case T_CHOOSE:
        choose();
        return true;
    case T_COLLECT:
        cu_collect(c);
        return true;
    case T_AHEAD:
        ahead();
        return true;
    case T_KV_READ:
        kv_read();
        return true;
    case T_FLUSH:
        cu_step_flush(c);
        return true;
    }
    cu_fail("the leader says %d", (int)what);
}

} // namespace

int cu_follow(void *be, skv_error *err)
{
    cuda *c = static_cast<cuda *>(be);
    if (!c->nodes || c->nodes->rank == 0)
        return 1;
    follower f = { c, {}, {}, {}, {}, {}, {}, {}, {}, {}, {} };
    try {
        for (bool more = true; more;) {
            told_head h;
            cu_nodes_read(c->nodes, 0, &h, sizeof h);
            f.r.b.resize(h.size);
            f.r.at = 0;
            if (h.size)
                cu_nodes_read(c->nodes, 0, f.r.b.data(), h.size);
            more = f.obey((told)h.what);
        }
        return 0;
    } catch (const cu_error &e) {
        snprintf(c->failed, sizeof c->failed, "CUDA: %s", e.msg);
    } catch (const std::bad_alloc &) {
        snprintf(c->failed, sizeof c->failed, "no memory for a step's tables");
    }
    return skv_fail(err, SKV_INTERNAL, "rank %d: %s", c->nodes->rank, c->failed);
}
