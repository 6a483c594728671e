# A newcomer needs two commands: `make demo` and `make test`. Everything else is for those who change the code.
PYTHON ?= python3
VENV ?= .venv
ZOO ?= .venv-zoo
PEERS ?= .venv-peers
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Threads that wait for each other go to sleep soon: spinning beside another process makes steps many times as slow.
demo test test-slow: export GOMP_SPINCOUNT ?= 3000

.PHONY: help venv demo test test-slow lint format bench bench-finding bench-peers zoo clean

help:
	@echo "make demo       train a small network twice, with weight decay and with PathProx: table, pictures, a page"
	@echo "make test       run all tests (a few minutes)"
	@echo "make test-slow  run the tests that take longer"
	@echo "make lint       ruff and mypy"
	@echo "make bench      what a step costs, what shrinking saves, how soon the objective is reached"
	@echo "make bench-finding, make bench-peers  how long finding units takes; a step with PathProx and with its peers"
	@echo "make zoo        real architectures: find units, kill some, shrink, compare (an hour on two cores)"

# torch first and alone: with the version pinned here, nothing later can pull in another build of it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[experiments,export,ray,dev]'
	@touch $@

venv: $(VENV)/ready

demo: venv
	$(BIN)/pathprox demo --out demo

test: venv
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

test-slow: venv
	$(BIN)/python -m pytest -q -m slow --timeout 3000

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/shrinking.py
	$(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/page.py

# The zoo has an environment of its own. torchvision and timm come without their dependencies: torch is there already.
ZOO_PIP := $(ZOO)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
$(ZOO)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO_PIP) torch
	$(ZOO_PIP) --no-deps torchvision==0.28.0 timm==1.0.30
	$(ZOO_PIP) pillow transformers==5.22.2 --editable .
	@touch $@

bench-finding: $(ZOO)/ready
	$(ZOO)/bin/python benchmarks/finding.py

# So have the peers that steps are compared with.
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
$(PEERS)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) torch
	$(PEERS_PIP) torch-pruning==1.6.1 torchao==0.18.0 --editable .
	@touch $@

bench-peers: $(PEERS)/ready
	$(PEERS)/bin/python benchmarks/peers.py

zoo: $(ZOO)/ready
	$(ZOO)/bin/python scripts/zoo.py --out results/zoo --workers 2 --all-units
	$(ZOO)/bin/python scripts/zoo.py --out results/zoo --table docs/zoo.md

clean:
	rm -rf $(VENV) $(ZOO) $(PEERS) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
