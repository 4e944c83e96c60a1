# Everything starts from a bare Python: `make demo` and `make test` set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types check guards test-gpu evidence evidence-check evidence-tables bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## set up .venv with the three packages and the development tools

$(INSTALLED): pyproject.toml packages/optim/pyproject.toml packages/profiler/pyproject.toml packages/cli/pyproject.toml tools/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c tools/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps -c tools/constraints.txt lucid-yolo
	@touch $@

demo: $(INSTALLED)  ## profile the digits example twice, show one report, compare both
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh tools/demo.sh

test: lint types guards evidence check  ## lint, types, guards and every test that needs no GPU

lint: $(INSTALLED)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# More workers than cores: many tests wait for processes that they started.
check: $(INSTALLED)
	$(BIN)/python -m pytest -m 'not gpu and not two_gpus' -n 3 --dist worksteal

guards: $(INSTALLED)  ## disable each guard of capture in turn; its regression test must fail
	$(BIN)/python tools/mutate_guards.py

# Stale evidence is told, not an error: it is renewed on a machine with a GPU.
evidence: $(INSTALLED)
	-@$(BIN)/python tools/gpu_tests.py --check

evidence-check: $(INSTALLED)  ## compare docs/evidence/gpu-tests.json with the sources
	$(BIN)/python tools/gpu_tests.py --check

evidence-tables: $(INSTALLED)  ## print the tables of the evidence pages from their reports
	@$(BIN)/python tools/evidence_tables.py

test-gpu: $(INSTALLED)  ## the tests that need a CUDA device, which fail without one; writes docs/evidence/gpu-tests.json
	$(BIN)/python tools/gpu_tests.py
	$(BIN)/python tools/mutate_guards.py --gpu

bench: $(INSTALLED)  ## one optimizer step, ours against its peers
	$(BIN)/python tools/bench/step.py

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) demo
