#!/bin/sh
# The manual against the programs: every option of `skvd --help`, every command of `skvctl --help`, every public
# function of libskv is named on its page; the pages are clean under mandoc's lint.
set -u
src=${top_srcdir:-$(dirname "$0")/..} build=${top_builddir:-build}
passed=0 failed=0
verdict() {
    if [ -z "$2" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAIL: %s\n%s\n' "$1" "$2"
    fi
}
# A page as plain text, one paragraph a line, so that names are not split.
page() { sed -e 's/\\-/-/g' -e 's/\\(dq/"/g' "$src/man/$1"; }
# named PAGE REGEX-PREFIX < names: prints those that the page does not have
missing_in() {
    text=$(page "$1")
    while read -r name; do
        printf '%s\n' "$text" | grep -qE "$2$name([^a-zA-Z0-9_-]|\$)" || echo "$name"
    done
}

if [ -x "$build/skvd" ]; then
    options=$("$build/skvd" --help 2>&1 | grep -oE '(^|[ [])--[a-z][a-z0-9-]+' | sed 's/^[ []*--//' | sort -u)
    verdict 'skvd --help lists no option' "$([ -n "$options" ] || echo none)"
    # what skvd.8 leaves to skvd.conf.5, "every setting is also an option", is there
    verdict 'options of skvd that neither skvd.8 nor skvd.conf.5 names' \
        "$(printf '%s\n' "$options" | missing_in skvd.8 'Fl -' | missing_in skvd.conf.5 '^\.It Cm ')"
    verdict 'settings of skvd.conf.5 that skvd does not have' \
        "$(page skvd.conf.5 | sed -n 's/^\.It Cm \([a-z0-9-]*\) .*/\1/p' | while read -r name; do
            printf '%s\n' "$options" | grep -qx -- "$name" || echo "$name"
        done)"
    # A setting that has a value without being set: its item on the page says "default is VALUE".
    items=$(page skvd.conf.5 | awk '/^\.It Cm /{ printf "\n%s", $3; next } /^\.S[hs] /{ printf "\n"; next } { printf " %s", $0 }')
    defaults=$("$build/skvd" --check-config --config /dev/null | sed -n 's/^\([a-z-]*\) = /\1 /p')
    verdict 'skvd --check-config prints no settings' "$([ -n "$defaults" ] || echo none)"
    verdict 'defaults that skvd.conf.5 does not give' \
        "$(printf '%s\n' "$defaults" | while read -r name value; do
            printf '%s\n' "$items" | grep -qE "^${name} .*default is (\.Cm )?${value}[^a-zA-Z0-9_-]" || echo "$name is $value"
        done)"
else
    echo 'skvd is not built: its options not checked'
fi
if [ -x "$build/skvctl" ]; then
    commands=$("$build/skvctl" help | sed -n 's/^  \([a-z]*\) .*/\1/p' | sort -u)
    verdict 'skvctl help lists no command' "$([ -n "$commands" ] || echo none)"
    verdict 'commands of skvctl that skvctl.1 does not name' "$(printf '%s\n' "$commands" | missing_in skvctl.1 '^\.It Ic ')"
    for c in $commands; do
        "$build/skvctl" help "$c" | grep -oE '(^|[ ,])--[a-z][a-z0-9-]+' | sed 's/^[ ,]*--//'
    done | sort -u >"${TMPDIR:-/tmp}/skvctl-options.$$"
    verdict 'options of skvctl that skvctl.1 does not name' \
        "$(missing_in skvctl.1 'Fl -' <"${TMPDIR:-/tmp}/skvctl-options.$$")"
    rm -f "${TMPDIR:-/tmp}/skvctl-options.$$"
else
    echo 'skvctl is not built: its commands not checked'
fi
if [ -x "$build/tests/list-methods" ]; then
    # Each method has a subsection; its arguments are named there, those of its maps anywhere on the page. Methods that
    # take the same arguments may refer to one another, so an argument may also stand in another method's subsection.
    methods=$("$build/tests/list-methods")
    verdict 'methods without a subsection in skvd-protocol.7' \
        "$(printf '%s\n' "$methods" | grep -v ' ' | missing_in skvd-protocol.7 '^\.Ss ')"
    verdict 'arguments that skvd-protocol.7 does not name' \
        "$(printf '%s\n' "$methods" | sed -n 's/^[a-z_]* \(.*\.\)\{0,1\}//p' | sort -u | missing_in skvd-protocol.7 '^\.(It )?Sy (.*[ ,])?')"
else
    echo 'tests/list-methods is not built: methods not checked'
fi
verdict 'defaults of policies that skvd-protocol.7 does not give' "$(for p in streaming snapkv pyramid h2o tova article sparse; do
    numbers=$(sed -n '/\.defaults = /,/}/p' "$src/engine/policy_$p.c" | tr -d '\n')
    row=".It $p"
    for what in budget sink recent alpha pool full_layers; do
        v=$(printf '%s\n' "$numbers" | sed -n "s/.*\.$what = \([A-Z0-9_]*\).*/\1/p")
        case $v in POLICY_ALL) v=all ;; '') [ $what = alpha ] && v='-' || v=0 ;; esac
        row="$row Ta $v"
    done
    page skvd-protocol.7 | grep -qxF -- "$row" || echo "$row"
done)"
metrics=$(grep -oE '(one|head|histogram)\(&?t, "[a-z_]+"' "$src/daemon/metrics.c" | sed 's/.*"\(.*\)"/\1/' | sort -u)
verdict 'daemon/metrics.c has no metrics' "$([ -n "$metrics" ] || echo none)"
verdict 'metrics that skvd.8 does not name' "$(printf '%s\n' "$metrics" | missing_in skvd.8 '^\.It Sy (.* )?')"
for doc in README.md clients/python/README.md docs/MAP.md docs/quality.md docs/speed.md; do
    [ -f "$src/$doc" ] || { verdict "$doc is missing" "$doc"; continue; }
    verdict "links of $doc that lead nowhere" "$(grep -oE '\]\([^)#]+' "$src/$doc" | cut -c 3- | grep -v '^http' | while read -r to; do
        [ -e "$src/$(dirname "$doc")/$to" ] || echo "$to"
    done)"
done
header=$src/clients/libskv/skv.h
if [ -f "$header" ]; then
    functions=$(sed 's|/\*.*\*/||' "$header" "$src/protocol/error.h" | grep -oE '^[a-z].*\bskv_[a-z_]+\(' | grep -oE 'skv_[a-z_]+\(' | tr -d '(' |
        grep -v '^skv_fail$' | sort -u)
    verdict 'libskv has no functions' "$([ -n "$functions" ] || echo none)"
    verdict 'functions of libskv that libskv.3 does not name' "$(printf '%s\n' "$functions" | missing_in libskv.3 '^\.F[no] ')"
fi
if command -v cc >/dev/null; then
    sed -n '/^\.Sh EXAMPLES/,/^\.Ed/p' "$src/man/libskv.3" | sed '/^\./d; s/\\e/\\/g' >"${TMPDIR:-/tmp}/libskv-example.$$.c"
    verdict "libskv.3's example does not compile" \
        "$(cc -std=c11 -Wall -Wextra -Werror -fsyntax-only -I"$src" -I"$src/clients/libskv" "${TMPDIR:-/tmp}/libskv-example.$$.c" 2>&1)"
    rm -f "${TMPDIR:-/tmp}/libskv-example.$$.c"
fi
if [ -n "${MANDOC:-}" ]; then
    for p in "$src"/man/*.[1-8]; do
        verdict "mandoc -T lint $p" "$("$MANDOC" -T lint "$p" 2>/dev/null | grep -v 'STYLE: referenced manual not found')"
    done
else
    echo 'mandoc is not installed: pages not linted'
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
