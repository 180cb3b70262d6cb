"""Settings for all Python tests: number of threads, fixed seeds, and skips for missing GPUs and optional packages."""

import gc
import importlib.util
import os
import random
from pathlib import Path

import numpy
import pytest
import torch

_GPUS_NEEDED = {"gpu": 1, "multigpu": 2}  # by mark
# These files take 10 seconds to two minutes each, the longest first. They start first: if one of them started last, the
# other workers would wait for it.
_SLOW_FILES = (
    "megatron/test_megatron_hosts.py",
    "training/test_job_options.py",
    "megatron/test_launch.py",
    "context_parallel/test_context_parallel.py",
    "huggingface/test_compile.py",
    "training/test_job.py",
    "package/test_package.py",
    "training/test_engine.py",
    "huggingface/test_compile_generation.py",
    "ops/test_variants.py",
    "ops/test_kvcache_variants.py",
    "training/test_start.py",
    "package/test_build_backend.py",
    "huggingface/test_plain_torch.py",
    "experiments/test_verdict.py",
    "package/test_command_line.py",
    "ops/test_torch_integration.py",
    "context_parallel/test_context_parallel_softmax.py",
    "megatron/test_megatron_parallel.py",
    "megatron/test_megatron_killed.py",
    "megatron/test_megatron_resume.py",
    "package/test_install.py",
    "training/test_checkpoint_files.py",
    "package/test_machine_code.py",
    "baselines/test_geometric.py",
    "training/test_several_machines.py",
    "baselines/test_softmax.py",
    "context_parallel/test_new_calls.py",
    "ops/test_head_output.py",
    "checkpoints/test_refused_weights.py",
    "huggingface/test_attention_interface.py",
    "integrations/test_old_import_name.py",
    "package/test_attention_benchmark.py",
    "package/test_torch_version.py",
    "package/test_compare_builds.py",
    "huggingface/test_training_stacks.py",
    "package/test_bench.py",
    "huggingface/test_plain_operators.py",
    "experiments/test_recall_experiments.py",
    "package/test_eval_command.py",
    "package/test_examples.py",
    "ops/test_block_gradients.py",
    "training/test_distillation.py",
    "ops/test_cpu_kernels.py",
    "experiments/test_ruler.py",
    "experiments/test_swap.py",
    "context_parallel/test_lost_rank.py",
)

try:
    _HAS_MEGATRON = importlib.util.find_spec("megatron.core") is not None
except ModuleNotFoundError:
    _HAS_MEGATRON = False
_HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
collect_ignore = ([] if _HAS_MEGATRON else ["megatron", "training", "checkpoints", "experiments"]) + (
    [] if _HAS_TRANSFORMERS else ["huggingface", "checkpoints"]
)


def pytest_report_header():
    """Name the folders that are skipped because an optional package is missing."""
    without_megatron = "NOT INSTALLED, skipping tests/python/{megatron,training,checkpoints,experiments}"
    without_transformers = "NOT INSTALLED, skipping tests/python/{huggingface,checkpoints}"
    return [
        f"megatron-core: {'installed' if _HAS_MEGATRON else without_megatron}",
        f"transformers: {'installed' if _HAS_TRANSFORMERS else without_transformers}",
    ]


def pytest_terminal_summary(terminalreporter):
    """Name these folders at the end, too: -q leaves out the header, as in benchmarks/gpu_suite.py."""
    for line in pytest_report_header():
        if "NOT INSTALLED" in line:
            terminalreporter.write_line(line)


def pytest_configure():
    """Share the cores among pytest-xdist's workers. Let torch.compile generate code without vector instructions.

    torch.compile would compile and run several programs to find the instructions of the CPU, for half a minute.
    """
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # read when torch._inductor is imported
    # Threads of commands that tests start. Waiting threads would spin on cores that other tests need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Leave the objects of all imported modules out of garbage collections: there are millions, and all of them stay.

    torch.compile and Megatron-Core collect garbage dozens of times. Python also does so by itself, while modules are
    imported, too.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Move the slow files to the front. Skip tests that need more GPUs than this machine has."""
    rank = {Path(__file__).parent / name: index for index, name in enumerate(_SLOW_FILES)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    available = torch.cuda.device_count()
    for item in items:
        for mark, needed in _GPUS_NEEDED.items():
            if item.get_closest_marker(mark) and available < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {available}"))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    """Set the same seeds before each test, so that its random numbers do not depend on the tests before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Use one thread. In thousands of tiny calls, several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_precompiled_headers():
    """Let torch.compile give g++ its headers as they are. To precompile them takes longer than to use them twice."""
    names = {"cpp_cache_precompile_headers", "aot_inductor.precompile_headers"}
    config = torch._inductor.config
    with config.patch(dict.fromkeys(names & config.get_config_copy().keys(), False)):
        yield
