# install: a virtual environment with the exact versions of requirements.lock; nothing to do when they are unchanged.
# demo: trains a small model whose state does not fit in its memory budget. test: every check. clean: removes both.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo

.DELETE_ON_ERROR:
.PHONY: install demo test torture clean

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is missing or older than Python 3.11. Fix: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# The demo always starts from nothing: its own run folder, and only that one, is renewed.
demo: install
	rm -rf $(DEMO)
	$(BIN)/megatrain train tools/demo.yaml

test: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# A real run killed a hundred times, half of them with clipping: minutes.
torture: install
	$(BIN)/python tests/torture.py --kills 50
	$(BIN)/python tests/torture.py --kills 50 --seed 1 --clip 0.5

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
