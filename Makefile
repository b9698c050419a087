# Two commands do everything: `make demo` and `make test`. Both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build of torch is enough for what this Makefile does; any torch >= 2.11 works.
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m

.PHONY: demo test serve chat claims lint setup

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/morph pull $(MODEL)
	$(BIN)/morph demo $(MODEL)

test: setup
	$(BIN)/python -m pytest

serve: setup
	$(BIN)/morph pull $(MODEL)
	$(BIN)/morph serve $(MODEL)

chat: setup
	$(BIN)/morph pull $(MODEL)
	$(BIN)/morph chat $(MODEL)

claims: setup
	$(BIN)/python -m benchmarks.claims

lint: setup
	$(BIN)/ruff check morph tests benchmarks
	$(BIN)/mypy
