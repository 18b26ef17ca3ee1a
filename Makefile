# Two commands for a fresh machine: `make demo` and `make test`. Both create .venv from requirements.txt first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow check format clean

demo: $(READY)
	$(BIN)/holdfast demo

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The marker is written last: an interrupted install is done again, a finished one is never touched.
$(READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Holdfast needs Python 3.11 or newer; run make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
