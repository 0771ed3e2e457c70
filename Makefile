# Two commands for everybody: `make demo` and `make test`. The rest is for contributors.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-integrations lint format tables figures study-check docs clean

demo: $(VENV)/.bench  ## train digits with SGD, C-Flat, C-Flat Turbo and Forecast; show gain and cost
	$(BIN)/cflat demo

# Two workers with one thread each: torch's own threads would only fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

test: $(VENV)/.dev  ## the default suite (at most 10 minutes on 2 cores)
	$(PYTEST)

test-slow: $(VENV)/.dev  ## the long runs: real data, kills and resumes
	$(PYTEST) -m slow

# The clients in their own environment: their pins cannot break ours, and nothing is skipped there.
CLIENTS := .venv-integrations
test-integrations: $(CLIENTS)/.installed  ## Lightning, Trainer, Accelerate, Avalanche, INFTY and others, the real ones
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -n 2 -c tests/integrations/pytest.ini tests/integrations

$(CLIENTS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS)
	@echo "Installing cflat with the clients that it is tested in into $(CLIENTS) (about 6 GB; 3-5 minutes) ..."
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -e '.[integrations]' pytest pytest-xdist
	@touch $@

lint: $(VENV)/.dev  ## exactly what CI checks besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs benchmarks examples README.md CHANGELOG.md CONTRIBUTING.md

# The site needs no torch: sources are read as text. Its own environment is small and made in seconds.
DOCS := 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.26' 'latex2mathml' 'ruff>=0.6'

docs: .venv-docs/.done  ## the documentation site, in site/; warnings and broken links are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict  # not --quiet: warnings would not be counted
	@echo "Built site/: python3 -m http.server -d site"

.venv-docs/.done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check $(DOCS)
	@touch $@

tables: $(VENV)/.dev  ## the tables of README.md and docs/data.md, from the registries
	$(BIN)/python tools/tables.py

study-check: $(VENV)/.dev  ## repeat two runs of the study's ledger: the same bits here, near on another machine
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.study check

figures: $(VENV)/.dev  ## the pictures of README.md and docs, where their sources have changed
	$(BIN)/python tools/figures.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.bench: pyproject.toml | $(VENV)/bin/python
	@echo "Installing cflat and its bench into $(VENV) (a torch build is about 5 GB; 2-4 minutes) ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing cflat with its development tools into $(VENV) (about 5 GB; 2-4 minutes) ..."
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench,sweep,dev]'
	@touch $@ $(VENV)/.bench

clean:
	rm -rf $(VENV) $(CLIENTS) .venv-docs site build dist src/*.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
