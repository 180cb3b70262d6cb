"""Stick-breaking attention (Tan et al., arXiv 2410.17980) for long-context training.

``__all__`` lists the public functions and classes. The first use of one of them loads torch and the operator library.
``import megatron_sb`` alone loads neither, so that `megatron_sb.training.config` can be imported without torch.
"""

import importlib
from typing import TYPE_CHECKING

from megatron_sb import _moved

if TYPE_CHECKING:
    from megatron_sb.nn import StickBreakingSelfAttention
    from megatron_sb.ops import (
        ContextParallelPlan,
        KVCache,
        context_parallel_attention,
        head_output,
        shard_sequence,
        shared_sequence,
        stickbreaking_attention,
        stickbreaking_attention_varlen,
        stickbreaking_attention_with_kvcache,
        unshard_sequence,
    )

__all__ = [
    "ContextParallelPlan",
    "KVCache",
    "StickBreakingSelfAttention",
    "context_parallel_attention",
    "head_output",
    "shard_sequence",
    "shared_sequence",
    "stickbreaking_attention",
    "stickbreaking_attention_varlen",
    "stickbreaking_attention_with_kvcache",
    "unshard_sequence",
]

_SUBMODULES = ("baselines", "compat", "nn", "ops", "reference")

_moved.install()


def __getattr__(name: str):
    if name in __all__:
        package = "nn" if name == "StickBreakingSelfAttention" else "ops"
        value = getattr(importlib.import_module(f"megatron_sb.{package}"), name)
    elif name == "__version__":
        value = importlib.import_module("megatron_sb.ops.library").build_info()["version"]
    elif name in _SUBMODULES:
        return importlib.import_module(f"megatron_sb.{name}")
    elif name in _moved.TOP_LEVEL:
        value = _moved.attribute(name)
    else:
        raise AttributeError(f"module 'megatron_sb' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES, "__version__"})
