#!/bin/sh
# daemon.sh - the whole daemon on the shim: skvd with the "cuda-shim" backend answers as the exact CPU does (greedy, same
# tokens), also where KV pairs are evicted. Needs the default model, else it is skipped. Argument: build tree.
set -u
top=$1
model=${SKVD_TEST_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/skvd/SmolLM2-135M-Instruct.Q4_1.gguf}
[ -r "$model" ] || { echo "no model at $model: the daemon on the shim is not tested"; exit 77; }
dir=$(mktemp -d)
pids=''
tidy() {
    # shellcheck disable=SC2086
    [ -z "$pids" ] || kill $pids 2>/dev/null
    wait
    rm -rf "$dir"
}
trap tidy EXIT
passed=0 failed=0
start() { # NAME PROGRAM OPTION...
    name=$1 program=$2
    shift 2
    "$program" --model "$model" --sandbox off --threads 1 --kv-memory 64M --max-sequences 4 --socket "$dir/$name.sock" \
        "$@" >"$dir/$name.log" 2>&1 &
    pids="$pids $!"
}
tokens() { # NAME KV PROMPT: the answer's tokens
    "$top/skvctl" --socket "$dir/$1.sock" --json run --max-tokens 10 --temperature 0 --kv "$2" "$3" </dev/null |
        sed -n 's/.*"tokens":\[\([0-9,]*\)\].*/\1/p'
}
start shim "$top/tests/cuda/plain/skvd-shim" --backend cuda-shim
start cpu "$top/skvd" --backend cpu --compute f32
i=0
while [ $i -lt 300 ] && ! { grep -qw ready "$dir/shim.log" && grep -qw ready "$dir/cpu.log"; }; do
    sleep 1
    i=$((i + 1))
done
ask() { # NAME KV PROMPT
    want=$(tokens cpu "$2" "$3")
    got=$(tokens shim "$2" "$3")
    if [ -n "$want" ] && [ "$got" = "$want" ]; then
        passed=$((passed + 1))
        echo "ok: $1: $got"
    else
        failed=$((failed + 1))
        echo "FAIL: $1: cpu $want, cuda-shim $got"
        tail -n 3 "$dir/shim.log"
    fi
}
ask 'nothing evicted' policy=full 'What is the capital of France?'
ask 'a budget of 32' policy=sparse,budget=32,recent=8 'Name the three primary colours, one after the other.'
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
