# Two commands do everything: `make demo` and `make test`. Each makes .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python

# pyright brings its own node; this keeps it from asking the network for newer versions.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check lint types slow fuzz format clean

help: ## this text
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: .venv/.installed ## train the tiny transformer on real text, with the memory table and plots
	@$(PY) -m models.demo

test: .venv/.installed ## all tests but the slow ones, and the examples in docstrings
	@$(PY) -m pytest -m "not slow" -n 2 --durations=15

check: .venv/.installed ## formatting, lint, types, layers: under 20 seconds
	@$(MAKE) --no-print-directory -j2 types lint

types: .venv/.installed
	@$(BIN)/pyright --warnings

lint: .venv/.installed
	@$(BIN)/ruff format --check --quiet . || { echo "Not formatted: run 'make format'."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(PY) -m pytest -q -s tests/test_layers.py tests/test_repository.py

slow: .venv/.installed ## the tests that take minutes
	@$(PY) -m pytest -m slow -n 2 --durations=15

N ?= 20000
fuzz: .venv/.installed ## N=20000 random programs, by xform and by JAX; goes on where it stopped
	@$(PY) -m experiments.fuzz.run --programs $(N)

format: .venv/.installed ## format, and fix what ruff can fix
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

clean: ## remove caches and build output (remove .venv by hand to start afresh)
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The stamp is touched last, so an interrupted install is taken up again.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "xform needs Python 3.11 or later; say which, e.g.: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into .venv (a few minutes the first time) ..."
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
