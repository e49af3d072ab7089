# Build, check and run forebay. Needs cargo, Python 3.11 or newer and a C compiler; everything else is fetched.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

UV_VERSION := 0.13.7
NEXTEST_VERSION := 0.9.143
ZIG_VERSION := 0.15.2
DENY_VERSION := 0.20.2

VENV := .venv
PY := $(VENV)/bin/python
UV := $(PY) -m uv --quiet
MATURIN := $(PY) -m maturin
PY_SOURCES := bench docs examples python scripts tests
TARGET := $(or $(CARGO_TARGET_DIR),target)
# A thread is preempted at most so often in a test under loom. More find little and take minutes; empty for no limit.
PREEMPTIONS ?= 5
# Processes that run Python tests side by side.
WORKERS ?= $(shell nproc)
NEXTEST := $(or $(shell command -v cargo-nextest),.tools/bin/cargo-nextest)

# PyO3's build script would ask the first python3 on the path, which may be too old.
export PYO3_PYTHON := $(CURDIR)/$(PY)
# Torch is thousands of files, and tests start hundreds of processes: each would compile what it imports once more.
unexport PYTHONDONTWRITEBYTECODE
# uv brings its own certificates unless told to use the machine's.
export UV_SYSTEM_CERTS ?= 1

heading = @printf '\n== %s ==\n' '$(1)'

# A stamp's name holds the hash of what it was made from: a changed, added or deleted file calls for another stamp,
# and a touched one does not.
hash = $(shell find $(1) -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum \
	| sha256sum | cut -c1-16)
DEPS := $(VENV)/stamps/deps-$(UV_VERSION)-$(call hash,requirements.txt)
FRAMEWORKS := $(VENV)/stamps/frameworks-$(call hash,requirements.txt requirements-integrations.txt)
# These ask for older packages than the others do, so they are in folders of their own, which only their tests see.
VERL := $(VENV)/stamps/verl-$(call hash,requirements-verl.txt)
TORCHTITAN := $(VENV)/stamps/torchtitan-$(call hash,requirements-torchtitan.txt)
DOCS := $(VENV)/stamps/docs-$(call hash,requirements.txt requirements-docs.txt)
WHEEL := $(VENV)/stamps/wheel-$(call hash,Cargo.toml Cargo.lock pyproject.toml python \
	crates/device crates/engine crates/bench crates/cli crates/python)
# A wheel that is given away is linked against the glibc of torch's own wheels, which zig brings.
ZIG := $(VENV)/stamps/zig-$(ZIG_VERSION)
# The processors that `make wheel` builds for. Another needs its standard library: rustup target add aarch64-unknown-linux-gnu
WHEEL_ARCHS ?= $(shell uname -m)

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: setup
setup: $(WHEEL) $(NEXTEST) ## make .venv, build and install the wheel, install cargo-nextest if it is missing

.PHONY: test
test: lint test-rust loom test-python ## everything: lints, Rust tests, loom, Python tests

.PHONY: test-long
test-long: export FOREBAY_LONG := 1
test-long: export CARGO_PROFILE_DEV_OPT_LEVEL := 1
test-long: RUST_PROFILE := --profile long
test-long: PYTEST_OPTIONS := --timeout 1200
test-long: PREEMPTIONS :=
test-long: test test-bench ## the same with all seeds, twenty times the random cases, a million manifests and thousands of kills

.PHONY: lint
lint: $(DEPS) ## formatting, clippy, ruff, mypy, shipped PTX
	$(call heading,Format)
	cargo fmt --all --check
	$(PY) -m ruff format --check --quiet $(PY_SOURCES)
	$(call heading,Lint)
	$(PY) -m ruff check --quiet $(PY_SOURCES)
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(call heading,Types)
	$(PY) -m mypy
	$(call heading,Kernels)
	$(PY) scripts/make_ptx.py --check

.PHONY: fmt
fmt: $(DEPS) ## format Rust and Python
	cargo fmt --all
	$(PY) -m ruff check --quiet --fix-only $(PY_SOURCES)
	$(PY) -m ruff format --quiet $(PY_SOURCES)

.PHONY: test-rust
test-rust: $(NEXTEST) ## Rust tests and doctests
	$(call heading,Rust tests)
	$(NEXTEST) nextest run --locked $(RUST_PROFILE)
	$(call heading,Rust doctests)
	cargo test --locked --doc

.PHONY: loom
loom: $(NEXTEST) ## interleavings of the concurrent parts, with loom: up to five preemptions, and all in test-long
	$(call heading,Loom)
	$(if $(PREEMPTIONS),LOOM_MAX_PREEMPTIONS=$(PREEMPTIONS)) RUSTFLAGS="$${RUSTFLAGS:-} --cfg loom" $(NEXTEST) nextest run --locked --cargo-profile loom --package forebay --lib \
		--target-dir $(TARGET)/loom --profile loom --no-tests fail loom

.PHONY: test-python
test-python: check-stubs ## Python tests, against the installed wheel
	$(call heading,Python tests)
	$(PY) -m pytest --numprocesses $(WORKERS) $(PYTEST_OPTIONS) --ignore tests/python/test_bench.py
	$(call heading,Python tests on the fake accelerator)
	$(PY) -m pytest -c tests/accelerator/pytest.ini --numprocesses $(WORKERS) $(PYTEST_OPTIONS) tests/accelerator

.PHONY: test-bench
test-bench: $(WHEEL) ## every benchmark and the demo, small
	$(call heading,Benchmarks)
	$(PY) -m pytest --numprocesses $(WORKERS) $(PYTEST_OPTIONS) tests/python/test_bench.py

.PHONY: test-report
test-report: $(WHEEL) ## the page of `forebay report`, in a real browser
	$(call heading,Reports in a browser)
	@type -P chromium || type -P chromium-browser || type -P google-chrome \
		|| { echo 'error: no chromium, chromium-browser or google-chrome on the path; run: apt-get install -y chromium'; exit 1; }
	$(PY) -m pytest -c tests/report/pytest.ini tests/report

.PHONY: test-integrations
test-integrations: export HF_HUB_OFFLINE := 1
test-integrations: export OMP_NUM_THREADS := 1
test-integrations: $(WHEEL) $(FRAMEWORKS) $(VERL) $(TORCHTITAN) ## training through the real frameworks: transformers, accelerate, TRL, Lightning and others
	$(call heading,Integrations)
	$(PY) -m pytest -c tests/integrations/pytest.ini --numprocesses $(WORKERS) tests/integrations
	$(call heading,torchtitan 0.3)
	PYTHONPATH=$(VENV)/torchtitan $(PY) -m pytest -c tests/integrations/pytest.ini tests/integrations/test_torchtitan.py
	$(call heading,Upstream suites)
	$(PY) -m pytest -c tests/upstream/pytest.ini --numprocesses $(WORKERS) tests/upstream/test_harness.py
	scripts/upstream.sh torch

# Both stub targets build with the wheel's own settings, so they reuse its build.
stubs_from_build = $(MATURIN) generate-stubs --quiet --locked --profile release --interpreter $(PY) --out $(TARGET)/stubs
.PHONY: stubs
stubs: $(DEPS) ## write python/forebay/_core.pyi from the Rust signatures
	$(stubs_from_build)
	cp $(TARGET)/stubs/forebay/_core.pyi python/forebay/_core.pyi

.PHONY: check-stubs
check-stubs: $(WHEEL) ## fail if python/forebay/_core.pyi is stale
	$(call heading,Stubs)
	$(stubs_from_build)
	diff -u python/forebay/_core.pyi $(TARGET)/stubs/forebay/_core.pyi || { echo 'error: stale stubs; run: make stubs'; exit 1; }

.PHONY: docs
docs: $(WHEEL) $(DOCS) ## build docs/ to a site in out/docs; a warning is an error
	$(call heading,Documentation)
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going --nitpicky docs out/docs
	@echo "open out/docs/index.html"

.PHONY: ptx
ptx: $(DEPS) ## write the .ptx of every kernel file in crates/device/src/cuda/kernels
	$(PY) scripts/make_ptx.py

.PHONY: demo
demo: setup out/ ## train a small model with torch's AdamW and with forebay's, report on it, then time the streamed step
	$(call heading,Demo: a language model)
	$(PY) scripts/demo.py --out out
	$(call heading,Demo: the streamed step)
	$(VENV)/bin/forebay bench step --json out/demo_step.json

.PHONY: bench
bench: setup out/ ## the step against its peers, on the GPU or small on the CPU; options of your own: make bench ARGS="..."
	$(PY) bench/step.py --json out/bench.json $(ARGS)

.PHONY: wheel
wheel: $(ZIG) ## the wheel to give away, for manylinux_2_28, in dist/; for both processors: make wheel WHEEL_ARCHS="x86_64 aarch64"
	$(call heading,Wheel)
	rm -rf dist
	export CARGO_ZIGBUILD_PYTHON_PATH=$(CURDIR)/$(PY); for arch in $(WHEEL_ARCHS); do \
		$(MATURIN) build --quiet --locked --release --zig --target $$arch-unknown-linux-gnu --compatibility manylinux_2_28 \
			--interpreter python3.11 --out dist; \
	done
	ls -l dist

.PHONY: wheel-test
wheel-test: wheel ## install that wheel and torch into an empty environment, run the quickstart and the command there
	$(call heading,Test the wheel)
	rm -rf $(TARGET)/wheel-test
	$(UV) venv --python $(PY) $(TARGET)/wheel-test
	$(UV) pip install --python $(TARGET)/wheel-test/bin/python --constraint requirements.txt dist/*$$(uname -m).whl
	scripts/wheel_test.sh $(TARGET)/wheel-test/bin

.PHONY: deny
deny: .tools/bin/cargo-deny ## licences, sources, duplicates and advisories of the Rust dependencies, by deny.toml
	$(call heading,Dependencies)
	$< --workspace check licenses bans sources
	if $< fetch db; then $< --workspace check advisories; \
	else echo 'warning: the database of advisories cannot be reached, so advisories were not checked'; fi

.PHONY: test-matrix
test-matrix: $(WHEEL) ## Python tests with the oldest torch, one between and the newest, on Python 3.11 to 3.13
	scripts/test_matrix.sh $(TARGET)/wheel/*.whl

out/:
	mkdir -p $@

.PHONY: requirements
requirements: $(DEPS) ## write the requirements files from their .in files
	$(UV) pip compile --python-version 3.11 --no-header --no-emit-index-url requirements.in --output-file requirements.txt
	$(UV) pip compile --python-version 3.11 --no-header --no-emit-index-url requirements-integrations.in --output-file requirements-integrations.txt
	$(UV) pip compile --python-version 3.11 --no-header --no-emit-index-url requirements-docs.in --output-file requirements-docs.txt

.PHONY: clean
clean: ## remove everything that these targets make
	rm -rf $(TARGET) $(VENV) .tools dist out .pytest_cache .mypy_cache .ruff_cache
	find $(PY_SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# uv does not read pip's configuration files; where only those lead to a registry, pip itself still works.
$(DEPS):
	$(call heading,Install Python dependencies)
	@python=; for candidate in python3 python3.13 python3.12 python3.11; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo 'error: no Python 3.11 or newer: tried python3, python3.13, python3.12, python3.11'; exit 1; fi; \
	$$python -m venv --clear $(VENV)
	$(PY) -m pip install --quiet uv==$(UV_VERSION)
	$(UV) pip install --python $(PY) --requirement requirements.txt \
		|| { echo 'uv failed; trying pip'; $(PY) -m pip install --requirement requirements.txt; }
	mkdir -p $(@D) && touch $@

$(FRAMEWORKS): $(DEPS)
	$(call heading,Install the frameworks)
	$(UV) pip install --python $(PY) --requirement requirements-integrations.txt \
		|| { echo 'uv failed; trying pip'; $(PY) -m pip install --requirement requirements-integrations.txt; }
	rm -f $(@D)/frameworks-* && touch $@

$(DOCS): $(DEPS)
	$(call heading,Install the documentation generator)
	$(UV) pip install --python $(PY) --requirement requirements-docs.txt \
		|| { echo 'uv failed; trying pip'; $(PY) -m pip install --requirement requirements-docs.txt; }
	rm -f $(@D)/docs-* && touch $@

$(VERL): $(DEPS)
	$(call heading,Install verl)
	rm -rf $(VENV)/verl
	$(PY) -m pip install --quiet --no-deps --ignore-requires-python --target $(VENV)/verl --requirement requirements-verl.txt
	rm -f $(@D)/verl-* && touch $@

$(TORCHTITAN): $(DEPS)
	$(call heading,Install torchtitan 0.3)
	rm -rf $(VENV)/torchtitan
	$(PY) -m pip install --quiet --no-deps --target $(VENV)/torchtitan --requirement requirements-torchtitan.txt
	rm -f $(@D)/torchtitan-* && touch $@

$(WHEEL): $(DEPS)
	$(call heading,Build and install the wheel)
	rm -rf $(TARGET)/wheel
	$(MATURIN) build --quiet --locked --release --interpreter $(PY) --out $(TARGET)/wheel
	$(UV) pip install --python $(PY) --no-deps --reinstall $(TARGET)/wheel/*.whl
	rm -f $(@D)/wheel-* && touch $@

$(ZIG): $(DEPS)
	$(UV) pip install --python $(PY) ziglang==$(ZIG_VERSION)
	rm -f $(@D)/zig-* && touch $@

.tools/bin/cargo-deny:
	$(call heading,Install cargo-deny)
	cargo install --locked cargo-deny --version $(DENY_VERSION) --root .tools

.tools/bin/cargo-nextest:
	$(call heading,Install cargo-nextest)
	cargo install --locked cargo-nextest --version $(NEXTEST_VERSION) --root .tools
