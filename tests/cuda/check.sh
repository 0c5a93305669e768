#!/bin/sh
# check.sh - run the shim tests: in order, with three random orders of warps and lanes, and small shapes under ASan and
# UBSan. Arguments: build tree. The last line sums up.
set -u
top=$1
passed=0 failed=0
run() { # NAME COMMAND...
    name=$1
    shift
    out=$("$@" 2>&1)
    status=$?
    line=$(printf '%s\n' "$out" | tail -n 1)
    p=$(printf '%s\n' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\1/p')
    f=$(printf '%s\n' "$line" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed.*/\2/p')
    if [ -z "$p" ] || [ "$status" -ne 0 ]; then
        printf 'FAIL: %s (status %s)\n%s\n' "$name" "$status" "$(printf '%s\n' "$out" | head -n 40)"
        [ -n "$p" ] || f=1
    else
        printf 'ok: %s: %s\n' "$name" "$line"
    fi
    passed=$((passed + ${p:-0}))
    failed=$((failed + ${f:-0}))
}
for t in wrappers attn linear select; do
    run "$t" "$top/tests/cuda/plain/test_$t"
    for seed in 1 2 3; do
        run "$t, order $seed" env SHIM_SEED=$seed "$top/tests/cuda/plain/test_$t" small
    done
    run "$t, ASan and UBSan" "$top/tests/cuda/asan/test_$t" small
done
run backend "$top/tests/cuda/plain/test_backend"
run 'backend, order 1' env SHIM_SEED=1 "$top/tests/cuda/plain/test_backend" small
run 'backend, ASan and UBSan' "$top/tests/cuda/asan/test_backend" small
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
