# One command each, on a fresh clone, with nothing but python3 (with venv) and a C++ compiler: see `make help`.

PYTHON ?= python3
# The virtual environment that every target uses.
VENV   ?= .venv
# What is installed where neither PYTHON nor the environment has torch 2.10 or newer.
TORCH  ?= torch
# Processes that the tests are shared out to; 0: in the one that pytest runs in.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
# More arguments for pytest, ruff's paths and the like: make test ARGS="-k varlen"
ARGS   ?=

PY      := $(VENV)/bin/python
SOURCES := $(shell find csrc -type f) setup.py
CXX_FILES = $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
HAS_TORCH = import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))
TORCH_HOME = import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))
SITE = import sysconfig; print(sysconfig.get_path("purelib"))
# What the extra dev names. Python 3.10 has no reader of TOML, but pip has.
DEV_EXTRA = import importlib, sys; \
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"); \
    print(*toml.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")

.PHONY: help run paper test test-full test-gpu sanitize lint format build clean

help:
	@echo "make run        train a small GPT with standard attention and with ours, side by side"
	@echo "make paper      the FlashAttention paper's figures again, measured on this machine (docs/paper.md)"
	@echo "make test       the quick tests"
	@echo "make test-full  all tests: fuzzing and large samples too"
	@echo "make test-gpu   the tests that need a GPU"
	@echo "make sanitize   the random sample of options with a library built under ASan and UBSan (SANITIZE_TESTS: others)"
	@echo "make lint       ruff and clang-format, checking only; make format applies them"
	@echo "make build      compile the libraries in place"
	@echo "make clean      remove everything that was built, and $(VENV)"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) WORKERS=$(WORKERS) ARGS=\"$(ARGS)\""

run: $(VENV)/.with-bench
	$(PY) benchmarks/train_gpt.py $(ARGS)

paper: $(VENV)/.with-paper
	$(PY) -m flash_attn.paper all $(ARGS)

test: $(VENV)/.with-test
	$(PY) -m pytest -n $(WORKERS) $(ARGS)

test-full: $(VENV)/.with-test
	$(PY) -m pytest -n $(WORKERS) -m "full or not full" $(ARGS)

test-gpu: $(VENV)/.with-test
	$(PY) -m pytest -m gpu $(ARGS)

# In a copy of the tree, so that the normal library stays. Leaks are not looked for: Python has many at exit. The
# runtimes are preloaded because Python itself is not instrumented; libstdc++, so that ASan can see its exceptions.
# --capture=sys: what they write before they end the process must be seen. Tests can ask for FLASH_ATTN_SANITIZED.
SANITIZE_TESTS ?= tests/test_random_options.py
SANITIZED := build/sanitize
sanitize: $(VENV)/.with-test
	mkdir -p $(SANITIZED)
	cd $(SANITIZED) && rm -rf csrc flash_attn tests benchmarks
	cp -rp csrc flash_attn tests benchmarks setup.py pyproject.toml README.md LICENSE $(SANITIZED)
	cd $(SANITIZED) && FLASH_ATTN_SANITIZE=address,undefined $(abspath $(PY)) setup.py build_ext --inplace
	cd $(SANITIZED) && env \
	    LD_PRELOAD="$$(ldd flash_attn/_C.so | awk '/libasan|libubsan|libstdc/ {print $$3}' | tr '\n' ' ')" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 FLASH_ATTN_SANITIZED=1 \
	    $(abspath $(PY)) -m pytest --capture=sys $(SANITIZE_TESTS) $(ARGS)

lint: $(VENV)/.with-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.with-dev
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(CXX_FILES)

build: $(VENV)/.made
	$(PY) setup.py build_ext --inplace

clean:
	rm -rf build dist *.egg-info $(VENV) flash_attn/_C.so flash_attn/_C_cuda.so flash_attn/_build_info.json
	rm -rf .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

flash_attn/_C.so: $(VENV)/.made $(SOURCES)
	$(PY) setup.py build_ext --inplace

# The package itself, editable, with one of its extras: test, bench, paper.
$(VENV)/.with-%: pyproject.toml $(VENV)/.made flash_attn/_C.so
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[$*]"
	@touch $@
.PRECIOUS: $(VENV)/.with-%

# dev: without the package, which is not looked into by running it: no torch, no compiler. Its programs belong into
# $(VENV)/bin even where PYTHON has them already.
$(VENV)/.with-dev: pyproject.toml | $(PY)
	$(PY) -c '$(DEV_EXTRA)' >$@.txt
	$(PY) -m pip install --quiet --ignore-installed --requirement $@.txt
	@touch $@

# A torch that is there already is used, not downloaded again: one of the system through --system-site-packages, one
# of a virtual environment that PYTHON belongs to through a .pth file.
$(PY):
	@if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then \
	    echo "$(VENV): with the torch of $(PYTHON)"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV) || exit 1; \
	    $(PY) -c '$(HAS_TORCH)' 2>/dev/null || \
	        $(PYTHON) -c '$(TORCH_HOME)' > "$$($(PY) -c '$(SITE)')/outer.pth"; \
	else \
	    $(PYTHON) -m venv $(VENV); \
	fi

$(VENV)/.made: | $(PY)
	@$(PY) -c '$(HAS_TORCH)' 2>/dev/null || { \
	    echo "$(VENV): installing $(TORCH), which takes a while"; \
	    $(PY) -m pip install --quiet "$(TORCH)"; }
	$(PY) -c '$(HAS_TORCH)' || { echo "torch 2.10 or newer is needed"; exit 1; }
	$(PY) -m pip install --quiet "setuptools>=77" ninja
	@touch $@
