"""The bytes that a plan predicts, in examples that can be computed by hand, and invalid arguments.

`a_plan_counts_received_bytes` in test_context_parallel.py compares them with the transport.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.messages import mentions

import megatron_sb as sb
from megatron_sb.ops.received_bytes import Sizes, received_bytes

BF16 = Sizes(num_heads=8, num_kv_heads=4, head_dim=16, head_dim_v=32, dtype=torch.bfloat16, batch_size=1)
SHARED = Sizes(num_heads=8, num_kv_heads=2, head_dim=16, head_dim_v=32, dtype=torch.bfloat16, batch_size=1)


def plan_of(rank: int, cu_seqlens: tuple[int, ...] | None = None, layout: str = "zigzag"):
    """Return what a plan says of a rank of four, which share 64 rows."""
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    fields = {"rank": rank, "size": 4, "seq_len": 64, "local_len": 16, "layout": layout, "packing": "whole_stream"}
    return SimpleNamespace(cu_seqlens=offsets, **fields)


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_keys_of_the_whole_stream(comm):
    """A rank receives 48 rows of 4 KV heads with 16 + 32 channels, in the backward again, with as many gradients."""
    elements = 48 * 4 * (16 + 32)
    assert received_bytes(plan_of(1), comm, BF16, None) == (2 * elements, (2 + 4) * elements)


def test_exchange_of_heads():
    """A rank receives 48 rows of its two heads, and 16 rows of the six heads of others."""
    q, kv, o = 2 * 16, 16 + 32, 2 * 32  # a rank has one KV head
    forward = 2 * 48 * (q + kv + o)
    assert received_bytes(plan_of(1), "a2a", BF16, None) == (forward, forward)
    # Two ranks have the same KV head, so the gradients of k and v are in fp32.
    assert received_bytes(plan_of(1), "a2a", SHARED, None) == (forward, forward + 2 * 48 * kv)


def test_two_groups_of_ranks():
    """Two ranks exchange heads. Together they receive the other 32 rows, of half of the heads."""
    q, kv, o = 4 * 16, 2 * (16 + 32), 4 * 32
    exchange, elements = 2 * 16 * (q + kv + o), 32 * kv
    assert received_bytes(plan_of(1), "a2a+p2p", BF16, 2) == (exchange + 2 * elements, exchange + 6 * elements)


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_keys_of_short_documents(comm):
    """Document 1 lies on ranks 0 and 1: rank 1 receives its first row once, and rank 0 the gradient of this row."""
    rows = [received_bytes(plan_of(rank, (0, 15, 32, 64), "contiguous"), comm, BF16, None) for rank in range(2)]
    elements = 4 * (16 + 32)
    assert rows == [(0, 4 * elements), (2 * elements, 0)]


def test_one_rank_receives_nothing():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = sb.ContextParallelPlan(dist.group.WORLD, 64)
        for comm in ("p2p", "all_gather", "a2a", "a2a+p2p"):
            a2a_size = 1 if comm == "a2a+p2p" else None
            found = plan.received_bytes(comm, num_heads=4, num_kv_heads=2, head_dim=16, a2a_size=a2a_size)
            assert (found.forward, found.backward) == (0, 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("comm", "sizes", "a2a_size", "error", "words"),
    [
        ("auto", {}, None, ValueError, "comm 'p2p' 'a2a+p2p' 'auto'"),
        ("p2p", {"num_heads": 6}, None, ValueError, "num_heads num_kv_heads 4 6"),
        ("p2p", {"head_dim": 0}, None, ValueError, "head_dim 1 0"),
        ("p2p", {"dtype": torch.int32}, None, TypeError, "dtype torch.int32"),
        ("p2p", {"dtype": "bf16"}, None, TypeError, "dtype 'bf16'"),
        ("p2p", {}, 2, ValueError, "a2a_size None 'a2a+p2p' 2 'p2p'"),
        ("a2a+p2p", {}, None, ValueError, "a2a_size None"),
        ("a2a+p2p", {}, 3, ValueError, "a2a_size 4 3"),
        ("a2a", {"num_heads": 6, "num_kv_heads": 2}, None, ValueError, "num_heads multiple 4 'a2a' 6"),
        ("a2a", {"num_heads": 12, "num_kv_heads": 3}, None, ValueError, "num_kv_heads 4 'a2a' 3"),
    ],
)
def test_invalid_arguments(comm, sizes, a2a_size, error, words):
    with pytest.raises(error, match=mentions(words)):
        received_bytes(plan_of(0), comm, Sizes(**{**vars(BF16), **sizes}), a2a_size)


def test_a_packed_plan_has_no_batch():
    sizes = Sizes(**{**vars(BF16), "batch_size": 2})
    with pytest.raises(ValueError, match=mentions("batch_size 1 packed 2")):
        received_bytes(plan_of(0, (0, 64)), "p2p", sizes, None)
    assert received_bytes(plan_of(0), "p2p", sizes, None).forward > 0
