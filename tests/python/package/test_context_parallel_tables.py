"""benchmarks/context_parallel_tables.py at toy sizes on a CPU."""

import importlib
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


def documents_of(offsets: np.ndarray) -> np.ndarray:
    """Return the document of each row of a stream."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


@pytest.mark.parametrize("ranks", [3, 4])
def test_tables_have_the_pairs_of_the_stream(script, ranks):
    """Each pair of a row and an older key of its document is in one table of the gather, and in one of the ring."""
    documents = []
    for _, split in script.streams(ranks, 96):
        own, offsets = np.sort(split.rows), split.cu_seqlens
        documents.append(len(offsets) - 1)
        stream = np.arange(offsets[-1])
        pairs = sum(length * (length - 1) // 2 for length in np.diff(offsets).tolist())
        assert sum(script.pairs_of(script.table(rows, stream, offsets)) for rows in own) == pairs
        assert sum(script.pairs_of(script.table(rows, keys, offsets)) for rows in own for keys in own) == pairs
    assert documents == [1, 96 * ranks // 30]


def test_a_rank_computes_its_rows(script):
    """With all keys, the block operator returns the rows of the whole attention."""
    for _, split in script.streams(4, 96):
        rows, offsets = np.sort(split.rows[2]), split.cu_seqlens
        q, k, v = (torch.randn(1, offsets[-1], 2, 16, dtype=torch.float64) for _ in range(3))
        segments = torch.from_numpy(script.table(rows, np.arange(offsets[-1]), offsets))
        o, *_ = torch.ops.megatron_sb.block_forward(q[:, rows], k, v, segments, scale=SCALE, mass_threshold=0.0)
        documents = documents_of(offsets)
        for document in set(documents[rows]):
            part = slice(offsets[document], offsets[document + 1])
            whole = reference.stickbreaking_attention(q[:, part], k[:, part], v[:, part], scale=SCALE)
            here = documents[rows] == document
            expected = whole[:, rows[here] - offsets[document]]
            assert (o[:, torch.from_numpy(here)] - expected).abs().max() < 1e-12


def test_lines(script, tmp_path, capsys):
    """Two streams, two ways to compute, two directions."""
    out = tmp_path / "out.json"
    arguments = ["--dry-run", "--seconds", "0.001", "--ranks", "4", "--rows-per-rank", "6144", "--json", str(out)]
    script.main(arguments)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8
    assert all(value > 0 for row in rows for value in (*row["ms"].values(), *row["tflops"].values()))
    lines = capsys.readouterr().out.splitlines()
    assert {text.count("|") for text in lines[1:]} == {8}
