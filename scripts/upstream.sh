#!/usr/bin/env bash
# Run a framework's own test files, from a checkout outside of this repository, against forebay.
#
# usage: scripts/upstream.sh SUITE [FOLDER] [--no-baseline] [--on-cpu] [--json FILE] [--log FILE] [--keyword WORDS]
# The same files run once more with torch's optimizers. A table compares both; each failure says whether torch's fails too.
# The exit code is 0 if forebay does as torch does, 1 if not, 2 if the suite cannot run here.
#
# PYTHON is the interpreter that has forebay and the frameworks, by default that of .venv: make test-integrations makes it.
# docs/integrations/upstream.md lists the suites, and which checkouts they were tried with.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [ ! -x "$python" ]; then
    echo "error: no Python at $python; run make setup, or set PYTHON" >&2
    exit 2
fi
export PYTHONPATH="$root/tests/upstream${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m harness "$@"
