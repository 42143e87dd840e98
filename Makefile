# make demo and make test do all their own set-up; nothing else is needed on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VLLM_TESTS := $(wildcard tests/test_vllm_*.py) tests/test_rivals.py
OUT ?= out/demo

# A process for each file, so that no engine of vLLM starts in the memory that another has left. vLLM leaves
# sockets to the garbage collector, which pytest would call a failure.
define vllm_pytest
	set -e; for file in $(VLLM_TESTS); do NUMBA_CACHE_DIR=$(VLLM)/numba $(VLLM)/bin/python -m pytest -W ignore::pytest.PytestUnraisableExceptionWarning $$file $(1); done
endef

.PHONY: demo test test-all test-vllm lint install clean

install: $(VENV)/.stamp-dev

# The light install: simulation and reports, no torch.
$(VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

# The live engine besides, with torch.
$(VENV)/.stamp-runtime: $(VENV)/.stamp
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[runtime]'
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-runtime
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,runtime]'
	touch $@

# vLLM for CPUs, whose pins are its own. torch with what it needs, all else without.
$(VLLM)/.stamp: pyproject.toml constraints.txt runtime/vllm/requirements-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(VLLM)/bin/pip install -q --disable-pip-version-check --no-deps -r runtime/vllm/requirements-cpu.txt
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c runtime/vllm/requirements-cpu.txt -e . hypothesis pytest
	touch $@

# A real run of the built-in pair, recorded, then served live under three policies: each beside its replay.
demo: $(VENV)/.stamp-runtime
	rm -rf $(OUT)/trace $(OUT)/live
	$(BIN)/python -m dcut.record --out $(OUT)/trace --requests 48 --max-tokens 96 --profile-s 8 --cpu-time
	$(BIN)/python bench/live.py --trace $(OUT)/trace --policy off,full,dcut --batch-size 4,16 --out $(OUT)/live
	$(BIN)/python -m sim.replay --trace h20-qwen3-8b --policy off,full,ratio:0.75,ratio:0.5,dcut --batch-size 4,8,16,32,64 --out $(OUT)/replay
	$(BIN)/python -m analysis.report $(OUT)/replay --live $(OUT)/live --trace $(OUT)/trace --out $(OUT)/report.html

test: lint test-vllm
	$(BIN)/python -m pytest -m "not slow"

test-all: lint $(VLLM)/.stamp
	$(BIN)/python -m pytest
	$(call vllm_pytest,)

# What has to meet vLLM itself; without it these tests skip. Its numba is another: so is the cache.
test-vllm: $(VLLM)/.stamp
	$(call vllm_pytest,-m "not slow")

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

clean:
	rm -rf $(VENV) $(VLLM) out build dist *.egg-info
