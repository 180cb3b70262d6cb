"""StableMask (Yin et al., arXiv 2402.04779, eq. 7-11) as a factor of the output.

With positions from 1, row j of a document of n tokens has the pseudo score -(i - 1) gamma at each future key i > j.
The softmax runs over real and pseudo scores, then A_ij = 0 for i > j. The output is therefore the causal one times

    sigmoid(lse_j - log sum_{j < i <= n} exp(-(i - 1) gamma)),    lse_j the log-sum-exp of the real scores,

which needs no n x n matrix. n is the length of the document (of the sequence if there are no documents), not the
trained context. The last row of a document therefore always has all its weight on real keys, and a row depends on how
many tokens of its document follow. With gamma = 0.5 this changes only about the first ten rows visibly. A smaller gamma
changes more rows. Keys outside a sliding window have no pseudo score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_sb.baselines.softmax.offsets import row_positions, shared_by_layers


def real_share(gammas: tuple[float, ...], lse: Tensor, lengths: tuple[int, ...], first_row: int = 0) -> Tensor:
    """Return the weight that stays on real keys, (b, h, r, 1).

    Args:
        gammas: gamma of each of the h heads.
        lse: (b, h, r), log-sum-exp of the real scores of the rows from first_row.
        lengths: lengths of the documents.
        first_row: index of the row of lse[:, :, 0].
    """
    pseudo = pseudo_lse(gammas, lengths, lse.device)[:, first_row : first_row + lse.shape[2]]
    return (lse - pseudo.to(lse.dtype)).sigmoid()[..., None]


@shared_by_layers
def pseudo_lse(gammas: tuple[float, ...], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the log-sum-exp of the pseudo scores of every row, (h, s) float64.

    For row p of n rows, counted from 0, it is log sum_{p < i < n} exp(-i gamma), a geometric sum; -inf in the last row.
    """
    position = row_positions(lengths, device).double()
    length = torch.tensor(lengths, device=device)
    num_future = length.repeat_interleave(length, output_size=len(position)) - 1 - position
    gamma = torch.tensor(gammas, dtype=torch.float64, device=device)[:, None]
    geometric = torch.log(torch.expm1(-num_future * gamma) / torch.expm1(-gamma)) - (position + 1) * gamma
    return torch.where(gamma > 0, geometric, num_future.log())
