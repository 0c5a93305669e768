/* The table of settings. A row's documentation is also in skvd(8) or skvd.conf(5); a test compares the names. */
#include <limits.h>

#include "daemon/config.h"

static const char *const log_levels[] = { "error", "warning", "info", "debug", NULL };
static const char *const computes[] = { "auto", "f32", NULL };
static const char *const pool_kinds[] = { "auto", "avg", "max", NULL };

#define AT(m)   offsetof(struct config, m)
#define LIVE    (OPTION_FILE | OPTION_LIVE)
#define ENGINE_LIVE (OPTION_FILE | OPTION_LIVE | OPTION_ENGINE)
#define TERA    1e15
#define DAY_MS  86400e3

#define STR(n, a, m, d, text) { .name = n, .arg = a, .type = OPTION_STRING, .where = OPTION_FILE, .off = AT(m), .dflt = d, .doc = text }
#define NUM(n, a, t, w, m, lo, hi, d, text) \
    { .name = n, .arg = a, .type = t, .where = w, .off = AT(m), .min = lo, .max = hi, .dflt = d, .doc = text }
#define ENG(n, a, t, m, lo, hi, en, text) \
    { .name = n, .arg = a, .type = t, .where = ENGINE_LIVE, .off = AT(engine.m), .min = lo, .max = hi, .engine_name = en, .doc = text }
#define CMD(n, a, t, m, text) { .name = n, .arg = a, .type = t, .off = AT(m), .max = 1, .doc = text }

const struct option_row config_options[] = {
    /* the model and the engine */
    STR("model", "FILE", engine.model, NULL, "the model, a GGUF file"),
    STR("backend", "NAME", engine.backend, NULL, "what computes: cpu, cuda or auto"),
    NUM("tp", "N", OPTION_INT, OPTION_FILE, engine.tp, 1, 8, NULL, "GPUs that share the model (tensor parallel)"),
    NUM("tp-exact", "on|off", OPTION_BOOL, OPTION_FILE, engine.tp_exact, 0, 1, NULL, "the same bits over any number of GPUs; slower"),
    STR("isa", "NAME", engine.isa, NULL, "the CPU kernels: scalar, avx2, avx512; the best if not given"),
    { .name = "compute", .arg = "KIND", .type = OPTION_CHOICE, .where = OPTION_FILE, .off = AT(compute), .dflt = "auto",
      .choices = computes, .doc = "f32: activations and KV cache in 32-bit floats, exact and slower" },
    STR("chat-template", "NAME", engine.chat_template, NULL, "lay out messages as this family does, whatever the file says"),
    NUM("threads", "N", OPTION_INT, OPTION_FILE, engine.threads, 0, 1024, NULL, "threads that compute; 0: one a core"),
    NUM("context", "N", OPTION_INT, OPTION_FILE, engine.context, 0, 1 << 24, NULL, "positions of a sequence; 0: the model's"),
    NUM("max-sequences", "N", OPTION_INT, OPTION_FILE, engine.max_sequences, 1, 65536, NULL, "sequences and idle sessions at once"),
    ENG("max-batch", "N", OPTION_INT, max_batch, 1, 4096, "max_batch", "sequences that decode in one step"),
    NUM("queue-length", "N", OPTION_INT, OPTION_FILE, engine.queue_len, 1, 1 << 20, NULL, "requests that may wait"),
    ENG("step-time", "MS", OPTION_INT, step_ms, 1, 10000, "step_ms", "ms that a step may take while prompts are read and others decode"),
    ENG("session-idle", "TIME", OPTION_SECONDS, session_idle_s, 0, INT_MAX / 1000, "session_idle_s", "idle sessions end after this; 0: never"),
    /* the KV cache */
    NUM("kv-memory", "SIZE", OPTION_SIZE, OPTION_FILE, engine.kv_memory, 0, TERA, NULL, "memory for the KV cache; 0: a share of what is free"),
    STR("kv-policy", "NAME", engine.kv.policy, NULL, "which KV pairs stay: full, streaming, snapkv, pyramid, h2o, tova, article, sparse"),
    NUM("kv-budget", "N", OPTION_INT, OPTION_FILE, engine.kv.budget, 16, 1 << 24, NULL, "KV pairs kept a head"),
    NUM("kv-sink", "N", OPTION_INT, OPTION_FILE, engine.kv.sink, 0, 1024, NULL, "first tokens that always stay"),
    NUM("kv-recent", "N", OPTION_INT, OPTION_FILE, engine.kv.recent, 1, 65536, NULL, "last tokens that always stay"),
    NUM("kv-alpha", "N", OPTION_INT, OPTION_FILE, engine.kv.alpha, 0, 65536, NULL, "last queries of the prompt that score it"),
    NUM("kv-pool", "N", OPTION_INT, OPTION_FILE, engine.kv.pool, 1, 255, NULL, "neighbours over which scores are pooled, odd"),
    { .name = "kv-pool-kind", .arg = "KIND", .type = OPTION_CHOICE, .where = OPTION_FILE, .off = AT(pool_kind), .dflt = "auto",
      .choices = pool_kinds, .doc = "how scores are pooled: avg or max" },
    NUM("kv-full-layers", "N", OPTION_INT, OPTION_FILE, engine.kv.full_layers, 0, 1024, NULL, "first layers that keep everything"),
    STR("kv-thin", "WHERE", engine.thin, NULL, "where long prompts get thinner under policy sparse: auto, off, LAYER:FACTOR,..."),
    STR("kv-dtype", "NAME", engine.kv.dtype, NULL, "element type of the cache: bf16 or int8"),
    /* the socket and who may use it */
    STR("socket", "PATH", socket, NULL, "where to listen; $SKVD_SOCKET, or skvd.sock in /run or $XDG_RUNTIME_DIR"),
    NUM("socket-mode", "MODE", OPTION_OCTAL, OPTION_FILE, socket_mode, 0, 0777, "0660", "mode of the socket"),
    STR("socket-group", "GROUP", socket_group, NULL, "group of the socket: who may connect"),
    STR("admin-group", "GROUP", admin_group, NULL, "group whose members may use the methods for administrators"),
    STR("user", "USER", user, NULL, "become this user once the socket is there"),
    NUM("sandbox", "on|off", OPTION_BOOL, OPTION_FILE, sandbox, 0, 1, "on", "limit our own system calls and files once the model is mapped"),
    /* watching */
    STR("log-file", "FILE", log_file, NULL, "log here, or to syslog; standard error if not given"),
    { .name = "log-level", .arg = "LEVEL", .type = OPTION_CHOICE, .where = LIVE, .off = AT(log_level), .dflt = "info",
      .choices = log_levels, .doc = "error, warning, info or debug" },
    STR("metrics", "ADDR", metrics, NULL, "serve Prometheus metrics on unix:PATH or 127.0.0.1:PORT"),
    NUM("step-limit", "TIME", OPTION_TIME, LIVE, step_limit_ms, 100, DAY_MS, "30s", "a step older than this is a stuck engine: status and systemd's watchdog are told"),
    /* limits */
    NUM("max-connections", "N", OPTION_INT, LIVE, max_connections, 1, 1000000, "4096", "connections in all"),
    NUM("max-connections-per-user", "N", OPTION_INT, LIVE, max_connections_per_user, 1, 1000000, "2048", "connections of one user"),
    NUM("max-requests", "N", OPTION_INT, LIVE, max_requests, 1, 1000000, "4096", "requests in flight in all"),
    NUM("max-requests-per-user", "N", OPTION_INT, LIVE, max_requests_per_user, 1, 1000000, "2048", "requests in flight of one user"),
    NUM("max-requests-per-connection", "N", OPTION_INT, LIVE, max_requests_per_connection, 1, 1000000, "1024", "requests in flight of one connection"),
    NUM("max-prompt", "SIZE", OPTION_SIZE, LIVE, max_prompt, 1024, TERA, "256M", "bytes of prompts in flight in all; a token counts as 4"),
    NUM("max-prompt-per-user", "SIZE", OPTION_SIZE, LIVE, max_prompt_per_user, 1024, TERA, "128M", "bytes of prompts in flight of one user"),
    NUM("max-prompt-per-connection", "SIZE", OPTION_SIZE, LIVE, max_prompt_per_connection, 1024, TERA, "64M", "bytes of prompts in flight of one connection"),
    NUM("max-buffer", "SIZE", OPTION_SIZE, LIVE, max_buffer, 1 << 20, TERA, "1G", "bytes of unfinished messages and waiting output in all"),
    NUM("max-buffer-per-user", "SIZE", OPTION_SIZE, LIVE, max_buffer_per_user, 1 << 20, TERA, "256M", "bytes of unfinished messages and waiting output of one user"),
    { .name = "kv-reserve", .arg = "N", .type = OPTION_INT, .where = ENGINE_LIVE, .off = AT(engine.kv_reserve), .max = 1 << 24, .dflt = "1024",
      .engine_name = "kv_reserve", .doc = "tokens of a request for which a user who runs something leaves room to others; 0: none" },
    ENG("max-kv-per-user", "SIZE", OPTION_SIZE, max_kv_user, 0, TERA, "max_kv_user", "KV cache that one user's sequences may need together; 0: no limit"),
    ENG("max-kv-per-connection", "SIZE", OPTION_SIZE, max_kv_connection, 0, TERA, "max_kv_connection", "the same of one connection's; 0: no limit"),
    NUM("max-deadline", "TIME", OPTION_TIME, LIVE, max_deadline_ms, 0, 30 * DAY_MS, "0", "every request ends with deadline after this; 0: none but its own"),
    NUM("frame-limit", "SIZE", OPTION_SIZE, LIVE, frame_limit, 4096, 1 << 30, "16M", "largest message"),
    NUM("nesting-limit", "N", OPTION_INT, LIVE, nesting_limit, 6, 30, "16", "levels of nesting in a message"),
    NUM("frame-timeout", "TIME", OPTION_TIME, LIVE, frame_timeout_ms, 0, DAY_MS, "30s", "a message begun must be complete after this; 0: never"),
    NUM("idle-timeout", "TIME", OPTION_TIME, LIVE, idle_timeout_ms, 0, 30 * DAY_MS, "0", "a connection with nothing in flight is closed after this; 0: never"),
    NUM("output-high", "SIZE", OPTION_SIZE, LIVE, output_high, 4096, TERA, "256K", "output waiting for a slow reader that pauses its sequences"),
    NUM("output-low", "SIZE", OPTION_SIZE, LIVE, output_low, 0, TERA, "64K", "and the level at which they go on"),
    NUM("output-limit", "SIZE", OPTION_SIZE, LIVE, output_limit, 65536, TERA, "8M", "output waiting that ends the connection"),
    NUM("reader-timeout", "TIME", OPTION_TIME, LIVE, reader_timeout_ms, 100, DAY_MS, "30s", "a reader that takes nothing for this long is disconnected"),
    NUM("drain-timeout", "TIME", OPTION_TIME, LIVE, drain_timeout_ms, 0, DAY_MS, "30s", "what still runs this long after SIGTERM is cancelled"),
    /* the command line only */
    CMD("config", "FILE", OPTION_STRING, config_file, "the configuration file; " CONFIG_FILE_DEFAULT " if it exists"),
    CMD("check-config", NULL, OPTION_BOOL, check_only, "check the configuration, print it and exit"),
    CMD("daemon", NULL, OPTION_BOOL, background, "go to the background once ready; log to syslog unless log-file is given"),
    CMD("help", NULL, OPTION_BOOL, help, "this text"),
    CMD("version", NULL, OPTION_BOOL, version, "the version"),
};

const int config_n_options = (int)(sizeof config_options / sizeof *config_options);
