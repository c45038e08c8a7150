# branchgrpo: two commands on a fresh machine are `make quickstart` and `make test`; both make the environment first.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1

.PHONY: help env quickstart lab site check test slow faults pipelines figures browser hps report export

help:  ## this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

env: .venv/.stamp  ## make .venv with everything in it

.venv/.base: constraints.txt settings.ini setup.py pyproject.toml
	@echo "Installing the package into .venv: about a minute."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --quiet --no-compile -c constraints.txt -e .
	@touch $@

.venv/.stamp: .venv/.base
	@echo "Installing what tests and pages need: 2 to 3 minutes."
	$(BIN)/pip install --quiet --quiet --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q -q -j 0 .venv/lib || true  # on all cores, and pip would use one
	@touch $@

quickstart: .venv/.base  ## train BranchGRPO and DanceGRPO on tiny-sd3 (3 to 5 minutes on two cores, with installing)
	@echo "Training BranchGRPO and DanceGRPO on tiny-sd3, 20 iterations each: about 2 minutes on two quiet cores, 4 on busy ones."
	@$(BIN)/branchgrpo reproduce quickstart --scale quickstart --jobs 2
	@echo "figures: runs/quickstart/figures/   executed notebook: runs/reproduce/quickstart/quickstart.ipynb"

lab: env  ## JupyterLab, at the first page
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" nbs/index.ipynb

site: env  ## all notebooks, results, reference and explorer as pages: _site/index.html (2 to 4 minutes)
	@echo "Writing all pages: 2 to 4 minutes."
	@rm -rf _site build/site docs/reference
	$(BIN)/sphinx-build -W --keep-going -q -j auto -c docs -d build/site/doctrees . build/site/html
	@mv build/site/html _site
	@echo "$$(find _site -name '*.html' | wc -l) pages: _site/index.html"

check: env  ## formatting, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

test: env  ## every notebook's tests and tests/ (about 15 minutes on two cores, with 2 to 4 of installing)
	@echo "All tests: about 13 minutes on two cores, more on busy ones."
	$(BIN)/python -m pytest

slow: env  ## what `make test` tries once, with every parameter: processes, kills, pages, recipes (nightly)
	@echo "Every parameter of every test: much longer than make test."
	$(BIN)/python -m pytest --slow -m slow

faults: env  ## kill, starve and mislead it: the whole of tests/faults, and its tables (29 minutes on two cores)
	@echo "Faults: about 29 minutes on two cores."
	@rm -rf .pytest_cache/faults
	$(BIN)/python -m pytest tests/faults --faults -n 3

pipelines: env  ## check and train every tiny pipeline of the table again (about 25 minutes on one core; nightly)
	@echo "Every tiny pipeline of diffusers again: about 25 minutes."
	$(BIN)/python tests/pipeline_table.py --again

figures: env  ## draw figures and verdicts again from their recorded runs, and store pages with outputs (3 minutes on two cores)
	@echo "Drawing all figures again: about 3 minutes on two cores."
	$(BIN)/branchgrpo reproduce --all --redraw --jobs 2

browser: env site  ## what only Chromium shows: explorer against costs and in JupyterLab, search, screenshots in build/browser/
	$(BIN)/pip install --quiet --quiet -c constraints.txt -e '.[browser]'
	$(BIN)/python tests/browser.py

.venv-hps/.stamp:
	@echo "Installing hpsv2x into .venv-hps: some minutes. It needs an older protobuf than this package."
	$(PYTHON) -m venv .venv-hps
	.venv-hps/bin/pip install --quiet --quiet --no-compile hpsv2x==1.2.0
	@touch $@

IMAGES ?= build/hps/images.jsonl
build/hps/images.jsonl: .venv/.stamp
	$(BIN)/branchgrpo evaluate --backbone tiny-flux --prompts digits --limit 20 --output build/hps

hps: env .venv-hps/.stamp $(IMAGES)  ## HPS-v2.1 here beside its original package, on IMAGES, or on 20 of tiny-flux; needs the published weights on disk
	$(BIN)/branchgrpo check-hps --images $(IMAGES) --python .venv-hps/bin/python

report: env  ## REPORT.md and the answers of the first page, from the study's record; README.md from the first page
	$(BIN)/python -c "from branchgrpo.reproduction.answers import write_report; write_report()"
	$(BIN)/python -c "from branchgrpo.site.build import write_readme; write_readme()"

export: env  ## notebooks → branchgrpo/, and their metadata tidied
	$(BIN)/nbdev-export
	$(BIN)/nbdev-clean --fname nbs
	$(BIN)/nbdev-clean --fname reproduce
