# Build, check and run forebay. Needs cargo, Python 3.11 or newer and a C compiler; everything else is fetched.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

UV_VERSION := 0.13.7
NEXTEST_VERSION := 0.9.143

VENV := .venv
PY := $(VENV)/bin/python
UV := $(PY) -m uv --quiet
MATURIN := $(PY) -m maturin
PY_SOURCES := bench python scripts tests
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Processes that run Python tests side by side.
WORKERS ?= $(shell nproc)
NEXTEST := $(or $(shell command -v cargo-nextest),.tools/bin/cargo-nextest)

# PyO3's build script would ask the first python3 on the path, which may be too old.
export PYO3_PYTHON := $(CURDIR)/$(PY)
# uv brings its own certificates unless told to use the machine's.
export UV_SYSTEM_CERTS ?= 1

heading = @printf '\n== %s ==\n' '$(1)'

# A stamp's name holds the hash of what it was made from: a changed, added or deleted file calls for another stamp,
# and a touched one does not.
hash = $(shell find $(1) -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum \
	| sha256sum | cut -c1-16)
DEPS := $(VENV)/stamps/deps-$(UV_VERSION)-$(call hash,requirements.txt)
FRAMEWORKS := $(VENV)/stamps/frameworks-$(call hash,requirements.txt requirements-integrations.txt)
# verl asks for an older transformers, so it is in a folder of its own, which only its tests see.
VERL := $(VENV)/stamps/verl-$(call hash,requirements-verl.txt)
WHEEL := $(VENV)/stamps/wheel-$(call hash,Cargo.toml Cargo.lock pyproject.toml python \
	crates/device crates/engine crates/bench crates/python)

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: setup
setup: $(WHEEL) $(NEXTEST) ## make .venv, build and install the wheel, install cargo-nextest if it is missing

.PHONY: test
test: lint test-rust loom test-python ## everything: lints, Rust tests, loom, Python tests

.PHONY: test-long
test-long: export FOREBAY_LONG := 1
test-long: RUST_PROFILE := --profile long
test-long: PYTEST_OPTIONS := --timeout 1200
test-long: test ## the same with all seeds, twenty times the random cases, a million manifests and thousands of kills

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
loom: $(NEXTEST) ## every interleaving of the concurrent parts, with loom
	$(call heading,Loom)
	RUSTFLAGS="$${RUSTFLAGS:-} --cfg loom" $(NEXTEST) nextest run --locked --cargo-profile loom --package forebay --lib \
		--target-dir $(TARGET)/loom --profile loom --no-tests fail loom

.PHONY: test-python
test-python: check-stubs ## Python tests, against the installed wheel
	$(call heading,Python tests)
	$(PY) -m pytest --numprocesses $(WORKERS) $(PYTEST_OPTIONS)
	$(call heading,Python tests on the fake accelerator)
	$(PY) -m pytest -c tests/accelerator/pytest.ini --numprocesses $(WORKERS) $(PYTEST_OPTIONS) tests/accelerator

.PHONY: test-integrations
test-integrations: $(WHEEL) $(FRAMEWORKS) $(VERL) ## training through the real frameworks: transformers, accelerate, TRL, Lightning and others
	$(call heading,Integrations)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -c tests/integrations/pytest.ini --numprocesses $(WORKERS) tests/integrations

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

.PHONY: ptx
ptx: $(DEPS) ## write the .ptx of every kernel file in crates/device/src/cuda/kernels
	$(PY) scripts/make_ptx.py

.PHONY: demo
demo: setup out/ ## train a small model with torch's AdamW and with forebay's, then time the streamed step
	cargo build --locked --release --package forebay-cli
	$(call heading,Demo: a language model)
	$(PY) scripts/demo.py --out out
	$(call heading,Demo: the streamed step)
	$(TARGET)/release/forebay bench step --json out/demo_step.json

.PHONY: bench
bench: setup out/ ## the step against its peers, on the GPU or small on the CPU; options of your own: make bench ARGS="..."
	$(PY) bench/step.py --json out/bench.json $(ARGS)

out/:
	mkdir -p $@

.PHONY: requirements
requirements: $(DEPS) ## write both requirements files from their .in files
	$(UV) pip compile --python-version 3.11 --no-header --no-emit-index-url requirements.in --output-file requirements.txt
	$(UV) pip compile --python-version 3.11 --no-header --no-emit-index-url requirements-integrations.in --output-file requirements-integrations.txt

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

$(VERL): $(DEPS)
	$(call heading,Install verl)
	rm -rf $(VENV)/verl
	$(PY) -m pip install --quiet --no-deps --ignore-requires-python --target $(VENV)/verl --requirement requirements-verl.txt
	rm -f $(@D)/verl-* && touch $@

$(WHEEL): $(DEPS)
	$(call heading,Build and install the wheel)
	rm -rf dist
	$(MATURIN) build --quiet --locked --release --interpreter $(PY) --out dist
	$(UV) pip install --python $(PY) --no-deps --reinstall dist/*.whl
	rm -f $(@D)/wheel-* && touch $@

.tools/bin/cargo-nextest:
	$(call heading,Install cargo-nextest)
	cargo install --locked cargo-nextest --version $(NEXTEST_VERSION) --root .tools
