"""Modules: a self-attention layer and its forget gates."""

from megatron_sb.nn.self_attention import StickBreakingSelfAttention

__all__ = ["StickBreakingSelfAttention"]
