"""Compare an exchange of heads around an attention with the attention of the whole sequence, on 2 ranks.

`exchanged_heads_run.py OUT.json` writes the largest differences.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from exchanged_heads import exchanged_heads
from support.launch import end_worker

ROWS = 12


def dense(q, k, v):
    """(b, s, h, d)"""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def packed(q, k, v):
    """(t, h, d), two documents."""
    documents = zip(*(x[None].split([5, 7], 1) for x in (q, k, v)), strict=True)
    return torch.cat([dense(*document)[0] for document in documents])


def largest_error(attention, batch: tuple[int, ...]) -> float:
    """Return the largest difference of outputs and gradients of this rank's rows, and check that none is 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*batch, ROWS, heads, 4) for heads in (4, 2, 2, 4))
    *whole, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    whole = [x.requires_grad_() for x in whole]
    o = attention(*whole)
    expected = [o, *torch.autograd.grad(o, whole, do)]
    count = ROWS // dist.get_world_size()
    rows = slice(count * dist.get_rank(), count * (dist.get_rank() + 1))
    local = [x.detach()[..., rows, :, :].requires_grad_() for x in whole]
    found = exchanged_heads(attention)(*local)
    results = [found, *torch.autograd.grad(found, local, do[..., rows, :, :])]
    assert all(x.abs().max() > 0.1 for x in results)
    return max((x - y[..., rows, :, :]).abs().max().item() for x, y in zip(results, expected, strict=True))


dist.init_process_group("gloo")
worst = torch.tensor([largest_error(dense, (3,)), largest_error(packed, ())])
dist.all_reduce(worst, dist.ReduceOp.MAX)
end_worker(sys.argv[1], {"dense": worst[0].item(), "packed": worst[1].item()})
