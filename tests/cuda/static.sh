#!/bin/sh
# static.sh - what nvcc alone can say: every kernel file for every target with warnings as errors, registers, spills and
# shared memory against budget.txt. Arguments: source tree, build tree, nvcc; TARGETS="80 86 ..." in the environment
# limits the targets. Prints the largest of each kernel family and a closing line.
set -u
src=$1 top=$2 nvcc=$3
out=$top/tests/cuda/static
mkdir -p "$out"
passed=0 failed=0
: >"$out/all"
for sm in ${TARGETS:-80 86 89 90 100 120}; do
    for k in decode exact kv_launch linear norm prefill rope sample select; do
        log=$out/$k.$sm.log
        if "$nvcc" -O3 -std=c++17 --Werror all-warnings -I"$src" -Xptxas -v -gencode "arch=compute_$sm,code=sm_$sm" \
            -cubin -o "$out/$k.$sm.cubin" "$src/kernels/cuda/$k.cu" >"$log" 2>&1; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            echo "FAIL: $k.cu for sm_$sm"
            head -n 10 "$log"
        fi
        # sm, kernel, registers, spilled bytes
        awk -v sm="$sm" '
            /Function properties for/ { name = $NF; sub(/^_Z[0-9]+/, "", name) }
            /bytes spill stores/ { for (i = 1; i <= NF; i++) if ($i == "bytes" && $(i + 1) == "spill" && $(i + 2) ~ /^stores/) spill = $(i - 1) }
            /Used [0-9]+ registers/ { for (i = 1; i <= NF; i++) if ($i == "Used") print sm, name, $(i + 1), spill }
        ' "$log" >>"$out/all"
    done
done
# What only a machine with a GPU can run must compile all the same.
for t in cuda/test_wrappers cuda/test_attn cuda/test_linear cuda/test_select cuda/test_sample gpu/bench_kernels; do
    if "$nvcc" -std=c++17 --Werror all-warnings -I"$src" -gencode arch=compute_90,code=sm_90 -cubin -o "$out/test.cubin" \
        "$src/tests/$t.cu" >"$out/test.log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL: $t.cu"
        head -n 10 "$out/test.log"
    fi
done
if awk -v budget="$src/tests/cuda/budget.txt" '
    BEGIN {
        while ((getline line < budget) > 0) {
            if (line ~ /^#/) continue
            split(line, f, " ")
            regs[f[1]] = f[2]; spills[f[1]] = f[3]
        }
    }
    {
        r = 255; s = 0; family = $2
        for (b in regs) if (index($2, b) == 1) { r = regs[b]; s = spills[b]; family = b }
        sub(/I.*/, "", family)
        if ($3 > most[family]) most[family] = $3
        if ($4 > spilled[family]) spilled[family] = $4
        n[family]++
        if ($3 > r || $4 > s) { print "over budget: sm_" $1 " " $2 ": " $3 " registers, " $4 " bytes spilled"; bad = 1 }
    }
    END {
        for (k in n) printf "%-14s %4d kernels, at most %3d registers, %d bytes spilled\n", k, n[k], most[k], spilled[k]
        exit bad
    }' "$out/all"; then
    passed=$((passed + 1))
else
    failed=$((failed + 1))
fi
# Occupancy: the most registers of any target, shared memory by the formulas of prefill.cuh.
c++ -I"$(dirname "$(dirname "$(readlink -f "$nvcc")")")/include" -o "$out/occupancy" "$src/tests/cuda/occupancy.cpp" || failed=$((failed + 1))
args=$(awk '
    match($2, /^(fa_prefill|score_pass)ILi[0-9]+E/) {
        split($2, f, /ILi|E/); k = f[1] f[2]
        if ($3 > regs[k]) { regs[k] = $3; name[k] = f[1]; hd[k] = f[2] }
    }
    END {
        for (k in regs) {
            d = hd[k]
            if (name[k] != "fa_prefill") print k, regs[k], 64 * (d + 8) * 2 + 512, 128
            else if (d > 128) print k, regs[k], 64 * d * 2 + 16 * (d + 8) * 4 + 256, 256
            else print k, regs[k], 64 * (d + 8) * 2 + d / 2 * 160 + 16 * (d + 8) * 4 + 256, 128
        }
    }' "$out/all" | sort)
# shellcheck disable=SC2086
if "$out/occupancy" $args; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
