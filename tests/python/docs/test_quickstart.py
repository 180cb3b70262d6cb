"""The quickstart example runs with a few small steps."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from support.messages import mentions

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


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--length 66", "--length 8 66"),  # a context of 33 tokens would begin with a digit
        ("--length 4", "--length 8 4"),
        ("--steps 0", "--steps 1 0"),
        ("--batch 0", "--batch 1 0"),
        (f"--out {__file__}", "--out folder test_quickstart.py"),  # before it trains
        ("--out=", "--out folder ''"),  # as of a shell's variable that is not set
    ],
)
def test_options_that_the_script_cannot_use(option, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *option.split()])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples/quickstart.py"))
    assert re.search(mentions(words), capsys.readouterr().err)
