/* chat_int.h - what chat.c (rendering, encoding) and chat_detect.c (recognising) share. Private to them. */
#ifndef SKVD_ENGINE_CHAT_INT_H
#define SKVD_ENGINE_CHAT_INT_H

#include "engine/chat.h"

enum chat_family {
    CHAT_CHATML = 0,
    CHAT_LLAMA2,
    CHAT_LLAMA3,
    CHAT_MISTRAL,
    CHAT_GEMMA,
    CHAT_ZEPHYR,
    CHAT_PHI3,
    CHAT_FAMILIES
};

/* Strings are malloc'd. */
struct chat_template {
    enum chat_family family;
    char *bos, *eos;      /* texts of the tokens, "" where there is none */
    bool has_bos;         /* the template begins with BOS */
    char *default_system; /* chatml: text of the system turn that is put in when none leads; or NULL */
    char *preface;        /* llama3: what stands in front of every system text (3.1: dates); or NULL */
    bool any_role, asks_roles; /* chatml, llama3: a turn's header is its role, whatever it is; some are treated apart */
    char *open, *close;   /* mistral: around a user's text */
    bool answer_blank, answer_trim, eos_blank, system_last; /* mistral: variants */
    bool user_opens;      /* phi3: a user's turn opens the assistant's */
    bool eos_at_end;      /* phi3: without a generation prompt the text ends with EOS */
    bool skip_empty_system; /* phi3 */
};

/* The family of a template text, -1: not known, or CHAT_NO_MEMORY. */
#define CHAT_NO_MEMORY (-2)
int chat_detect(const char *s, size_t len);
/* Fill in the details that the template text has. -1: out of memory. */
int chat_details(struct chat_template *t, const char *s, size_t len);

/* A NUL-terminated copy of len bytes that need not end in one; malloc'd, NULL without memory. (strndup would do, but looks for
 * the end past what it may read, or so strict checkers say.) */
char *chat_copy(const char *s, size_t len);

#endif
