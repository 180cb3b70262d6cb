"""Run the tests of the published packages against megatron_sb.compat.

python benchmarks/published_tests.py TESTS [pytest options]

TESTS are files or folders with the tests of the stickbreaking_attention package or of flash-linear-attention. Both
packages must be importable. Before pytest collects the tests, this script replaces the packages' attention functions by
those of megatron_sb.compat. The packages keep their own references. The last line says how often functions of
megatron_sb.compat were called.
"""

import argparse
import importlib.util
import os
import sys
import types
from collections.abc import Callable

import pytest
import torch

from megatron_sb import compat

# (module, name) of the published functions that the tests import.
PUBLISHED = (
    ("stickbreaking_attention", "sb_attn"),
    ("stickbreaking_attention.sb_attn", "sb_attn"),
    ("stickbreaking_attention", "sb_attn_varlen"),
    ("stickbreaking_attention.sb_varlen", "sb_attn_varlen"),
    ("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn"),
    ("fla.ops.stickbreaking_attn.parallel", "parallel_stickbreaking_attn"),
)


class Redirection:
    """A pytest plugin that replaces the published functions and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def counted(self, function: Callable) -> Callable:
        """Wrap a function under its own name, and count its calls."""

        def call(*args, **options):
            self.calls += 1
            return function(*args, **options)

        call.__name__ = function.__name__
        return call

    def pytest_sessionstart(self) -> None:
        """Replace the functions before the tests are collected, and so before they import anything."""
        if importlib.util.find_spec("transformers") is None:  # the tests need only its set_seed
            sys.modules["transformers"] = types.ModuleType("transformers")
            sys.modules["transformers"].set_seed = torch.manual_seed
        for path, name in PUBLISHED:
            try:
                module = importlib.import_module(path)
            except ImportError as error:
                print(f"{path} is not redirected: {error}")
                continue
            assert hasattr(module, name), f"{path} has no {name} to redirect"
            setattr(module, name, self.counted(getattr(compat, name)))

    def pytest_terminal_summary(self) -> None:
        """Print the number of calls after the counts of pytest."""
        print(f"\nfunctions of megatron_sb.compat were called {self.calls} times")


def main() -> int:
    """Run pytest with the redirection. Fail also if no replaced function was called."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", metavar="TESTS", help="file or folder with tests of a published package")
    parser.add_argument("more", nargs=argparse.REMAINDER, metavar="...", help="more of them, and options of pytest")
    arguments = parser.parse_args()
    if not arguments.tests:  # as of a shell's variable that is not set; pytest would run the tests of this folder
        parser.error("TESTS must be a file or folder with tests, got ''")
    redirection = Redirection()
    # Ignore this repository's pytest settings: the published tests define their own markers.
    options = ["-c", os.devnull, "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    code = pytest.main([*options, arguments.tests, *arguments.more], plugins=[redirection])
    return int(code) or int(redirection.calls == 0)


if __name__ == "__main__":
    sys.exit(main())
