#!/usr/bin/env bash
# Collect what scripts/gpu_check.sh needs on a machine with a GPU and without Rust: the wheel, the command, the
# compiled tests and what runs the Python tests. What is in the folder before is replaced.
#
# usage: scripts/pack_gpu.sh [FOLDER]              by default out/gpu
#        PEERS="torchao==0.18.0" scripts/pack_gpu.sh   also fetch peers' wheels, for their rows in bench/step.py
set -euo pipefail

cd "$(dirname "$0")/.."
folder=${1:-out/gpu}
limit_mib=60
python=.venv/bin/python
[ -x "$python" ] || { echo "error: no $python; hint: run make setup" >&2; exit 1; }

mkdir -p "$folder"
# Only what an earlier pack put there: the folder is the caller's.
rm -rf "$folder/tests" "$folder/tests.tar.xz" "$folder/wheels" "$folder/forebay" "$folder/COMMIT"
mkdir "$folder/tests" "$folder/wheels"

# As `make setup` builds it, in a folder of its own: dist/ belongs to make.
export PYO3_PYTHON="$PWD/$python"
"$python" -m maturin build --quiet --locked --release --interpreter "$python" --out "$folder/wheels"
# What runs the Python tests, in the versions of requirements.txt; pure Python, so any interpreter takes it.
tools=$(grep -E '^(execnet|iniconfig|packaging|pluggy|pygments|pytest|pytest-timeout|pytest-xdist|tqdm)==' requirements.txt)
for peer in $tools ${PEERS:-}; do
    "$python" -m pip download --quiet --no-deps --dest "$folder/wheels" "$peer"
done

cargo build --quiet --locked --release --package forebay-cli
target=${CARGO_TARGET_DIR:-target}
cp "$target/release/forebay" "$folder/forebay"

# The command's own tests look for the command in the target folder; all others need nothing but themselves.
cargo test --quiet --locked --no-run --message-format=json --package forebay-device --package forebay |
    "$python" -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["profile"]["test"]:
        kind = message["target"]["kind"][0]
        print(("" if kind == "test" else "unit-") + message["target"]["name"], message["executable"])
' | while read -r name executable; do
    # Names of functions stay, for backtraces; tables of lines go.
    strip --strip-debug -o "$folder/tests/$name" "$executable"
done
strip "$folder/forebay"
ls -l "$folder/tests"
tar -C "$folder" --xz -cf "$folder/tests.tar.xz" tests
rm -r "$folder/tests"

git describe --always --dirty --abbrev=12 --exclude='*' >"$folder/COMMIT" 2>/dev/null || rm -f "$folder/COMMIT"
size_mib=$(du -sm --apparent-size "$folder" | cut -f1)
ls -l "$folder" "$folder/wheels"
echo "$folder: $size_mib MiB"
if [ "$size_mib" -ge "$limit_mib" ]; then
    echo "error: $size_mib MiB is more than $limit_mib, the most that can be carried" >&2
    exit 1
fi
