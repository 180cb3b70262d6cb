"""Load a trained model on one rank, whatever parallelism its run used."""

import re
from pathlib import Path

import pytest
import torch

from megatron_sb import cli
from megatron_sb.experiments import sweep
from megatron_sb.training import loading
from megatron_sb.training.config import ConfigError, ParallelConfig, load_config

CONFIGS = Path(__file__).parents[3] / "configs"
LEVELS = [
    "compare=[stick_breaking]",
    "parallel.device=auto",
    "parallel.comm=a2a+p2p",
    "stages.1.context_parallel_size=4",
]
LEVELS += ["stages.1.hierarchical_context_parallel_sizes=[2, 2]", "parallel.ranks=4", "parallel.timeout_seconds=60"]
TENSOR = ["parallel.tensor_parallel_size=2", "parallel.ranks=4", "model.make_vocab_size_divisible_by=2"]
SEQUENCE = ["parallel.sequence_parallel=true", "parallel.device=auto", "stages.1.rows_per_step=4"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("tiny_context_extension", LEVELS),
        ("tiny_context_extension", [*TENSOR, *SEQUENCE]),
        ("moe_6_5b", ["parallel.ranks=16"]),
    ],
)
def test_parallelism_is_removed(name, overrides, monkeypatch):
    """A GPU loads checkpoints of any number of ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    one_rank = loading.on_one_rank(config)
    kept = {name: getattr(config.parallel, name) for name in ("device", "threads_per_rank", "timeout_seconds")}
    assert one_rank.parallel == ParallelConfig(**kept) and one_rank.model == config.model
    assert {stage.context_parallel_size for stage in one_rank.stages} == {1}


def test_unsupported_parallelism_is_an_error_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sweep, "train_all", lambda *arguments: pytest.fail("trained"))
    overrides = [word for override in TENSOR for word in ("--set", override)]
    for name in ("needles", "skipping"):
        command = ["experiment", name, str(CONFIGS / f"{name}_small.yaml"), "--out", str(tmp_path / name), *overrides]
        command += ["--lengths", "1024", "--samples", "1"] if name == "needles" else []
        assert cli.main(command) == 2
        assert re.search("parallel.tensor_parallel_size .*got 2", capsys.readouterr().err)
    with pytest.raises(ConfigError, match=r"parallel\.tensor_parallel_size must be 1"):
        loading.on_one_rank(load_config(CONFIGS / "skipping_small.yaml", TENSOR))
