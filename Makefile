# Two commands for newcomers: `make demo` and `make test`. Each sets up .venv on first use and then runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help demo test lint bench study-alpha study-submodule study-step study-drift study-surface study-finetune fit-units study-bits study-norms study-latency false-alarms campaign-quick campaign-full gpu-check install clean

help:
	@echo "make demo          watch a 4-rank run lose a rank to a silent fault, name it, and repair the step"
	@echo "make test          lint and the whole test suite"
	@echo "make lint          ruff, import contracts, types"
	@echo "make bench         overhead and fingerprint benchmarks, into out/bench"
	@echo "make study-alpha   what the update check catches at which sensitivity, into out/study-alpha (40 minutes)"
	@echo "make study-submodule how often attention and FFN of a sick device err, into out/study-submodule (15 minutes)"
	@echo "make study-step    how far a sick device leads one step astray, into out/study-step (5 minutes)"
	@echo "make fit-units     fit the simulated sick units to stored figures; writes docs/results/units-fit.json (5 minutes)"
	@echo "make study-drift   how far weights stray on every sick device, into out/study-drift (10 minutes)"
	@echo "make study-surface whether the loss surface sets that or the fault, into out/study-surface (15 minutes)"
	@echo "make study-finetune what a model tuned on a sick device is worth, into out/study-finetune (90 minutes)"
	@echo "make study-bits    which flipped bit matters where in a step, into out/study-bits (10 minutes)"
	@echo "make study-norms   whether outliers of gradient norms show a sick device, into out/study-norms (10 minutes)"
	@echo "make study-latency corrupted steps kept before an audit finds a device, into out/study-latency (10 minutes)"
	@echo "make false-alarms  many clean checks, counted, into out/false-alarms"
	@echo "make campaign-quick  hundreds of guarded runs with one fault each, into out/campaign-quick (10 minutes)"
	@echo "make campaign-full   thousands of them, into out/campaign-full (hours; stop it and start it again as you like)"
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
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.sharded_bench --cycles 10 --out out/bench

study-alpha: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study alpha --out out/study-alpha

study-submodule: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study submodule --out out/study-submodule

study-step: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study step --out out/study-step

fit-units: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m unsilent.lab.units.fit --out docs/results/units-fit.json

study-drift: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study drift --out out/study-drift

study-surface: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study surface --out out/study-surface

study-finetune: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study finetune --out out/study-finetune

study-bits: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study bits --out out/study-bits

study-norms: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study norms --out out/study-norms

study-latency: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent study latency --out out/study-latency

false-alarms: $(STAMP)
	@$(BIN)/python benchmarks/false_alarms_bench.py --out out/false-alarms

campaign-quick: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent campaign campaigns/quick.toml --out out/campaign-quick

campaign-full: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/unsilent campaign campaigns/full.toml --out out/campaign-full

gpu-check: $(STAMP)
	@$(BIN)/python benchmarks/gpu_check.py --out docs/results

clean:
	rm -rf $(VENV) out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
