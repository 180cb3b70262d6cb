"""The examples in docstrings run and print the output that they show. All public objects have one."""

import doctest
import importlib
import inspect

import pytest

import megatron_sb

LIBRARY = (
    "_tasks",
    "compat",
    "nn.gates",
    "nn.self_attention",
    "ops.attention",
    "ops.context_parallel",
    "ops.head_output",
    "ops.kvcache",
    "ops.snapshot",
    "ops.varlen",
    "options",
    "reference",
    "validation",
)
HUGGINGFACE = (
    "huggingface",
    "huggingface.attention",
    "huggingface.byte_tokenizer",
    "huggingface.configuration",
    "huggingface.modeling",
    "huggingface.packing",
    "huggingface.plain_operators",
    "huggingface.saved_folder",
)
MEGATRON = (
    "megatron.arguments",
    "megatron.core_attention",
    "megatron.gates",
    "megatron.layer_pattern",
    "megatron.packed",
    "megatron.plans",
    "megatron.settings",
    "megatron.spec",
    "megatron.stand_ins",
    "megatron.statistics",
    "megatron.weights",
)
# Optional packages that the examples of a module need.
NEEDED = {
    **dict.fromkeys(LIBRARY, ()),
    **dict.fromkeys(HUGGINGFACE, ("transformers",)),
    **dict.fromkeys(MEGATRON, ("megatron.core",)),
    **dict.fromkeys(("checkpoints", "checkpoints.layouts"), ("transformers", "pydantic", "yaml")),
}


@pytest.mark.parametrize("name", NEEDED)
def test_examples(name):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    found = doctest.testmod(importlib.import_module(f"megatron_sb.{name}"))
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("name", megatron_sb.__all__)
def test_public_object_has_an_example(name):
    assert "Example:" in inspect.getdoc(getattr(megatron_sb, name))
