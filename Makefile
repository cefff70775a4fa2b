PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
LUCID := .venv-lucid
DEMO ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench wheel clean

help:  ## Show this menu
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: .venv-demo/ready  ## Train a recurrent network with and without clipping; DEMO="--steps 50" for less
	.venv-demo/bin/gradclip demo $(DEMO)

test: $(VENV)/ready  ## Set up and run all tests, Lucid's in an environment of their own
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal
	@$(MAKE) --no-print-directory lucid

lint: .venv-lint/ready  ## Check style and types
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/mypy

bench: $(VENV)/ready  ## Compare speed with the libraries replaced and with a plain read of the same bytes
	$(BIN)/python benchmarks/clipping.py

wheel: .venv-lint/ready  ## Build the wheel and import it in an environment that holds nothing else
	rm -rf dist .venv-wheel
	.venv-lint/bin/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip --disable-pip-version-check --quiet install dist/*.whl
	.venv-wheel/bin/python tests/wheel_smoke.py

.PHONY: lucid
lucid:
	@python=$$($(PYTHON) tests/find_python.py 3.12); \
	if [ -z "$$python" ]; then \
	  echo "NOT TESTED: the Lucid integration beside Lucid itself. Lucid needs Python 3.12, and no python3.12 that"; \
	  echo "starts was found. Install one (or set PYTHON312=/path/to/python3.12) and run 'make test' again."; \
	else \
	  set -e; \
	  [ -f $(LUCID)/ready ] || { rm -rf $(LUCID); $$python -m venv $(LUCID); \
	    $(LUCID)/bin/pip --disable-pip-version-check --quiet install -e . lucid-dl==2.7.9 'mlx[cpu]' pytest; \
	    touch $(LUCID)/ready; }; \
	  PYTHONPATH=tests $(LUCID)/bin/python -W error -m pytest -c /dev/null --rootdir . --confcutdir tests/parity/lucid -p no:cacheprovider tests/parity/lucid; \
	fi

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	$(PIP) install -e '.[test]'
	touch $@

.venv-demo/ready: pyproject.toml
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip --disable-pip-version-check --quiet install -e '.[demo]'
	touch $@

.venv-lint/ready: pyproject.toml
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/pip --disable-pip-version-check --quiet install -e '.[lint]'
	touch $@

clean:  ## Remove the environments and what was built
	rm -rf .venv .venv-* dist build gradclip-demo
