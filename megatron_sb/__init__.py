"""Stick-breaking attention (Tan et al., arXiv 2410.17980) for long-context training.

Public functions are listed in ``__all__``; `megatron_sb.compat`, `megatron_sb.geometric`, `megatron_sb.reference`,
`megatron_sb.softmax` and `megatron_sb.megatron` are imported by name.
"""

from megatron_sb import _library

_library.load()

from megatron_sb.context_parallel import (  # noqa: E402  the operators must be loaded first
    ContextParallelPlan,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)
from megatron_sb.functional import (  # noqa: E402
    head_output,
    stickbreaking_attention,
    stickbreaking_attention_varlen,
)
from megatron_sb.kvcache import KVCache, stickbreaking_attention_with_kvcache  # noqa: E402
from megatron_sb.modules import StickBreakingSelfAttention  # noqa: E402

__version__ = _library.build_info()["version"]

__all__ = [
    "ContextParallelPlan",
    "KVCache",
    "StickBreakingSelfAttention",
    "context_parallel_attention",
    "head_output",
    "shard_sequence",
    "stickbreaking_attention",
    "stickbreaking_attention_varlen",
    "stickbreaking_attention_with_kvcache",
    "unshard_sequence",
]


def __getattr__(name: str):
    if name in ("compat", "geometric", "reference", "softmax"):
        import importlib

        return importlib.import_module(f"megatron_sb.{name}")
    raise AttributeError(f"module 'megatron_sb' has no attribute {name!r}")
