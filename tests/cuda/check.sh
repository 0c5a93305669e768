#!/bin/sh
# check.sh - run the shim tests: in order, with three random orders of warps and lanes, and small shapes under ASan and
# UBSan; planted bugs; the daemon on the shim; nvcc's static checks. Arguments: build tree, source tree, C++ compiler,
# toolkit, nvcc, `all' or `fast' for a part of it that takes few minutes, and a case's name to run that one alone. As many
# cases run at once as there are cores, the longest first. The last line sums up.
set -u
top=$1 src=$2 cxx=$3 cuda=$4 nvcc=$5 how=${6:-all} one=${7:-}
results=$top/tests/cuda/results
kernels='attn select linear wrappers sample'
shim() { # TEST-ORDER or TEST-asan or TEST-whole
    t=${1%-*}
    case $1 in
    *-whole) "$top/tests/cuda/$variant/test_$t" $size ;;
    *-asan) "$top/tests/cuda/asan/test_$t" small ;;
    *) SHIM_SEED=${1##*-} "$top/tests/cuda/$variant/test_$t" small ;;
    esac
}
command_of() {
    case $1 in
    daemon) python3 "$src/tests/cuda/daemon_test.py" "$top" "$src" "$how" ;;
    nodriver) sh "$src/tests/cuda/nodriver.sh" "$top" "$src" ;;
    nvcc) sh "$src/tests/cuda/static.sh" "$src" "$top" "$nvcc" ;;
    planted) sh "$src/tests/cuda/planted.sh" "$src" "$top" "$cxx" "$cuda" ;;
    *) shim "$1" ;;
    esac
}
if [ "$how" = fast ]; then
    variant=fast size=small
    TARGETS=${TARGETS:-90}
    export TARGETS
    names='daemon backend-whole nvcc'
    for t in $kernels; do names="$names $t-whole"; done
    names="$names attn-1 select-1 sample-1 nodriver"
else
    variant=plain size=''
    names='backend-asan daemon planted nvcc backend-whole backend-1'
    for t in $kernels; do names="$names $t-whole $t-asan $t-1 $t-2 $t-3"; done
    names="$names nodriver"
fi
if [ -z "$one" ]; then
    rm -rf "$results"
    mkdir -p "$results"
    # shellcheck disable=SC2086
    printf '%s\n' $names | xargs -P "$(nproc)" -I{} "${CONFIG_SHELL:-/bin/sh}" "$0" "$top" "$src" "$cxx" "$cuda" "$nvcc" "$how" {}
    # A case that left no result failed.
    for n in $names; do
        cat "$results/$n.count" 2>/dev/null || echo '0 1'
    done | awk '{ p += $1; f += $2 } END { print p + 0 " passed, " f + 0 " failed"; exit (f > 0) }'
    exit
fi
start=$(date +%s)
command_of "$one" >"$results/$one.log" 2>&1
status=$?
line=$(tail -n 1 "$results/$one.log")
p=$(printf '%s\n' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\1/p')
f=$(printf '%s\n' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\2/p')
times >"$results/$one.times"
cpu=$(awk -F '[ms ]+' 'NR == 2 { print int($1 * 60 + $2 + $3 * 60 + $4) }' "$results/$one.times")
took="$(($(date +%s) - start)) s, $cpu s of CPU"
if [ "$status" -eq 77 ]; then
    echo "skipped: $one: $line"
    p=0 f=0
elif [ -z "$p" ] || [ "$status" -ne 0 ]; then
    printf 'FAIL: %s (status %s, %s)\n%s\n' "$one" "$status" "$took" "$(head -n 40 "$results/$one.log")"
    [ "${f:-0}" -gt 0 ] || f=1
else
    echo "ok: $one: $line, $took"
fi
echo "${p:-0} ${f:-0}" >"$results/$one.count"
exit 0
