#!/usr/bin/env bash
# Try an installed wheel as its user would: the quickstart and the command, away from the source tree.
#
# usage: scripts/wheel_test.sh BIN     the folder with python and forebay of the environment
set -euo pipefail

bin=$(realpath "$1")
quickstart=$(realpath "$(dirname "$0")/../examples/quickstart.py")
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cd "$away"

"$bin/python" -P "$quickstart"

"$bin/forebay" --version | tee version
"$bin/python" -m forebay --version | diff version -
grep -q '^built by wheel cp311-abi3-manylinux_2_28_' version
grep -q '^kernels adamw, adam, sgd, lion; ' version

"$bin/forebay" plan step --model qwen2.5-0.5b >/dev/null
"$bin/forebay" bench step --device cpu --params 100000 --steps 1 >/dev/null
code=0; "$bin/forebay" verify "$away/nowhere" 2>error || code=$?
[ "$code" = 1 ] && grep -q '^hint: ' error
code=0; "$bin/forebay" plan step --slots 0 2>error || code=$?
[ "$code" = 2 ] && grep -q '^hint: ' error
echo "the wheel works: quickstart, command, exit codes"
