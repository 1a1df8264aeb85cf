# Two commands for newcomers: `make demo` and `make test`. Each sets up .venv on first use and then runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help demo test lint bench study-alpha false-alarms gpu-check install clean

help:
	@echo "make demo          watch a 4-rank run lose a rank to a silent fault, name it, and repair the step"
	@echo "make test          lint and the whole test suite"
	@echo "make lint          ruff, import contracts, types"
	@echo "make bench         overhead and fingerprint benchmarks, into out/bench"
	@echo "make study-alpha   what the update check catches at which sensitivity, into out/study-alpha (40 minutes)"
	@echo "make false-alarms  many clean checks, counted, into out/false-alarms"
	@echo "make gpu-check     what only a GPU can show; skipped with a notice where there is none"
	@echo "make clean         remove .venv, out and caches"

# Installed once; again only after pyproject.toml or constraints.txt has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "unsilent needs Python 3.10 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@echo "Setting up $(VENV) (once; a few minutes, PyTorch is a large download)"
	@$(PYTHON) -m venv $(VENV)
	@echo "  1/2 PyTorch"
	@$(PIP) install -qq -c constraints.txt torch==2.13.0 hatchling editables
	@echo "  2/2 unsilent, with what training, tests and checks need"
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e ".[train,fast,test,dev]"
	@touch $(STAMP)
	@echo "Ready."

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/unsilent demo --out out/demo

test: lint
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	@$(BIN)/python benchmarks/overhead_bench.py --out out/bench
	@$(BIN)/python benchmarks/fingerprint_bench.py --out out/bench

study-alpha: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study alpha --out out/study-alpha

false-alarms: $(STAMP)
	@$(BIN)/python benchmarks/false_alarms_bench.py --out out/false-alarms

gpu-check: $(STAMP)
	@$(BIN)/python benchmarks/gpu_check.py --out docs/results

clean:
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
