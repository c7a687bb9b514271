# `make demo` and `make test` need Python 3.11 and make; the rest is set up in .venv: for the demo what a server and its
# devices need, for tests and checks all else beside it. Tests that need another program are skipped without it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
TESTS := $(VENV)/.tests
# File of releases that the environment of tests is held to; none by default.
CONSTRAINTS :=
ENVIRONMENT := $(PYTHON) tools/environment.py
# Test processes side by side: some wait for brokers. One shows prints and stops in a debugger.
WORKERS ?= 3

# Processes that the demo and tests start import the same modules over and over: Python may keep them compiled.
unexport PYTHONDONTWRITEBYTECODE

# Datasets beside the repository, where there are some.
EDGEFL_DATA ?= $(wildcard $(abspath ../shared/data))
ifneq ($(strip $(EDGEFL_DATA)),)
demo test test-all test-slow coverage bench: export EDGEFL_DATA := $(EDGEFL_DATA)
endif

.PHONY: setup demo agents page agents-web agents-cpp agents-java deb test test-all test-slow test-oldest test-newest test-device constraints coverage lint facts fuzz-modules bench wheel release docs check clean

setup: $(TESTS)

$(DEMO): pyproject.toml tools/environment.py
	@echo "Step 1 of 2: install Python packages into $(VENV), once. Usually 1 to 2 minutes."
	@$(ENVIRONMENT) $(VENV) --torch --bytecode --editable ".[server,images]"
	@touch $@

$(TESTS): pyproject.toml conformance/pyproject.toml tools/environment.py $(CONSTRAINTS)
	@$(ENVIRONMENT) $(VENV) --torch $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[dev]" ./conformance
	@touch $(DEMO) $@

demo: $(DEMO)
	@echo "Step 2 of 2: start a broker, a server and 6 devices, and train. Usually 1 to 2 minutes:"
	@echo "  data and compiling 3 submodels 20 to 60 s (10 s from the cache), then 10 rounds of 3 to 8 s."
	$(BIN)/edgefl run --out runs/demo --fresh --download

# Agents in other languages than Python.
agents: agents-web agents-cpp

# The browser agent and the page on which browsers join, into the package that serves them. Needs Node 20 and npm.
WEB := agents/web
agents-web: $(WEB)/node_modules/.installed
	npm --prefix $(WEB) run --silent build
	rm -rf edgefl/web/static && cp -R $(WEB)/dist edgefl/web/static
	node $(WEB)/licenses.mjs > edgefl/web/static/LICENSES.txt

# Built for tests if npm is installed, and again where a source is newer.
BUILT := edgefl/web/static/LICENSES.txt
page:
	@{ [ -e $(BUILT) ] && [ -z "$$(find $(WEB) -name node_modules -prune -o -name dist -prune -o -type f -newer $(BUILT) -print -quit)" ]; } || \
	  ! command -v npm >/dev/null || $(MAKE) --no-print-directory agents-web || \
	  echo "tests of the page are skipped: npm could not build it"

$(WEB)/node_modules/.installed: $(WEB)/package-lock.json
	npm --prefix $(WEB) ci
	@touch $@

# One thread for each: torch's own pools would fight over the cores. Whole files go to a worker, the longest first.
RING := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test test-all test-slow coverage: export OMP_NUM_THREADS := 1
test test-all test-slow: page
test: $(TESTS)
	$(RING) -m "not slow" --record=build/test-times.json

# The record in one word: pytest takes a second one for a test where the file exists.
# Writes .ci/full-run.json where everything passes on a clean checkout: commit it.
test-all: $(TESTS)
	$(RING) --hypothesis-profile all --record=.ci/full-run.json

# The default tests with the oldest packages that pyproject.toml allows, and with the newest ones when `make constraints` ran.
test-oldest:
	$(MAKE) test VENV=build/oldest CONSTRAINTS=constraints/oldest.txt
test-newest:
	$(MAKE) test VENV=build/newest CONSTRAINTS=constraints/newest.txt

# Tests of the device's side in an environment without torch, for another interpreter: make test-device PYTHON=python3.13
DEVICE := build/test-device
NEED_TORCH := tests/wire/test_metrics.py tests/device_runtime/personal tests/device_runtime/profile/test_measured.py \
  tests/device_runtime/engine/test_executorch_build.py tests/device_runtime/engine/test_executorch_engine.py
test-device:
	@$(ENVIRONMENT) $(DEVICE) ".[device,images,text]" amqtt hypothesis immutables onnx psutil pydantic pytest pytest-xdist sqlalchemy
	PYTHONPATH=.:server:exporters:device_runtime:conformance OMP_NUM_THREADS=1 $(DEVICE)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	  -m "not slow" $(addprefix --ignore ,$(NEED_TORCH)) tests/wire tests/device_runtime

# Each is resolved for Python 3.11, without torch, whose release pyproject.toml names, and what its build for GPUs brings. The
# oldest releases are those of packages that we name; what these need in turn is the newest that fits.
constraints: $(TESTS)
	for each in oldest:lowest-direct newest:highest; do \
	  to=constraints/$${each%:*}.txt; rm -f $$to; \
	  $(BIN)/uv pip compile --quiet --python-version 3.11 --resolution $${each#*:} --extra dev --no-annotate --output-file $$to \
	    --custom-compile-command "make constraints" --no-emit-package torch --no-emit-package setuptools pyproject.toml && \
	  sed -E -i '/^(nvidia|cuda)-/d' $$to || exit 1; done

# The slow tests of rooms that changed since all tests last passed, as far as the seconds of one core go.
SLOW_SECONDS ?= 300
test-slow: $(TESTS)
	@chosen=$$($(BIN)/python -m tests.rings.changed --seconds $(SLOW_SECONDS)) && \
	  if [ -n "$$chosen" ]; then $(RING) -m slow $$chosen; fi

# Branches that tests reach, in the processes that they start too: make coverage, or RING_OPTIONS= for all tests.
RING_OPTIONS ?= -m "not slow"
coverage: $(TESTS)
	$(RING) $(RING_OPTIONS) --cov --cov-report=

# Device, API and command line are type-checked for macOS and Windows, too, and run on Linux only.
PORTABLE := edgefl device_runtime
lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin $(PORTABLE)
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 $(PORTABLE)
	$(BIN)/lint-imports
	$(BIN)/deptry .

# What `edgefl ls` and `edgefl validate` know of the catalogs, written anew after one of these changed.
facts: $(TESTS)
	$(BIN)/python -m tools.facts

# 2,000 generated modules compared with torch, 200 of them trained on ONNX Runtime and 60 on ExecuTorch: hours. A second call
# continues where the first one stopped; docs/contributing/module_fuzzing.md has the summary. FUZZ="--onnx 20" changes counts.
FUZZ ?=
fuzz-modules: export OMP_NUM_THREADS := 1
fuzz-modules: $(TESTS)
	$(BIN)/python -W ignore -m tests.support.fuzz $(FUZZ)

# All tables of docs/benchmarks.md, measured on this machine: about half an hour, of which nothing else should run.
bench: $(TESTS)
	$(BIN)/python -m benchmarks.page

# A source distribution and the wheel from it, the page for browsers in both, with the same bits from two builds; what each side
# installs from the wheel trains with the other. From the commit that is checked out. Its tools have an environment of their own.
RELEASE := .venv-release
wheel: $(TESTS) $(RELEASE)/.installed agents-web
	rm -rf build/wheel
	$(RELEASE)/bin/python -m tools.release build build/wheel
	$(BIN)/python -m tests.rings.wheel files build/wheel
	@$(ENVIRONMENT) build/wheel/device "$$(echo build/wheel/*.whl)[device]"
	@$(ENVIRONMENT) build/wheel/server --torch "$$(echo build/wheel/*.whl)[server]"
	$(BIN)/python -m tests.rings.wheel trains build/wheel/device build/wheel/server

# What is published, in dist/: the distributions, bills of materials and SHA256SUMS. docs/contributing/releasing.md says how.
release: wheel
	$(RELEASE)/bin/python -m tools.release describe build/wheel dist

$(RELEASE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --upgrade pip
	$(RELEASE)/bin/python -m pip install --quiet --group release
	@touch $@

# The C++ agent in build/agents/cpp: the command edgefl-agent and libedgefl. Debian's packages are in agents/cpp/README.md; the
# runtimes of graphs are those of the environment's wheels. ARCH=arm64 on the command line builds it on Debian for that
# architecture into build/agents/cpp-arm64, with the runtimes of the same releases' wheels. ARCH of the environment is not ours.
ARCH :=
HOST_ARCH := $(shell dpkg --print-architecture 2>/dev/null)
CROSS := $(filter-out $(HOST_ARCH),$(ARCH))
CPP := build/agents/cpp$(addprefix -,$(CROSS))
RUNTIMES := build/agents/runtimes-$(CROSS)
ifeq ($(CROSS),)
CPP_RUNTIMES := $(TESTS)
CPP_OPTIONS = -DEDGEFL_PYTHON=$(abspath $(BIN)/python)
else
CPP_RUNTIMES := $(RUNTIMES)/.installed
CPP_OPTIONS = -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake -DEDGEFL_RUNTIMES=$(abspath $(RUNTIMES))
endif
agents-cpp: $(CPP_RUNTIMES)
	$(BIN)/cmake -S agents/cpp -B $(CPP) -G Ninja $(CPP_OPTIONS)
	$(BIN)/cmake --build $(CPP)

# build/deb/edgefl-agent_VERSION-REVISION_ARCH.deb, with this machine's architecture or ARCH=arm64.
REVISION ?= 1
DEB := build/deb/$(or $(ARCH),$(HOST_ARCH))
deb: $(CPP_RUNTIMES)
	$(BIN)/cmake -S agents/cpp -B $(DEB) -G Ninja $(CPP_OPTIONS) -DEDGEFL_DEB=ON -DEDGEFL_DEB_REVISION=$(REVISION)
	$(BIN)/cmake --build $(DEB) --target edgefl-agent
	$(BIN)/cpack --config $(DEB)/CPackConfig.cmake -B build/deb

CROSS_PACKAGES := ninja-build pkg-config nlohmann-json3-dev libcli11-dev libmsgpack-cxx-dev crossbuild-essential-arm64 \
  $(addsuffix :arm64,libmosquitto-dev libssl-dev libsqlite3-dev libzstd-dev zlib1g-dev libcurl4-openssl-dev libpng-dev \
  libjpeg-dev libstdc++6)
RELEASES = from importlib.metadata import version; print(*(f"{name}=={version(name)}" for name in ("onnxruntime", "executorch")))
$(RUNTIMES)/.installed: $(TESTS)
	@[ "$(CROSS)" = arm64 ] || { echo "ARCH=$(CROSS): expected arm64, or nothing for this machine's own architecture"; exit 2; }
	@missing=$$(for each in $(CROSS_PACKAGES); do dpkg-query -W -f '$${Status}\n' $$each 2>/dev/null | grep -q " installed" || echo $$each; done); \
	  [ -z "$$missing" ] || { echo "To build for arm64 on this machine, run as root:"; \
	  echo "  dpkg --add-architecture arm64 && apt-get update && apt-get install" $$missing; exit 2; }
	rm -rf $(RUNTIMES)
	$(BIN)/python -m pip install --quiet --target $(RUNTIMES) --no-deps --no-compile --only-binary :all: \
	  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
	  $$($(BIN)/python -c '$(RELEASES)')
	@touch $@

# Both agents on an emulated arm64 board against a server here, as root: docs/arm64.md. BOARD="--stages rounds" changes what runs.
BOARD ?=
.PHONY: board
board: $(TESTS)
	$(MAKE) --no-print-directory agents-cpp ARCH=arm64
	$(BIN)/python -m tools.board $(BOARD)

# org.edgefl for Java and Kotlin: its jar and native library in build/agents/java, by javac and jar.
agents-java: agents-cpp
	$(BIN)/cmake --install $(CPP) --prefix build/agents/installed
	$(BIN)/cmake -S agents/java -B build/agents/java -DCMAKE_PREFIX_PATH=$(abspath build/agents/installed)
	$(BIN)/cmake --build build/agents/java --target agents-java

# The documents as a site in build/site: a dead link is an error. Its tools have an environment of their own.
# Never --quiet: mkdocs then counts no warnings, and strict mode finds none.
DOCS := .venv-docs
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --group docs
	@touch $@

check: lint wheel docs test-all

clean:
	rm -rf $(VENV) $(DOCS) $(RELEASE) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
