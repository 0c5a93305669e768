#!/bin/sh
# Who may include whom: kernels <- engine <- daemon -> protocol <- clients. Tests may include everything.
# protocol/error.h, which depends on nothing, is open to all.
set -u
cd "${top_srcdir:-$(dirname "$0")/..}" || exit 99
passed=0 failed=0

# allow FOLDER NAME REGEX: every "..." include of FOLDER's sources matches REGEX
allow() {
    found=$(find "$1" -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort | xargs -r grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]+"' |
        grep -vE "include[[:space:]]+\"(config\.h|protocol/error\.h|$2)" )
    verdict "$1 includes only its own layer and those below" "$found"
}
# only SYSTEM-HEADER-REGEX FOLDER-REGEX: <...> includes of that header stand in those folders alone
only() {
    found=$(find kernels engine daemon protocol clients -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort |
        grep -vE "$2" | xargs -r grep -nE "^[[:space:]]*#[[:space:]]*include[[:space:]]+<($1)")
    verdict "<$1> only in $2" "$found"
}
verdict() {
    if [ -z "$2" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        printf 'FAIL: %s\n%s\n' "$1" "$2"
    fi
}

allow kernels 'kernels/|cuda[a-z_]*\.cuh'
allow engine 'engine/|kernels/'
allow protocol 'protocol/'
allow clients 'clients/|protocol/|skv\.h'
allow daemon 'daemon/|protocol/|engine/engine\.h'

only 'event2/' '^daemon/'
only 'msgpack' '^protocol/'
only 'cuda|cublas|nccl' '^kernels/cuda/'
only 'immintrin\.h|x86intrin\.h' '^kernels/avx(2|512)/'
only 'arm_neon\.h' '^kernels/neon/'
only 'sys/(socket|un)\.h|netinet/' '^(daemon|clients|protocol)/|^kernels/cuda/nodes\.cu'

# only libskv exports skv_*; what others share is in protocol/error.h
found=$(grep -rlE '^[a-z].*\bskv_[a-z_]+\(' --include='*.h' kernels engine daemon protocol clients 2>/dev/null |
    grep -vE '^(protocol/error\.h|clients/libskv/)')
verdict 'public skv_* functions are declared by libskv alone' "$found"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
