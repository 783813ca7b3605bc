# make demo   a first video, from nothing: own virtual environment, everything installed
# make test   the whole truth: lint, types, tests, in a fresh virtual environment
#
# TORCH is what pip installs as torch; the README says how to ask for PyTorch's CPU build.

TORCH ?= torch==2.13.0
PYTHON ?= python3
DEMO := .venv
TEST := .venv-test

.PHONY: demo test clean

demo: $(DEMO)/ready
	$(DEMO)/bin/specar generate --backbone tiny --example tiny-ball --overwrite --out demo.mp4

$(DEMO)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(DEMO)
	$(DEMO)/bin/pip install --quiet $(TORCH)
	$(DEMO)/bin/pip install --quiet --editable '.[cli]'
	touch $@

test:
	$(PYTHON) -m venv --clear $(TEST)
	$(TEST)/bin/pip install --quiet $(TORCH)
	$(TEST)/bin/pip install --quiet --editable '.[cli,test]'
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/python -m pytest -n 2 -q tests

clean:
	rm -rf $(DEMO) $(TEST) build dist *.egg-info
