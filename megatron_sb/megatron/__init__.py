"""Stick-breaking attention for Megatron-Core models (`core_attention`, layer specs, flags)."""

from megatron_sb.megatron.arguments import StickBreakingOptions, add_arguments, options_from_args
from megatron_sb.megatron.core_attention import StickBreakingCoreAttention, shared_plans
from megatron_sb.megatron.spec import CheckedSelfAttention, with_stickbreaking

__all__ = [
    "CheckedSelfAttention",
    "StickBreakingCoreAttention",
    "StickBreakingOptions",
    "add_arguments",
    "options_from_args",
    "shared_plans",
    "with_stickbreaking",
]
