# Every target sets up .venv by itself; a fresh machine needs python3 (3.11 or newer) and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test quick full bench lint pictures docs readme ci clean

setup: .venv/.done ## build .venv

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q meshwright
	touch $@

demo: setup ## the best there is to see, in seconds
	$(BIN)/python -m examples.tour

test: setup ## laws, closed forms, mutations, simulator, command line
	$(BIN)/python -m pytest -n 2 -m "not slow and not bench"

quick: setup ## a subset under one minute
	$(BIN)/python -m pytest -n 2 -m "not slow and not bench" tests/test_layers.py tests/schedules/test_closed_forms.py tests/schedules/test_chimera.py tests/ir/test_text.py

full: setup ## everything: whole matrices, proofs of optimality, fuzz
	$(BIN)/python -m pytest -n 2 -m "not bench"

bench: setup ## time bars; fails when one is missed
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.planner
	$(BIN)/python -m benchmarks.transport
	$(BIN)/python -m benchmarks.executor
	$(BIN)/python -m benchmarks.lengths
	$(BIN)/python -m benchmarks.tensor
	$(BIN)/python -m benchmarks.zero
	$(BIN)/python -m pytest -m bench tests

lint: setup ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

pictures: setup ## draw the pictures of README and docs anew
	$(BIN)/python -m examples.pictures

docs: setup ## the documentation as a site
	$(BIN)/mkdocs build --strict --quiet

readme: setup ## run the README's commands and compare what they print
	$(BIN)/python -m pytest tests/test_docs.py

ci: lint test demo docs readme ## what CI runs

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
