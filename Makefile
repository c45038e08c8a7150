# branchgrpo: two commands on a fresh machine are `make quickstart` and `make test`; both make the environment first.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1

.PHONY: help env quickstart check test benchmark export clean-notebooks

help:  ## this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

env: .venv/.stamp  ## make .venv with everything in it

.venv/.stamp: constraints.txt settings.ini setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --quiet -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: env  ## train BranchGRPO and DanceGRPO on tiny-flux; figures in figures/testbed/
	@mkdir -p runs/quickstart
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/papermill reproduce/quickstart.ipynb runs/quickstart/quickstart.ipynb -k python3
	@echo "executed notebook: runs/quickstart/quickstart.ipynb   figures: figures/testbed/"

check: env  ## formatting, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

test: env  ## every notebook's tests and tests/
	$(BIN)/python -m pytest

benchmark: env  ## seconds against their floor, and against a one-node-at-a-time reference
	$(BIN)/python tests/benchmark.py

export: env  ## notebooks → branchgrpo/
	$(BIN)/nbdev-export

clean-notebooks: env  ## tidy the notebooks' metadata
	$(BIN)/nbdev-clean --fname nbs
	$(BIN)/nbdev-clean --fname reproduce
