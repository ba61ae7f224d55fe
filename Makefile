# `make demo` and `make test` set everything up themselves, from nothing but Python 3.10+.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TARGET := qwen2.5-coder-1.5b
DRAFT  := qwen2.5-coder-0.5b

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-real test-gpu check format bench bench-drafters bench-peers bench-sweep bench-gpu tiny-models clean

help:  ## Show the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# torch comes first and by its exact version: a range would take the CUDA build, several GB larger.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Slipstream needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $(STAMP)

install: $(STAMP)  ## Make .venv with everything in it

demo: $(STAMP)  ## Download a real model pair once, and see it answer faster with the same tokens
	@$(BIN)/slipstream pull $(TARGET) $(DRAFT)
	$(BIN)/slipstream run --compare --model $(TARGET) --drafter draft_model:model=$(DRAFT) --temperature 0 --max-tokens 128 \
		"Write a Python class for a stack with push, pop and peek, with type hints and docstrings."

test: $(STAMP)  ## All tests that need no download (a few minutes on two cores)
	$(BIN)/python -m pytest -q -n 2 -m "not real and not gpu and not slow"

test-slow: $(STAMP)  ## The tests that train, start servers or decode at length (ten minutes)
	$(BIN)/python -m pytest -q -n 2 -m "slow and not real and not gpu"

test-real: $(STAMP)  ## The tests on the real pair (about half an hour on two cores)
	@$(BIN)/slipstream pull $(TARGET) $(DRAFT)
	$(BIN)/python -m pytest -q -m real tests/real

test-gpu: $(STAMP)  ## The tests on a CUDA GPU; without one they are skipped and say so (needs torch's CUDA build)
	$(BIN)/python -m pytest -q -rs -m gpu

check: $(STAMP)  ## Lint, format check and strict types
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix src tests bench
	$(BIN)/ruff format src tests bench

bench: $(STAMP)  ## The table of the README (about half an hour on two cores)
	$(BIN)/python bench/foundation.py

bench-drafters: $(STAMP)  ## Every drafter against plain decoding (hours on two cores; run it again to go on)
	$(BIN)/python bench/drafters.py --resume

bench-sweep: $(STAMP)  ## The planner's predictions against a full sweep (run it again to go on)
	$(BIN)/python bench/sweep.py --minutes 90 --html bench/out/sweep.html

bench-peers: $(STAMP)  ## Slipstream, transformers, llama.cpp, vLLM and OpenVINO by turns (hours; run it again to go on)
	$(BIN)/python bench/peers.py --resume

bench-gpu: $(STAMP)  ## Steps of an 8B model on a CUDA GPU against its memory's speed, and the CPU's tokens
	$(BIN)/python bench/gpu.py

tiny-models: $(STAMP)  ## Train the models and drafters that ship with the package (20 minutes on two cores)
	$(BIN)/python -m pip install --quiet -e '.[train]' -c constraints.txt
	$(BIN)/python bench/tiny_models.py

clean:  ## Remove the environment and caches of this folder (models stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
