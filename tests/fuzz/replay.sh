#!/bin/sh
# Every harness over its inputs in tests/data/fuzz/: seeds, and what was once trouble.
set -u
build=${top_builddir:-build} src=${top_srcdir:-$(dirname "$0")/../..}
passed=0 failed=0
models=$(mktemp -d) || exit 99
trap 'rm -rf "$models"' EXIT
sh "$src/tests/fuzz/gguf_seeds.sh" "$build/tests/random-model" "$models" || exit 99
for f in "$build"/tests/fuzz/fuzz_*; do
    case $f in *.*) continue ;; esac
    [ -x "$f" ] || continue
    name=${f##*/fuzz_}
    more=
    [ "$name" != gguf ] || more=$models
    if out=$("$f" "$src/tests/data/fuzz/$name" ${more:+"$more"} 2>&1); then
        passed=$((passed + 1))
        echo "$name: $(printf '%s\n' "$out" | tail -n 1)"
    else
        failed=$((failed + 1))
        printf 'FAIL: %s\n%s\n' "$name" "$out"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
