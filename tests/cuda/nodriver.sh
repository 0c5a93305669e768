#!/bin/sh
# nodriver.sh - the release binary with CUDA in it, on a machine without a GPU or its driver: it says so, starts and serves
# from the CPU; asked for CUDA it refuses. And configure refuses a toolkit that is asked for and not there. Arguments: build
# tree, source tree.
set -u
top=$1 src=$(cd "$2" && pwd)
model=${SKVD_TEST_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/skvd/SmolLM2-135M-Instruct.Q4_1.gguf}
dir=$(mktemp -d)
pid=''
tidy() {
    [ -z "$pid" ] || kill "$pid" 2>/dev/null
    wait
    rm -rf "$dir"
}
trap tidy EXIT
passed=0 failed=0
check() { # NAME COMMAND...
    name=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL: $name"
        tail -n 3 "$dir"/*.log
    fi
}
if command -v nvidia-smi >/dev/null 2>&1; then
    echo 'this machine has a driver: starting without one is not tested'
    exit 77
fi
check 'CUDA is in the binary' grep -q 'define SKV_CUDA 1' "$top/config.h"
if [ -r "$model" ]; then
    "$top/skvd" --model "$model" --kv-memory 64M --socket "$dir/s.sock" >"$dir/auto.log" 2>&1 &
    pid=$!
    i=0
    while [ $i -lt 600 ] && ! grep -qw ready "$dir/auto.log" && kill -0 "$pid" 2>/dev/null; do
        sleep 0.1
        i=$((i + 1))
    done
    check 'it says that it runs on the CPU' grep -q 'running on the CPU' "$dir/auto.log"
    check 'it is ready, on the CPU' grep -q 'ready .*backend=cpu' "$dir/auto.log"
    check 'it answers' "$top/skvctl" --socket "$dir/s.sock" run -q --max-tokens 8 --temperature 0 \
        'What is the capital of France?' </dev/null
    kill "$pid"
    wait "$pid"
    check 'it ends well' [ $? -eq 0 ]
    pid=''
    "$top/skvd" --model "$model" --backend cuda --socket "$dir/s.sock" >"$dir/cuda.log" 2>&1
    check 'asked for CUDA it exits as for bad configuration' [ $? -eq 2 ]
    check 'and says why' grep -q 'no CUDA device' "$dir/cuda.log"
else
    echo "no model at $model: the binary is not started"
fi
if [ -x "$src/configure" ]; then
    mkdir "$dir/conf"
    (cd "$dir/conf" && "$src/configure" -q --with-cuda=/nonexistent >"$dir/configure.log" 2>&1)
    check 'configure refuses a toolkit that is not there' [ $? -ne 0 ]
    check 'and names the option' grep -q -- '--with-cuda' "$dir/configure.log"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
