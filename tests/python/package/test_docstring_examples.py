"""The examples in docstrings run and print what they show."""

import doctest
import importlib
import inspect

import pytest

import megatron_sb

MODULES = (
    "compat",
    "nn.gates",
    "nn.self_attention",
    "ops.attention",
    "ops.head_output",
    "ops.kvcache",
    "ops.varlen",
    "options",
    "reference",
)
# These need a process group; examples/context_parallel.py and the tests of context parallelism run them.
DISTRIBUTED = {"ContextParallelPlan", "context_parallel_attention", "shard_sequence", "unshard_sequence"}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"megatron_sb.{name}")
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("name", megatron_sb.__all__)
def test_public_objects_have_examples(name):
    docstring = inspect.getdoc(getattr(megatron_sb, name))
    assert ("Example:" in docstring) or name in DISTRIBUTED
