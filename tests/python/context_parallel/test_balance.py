"""The balanced layout: where rows are, and the benchmark that counts the work of ranks."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import mentions

from megatron_sb.ops.context_parallel import shard_positions

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def balance():
    """benchmarks/context_parallel_balance.py, which is not in a package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("context_parallel_balance")
    sys.path.remove(str(ROOT / "benchmarks"))


def positions(ranks: int, lengths: list[int], layout: str = "balanced") -> torch.Tensor:
    """Return the rows of each rank, for a stream with as few rows after its documents as possible."""
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return shard_positions(ranks, max(1, -(-int(cu_seqlens[-1]) // ranks)) * ranks, layout, cu_seqlens)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 9), st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 700, 5000]), max_size=20))
def test_each_rank_holds_as_many_rows_in_order(ranks, lengths):
    rows = positions(ranks, lengths)
    assert torch.equal(rows.flatten().sort().values, torch.arange(rows.numel()))
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(rows, positions(ranks, lengths))
    assert int((rows.diff() != 1).sum()) + ranks < 4 * ranks  # parts of the stream


def test_ranks_with_one_row_less_end_with_minus_one():
    for layout in ("zigzag", "contiguous", "balanced"):
        rows = shard_positions(3, 10, layout)
        assert rows.shape == (3, 4) and int((rows == -1).sum()) == int((rows[:, -1] == -1).sum()) == 2
    assert shard_positions(3, 1, "balanced").tolist() == [[0], [-1], [-1]]


def test_positions_of_zigzag():
    assert positions(2, [8, 4], "zigzag").tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0, "balanced"), "seq_len 1 0"),
        ((0, 10, "balanced"), "num_ranks 1 0"),
        ((2, 10, "even"), "layout balanced even"),
        ((2, 10, "balanced", torch.tensor([0, 12], dtype=torch.int32)), "cu_seqlens seq_len 10 12"),
        ((2, 10, "balanced", [0, 10]), "cu_seqlens torch.Tensor list"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=mentions(message)):
        shard_positions(*arguments)


@pytest.mark.parametrize("kind", ["web", "code", "books"])
def test_work_is_balanced(balance, kind):
    found = balance.measure(kind, ranks=4, rows_per_rank=16384, streams=2)
    assert found["balanced"]["balance"] <= 1.05
    assert found["balanced"]["padding"] < 1e-3
    assert found["balanced"]["cuts"] <= 2 * 4 - 2


@pytest.mark.parametrize("layout", ["balanced", "contiguous", "zigzag"])
@pytest.mark.parametrize("lengths", [[100] * 12, [700, 5, 1, 300], [3, 90, 1, 2, 50, 6]])
def test_the_benchmark_counts_keys(balance, lengths, layout):
    """A rank receives the older keys of its queries that it does not hold, or the whole stream."""
    split = balance.Split.of(4, np.array(lengths), layout, "whole_stream")
    document = np.repeat(np.arange(len(lengths)), lengths)
    held = [{row for row in rows.tolist() if row < len(document)} for rows in split.rows]
    needed = [{key for row in rows for key in range(row + 1) if document[key] == document[row]} for rows in held]
    assert all(own <= keys for own, keys in zip(held, needed, strict=True))
    expected = [len(keys) - len(own) for own, keys in zip(held, needed, strict=True)]
    if sum(map(len, needed)) > 2 * split.rows.size:
        expected = [split.rows.size - len(own) for own in held]
    assert split.received_rows().tolist() == expected


def test_the_benchmark_counts_tiles(balance):
    lengths = np.array([1000, 1, 300])
    split = balance.Split.of(2, lengths, "contiguous", "whole_stream")

    def tiles(position: int, length: int) -> int:
        ends = [min(row + 64, length) for row in range(0, length, 64)]
        return sum(max(1, -(-(position + end - 1) // 128)) for end in ends)

    assert split.rows.shape == (2, 652)
    assert split.tiles(64).tolist() == [tiles(0, 652), tiles(652, 348) + tiles(0, 1) + tiles(0, 300)]
    assert split.cuts() == 1
