# `make demo` needs Python 3.11 and nothing else, `make test` also g++ and chromium; the rest is set up in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/edgefl
# Test processes side by side: some wait for brokers. One shows prints and stops in a debugger.
WORKERS ?= 3

# Datasets beside the repository, where there are some.
EDGEFL_DATA ?= $(wildcard $(abspath ../shared/data))
ifneq ($(strip $(EDGEFL_DATA)),)
demo test test-all test-slow coverage: export EDGEFL_DATA := $(EDGEFL_DATA)
endif

.PHONY: setup demo test test-all test-slow coverage lint facts wheel check clean

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

# One thread for each: torch's own pools would fight over the cores. Whole files go to a worker, the longest first.
RING := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test test-all test-slow coverage: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(RING) -m "not slow" --record build/test-times.json

# Writes .ci/full-run.json where everything passes on a clean checkout: commit it.
test-all: $(STAMP)
	$(RING) --hypothesis-profile all --record .ci/full-run.json

# The slow tests of rooms that changed since all tests last passed, as far as the seconds of one core go.
SLOW_SECONDS ?= 300
test-slow: $(STAMP)
	@chosen=$$($(VENV)/bin/python -m tests.rings.changed --seconds $(SLOW_SECONDS)) && \
	  if [ -n "$$chosen" ]; then $(RING) -m slow $$chosen; fi

# Branches that tests reach, in the processes that they start too: make coverage, or RING_OPTIONS= for all tests.
RING_OPTIONS ?= -m "not slow"
coverage: $(STAMP)
	$(RING) $(RING_OPTIONS) --cov --cov-report=

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/deptry .

# What `edgefl ls` and `edgefl validate` know of the catalogs, written anew after one of these changed.
facts: $(STAMP)
	$(VENV)/bin/python -m edgefl.cli.catalog.live

wheel: $(STAMP)
	rm -rf build/wheel
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(VENV)/bin/python -m tests.rings.wheel build/wheel

check: lint wheel test-all

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
