# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
JOBS ?= 3
FAST_JOBS ?= 2
DEVICE ?= cuda
REPORT ?=
OLD ?=
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
SLURM_INTERFACE ?= lo
VENV14 ?= .venv-hydra14
READY14 := $(VENV14)/.ready
VENVCUDA ?= .venv-dask-cuda
comma := ,
TOUCHES_HYDRA := tests/test_*.py tests/ddp_hydra/data/test_conf.py tests/ddp_hydra/sweep \
	$(addprefix tests/ddp_hydra/,cli config job training writers/test_loggers.py) \
	$(addprefix tests/integration/test_,bad_input.py job.py optuna.py sweep.py)

# Without bytecode on the disk, each process of the tests would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Install packages into a virtual environment, with uv where it is there.
define installed
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	if command -v uv >/dev/null; then uv pip install --quiet --python $(1)/bin/python $(2); else \
		$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip && \
		$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2); fi
endef

define unit_tested
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	uv pip install --quiet --python $(1)/bin/python $(2) --editable '.[test]'
	$(1)/bin/python -m pytest -n $(JOBS) -m "not integration and not slow" --hypothesis-profile=few
endef

BENCHMARKS := launch overhead recovery checkpoint data train on_ray exchange scale step_cost sweep runs

.PHONY: bench demo gpu-report golden test test-fast test-all test-slurm test-ray test-dask-cuda test-hydra14 test-lowest test-newest docs casts dist check format clean

demo: $(DEMO)  ## train ResNet-18 on digits from an embedded S3, two ranks
	$(BIN)/python -m ddp_hydra experiment=digits

gpu-report: $(DEMO)  ## all that differs between CUDA and the CPU, beside goals: a table, and docs/gpu.md; DEVICE=cpu rehearses it
	$(BIN)/python -m benchmarks.gpu --device $(DEVICE) $(REPORT)

test: $(READY)  ## all tests but the slow ones, some files beside others
	$(PYTEST) -m "not slow"

test-fast: $(READY)  ## what takes milliseconds: most tests that start no processes
	$(BIN)/python -m pytest -n $(FAST_JOBS) --dist worksteal --ignore tests/integration \
		-m "not integration and not slow and not medium" --hypothesis-profile=few

test-all: $(READY)  ## all tests, with more examples of each property
	$(PYTEST) --hypothesis-profile=many

bench: $(READY)  ## each benchmark once
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --repeats 1; done

test-slurm: $(READY)  ## batch jobs on a real SLURM, where there is one; its nodes reach this machine by SLURM_INTERFACE
	TEST_SLURM=$(SLURM_INTERFACE) $(BIN)/python -m pytest -rs tests/integration/test_real_slurm.py

test-ray: $(READY)  ## jobs on a real Ray of two nodes
	$(BIN)/python -m pytest tests/integration/test_cluster_ray.py

test-dask-cuda:  ## a job on dask-cuda's cluster, with the Dask that it pins; no GPU is needed
	$(call installed,$(VENVCUDA),--editable '.[test$(comma)gpu]')
	$(VENVCUDA)/bin/python -m pytest tests/integration/test_cluster_local_cuda.py tests/ddp_hydra/cluster/test_connect.py

test-hydra14: $(READY14)  ## the tests that touch Hydra, with its next version
	$(VENV14)/bin/python -m pytest $(TOUCHES_HYDRA)

test-lowest:  ## the unit tests with the lowest versions that are allowed, and torch as it comes; needs uv
	$(call unit_tested,.venv-lowest,--resolution lowest-direct 'torch>=2.13' 'torchvision>=0.28')

test-newest:  ## the unit tests with the newest versions, pre-releases included; needs uv
	$(call unit_tested,.venv-newest,--prerelease allow)

golden: $(READY)  ## short jobs come to the same weights, bit for bit, as with an older wheel: OLD=<wheel>
	$(BIN)/python -m tests.golden $(OLD)

docs: export NO_MKDOCS_2_WARNING := true  # of a version that mkdocs-material does not take, which pyproject.toml leaves out
docs: $(READY)  ## build the site into build/site; a link, an anchor or a page that is missing is an error
	$(BIN)/python -m mkdocs build --strict

casts: $(READY)  ## record the moving pictures of the docs anew, from real runs
	$(BIN)/python docs/casts/record.py

dist: $(READY)  ## build and check sdist and wheel; REPOSITORY=https://… makes the readme's links absolute
	REPOSITORY=$(REPOSITORY) $(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

check: $(READY)  ## lint, format, types, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(READY)  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml setup.py
	$(call installed,$(VENV),--editable '.[dev]')
	touch $(READY) $(DEMO)

$(DEMO): pyproject.toml setup.py
	$(call installed,$(VENV),--editable '.[demo]')
	touch $(DEMO)

$(READY14): pyproject.toml setup.py
	$(call installed,$(VENV14),--editable '.[test]' 'hydra-core>=1.4.0rc3' 'hydra-optuna-sweeper>=1.4.0rc3')
	touch $(READY14)

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VENV14) $(VENVCUDA) .venv-lowest .venv-newest build/site .pytest_cache .ruff_cache .mypy_cache
