"""Subclasses of torch.Tensor: a kernel never gets one without elements, and the others give the same values."""

import re
from pathlib import Path

import pytest
from support.fork_server import run_python
from support.messages import mentions

WORKER = Path(__file__).parents[1] / "workers" / "tensor_subclasses.py"
RAISES = "[A-Za-z]*(Error|Exception) "  # from torch, where the subclass decides
OF_ROWS = ("forget_gate", "query_bias", "key_bias")
REFUSED = {"context_parallel": mentions("TypeError q elements"), **{x: mentions(f"TypeError {x}") for x in OF_ROWS}}


@pytest.mark.parametrize(
    ("kind", "expected", "expected_of_context_parallelism"),
    [
        ("dtensor", RAISES, REFUSED),
        ("fake", "no values", REFUSED),
        ("wrapper", "same values", REFUSED),
        ("own", "same values", dict.fromkeys(REFUSED, "same values")),
    ],
)
def test_each_operator(kind, expected, expected_of_context_parallelism):
    """A crash ends the worker, so it runs in another process."""
    result = run_python([WORKER, kind], seconds=120)
    found = dict(re.findall(r"^(\w+): (.*)$", result.stdout, re.M))
    for name in ("attention", "varlen", "kvcache", "context_parallel", *OF_ROWS):
        assert name in found, f"{name} ended the process:\n{result.stdout}\n{result.stderr[-2000:]}"
        pattern = expected_of_context_parallelism.get(name, expected)
        assert re.match(pattern, found[name]), f"{name}: {found[name]}"
