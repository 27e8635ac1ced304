# On a clean clone every target does all that it needs, virtual environment and install included.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.PHONY: setup train test test-all test-nightly lint bench help

setup: $(STAMP)  ## create .venv and install Headrace with its development tools, at the pinned versions

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The build backend is installed first and used without isolation: pip does not apply -c inside a build environment.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

train: $(STAMP)  ## train PPO on CartPole-v1 until it is solved, acting and learning as two processes
	$(BIN)/headrace train ppo CartPole-v1 --place processes

test: $(STAMP)  ## the fast tier
	$(BIN)/python -m pytest -m "not slow and not nightly"

# EnvPool brings 700 MB of pictures and models: only who tests it gets it.
.venv/envpool: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,envpool]'
	touch $@

# Pytest leaves with 5 where it selects nothing: a tier may be empty, the fast one may not.
test-all: .venv/envpool  ## the slow tier alone; CI runs `test`, then this
	$(BIN)/python -m pytest -m slow || { [ $$? -eq 5 ] && echo "no slow tests"; }

test-nightly: .venv/envpool  ## what is too long for CI
	$(BIN)/python -m pytest -m nightly || { [ $$? -eq 5 ] && echo "no nightly tests"; }

lint: $(STAMP)  ## formatting, style, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

BENCHMARKS := toy transport weights counting rollout overlap ppo-cartpole ppo-sb3-defaults ppo-halfcheetah ppo-pong
BENCHMARKS += impala-cartpole straggler replay dqn-cartpole sac-pendulum gradients

bench: $(STAMP)  ## every benchmark
	set -e; for workload in $(BENCHMARKS); do $(BIN)/python -m benchmarks $$workload; done

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16
