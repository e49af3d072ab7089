#!/usr/bin/env bash
# Check and measure forebay on a machine with a GPU and without Rust, from what scripts/pack_gpu.sh collected.
# Each section is timed and goes on after a failure of another; a table comes last. The exit code is 1 if any failed.
#
# usage: scripts/gpu_check.sh PACKED RESULTS [SECTION...]
# RESULTS gets check.log, summary.txt, summary.json, pytest.xml, probe.json, bench_cli.json, bench.json and bench.svg.
# The summaries name the Python tests that failed.
#
# Sections: install tests memcheck initcheck pytest probe bench-cli bench. By default all, in this order. FOLDERS names the
# folders of tests/python that the section pytest runs, by default all that use a device; JOBS how many processes run
# them; PYTEST_LIMIT_S how long they may.
set -uo pipefail

if [ $# -lt 2 ] || [ ! -d "$1" ]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
packed=$(cd "$1" && pwd)
mkdir -p "$2"
results=$(cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/.." || exit 2
commit=$(cat "$packed/COMMIT" 2>/dev/null)
: >"$results/check.log"

# Nothing is installed into the machine's own Python; it has torch.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
site="$scratch/site"
mkdir "$site"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FOREBAY_REQUIRE_CUDA=1
# Tests import the installed package, not a folder that happens to be called the same.
export PYTHONDONTWRITEBYTECODE=1
tar -C "$scratch" --xz -xf "$packed/tests.tar.xz" || exit 2
# What was carried may have lost its mode.
chmod +x "$packed/forebay" 2>/dev/null

names=() outcomes=() seconds=() notes=()
failed=0

# section NAME FUNCTION...: runs a function with its output in check.log; 77 means that it cannot run here.
section() {
    local name=$1 start=$SECONDS code log="$scratch/log"
    shift
    printf '\n== %s ==\n' "$name" | tee -a "$results/check.log"
    # Written as it comes: a machine that is taken away in mid-section leaves what there was.
    "$@" 2>&1 | tee "$log" >>"$results/check.log"
    code=${PIPESTATUS[0]}
    names+=("$name") seconds+=($((SECONDS - start)))
    case $code in
        0) outcomes+=(PASS) notes+=("$(summary "$log")") ;;
        77) outcomes+=(SKIP) notes+=("$(tail -n 1 "$log")") ;;
        124 | 137) outcomes+=(FAIL) notes+=("ran past its limit: see check.log") failed=1 ;;
        *) outcomes+=(FAIL) notes+=("exit code $code: see check.log") failed=1 ;;
    esac
    if [ "${outcomes[-1]}" = FAIL ]; then tail -n 60 "$log"; else tail -n 40 "$log"; fi
}

# The line of a log that says how much was done.
summary() {
    grep -hE '^(test result:|=+ .*(passed|skipped).* =+$|[0-9]+ passed|========= ERROR SUMMARY|of the wire)' "$1" |
        tail -n 1 | sed 's/^[= ]*//; s/[= ]*$//'
}

install() {
    python3 -m pip install --quiet --no-deps --no-index --target "$site" "$packed"/wheels/*.whl &&
        python3 -c 'import forebay, torch; print(forebay.__version__, forebay.backends(), torch.__version__)'
}

# Each module of a binary in a process of its own: what belongs to a process, such as a trace, is for one module alone.
rust_tests() {
    local binary module names tests status=0
    for binary in "$scratch"/tests/*; do
        tests=$("$binary" --list --format terse | sed -n 's/: test$//p')
        [ -n "$tests" ] || { echo "FAILED: $binary: no tests"; status=1; }
        for module in $(sed 's/::.*//' <<<"$tests" | sort -u); do
            echo "-- $(basename "$binary") $module"
            mapfile -t names < <(awk -F:: -v "module=$module" '$1 == module' <<<"$tests")
            timeout --kill-after=10 240 "$binary" --test-threads=4 --exact "${names[@]}" ||
                { echo "FAILED: $binary $module: exit code $?"; status=1; }
        done
    done
    return $status
}

# What runs on the CPU tells the sanitizer nothing. Tests that lose a context on purpose know that they are watched.
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo 'no compute-sanitizer on this machine'; return 77; }
    # Tests provoke errors of the driver on purpose, so those are not reports; the trap test loses its context.
    timeout --kill-after=10 420 compute-sanitizer --tool "$1" --report-api-errors no \
        --target-processes application-only --error-exitcode 1 "$scratch/tests/contract" \
        ::cuda --skip trap --test-threads=1
}

# Most of the time goes to the host, so tests run side by side; those that share a group of processes stay together.
python_tests() {
    local folder paths=() code
    python3 -c 'import pytest, pytest_timeout, xdist' || { echo 'no pytest, pytest-timeout and pytest-xdist'; return 77; }
    for folder in ${FOLDERS:-activations checkpoint distributed optim overlap sleep}; do
        [ -d "tests/python/$folder" ] || { echo "no tests/python/$folder"; return 1; }
        paths+=("tests/python/$folder")
    done
    timeout --kill-after=10 "${PYTEST_LIMIT_S:-480}" python3 -m pytest -q --durations=12 -p no:cacheprovider -p no:benchmark \
        --numprocesses "${JOBS:-12}" --junitxml "$results/pytest.xml" "${paths[@]}"
    code=$?
    [ ! -f "$results/pytest.xml" ] || failures "$results/pytest.xml" >"$scratch/failures"
    return $code
}

# Every test that failed, with the first line of the reason.
failures() {
    python3 - "$1" <<'END'
import sys
import xml.etree.ElementTree as ET

for case in ET.parse(sys.argv[1]).getroot().iter("testcase"):
    for what in (*case.findall("failure"), *case.findall("error")):
        reason = (what.get("message") or what.text or "").strip().splitlines() or [""]
        print(f"{case.get('classname')}::{case.get('name')}: {reason[0][:300]}")
END
}

probe() { timeout 120 "$packed/forebay" probe --device cuda:0 --json "$results/probe.json"; }

bench_cli() {
    timeout 180 "$packed/forebay" bench step --model qwen2.5-3b --device cuda:0 --json "$results/bench_cli.json"
}

bench() {
    timeout 480 python3 bench/step.py --device cuda:0 --json "$results/bench.json" ${commit:+--commit "$commit"} &&
        python3 bench/plot.py "$results/bench.json" "$results/bench.svg"
}

run_section() {
    case $1 in
        install) section install install ;;
        tests) section tests rust_tests ;;
        memcheck) section memcheck sanitize memcheck ;;
        initcheck) section initcheck sanitize initcheck ;;
        pytest) section pytest python_tests ;;
        probe) section probe probe ;;
        bench-cli) section bench-cli bench_cli ;;
        bench) section bench bench ;;
        *) echo "error: unknown section: $1" >&2; exit 2 ;;
    esac
}

[ $# -gt 0 ] || set -- install tests memcheck initcheck pytest probe bench-cli bench
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
for wanted in "$@"; do run_section "$wanted"; done

{
    printf '\n%-10s  %-4s  %6s  %s\n' section '' seconds ''
    for i in "${!names[@]}"; do
        printf '%-10s  %-4s  %6d  %s\n' "${names[i]}" "${outcomes[i]}" "${seconds[i]}" "${notes[i]}"
    done
} | tee "$results/summary.txt"
touch "$scratch/failures"
[ ! -s "$scratch/failures" ] || sed '1s/^/\n/' "$scratch/failures" | tee -a "$results/summary.txt"
for i in "${!names[@]}"; do
    printf '%s\t%s\t%s\t%s\n' "${names[i]}" "${outcomes[i]}" "${seconds[i]}" "${notes[i]}"
done | python3 -c '
import json, sys
rows = [line.rstrip("\n").split("\t") for line in sys.stdin]
sections = [dict(zip(("section", "outcome", "seconds", "note"), row)) for row in rows]
print(json.dumps({"commit": sys.argv[1], "sections": sections, "failures": open(sys.argv[2]).read().splitlines()}, indent=1))
' "$commit" "$scratch/failures" >"$results/summary.json"
exit $failed
