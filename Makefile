# Needs python3 with venv, and make. `make run` serves the demo model; `make test` runs every test.
# PYTHON picks the interpreter, ARGS is handed on (make run ARGS="--port 9000", make test ARGS="-k scheduler").

PYTHON ?= python3
ARGS ?=
BENCH_URL ?= http://127.0.0.1:8000

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: run test lint format docs bench soak sanitize clean

run: .venv/demo.stamp
	$(BIN)/gemserve serve --host 127.0.0.1 --port 8000 $(ARGS)

test: .venv/test.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: .venv/test.stamp
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: .venv/test.stamp
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: .venv/demo.stamp
	$(BIN)/python -m server.settings > docs/settings.md

bench: .venv/demo.stamp
	$(BIN)/gemserve bench $(BENCH_URL) $(ARGS)

soak: .venv/test.stamp
	$(BIN)/python -m tests.soak --seconds 600 $(ARGS)

# Address and undefined-behaviour sanitizers over the tests of the C++ kernels; needs g++ with their runtimes.
sanitize: .venv/test.stamp
	tests/model/ops_cpu/sanitize.sh $(BIN)/python

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The stamps are dated after what they were made from, so a second run installs nothing.
.venv/demo.stamp: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[demo]'
	touch $@

.venv/test.stamp: $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[demo,test]'
	touch $@ .venv/demo.stamp
