"""benchmarks/context_parallel_tables.py at toy sizes on a CPU."""

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_sb import reference

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCALE = 0.25


@pytest.fixture
def script(monkeypatch):
    """The script, which is not in a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("context_parallel_tables")
    monkeypatch.setattr(module, "SHORTEST", 3)
    monkeypatch.setattr(module, "MEAN", 30)
    monkeypatch.setattr(module, "HEADS", 2)
    monkeypatch.setattr(module, "HEAD_DIM", 16)
    return module


@pytest.mark.parametrize("ranks", [3, 4])
def test_blocks_have_the_pairs_of_the_stream(script, ranks):
    """Each pair of a row and an older key of its document is in one block of a mode."""
    length = 96 * ranks
    for mode in range(2):
        steps = [step for rank in range(ranks) for step in [*script.sequence_steps(ranks, rank, 96)][mode][1]]
        assert sum(block.pairs for step in steps for block in step) == length * (length - 1) // 2
        assert max(map(len, steps)) == mode + 1
    lengths = script.draw_lengths(length, length // script.MEAN, script.SHORTEST, script.LONGEST, seed=0)
    of_ranks = [script.packed_steps(ranks, rank, 96)[1] for rank in range(ranks)]
    pairs = sum(block.pairs for steps in of_ranks for (block,) in steps)
    assert pairs == sum(n * (n - 1) // 2 for n in lengths)
    assert len(lengths) == 96 * ranks // 30
    assert max(map(len, of_ranks)) == 2


def test_a_block_computes_its_rows(script):
    """With the keys that they need, the block operator returns the rows of the whole attention."""
    offsets = np.array([0, 20, 50, 120])
    rows = np.array([*range(5, 20), *range(60, 80), *range(100, 120)])
    keys = np.array([*range(20), *range(50, 120)])
    q, k, v = (torch.randn(1, 120, 2, 16, dtype=torch.float64) for _ in range(3))
    segments = torch.from_numpy(script.Block.of(rows, keys, offsets).segments)
    o, *_ = torch.ops.megatron_sb.block_forward(
        q[:, rows], k[:, keys], v[:, keys], segments, scale=SCALE, mass_threshold=0.0
    )
    whole = [
        reference.stickbreaking_attention(*(x[:, a:b] for x in (q, k, v)), scale=SCALE)
        for a, b in itertools.pairwise(offsets)
    ]
    assert (o - torch.cat(whole, 1)[:, rows]).abs().max() < 1e-12


def test_lines(script, tmp_path, capsys):
    """Three ways to compute, two directions."""
    out = tmp_path / "out.json"
    arguments = ["--dry-run", "--seconds", "0.001", "--ranks", "4", "--rows-per-rank", "6144", "--json", str(out)]
    script.main(arguments)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6
    assert all(value > 0 for row in rows for value in (*row["ms"].values(), *row["tflops"].values()))
    lines = capsys.readouterr().out.splitlines()
    assert {text.count("|") for text in lines[1:]} == {8}
