"""Context parallelism around any attention: ranks exchange heads before and after it (DeepSpeed-Ulysses, 2309.14509).

It is written with torch's own collectives, so a peer costs what it would cost its users.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q, k, v) -> o


def exchanged_heads(attention: Attention) -> Attention:
    """Return an attention of the sequence that the ranks share, from one of whole sequences with some of the heads.

    Args:
        attention: of (b, s, h, d) tensors, or of packed (t, h, d).

    Returns:
        The attention of the rows of this rank. Rank r of n has rows r s / n to (r + 1) s / n. The number of heads,
        also that of k and v, is a multiple of n. q, k and v travel in one message.
    """

    def of_local_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = q.dim() == 3
        if packed:
            q, k, v = q[None], k[None], v[None]
        whole = _whole_sequence(q, k, v)
        o = attention(*(x[0] for x in whole))[None] if packed else attention(*whole)
        o = _local_rows(o)
        return o[0] if packed else o

    return of_local_rows


def _whole_sequence(*xs: Tensor) -> list[Tensor]:
    """Return (b, s, h / n, d) of each tensor (b, s / n, h, d)."""
    ranks = dist.get_world_size()
    sent = [x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4) for x in xs]  # (ranks, s / n, b, heads, d)
    rows = _all_to_all(torch.cat(sent, 3)).flatten(0, 1).transpose(0, 1)
    return list(rows.split([x.shape[3] for x in sent], 2))


def _local_rows(x: Tensor) -> Tensor:
    """Return (b, s / n, h, d) of x, (b, s, h / n, d)."""
    ranks = dist.get_world_size()
    rows = _all_to_all(x.transpose(0, 1).unflatten(0, (ranks, -1)).contiguous())  # (ranks, s / n, b, heads, d)
    return rows.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _all_to_all(x: Tensor) -> Tensor:
    """Send x[r] to rank r. The gradient travels back in the same way."""
    return all_to_all_single(torch.empty_like(x), x)
