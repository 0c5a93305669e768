#!/bin/sh
# check.sh - run the shim tests: in order, with three random orders of warps and lanes, and small shapes under ASan and
# UBSan; planted bugs; the daemon on the shim; nvcc's static checks. Arguments: build tree, source tree, C++ compiler,
# toolkit, nvcc. The last line sums up.
set -u
top=$1 src=$2 cxx=$3 cuda=$4 nvcc=$5
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
run 'planted bugs' sh "$src/tests/cuda/planted.sh" "$src" "$top" "$cxx" "$cuda"
run 'nvcc, all targets' sh "$src/tests/cuda/static.sh" "$src" "$top" "$nvcc"
model=${SKVD_TEST_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/skvd/SmolLM2-135M-Instruct.Q4_1.gguf}
if [ -r "$model" ]; then
    run 'the daemon on the shim' sh "$src/tests/cuda/daemon.sh" "$top"
else
    echo "no model at $model: the daemon on the shim is not tested"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
