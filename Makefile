# Every target sets up `.venv` first; when nothing has changed that takes a fraction of a second.
# Another Python: make PYTHON=python3.12 demo. An environment of your own in .venv: make BOOTSTRAP=: demo.
PYTHON ?= python3
BOOTSTRAP ?= $(PYTHON) services/headrace/dev/bootstrap.py
BIN := .venv/bin
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test lint format protos docs contract sim sim-load faults overload bench-path \
        bench-control clean images test-containers conformance test-gpu

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Set up .venv to run Headrace
	@$(BOOTSTRAP)

setup-dev: ## Set up .venv to work on Headrace
	@$(BOOTSTRAP) --extra dev

demo: setup ## Start everything, stream one answer from a real model, stop
	@$(BIN)/headrace demo

test: lint ## Check style, types, layers and contract, then run all tests
	$(BIN)/pytest $(PYTEST_ARGS)

lint: setup-dev ## Check style, types, import rules and the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against baseline.binpb

format: setup-dev ## Rewrite the Python code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup-dev ## Generate the Python code of the protos
	$(BIN)/python protos/generate.py

docs: setup-dev ## Generate docs/configuration.md and docs/errors.md
	$(BIN)/python -m headrace.dev.pages

contract: setup-dev ## Measure slow readers, cancels, killed clients and broken connections on the real stack
	$(BIN)/python tests/bench/contract.py

sim: setup-dev ## Run 100,000 seeded simulations of a request's life; ARGS='--seed 7 --trace' tells one
	PYTHONPATH=tests $(BIN)/python -m sim $(ARGS)

sim-load: setup-dev ## Simulate a fleet of 64 replicas under overload, storms, faults and old news; ARGS='--only greedy' for some
	$(BIN)/python tests/sim_load/run.py $(ARGS)

faults: setup-dev ## Break etcd, the network, the leader and the clock under load; ARGS='--only killed' for some
	$(BIN)/python tests/faults/run.py $(ARGS)

overload: setup-dev ## Offer ten times the capacity, kill parts meanwhile, send duplicates; ARGS='--quick' is shorter
	$(BIN)/python tests/overload/run.py $(ARGS)

bench-control: setup-dev ## Measure what a change of the control plane costs, and how soon all readers run it
	$(BIN)/python tests/bench/bench_control.py

bench-path: setup-dev ## Measure the whole path against a bare llama.cpp loop
	$(BIN)/python tests/bench/bench_path.py

conformance: setup-dev ## Run the engines' conformance suite and show test x engine; ARGS='synthetic vllm' for some
	$(BIN)/python tests/conformance/table.py $(ARGS)

test-gpu: setup-dev ## The same on the real GPU engines, an answer and a benchmark; says so and exits 77 without a GPU
	$(BIN)/python tests/conformance/gpu.py $(ARGS)

images: setup-dev ## Build the images, with Docker or buildah; ARGS='router --portable' for some, for any CPU
	$(BIN)/python docker/build.py $(ARGS)

test-containers: setup-dev ## Run the images as a stack and stream an answer from a real model
	$(BIN)/python tests/docker/run.py $(ARGS)

clean: ## Remove what was built here (the caches outside the checkout stay)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	if [ ! -L .venv ]; then rm -rf .venv; fi
