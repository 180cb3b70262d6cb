"""Blocks of queries and keys: folded outputs and summed gradients are those of the whole document."""

import itertools

import pytest
import torch
from support.softmax import make_inputs

from megatron_sb.baselines.softmax import SoftmaxAttention, blocks, kernels
from megatron_sb.baselines.softmax.shards import Block, Piece, blocks_between

LENGTH = 300
CUTS = (0, 1, 90, 200, LENGTH)


def blocks_of(window):
    """Return the blocks of a document that is cut into pieces."""
    pieces = [
        Piece(row=begin, position=begin, length=end - begin, document=0) for begin, end in itertools.pairwise(CUTS)
    ]
    return [block for pair in itertools.product(pieces, pieces) for block in blocks_between(*pair, window=window)]


def folded(module, q, k, v, do):
    """Return o and the gradients of q, k and v from blocks, for (b, h, s, d)."""
    scores = module.scores(LENGTH)
    sums, found = blocks.Sums(q), blocks_of(scores.window)
    for block in found:
        sums.add(block.rows, *blocks.block_forward(q, k, v, block, scores))
    o = sums.o.to(q.dtype)
    delta = (do.to(sums.o.dtype) * o.to(sums.o.dtype)).sum(-1)
    of_rows = blocks.RowGradients(o, sums.lse, do, delta)
    dq, dk, dv = (torch.zeros(x.shape, dtype=sums.o.dtype, device=q.device) for x in (q, k, v))
    for block in found:
        dq_here, dk_here, dv_here, _ = blocks.block_backward(q, k, v, of_rows, block, scores)
        dq[:, :, block.rows] += dq_here
        dk[:, :, block.keys] += dk_here
        dv[:, :, block.keys] += dv_here
    return o, dq, dk, dv


def assert_same(options, dtype, tolerance, head_dim=16, device="cpu"):
    module = SoftmaxAttention(4, head_dim, **options)
    q, k, v = (x.detach() for x in make_inputs(2, LENGTH, dim=head_dim, dtype=dtype, device=device))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    do = torch.randn_like(q)
    actual = folded(module, q, k, v, do)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(2, dim=1) for x in leaves[1:]]
    o = kernels.plain(leaves[0], *repeated, (LENGTH,), module.scores(LENGTH))
    expected = (o, *torch.autograd.grad(o, leaves, do.double()))
    for mine, exact in zip(actual, expected, strict=True):
        error = (mine.double() - exact).norm() / exact.norm()
        assert error < tolerance, error


OPTIONS = [{"position": "none"}, {"position": "none", "window": 40}, {"position": "alibi"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_blocks(options):
    assert_same(options, torch.float64, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)])
def test_blocks_on_a_gpu(options, dtype, tolerance):
    for head_dim in (64, 136, 256):  # with FlashAttention where it serves the scores
        assert_same(options, dtype, tolerance, head_dim, "cuda")


@pytest.mark.parametrize("window", [None, 1, 7, 95, 299])
def test_blocks_hold_every_pair_once(window):
    """Together the blocks hold each visible pair once, and the hidden pairs of a block are those of its mask."""
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or LENGTH))
    for block in blocks_of(window):
        assert isinstance(block, Block) and (block.rows.start, block.keys.start) == (block.first_row, block.first_key)
        inside = visible[block.rows, block.keys]
        assert inside.any(dim=1).all() and (block.is_diagonal or window is not None or inside.all())
        seen[block.rows, block.keys] += inside
    assert torch.equal(seen, visible.long())
