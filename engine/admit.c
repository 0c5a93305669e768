/* admit.c - whose turn it is: places in the step, lanes and pages, shared out between users.
 *
 * A lane and all pages that a sequence can need at most are promised when it is admitted, so a running one never loses memory.
 * Order: the user with the fewest places, then the one served longest ago; of one user's, priority, then arrival. What does
 * not fit now waits; smaller ones may go first, but only BYPASS_MAX times, so that it is not starved; from then on only users
 * who run less than its own go.
 *
 * Places (max_batch) are shared in time: while another user waits who has fewer, a sequence of the user with the most rests. It
 * keeps its lane and pages, and goes on where it was. Memory can't be lent that way, so one who runs something leaves the last
 * part of the pool and of the lanes to the others: room for one request (kv_reserve) to somebody who was never here, more where
 * several users come. Pressure falls on idle sessions of the user with the most, least recently used first; another's go only
 * above an even share, and for one who holds nothing at all those too that wait to go on.
 */
#include <stdio.h>
#include <string.h>

#include "engine/core.h"

#define BYPASS_MAX   32
#define BLOCKED_MAX  16 /* that are tried in a round, at most */
#define TURN_STEPS   32 /* tokens before a place changes hands between users who can't all have as many */
#define POOL_PART    8  /* one part in so many of the pool is left to other users */
#define LANE_PART    16 /* and of the lanes */
#define LANES_MANY   8  /* from so many on, one is left to a user who was never here */
#define RECENT_US    ((int64_t)3600 * 1000000) /* so long a user is reckoned with */
#define PER_MILLE    1000

/* ---- who has what ------------------------------------------------------------------------------ */

static struct usage *usage_of(const struct seq *s)
{
    return &s->user->usage;
}

static void share_add(struct engine *e, const struct seq *s)
{
    struct usage *u = usage_of(s);

    u->active += seq_active(s);
    u->running += seq_running(s);
    if (s->lane < 0)
        return;
    e->n_share += u->lanes++ == 0;
    u->pages += s->reserved;
    u->running_pages += seq_running(s) ? s->reserved : 0;
}

/* Returns how many have a place. */
static int count_shares(struct engine *e)
{
    const struct seq *s;
    int active = 0;

    TAILQ_FOREACH(s, &e->seqs, link)
        *usage_of(s) = (struct usage){ 0 };
    e->n_share = 0;
    TAILQ_FOREACH(s, &e->seqs, link) {
        share_add(e, s);
        active += seq_active(s);
    }
    return active;
}

void admit_seen(struct engine *e, uint32_t uid)
{
    struct recent_user *r = e->recent;

    if (!r[0].is || r[0].uid != uid)
        r[1] = r[0];
    r[0] = (struct recent_user){ true, uid, core_now_us(e) };
}

/* Does anybody else ask for something these days? */
static bool others_about(const struct engine *e, uint32_t uid)
{
    for (int i = 0; i < 2; i++)
        if (e->recent[i].is && e->recent[i].uid != uid && core_now_us(e) - e->recent[i].at < RECENT_US)
            return true;
    return false;
}

/* ---- memory ---------------------------------------------------------------------------------------- */

/* What idle sessions that are about to end give back. */
struct freed {
    int lanes;
    int64_t pages;
};

/* The largest loan that a sequence which is admitted but not prefilled may still ask for. */
static int64_t open_transient(const struct engine *e)
{
    const struct seq *s;
    int64_t most = 0;

    TAILQ_FOREACH(s, &e->seqs, link)
        if ((s->state == SEQ_READY || s->state == SEQ_PREFILL) && s->transient > most)
            most = s->transient;
    return most;
}

static int64_t more_pages(const struct engine *e, const struct seq *s)
{
    int64_t more = sched_wanted_pages(e, s) - s->reserved;

    return more > 0 ? more : 0;
}

int64_t core_reserve(const struct engine *e, int64_t pages)
{
    int64_t context = e->model.src.dims.max_context, n = e->cfg.kv_reserve < context ? e->cfg.kv_reserve : context;
    int64_t one = n > 0 ? kvplan_pages(&e->plan, n) + kvplan_transient(&e->plan, n) : 0;

    return one < pages / POOL_PART ? one : pages / POOL_PART;
}

/* What the user of s leaves to others. */
static int64_t left_pages(const struct engine *e, const struct seq *s)
{
    if (usage_of(s)->running == 0)
        return 0;
    return others_about(e, s->uid) ? pages_total(e->pages) / POOL_PART : core_reserve(e, core_pages(e));
}

static int left_lanes(const struct engine *e, const struct seq *s)
{
    int all = pages_lanes(e->pages);

    if (usage_of(s)->lanes == 0)
        return 0;
    if (others_about(e, s->uid))
        return (all + LANE_PART - 1) / LANE_PART;
    return e->cfg.kv_reserve > 0 && all >= LANES_MANY;
}

static bool fits(struct engine *e, const struct seq *s, const struct freed *freed)
{
    int64_t loan = open_transient(e), pages = pages_total(e->pages) - left_pages(e, s);
    int lanes = pages_lanes_free(e->pages) + freed->lanes - left_lanes(e, s);

    if (s->transient > loan)
        loan = s->transient;
    return pages_reserved(e->pages) - freed->pages + more_pages(e, s) + loan <= pages && (s->lane >= 0 || lanes > 0);
}

static int64_t use(const struct engine *e, int64_t pages, int lanes)
{
    int64_t p = pages * PER_MILLE / pages_total(e->pages), l = (int64_t)lanes * PER_MILLE / pages_lanes(e->pages);

    return p > l ? p : l;
}

/* How much its user has, of pages or lanes, whichever is more; -1 when that must not shrink for `asks`: another user's, and not
 * above an even share. */
static int64_t claim(struct engine *e, const struct seq *s, const struct seq *asks)
{
    const struct usage *u = usage_of(s), *mine = usage_of(asks);

    if (u == mine)
        return use(e, u->pages + more_pages(e, asks), u->lanes + (asks->lane < 0));
    int64_t has = use(e, u->pages, u->lanes);
    return has > PER_MILLE / (e->n_share + (mine->lanes == 0)) ? has : -1;
}

/* A session that does not run, so that its memory can be had for `asks`: an idle one; for a user with nothing also one whose next
 * request waits. */
static bool may_go(const struct seq *s, const struct seq *asks)
{
    if (s->doomed || s->lane < 0)
        return false;
    return s->state == SEQ_IDLE || (s->state == SEQ_WAITING && s->user != asks->user && usage_of(asks)->lanes == 0);
}

static bool goes_before(const struct seq *a, const struct seq *b)
{
    return a->state == b->state ? a->t_idle < b->t_idle : a->state == SEQ_IDLE;
}

/* The session that goes next. */
static struct seq *next_to_go(struct engine *e, const struct seq *asks)
{
    struct seq *s, *best = NULL;
    int64_t most = -1;

    TAILQ_FOREACH(s, &e->seqs, link) {
        if (!may_go(s, asks))
            continue;
        int64_t c = claim(e, s, asks);
        if (c > most || (c == most && best != NULL && goes_before(s, best))) {
            most = c;
            best = s;
        }
    }
    return best;
}

/* A session's request that waits is failed, and the session with it. */
static void give_up(struct engine *e, struct seq *s)
{
    char name[sizeof s->session];

    memcpy(name, s->session, sizeof name);
    s->session[0] = '\0'; /* so that it is not kept */
    sched_fail(e, s, SKV_NOT_FOUND,
               "session \"%s\" had to be ended: its memory was needed (--kv-memory decides); send the whole conversation again",
               name);
}

/* Sessions go until s fits, but none in vain. */
static bool make_room(struct engine *e, struct seq *s)
{
    struct freed freed = { 0, 0 };
    struct seq *i, *next;
    bool enough;

    while (!(enough = fits(e, s, &freed)) && (i = next_to_go(e, s)) != NULL) {
        struct usage *u = usage_of(i);
        i->doomed = true;
        freed.lanes++;
        freed.pages += i->reserved;
        u->lanes--;
        u->pages -= i->reserved;
    }
    if (freed.lanes == 0)
        return enough;
    for (i = TAILQ_FIRST(&e->seqs); i != NULL; i = next) {
        next = TAILQ_NEXT(i, link);
        if (!i->doomed)
            continue;
        i->doomed = false;
        usage_of(i)->lanes++;
        usage_of(i)->pages += i->reserved;
        if (enough && i->state == SEQ_IDLE)
            sched_drop_session(e, i, true);
        else if (enough)
            give_up(e, i);
    }
    if (enough)
        count_shares(e);
    return enough;
}

static bool take_room(struct engine *e, struct seq *s)
{
    int64_t more = more_pages(e, s);

    if (!make_room(e, s) || !pages_reserve(e->pages, more))
        return false;
    if (s->lane < 0)
        s->lane = pages_lane_get(e->pages); /* there is one: it was just counted */
    s->reserved += more;
    s->state = SEQ_READY;
    core_waited(e, s->uid);
    return true;
}

/* Nothing runs and the first in turn does not fit: waiting sessions hold what it needs, or idle ones that stay. The last
 * waiting one that may go is given up, said so to its client; if there is none, the first is refused. */
static void break_standstill(struct engine *e, struct seq *first)
{
    struct seq *s;

    TAILQ_FOREACH_REVERSE(s, &e->seqs, seq_list, link) {
        if (s->state != SEQ_WAITING || s->lane < 0 || s == first || claim(e, s, first) < 0)
            continue;
        give_up(e, s);
        return;
    }
    sched_fail(e, first, SKV_OVERLOADED, "%d prompt and %d answer tokens need more KV memory than other users' sessions leave: "
               "try again later, or with a smaller request", first->n_prompt, first->n_max);
}

/* ---- turns ----------------------------------------------------------------------------------------------- */

static bool wants_place(const struct seq *s)
{
    return !s->paused && (s->state == SEQ_WAITING || (s->resting && seq_running(s)));
}

/* One that was passed often enough stops all who run as much as its own user. */
static bool stopped(const struct seq *s, struct seq *const *blocked, int n)
{
    for (int i = 0; i < n; i++)
        if (blocked[i] == s || (blocked[i]->bypassed >= BYPASS_MAX && s->state == SEQ_WAITING &&
                                usage_of(s)->running_pages >= usage_of(blocked[i])->running_pages))
            return true;
    return false;
}

/* Places that its user has, or would have had in this round if there had been room: so other users' requests are tried before
 * its user's next one. */
static int places(const struct seq *s, struct seq *const *blocked, int n)
{
    int sum = usage_of(s)->active;

    for (int i = 0; i < n; i++)
        sum += usage_of(blocked[i]) == usage_of(s);
    return sum;
}

/* The next in turn. */
static struct seq *best_waiting(struct engine *e, struct seq *const *blocked, int n)
{
    struct seq *s, *best = NULL;
    int best_places = 0;
    uint64_t best_turn = 0;

    TAILQ_FOREACH(s, &e->seqs, link) {
        if (!wants_place(s) || stopped(s, blocked, n))
            continue;
        int has = places(s, blocked, n);
        uint64_t turn = s->user->turn;
        if (best == NULL || has < best_places || (has == best_places && turn < best_turn) ||
            (usage_of(s) == usage_of(best) && s->req->priority > best->req->priority)) {
            best = s;
            best_places = has;
            best_turn = turn;
        }
    }
    return best;
}

static bool rests_before(const struct seq *a, const struct seq *b)
{
    if ((a->state == SEQ_PREFILL) != (b->state == SEQ_PREFILL))
        return b->state == SEQ_PREFILL;
    return a->req->priority < b->req->priority || (a->req->priority == b->req->priority && a->n_turn > b->n_turn);
}

/* Who gives up its place to s: nobody (NULL) where that would only turn the difference round, unless it had its turn. Of the
 * user with the most: the least important, then the longest at work. A prompt that is being read is read on to its end, and is
 * asked last. */
static struct seq *who_rests(struct engine *e, const struct seq *s)
{
    const struct usage *mine = usage_of(s), *most = NULL;
    struct seq *t, *best = NULL;

    TAILQ_FOREACH(t, &e->seqs, link) {
        const struct usage *u = usage_of(t);
        if (u == mine || !seq_active(t))
            continue;
        if (t->paused) /* it uses its place for nothing */
            return t;
        if (u->active < mine->active + (t->n_turn >= TURN_STEPS ? 1 : 2))
            continue;
        if (best == NULL || u->active > most->active || (u->active == most->active && rests_before(t, best))) {
            best = t;
            most = u;
        }
    }
    return best;
}

static void note_bypass(struct seq *const *blocked, int n)
{
    for (int i = 0; i < n; i++)
        blocked[i]->bypassed++;
}

/* Room for one may have cost others of those that were tried their session: they are gone. */
static int still_there(const struct engine *e, struct seq **blocked, int n)
{
    const struct seq *s;
    int kept = 0;

    for (int i = 0; i < n; i++)
        TAILQ_FOREACH(s, &e->seqs, link)
            if (s == blocked[i]) {
                blocked[kept++] = blocked[i];
                break;
            }
    return kept;
}

static bool anything_runs(const struct engine *e)
{
    const struct seq *s;

    TAILQ_FOREACH(s, &e->seqs, link)
        if (seq_running(s))
            return true;
    return false;
}

void sched_admit(struct engine *e)
{
    struct seq *blocked[BLOCKED_MAX], *s, *rests;
    int n_blocked = 0, active = count_shares(e);

    for (;;) {
        s = n_blocked < BLOCKED_MAX ? best_waiting(e, blocked, n_blocked) : NULL;
        if (s == NULL) { /* no other may go: there is none, or one was passed often enough */
            if (n_blocked == 0 || anything_runs(e))
                return;
            break_standstill(e, blocked[0]);
            n_blocked = 0;
            active = count_shares(e);
            continue;
        }
        rests = active >= core_batch(e) ? who_rests(e, s) : NULL;
        if (active >= core_batch(e) && rests == NULL)
            return;
        if (s->state == SEQ_WAITING && !take_room(e, s)) {
            blocked[n_blocked++] = s;
            continue;
        }
        n_blocked = still_there(e, blocked, n_blocked);
        if (!s->resting)
            note_bypass(blocked, n_blocked);
        s->resting = false;
        s->n_turn = 0;
        s->user->turn = e->turn += 2;
        if (rests != NULL)
            rests->resting = true;
        active = count_shares(e);
    }
}
