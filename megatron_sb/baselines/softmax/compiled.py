"""torch.compile on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def compiled(function: Callable, **options: object) -> Callable:
    """Return `function`, compiled by torch.compile(function, **options) at its first call.

    torch.compile imports the compiler, which takes seconds. Processes that never call the function skip this import.
    """

    @functools.cache
    def compile_once() -> Callable:
        return torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        # An outer torch.compile traces the function itself.
        return (function if torch.compiler.is_compiling() else compile_once())(*args, **kwargs)

    return call
