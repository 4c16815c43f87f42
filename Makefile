# The commands one needs. Each works from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
INSTALL = $(VENV)/bin/pip install --quiet --constraint constraints.txt

.PHONY: demo test lint format bench

demo:
	$(PYTHON) -m venv $(VENV) && $(INSTALL) '.[hf]' && $(VENV)/bin/talkoot demo

test:
	$(PYTHON) -m venv $(VENV) && $(INSTALL) -e '.[hf,lora,gym,dev]'
	$(VENV)/bin/pytest -n auto tests/unit tests/golden tests/sim
	$(VENV)/bin/pytest tests/compat tests/page tests/proc  # these measure time

lint:
	$(VENV)/bin/ruff format --check src tests && $(VENV)/bin/ruff check src tests && $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format:
	$(VENV)/bin/ruff format src tests && $(VENV)/bin/ruff check --fix src tests

bench:
	for name in pipeline-speed sim-speed; do $(VENV)/bin/talkoot bench $$name || exit $$?; done
