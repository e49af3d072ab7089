#!/usr/bin/env bash
# Run Python tests against the built wheel with several versions of Python and torch, each in an environment of its own.
#
# usage: scripts/test_matrix.sh WHEEL [CELL...]      a cell is PYTHON:TORCH, by default the ones below
#        TESTS="tests/python" scripts/test_matrix.sh WHEEL    other tests than the default
set -euo pipefail

wheel=$(realpath "$1")
shift
cells=("$@")
[ ${#cells[@]} -gt 0 ] || cells=(3.11:2.6.0 3.12:2.8.0 3.13:2.11.0)
cd "$(dirname "$0")/.."
tests=${TESTS:-tests/python/optim tests/python/checkpoint tests/python/sleep tests/python/test_package.py tests/python/test_command.py}
folder=${CARGO_TARGET_DIR:-target}/matrix
uv=(.venv/bin/python -m uv --quiet)
tools=$(grep -E '^(numpy|peft|pytest|pytest-timeout|pytest-xdist|safetensors|transformers)==' requirements.txt)
# pyenv's interpreters, which may be installed and not selected.
for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin; do
    [ -d "$found" ] && PATH="$PATH:$found"
done
failed=0
table=$'| Python | torch | passed | failed | skipped |\n|---|---|---|---|---|\n'

for cell in "${cells[@]}"; do
    python=${cell%:*} torch=${cell#*:}
    echo "== Python $python, torch $torch"
    rm -rf "$folder"
    # Shims of pyenv come first and may refuse.
    interpreter=$(for one in $(type -ap "python$python"); do "$one" -c '' 2>/dev/null && echo "$one" && break; done || true)
    if [ -z "$interpreter" ] || ! "${uv[@]}" venv --python "$interpreter" "$folder"; then
        table+="| $python | $torch | no interpreter | | |"$'\n'
        continue
    fi
    # shellcheck disable=SC2086
    "${uv[@]}" pip install --python "$folder/bin/python" "torch==$torch" $tools "$wheel"
    # What older versions of torch warn of, and the newest does not.
    quiet=(-W "ignore:torch.distributed is unavailable" -W "ignore:DTensor random operators"
        -W "ignore:Converting a tensor with requires_grad")
    # shellcheck disable=SC2086
    OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest --quiet --numprocesses "${WORKERS:-2}" -p no:cacheprovider "${quiet[@]}" \
        --junit-xml "$folder/result.xml" $tests || failed=1
    counts=$("$folder/bin/python" -c '
import sys
import xml.etree.ElementTree as ET
suite = ET.parse(sys.argv[1]).getroot().find("testsuite")
total, bad, skipped = (int(suite.get(name)) for name in ("tests", "failures", "skipped"))
bad += int(suite.get("errors"))
print(total - bad - skipped, "|", bad, "|", skipped)' "$folder/result.xml")
    table+="| $("$folder/bin/python" -c 'import platform; print(platform.python_version())') | $torch | $counts |"$'\n'
done
rm -rf "$folder"
printf '\n%s' "$table"
exit "$failed"
