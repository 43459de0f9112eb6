# Each target sets itself up: a virtual environment in .venv with pinned requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check sanitize lint types format conform bench docs clean

demo: $(VENV)/.runtime  ## quantize a small set of tensors with every contract and method
	$(BIN)/python examples/demo.py

test: $(VENV)/.peers  ## run every test, the live peers included
	$(BIN)/python -m pytest -n auto

check: lint types test sanitize  ## lint, types, tests, and the kernels under sanitizers

sanitize: $(VENV)/.peers  ## every kernel under AddressSanitizer and UBSan
	$(BIN)/python tests/sanitize.py

lint: $(VENV)/.peers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.peers
	$(BIN)/mypy

format: $(VENV)/.peers
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

conform: $(VENV)/.runtime  ## run the golden vectors of every peer
	$(BIN)/halfbyte conform conformance/vectors.zip --allow-pending

bench: $(VENV)/.peers  ## speed against memcpy and the peers, bits checked
	$(BIN)/python -m benchmarks.cpu

docs: $(VENV)/.runtime  ## rewrite the generated tables in docs/
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

NATIVE := CMakeLists.txt $(wildcard src/halfbyte/native/*)

$(VENV)/.runtime: requirements.txt pyproject.toml $(NATIVE) | $(BIN)/python
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	touch $@

$(VENV)/.peers: requirements.txt requirements-dev.txt requirements-peers.txt pyproject.toml $(NATIVE) | $(BIN)/python
	$(PIP) -r requirements-peers.txt
	$(PIP) --no-deps transformer_engine==2.20.2  # its Python reference quantizer is loaded as a file: no CUDA
	$(PIP) --no-deps --editable .
	touch $@
