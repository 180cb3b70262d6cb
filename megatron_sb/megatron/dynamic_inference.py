"""Attention of one step of Megatron-Core's dynamic inference, which serves requests of different lengths together.

Megatron's context stores keys and values in blocks, and a step has two kinds of requests. Those that decode come first:
each has one query, or more with speculative tokens. The others process their prompt, or a part of it. Decoding reads
the blocks in place. The keys of prompts are gathered first, because the fastest kernels need neighbouring rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sb.ops import stickbreaking_attention_varlen
from megatron_sb.ops.kvcache import stickbreaking_attention_with_kvcache


@dataclass(frozen=True)
class Requests:
    """The requests of a step. Requests that only fill up a batch have no queries and no keys.

    Args:
        num_decoding: how many requests decode. They are the first ones.
        queries_to_decode: queries of each request that decodes.
        cu_seqlens_q: int32 (n + 1,), offsets of the queries of n requests.
        seqlens_k: int32 (n,), keys of each request, with those of this step.
        block_table: int32 (n, max_blocks), the blocks of each request. Entries after its keys can have any value.
        max_seqlen_q: upper bound of the number of queries of a request.
        max_seqlen_k: upper bound of the number of keys of a request.

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.dynamic_inference import Requests
        >>> table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
        >>> lengths = torch.tensor([300, 7], dtype=torch.int32)  # one token, and a prompt of 7 tokens
        >>> Requests(1, 1, torch.tensor([0, 1, 8], dtype=torch.int32), lengths, table, 7, 300).num_decoding_rows
        1
    """

    num_decoding: int
    queries_to_decode: int
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def num_decoding_rows(self) -> int:
        """Return the number of queries of all requests that decode."""
        return self.num_decoding * self.queries_to_decode


def attend_to_blocks(
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, requests: Requests, **options
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a step. The queries of a request are the last positions of its keys.

    Args:
        query: (t, h, d), the queries of all requests in their order. Rows after the last request get an output of 0.
        key_blocks: (num_blocks, block_size, h_kv, d).
        value_blocks: (num_blocks, block_size, h_kv, d_v).
        requests: see `Requests`.
        options: scale, attend_current, mass_threshold and reach of `stickbreaking_attention`.

    Returns:
        The output (t, h, d_v), and the mass (h, t) in fp32 (fp64 for fp64).

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.dynamic_inference import Requests, attend_to_blocks
        >>> blocks, table = torch.randn(4, 256, 2, 64), torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
        >>> offsets, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 8], [300, 7]))
        >>> requests = Requests(1, 1, offsets, lengths, table, max_seqlen_q=7, max_seqlen_k=300)
        >>> attend_to_blocks(torch.randn(8, 4, 64), blocks, blocks, requests)[0].shape
        torch.Size([8, 4, 64])
    """
    options |= {"return_mass": True}
    rows, parts = requests.num_decoding_rows, []
    if rows:
        parts.append(_decode(query[:rows], key_blocks, value_blocks, requests, options))
    if rows < len(query):
        parts.append(_prefill(query[rows:], key_blocks, value_blocks, requests, options))
    outputs, masses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(masses, dim=1)


def _decode(query: Tensor, key_blocks: Tensor, value_blocks: Tensor, requests: Requests, options: dict) -> tuple:
    count = requests.num_decoding
    out, mass = stickbreaking_attention_with_kvcache(
        query.unflatten(0, (count, -1)),
        key_blocks,
        value_blocks,
        cache_seqlens=requests.seqlens_k[:count],
        block_table=requests.block_table[:count],
        **options,
    )
    return out.flatten(0, 1), mass.transpose(0, 1).flatten(1)


def _prefill(query: Tensor, key_blocks: Tensor, value_blocks: Tensor, requests: Requests, options: dict) -> tuple:
    """Gather as many blocks for each request as the longest one can have, so that the host reads no lengths."""
    first = requests.num_decoding
    lengths, block_size = requests.seqlens_k[first:], key_blocks.shape[1]
    blocks = requests.block_table[first:, : -(-requests.max_seqlen_k // block_size)].clamp(min=0).long()
    keys, values = (x[blocks].flatten(0, 2) for x in (key_blocks, value_blocks))
    # Each request is two documents: its keys, and the rows after them, which have no queries.
    rows = blocks.shape[1] * block_size
    begins = rows * torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    cu_seqlens_k = torch.stack([begins[:-1], begins[:-1] + lengths], dim=1).flatten()
    cu_seqlens_q = requests.cu_seqlens_q[first:].repeat_interleave(2)[1:] - requests.num_decoding_rows
    return stickbreaking_attention_varlen(
        query,
        keys,
        values,
        cu_seqlens_q,
        requests.max_seqlen_q,
        cu_seqlens_k=torch.cat([cu_seqlens_k, begins[-1:]]),
        max_seqlen_k=rows,
        **options,
    )
