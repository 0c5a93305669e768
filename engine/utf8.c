/* utf8.c - checking and cutting UTF-8 (RFC 3629: no over-long forms, no surrogates, at most U+10FFFF). */
#include "config.h"

#include <string.h>

#include "engine/tok_int.h"

#define REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

/* Length of the valid character at s; 0: its first byte is wrong; -k: k bytes of a possible character and then the end. */
static int char_at(const unsigned char *s, size_t len)
{
    unsigned c = s[0], lo = 0x80, hi = 0xbf;
    int n;
    if (c < 0x80)
        return 1;
    if (c < 0xc2 || c > 0xf4)
        return 0;
    n = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    if (c == 0xe0)
        lo = 0xa0;
    else if (c == 0xed)
        hi = 0x9f;
    else if (c == 0xf0)
        lo = 0x90;
    else if (c == 0xf4)
        hi = 0x8f;
    for (int i = 1; i < n; i++) {
        if ((size_t)i >= len)
            return -i;
        if (s[i] < lo || s[i] > hi)
            return 0;
        lo = 0x80;
        hi = 0xbf;
    }
    return n;
}

int utf8_decode(const char *s, size_t len, uint32_t *cp)
{
    const unsigned char *u = (const unsigned char *)s;
    int n = char_at(u, len);
    switch (n) {
    case 1:
        *cp = u[0];
        return 1;
    case 2:
        *cp = (u[0] & 0x1fu) << 6 | (u[1] & 0x3fu);
        return 2;
    case 3:
        *cp = (u[0] & 0x0fu) << 12 | (u[1] & 0x3fu) << 6 | (u[2] & 0x3fu);
        return 3;
    case 4:
        *cp = (u[0] & 0x07u) << 18 | (u[1] & 0x3fu) << 12 | (u[2] & 0x3fu) << 6 | (u[3] & 0x3fu);
        return 4;
    default:
        return 0;
    }
}

bool utf8_valid(const char *s, size_t len, size_t *bad)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t i = 0;
    while (i < len) {
        uint64_t w;
        while (len - i >= 8 && (memcpy(&w, u + i, 8), !(w & 0x8080808080808080u)))
            i += 8;
        if (i >= len)
            break;
        int n = char_at(u + i, len - i);
        if (n <= 0) {
            if (bad)
                *bad = i;
            return false;
        }
        i += (size_t)n;
    }
    return true;
}

size_t utf8_whole(const char *s, size_t len)
{
    const unsigned char *u = (const unsigned char *)s;
    /* An unfinished character is at most the last three bytes. */
    for (size_t back = 1; back <= 3 && back <= len; back++) {
        const unsigned char *p = u + len - back;
        if ((*p & 0xc0) == 0x80)
            continue;
        return char_at(p, back) < 0 ? len - back : len;
    }
    return len;
}

size_t utf8_sanitize(const char *src, size_t len, char *dst)
{
    const unsigned char *u = (const unsigned char *)src;
    size_t o = 0;
    for (size_t i = 0; i < len;) {
        int n = char_at(u + i, len - i);
        if (n > 0) {
            memcpy(dst + o, src + i, (size_t)n);
            o += (size_t)n;
            i += (size_t)n;
        } else {
            memcpy(dst + o, REPLACEMENT, 3);
            o += 3;
            i++;
        }
    }
    return o;
}
