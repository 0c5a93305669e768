/* sampler.c - see sampler.h for the order of things.
 *
 * No pass over the vocabulary does more per logit than one comparison or one exp: the k best are kept by a threshold that
 * rises, top_p's prefix is found by selection with masses, not by sorting. The loops over BLOCK logits are written so that
 * the compiler makes vector code of them at -O2; sums go block by block in double, in a fixed order.
 */
#include "config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "engine/sampler.h"
#include "kernels/ops.h"

#define RECENT OPS_SAMPLE_PENS
#define BLOCK  16
#define LOWEST (-1e30f)

struct cand {
    float logit;
    int32_t id;
};

struct sampler {
    struct engine_sampling set;
    int n_vocab;
    int32_t recent[RECENT];
    int n_recent, at; /* ring */
    struct cand *cand;
    int cap;
};

/* ---- life ----------------------------------------------------------------------------------------------- */

static bool limits_k(const struct engine_sampling *s, int n_vocab)
{
    return s->top_k > 0 && s->top_k < n_vocab;
}

struct sampler *sampler_new(const struct engine_sampling *s, int n_vocab)
{
    struct sampler *p = calloc(1, sizeof(*p));
    if (!p)
        return NULL;
    p->set = *s;
    p->n_vocab = n_vocab;
    if (s->temperature > 0) {
        int64_t room = limits_k(s, n_vocab) ? 4 * (int64_t)s->top_k + 64 : n_vocab;
        p->cap = room > n_vocab ? n_vocab : (int)room;
        p->cand = malloc((size_t)p->cap * sizeof(*p->cand));
    }
    if (s->temperature > 0 && !p->cand) {
        free(p);
        return NULL;
    }
    if (!s->seed_set && getrandom(&p->set.seed, sizeof(p->set.seed), GRND_NONBLOCK) < 0)
        p->set.seed = (uint64_t)(uintptr_t)p; /* before the system has entropy: any number will do */
    return p;
}

void sampler_free(struct sampler *s)
{
    if (s)
        free(s->cand);
    free(s);
}

void sampler_accept(struct sampler *s, int32_t token)
{
    s->recent[s->at] = token;
    s->at = (s->at + 1) % RECENT;
    if (s->n_recent < RECENT)
        s->n_recent++;
}

/* ---- penalties ------------------------------------------------------------------------------------------ */

static bool penalizes(const struct engine_sampling *set)
{
    return set->repeat_penalty != 1.0f || set->presence_penalty != 0.0f || set->frequency_penalty != 0.0f;
}

static void penalize(const struct sampler *s, float *logits)
{
    const struct engine_sampling *set = &s->set;
    if (!penalizes(set))
        return;
    for (int i = 0; i < s->n_recent; i++) {
        int32_t id = s->recent[i];
        int count = 1;
        bool seen = id < 0 || id >= s->n_vocab;
        for (int j = 0; j < i && !seen; j++)
            seen = s->recent[j] == id;
        if (seen)
            continue;
        for (int j = i + 1; j < s->n_recent; j++)
            count += s->recent[j] == id;
        float l = logits[id];
        l = l > 0 ? l / set->repeat_penalty : l * set->repeat_penalty;
        logits[id] = l - ((float)count * set->frequency_penalty + set->presence_penalty);
    }
}

/* ---- passes over the vocabulary ------------------------------------------------------------------------- */

/* Does any of BLOCK logits exceed t? NaN does not. */
static inline bool any_above(const float *x, float t)
{
    int any = 0;
    for (int i = 0; i < BLOCK; i++)
        any |= x[i] > t;
    return any;
}

/* The first index of the largest logit, -1: none above -inf. */
static int32_t arg_max(const float *x, int n)
{
    float best = -INFINITY;
    int32_t at = -1;
    for (int i = 0; i < n; i += BLOCK) {
        int m = n - i < BLOCK ? n - i : BLOCK;
        if (m == BLOCK && !any_above(x + i, best))
            continue;
        for (int j = i; j < i + m; j++)
            if (x[j] > best) {
                best = x[j];
                at = j;
            }
    }
    return at;
}

union bits {
    int32_t i;
    float f;
};

/* exp for x <= 0, relative error below 3e-7; what is below -87 (NaN, -inf) counts as -87, that is 1.6e-38. Range reduction
 * and polynomial of the Cephes library's expf. Not libm's, and clamped as an integer (negative floats order backwards),
 * so that the loop around it becomes vector code. */
static inline float exp_neg(float x)
{
    union bits c = { .f = x }, low = { .f = -87.0f };
    c.i |= INT32_MIN; /* no change to x <= 0; a NaN becomes a large number */
    c.i = c.i < low.i ? c.i : low.i;
    int n = (int)(c.f * 1.44269504088896341f - 0.5f);
    float r = (c.f - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union bits two = { .i = (n + 127) * (1 << 23) };
    return p * two.f;
}

/* Sum of exp(x - max). +inf at the maximum counts as 1. */
static double sum_exp(const float *x, int n, float max)
{
    double sum = 0;
    if (isinf(max)) {
        for (int i = 0; i < n; i++)
            sum += x[i] == max;
        return sum;
    }
    int i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        float e[BLOCK];
        for (int j = 0; j < BLOCK; j++)
            e[j] = exp_neg(x[i + j] - max);
        for (int j = 0; j < BLOCK / 2; j++)
            e[j] += e[j + BLOCK / 2];
        for (int j = 0; j < BLOCK / 4; j++)
            e[j] += e[j + BLOCK / 4];
        sum += (double)((e[0] + e[1]) + (e[2] + e[3]));
    }
    for (; i < n; i++)
        sum += (double)exp_neg(x[i] - max);
    return sum;
}

static inline float weight(float logit, float max)
{
    float d = logit - max; /* NaN when both are +inf */
    return logit == max ? 1.0f : d > -87.0f ? exp_neg(d) : 0.0f;
}

/* ---- selection ------------------------------------------------------------------------------------------ */

static inline bool better(const struct cand *a, const struct cand *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static inline void swap(struct cand *a, struct cand *b)
{
    struct cand c = *a;
    *a = *b;
    *b = c;
}

/* Put the better ones of c[0..n) in front of a pivot; returns the pivot's place. */
static int split(struct cand *c, int n)
{
    int mid = n / 2, k = 0;
    if (better(&c[mid], &c[0]))
        swap(&c[mid], &c[0]);
    if (better(&c[n - 1], &c[mid]))
        swap(&c[n - 1], &c[mid]);
    if (better(&c[mid], &c[0]))
        swap(&c[mid], &c[0]);
    swap(&c[mid], &c[n - 1]); /* the median of three */
    for (int i = 0; i < n - 1; i++)
        if (better(&c[i], &c[n - 1]))
            swap(&c[i], &c[k++]);
    swap(&c[k], &c[n - 1]);
    return k;
}

/* The k best of c[0..n) to the front. */
static void select_k(struct cand *c, int n, int k)
{
    while (n > 1 && k > 0 && k < n) {
        int p = split(c, n);
        if (p >= k) {
            n = p;
        } else {
            c += p + 1;
            n -= p + 1;
            k -= p + 1;
        }
    }
}

/* The fewest best ones of c[0..n) whose weights reach `mass`, to the front; returns how many (all if they don't). */
static int select_mass(struct cand *c, int n, float max, double mass)
{
    int done = 0;
    while (n > 0) {
        int p = split(c + done, n);
        double sum = 0;
        for (int i = 0; i < p; i++)
            sum += (double)weight(c[done + i].logit, max);
        if (sum >= mass && p > 0) {
            n = p;
            continue;
        }
        sum += (double)weight(c[done + p].logit, max);
        done += p + 1;
        n -= p + 1;
        mass -= sum;
        if (mass <= 0)
            break;
    }
    return done;
}

/* The k best logits into s->cand. Ids come in rising order, so of equals at the threshold the earlier stay. */
static int take_top_k(struct sampler *s, const float *x, int k)
{
    int n = 0, all = s->n_vocab;
    float floor = -INFINITY;
    for (int i = 0; i < all; i += BLOCK) {
        int m = all - i < BLOCK ? all - i : BLOCK;
        if (m == BLOCK && !any_above(x + i, floor))
            continue;
        for (int j = i; j < i + m; j++) {
            if (!(x[j] > floor))
                continue;
            if (n == s->cap) {
                select_k(s->cand, n, k);
                n = k;
                floor = s->cand[0].logit;
                for (int q = 1; q < k; q++)
                    floor = s->cand[q].logit < floor ? s->cand[q].logit : floor;
                if (!(x[j] > floor))
                    continue;
            }
            s->cand[n++] = (struct cand){ x[j], j };
        }
    }
    if (n > k) {
        select_k(s->cand, n, k);
        n = k;
    }
    return n;
}

/* All that are at least `floor`, above -inf. */
static int take_above(struct sampler *s, const float *x, float floor)
{
    int n = 0;
    float below = nextafterf(floor, -INFINITY);
    for (int i = 0; i < s->n_vocab; i += BLOCK) {
        int m = s->n_vocab - i < BLOCK ? s->n_vocab - i : BLOCK;
        if (m == BLOCK && !any_above(x + i, below))
            continue;
        for (int j = i; j < i + m; j++)
            if (x[j] >= floor && x[j] > -INFINITY)
                s->cand[n++] = (struct cand){ x[j], j };
    }
    return n;
}

/* ---- the pick ------------------------------------------------------------------------------------------- */

/* Uniform in [0, 1): two rounds of the SplitMix64 finaliser over seed and counter. */
static double uniform(uint64_t seed, uint64_t i)
{
    uint64_t z = seed;
    for (int round = 0; round < 2; round++) {
        z += (i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

static int32_t draw(const struct cand *c, int n, float max, float temperature, double u)
{
    double sum = 0, acc = 0;
    int32_t last = -1;
    for (int i = 0; i < n; i++)
        sum += (double)weight((c[i].logit - max) / temperature, 0);
    for (int i = 0; i < n; i++) {
        double w = c[i].logit == max ? 1 : (double)weight((c[i].logit - max) / temperature, 0);
        if (w > 0)
            last = c[i].id;
        acc += w;
        if (acc > u * sum)
            break;
    }
    return last;
}

int32_t sampler_pick(struct sampler *s, float *logits, int i)
{
    const struct engine_sampling *set = &s->set;
    penalize(s, logits);
    int32_t best = arg_max(logits, s->n_vocab);
    if (best < 0 || !(set->temperature > 0))
        return best;
    float max = logits[best];
    float floor = set->min_p > 0 ? max + logf(set->min_p) : -INFINITY;
    double mass;
    int n;
    if (limits_k(set, s->n_vocab)) {
        n = take_top_k(s, logits, set->top_k);
        mass = 0;
        for (int j = 0; j < n && set->top_p < 1; j++)
            mass += (double)weight(s->cand[j].logit, max);
    } else {
        /* Both top_p and min_p keep the best so many: taking the fewer of the two first changes nothing, as long as
         * top_p's share is of the whole. */
        mass = set->top_p < 1 ? sum_exp(logits, s->n_vocab, max) : 0;
        n = take_above(s, logits, floor);
    }
    if (set->top_p < 1)
        n = select_mass(s->cand, n, max, mass * (double)set->top_p);
    int kept = 0;
    for (int j = 0; j < n; j++)
        if (s->cand[j].logit >= floor)
            s->cand[kept++] = s->cand[j];
    return draw(s->cand, kept, max, set->temperature, uniform(set->seed, (uint64_t)i));
}

void sampler_describe(const struct sampler *s, int i, struct ops_sample *out)
{
    const struct engine_sampling *set = &s->set;

    *out = (struct ops_sample){
        .top_k = limits_k(set, s->n_vocab) ? set->top_k : 0, .temperature = set->temperature, .top_p = set->top_p,
        .min_p = set->min_p, .repeat = set->repeat_penalty, .presence = set->presence_penalty,
        .frequency = set->frequency_penalty, .u = uniform(set->seed, (uint64_t)i) };
    for (int k = 0; penalizes(set) && k < s->n_recent; k++) {
        int32_t id = s->recent[k];
        int at = 0;
        if (id < 0 || id >= s->n_vocab)
            continue;
        while (at < out->n_pen && out->pen[at].token != id)
            at++;
        out->pen[at].token = id;
        out->pen[at].count += 1;
        out->n_pen += at == out->n_pen;
    }
}

/* ---- log-probabilities ---------------------------------------------------------------------------------- */

static double full_lse(const float *logits, int n_vocab, float max)
{
    return (double)max + log(sum_exp(logits, n_vocab, max));
}

float sampler_lse(const float *logits, int n_vocab)
{
    int32_t best = arg_max(logits, n_vocab);
    if (best < 0)
        return LOWEST;
    return (float)full_lse(logits, n_vocab, logits[best]);
}

static float log_prob(float logit, double lse)
{
    if (!(logit > -INFINITY) || !(lse > (double)LOWEST))
        return LOWEST;
    if (isinf(logit))
        return 0;
    float lp = (float)((double)logit - lse);
    return lp > LOWEST ? lp : LOWEST;
}

/* Insert into the descending list of n; the last falls out. Ids come in rising order. */
static void keep_best(int32_t *ids, float *v, int n, int filled, int32_t id, float x)
{
    int i = filled < n ? filled : n - 1;
    for (; i > 0 && x > v[i - 1]; i--) {
        v[i] = v[i - 1];
        ids[i] = ids[i - 1];
    }
    v[i] = x;
    ids[i] = id;
}

/* The n best, NaN as -inf. */
static void top_n(const float *x, int n_vocab, int n, int32_t *ids, float *v)
{
    for (int i = 0; i < n_vocab; i += BLOCK) {
        int m = n_vocab - i < BLOCK ? n_vocab - i : BLOCK;
        if (i >= n && m == BLOCK && !any_above(x + i, v[n - 1]))
            continue;
        for (int j = i; j < i + m; j++) {
            float f = x[j] > -INFINITY ? x[j] : -INFINITY;
            if (j < n || f > v[n - 1])
                keep_best(ids, v, n, j < n ? j : n, j, f);
        }
    }
}

float sampler_logprobs(const float *logits, int n_vocab, int32_t token, int n, int32_t *ids, float *lp)
{
    int32_t best = arg_max(logits, n_vocab);
    double lse = best < 0 ? (double)LOWEST : full_lse(logits, n_vocab, logits[best]);
    if (n > 0)
        top_n(logits, n_vocab, n, ids, lp);
    for (int i = 0; i < n; i++)
        lp[i] = log_prob(lp[i], lse);
    return token >= 0 && token < n_vocab ? log_prob(logits[token], lse) : LOWEST;
}
