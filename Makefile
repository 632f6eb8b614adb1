# One word for every job. `make help` lists them.
PYTHON ?= python3
TORCH  ?= 2.13.0
RUN    := .venv/bin/

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
	  $(RUN)pip install --quiet torch==$(TORCH); \
	else \
	  echo "no GPU found: the CPU build of torch"; \
	  $(RUN)pip install --quiet torch==$(TORCH)+cpu 2>/dev/null || $(RUN)pip install --quiet torch==$(TORCH); \
	fi
	$(RUN)pip install --quiet --editable '.[dev]'
	@touch $@

setup: .venv/ready ## make .venv with everything in it (the other targets do this by themselves)

demo: .venv/ready ## train a DCFormer beside the same-size Transformer on real text, compare, let it write
	$(RUN)dcformer compare --out results/demo --preset demo
	$(RUN)dcformer generate results/demo/dcformer --prompt "def main(" --max-new-tokens 120 --seed 0 --out results/demo/sample.txt

test: .venv/ready ## run all tests
	$(RUN)python -m pytest

check: .venv/ready ## formatting, lint and types: what CI runs before the tests
	$(RUN)ruff format --check .
	$(RUN)ruff check .
	$(RUN)mypy

format: .venv/ready ## let ruff format and mend what it can
	$(RUN)ruff format .
	$(RUN)ruff check --fix .

bench: .venv/ready ## measure the operator, write results/attention
	$(RUN)python benchmarks/attention.py

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
