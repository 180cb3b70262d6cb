"""Megatron's PackedSeqParams: whether a call is packed, and where its documents are."""

from __future__ import annotations

import torch


def is_packed(packed_seq_params) -> bool:
    """Whether the tensors of a call are (t, h, d), one document after the other."""
    return packed_seq_params is not None and packed_seq_params.qkv_format == "thd"


def document_bounds(packed_seq_params) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the offsets of the documents for queries, and for keys if those are another tensor (else None)."""
    params = packed_seq_params
    padded = params.cu_seqlens_q_padded is not None
    queries = params.cu_seqlens_q_padded if padded else params.cu_seqlens_q
    keys = params.cu_seqlens_kv_padded if padded else params.cu_seqlens_kv
    if queries is None:
        raise ValueError("packed_seq_params.cu_seqlens_q must be a tensor of offsets with qkv_format='thd', got None.")
    return queries, None if keys is queries else keys
