# Every target that needs set-up does it itself. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
K ?=
TRITON ?=
MODEL ?=
STEPS ?=
JSON ?=
BASE ?=
N ?= 20000
SEED ?=
FUZZ_SEED := $(or $(SEED),$(shell date +%s))
TRITON_DIR := $(if $(TRITON),build/triton-$(TRITON))
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernels fuzz static static-diff static-baseline bench distill gpu-check lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## make .venv with pinned packages and an editable install

$(STAMP): requirements.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(STAMP)  ## run the demo on the real demo model
	$(BIN)/pagedraft demo

# One single-threaded worker a core: threads that wait for a busy core cost far more than they give.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

test: lint  ## lint, then every test
	$(PYTEST)

KERNEL_TESTS := $(if $(K),$(wildcard tests/kernels/test_$(K)*.py),tests/kernels)

test-kernels: $(STAMP)  ## kernel tests; K=name for one op
	$(if $(KERNEL_TESTS),,$(error K=$(K): no tests/kernels/test_$(K)*.py))
	$(PYTEST) $(KERNEL_TESTS)

fuzz: $(STAMP)  ## random workloads against plain decoding; N=20000 cases, SEED=number to repeat a run
	@echo "make fuzz N=$(N) SEED=$(FUZZ_SEED)"
	FUZZ_CASES=$(N) FUZZ_SEED=$(FUZZ_SEED) $(PYTEST:loadfile=load) tests/scheduler/test_fuzz.py tests/scheduler/test_fuzz_bf16.py

STATIC := $(if $(TRITON),PYTHONPATH=$(TRITON_DIR)) $(BIN)/python -m pagedraft.bench.static
FORWARD := $(if $(MODEL),--model $(MODEL)) $(if $(STEPS),--steps $(STEPS)) $(if $(JSON),--json $(JSON))

static: $(STAMP) $(TRITON_DIR)  ## compile kernels for every GPU; MODEL=llama-8b: a forward pass (STEPS= JSON=); TRITON=3.9.0
	$(STATIC) $(if $(MODEL),forward $(FORWARD),--quick)

static-diff: $(STAMP) $(TRITON_DIR)  ## what an edit did to a forward pass; BASE=old.json (else the baseline)
	$(STATIC) forward $(FORWARD) $(if $(BASE),--base $(BASE),--check)

static-baseline: $(STAMP) $(TRITON_DIR)  ## write CI's baseline anew: together with a CHANGELOG line
	$(STATIC) forward --save-baseline

build/triton-%:
	$(BIN)/python -m pip install --quiet --no-deps --target $@.partial triton==$*
	mv $@.partial $@

bench: $(STAMP)  ## measure what this machine can, save JSON under bench/results
	$(BIN)/python -m pagedraft.bench

OUT ?= build/drafts/smollm2-135m

distill: $(STAMP)  ## half an hour: a draft for the demo model and its report, in OUT=build/drafts/...
	$(BIN)/pagedraft distill --target demo --out $(OUT) --vocab 8192 --minutes 28

gpu-check:  ## kernel tests, exactness and first timings on a CUDA machine; installs nothing
	bash bench/gpu_check.sh

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/path && ln -sfn ../.. build/path/pagedraft
	MYPYPATH=build/path $(BIN)/mypy -p pagedraft.decoding -p pagedraft.scheduler

clean:  ## remove what the other targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
