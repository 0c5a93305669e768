#!/bin/sh
# Add up what the test programs of one or more build folders said: tests/summary.sh BUILD_DIR...
# Reads automake's .trs and .log files. A Check program counts its checks, a script its 'N passed, N failed' line,
# any other program as one. Prints each that failed or was skipped, then 'N passed, N failed[, N skipped]'.
# Exit 1 when something failed or nothing ran.
set -u
for dir in "$@"; do
    find "$dir/tests" -name '*.trs' 2>/dev/null
done | sort | {
    passed=0 failed=0 skipped=0
    while read -r trs; do
        log=${trs%.trs}.log
        result=$(sed -n 's/^:test-result: *\([A-Z]*\).*/\1/p' "$trs" | head -n 1)
        # "97%: Checks: 34, Failures: 1, Errors: 0" and "34 passed, 1 failed", added over the log
        counts=$(awk '
            /^[0-9]+%: Checks: [0-9]+, Failures: [0-9]+, Errors: [0-9]+/ {
                gsub(",", ""); bad = $5 + $7; p += $3 - bad; f += bad }
            /^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$/ {
                gsub(",", ""); p += $1; f += $3; s += $5 }
            END { print p + 0, f + 0, s + 0 }' "$log" 2>/dev/null)
        # shellcheck disable=SC2086
        set -- ${counts:-0 0 0}
        p=$1 f=$2 s=$3
        case $result in
        PASS | XFAIL) [ $((p + f + s)) -gt 0 ] || p=1 ;;
        SKIP)
            echo "skipped: ${log#*/tests/}: $(grep -v '^SKIP ' "$log" | tail -n 1)"
            [ "$s" -gt 0 ] || s=1 ;;
        *)
            echo "FAILED: $log"
            [ "$f" -gt 0 ] || f=1 ;; # crashed, timed out, or a sanitizer spoke at its end
        esac
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    done
    line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}
