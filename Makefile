# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
SLURM_INTERFACE ?= lo
VENV14 ?= .venv-hydra14
READY14 := $(VENV14)/.ready
TOUCHES_HYDRA := tests/test_*.py tests/ddp_hydra/data/test_conf.py tests/ddp_hydra/sweep \
	$(addprefix tests/ddp_hydra/,cli config job training/test_loop.py) \
	$(addprefix tests/integration/test_,bad_input.py job.py optuna.py sweep.py)

BENCHMARKS := launch overhead recovery data train exchange scale step_cost sweep

.PHONY: demo test test-fast test-all test-slurm test-hydra14 check format clean

demo: $(READY)  ## train ResNet-18 on digits from an embedded S3, two ranks
	$(BIN)/python -m ddp_hydra experiment=digits

test: $(READY)  ## all tests but the slow ones, some files beside others
	$(PYTEST) -m "not slow"

test-fast: $(READY)  ## the tests that start no processes
	$(PYTEST) -m "not integration and not slow" --hypothesis-profile=few

test-all: $(READY)  ## all tests, with more examples of each property; then each benchmark once
	$(PYTEST) --hypothesis-profile=many
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --repeats 1; done

test-slurm: $(READY)  ## batch jobs on a real SLURM, where there is one; its nodes reach this machine by SLURM_INTERFACE
	TEST_SLURM=$(SLURM_INTERFACE) $(BIN)/python -m pytest -rs tests/integration/test_real_slurm.py

test-hydra14: $(READY14)  ## the tests that touch Hydra, with its next version
	$(VENV14)/bin/python -m pytest $(TOUCHES_HYDRA)

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

$(READY14): pyproject.toml
	test -x $(VENV14)/bin/python || $(PYTHON) -m venv $(VENV14)
	$(VENV14)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VENV14)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]' \
		'hydra-core>=1.4.0rc3' 'hydra-optuna-sweeper>=1.4.0rc3'
	touch $(READY14)

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV14) .pytest_cache .ruff_cache .mypy_cache
