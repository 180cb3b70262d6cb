"""Runs of `megatron-sb train` on CPUs are converted: every way to name them, and the command of the documentation."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.jobs import SMALL_JOB, train

from megatron_sb import checkpoints, cli
from megatron_sb.training.config import load_config, to_yaml
from megatron_sb.training.documents import load_corpus
from megatron_sb.training.evaluate import choose_windows

ROOT = Path(__file__).parents[3]
STEPS = ["parallel.ranks=1", "report.tensorboard=false", "checkpoint={interval: 2, keep: 9}", "evaluation.windows=2"]
STEPS += ["attention.softmax_rope.evaluated_scalings=[none]", "evaluation.length_factor=2"]
STEPS += [f"stages.{n}.{field}" for n in (0, 1) for field in ("context_parallel_size=1", "steps=5", "rows_per_step=2")]
STEPS += ["attention.stick_breaking.remainder_bias=true", "attention.stick_breaking.head_norm=true"]


def trained(folder, *options):
    """Train the small job for a few steps. Return the folder of the run."""
    (folder / "small.yaml").write_text(SMALL_JOB)
    status, _, errors = train(folder / "small.yaml", *STEPS, *options, "--out", folder / "run")
    assert status == 0, errors
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a stick-breaking model and a softmax model."""
    return trained(tmp_path_factory.mktemp("trained"))


def likelihoods(model, run):
    """Return the negative log-likelihood at each context length, computed as the trainer's evaluation does."""
    config = load_config(run / "config.yaml")
    num_targets, found = config.evaluation.target_tokens, []
    windows = torch.from_numpy(np.stack(choose_windows(load_corpus(config), config)))
    for context in config.evaluation_lengths(config.stages[-1]):
        tokens = windows[:, -context - 1 :].long()
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[:, -num_targets:].flatten(0, 1)
        found.append(torch.nn.functional.cross_entropy(logits, tokens[:, -num_targets:].flatten()).item())
    return found


def assert_likelihoods_of_the_run(run):
    """Assert that the converted model has the likelihoods of the run's own evaluation, at several lengths."""
    evaluation = json.loads((run / "evaluation" / "stick_breaking.extended.json").read_text())
    expected = [entry["nll"] for entry in evaluation["results"]]
    assert likelihoods(checkpoints.load(run), run) == pytest.approx(expected, rel=1e-5) and len(expected) > 1


def test_the_likelihood_is_that_of_the_run(run):
    assert_likelihoods_of_the_run(run)


def test_every_way_to_name_a_checkpoint(run, tmp_path, capsys):
    """A run and a model stand for the newest checkpoint."""
    newest = run / "stick_breaking" / "checkpoints" / "extended-000005"
    weights = checkpoints.load(newest).state_dict()
    for count, source in enumerate((run, run / "stick_breaking", newest.parent, newest)):
        out = tmp_path / str(count)
        assert cli.main(["convert", str(source), str(out), "--to", "huggingface"]) == 0
        assert f"{newest} (megatron) -> {out} (huggingface)" in capsys.readouterr().out
        assert all(torch.equal(x, weights[name]) for name, x in checkpoints.load(out).state_dict().items())
    older = checkpoints.load(newest.with_name("short-000002"))
    assert not torch.equal(older.lm_head.weight, weights["lm_head.weight"])


def test_through_megatron(run, tmp_path):
    """The checkpoint of a run becomes one for Megatron-LM's scripts."""
    model = checkpoints.load(run)
    checkpoints.save(model, tmp_path / "out", "megatron")
    back = checkpoints.load(tmp_path / "out", run / "config.yaml")
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in model.state_dict().items())


def test_the_command_of_the_documentation(run, tmp_path, monkeypatch):
    """docs/checkpoints.md trains a run, converts it, and continues in Python."""
    page = (ROOT / "docs/checkpoints.md").read_text()
    (block,) = re.findall(r"^```bash\n(megatron-sb train .*?)^```$", page, re.M | re.S)
    training, conversion = (shlex.split(line, comments=True) for line in block.splitlines())
    monkeypatch.chdir(tmp_path)
    out = training[training.index("--out") + 1]
    shutil.copytree(run, out)
    assert load_config(ROOT / training[2]).compare == load_config(run / "config.yaml").compare
    assert cli.main(conversion[1:]) == 0
    assert checkpoints.format_of(conversion[3]) == "huggingface"


def no_checkpoint(run):
    shutil.rmtree(run / "stick_breaking" / "checkpoints")


def two_models(run):
    config = load_config(run / "config.yaml", ["attention.softmax_rope={kind: stick_breaking}"])
    (run / "config.yaml").write_text(to_yaml(config))


def unknown_newest(run):
    (run / "stick_breaking" / "checkpoints" / "latest").write_text("short-000009")


def damaged(run):
    path = run / "stick_breaking" / "checkpoints" / "extended-000005" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_checkpoint, "stick_breaking/checkpoints has no checkpoint"),
        (two_models, "compare must have exactly one stick-breaking model, got 2"),
        (unknown_newest, "checkpoints/short-000009', which does not exist"),
        (damaged, "extended-000005/__0_0.distcp is damaged: it must have"),
    ],
)
def test_runs_that_cannot_be_converted(change, message, run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    change(copy)
    assert cli.main(["convert", str(copy), str(tmp_path / "out"), "--to", "huggingface"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and str(tmp_path) in line, line


def test_a_finished_run_without_checkpoints_is_named(run, tmp_path, capsys):
    """As one with checkpoint.stage_ends = false."""
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "stick_breaking" / "checkpoints")
    for command in (
        ["generate", str(copy), "--prompt", "a"],
        ["convert", str(copy), str(tmp_path / "out"), "--to", "fla"],
    ):
        assert cli.main(command) == 2
        assert "If it is finished, it was trained with checkpoint.stage_ends = false" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shards_of_tensor_parallel_ranks_are_joined(tmp_path):
    """Each CPU rank has saved its own shard under its own name. Large weights make the gates of KV heads differ."""
    options = ["model.num_kv_heads=2", "model.make_vocab_size_divisible_by=2"]
    options += ["attention.stick_breaking.forget_gate=true", "model.init_std=0.3"]
    assert_likelihoods_of_the_run(trained(tmp_path, "parallel.ranks=2", "parallel.tensor_parallel_size=2", *options))


def test_a_softmax_model(run):
    with pytest.raises(ValueError, match=r"swap_attention must be True .*softmax_rope"):
        checkpoints.load(run / "softmax_rope")


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5"])
def test_a_damaged_tracker(text, tmp_path):
    """Megatron-LM's scripts write the number of steps into it."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ValueError, match=rf"latest_checkpointed_iteration\.txt must hold .* got '{text}'"):
        checkpoints.load(tmp_path)
