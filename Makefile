PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
# Python compiles modules when it first imports them; pip would compile thousands that are never imported.
INSTALL := pip --disable-pip-version-check --quiet install --no-compile
PIP := $(BIN)/$(INSTALL)
LUCID := .venv-lucid
TRAINERS := .venv-trainers
# Compiling takes most of the installation time. Not every environment needs the kernels.
NO_KERNELS := -Cwheel.cmake=false -Cwheel.py-api=py3
NATIVE := CMakeLists.txt $(wildcard src/gradclip/_src/native/*.cpp src/gradclip/_src/native/*.hpp)
DEMO ?= build/loss_spike.svg
COMPILERS ?= g++ clang++-14
MINUTES ?= 30
SEED := $(or $(SEED),$(shell date +%s))
GPU ?=
TRIAL ?=

.DEFAULT_GOAL := help
.PHONY: help demo test every-test test-all shuffle times ci trainers proofs check attack lint docs look parity bench accelerators gpu gpu-wheels gpu-rehearsal wheel portable release compilers versions sanitize clean

# Tests and timings need the kernels. The demo and the linters do not.
test every-test shuffle times check attack parity bench wheel release sanitize lucid trainers: export GRADCLIP_REQUIRE_NATIVE = 1

# Compiling the frameworks' Python modules again for each of the processes that tests start takes minutes.
unexport PYTHONDONTWRITEBYTECODE

help:  ## Show this menu
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: .venv-demo/ready  ## Train a network on data with one broken record, without clipping, with it, and with spikes skipped
	@mkdir -p $(dir $(DEMO))
	MATPLOTLIBRC=examples/gallery .venv-demo/bin/python examples/gallery/loss_spike.py $(DEMO)
	@echo wrote $(DEMO)

test: $(VENV)/ready  ## Set up and run the tests that are quick: each value of each parameter once
	$(PYTEST) -m "quick and not gpu"

test-all:  ## Run all tests, with every combination of parameters; Lucid's and the trainers' in their own environments
	@$(MAKE) --no-print-directory every-test
	@$(MAKE) --no-print-directory lucid
	@$(MAKE) --no-print-directory trainers

every-test: $(VENV)/ready
	$(PYTEST) -p processor_time

shuffle: $(VENV)/ready  ## Run all tests in a random order, which is printed; SEED=7 for that order again
	PYTHONHASHSEED=$(SEED) $(PYTEST) -p pytest_randomly --randomly-seed $(SEED) --randomly-dont-reset-seed

times: $(VENV)/ready  ## Measure all tests, and write the slow ones to tests/times.json, by which `make test` chooses
	$(PYTEST) -p processor_time --write-times

ci:  ## Run what CI runs on a clean clone of the last commit, and say what failed and how to repeat it; IN=FOLDER for a place
	$(PYTHON) scripts/ci.py $(IN)

trainers: $(TRAINERS)/ready  ## Run short trainings by Lightning, Hugging Face, DeepSpeed, Megatron and Flower, in an environment of their own
	$(TRAINERS)/bin/python -m pytest -c /dev/null --rootdir . --confcutdir tests/trainers -p no:cacheprovider tests/trainers

proofs: $(VENV)/ready  ## Have Gappa and z3 (apt-get install gappa z3) check the proofs of the bound, and try them with other constants
	$(BIN)/python proofs/run.py
	PYTHONPATH=proofs $(BIN)/python -m pytest -q -c /dev/null --rootdir . --confcutdir tests/proofs -p no:cacheprovider --numprocesses 2 tests/proofs

check: lint $(VENV)/ready  ## Check style, types and layers, and run the tests of changed files, in two minutes
	$(BIN)/python -m pytest -q -m "quick and not gpu" $$($(BIN)/python scripts/changed_tests.py)

attack: $(VENV)/ready $(TRAINERS)/ready  ## Test random cases for half an hour; MINUTES=5 for a short run
	$(TRAINERS)/bin/python tests/attack/run.py --minutes $$(awk 'BEGIN { print $(MINUTES) / 20 }') || failed=1; \
	$(BIN)/python tests/attack/run.py --minutes $(MINUTES) || failed=1; exit $${failed:-0}

lint: .venv-lint/ready  ## Check style and types
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/mypy

look: docs  ## Open every page in Chromium, and fail if a reader would not see all of it
	.venv-docs/bin/python scripts/site_widths.py

docs: .venv-docs/ready  ## Build the documentation site in build/site/html, where warnings are errors, and test it
	.venv-docs/bin/python scripts/site_pages.py
	.venv-docs/bin/python -m pytest -q -c /dev/null --rootdir . --confcutdir tests/site -p no:cacheprovider tests/site

parity: $(VENV)/ready  ## Compare every function with the library's own, and write docs/parity.md
	$(BIN)/python scripts/parity.py --write > /dev/null
	@python=$$($(PYTHON) scripts/find_python.py 3.12); \
	if [ -z "$$python" ]; then echo "Lucid's rows stay unchanged: Lucid needs Python 3.12, and no working one was found."; \
	else \
	  set -e; \
	  $(MAKE) --no-print-directory $(LUCID)/ready PYTHON312=$$python; \
	  $(LUCID)/bin/python scripts/parity.py --write --libraries Lucid > /dev/null; \
	fi

bench: $(VENV)/ready  ## Compare speed with the replaced libraries and with a plain read of the same bytes, and draw a picture
	$(BIN)/python benchmarks/clipping.py
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/graphs.py
	$(BIN)/python benchmarks/graphs_mlx.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/per_example.py
	$(BIN)/python benchmarks/private_steps.py --write
	$(BIN)/python benchmarks/private_picture.py
	$(BIN)/python benchmarks/noise.py --write
	$(BIN)/python benchmarks/folded.py --write
	$(BIN)/python benchmarks/sharded.py
	$(BIN)/python benchmarks/sharded_jax.py
	$(BIN)/python benchmarks/picture.py
	$(BIN)/python benchmarks/speed_picture.py
	$(BIN)/python benchmarks/scenarios.py --write
	$(BIN)/python benchmarks/training.py --short
	$(BIN)/python benchmarks/tables.py --write

accelerators: $(VENV)/ready  ## Count operations on accelerators, compared with PyTorch, Opacus and optax; needs no GPU
	$(BIN)/python benchmarks/counts.py --write
	$(BIN)/python benchmarks/counts_jax.py --write
	$(BIN)/python benchmarks/counts_kernels.py --write
	$(BIN)/python benchmarks/tables.py --write > /dev/null

gpu:  ## Test and time gradclip on a GPU in 9 minutes, with what python3 has; GPU="--only tests --seconds 200" for a part
	python3 scripts/gpu_run.py $(GPU)

gpu-wheels:  ## Collect wheels for `make gpu` on a machine without a package registry, in gpu-wheels
	$(PYTHON) scripts/gpu_wheels.py

gpu-rehearsal: .venv-gpu/ready  ## Run what `make gpu` runs on this machine, where the CPU takes the place of the GPU
	$(PYTHON) scripts/gpu_wheels.py build/gpu/wheels --this-python
	PIP_NO_INDEX=1 .venv-gpu/bin/python scripts/gpu_run.py --rehearse --wheels build/gpu/wheels $(GPU)

wheel: .venv-lint/ready  ## Build the wheel, and install it with and without a compiler in an empty environment
	rm -rf dist .venv-wheel
	.venv-lint/bin/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/$(INSTALL) dist/*.whl
	.venv-wheel/bin/python scripts/smoke.py
	.venv-wheel/bin/python scripts/wheel_without_compiler.py dist/*.tar.gz

portable:  ## Install without kernels, and run the examples of docstrings that need NumPy only; on Linux, macOS and Windows
	$(PYTHON) scripts/portable.py

release: .venv-release/ready  ## Build sdist and wheels, check them, and write the release notes; TRIAL=--trial before a version is ready
	.venv-release/bin/python scripts/release.py $(TRIAL)

compilers:  ## Build the kernels with GCC and the oldest Clang, and test both; COMPILERS="g++ clang++-16" for others
	$(PYTHON) scripts/kernels.py $(COMPILERS)

versions:  ## Test the oldest and the newest releases of gradclip's dependencies; TORCH=2.6.0 for a different PyTorch
	$(PYTHON) scripts/versions.py oldest newest too_old

sanitize: .venv-sanitize/ready  ## Run the kernels' tests with GCC's sanitizers
	.venv-sanitize/bin/python scripts/kernels.py sanitize

.PHONY: lucid
lucid:
	@python=$$($(PYTHON) scripts/find_python.py 3.12); \
	if [ -z "$$python" ]; then \
	  echo "NOT TESTED: the Lucid integration with Lucid itself. Lucid needs Python 3.12, and no working python3.12"; \
	  echo "was found. Install one, or set PYTHON312=/path/to/python3.12, then run 'make test' again."; \
	else \
	  set -e; \
	  $(MAKE) --no-print-directory $(LUCID)/ready PYTHON312=$$python; \
	  PYTHONPATH=tests/support:tests:scripts $(LUCID)/bin/python -W error -m pytest -c /dev/null --rootdir . --confcutdir tests/parity/lucid -p no:cacheprovider tests/parity/lucid; \
	fi

$(LUCID)/ready: pyproject.toml $(NATIVE)
	$(PYTHON312) -m venv $(LUCID)
	$(LUCID)/bin/$(INSTALL) -e . lucid-dl==2.7.9 'mlx[cpu]' ml_dtypes pytest
	touch $@

$(TRAINERS)/ready: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/$(INSTALL) torch==2.13.0
	$(TRAINERS)/bin/$(INSTALL) -e '.[trainers]'
	touch $@

$(VENV)/ready: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[test]'
	touch $@

# What a bare machine with a GPU has. PyTorch for the CPU alone exists for fewer Pythons.
.venv-gpu/ready: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/$(INSTALL) torch==2.13.0
	.venv-gpu/bin/$(INSTALL) triton==3.9.0 jax optax numpy scipy opt-einsum safetensors matplotlib typer rich pytest hypothesis \
	  scikit-build-core nanobind cmake ninja
	touch $@

.venv-demo/ready: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/$(INSTALL) torch==2.13.0
	.venv-demo/bin/$(INSTALL) -e '.[torch,plot]' scikit-learn
	touch $@

.venv-sanitize/ready: pyproject.toml
	$(PYTHON) -m venv .venv-sanitize
	.venv-sanitize/bin/$(INSTALL) $(NO_KERNELS) . pytest ml_dtypes
	touch $@

.venv-docs/ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(INSTALL) $(NO_KERNELS) -e '.[docs]'
	touch $@

.venv-lint/ready: pyproject.toml
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/$(INSTALL) $(NO_KERNELS) -e '.[lint]'
	touch $@

.venv-release/ready: pyproject.toml
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/$(INSTALL) $(NO_KERNELS) -e '.[release]'
	touch $@

clean:  ## Remove environments, build outputs and caches
	rm -rf .venv .venv-* dist build gpu-wheels gradclip-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/gradclip/_src/native/*.so
