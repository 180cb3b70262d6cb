"""The largest logit of each head, which Megatron logs (`--log-max-attention-logit`) and clips (`--qk-clip`).

The attention kernels do not report it. So this is a pass of its own over queries and keys, in plain torch. It computes
all logits of one layer, a block of rows at a time.
"""

from __future__ import annotations

import torch

MAX_ROWS = 1024  # of queries in a block
MAX_LOGITS = 2**27  # in a block: bounds its memory


@torch.no_grad()
def largest_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float,
    attend_current: bool = False,
    positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the largest logit of each head, or 0 if it has no logits, or only negative ones.

    Megatron divides by the results, so that negative values would change the signs of weights. It never clips a head
    whose value is 0.

    Args:
        query: (b, s, h, d).
        key: (b, s_k, g, d), all positions of the sequence; h must be a multiple of g.
        scale: factor of the products of queries and keys.
        attend_current: whether a query also attends to the key at its own position. Default False.
        positions: int64, (s,), on the CPU: where each query is among the keys. Default None: the last s positions.
        cu_seqlens: int32, (n + 1,): offsets of documents, which queries and keys share. Default None: one document.

    Returns:
        fp32, (h,). The logits have the precision of a product of matrices in the dtype of `query`.

    Example:
        >>> import torch
        >>> from megatron_sb.megatron.max_logits import largest_logits
        >>> query, key = torch.tensor([3.0, 2.0, 1.0]).view(1, 3, 1, 1), torch.tensor([1.0, 4.0, 9.0]).view(1, 3, 1, 1)
        >>> largest_logits(query, key, scale=1.0)  # 2 * 1, 1 * 1 and 1 * 4
        tensor([4.])
    """
    batch, rows, heads = query.shape[:3]
    num_keys, groups = key.shape[1:3]
    if 0 in (batch, rows, num_keys):
        return torch.zeros(heads, device=query.device)
    if positions is None:
        positions = torch.arange(num_keys - rows, num_keys)
    first, end = _keys_of(positions, attend_current, cu_seqlens)
    if scale < 0:  # so that the largest product has the largest logit
        query, scale = -query, -scale
    query = query.unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1, 4)  # (b, g, h / g, s, d)
    key = key.permute(0, 2, 3, 1)  # (b, g, d, s_k)
    largest = torch.zeros(groups, heads // groups, device=query.device)
    num_rows = max(1, min(MAX_ROWS, MAX_LOGITS // (batch * heads * num_keys)))
    for rows_first, rows_end in zip(first.split(num_rows), end.split(num_rows), strict=True):
        block, query = query[..., : len(rows_end), :], query[..., len(rows_end) :, :]
        low, high = int(rows_first.min()), int(rows_end.max())
        if low >= high:
            continue
        logits = (block.flatten(2, 3) @ key[..., low:high]).unflatten(2, block.shape[2:4])
        places = torch.arange(low, high)
        hidden = (places < rows_first[:, None]) | (places >= rows_end[:, None])
        logits.masked_fill_(hidden.to(logits.device), -torch.inf)
        largest = largest.maximum(logits.amax((0, 3, 4)).float() * scale)
    return largest.flatten()


def _keys_of(
    positions: torch.Tensor, attend_current: bool, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key of each query, and the position after its last key. Rows of no document have no keys."""
    end = positions + attend_current
    if cu_seqlens is None:
        return torch.zeros_like(positions), end
    bounds = cu_seqlens.to("cpu", torch.int64)
    first = bounds[torch.searchsorted(bounds, positions, right=True) - 1]
    return first, torch.where(positions < bounds[-1], end, first)
