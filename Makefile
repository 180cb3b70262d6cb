# make train   the main job from nothing: context extension of a small Megatron-Core model on real text
# make test    every test that this machine can run, from nothing
# make gpu-suite   on a GPU machine: the GPU tests, compute-sanitizer and the benchmarks, with a record
# All make .venv themselves and are quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.11.0
# What to install beside the package: [test] is all; empty where a machine without a network brings its own.
EXTRAS ?= [test]
# Tests at a time, in Python files of them, each with its share of the cores.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile
BUILD := build/Release
CONFIG ?= configs/tiny_context_extension.yaml
# Megatron-Core's newest release needs Python 3.12. Its environment takes the operators from .venv's: they know no Python.
PYTHON312 ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python3.12; do \
	$$python -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
VENV312 := .venv312
MEGATRON312 ?= megatron-core==0.19.2
# Of everything that is built on Megatron-Core, what depends on its release.
TESTS312 := tests/python/megatron tests/python/training/test_engine.py tests/python/checkpoints/test_megatron_checkpoints.py

SOURCE_ROOTS := CMakeLists.txt cmake csrc tests/cpp
# What git knows, or all files where it knows none: in an archive, or in a folder of another user, which it distrusts.
SOURCES := $(or $(shell git ls-files -co --exclude-standard $(SOURCE_ROOTS) 2>/dev/null),\
	$(shell find $(SOURCE_ROOTS) -type f 2>/dev/null))
PYTHON_FILES := megatron_sb tests examples benchmarks
CXX_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES))
# Without a file it would wait for one on standard input.
CLANG_FORMAT = $(if $(CXX_FILES),$(BIN)/clang-format,$(error there are no C++ files in $(SOURCE_ROOTS)))

.PHONY: train test test-cpp test-python test-megatron-3.12 test-gpu gpu-suite lint format build clean

train: $(VENV)/.built
	$(BIN)/megatron-sb train $(CONFIG)

test: lint test-cpp test-python test-megatron-3.12

test-cpp: $(VENV)/.built
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --parallel $(WORKERS)

test-python: $(VENV)/.built
	$(BIN)/python $(PYTEST)

ifeq ($(PYTHON312),)
test-megatron-3.12:
	@echo "SKIPPED [1] $(TESTS312) with $(MEGATRON312): there is no python3.12 (PYTHON312=...)"
else
test-megatron-3.12: $(VENV312)/.built
	$(VENV312)/bin/python $(PYTEST) $(TESTS312)
endif

test-gpu: $(VENV)/.built
	$(BIN)/python -m pytest -m "gpu or multigpu"

OUT ?= runs/gpu-suite
gpu-suite: $(VENV)/.built
	$(BIN)/python benchmarks/gpu_suite.py --out $(OUT) --stages tests portable sanitize bench

lint: $(VENV)/.built
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	@$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.built
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(CLANG_FORMAT) -i $(CXX_FILES)

build: $(VENV)/.built

# torch first: everything is built against the one that is installed. Then what builds (pyproject.toml's own list), and
# what lm-eval's rouge-score, which has no wheel, is built by: --no-build-isolation holds for it too (82: torch's bound).
$(VENV)/.torch: MAKE_VENV := $(PYTHON) -m venv
$(VENV312)/.torch: MAKE_VENV := $(PYTHON312) -m venv
$(VENV)/.torch $(VENV312)/.torch:
	test -x $(@D)/bin/python || $(MAKE_VENV) $(@D)
	$(@D)/bin/python -m pip install -q '$(TORCH)'
	$(@D)/bin/python -m pip install -q 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.25' ninja \
		'setuptools>=70.1,<82'
	touch $@

$(VENV)/.built: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation -e '.$(EXTRAS)' -C cmake.define.SB_BUILD_TESTS=ON
	touch $@

# Of what is compiled, only the module _C belongs to one Python.
$(VENV312)/.built: $(VENV312)/.torch $(VENV)/.built
	$(@D)/bin/python -m pip install -q '$(MEGATRON312)' --no-build-isolation -e '.$(EXTRAS)' \
		-C build-dir=build/python3.12 -C build.targets=_C -C install.components=python
	cp -r "$$($(BIN)/megatron-sb info --cmake-prefix)/lib" $(@D)/lib/python3.12/site-packages/megatron_sb/
	touch $@

clean:
	rm -rf build $(VENV)/.built $(VENV312)/.built
