"""benchmarks/flash_linear_attention.py at toy sizes on a CPU."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_sb import reference

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MODULE = "fla.ops.stickbreaking_attn"


@pytest.fixture
def script(monkeypatch):
    """The script, which is not in a package, with one small shape."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("flash_linear_attention")
    monkeypatch.setattr(module, "SHAPES", ((1, 4096, 2, 16),))
    return module


@pytest.fixture
def fla(monkeypatch):
    """A stand-in for flash-linear-attention. Its outputs are 1% too large."""

    def naive_stickbreaking_attn(q, k, v):
        o, mass = reference.stickbreaking_attention(q, k, v, return_mass=True)
        return (1.01 * o).to(q.dtype), mass.transpose(1, 2).to(q.dtype)

    module = ModuleType(MODULE)
    module.naive_stickbreaking_attn, module.parallel_stickbreaking_attn = naive_stickbreaking_attn, None
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


def test_rows_and_errors(script, fla, tmp_path, capsys):
    """The errors against float64 and the difference show the 1%."""
    out = tmp_path / "out.json"
    script.main(["--dry-run", "--seconds", "0.001", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward", "both"]
    for row in rows[:2]:
        assert row["error"]["ours"] < 5e-3
        assert row["error"]["fla"] == pytest.approx(0.01, rel=0.3)
        assert row["error"]["difference"] == pytest.approx(0.01, rel=0.3)
    assert all(value > 0 for row in rows for value in (*row["ms"].values(), *row["rate"].values()))
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[0].startswith("| shape | direction | ours | fla | fla / ours |")
    assert {line.count("|") for line in (lines[0], *lines[2:])} == {9}
    assert lines[-1].startswith("| b=1 h=2 d=16 L=64 | both |") and lines[-1].endswith("| - | - | - |")


def test_without_the_package_it_says_what_to_install(script, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(SystemExit, match="pip install fla-core"):
        script.main(["--dry-run"])
