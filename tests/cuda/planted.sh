#!/bin/sh
# planted.sh - a test of the test: plant a bug in a copy of a kernel, compile that one file, and see the shim tests find
# it. Arguments: source tree, build tree (check-cuda has built the rest), C++ compiler, toolkit. A bug that goes
# unnoticed fails.
set -u
src=$1 top=$2 cxx=$3 cuda=$4
out=$top/tests/cuda/planted
passed=0 failed=0
others() { # all plain objects but one kernel's
    for f in "$src"/kernels/cuda/*.cu; do
        b=$(basename "$f" .cu)
        [ "$b" = "$1" ] || printf '%s ' "$top/tests/cuda/plain/$b.o"
    done
    for b in hostshim fakecuda fakeblas fakenccl; do
        printf '%s ' "$top/tests/cuda/plain/$b.o"
    done
}
# plant NAME KERNEL TEST SED-EXPRESSION: the expression must change the text of KERNEL.cuh
plant() {
    rm -rf "$out"
    mkdir -p "$out/kernels/cuda"
    cp "$src"/kernels/cuda/*.cu "$src"/kernels/cuda/*.cuh "$src"/kernels/cuda/*.h "$out/kernels/cuda/"
    sed "$4" "$src/kernels/cuda/$2.cuh" >"$out/kernels/cuda/$2.cuh"
    if cmp -s "$src/kernels/cuda/$2.cuh" "$out/kernels/cuda/$2.cuh"; then
        echo "FAIL: $1: nothing was planted"
        failed=$((failed + 1))
        return
    fi
    # The copies come first on the include path; whatever they lack comes from the source.
    if ! "$cxx" -std=c++17 -O2 -march=native -ffp-contract=off -w -I"$out" -I"$src" -isystem "$cuda/include" \
        '-DCUDA_HOST_SHIM="tests/cuda/hostshim.h"' -x c++ -c -o "$out/bug.o" "$out/kernels/cuda/$2.cu"; then
        echo "FAIL: $1: does not compile"
        failed=$((failed + 1))
        return
    fi
    # shellcheck disable=SC2046
    if ! "$cxx" -o "$out/test" "$top/tests/cuda/plain/test_$3.o" "$out/bug.o" $(others "$2") "$top/.libs/libkernels.a" \
        "$top/.libs/libskverror.a" -lpthread -lm; then
        echo "FAIL: $1: does not link"
        failed=$((failed + 1))
        return
    fi
    if "$out/test" small >"$out/log" 2>&1; then
        echo "FAIL: $1: the tests pass all the same"
        failed=$((failed + 1))
    else
        echo "ok: $1: $(grep -m 1 -E 'got|shim:|\.cu:' "$out/log" || echo 'the test stopped')"
        passed=$((passed + 1))
    fi
}
plant 'prefill: K overwritten before all warps have read it' prefill attn \
    's|__syncthreads(); // all warps are done with K||'
plant 'prefill: no wait for the copy of K' prefill attn 's|cp_wait<ahead>(); // K of this page.*||'
plant 'prefill: V copied over a K that is still read, heads of 256' prefill attn \
    's|__syncthreads(); // all warps are done with K|if (!FA_WIDE(HD)) __syncthreads();|'
plant 'prefill: causal mask off by one' prefill attn 's|slot0 + c <= lim\[i\]|slot0 + c < lim[i] + 2|'
plant 'score: sums of half the query rows' prefill attn 's|half < SC_ROWS / 16|half < 1|'
plant 'decode: partial sums one past the end of shared memory' decode attn \
    's|po\[(warp \* G + j) \* HD + lane + 32 \* i\]|po[(warp * G + j) * HD + lane + 32 * i + 1]|'
plant 'decode: ties go to the younger slot' decode attn 's|a.pos < b.pos|a.pos > b.pos|'
plant 'select: counters read before all have counted' select select \
    '/atomicAdd(&s.count/{n;n;s|__syncthreads();||}'
plant 'rope: the int8 scale left out of one side' rope attn 's|kv.v_scale : kv.k_scale|kv.k_scale : kv.k_scale|'
plant 'sample: the sums are read before all have added' sample sample \
    '/atomicAdd(&s.hist/{n;n;s|__syncthreads();||}'
plant 'sample: a share that is just reached takes one more' sample sample \
    's|before + s.hist\[d\] < want|before + s.hist[d] <= want|'
plant 'exact: parts cut off instead of rounded' exact linear 's|__float2ll_rn(v \* EXACT_ONE)|(long long)(v * EXACT_ONE)|'
plant 'exact: not a number is lost among the parts' exact linear 's|: EXACT_BAD;|: 0;|'
plant 'exact: a part goes on where the one before ended' exact linear '/exact_add(acc/{n;s|= 0.0f;|+= 0.0f;|}'
plant 'exact: no wait for the copy of the columns' exact linear 's|cp_wait<1>();||'
rm -rf "$out"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
