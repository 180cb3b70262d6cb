"""The quickstart example runs with a few small steps."""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_quickstart_writes_its_pictures(tmp_path, monkeypatch):
    arguments = ["--steps", "3", "--batch", "2", "--length", "16", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments])
    runpy.run_path(str(ROOT / "examples/quickstart.py"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["lengths"] == [4, 8, 16, 32, 64, 128]
    for kind in ("stick-breaking", "softmax"):
        assert len(results[kind]) == 6 and all(0 < loss < 10 for loss in results[kind])
    assert (tmp_path / "attention.png").stat().st_size > 1000
    assert (tmp_path / "likelihood_by_length.png").stat().st_size > 1000
