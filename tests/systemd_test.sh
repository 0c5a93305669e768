#!/bin/bash
# The installed units under a real systemd as process 1: socket activation, readiness, access, reload, watchdog, sandbox.
# usage: systemd_test.sh BUILD-TREE (root; a minute). systemd runs in namespaces of its own, on an overlay of this machine's
# root whose changes are kept in memory: the machine's own files, services and network are out of its reach.
set -u
self=$(readlink -f "$0")
sock=/run/skvd.sock

# ---- outside: namespaces, a control group, an overlay ----------------------------------------------

outside() { # BUILD-TREE, in a mount namespace
    local model=${SKVD_TEST_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/skvd/SmolLM2-135M-Instruct.Q4_1.gguf}
    work=$(mktemp -d) init='' group=cgroup/skvd-test-$$
    trap tidy EXIT
    trap 'exit 1' INT TERM HUP
    [ -x /lib/systemd/systemd ] && [ -r "$model" ] || { echo "skipped: needs systemd and the model ($model)"; exit 77; }
    mount -t tmpfs tmpfs "$work" && mkdir "$work"/{cgroup,upper,work,root} && mount -t cgroup2 cgroup2 "$work/cgroup" &&
        mkdir "$work/$group" || exit 99
    unshare --mount --pid --uts --ipc --net --fork --kill-child "$self" --boot "$work" "$work/$group" "$1" "$model" \
        >"$work/log" 2>&1 </dev/null &
    init=$!
    until booted; do
        if ! kill -0 $init 2>/dev/null || [ $SECONDS -gt 600 ]; then cat "$work/log"; exit 99; fi
        sleep 0.5
    done
    inside bash /skvd-test --checks
    exit $?
}

process_1() { pgrep -P "$init"; }
inside() { nsenter --target "$(process_1)" --all env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
booted() { [ "$(ps -o comm= -p "$(process_1)")" = systemd ] && inside systemctl is-system-running | grep -E 'running|degraded'; } \
    >"$work/booted" 2>&1

tidy() {
    trap - EXIT
    [ -z "$init" ] || { kill -KILL "$(process_1)"; wait "$init"; } 2>/dev/null # all others go with process 1
    find "$work/$group" -depth -type d -exec rmdir {} + 2>/dev/null
    umount "$work/cgroup" "$work" 2>/dev/null
    rmdir "$work"
}

boot() { # WORK CGROUP BUILD-TREE MODEL
    local r=$1/root n
    set -e
    echo 0 >"$2/cgroup.procs"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$r"
    # None of this machine's own services and mounts, and none that would set up its kernel.
    rm -rf "$r"/etc/systemd/system/* "$r"/etc/{fstab,skvd.conf} "$r/var/log/journal"
    for n in modules-load sysctl binfmt udevd remount-fs; do ln -s /dev/null "$r/etc/systemd/system/systemd-$n.service"; done
    ln -s /lib/systemd/system/multi-user.target "$r/etc/systemd/system/default.target"
    make -C "$3" -s install DESTDIR="$r"
    ldconfig -r "$r"
    install -D -m 644 "$4" "$r/var/lib/skvd/model.gguf"
    install "$self" "$r/skvd-test"
    exec unshare --cgroup "$self" --init "$r"
}

init() { # ROOT, in a control group of its own: become process 1
    set -e
    cd "$1"
    mount -t proc proc proc
    mount --bind proc/sys proc/sys && mount -o remount,bind,ro proc/sys
    mount -t sysfs -o ro sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs dev && mkdir dev/pts dev/shm
    for n in null zero full random urandom tty; do touch dev/$n && mount --bind /dev/$n dev/$n; done
    mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts && ln -s pts/ptmx dev/ptmx
    for n in dev/shm tmp; do mount -t tmpfs -o mode=1777 tmpfs $n; done
    mount -t tmpfs -o mode=755 tmpfs run
    pivot_root . mnt && umount -l /mnt
    exec env -i container=skvd-test /lib/systemd/systemd
}

# ---- inside: what an administrator does, and users -------------------------------------------------

passed=0 failed=0
check() { # NAME COMMAND...: what it said is shown when it fails
    local said
    systemctl reset-failed skvd.service 2>"$tmp" # the starts before, of which systemd allows five in ten seconds
    if said=$("${@:2}" 2>&1); then
        passed=$((passed + 1)) && echo "ok: $1"
    else
        failed=$((failed + 1)) && printf 'FAILED: %s\n%s\n' "$1" "$said"
    fi
}
as() { runuser -u "$1" -- timeout 120 skvctl --socket $sock "${@:2}"; }
log() { journalctl -q -u skvd.service -o cat --no-pager; }
errors() { journalctl -q -t skvd -p err -o cat --no-pager; }
said() { log | grep -q "$1"; }
show() { systemctl show -P "$1" skvd.service; }
is() { [ "$(show "$1")" = "$2" ] || { echo "$1 is $(show "$1"), not $2"; return 1; }; }
within() { local end=$((SECONDS + $1)); until "${@:2}" >"$tmp"; do [ $SECONDS -lt $end ] || { cat "$tmp"; return 1; }; sleep 0.2; done; }
main_signal() { systemctl kill --kill-whom=main -s "$1" skvd; }
ask() { as skvd-t1 run -q -p -t 0 -n 12 --ignore-eos 'The capital of France is'; }
answers() { [ "$(ask)" = "$answer" ]; }
configure() { # LINE...: the settings of skvd.conf(5)'s example, and these
    printf '%s\n' 'model /var/lib/skvd/model.gguf' 'kv-memory 256M' 'kv-policy sparse' 'socket-group skvd' 'admin-group adm' \
        'metrics unix:/run/skvd/metrics.sock' "$@" >/etc/skvd.conf
}
drop_in() { # UNIT LINE...
    mkdir -p "/etc/systemd/system/$1.d" && printf '%s\n' "${@:2}" >>"/etc/systemd/system/$1.d/test.conf" && systemctl daemon-reload
}

activation() {
    is ActiveState inactive && as skvd-t1 status && is ActiveState active && is StatusText serving && is Type notify &&
        [ "$(ps -o user= -p "$(show MainPID)")" = _skvd ] && grep -E '^Max core file size +0 +0' "/proc/$(show MainPID)/limits"
}
finds() { # who names no socket is told where the machine's is
    runuser -u skvd-t1 -- skvctl status 2>"$tmp"
    grep "own is at $sock" "$tmp"
}
stranger() { ! as skvd-t3 status 2>"$tmp" && grep 'Permission denied' "$tmp"; }
administration() {
    ! as skvd-t1 drain && as skvd-t2 drain && is StatusText draining && ! ask && as skvd-t2 resume && is StatusText serving &&
        as skvd-t2 set max-requests=100 && as skvd-t2 get max-requests | grep 100 && as skvd-t2 ps && as skvd-t2 kv && answers
}
session() { as skvd-t1 run -q -n 4 --session s 'I am Ann.' && as skvd-t1 run -q -n 4 --session s 'Who?' && said 'cached=[1-9]'; }
metrics() {
    runuser -u skvd-t1 -- python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.connect("/run/skvd/metrics.sock")
s.sendall(b"GET /metrics HTTP/1.0\r\n\r\n"); print(s.makefile().read())' >"$tmp" && grep '^skvd_generation_tokens_total [1-9]' "$tmp"
}
loopback() { # as the unit's comment says
    drop_in skvd.service PrivateNetwork=no RestrictAddressFamilies=AF_INET && configure 'metrics 127.0.0.1:9100' &&
        systemctl restart skvd && exec 4<>/dev/tcp/127.0.0.1/9100 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&4 &&
        grep '^skvd_generation_tokens_total 0' <&4
}
reload() {
    local pid
    pid=$(show MainPID)
    configure 'log-level debug' && systemctl reload skvd && within 10 said 'reload name=log-level applied' &&
        configure 'log-level loud' && ! systemctl reload skvd && said "conf:7: log-level: 'loud' is none of" &&
        configure && systemctl reload skvd && answers && is MainPID "$pid"
}
restart() {
    local before
    before="$(stat -c %i $sock) $(show MainPID)"
    systemctl restart skvd && [ "$(stat -c %i $sock)" = "${before% *}" ] && ! is MainPID "${before#* }" && answers &&
        systemctl stop skvd && is ActiveState inactive && answers
}
running() { as root status | grep ' 1 running'; }
term_in_prefill() { # what is being read is finished, and the daemon ends well
    printf 'A long text. %.0s' {1..900} >/tmp/long && chmod 644 /tmp/long
    as skvd-t1 run -q -n 4 -f /tmp/long 'What is this?' &
    within 20 running && main_signal TERM && wait $! && within 40 is ActiveState inactive && is ExecMainStatus 0 && is Result success &&
        said 'stop reason="SIGTERM".*requests=1' && answers
}
started_again() { within 60 is NRestarts 1 && within 60 is ActiveState active && answers; }
killed() { answers && main_signal KILL && started_again; }
watchdog() {
    drop_in skvd.service WatchdogSec=2s && systemctl restart skvd && sleep 7 && is NRestarts 0 && ! said 'Watchdog timeout' &&
        main_signal STOP && started_again && said 'Watchdog timeout'
}
log_file() {
    configure 'log-file /var/log/skvd/log' && systemctl restart skvd && answers && grep 'reason=length' /var/log/skvd/log &&
        mv /var/log/skvd/log /var/log/skvd/log.1 && systemctl reload skvd && within 10 test -e /var/log/skvd/log && answers &&
        grep 'reason=length' /var/log/skvd/log && configure && systemctl restart skvd
}
no_model() { # is not tried for ever
    configure 'model /none.gguf' && ! systemctl restart skvd && is ExecMainStatus 3 && ! ask && within 60 is ActiveState failed &&
        ! ask && errors | grep bad_model && ! errors | grep ready && configure &&
        systemctl reset-failed skvd.service && systemctl start skvd.socket && answers
}
exposure() { systemd-analyze security --no-pager --threshold=15 skvd.service >"$tmp" && grep Overall "$tmp" >&3; }
denials() { said landlock=on && said seccomp=on && ! log | grep -E 'not permitted|denied|Read-only|SIGSYS|/SYS|dumped'; }
gone() {
    systemctl disable --now skvd.socket skvd.service && is ActiveState inactive && is Result success && ! pgrep -x skvd &&
        ! getent passwd _skvd && [ ! -e $sock ] && [ ! -e /run/skvd ] && [ -z "$(find /etc/systemd -name 'skvd.*' -type l)" ]
}

checks() {
    grep -qz container=skvd-test /proc/1/environ || exit 99 # never on the machine itself
    local u
    exec 3>&1
    cd / && tmp=$(mktemp)
    getent group skvd >"$tmp" || groupadd --system skvd
    for u in 1 2 3; do useradd -M skvd-t$u; done
    usermod -aG skvd skvd-t1 && usermod -aG skvd,adm skvd-t2
    configure
    drop_in skvd.socket '[Socket]' SocketGroup=skvd
    drop_in skvd.service '[Service]' SupplementaryGroups=skvd
    check 'enable --now' systemctl enable --now skvd.socket
    check "a user of the group wakes the daemon; systemd knows that it serves" activation
    answer=$(ask)
    check 'it answers' test -n "$answer"
    check 'a user outside of the group is refused' stranger
    check 'the socket is found' finds
    check 'an administrator drains, resumes, sets; another user may not' administration
    check 'a session' session
    check 'metrics on a Unix socket, for the group' metrics
    check 'reload: what is right is applied, what is wrong is told' reload
    check 'the socket stays over restart and stop' restart
    check 'SIGTERM while a prompt is read' term_in_prefill
    check 'a log file, and a new one when that was moved' log_file
    check 'nothing was denied to the daemon' denials
    check 'killed: started again' killed
    check 'watchdog: fed for 7 s; stopped, then started again' watchdog
    check 'no model; the journal knows an error' no_model
    check 'exposure of at most 1.5 of 10' exposure
    check 'metrics on 127.0.0.1' loopback
    check 'stop leaves nothing' gone
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ]
}

case ${1:---help} in
--boot | --init | --outside | --checks) "${1#--}" "${@:2}" ;;
-*) sed -n '2,4s/^# //p' "$self" ;;
*) [ "$(id -u)" -eq 0 ] && exec unshare --mount "$self" --outside "$(readlink -f "$1")" || { echo 'skipped: needs root'; exit 77; } ;;
esac
