# make train   sets everything up and trains FastWAM with WAM-RL on LIBERO (about 15 minutes on 2 cores, no GPU)
# make test    sets everything up and runs all tests
# make lint    ruff and mypy
# Options: PYTHON=python3.12, RUN=runs/mine, ARGS="algo.iterations=6 algo.actor_lr=2e-4"

PYTHON ?= python3
RUN ?= runs/laptop
ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

# Caches of pip, Mesa, Matplotlib and others stay in the checkout.
export XDG_CACHE_HOME := $(CURDIR)/.cache
# Two cores are used by simulator processes and vectorised steps; torch threads that wait for each other cost more.
export OMP_NUM_THREADS ?= 1

.PHONY: train test lint format setup clean

train: $(READY)
	$(BIN)/wamrl-train preset=laptop logger.directory=$(RUN) resume=true $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) bash scripts/setup.sh
	touch $@

clean:
	rm -rf .venv .cache build *.egg-info
