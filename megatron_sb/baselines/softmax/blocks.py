"""Softmax attention of one block of queries and keys, and its gradients.

z_ij = the score of query j and key i,  l_j = log sum_i exp(z_ij),  o_j = sum_i exp(z_ij - l_j) v_i

A row's keys are divided into blocks. Each block gives o and l of its own keys, and `Sums` folds them into those of all
keys. The backward of a block needs only the row's final l and o: with A_ij = exp(z_ij - l_j),

dv_i = sum_j A_ij do_j,   dz_ij = A_ij (do_j . v_i - do_j . o_j + dl_j),   dq_j = scale sum_i dz_ij k_i, and dk alike.

| kernel | serves | memory |
| --- | --- | --- |
| torch's FlashAttention | bf16 and fp16 on GPUs without bias, window or StableMask, head_dim up to 256 | O(s) |
| matrix products | all other blocks | MAX_WEIGHTS_PER_BLOCK weights at a time |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sb.baselines.softmax import kernels
from megatron_sb.baselines.softmax.shards import Block

FLASH_MAX_HEAD_DIM = 256


class Sums:
    """The output and the log-sum-exp of some rows over the keys of all blocks so far.

    Attributes:
        o: (b, h, r, d) in fp32 (fp64 for fp64). 0 in rows that have seen no key.
        lse: (b, h, r) in the dtype of o. -inf in rows that have seen no key.
    """

    def __init__(self, q: Tensor) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.o = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.lse = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)

    def add(self, rows: slice, o: Tensor, lse: Tensor) -> None:
        """Add a block's o (b, h, r, d) and lse (b, h, r) to some rows."""
        old = self.lse[:, :, rows]
        new = torch.logaddexp(old, lse)
        finite = _or_zero(new)  # of rows that see no key, whose factors are then exp(-inf)
        self.o[:, :, rows] *= (old - finite).exp()[..., None]
        self.o[:, :, rows] += o * (lse - finite).exp()[..., None]
        self.lse[:, :, rows] = new


@dataclass(frozen=True)
class RowGradients:
    """What the backward of a block needs of the rows of all blocks.

    Attributes:
        o: output, (b, h, s, d) in q's dtype.
        lse: log-sum-exp, (b, h, s) in fp32 (fp64 for fp64).
        do: gradient of o, (b, h, s, d) in q's dtype.
        delta: do . o minus the gradient of lse, (b, h, s) in the dtype of lse.
    """

    o: Tensor
    lse: Tensor
    do: Tensor
    delta: Tensor


def block_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scores: kernels.Scores) -> tuple[Tensor, Tensor]:
    """Compute one block.

    Args:
        q: (b, h, s, d), all rows of this member.
        k: (b, h_kv, n, d), all keys of the member that holds the block's keys.
        v: (b, h_kv, n, d).
        block: the rows and keys to compute.
        scores: how the scores are computed.

    Returns:
        o, (b, h, r, d) for the r rows of the block, and the log-sum-exp, (b, h, r). Rows that see no key of the block
        have o = 0 and a log-sum-exp of -inf.
    """
    q, k, v = q[:, :, block.rows], _per_head(k[:, :, block.keys], q), _per_head(v[:, :, block.keys], q)
    if _has_flash(q, scores):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, block.is_diagonal, scale=scores.scale
        )
        return o, lse
    outputs, sums = [], []
    for rows, keys, first_row, first_key in _row_blocks(q, k, block, scores.window):
        z = kernels.masked_scores(q[:, :, rows], k[:, :, keys], first_row, first_key, scores)
        lse = z.logsumexp(-1)
        outputs.append((z - _or_zero(lse)[..., None]).exp() @ v[:, :, keys].to(z.dtype))
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def block_backward(
    q: Tensor, k: Tensor, v: Tensor, of_rows: RowGradients, block: Block, scores: kernels.Scores
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Compute the gradients of one block. The first three arguments are those of `block_forward`.

    Returns:
        dq, (b, h, r, d) for the rows of the block; dk and dv, (b, h_kv, m, d) for its keys; and the gradients of
        `scores.parameters`. They are in fp32 (fp64 for fp64), or in q's dtype from FlashAttention.
    """
    num_kv_heads = k.shape[1]
    q, k, v = q[:, :, block.rows], _per_head(k[:, :, block.keys], q), _per_head(v[:, :, block.keys], q)
    o, lse, do, delta = (x[:, :, block.rows] for x in (of_rows.o, of_rows.lse, of_rows.do, of_rows.delta))
    if _has_flash(q, scores):
        dq, dk, dv = _flash_backward(q, k, v, o, lse.contiguous(), do, block.is_diagonal, scores.scale)
        return dq, _per_kv_head(dk, num_kv_heads), _per_kv_head(dv, num_kv_heads), []  # there is no FIRE
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    parameters = scores.parameters
    dparameters = [torch.zeros_like(parameter) for parameter in parameters]
    for rows, keys, first_row, first_key in _row_blocks(q, k, block, scores.window):
        with torch.set_grad_enabled(bool(parameters)):
            z = kernels.masked_scores(q[:, :, rows], k[:, :, keys], first_row, first_key, scores)
        do_here = do[:, :, rows].to(lse.dtype)
        weights = (z.detach() - _or_zero(lse[:, :, rows])[..., None]).exp()
        dv[:, :, keys] += weights.transpose(2, 3) @ do_here
        dz = weights * (do_here @ v[:, :, keys].to(lse.dtype).transpose(2, 3) - delta[:, :, rows, None])
        dq[:, :, rows] = scores.scale * dz @ k[:, :, keys].to(lse.dtype)
        dk[:, :, keys] += scores.scale * dz.transpose(2, 3) @ q[:, :, rows].to(lse.dtype)
        if parameters:
            for total, part in zip(dparameters, torch.autograd.grad(z, parameters, dz), strict=True):
                total += part
    return dq, _per_kv_head(dk, num_kv_heads), _per_kv_head(dv, num_kv_heads), dparameters


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of FlashAttention for o and lse over all keys. Heads of q, k and v are equal in number."""
    lengths = (None, None, q.shape[2], k.shape[2])  # without offsets of documents
    state = (q.new_empty(size, dtype=torch.uint64) for size in ((2,), ()))  # of dropout, which is not read
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, *lengths, 0.0, is_causal, *state, scale=scale
    )


def _row_blocks(q: Tensor, k: Tensor, block: Block, window: int | None) -> Iterator[tuple[slice, slice, int, int]]:
    """Yield ranges of rows and the ranges of keys that they see, relative to the block, and their first positions."""
    num_rows, num_keys = q.shape[2], k.shape[2]
    step = max(1, kernels.MAX_WEIGHTS_PER_BLOCK // (q.shape[0] * q.shape[1] * num_keys))
    ahead = block.first_row - block.first_key
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        newest = min(num_keys, ahead + end)
        oldest = 0 if window is None else min(max(0, ahead + begin + 1 - window), newest - 1)
        yield slice(begin, end), slice(oldest, newest), block.first_row + begin, block.first_key + oldest


def _has_flash(q: Tensor, scores: kernels.Scores) -> bool:
    """Return whether FlashAttention serves these scores on q's device."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= FLASH_MAX_HEAD_DIM
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and fits and scores.is_dot_product


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat x (b, h_kv, n, d) for the h heads of q."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)  # which copies even for one group


def _per_kv_head(x: Tensor, num_kv_heads: int) -> Tensor:
    """Sum x (b, h, n, d) over the heads of each KV head."""
    return x if x.shape[1] == num_kv_heads else x.unflatten(1, (num_kv_heads, -1)).sum(2)


def _or_zero(lse: Tensor) -> Tensor:
    """Replace -inf, the log-sum-exp of rows that see no key, by 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
