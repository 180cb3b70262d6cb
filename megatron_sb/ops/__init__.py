"""The operators: attention on one device, packed, against a KV cache, and over the ranks of a process group."""

from megatron_sb.ops import library

library.load()

from megatron_sb.ops.attention import stickbreaking_attention  # noqa: E402  the operators must be loaded first
from megatron_sb.ops.context_parallel import (  # noqa: E402
    ContextParallelPlan,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)
from megatron_sb.ops.head_output import head_output  # noqa: E402
from megatron_sb.ops.kvcache import KVCache, stickbreaking_attention_with_kvcache  # noqa: E402
from megatron_sb.ops.shared_sequence import shared_sequence  # noqa: E402
from megatron_sb.ops.varlen import stickbreaking_attention_varlen  # noqa: E402

__all__ = [
    "ContextParallelPlan",
    "KVCache",
    "context_parallel_attention",
    "head_output",
    "shard_sequence",
    "shared_sequence",
    "stickbreaking_attention",
    "stickbreaking_attention_varlen",
    "stickbreaking_attention_with_kvcache",
    "unshard_sequence",
]
