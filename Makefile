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
BUILD := build/Release
CONFIG ?= configs/tiny_context_extension.yaml

SOURCES := $(shell git ls-files -co --exclude-standard 'CMakeLists.txt' 'cmake' 'csrc' 'tests/cpp' 2>/dev/null)
PYTHON_FILES := megatron_sb tests examples benchmarks
CXX_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES))

.PHONY: train test test-cpp test-python test-gpu gpu-suite lint format build clean

train: $(VENV)/.built
	$(BIN)/megatron-sb train $(CONFIG)

test: lint test-cpp test-python

test-cpp: $(VENV)/.built
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error

test-python: $(VENV)/.built
	$(BIN)/python -m pytest

test-gpu: $(VENV)/.built
	$(BIN)/python -m pytest -m "gpu or multigpu"

OUT ?= runs/gpu-suite
gpu-suite: $(VENV)/.built
	$(BIN)/python benchmarks/gpu_suite.py --out $(OUT) --stages tests portable sanitize bench

lint: $(VENV)/.built
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.built
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

build: $(VENV)/.built

# torch first: everything is built against the one that is installed. Then what builds (pyproject.toml's own list).
$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q 'scikit-build-core>=0.10' 'pybind11>=2.13' 'cmake>=3.25' ninja
	touch $@

$(VENV)/.built: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation -e '.$(EXTRAS)' -C cmake.define.SB_BUILD_TESTS=ON
	touch $@

clean:
	rm -rf build $(VENV)/.built
