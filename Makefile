# make demo   a first video, from nothing: own virtual environment, everything installed
# make test   the whole truth: lint, types, tests, in a fresh virtual environment
#
# TORCH is what pip installs as torch; the README says how to ask for PyTorch's CPU build.

TORCH ?= torch==2.13.0
PYTHON ?= python3
DEMO := .venv
TEST := .venv-test
# Where the tests install a real ComfyUI, the newest and the oldest that SpecAR runs on. Kept: it is 4 GB.
HOST ?= $(HOME)/.cache/specar/comfyui

.PHONY: demo test clean

demo: $(DEMO)/ready
	$(DEMO)/bin/specar generate --backbone tiny --example tiny-ball --overwrite --out demo.mp4

$(DEMO)/ready: pyproject.toml
	$(PYTHON) -m venv --clear $(DEMO)
	$(DEMO)/bin/pip install --quiet $(TORCH)
	$(DEMO)/bin/pip install --quiet --editable '.[cli]'
	touch $@

test:
	scripts/debian.sh
	$(PYTHON) -m venv --clear $(TEST)
	$(TEST)/bin/pip install --quiet $(TORCH)
	$(TEST)/bin/pip install --quiet --editable '.[cli,test]'
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/python -m pytest -n 2 -q tests --ignore tests/host --ignore tests/browser
	TORCH="$(TORCH)" PYTHON=$(PYTHON) scripts/setup_host.sh $(HOST)/newest
	TORCH="$(TORCH)" PYTHON=$(PYTHON) scripts/setup_host.sh $(HOST)/oldest 1.0.0
	SPECAR_HOST=$(HOST)/newest SPECAR_HOST_OLDEST=$(HOST)/oldest $(TEST)/bin/python -m pytest -q tests/host
	SPECAR_HOST=$(HOST)/newest $(TEST)/bin/python -m pytest -q tests/browser

clean:
	rm -rf $(DEMO) $(TEST) build dist *.egg-info
