"""Runs tests of the published packages against our drop-ins: published_tests.py TESTS [pytest options].

TESTS are files or folders with the packages' own tests, of the stickbreaking_attention package or of
flash-linear-attention; both have to be importable. What the tests import by name from there is ours: the functions
of megatron_sb.compat are put into the packages before any test is. The packages' own references stay theirs. The last
line says how often ours were called.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable

import pytest
import torch

from megatron_sb import compat

# (module, name): where the published functions are that tests import.
PLACES = (
    ("stickbreaking_attention", "sb_attn"),
    ("stickbreaking_attention.sb_attn", "sb_attn"),
    ("stickbreaking_attention", "sb_attn_varlen"),
    ("stickbreaking_attention.sb_varlen", "sb_attn_varlen"),
    ("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn"),
    ("fla.ops.stickbreaking_attn.parallel", "parallel_stickbreaking_attn"),
)


class Redirection:
    """A pytest plugin: ours in the published places, and a count of their calls."""

    def __init__(self) -> None:
        self.calls = 0

    def counted(self, function: Callable) -> Callable:
        """The function, under its own name."""

        def call(*args, **options):
            self.calls += 1
            return function(*args, **options)

        call.__name__ = function.__name__
        return call

    def pytest_sessionstart(self) -> None:
        """Before tests are collected, and so before they import anything."""
        if importlib.util.find_spec("transformers") is None:  # for its set_seed alone
            sys.modules["transformers"] = types.ModuleType("transformers")
            sys.modules["transformers"].set_seed = torch.manual_seed
        for place, name in PLACES:
            try:
                module = importlib.import_module(place)
            except ImportError as error:
                print(f"{place} is not redirected: {error}")
                continue
            assert hasattr(module, name), f"{place} has no {name} to redirect"
            setattr(module, name, self.counted(getattr(compat, name)))

    def pytest_terminal_summary(self) -> None:
        """After the counts of pytest."""
        print(f"\nfunctions of megatron_sb.compat were called {self.calls} times")


def main() -> int:
    """Run pytest with the redirection; fail also if nothing was redirected."""
    redirection = Redirection()
    # Not under this repository's settings: what markers there are is the tests' own business.
    options = ["-c", os.devnull, "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    code = pytest.main([*options, *sys.argv[1:]], plugins=[redirection])
    return int(code) or int(redirection.calls == 0)


if __name__ == "__main__":
    sys.exit(main())
