#!/bin/sh
# Run fuzzers one after another: fuzz.sh SEEDS SECONDS FUZZER... Each has a corpus folder that grows, corpus/NAME, beside
# the build. Ends with how many inputs were run in all, and 'N passed, N failed'; a failing input is named and kept.
set -u
seeds=$1 seconds=$2
shift 2
passed=0 failed=0 total=0
for f in "$@"; do
    name=${f##*/fuzz_}
    mkdir -p "corpus/$name" crashes
    [ "$name" != gguf ] || sh "${0%/*}/gguf_seeds.sh" tests/random-model corpus/gguf || exit 1
    log=crashes/$name.log
    if "./$f" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -close_fd_mask=1 \
        -artifact_prefix="crashes/$name-" "corpus/$name" "$seeds/$name" >"$log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL: $name:"
        grep -vE '^#[0-9]+' "$log" | tail -n 30
    fi
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
    total=$((total + ${runs:-0}))
    echo "$name: ${runs:-0} inputs in $seconds s"
done
echo "$total inputs in all"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
