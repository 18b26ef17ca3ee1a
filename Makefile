# Two commands for a fresh machine: `make demo` and `make test`. Both create .venv from requirements.txt first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Most tests wait for processes, so there are more workers than cores. A worker that crashes fails its test and is not
# replaced: the replacement would run the same test again.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# What codespell reads; its settings are in pyproject.toml.
PROSE := src tests docs examples configs deploy .ci README.md CONTRIBUTING.md CHANGELOG.md Makefile pyproject.toml

# Flags of `holdfast demo`, such as DEMO=--fast.
DEMO :=

.PHONY: demo test test-all check docs format clean

demo: $(READY)
	$(BIN)/holdfast demo $(DEMO)

test: $(READY)
	$(PYTEST)

# What `make test` leaves out, and only that.
test-all: $(READY)
	$(PYTEST) -m 'slow and not gpu'

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m codespell_lib $(PROSE)
	$(BIN)/mypy

# The documentation as a site in ./site; a broken link is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The marker is written last: an interrupted install is done again, a finished one is never touched.
$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Holdfast needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@echo 'Installing Holdfast into $(VENV): 3 GB with a CPU build of PyTorch, about 8 GB with a CUDA build; 2 to 10 minutes.'
	@echo 'pip prints nothing unless something is wrong. Later calls of make skip this.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
