"""Functions that torch.compile must not trace, because ranks exchange data in them."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_WHY_NOT_COMPILED = (
    "megatron_sb: context parallelism is not a part of a compiled graph, because ranks exchange data in it. Compile "
    "without fullgraph=True, or compile the parts before and after it"
)


Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Make torch.compile break its graph at calls of the function.

    This is torch.compiler.disable without its import of the compiler, which takes seconds. torch.compile reads the
    attributes of `call`. After the graph break it runs `call`, which disables it for everything below.
    """
    disabled = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(function, reason=_WHY_NOT_COMPILED)
        return (disabled or function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _WHY_NOT_COMPILED  # type: ignore[attr-defined]
    return cast(Function, call)
