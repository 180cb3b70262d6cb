"""Causal softmax attention with the position encodings that stick-breaking attention is compared with.

The module is in attention.py. The position encodings are in positions.py, StableMask in stable_mask.py, and forget
gates in forget_gates.py. kernels.py has the kernels and chooses between them. offsets.py has the lengths, positions and
masks of packed documents. context_parallel.py computes a sequence that several ranks share, with shards.py, blocks.py
and exchange.py.
"""

from megatron_sb.baselines.softmax.attention import Position, SoftmaxAttention
from megatron_sb.baselines.softmax.context_parallel import context_parallel_softmax
from megatron_sb.baselines.softmax.positions import FireBias, RotaryKind, RotaryScaling, alibi_slopes

__all__ = [
    "FireBias",
    "Position",
    "RotaryKind",
    "RotaryScaling",
    "SoftmaxAttention",
    "alibi_slopes",
    "context_parallel_softmax",
]
