#include "protocol/scan.h"

#include <string.h>

void scan_utf8_init(struct scan_utf8 *u)
{
    memset(u, 0, sizeof *u);
}

/* A lead byte: how many follow, and the range of the first of them (RFC 3629, section 4). */
static void utf8_lead(struct scan_utf8 *u, uint8_t c)
{
    u->lo = 0x80;
    u->hi = 0xbf;
    if (c >= 0xc2 && c <= 0xdf) {
        u->need = 1;
    } else if (c >= 0xe0 && c <= 0xef) {
        u->need = 2;
        if (c == 0xe0)
            u->lo = 0xa0;
        else if (c == 0xed)
            u->hi = 0x9f;
    } else if (c >= 0xf0 && c <= 0xf4) {
        u->need = 3;
        if (c == 0xf0)
            u->lo = 0x90;
        else if (c == 0xf4)
            u->hi = 0x8f;
    } else {
        u->bad = true;
    }
}

void scan_utf8_feed(struct scan_utf8 *u, const uint8_t *p, size_t n)
{
    size_t i = 0;

    while (i < n && !u->bad) {
        if (u->need == 0) {
            uint64_t w;

            while (n - i >= sizeof w && (memcpy(&w, p + i, sizeof w), (w & 0x8080808080808080u) == 0))
                i += sizeof w;
            if (i == n)
                return;
            if (p[i] >= 0x80)
                utf8_lead(u, p[i]);
        } else {
            if (p[i] < u->lo || p[i] > u->hi)
                u->bad = true;
            u->need--;
            u->lo = 0x80;
            u->hi = 0xbf;
        }
        i++;
    }
}

bool scan_utf8_valid(const char *p, size_t n)
{
    struct scan_utf8 u;

    scan_utf8_init(&u);
    scan_utf8_feed(&u, (const uint8_t *)p, n);
    return !u.bad && u.need == 0;
}

int scan_utf8_next(const char *s, size_t n, uint32_t *cp)
{
    const unsigned char *p = (const unsigned char *)s;
    int more = p[0] < 0x80 ? 0 : p[0] < 0xc2 ? -1 : p[0] < 0xe0 ? 1 : p[0] < 0xf0 ? 2 : p[0] < 0xf5 ? 3 : -1;

    if (more < 0 || (size_t)more >= n)
        return -1;
    *cp = more == 0 ? p[0] : p[0] & (0x3f >> more);
    for (int i = 1; i <= more; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return -1;
        *cp = *cp << 6 | (p[i] & 0x3f);
    }
    if ((more == 2 && *cp < 0x800) || (more == 3 && (*cp < 0x10000 || *cp > 0x10ffff)) || (*cp >= 0xd800 && *cp < 0xe000))
        return -1;
    return more + 1;
}

bool scan_utf8_control(uint32_t cp)
{
    return cp < 0x20 || (cp >= 0x7f && cp < 0xa0);
}

bool scan_utf8_moves(uint32_t cp)
{
    return (cp >= 0x2028 && cp <= 0x202e) || (cp >= 0x2066 && cp <= 0x2069);
}

void scan_init(struct scan *s, const struct scan_limits *lim)
{
    static const struct scan_limits dflt = { SCAN_FRAME_BYTES_DEFAULT, SCAN_DEPTH_DEFAULT, SCAN_NODES_DEFAULT };
    struct scan_limits l = lim != NULL ? *lim : dflt;

    memset(s, 0, sizeof *s);
    s->lim = l;
    if (s->lim.depth > SCAN_DEPTH_CAP)
        s->lim.depth = SCAN_DEPTH_CAP;
    s->owed = 1;
}

/* Bytes that may still be declared: what the frame limit leaves once each owed element has its one byte. */
static uint64_t room(const struct scan *s)
{
    uint64_t taken = (uint64_t)s->pos + s->owed;

    return taken >= s->lim.frame_bytes ? 0 : s->lim.frame_bytes - taken;
}

static int too_large(const struct scan *s, uint64_t declared, const char *what, struct skv_error *err)
{
    return skv_fail(err, SKV_TOO_LARGE,
                    "byte %zu of the message declares %llu %s, more than fits into a message (frame-limit is %zu "
                    "bytes, %llu of them are left)",
                    s->pos, (unsigned long long)declared, what, s->lim.frame_bytes, (unsigned long long)room(s));
}

/* Bytes of an item's head, the first included; 0 for the byte that MessagePack never uses. */
static unsigned head_size(uint8_t c)
{
    static const uint8_t size[32] = {
        /* c0 nil, (never), false, true */ 1, 0, 1, 1,
        /* c4 bin 8 16 32 */ 2, 3, 5,
        /* c7 ext 8 16 32: the type byte counts as payload */ 2, 3, 5,
        /* ca float 32 64 */ 5, 9,
        /* cc uint 8..64 */ 2, 3, 5, 9,
        /* d0 int 8..64 */ 2, 3, 5, 9,
        /* d4 fixext 1 2 4 8 16 */ 1, 1, 1, 1, 1,
        /* d9 str 8 16 32 */ 2, 3, 5,
        /* dc array 16 32 */ 3, 5,
        /* de map 16 32 */ 3, 5,
    };

    return c >= 0xc0 && c <= 0xdf ? size[c - 0xc0] : 1;
}

static uint64_t head_number(const struct scan *s)
{
    uint64_t v = 0;

    for (unsigned i = 1; i < s->head_need; i++)
        v = v << 8 | s->head[i];
    return v;
}

/* An element is over: leave the containers that it completes. True: the frame is complete. */
static bool item_done(struct scan *s)
{
    while (s->depth > 0) {
        if (--s->left[s->depth - 1] > 0)
            return false;
        s->depth--;
    }
    return true;
}

enum open_result { OPEN_FAIL, OPEN_ITEM_DONE, OPEN_GOES_ON };

static enum open_result open_container(struct scan *s, uint64_t count, struct skv_error *err)
{
    if (s->depth >= s->lim.depth) {
        skv_fail(err, SKV_BAD_REQUEST, "the message nests deeper than %u levels (nesting-limit)", s->lim.depth);
        return OPEN_FAIL;
    }
    if (count > room(s)) {
        too_large(s, count, "elements", err);
        return OPEN_FAIL;
    }
    if (count > s->lim.nodes || s->nodes > s->lim.nodes - count) {
        skv_fail(err, SKV_TOO_LARGE, "the message has more than %u elements", s->lim.nodes);
        return OPEN_FAIL;
    }
    if (count == 0)
        return OPEN_ITEM_DONE;
    s->nodes += (uint32_t)count;
    s->owed += count;
    s->left[s->depth++] = count;
    return OPEN_GOES_ON;
}

static enum open_result open_payload(struct scan *s, uint64_t len, bool is_text, struct skv_error *err)
{
    if (len > room(s)) {
        too_large(s, len, "bytes", err);
        return OPEN_FAIL;
    }
    s->payload = len;
    s->is_text = is_text;
    scan_utf8_init(&s->utf8);
    return len == 0 ? OPEN_ITEM_DONE : OPEN_GOES_ON;
}

/* The head of an item is whole: what does it open? */
static enum open_result open_item(struct scan *s, struct skv_error *err)
{
    uint8_t c = s->head[0];

    if (c >= 0x80 && c <= 0x8f)
        return open_container(s, 2 * (uint64_t)(c & 0x0f), err);
    if (c >= 0x90 && c <= 0x9f)
        return open_container(s, c & 0x0f, err);
    if (c >= 0xa0 && c <= 0xbf)
        return open_payload(s, c & 0x1f, true, err);
    switch (c) {
    case 0xc4:
    case 0xc5:
    case 0xc6:
        return open_payload(s, head_number(s), false, err);
    case 0xc7:
    case 0xc8:
    case 0xc9:
        return open_payload(s, head_number(s) + 1, false, err);
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        return open_payload(s, (1u << (c - 0xd4)) + 1u, false, err);
    case 0xd9:
    case 0xda:
    case 0xdb:
        return open_payload(s, head_number(s), true, err);
    case 0xdc:
    case 0xdd:
        return open_container(s, head_number(s), err);
    case 0xde:
    case 0xdf:
        return open_container(s, 2 * head_number(s), err);
    default:
        return OPEN_ITEM_DONE; /* a number, nil or a boolean: its head is all of it */
    }
}

/* The first byte of an item. */
static int begin_head(struct scan *s, uint8_t c, struct skv_error *err)
{
    s->head_need = head_size(c);
    if (s->head_need == 0)
        return skv_fail(err, SKV_BAD_REQUEST, "byte %zu of the message is 0xc1, which MessagePack never uses", s->pos);
    /* The shape of MessagePack-RPC is known from the first byte, so that a stranger's HTTP request or line of text is
     * told at once; the long forms of an array are odd for three elements, but allowed. */
    if (s->pos == 0 && c != 0x93 && c != 0x94 && c != 0xdc && c != 0xdd)
        return skv_fail(err, SKV_BAD_REQUEST,
                        "the stream is not MessagePack-RPC: a message is an array of 4 elements (request, response) "
                        "or 3 (notification), this one begins with the byte 0x%02x",
                        c);
    s->owed--;
    if (s->head_need > room(s))
        return too_large(s, s->head_need, "bytes", err);
    return 0;
}

static int check_root(const struct scan *s, struct skv_error *err)
{
    if (s->pos == s->head_need && s->left[0] != 3 && s->left[0] != 4)
        return skv_fail(err, SKV_BAD_REQUEST,
                        "the stream is not MessagePack-RPC: a message is an array of 4 elements (request, response) "
                        "or 3 (notification), this one has %llu",
                        (unsigned long long)s->left[0]);
    return 0;
}

/* Take payload bytes; returns how many. */
static size_t eat_payload(struct scan *s, const uint8_t *p, size_t n)
{
    size_t m = s->payload < n ? (size_t)s->payload : n;

    if (s->is_text)
        scan_utf8_feed(&s->utf8, p, m);
    s->payload -= m;
    s->pos += m;
    if (s->payload == 0 && s->is_text && (s->utf8.bad || s->utf8.need > 0))
        s->bad_utf8 = true;
    return m;
}

enum scan_status scan_feed(struct scan *s, const uint8_t *p, size_t n, size_t *used, struct skv_error *err)
{
    size_t i = 0;

    *used = 0;
    while (i < n) {
        enum open_result r;

        if (s->payload > 0) {
            i += eat_payload(s, p + i, n - i);
            r = s->payload > 0 ? OPEN_GOES_ON : OPEN_ITEM_DONE;
        } else {
            if (s->head_len == 0 && begin_head(s, p[i], err) != 0)
                return SCAN_FAIL;
            s->head[s->head_len++] = p[i++];
            s->pos++;
            if (s->head_len < s->head_need)
                continue;
            r = open_item(s, err);
            s->head_len = 0;
            if (r == OPEN_FAIL || check_root(s, err) != 0)
                return SCAN_FAIL;
        }
        if (r == OPEN_ITEM_DONE && item_done(s)) {
            *used = i;
            return SCAN_DONE;
        }
    }
    *used = i;
    return SCAN_MORE;
}
