"""benchmarks/megatron_training.py at toy sizes on a CPU, and what it shares between its models."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from support.fork_server import run_python
from support.launch import run_ranks

ROOT = Path(__file__).parents[3]
SCRIPT, CONFIG = ROOT / "benchmarks" / "megatron_training.py", ROOT / "configs" / "dense_350m.yaml"


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/megatron_training.py, which is not in a package."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("megatron_training")


def test_contenders_take_turns(tmp_path):
    """Each length has a row of each contender, with the same tokens, and nothing is skipped at -11."""
    toy = ["--dry-run", "--lengths", "64", "256", "--tokens", "256", "--tokens-at-once", "128", "--seconds", "0.001"]
    toy += ["--set", "stages.0.context_parallel_size=2"]  # the layout of the configuration does not matter
    done = run_python([SCRIPT, CONFIG, *toy, "--peers", "cudnn", "flash", "--json", tmp_path / "out.json"], seconds=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    names = ["stick-breaking", "cudnn", "flash"]
    assert [(row["length"], row["contender"]) for row in rows] == [(n, name) for n in (64, 256) for name in names]
    assert {(row["length"], row["rows_at_once"], row["tokens"]) for row in rows} == {(64, 2, 256), (256, 1, 256)}
    assert all(len(row["seconds"]) == 3 and row["tokens_per_second"] > 0 for row in rows)
    assert [row["skipped"] for row in rows] == [0.0, None, None, 0.0, None, None]
    assert all(-12 < logit < -10 for row in rows for logit in row["mean_logits"])
    lines = [line for line in done.stdout.splitlines() if "tokens/s" in line]
    assert len(lines) == 6 and "0.0% of the tiles skipped" in lines[0] and "times as fast" in lines[1]


def test_ranks_share_rows(tmp_path):
    """With two context-parallel ranks, softmax runs in each mode. Losses are those of a rank's half of the rows."""
    toy = ["--dry-run", "--lengths", "64", "--tokens", "64", "--tokens-at-once", "64", "--seconds", "0.001"]
    arguments = [SCRIPT, CONFIG, "--context-parallel", "2", *toy, "--json", tmp_path / "out.json"]
    run_ranks(2, arguments, 240, TORCHELASTIC_RUN_ID="as under torchrun")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["stick-breaking", "cudnn, p2p", "cudnn, a2a"]
    assert {row["tokens"] for row in rows} == {64} and {row["skipped"] for row in rows} == {None}
    assert len({row["loss"] for row in rows}) == 1 and all(6 < row["loss"] < 7 for row in rows)
    assert all(-12 < logit < -10 for row in rows for logit in row["mean_logits"])


@pytest.mark.parametrize(
    ("options", "message"), [([], "Use --dry-run"), (["--dry-run", "--experts", "4"], "--experts needs a GPU")]
)
def test_a_gpu_is_needed(options, message):
    done = run_python([SCRIPT, CONFIG, *options], seconds=120)
    assert done.returncode == 1 and message in done.stderr


def test_shared_parameters_are_trained_by_both(benchmark):
    first, second = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)) for _ in range(2))
    benchmark.share_parameters(first, second)
    assert all(mine is other for mine, other in zip(first.parameters(), second.parameters(), strict=True))
    with torch.no_grad():
        first[0].weight.zero_()
    assert second(torch.ones(1, 2)).equal(first(torch.ones(1, 2)))


def test_models_with_different_parameters_share_none(benchmark):
    with pytest.raises(ValueError, match=r"got different ones: \['bias'\]"):
        benchmark.share_parameters(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
