# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast check format clean

demo: $(READY)  ## train ResNet-18 on digits from an embedded S3, two ranks
	$(BIN)/python -m ddp_hydra experiment=digits

test: $(READY)  ## all tests
	$(BIN)/python -m pytest

test-fast: $(READY)  ## the tests that start no processes
	$(BIN)/python -m pytest -m "not integration"

check: $(READY)  ## lint, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(READY)  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
