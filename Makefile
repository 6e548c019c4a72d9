# Needs a POSIX shell, make and Python >= 3.11 with its venv module. `make PYTHON=/path/to/python3.12 setup` names another.
PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.stamp
# On a terminal pip shows how far it is.
INSTALL = $(BIN)/python -m pip --disable-pip-version-check $$([ -t 1 ] || echo -qq) install -c constraints.txt

# Processes that run tests side by side. Much of their time they wait for ranks that they start.
TEST_WORKERS = 4

INTEGRATIONS = .venv-integrations
INTEGRATIONS_STAMP = $(INTEGRATIONS)/.stamp

.PHONY: help gpu-site test-gpu bench-gpu setup setup-docs docs package demo test test-slow test-outside setup-integrations test-integrations test-oldest test-newest test-clusters check bench chaos clean

help:
	@echo "make setup   install offbeat and its tools into $(VENV)"
	@echo "make demo    compare DDP, gTop-k and PowerSGD on four workers behind a slow link"
	@echo "make test    run the tests; make test-slow runs the long schedules, which take minutes"
	@echo "make test-outside        run what PyTorch's own tests list, of which make test runs a part"
	@echo "make test-gpu    run the tests that need a GPU; make bench-gpu measures on one"
	@echo "make test-integrations   run the tests against Lightning, transformers and Accelerate"
	@echo "make test-oldest, test-newest   run the suites nearest to PyTorch against its oldest and newest version"
	@echo "make test-clusters       train on a SLURM of two nodes on this machine, which needs root, by the Kubernetes manifest's command, and on Ray"
	@echo "make check   lint, formatting, types and the order of imports"
	@echo "make docs    build the documentation as a site, strictly; make package builds and checks what PyPI takes"
	@echo "make bench   run every benchmark and print one table"
	@echo "make chaos   run the fault matrix, as far as benchmarks/results/chaos.jsonl lacks it"
	@echo "make clean   remove $(VENV), $(INTEGRATIONS) and everything generated"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "offbeat needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name another with: make PYTHON=/path/to/python3.11 setup" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV), once: torch is large, and a minute or two go by on a usual link"
	@echo "1 of 3: torch"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch hatchling  # torch first: what depends on it then takes the build found here
	@echo "2 of 3: offbeat and its tools"
	@$(INSTALL) --no-build-isolation -e '.[dev]'
	@echo "3 of 3: compiling kernels"
	@$(BIN)/python -c 'from offbeat.codec import jit; jit.warm()'
	@touch $(STAMP)

demo: setup
	@echo "training three strategies by turns behind emulated links: about a minute on two cores"
	@$(BIN)/offbeat demo

test: setup
	@$(BIN)/python -m compileall -q src tests  # once, and not in each of the processes that tests start
	@# pytest keeps the assertions that it has rewritten, where bytecode may be written.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not slow and not outside"

test-slow: setup
	$(BIN)/python -m pytest -q -n 2 --timeout 3600 -m slow

test-outside: setup
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal tests/outside

# For a machine with a GPU, perhaps without a network: GPU_PYTHON names a Python that has torch, and
# WHEELS a folder with the packages that it lacks, such as pyzmq.
GPU_PYTHON = $(BIN)/python
WHEELS =
GPU_SITE = build/gpu-site
GPU_ENV = PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests:$(CURDIR)/$(GPU_SITE) OMP_NUM_THREADS=1
gpu-site:
	@mkdir -p $(GPU_SITE)
	@test -z "$(WHEELS)" || $(GPU_PYTHON) -m pip install -q --no-index --no-deps --upgrade \
	    --target $(GPU_SITE) $(WHEELS)/*.whl

test-gpu: gpu-site
	@# pytest-benchmark, where it is installed, warns of xdist, and warnings are errors here.
	OFFBEAT_TEST_DEVICE=cuda $(GPU_ENV) $(GPU_PYTHON) -m pytest -q -n 8 --dist worksteal -p no:benchmark tests/gpu

bench-gpu: gpu-site
	$(GPU_ENV) $(GPU_PYTHON) benchmarks/gpu.py

setup-integrations: $(INTEGRATIONS_STAMP)

# An environment of its own: the frameworks bring a hundred packages. torch first, as above.
$(INTEGRATIONS_STAMP): pyproject.toml constraints.txt
	@echo "setting up $(INTEGRATIONS) (once; torch, Lightning and transformers are large)"
	@$(PYTHON) -m venv $(INTEGRATIONS)
	@pip() { $(INTEGRATIONS)/bin/python -m pip -qq --disable-pip-version-check --retries 1 --timeout 20 \
	    install -c constraints.txt "$$@"; }; \
	  { pip torch hatchling && pip pytest pytest-timeout hypothesis && \
	    pip --no-build-isolation -e '.[lab,lightning,transformers]'; } 2> $(INTEGRATIONS)/pip.log || { \
	    echo "the frameworks could not be installed (is there a network? see" \
	      "$(INTEGRATIONS)/pip.log), so nothing was tested against them" >&2; exit 1; }
	@$(INTEGRATIONS)/bin/python -m pip -qq --disable-pip-version-check --retries 1 --timeout 20 \
	    install hydra-core mlflow-skinny opentelemetry-sdk tensorboard wandb 2> $(INTEGRATIONS)/pip.log || \
	  echo "writers of metrics could not be installed; their tests are skipped" >&2
	@touch $(INTEGRATIONS_STAMP)

test-integrations: setup-integrations
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -q tests/integrations tests/session/test_writers.py

# The suites that meet most of PyTorch's own parts, against the oldest torch that pyproject.toml allows and the newest
# there is, each in an environment of its own, with whatever else is newest.
OLDEST_TORCH = 2.10.*
TORCH_SUITES = tests/test_torch_private.py tests/run tests/session tests/conformance tests/outside
.venv-oldest/.stamp: TORCH = torch==$(OLDEST_TORCH)
.venv-newest/.stamp: TORCH = torch
.venv-oldest/.stamp .venv-newest/.stamp: pyproject.toml
	@echo "installing $(TORCH) into $(@D), once"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip -q --disable-pip-version-check install '$(TORCH)' hatchling
	@$(@D)/bin/python -m pip -q --disable-pip-version-check install --no-build-isolation -e '.[dev]'
	@touch $@

test-oldest test-newest: test-%: .venv-%/.stamp
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not slow and not outside" \
	  $(TORCH_SUITES)

# The site and the package need packages of their own, which training does not.
SITE = .venv-docs
setup-docs: $(SITE)/.stamp

$(SITE)/.stamp: docs/requirements.txt
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip -q --disable-pip-version-check install -r docs/requirements.txt || { \
	  echo "the packages of docs/requirements.txt could not be installed; is there a network?" >&2; exit 1; }
	@touch $(SITE)/.stamp

docs: setup-docs
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build  # with -q it would count no warnings
	@echo "the site is in build/site/index.html"

package: setup-docs
	@rm -rf dist
	@$(SITE)/bin/python -m build -q --no-isolation
	@$(SITE)/bin/twine check --strict dist/*
	@! grep -q 'offbeat\.example' pyproject.toml || \
	  echo "note: the repository's address in pyproject.toml is not real yet; set it before an upload"

test-clusters: setup
	@tests/clusters/slurm.sh $(BIN)
	@tests/clusters/kubernetes.sh $(BIN)
	@tests/clusters/ray.sh $(or $(RAY_PYTHON),$(BIN)/python)

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_growth.py
	@$(BIN)/python docs/growth.py

bench: setup
	@$(BIN)/python benchmarks/run_all.py

chaos: setup
	@PYTHONPATH=tests:benchmarks $(BIN)/python -m chaos_support
	@$(BIN)/python benchmarks/pages.py

clean:
	rm -rf $(VENV) $(SITE) $(INTEGRATIONS) .venv-oldest .venv-newest build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
