# Each target sets itself up: a virtual environment in .venv (or .venv-NAME) with pinned requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check install --quiet
PIP := $(BIN)/python $(INSTALL)
# the package installs without a compiler; here the kernels must be there
BUILT := $(BIN)/python -c "import sys; from halfbyte.backends.cpu import library; sys.exit(None if library.library_path() else 'the C++ kernels were not built')"
CPP = $(shell find src tests -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help demo test test-docs test-pages test-clients test-zoo test-real test-interpreter test-gpu test-oldest test-arm64 test-scale check sanitize lint types \
	format conform bench bench-convert docs docs-site wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.runtime  ## every contract and method on a few tensors; then a real model converted and verified
	$(BIN)/python examples/demo.py
	$(BIN)/python -m examples.minilm

test: $(VENV)/.peers  ## run every test, the live peers included
	$(BIN)/python -m pytest -n auto

test-docs: $(VENV)/.peers  ## run the examples in README.md and docs/, check the figures and tables there
	$(BIN)/python -m pytest README.md docs tests/test_docs.py

test-pages: $(VENV)/.peers  ## the pages of `halfbyte study --html` in Chromium, at desktop and phone width; needs the Debian package chromium
	$(BIN)/python -m pytest tests/study/check_page.py

test-clients: $(VENV)/.peers .venv-vllm/.ready .venv-sglang/.ready  ## vLLM and SGLang load what convert writes (minutes)
	$(BIN)/python -m pytest tests/clients/check_sglang.py tests/clients/check_vllm.py tests/clients/check_vllm_load.py \
		tests/clients/check_vllm_families.py tests/clients/check_sglang_families.py

test-real: $(VENV)/.peers  ## two real models, fetched once (180 MB), convert, load and compute in transformers (minutes)
	$(BIN)/python -m pytest tests/real/check_real.py tests/real/check_gptq.py

test-zoo: $(VENV)/.peers  ## a tiny model of every architecture class of transformers: converted, verified, loaded, computed (minutes)
	$(BIN)/python -m tools.architectures.generate --check
	$(BIN)/python -m tests.models.run_time_names
	$(BIN)/python -m tests.zoo.run

test-interpreter: $(VENV)/.peers  ## GPU kernels under Triton's interpreter: searches, headroom, invented contracts; all built for capability 12.0 (minutes; `make test` has a sample)
	$(BIN)/python -m pytest -n auto tests/backends/gpu/compiled/check_builds.py
	TRITON_INTERPRET=1 $(BIN)/python -W ignore -m tests.backends.gpu.interpreted_headroom --every
	TRITON_INTERPRET=1 $(BIN)/python -W ignore -m tests.backends.gpu.interpreted_searches --every
	TRITON_INTERPRET=1 $(BIN)/python -W ignore -m tests.backends.gpu.interpreted_inventions 80 280 3

test-gpu:  ## the bit-identity matrix on the card of this machine, with the Python that is there; installs nothing
	PYTHONPATH=src $(PYTHON) -W ignore -m tests.backends.gpu.run_card

test-oldest: .venv-oldest/.ready  ## the tests that need no torch, with the oldest dependencies allowed (minutes)
	.venv-oldest/bin/python -m tests.oldest -n auto

test-arm64:  ## the portable kernels, cross-compiled for arm64 and run under qemu; needs g++-aarch64-linux-gnu, qemu-user-static
	$(PYTHON) tests/arm64.py

test-scale: $(VENV)/.peers  ## twenty random fault schedules on a Ray cluster, and the driver's memory with 60,000 tensors (minutes)
	$(BIN)/python -m pytest -q tests/scale/check_faults.py tests/scale/check_memory.py tests/scale/check_calibrate.py

check: lint types test sanitize  ## lint, types, tests, and the kernels under sanitizers

sanitize: $(VENV)/.peers  ## every kernel under AddressSanitizer and UBSan
	$(BIN)/python tests/sanitize.py

lint: $(VENV)/.peers  ## ruff over the Python, clang-format over the C++ and CUDA
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)

types: $(VENV)/.peers  ## mypy, strict
	$(BIN)/mypy

format: $(VENV)/.peers  ## rewrite every file as `make lint` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

conform: $(VENV)/.runtime  ## run the golden vectors of every peer
	$(BIN)/halfbyte conform conformance/vectors.zip

bench: $(VENV)/.peers  ## speed against memcpy and the peers, bits checked
	$(BIN)/python -m benchmarks.cpu

bench-convert: $(VENV)/.peers  ## convert beside cp -r and a loop in torch (minutes, several GB of disk)
	$(BIN)/python -m benchmarks.convert

docs: $(VENV)/.runtime  ## rewrite the generated tables and pictures in docs/
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/draw.py

docs-site: .venv-docs/.ready  ## docs/ as a site in site/, to be opened from the disk; every link and anchor checked
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	.venv-docs/bin/python docs/check_site.py site

wheel: .venv-wheel/.ready  ## build wheel and source archive into dist/, check them, try the wheel in an empty environment
	.venv-wheel/bin/python tests/wheel.py

clean:  ## remove everything that a target made
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-oldest .venv-wheel .venv-docs site dist .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

NATIVE := CMakeLists.txt $(shell find src/halfbyte/backends/cpu/native -type f)

$(VENV)/.runtime: requirements.txt pyproject.toml $(NATIVE) | $(BIN)/python
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	$(BUILT)
	touch $@

$(VENV)/.peers: requirements.txt requirements-dev.txt requirements-peers.txt pyproject.toml $(NATIVE) | $(BIN)/python
	$(PIP) -r requirements-peers.txt
	$(PIP) --no-deps transformer_engine==2.20.2  # its Python reference quantizer is loaded as a file: no CUDA
	$(PIP) --no-deps --editable .
	$(BUILT)
	touch $@

.venv-oldest/.ready: requirements-oldest.txt pyproject.toml $(NATIVE)
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python $(INSTALL) -r requirements-oldest.txt
	.venv-oldest/bin/python $(INSTALL) --no-deps --editable .
	.venv-oldest/bin/python -m pip check  # the pins satisfy pyproject.toml
	touch $@

.venv-wheel/.ready: requirements-wheel.txt
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(INSTALL) -r requirements-wheel.txt
	touch $@

.venv-docs/.ready: requirements-docs.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python $(INSTALL) -r requirements-docs.txt
	touch $@

# torch first and with what it needs; the client itself without, so that nothing built for a GPU comes along
.venv-%/.ready: requirements-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) torch==2.13.0
	.venv-$*/bin/python $(INSTALL) --no-deps -r requirements-$*.txt
	touch $@
