// test_backend.cu - ops_cuda on the shim as a whole: a small random model, prompts, selection and decode, compared with
// ops_cpu in exact f32; graphs, batches and tensor parallel against the plain run of itself.
#include "tests/cuda/rig.h"

#include <chrono>
#include <iterator>
#include <string>

#include "kernels/cuda/backend.h"

extern "C" {
#include "kernels/blocks.h"
#include "kernels/ops.h"
extern const struct ops ops_cuda;
}

using rig::between;
using rig::close_to;
using rig::uniform;

// --- a model ---------------------------------------------------------------------------------------------

struct small_model {
    ops_dims d;
    std::vector<std::vector<unsigned char>> data;
    std::vector<ops_layer_src> layer;
    ops_model_src src;

    kern_tensor tensor(int type, int64_t rows, int64_t cols, float size)
    {
        std::vector<unsigned char> v(kern_row_bytes(type, cols) * rows);
        size_t step = kern_type_block_bytes(type);
        for (size_t b = 0; b < v.size(); b += step)
            block(type, &v[b], size);
        data.push_back(std::move(v));
        return { data.back().data(), type, rows, cols };
    }
    static void half(unsigned char *p, float f)
    {
        uint16_t h = kern_f32_to_f16(f);
        memcpy(p, &h, 2);
    }
    // Weights of about +-size.
    static void block(int type, unsigned char *p, float size)
    {
        size_t bytes = kern_type_block_bytes(type);
        float f = uniform(-size, size);
        if (type == KERN_F32) {
            memcpy(p, &f, 4);
        } else if (type == KERN_F16) {
            half(p, f);
        } else { // Q8_0 and Q4_1: any code, a scale to match
            for (size_t i = 0; i < bytes; i++)
                p[i] = (unsigned char)rig::rng();
            half(p, type == KERN_Q8_0 ? size / 127 : size / 7.5f);
            if (type == KERN_Q4_1)
                half(p + 2, -size);
        }
    }
    kern_tensor norm(int n)
    {
        kern_tensor t = tensor(KERN_F32, 1, n, 0.3f);
        for (int i = 0; i < n; i++)
            reinterpret_cast<float *>(data.back().data())[i] += 1.0f;
        return t;
    }
    small_model(int n_layer, int n_kv, int g, int hd, bool extras)
    {
        memset(&d, 0, sizeof d);
        d.n_layer = n_layer;
        d.d_model = 192;
        d.n_head = n_kv * g;
        d.n_kv = n_kv;
        d.head_dim = hd;
        d.n_ffn = 320;
        d.n_vocab = 301;
        d.rot_dim = hd;
        d.max_context = 512;
        d.norm_eps = 1e-5f;
        d.attn_scale = 1.0f / sqrtf((float)hd);
        d.rope_base = 10000.0f;
        d.rope = extras ? KERN_ROPE_HALF : KERN_ROPE_INTERLEAVED;
        d.act = extras ? KERN_ACT_GELU_TANH : KERN_ACT_SILU;
        d.embed_scale = extras ? 3.0f : 1.0f;
        float s = 2.0f / sqrtf(192.0f);
        int nq = d.n_head * hd, nk = n_kv * hd;
        data.reserve(2000);
        const int types[] = { KERN_Q4_1, KERN_Q8_0, KERN_F16 };
        for (int i = 0; i < n_layer; i++) {
            ops_layer_src l;
            int t = types[i % 3];
            memset(&l, 0, sizeof l);
            l.attn_norm = norm(192);
            l.ffn_norm = norm(192);
            l.wq = tensor(t, nq, 192, s);
            l.wk = tensor(t, nk, 192, s);
            l.wv = tensor(KERN_Q8_0, nk, 192, s);
            l.wo = tensor(t, 192, nq, s / 2);
            l.w_gate = tensor(t, 320, 192, s);
            l.w_up = tensor(t, 320, 192, s);
            l.w_down = tensor(t, 192, 320, s / 2);
            if (extras) {
                l.bq = tensor(KERN_F32, 1, nq, 0.2f);
                l.bk = tensor(KERN_F32, 1, nk, 0.2f);
                l.bv = tensor(KERN_F32, 1, nk, 0.2f);
                l.q_norm = norm(hd);
                l.k_norm = norm(hd);
                l.post_attn_norm = norm(192);
                l.post_ffn_norm = norm(192);
            }
            layer.push_back(l);
        }
        src.dims = d;
        src.embed = tensor(KERN_Q8_0, d.n_vocab, 192, 1.0f);
        src.output = extras ? tensor(KERN_Q4_1, d.n_vocab, 192, s) : src.embed;
        src.out_norm = norm(192);
        src.layer = layer.data();
    }
};

// --- a run: what the engine does, in small --------------------------------------------------------------------

struct run_setup {
    std::vector<std::vector<int>> prompts;
    int steps, budget;
    bool by_value, shared, read_between; // read_between: kv_read in every step, so that none can be a graph
    kern_kv_dtype dtype;
    std::vector<std::vector<int>> forced; // tokens to feed at decode; empty: greedy
    bool sampled;                         // the backend chooses: no logits
    bool ahead;                           // then: each step is noted while the one before runs, every third one in vain
};

struct run_result {
    std::vector<std::vector<std::vector<float>>> logits; // [lane][step][vocab]
    std::vector<std::vector<int>> token;                 // [lane][step]
    std::vector<int> prompted, kept;                     // positions, and whose, after the prompts and the last step; victims
    std::vector<float> scores, mass;
    std::vector<long> launches, graphs, rows;            // per decode step
    std::string failed;                                  // why nothing was computed any more
};

static int tp_now = 1; // ranks of the next run of ops_cuda
static bool exact_now; // and tp_exact

static ops_config config(int lanes, kern_kv_dtype dtype)
{
    ops_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.n_threads = 1;
    cfg.isa = "scalar";
    cfg.compute_f32 = dtype == KERN_KV_F32;
    cfg.kv_dtype = dtype;
    cfg.max_lanes = lanes;
    cfg.max_rows = 256;
    cfg.max_pages = 20;
    cfg.tp = tp_now;
    cfg.tp_exact = exact_now;
    return cfg;
}

struct runner {
    const ops *o;
    void *be;
    ops_kv *kv;
    const small_model &m;
    const run_setup &s;
    int lanes;
    uint32_t next = 0;
    std::vector<int> held; // pages of each head
    std::vector<std::vector<kern_rule>> rule; // [lane][layer]
    // of the decode step that was noted last
    std::vector<int> ahead;    // its lanes, while its tokens are not known
    std::vector<int32_t> slot; // [layer][row][head]
    int pages = 0;             // that it took
    run_result out;

    size_t at(int lane, int layer, int h) const
    {
        return ((size_t)lane * m.d.n_layer + layer) * m.d.n_kv + h;
    }
    void grow(size_t i, int slots)
    {
        for (held.resize(std::max(held.size(), i + 1)); held[i] * 32 < slots; held[i]++) {
            kv->table[i * kv->max_pages + held[i]] = next;
            o->page_clear(be, &next, 1);
            next++;
        }
        kv->len[i] = slots;
    }
    kern_rule make_rule(int layer) const
    {
        kern_rule r;
        memset(&r, 0, sizeof r);
        r.pool = 1;
        r.decay = 1;
        if (layer == 0)
            return r; // full
        r.budget = s.budget;
        r.sink = 2;
        r.recent = 4;
        r.pool = 3;
        r.use_score = true;
        r.by_value = s.by_value;
        r.value_eps = 1e-4f;
        r.head_floor = s.shared ? 0.3f : 1.0f;
        r.decay = 0.9f;
        r.weight = 0.5f;
        return r;
    }
    void prefill_layer(int lane, int layer, float *x)
    {
        const std::vector<int> &p = s.prompts[lane];
        int n = (int)p.size();
        kern_rule &r = rule[lane][layer];
        for (int h = 0; h < m.d.n_kv; h++)
            grow(at(lane, layer, h), n);
        r.pool_to = n - 4;
        if (r.budget)
            o->score_begin(be, lane, n);
        for (int t = 0; t < n; t += OPS_TILE) {
            int rows = std::min(OPS_TILE, n - t), from = r.budget ? std::max(0, n - 16 - t) : rows;
            ops_seg seg = { lane, 0, rows, t, nullptr, t, nullptr, from };
            std::vector<int32_t> tok(p.begin() + t, p.begin() + t + rows);
            ops_pass pass = { rows, 1, tok.data(), &seg };
            float *xt = x + (size_t)t * m.d.d_model;
            if (layer == 0)
                o->embed(be, &pass, xt);
            o->attn_in(be, layer, &pass, xt, nullptr);
            o->attn_prefill(be, layer, &pass);
            o->attn_out_mlp(be, layer, &pass, xt);
        }
        if (!r.budget)
            return;
        std::vector<float> mass(m.d.n_kv);
        o->select(be, lane, layer, &r, 16, mass.data());
        out.mass.insert(out.mass.end(), mass.begin(), mass.end());
        for (int h = 0; h < m.d.n_kv; h++) { // one slot more, as the engine does
            kv->cap[at(lane, layer, h)] += kv->cap[at(lane, layer, h)] < INT32_MAX; // a device that failed chose nothing
            kv->victim[at(lane, layer, h)] = -1;
            held[at(lane, layer, h)] = (kv->len[at(lane, layer, h)] + 31) / 32;
        }
    }
    int pick(int lane, const std::vector<float> &l)
    {
        int best = (int)(std::max_element(l.begin(), l.end()) - l.begin());
        size_t step = out.token[lane].size();
        if (!s.forced.empty())
            best = s.forced[lane][step];
        out.token[lane].push_back(best);
        out.logits[lane].push_back(l);
        return best;
    }
    void read_one(int lane)
    {
        int k = kv->len[at(lane, 0, 0)];
        std::vector<int32_t> pos(k);
        std::vector<float> score(k);
        o->kv_read(be, lane, 0, 0, pos.data(), score.data());
    }
    // The pairs of the noted step are counted, or (-1) not yet.
    void count_pairs(const std::vector<int> &lane, int by)
    {
        int n = (int)lane.size(), nk = m.d.n_kv;
        for (int i = 0; i < n; i++)
            for (int l = 0; l < m.d.n_layer; l++)
                for (int h = 0; h < nk; h++)
                    if (slot[((size_t)l * n + i) * nk + h] >= 0)
                        kv->len[at(lane[i], l, h)] += by;
    }
    std::vector<int32_t> tokens(const std::vector<int> &lane) const
    {
        std::vector<int32_t> tok;
        for (int one : lane)
            tok.push_back(out.token[one].back());
        return tok;
    }
    // A step's operations. `early`: its tokens are those that the running step chooses.
    void note(float *x, const std::vector<int> &lane, bool early)
    {
        int n = (int)lane.size(), nk = m.d.n_kv;
        std::vector<int32_t> tok = tokens(lane);
        std::vector<ops_seg> seg(n);
        uint32_t before = next;
        slot.assign((size_t)m.d.n_layer * n * nk, -1);
        for (int i = 0; i < n; i++) {
            int pos = (int)s.prompts[lane[i]].size() + (int)out.token[lane[i]].size() - 1 + running(lane[i], early);
            seg[i] = { lane[i], i, 1, pos, nullptr, 0, nullptr, i + 1 };
            for (int l = 0; l < m.d.n_layer; l++)
                for (int h = 0; h < nk; h++) {
                    size_t k = at(lane[i], l, h);
                    if (kv->len[k] == kv->cap[k])
                        continue;
                    slot[((size_t)l * n + i) * nk + h] = kv->len[k];
                    grow(k, kv->len[k] + 1);
                }
        }
        pages += (int)(next - before);
        ops_pass pass = { n, n, early ? nullptr : tok.data(), seg.data() };
        o->embed(be, &pass, x);
        for (int l = 0; l < m.d.n_layer; l++) {
            std::vector<kern_rule> r;
            for (int i = 0; i < n; i++) {
                int step = (int)out.token[lane[i]].size() - 1 + running(lane[i], early);
                r.push_back(rule[lane[i]][l]);
                if (l == 0 || l != m.d.n_layer - 1)
                    continue;
                r[i].ring = 3; // the last layer scores in bursts
                r[i].ring_at = step % 3;
                r[i].burst = step % 3 == 2;
            }
            o->attn_in(be, l, &pass, x, &slot[(size_t)l * n * nk]);
            o->attn_decode(be, l, &pass, r.data());
            o->attn_out_mlp(be, l, &pass, x);
        }
    }
    std::vector<int> now; // lanes of the step that runs
    int running(int lane, bool early) const
    {
        return early && std::find(now.begin(), now.end(), lane) != now.end();
    }
    void decode(float *x, const std::vector<int> &lane, const std::vector<int> &then)
    {
        int n = (int)lane.size();
        std::vector<int32_t> row(n);
        std::vector<float> logits((size_t)n * m.d.n_vocab);
        for (int i = 0; i < n; i++)
            row[i] = i;
        bool known = !ahead.empty() && out.rows.size() % 3 != 2;
        if (!ahead.empty() && !known) {
            o->ahead(be, nullptr);
            for (size_t i = 0; i < held.size(); i++) // the first lane keeps its new pages, the others get others
                if (i >= at(1, 0, 0))
                    held[i] = (kv->len[i] + 31) / 32;
            pages = 0;
            for (size_t i = 0; i < at(1, 0, 0); i++)
                pages += held[i] - (kv->len[i] + 31) / 32; // not known to the device yet
            if (out.rows.size() % 2)
                read_one(lane.back());
        }
        shim::counts before = shim::count;
        if (known) {
            CHECK(ahead == lane);
            count_pairs(lane, 1);
            o->ahead(be, tokens(lane).data());
        } else {
            note(x, lane, false);
        }
        ahead.clear();
        now = lane;
        if (s.read_between)
            read_one(lane[0]);
        if (s.sampled) {
            std::vector<ops_sample> choice(n, ops_sample());
            for (ops_sample &c : choice)
                c.token = -7;
            o->sample(be, x, row.data(), n, choice.data(), nullptr);
            for (ops_sample &c : choice) // nobody has waited, and the shim's streams are lazy
                CHECK(c.token == -7);
            // What the host tells the device of tables: new pages, and after a selection caps. Lengths it counts itself.
            if (out.rows.size() > 0 && tp_now == 1 && !o->failed(be)) {
                const cuda *c = static_cast<cuda *>(be);
                int32_t changes;
                memcpy(&changes, c->rank[0].step_h[c->block ^ 1] + c->rank[0].at.n_change, sizeof changes);
                CHECK(changes == pages);
                pages = 0;
            }
            std::fill(row.begin(), row.end(), 0); // read before
            uint32_t spare = kv->n_pages - 1;
            o->page_clear(be, &spare, 1); // what may be asked for in between goes into the next step
            if (s.ahead && !then.empty()) {
                note(x, then, true);
                count_pairs(then, -1);
                ahead = then;
            }
            o->collect(be);
            for (int i = 0; i < n; i++) // as if its logit alone were not 0
                if (choice[i].token >= 0)
                    logits[(size_t)i * m.d.n_vocab + choice[i].token] = 1;
        } else {
            o->logits(be, x, row.data(), n, logits.data());
        }
        out.rows.push_back(n);
        out.launches.push_back(shim::count.kernels - before.kernels + shim::count.copies - before.copies);
        out.graphs.push_back(shim::count.graphs - before.graphs);
        for (int i = 0; i < n; i++)
            pick(lane[i], std::vector<float>(logits.begin() + (long)i * m.d.n_vocab,
                                             logits.begin() + (long)(i + 1) * m.d.n_vocab));
    }
    void read_all(std::vector<int> &kept, std::vector<float> &scores)
    {
        for (int lane = 0; lane < lanes; lane++)
            for (int l = 0; l < m.d.n_layer; l++)
                for (int h = 0; h < m.d.n_kv; h++) {
                    int n = kv->len[at(lane, l, h)];
                    std::vector<int32_t> pos(n);
                    std::vector<float> score(n);
                    o->kv_read(be, lane, l, h, pos.data(), score.data());
                    int whose = (int)at(lane, l, h) << 10; // above what a position or a slot needs
                    for (int32_t p : pos)
                        kept.push_back(whose + p);
                    kept.push_back(whose + 512 + kv->victim[at(lane, l, h)]);
                    scores.insert(scores.end(), score.begin(), score.end());
                }
    }
    runner(const ops *ops, const small_model &model, const run_setup &setup) : o(ops), m(model), s(setup)
    {
        skv_error err;
        memset(&err, 0, sizeof err);
        lanes = (int)s.prompts.size();
        ops_config cfg = config(lanes + 1, o == &ops_cpu ? KERN_KV_F32 : s.dtype);
        be = o->open(&cfg, &m.src, &err);
        if (!be || !(kv = o->kv_init(be, (uint32_t)(lanes * m.d.n_layer * m.d.n_kv * 14), &err)))
            out.failed = err.msg;
        else
            all();
        if (be && o->failed && o->failed(be))
            out.failed = o->failed(be);
        o->close(be);
    }
    void all()
    {
        skv_error err;
        out.logits.resize(lanes);
        out.token.resize(lanes);
        std::vector<int> first, all;
        std::vector<float> l(m.d.n_vocab), prompt_scores;
        for (int lane = 0; lane < lanes; lane++) {
            rule.emplace_back();
            for (int i = 0; i < m.d.n_layer; i++)
                rule[lane].push_back(make_rule(i));
            int n = (int)s.prompts[lane].size();
            float *x = o->state_new(be, n, &err);
            if (!x)
                return;
            for (int i = 0; i < m.d.n_layer; i++)
                prefill_layer(lane, i, x);
            int32_t last = n - 1;
            o->logits(be, x, &last, 1, l.data());
            o->state_free(be, x);
            pick(lane, l);
            all.push_back(lane);
        }
        read_all(out.prompted, prompt_scores);
        float *x = o->state_new(be, lanes + 1, &err);
        if (!x)
            return;
        auto batch = [&](int i) { // some steps without the first lane: batches of two sizes
            return i < s.steps ? std::vector<int>(all.begin() + (lanes > 1 && i % 4 == 3), all.end()) : std::vector<int>();
        };
        for (int i = 0; i < s.steps; i++)
            decode(x, batch(i), batch(i + 1));
        read_all(out.kept, out.scores);
        o->state_free(be, x);
    }
};

static run_result run(const ops *o, const small_model &m, const run_setup &s)
{
    run_result r = runner(o, m, s).out;
    if (!r.failed.empty()) {
        printf("%s: %s\n", o->name, r.failed.c_str());
        exit(2);
    }
    return r;
}

static std::vector<int> random_prompt(int n, int vocab)
{
    std::vector<int> p(n);
    for (int &t : p)
        t = between(0, vocab - 1);
    return p;
}

static double distance(const std::vector<float> &a, const std::vector<float> &b)
{
    double num = 0, den = 0;
    for (size_t i = 0; i < a.size(); i++) {
        num += (a[i] - b[i]) * (double)(a[i] - b[i]);
        den += b[i] * (double)b[i];
    }
    return sqrt(num / den);
}

static bool same_bits(const run_result &a, const run_result &b, int lane)
{
    bool ok = a.logits[lane].size() == b.logits[lane].size();
    for (size_t i = 0; ok && i < a.logits[lane].size(); i++)
        ok = memcmp(a.logits[lane][i].data(), b.logits[lane][i].data(), a.logits[lane][i].size() * 4) == 0;
    return ok;
}

// --- comparisons -----------------------------------------------------------------------------------------------

// Budgets that keep everything first (so that no rounding decides what stays), then real ones with a looser bound.
static void against_cpu(const small_model &m, run_setup s, const char *name, double tol, double overlap)
{
    run_result cpu = run(&ops_cpu, m, s);
    s.forced = cpu.token;
    run_result gpu = run(&ops_cuda, m, s);
    double worst = 0;
    for (size_t lane = 0; lane < s.prompts.size(); lane++)
        for (size_t i = 0; i < cpu.logits[lane].size(); i++)
            rig::worsen(worst, distance(gpu.logits[lane][i], cpu.logits[lane][i]));
    close_to(name, worst, 0, tol);
    CHECK(cpu.kept.size() == gpu.kept.size());
    size_t same = 0, n = std::min(cpu.kept.size(), gpu.kept.size());
    for (size_t i = 0; i < n; i++)
        same += cpu.kept[i] == gpu.kept[i];
    if ((double)same < overlap * (double)n)
        printf("%s: %zu of %zu kept positions agree\n", name, same, n);
    CHECK((double)same >= overlap * (double)n);
    for (size_t i = 0; i < std::min(cpu.mass.size(), gpu.mass.size()); i++)
        close_to("kept mass", gpu.mass[i], cpu.mass[i], 0.03);
}

static void graphs_and_batches(const small_model &m, run_setup s)
{
    run_result graph = run(&ops_cuda, m, s), eager;
    run_setup e = s;
    e.read_between = true;
    eager = run(&ops_cuda, m, e);
    CHECK(graph.kept == eager.kept && graph.scores == eager.scores);
    for (size_t lane = 0; lane < s.prompts.size(); lane++)
        CHECK(same_bits(graph, eager, (int)lane)); // replays with changed data equal the plain launches
    // A decode step is its block's copy, one graph launch, and a copy for each row whose logits the host wants.
    for (size_t i = 0; i < graph.graphs.size(); i++) {
        CHECK(graph.graphs[i] == 1 && graph.launches[i] == 1 + graph.rows[i]);
        CHECK(eager.graphs[i] == 0);
    }
    // Where tokens are chosen on the device it is those two and nothing else, whether it was noted while the one before ran, or
    // another was then.
    run_setup on_device = s;
    on_device.sampled = true;
    for (bool ahead : { false, true }) {
        on_device.ahead = ahead;
        run_result chosen = run(&ops_cuda, m, on_device);
        CHECK(chosen.token == graph.token && chosen.kept == graph.kept && chosen.scores == graph.scores);
        for (size_t i = 0; i < chosen.graphs.size(); i++)
            CHECK(chosen.graphs[i] == 1 && chosen.launches[i] == 1);
    }
    // A lane alone gives the same bits as among others.
    for (size_t lane = 1; lane < s.prompts.size(); lane++) {
        run_setup one = s;
        one.prompts = { s.prompts[lane] };
        CHECK(same_bits(run(&ops_cuda, m, one), { { graph.logits[lane] }, {}, {}, {}, {}, {}, {}, {}, {}, {} }, 0));
    }
}

// Share of b that is in a.
static double shared_of(std::vector<int> a, std::vector<int> b)
{
    std::vector<int> both;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
    return (double)both.size() / (double)b.size();
}

// All-reduces and gathers since they were counted: two a layer of a pass, one of a prompt's or step's logits, nothing else.
static void count_collectives(const small_model &m, const run_setup &s, long reduces, long gathers)
{
    long passes = 0, captured = 2; // decode batches of two sizes: a capture issues the calls once
    for (const std::vector<int> &p : s.prompts)
        passes += ((long)p.size() + OPS_TILE - 1) / OPS_TILE;
    CHECK(shim::count.reduces - reduces == 2 * m.d.n_layer * (passes + captured));
    CHECK(shim::count.gathers - gathers == (long)s.prompts.size() + captured);
}

// With tp_exact the number of ranks changes nothing at all.
static void exact_parallel(const small_model &m, const run_setup &s, int most)
{
    run_result plain = run(&ops_cuda, m, s);
    exact_now = true;
    run_result one = run(&ops_cuda, m, s);
    CHECK(one.logits != plain.logits); // else nothing is tested
    setenv("SHIM_DEVICES", std::to_string(most).c_str(), 1);
    for (int n = 2; n <= most; n++) {
        tp_now = n;
        long reduces = shim::count.reduces, gathers = shim::count.gathers;
        run_result tp = run(&ops_cuda, m, s);
        count_collectives(m, s, reduces, gathers);
        CHECK(tp.token == one.token && tp.prompted == one.prompted && tp.kept == one.kept);
        CHECK(tp.scores == one.scores && tp.mass == one.mass && tp.logits == one.logits);
        for (size_t i = 0; i < tp.graphs.size(); i++) // a rank: its block, its graph, its part of the logits
            CHECK(tp.graphs[i] == n && tp.launches[i] == n * (1 + tp.rows[i]));
        if (shared_of(tp.prompted, one.prompted) < 1 || shared_of(tp.kept, one.kept) < 1)
            printf("exact, %d ranks, budget %d: %g of the prompts' positions kept are the same, %g at the end\n", n, s.budget,
                   shared_of(tp.prompted, one.prompted), shared_of(tp.kept, one.kept));
    }
    tp_now = 1;
    exact_now = false;
    unsetenv("SHIM_DEVICES");
}

static void tensor_parallel(const small_model &m, const run_setup &s, int most)
{
    // Sums over ranks add in another order: about 1e-7 of the largest hidden state after the first output projection, which grows
    // to 1e-3 where it turns an operand's or a cached pair's bf16 rounding, there and in the scores of deeper layers. So a pair is
    // kept instead of another where their scores are that near; where nothing goes, nothing that is chosen changes.
    bool evicts = s.budget < 300;
    run_result one = run(&ops_cuda, m, s);
    run_setup again = s;
    again.forced = one.token;
    setenv("SHIM_DEVICES", std::to_string(most).c_str(), 1);
    for (int n = 2; n <= most; n++) {
        tp_now = n;
        long reduces = shim::count.reduces, gathers = shim::count.gathers;
        run_result tp = run(&ops_cuda, m, evicts ? again : s);
        count_collectives(m, s, reduces, gathers);
        CHECK(evicts || tp.token == one.token); // where pairs go the same tokens are fed, to compare what follows
        double prompts = shared_of(tp.prompted, one.prompted), end = shared_of(tp.kept, one.kept);
        CHECK(tp.prompted.size() == one.prompted.size() && tp.kept.size() == one.kept.size());
        CHECK(prompts >= (evicts ? 0.99 : 1.0) && end >= (evicts ? 0.99 : 1.0));
        double worst = 0;
        for (size_t lane = 0; lane < s.prompts.size(); lane++)
            for (size_t i = 0; i < tp.logits[lane].size(); i++)
                rig::worsen(worst, distance(tp.logits[lane][i], one.logits[lane][i]));
        close_to("tensor parallel logits", worst, 0, evicts ? 0.2 : 0.03);
    }
    tp_now = 1;
    unsetenv("SHIM_DEVICES");
}

static void refusals(const small_model &m)
{
    skv_error err;
    ops_config cfg = config(2, KERN_KV_F32);
    CHECK(!ops_cuda.open(&cfg, &m.src, &err) && err.code == SKV_BAD_CONFIG);
    ops_model_src src = m.src;
    cfg.compute_f32 = false;
    cfg.kv_dtype = KERN_KV_BF16;
    src.dims.head_dim = 40;
    CHECK(!ops_cuda.open(&cfg, &src, &err) && err.code == SKV_BAD_MODEL);
    setenv("SHIM_MEMORY", "70000000", 1);
    void *be = ops_cuda.open(&cfg, &m.src, &err);
    CHECK(!be && err.code == SKV_NO_MEMORY);
    setenv("SHIM_MEMORY", "300000000", 1);
    be = ops_cuda.open(&cfg, &m.src, &err);
    CHECK(be != nullptr);
    CHECK(be && !ops_cuda.kv_init(be, 1000000, &err) && err.code == SKV_NO_MEMORY);
    ops_cuda.close(be);
    unsetenv("SHIM_MEMORY");
    setenv("SHIM_DEVICES", "0", 1);
    CHECK(!ops_cuda.open(&cfg, &m.src, &err) && err.code == SKV_BAD_CONFIG);
    setenv("SHIM_DEVICES", "2", 1);
    cfg.tp = 3;
    CHECK(!ops_cuda.open(&cfg, &m.src, &err) && err.code == SKV_BAD_CONFIG);
    exact_now = true;
    setenv("SHIM_DEVICES", "3", 1);
    cfg = config(2, KERN_KV_BF16);
    cfg.tp = 3;
    src = m.src;
    src.dims.n_ffn = 32 * 771; // more parts than are added exactly
    CHECK(!ops_cuda.open(&cfg, &src, &err) && err.code == SKV_BAD_CONFIG && strstr(err.msg, "tp-exact"));
    src = m.src;
    src.dims.n_head = 6; // heads of 80 go by two, a rank of two would have three
    src.dims.n_kv = cfg.tp = 2;
    src.dims.head_dim = src.dims.rot_dim = 80;
    CHECK(!ops_cuda.open(&cfg, &src, &err) && err.code == SKV_BAD_CONFIG && strstr(err.msg, "go together by 2"));
    exact_now = false;
    unsetenv("SHIM_DEVICES");
    tp_now = 1;
}

// A device that fails at any moment: the run ends with a reason, nothing crashes, nothing is leaked or used after it.
static void failures(const small_model &m, const run_setup &s, int ranks)
{
    bool open = false, later = false, whole = false;
    setenv("SHIM_DEVICES", std::to_string(ranks).c_str(), 1);
    tp_now = ranks;
    for (long n = 1; !whole; n += 1 + n / 4) {
        setenv("SHIM_FAIL", std::to_string(n).c_str(), 1);
        shim::forget_failures();
        runner r(&ops_cuda, m, s);
        whole = r.out.failed.empty();
        open = open || (!whole && !r.be);
        later = later || (!whole && r.be && !r.out.token.empty() && !r.out.token[0].empty());
        CHECK(whole || r.out.failed.find("error 700") != std::string::npos || !r.be);
    }
    CHECK(open && later);
    unsetenv("SHIM_FAIL");
    unsetenv("SHIM_DEVICES");
    tp_now = 1;
}

// What noting a step costs the host, which is what a step that is noted ahead saves: printed, for docs and README. Nothing runs.
static void noting_time()
{
    small_model m(32, 8, 1, 64, false);
    const int n = 20, nk = m.d.n_kv, heads = m.d.n_layer * nk, times = 51;
    skv_error err;
    ops_config cfg = config(n, KERN_KV_BF16);
    void *be = ops_cuda.open(&cfg, &m.src, &err);
    ops_kv *kv = be ? ops_cuda.kv_init(be, (uint32_t)(n * heads), &err) : nullptr;
    float *x = kv ? ops_cuda.state_new(be, n, &err) : nullptr;
    CHECK(x != nullptr);
    if (!x)
        return;
    std::vector<ops_seg> seg;
    std::vector<int32_t> slot((size_t)n * heads);
    kern_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.budget = 31;
    rule.decay = rule.weight = 1;
    std::vector<kern_rule> rules(n, rule);
    std::vector<double> us;
    for (int i = 0; i < n; i++)
        seg.push_back({ i, i, 1, 100, nullptr, 0, nullptr, i + 1 });
    for (size_t k = 0; k < slot.size(); k++) {
        kv->table[k * kv->max_pages] = (uint32_t)k;
        kv->len[k] = 20;
        kv->cap[k] = 20 + k % 2; // every other head evicts
    }
    cuda *c = static_cast<cuda *>(be);
    for (int i = 0; i < heads / nk * n; i++)
        cu_kv_diff(c, i / m.d.n_layer, i % m.d.n_layer);
    cu_kv_push(c);
    ops_pass pass = { n, n, nullptr, seg.data() };
    for (int t = 0; t < times; t++) {
        for (size_t k = 0; k < slot.size(); k++) {
            slot[k] = k % 2 ? 20 : -1;
            kv->len[k] = 20 + k % 2;
        }
        auto start = std::chrono::steady_clock::now();
        ops_cuda.embed(be, &pass, x);
        for (int l = 0; l < m.d.n_layer; l++) {
            ops_cuda.attn_in(be, l, &pass, x, &slot[(size_t)l * n * nk]);
            ops_cuda.attn_decode(be, l, &pass, rules.data());
            ops_cuda.attn_out_mlp(be, l, &pass, x);
        }
        us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
        ops_cuda.ahead(be, nullptr);
        CHECK(c->noted.empty() && c->change[0].empty() && c->s_len == std::vector<int32_t>((size_t)n * heads, 20));
    }
    std::sort(us.begin(), us.end());
    printf("noting a step of %d sequences, %d layers, %d KV heads: %.0f us of the host (median; least %.0f)\n", n, m.d.n_layer, nk,
           us[times / 2], us[0]);
    ops_cuda.state_free(be, x);
    ops_cuda.close(be);
}

int main(int argc, char **argv)
{
    bool small_run = argc > 1 && strcmp(argv[1], "small") == 0;
    small_model plain(3, 3, 3, 64, false), extras(2, 2, 2, 80, true);
    run_setup s = { { random_prompt(30, 301), random_prompt(small_run ? 62 : 286, 301), random_prompt(1, 301) },
                    small_run ? 4 : 6, 400, false, false, false, KERN_KV_BF16, {}, false, false };
    refusals(plain);
    noting_time();
    against_cpu(plain, s, "bf16, nothing evicted", 0.03, 1.0);
    s.budget = 20;
    s.by_value = true;
    against_cpu(plain, s, "bf16, budget 20", 0.2, 0.8);
    graphs_and_batches(plain, s);
    tensor_parallel(plain, s, 3);
    exact_parallel(plain, s, small_run ? 2 : 3);
    s.budget = 400;
    tensor_parallel(plain, s, 3);
    // More ranks than KV heads: 2, 3 and 4 share one of four query heads; of three, two share the first of two.
    small_model one_head(2, 1, 4, 64, false), two_heads(2, 2, 2, 64, false);
    tensor_parallel(one_head, s, small_run ? 2 : 4);
    tensor_parallel(two_heads, s, 3);
    s.budget = 20;
    s.by_value = true;
    tensor_parallel(one_head, s, small_run ? 2 : 4);
    exact_parallel(one_head, s, small_run ? 3 : 4);
    s.by_value = false;
    if (!small_run) {
        exact_parallel(one_head, s, 4);
        exact_parallel(two_heads, s, 4);
    }
    s.steps = 2;
    failures(two_heads, s, 1);
    s.sampled = s.ahead = true;
    s.steps = 3;
    failures(two_heads, s, 2);
    s.sampled = s.ahead = false;
    s.steps = small_run ? 4 : 6;
    s.by_value = true;
    s.budget = 20;
    if (!small_run) {
        s.shared = true;
        s.dtype = KERN_KV_INT8;
        graphs_and_batches(extras, s);
        s.shared = false;
        exact_parallel(extras, s, 2); // parts of two heads of 80
        s.by_value = false;
        s.budget = 400;
        against_cpu(extras, s, "int8 and all the extras, nothing evicted", 0.05, 1.0);
    }
    return rig::done();
}
