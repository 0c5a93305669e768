#!/bin/sh
# skvd-plan and skvctl plan: the article's load. The figures are a model's; what is tested is what must follow from any sane
# one: how many sequences fit, that throughput stops growing when no more fit, and that bad questions are refused.
set -u
build=${top_builddir:-build} passed=0 failed=0
check() { # what, then a command that must succeed
    what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAIL: %s\n' "$what"
    fi
}
out=$("$build/skvd-plan" --model llama3-8b --gpu rtx4090 --concurrency 1,10,30 --rounds 3 --json)
# field POLICY CLIENTS NAME
field() { printf '%s\n' "$out" | sed -n "s/.*\"policy\": \"$1\",.*\"concurrency\": $2,/&/p" | sed -n "s/.*\"$3\": \([0-9.]*\).*/\1/p"; }
holds() { awk "BEGIN { exit !($1) }"; }

check 'nine rows' [ "$(printf '%s\n' "$out" | grep -c '^{.*}$')" -eq 9 ]
# 24 GiB * 0.9 less 15 GiB of weights and half a GiB leave about 6; a token is 128 KiB: ten sequences of 4500, as in the article
check 'a full cache fits about ten' holds "$(field full 1 fit) >= 9 && $(field full 1 fit) <= 11"
check "the article's plan fits at least twice as many" holds "$(field article 1 fit) >= 2 * $(field full 1 fit)"
check 'the default fits at least as many' holds "$(field sparse 1 fit) >= $(field article 1 fit)"
check 'no more run than fit' holds "$(field full 30 running) == $(field full 30 fit)"
check 'all run where they fit' holds "$(field sparse 30 running) == 30"
check 'one stream is bound by the weights' holds "$(field full 1 tokens_per_s) > 40 && $(field full 1 tokens_per_s) < 1008 / 15"
check 'a full cache stops growing' holds "$(field full 30 tokens_per_s) < 1.15 * $(field full 10 tokens_per_s)"
check "the article's ratio at thirty clients" holds "$(field article 30 tokens_per_s) > 1.3 * $(field full 30 tokens_per_s)"
check 'waiting shows in the time to first token' holds "$(field full 30 ttft_p50_ms) > 5 * $(field sparse 30 ttft_p50_ms)"
check 'the same question, the same answer' [ "$out" = "$("$build/skvd-plan" --model llama3-8b --gpu rtx4090 --concurrency 1,10,30 --rounds 3 --json)" ]
if [ -x "$build/skvctl" ]; then
    check 'skvctl plan asks it' [ "$out" = "$("$build/skvctl" --json plan --model llama3-8b --gpu rtx4090 --concurrency 1,10,30 --rounds 3)" ]
fi
refused() { ! "$build/skvd-plan" "$@" >/dev/null 2>&1; }
check 'an unknown model' refused --model llama9 --gpu rtx4090
check 'an unknown device' refused --model llama3-8b --gpu rtx9
check 'a model that is too large' refused --model llama3-70b --gpu rtx4090
check 'a context that the model has not' refused --model llama3-8b --gpu h100 --input 9000
check 'an unknown policy' refused --model llama3-8b --policy best
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
