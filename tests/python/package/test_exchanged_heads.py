"""benchmarks/exchanged_heads.py: an attention around which two ranks exchange heads is the attention of one rank."""

import importlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RANKS = 2


def dense(q, k, v):
    """(b, s, h, d)"""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def packed(q, k, v):
    """(t, h, d), two documents."""
    documents = zip(*(x[None].split([5, 7], 1) for x in (q, k, v)), strict=True)
    return torch.cat([dense(*document)[0] for document in documents])


def compare_on_this_rank(exchanged_heads):
    """Compare outputs and gradients of this rank's rows with those of the whole sequence."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    for attention, batch in ((dense, (3,)), (packed, ())):
        shapes = ((*batch, 12, heads, 4) for heads in (4, 2, 2, 4))
        *qkv, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        whole = [x.requires_grad_() for x in qkv]
        o = attention(*whole)
        expected = [o, *torch.autograd.grad(o, whole, do)]
        rows = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
        local = [x.detach()[..., rows, :, :].requires_grad_() for x in whole]
        found = exchanged_heads(attention)(*local)
        gradients = torch.autograd.grad(found, local, do[..., rows, :, :])
        for x, y in zip((found, *gradients), expected, strict=True):
            torch.testing.assert_close(x, y[..., rows, :, :])
    dist.destroy_process_group()


def test_two_ranks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # restored after the test
    exchanged_heads = importlib.import_module("exchanged_heads").exchanged_heads
    importlib.import_module("forked_ranks").run_forked(compare_on_this_rank, RANKS, exchanged_heads)
