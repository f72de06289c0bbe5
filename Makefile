# Everything runs in .venv, which the first target that needs it makes. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# tests start hundreds of processes, which read modules compiled once
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 3
PYTEST_ARGS ?=
BENCH_ARGS ?=
LOAD_ARGS ?=
KIT_ARGS ?=
DAY_ARGS ?=
ROOM ?=
MUTANTS_ARGS ?=
TRITON := triton==3.9.0

# The first of these that is Python 3.11 or newer makes the environment; `make PYTHON=/path/to/python …` chooses.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# ---- installation, stamped: it runs again only when the project file or the pins change -------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Motet needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

INSTALL = $(BIN)/python scripts/install.py --constraint constraints.txt --editable
# Python compiles what it imports, but sources of reasoning-gym's packages warn at it, and a warning in a test is an error.
COMPILE = echo "compiling what is installed"; $(BIN)/python -m compileall -qq -j 0 -x '/(plotly|ray|torch|transformers)/' $(VENV)/lib >/dev/null 2>&1 || true
INSTALLED_FROM := pyproject.toml setup.py constraints.txt $(wildcard src/motet/kernels/cpu/csrc/*)

$(VENV)/.installed: $(INSTALLED_FROM) | $(BIN)/python
	@echo "installing Motet, PyTorch and what they need into $(VENV): a minute or two"
	@$(INSTALL) '.[serve]'
	@touch $@

$(VENV)/.installed-reasoning: $(INSTALLED_FROM) | $(BIN)/python
	@$(INSTALL) '.[serve,reasoning]'
	@$(COMPILE)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: $(INSTALLED_FROM) | $(BIN)/python
	@echo "installing Motet, PyTorch and what the first tests need into $(VENV): a minute or two"
	@$(INSTALL) '.[serve,test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: $(INSTALLED_FROM) | $(BIN)/python
	@echo "installing Motet, PyTorch and the tools to develop it into $(VENV): some minutes"
	@$(INSTALL) '.[serve,reasoning,dev,docs,tensorboard]'
	@# a torch for CUDA brings the Triton that fits it; with one for CPUs any will do to interpret the kernels
	@$(BIN)/python -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || $(BIN)/python scripts/install.py $(TRITON)
	@$(BIN)/python src/motet/kernels/cpu/building.py --all
	@$(COMPILE)
	@touch $(VENV)/.installed $(VENV)/.installed-reasoning $(VENV)/.installed-test $@

.PHONY: install
install: $(VENV)/.installed-dev  ## make .venv with Motet and the tools to develop it

# ---- use ---------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.installed  ## train several adapters on the small base that ships with Motet (no network once installed)
	HF_HUB_OFFLINE=1 $(BIN)/motet demo

.PHONY: smollm2
# beside a goal that installs more, only that one calls pip
smollm2: $(VENV)/$(if $(filter install lint,$(MAKECMDGOALS)),.installed-dev,.installed-reasoning)  ## download SmolLM2-135M-Instruct to the local cache, and install reasoning-gym
	$(BIN)/python scripts/fetch_smollm2.py

# ---- development -------------------------------------------------------------------------------------------------

.PHONY: vllm
vllm: | $(BIN)/python  ## make .envs/vllm with a vLLM for CPUs, which tests and benches sample on (a few minutes; VLLM=0.31.0: an older one)
	@$(BIN)/python -m bench.speed.envs vllm$(VLLM:%=-%)

.PHONY: tinker
tinker: | $(BIN)/python  ## make .envs/tinker… with the newest and the oldest tinker package, which tests drive a service with (a few minutes)
	@$(BIN)/python -m bench.speed.envs tinker tinker-0.25.0

.PHONY: agents
agents: | $(BIN)/python  ## make .envs/agents, .envs/mini and .envs/verifiers with the packages of the agents that tests train (three minutes)
	@$(BIN)/python -m bench.speed.envs agents mini verifiers

.PHONY: trackers
trackers: | $(BIN)/python  ## make .envs/trackers with W&B, MLflow, Trackio and SwanLab, which soak tests send runs to
	@$(BIN)/python -m bench.speed.envs trackers

.PHONY: harnesses
harnesses: | $(BIN)/python  ## make .envs/harnesses with lm-eval and inspect-ai, which tests send to a service
	@$(BIN)/python -m bench.speed.envs harnesses

# Tests sync thousands of small files, which takes no time in memory.
IN_MEMORY = $(shell [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 8388608 ] 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

# A test without an end fails after a time that no test comes near, and the others are told of.
PYTEST = $(IN_MEMORY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--timeout 900 --timeout-method signal
# What a processor without AVX-512 computes.
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MOTET_KERNELS_FORM=avx2

.PHONY: test
test: $(VENV)/.installed-test  ## lint, and the first tier of tests: what a newcomer needs to see (at most 8 minutes on two cores)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet || { echo "run: make format" >&2; exit 1; }
	$(PYTEST) --tier 1 -rs --durations 5 $(PYTEST_ARGS)
	@$(BIN)/python scripts/what_else.py

.PHONY: check
check:  ## types, and every other test but the long ones, with real servers, clients and browsers (ROOM=service: all of one room)
	@# several install at once: lines instead of one that changes
	@$(MAKE) -j3 $(VENV)/.installed-dev vllm tinker agents harnesses 2>&1 | cat
	$(if $(ROOM),,$(BIN)/mypy)
	$(PYTEST) $(if $(ROOM),tests/$(ROOM),--tier 2) -rs --durations 12 $(PYTEST_ARGS)
	$(if $(ROOM),,$(AVX2) $(PYTEST) -m "bits and not soak and not smollm2" -q $(PYTEST_ARGS))

.PHONY: seconds
seconds: $(VENV)/.installed-dev  ## measure the CPU seconds of each file of tests, and write tests/seconds.toml (PYTEST_ARGS=tests/core: of some)
	$(PYTEST) --seconds -q $(PYTEST_ARGS)

.PHONY: soak
soak: $(VENV)/.installed-dev vllm tinker agents  ## the long tests: every family of bases, many kills, a thousand requests to a service, hundreds of publishes on a real vLLM (an hour; run it again to resume)
	@$(BIN)/python -m bench.speed.envs older locust trackers harnesses
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(PYTEST_ARGS)
	MOTET_KERNELS_FORM=portable $(PYTEST) -m "bits and not soak and not smollm2" -q

.PHONY: load
load: $(VENV)/.installed-dev  ## fifty tenants at a service for ten minutes: what fails, and how long answers take (LOAD_ARGS="--seconds 30")
	@$(BIN)/python -m bench.speed.envs locust
	$(BIN)/python -m bench.load $(LOAD_ARGS)

.PHONY: attacked-day
attacked-day: $(VENV)/.installed-dev  ## fifty tenants beside one that attacks in fifteen ways at once, and without it: twenty minutes (DAY_ARGS="--seconds 60")
	$(BIN)/python -m bench.attacked_day $(DAY_ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev  ## ruff (rules and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet || { echo "run: make format" >&2; exit 1; }
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.installed-dev  ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: faults
faults: $(VENV)/.installed-dev  ## plant each known fault in a copy, and check that its test fails (half an hour)
	$(BIN)/python scripts/plant_faults.py

.PHONY: mutants
mutants: $(VENV)/.installed-dev  ## change a room's operators and numbers one at a time and see what its tests miss (ROOM=algorithms; minutes)
	$(BIN)/python scripts/mutants.py $(ROOM) $(MUTANTS_ARGS)

.PHONY: bench
bench: $(VENV)/.installed-dev smollm2  ## Motet and its peers on the same work: docs/benchmarks.md (QUICK=1: rough, a few minutes)
	$(BIN)/python -m bench.speed.envs
	$(BIN)/python -m bench.speed $(if $(QUICK),--quick) $(BENCH_ARGS)

.PHONY: gpu-kit
gpu-kit: $(VENV)/.installed-dev  ## the tree and the packages for a GPU machine without a network, in build/gpu-kit (KIT_ARGS="--python 3.12")
	$(BIN)/python scripts/gpu_kit.py $(KIT_ARGS)

.PHONY: gpu-quarter
gpu-quarter: $(VENV)/.installed-dev  ## ask a GPU for its bits, tests and times in 13 minutes: docs/benchmarks-gpu.md (GPU_ARGS=--list, --rehearse: on a CPU)
	$(BIN)/python -m bench.gpu $(GPU_ARGS)

.PHONY: docs
docs: $(VENV)/.installed-dev  ## write the reference pages, then build and check the website in site/ (VERSION=0.1: also public/0.1)
	$(BIN)/python scripts/make_reference.py
	$(BIN)/python scripts/make_site.py $(if $(VERSION),--version $(VERSION))

.PHONY: bases
bases: $(VENV)/.installed-dev  ## write the table of docs/bases.md again (a few minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.bases

.PHONY: small-base
small-base: $(VENV)/.installed  ## train the small base again (about half an hour on one core)
	$(BIN)/python scripts/make_small_base.py --out src/motet/assets/small-base

.PHONY: clean
clean:  ## remove caches and build outputs; .venv and runs/ stay
	rm -rf .soak build dist site .cache src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard src tests scripts bench examples) -name __pycache__ -type d -prune -exec rm -rf {} +
