# Two commands do everything: `make demo` and `make test`. Each makes .venv when it is missing.
# With NEWEST=1 all of them work in .venv-newest, with the newest JAX and Flax that are supported.
ifdef NEWEST
PYTHON ?= python3.13 python3.12
VENV := .venv-newest
CONSTRAINTS := constraints-newest.txt
MINOR := 12
else
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
MINOR := 11
endif
BIN := $(VENV)/bin
PY := $(BIN)/python

# pyright brings its own node; this keeps it from asking the network for newer versions.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check lint types slow docs guides table fuzz claims format clean

help: ## this text
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(VENV)/.installed ## train a small GPT-2 on real text, with the memory table and plots
	@$(PY) -m models demo

# JAX keeps the programs that it compiles there, so that the next run of the tests is faster.
CACHE := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/build/compiled/$(VENV) \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

test: $(VENV)/.installed ## all tests but the slow ones, and the examples in docstrings
	@$(CACHE) $(PY) -m pytest -m "not slow" -n 2 --dist loadfile --durations=15 \
	  --ignore=tests/test_layers.py --ignore=tests/test_repository.py  # both are in check

check: $(VENV)/.installed ## formatting, lint, types, layers: under 20 seconds
	@$(MAKE) --no-print-directory -j2 types lint

types: $(VENV)/.installed
	@$(BIN)/pyright --warnings --pythonpath $(PY)

lint: $(VENV)/.installed
	@$(BIN)/ruff format --check --quiet . || { echo "Not formatted: run 'make format'."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(PY) -m pytest -q -s --noconftest tests/test_layers.py tests/test_repository.py  # without JAX

slow: $(VENV)/.docs ## the slow tests, file by file; goes on where it stopped. OF=planner: a part; AGAIN=1: all
	@$(CACHE) $(PY) -m tests.slow $(OF) $(if $(AGAIN),--again) -n 2

docs: $(VENV)/.docs ## the site, in build/site; warnings are errors, and nothing comes from the network
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --config-file docs/site/mkdocs.yml
	@echo "Read it: $(PY) -m http.server --directory build/site"

guides: $(VENV)/.docs ## run the guides, and put what they print into them
	@$(PY) docs/site/notebooks.py

table: $(VENV)/.installed ## OF=remat_cpu.run: measure, and write the table of experiments/remat_cpu
	@$(PY) -m experiments.$(OF) --write

N ?= 20000
fuzz: $(VENV)/.installed ## N=20000 random programs, by xform and by JAX; goes on where it stopped
	@$(PY) -m experiments.fuzz.run --programs $(N) $(if $(WRITE),--write)

claims: $(VENV)/.installed ## what texts claim of derivatives, measured; QUICK=1 in a few minutes, nothing kept
	@$(PY) -m experiments.claims.run $(if $(QUICK),--quick) $(if $(WRITE),--write)

format: $(VENV)/.installed ## format, and fix what ruff can fix
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

clean: ## remove caches and build output (remove .venv, .venv-newest by hand to start afresh)
	@rm -rf build dist .pytest_cache .ruff_cache *.egg-info
	@find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# pyenv's commands run only where their version is selected; its Pythons themselves run everywhere.
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)

# The stamp is touched last, so an interrupted install is taken up again.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@test -x $(PY) || { for python in $(foreach p,$(PYTHON),$(p) $(PYENV)/versions/*/bin/$(p)); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, $(MINOR)) <= sys.version_info < (3, 14))' 2>/dev/null; \
	  then exec "$$python" -m venv $(VENV); fi; done; \
	  echo "Python 3.$(MINOR) to 3.13 is needed, and none was found as: $(PYTHON)."; \
	  echo "Say where one is, e.g.: make $(MAKECMDGOALS) PYTHON=/usr/bin/python3.13$(if $(NEWEST), NEWEST=1)"; exit 1; }
	@$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@echo "Installing what the site needs into $(VENV) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@
