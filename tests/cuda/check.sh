#!/bin/sh
# check.sh - run the shim tests: in order, with three random orders of warps and lanes, and small shapes under ASan and
# UBSan; planted bugs; the daemon on the shim; nvcc's static checks. Arguments: build tree, source tree, C++ compiler,
# toolkit, nvcc, and `fast' for a part of it that takes few minutes. The last line sums up.
set -u
top=$1 src=$2 cxx=$3 cuda=$4 nvcc=$5 how=${6:-all}
passed=0 failed=0
run() { # NAME COMMAND...
    name=$1
    shift
    out=$("$@" 2>&1)
    status=$?
    line=$(printf '%s\n' "$out" | tail -n 1)
    p=$(printf '%s\n' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\1/p')
    f=$(printf '%s\n' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\2/p')
    if [ "$status" -eq 77 ]; then
        printf 'skipped: %s: %s\n' "$name" "$line"
        return
    fi
    if [ -z "$p" ] || [ "$status" -ne 0 ]; then
        printf 'FAIL: %s (status %s)\n%s\n' "$name" "$status" "$(printf '%s\n' "$out" | head -n 40)"
        [ -n "$p" ] || f=1
    else
        printf 'ok: %s: %s\n' "$name" "$line"
    fi
    passed=$((passed + ${p:-0}))
    failed=$((failed + ${f:-0}))
}
kernels='wrappers attn linear select sample'
if [ "$how" = fast ]; then
    for t in $kernels backend; do
        run "$t" "$top/tests/cuda/fast/test_$t" small
    done
    run 'attn, order 1' env SHIM_SEED=1 "$top/tests/cuda/fast/test_attn" small
    run 'nvcc, one target' env TARGETS=90 sh "$src/tests/cuda/static.sh" "$src" "$top" "$nvcc"
else
    for t in $kernels; do
        run "$t" "$top/tests/cuda/plain/test_$t"
        for seed in 1 2 3; do
            run "$t, order $seed" env SHIM_SEED=$seed "$top/tests/cuda/plain/test_$t" small
        done
        run "$t, ASan and UBSan" "$top/tests/cuda/asan/test_$t" small
    done
    run backend "$top/tests/cuda/plain/test_backend"
    run 'backend, order 1' env SHIM_SEED=1 "$top/tests/cuda/plain/test_backend" small
    run 'backend, ASan and UBSan' "$top/tests/cuda/asan/test_backend" small
    run 'planted bugs' sh "$src/tests/cuda/planted.sh" "$src" "$top" "$cxx" "$cuda"
    run 'nvcc, all targets' sh "$src/tests/cuda/static.sh" "$src" "$top" "$nvcc"
fi
run 'no driver' sh "$src/tests/cuda/nodriver.sh" "$top" "$src"
run 'the daemon on the shim' python3 "$src/tests/cuda/daemon_test.py" "$top" "$src" "$how"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
