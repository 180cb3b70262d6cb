"""The operators that the models of this package call.

A saved folder has `plain_operators` in place of this module. Both have the same functions.
"""

from megatron_sb.ops import head_output, stickbreaking_attention, stickbreaking_attention_varlen
from megatron_sb.ops.kvcache import attend_to_filled, is_decoding_step, keys_and_gates, stored_head_dim, stored_keys
from megatron_sb.ops.shared_sequence import shared_plan

__all__ = [
    "attend_to_filled",
    "head_output",
    "is_decoding_step",
    "keys_and_gates",
    "shared_plan",
    "stickbreaking_attention",
    "stickbreaking_attention_varlen",
    "stored_head_dim",
    "stored_keys",
]
