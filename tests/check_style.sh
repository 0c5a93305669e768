#!/bin/sh
# Sizes, words and scripts. Files of at most 1000 lines, functions of at most 120, nothing called provisional,
# no path of one machine, shell scripts clean under shellcheck where it is installed.
set -u
cd "${top_srcdir:-$(dirname "$0")/..}" || exit 99
passed=0 failed=0
verdict() {
    if [ -z "$2" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAIL: %s\n%s\n' "$1" "$2"
    fi
}
sources=$(find kernels engine daemon protocol clients tests \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) \
    ! -path 'tests/data/*' | sort)
pythons=$(find bench clients tests -name '*.py')
scripts=$(find bootstrap .ci/run tests -type f \( -name '*.sh' -o -name bootstrap -o -name run \) | sort)
texts="$sources $scripts $(find configure.ac Makefile.am README.md docs man clients tests -type f \
    \( -name '*.py' -o -name '*.inc' -o -name '*.md' -o -name '*.[1-8]' -o -name 'configure.ac' -o -name Makefile.am \) \
    ! -path 'tests/data/*' | sort)"

# shellcheck disable=SC2086
verdict 'files of over 1000 lines' "$(wc -l $sources $pythons | awk '$2 != "total" && $1 > 1000')"
# shellcheck disable=SC2086
verdict 'functions of over 120 lines' "$(awk '
    FNR == 1 { start = 0 }
    /^[A-Za-z_].*\)[ \t]*\{?[ \t]*$/ { name = $0; start = FNR }
    /^\}/ { if (start && FNR - start > 120) print FILENAME ":" start ": " FNR - start " lines: " name; start = 0 }
    ' $sources)"
# The words are spelt in pieces, so that this file does not name them.
words="TO""DO|FIX""ME|\\bXX""X\\b|not (yet )?impl""emented|place""holder|for n""ow\\b|simpl""ified"
# shellcheck disable=SC2086
verdict 'called provisional' "$(grep -nIE "$words" $texts | grep -vE '<[|]place''holder')" # a model's token has that name
# shellcheck disable=SC2086
verdict 'a path or registry of one machine' "$(grep -nIE "\\.\\./sh""ared|/wo""rk/|--(extra-)?index""-url|deb http""s?:" $texts)"
# shellcheck disable=SC2086
verdict 'tabs or blanks at a line end in C' "$(grep -nE "$(printf '\t')|[ ]+\$" $sources)"
if command -v shellcheck >/dev/null; then
    # shellcheck disable=SC2086
    verdict 'shellcheck' "$(shellcheck -S warning $scripts 2>&1)"
else
    echo 'shellcheck is not installed: scripts not checked'
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
