#!/usr/bin/env bash
# Check and measure forebay on a machine with a GPU and without Rust, from what scripts/pack_gpu.sh collected.
# Each section is timed and goes on after a failure of another; a table comes last. The exit code is 1 if any failed.
#
# usage: scripts/gpu_check.sh PACKED RESULTS [SECTION...]
# RESULTS gets check.log, summary.txt, probe.json, bench_cli.json, bench.json and bench.svg.
#
# Sections: install tests memcheck initcheck pytest probe bench-cli bench. By default all, in this order. FOLDERS names the
# folders of tests/python that the section pytest runs, by default all that use a device; JOBS how many files at once.
set -uo pipefail

if [ $# -lt 2 ] || [ ! -d "$1" ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
packed=$(cd "$1" && pwd)
mkdir -p "$2"
results=$(cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/.." || exit 2
commit=$(cat "$packed/COMMIT" 2>/dev/null)
: >"$results/check.log"

# Nothing is installed into the machine's own Python; it has torch, and perhaps pytest.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
site="$scratch/site"
mkdir "$site"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FOREBAY_REQUIRE_CUDA=1
# Tests import the installed package, not a folder that happens to be called the same.
export PYTHONDONTWRITEBYTECODE=1
# What was carried may have lost its mode.
chmod +x "$packed/forebay" "$packed"/tests/* 2>/dev/null

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

rust_tests() {
    local binary status=0
    for binary in "$packed"/tests/*; do
        echo "-- $(basename "$binary")"
        timeout --kill-after=10 240 "$binary" --test-threads=4 || { echo "FAILED: $binary: exit code $?"; status=1; }
    done
    return $status
}

# What runs on the CPU tells the sanitizer nothing. Tests that lose a context on purpose know that they are watched.
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo 'no compute-sanitizer on this machine'; return 77; }
    # Tests provoke errors of the driver on purpose, so those are not reports; the trap test loses its context.
    timeout --kill-after=10 420 compute-sanitizer --tool "$1" --report-api-errors no \
        --target-processes application-only --error-exitcode 1 "$packed/tests/contract" \
        ::cuda --skip trap --test-threads=1
}

# A file of tests by itself; all of its output only if something failed.
one_file() {
    local log="$scratch/tests/${1//\//.}" options=()
    # The project's settings name options of a plugin that this machine may not have.
    python3 -c 'import pytest_timeout' 2>/dev/null || options=(-c /dev/null --rootdir . --import-mode=importlib)
    timeout --kill-after=10 "${PYTEST_LIMIT_S:-300}" \
        python3 -m pytest -q -ra --durations=3 -p no:cacheprovider "${options[@]}" "$1" >"$log" 2>&1
    # 5: a file in which nothing was chosen.
    case $? in
        0 | 5) echo "$1: $(tail -n 1 "$log")" ;;
        124 | 137) cat "$log"; echo "FAILED $1: ran past its limit"; return 1 ;;
        *) cat "$log"; echo "FAILED $1: $(tail -n 1 "$log")"; return 1 ;;
    esac
}

# Files run side by side: most of their time goes to the host.
python_tests() {
    local folder files=() status=0
    python3 -c 'import pytest' 2>/dev/null || { echo 'no pytest on this machine'; return 77; }
    for folder in ${FOLDERS:-optim activations sleep checkpoint distributed}; do
        [ -d "tests/python/$folder" ] || { echo "no tests/python/$folder"; return 1; }
        files+=("tests/python/$folder"/test_*.py)
    done
    mkdir -p "$scratch/tests"
    export scratch
    export -f one_file
    printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${JOBS:-8}" bash -c 'one_file "$1"' one_file || status=1
    cat "$scratch"/tests/* | grep -hoE '[0-9]+ (passed|failed|skipped|errors?)' |
        awk '{ sum[$2] += $1 } END { printf "%d passed, %d failed, %d skipped\n",
            sum["passed"], sum["failed"] + sum["error"] + sum["errors"], sum["skipped"] }'
    return $status
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
exit $failed
