"""Read Megatron's PackedSeqParams: whether a call is packed, and the offsets of its documents."""

from __future__ import annotations

import torch


def is_packed(packed_seq_params) -> bool:
    """Return whether the tensors of a call are packed, (t, h, d), and not (s, b, h, d). packed_seq_params may be None.

    Raises:
        ValueError: if they have another format, or offsets of documents without a format.
    """
    if packed_seq_params is None:
        return False
    if packed_seq_params.qkv_format not in ("thd", "sbhd", None):
        raise ValueError(
            "packed_seq_params.qkv_format must be 'thd', 'sbhd' or None with stick-breaking attention, got "
            f"{packed_seq_params.qkv_format!r}."
        )
    offsets = (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded)
    if packed_seq_params.qkv_format is None and any(x is not None for x in offsets):
        raise ValueError(
            "packed_seq_params.qkv_format must be 'thd' with cu_seqlens_q or cu_seqlens_q_padded, got None: documents "
            "would attend to each other."
        )
    return packed_seq_params.qkv_format == "thd"


def document_bounds(packed_seq_params) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the offsets of the documents in the queries and in the keys.

    Args:
        packed_seq_params: PackedSeqParams of a packed call. Padded offsets take precedence.

    Returns:
        Offsets for the queries, and for the keys. The latter are None if both are the same tensor.

    Raises:
        ValueError: if there are no offsets for the queries, or padded and other offsets do not fit together.

    Example:
        >>> import torch
        >>> from megatron.core.packed_seq_params import PackedSeqParams
        >>> from megatron_sb.megatron.packed import document_bounds
        >>> offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> document_bounds(PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets))
        (tensor([0, 3, 8], dtype=torch.int32), None)
    """
    params = packed_seq_params
    padded = params.cu_seqlens_q_padded is not None
    if params.cu_seqlens_kv_padded is not None and not padded:
        raise ValueError(
            "packed_seq_params.cu_seqlens_q_padded must be given together with cu_seqlens_kv_padded, got None."
        )
    queries = params.cu_seqlens_q_padded if padded else params.cu_seqlens_q
    keys = params.cu_seqlens_kv_padded if padded else params.cu_seqlens_kv
    if queries is None:
        raise ValueError("packed_seq_params.cu_seqlens_q must be a tensor of offsets with qkv_format='thd', got None.")
    if padded and params.cu_seqlens_q is not None and len(params.cu_seqlens_q) != len(queries):
        raise ValueError(
            "packed_seq_params.cu_seqlens_q_padded must have as many offsets as cu_seqlens_q, "
            f"{len(params.cu_seqlens_q)}, got {len(queries)}."
        )
    return queries, None if keys is queries else keys
