# `make demo` needs Python 3.11 and nothing else, `make test` also g++ and chromium; the rest is set up in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/edgefl
# Test processes side by side; one shows prints and stops in a debugger.
WORKERS ?= 2

# Datasets beside the repository, where there are some.
EDGEFL_DATA ?= $(wildcard $(abspath ../shared/data))
ifneq ($(strip $(EDGEFL_DATA)),)
demo test test-all: export EDGEFL_DATA := $(EDGEFL_DATA)
endif

.PHONY: setup demo test test-all lint check clean

setup: $(STAMP)

# torch first, by its exact version: the other packages must find it installed.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "edgefl needs Python 3.11 or newer; found $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install "torch==2.13.0"
	$(VENV)/bin/python -m pip install --quiet --editable ".[server,dev,bench,executorch]"
	@touch $@

demo: $(STAMP)
	$(RUN) run --out runs/demo --fresh --download

# One thread for each: torch's own pools would fight over the cores.
test test-all: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-all: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

check: lint test-all

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
