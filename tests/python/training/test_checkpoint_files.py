"""Checkpoints that a job must not load: hostile ones, damaged ones, and those of another model."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from support import decoders
from support.fork_server import run_python
from support.jobs import FORKED_TRAIN, SMALL_JOB, TIMEOUT_SECONDS, metrics, train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_sb import checkpoints as checkpoints_of_models
from megatron_sb import cli
from megatron_sb.megatron.weights import read_weights
from megatron_sb.training.checkpoint import CheckpointDirectory
from megatron_sb.training.config import load_config
from megatron_sb.training.initial_checkpoint import check_initial_checkpoint
from megatron_sb.training.loading import load_run
from megatron_sb.validation import naming

SHORT = ["parallel.ranks=1", "compare=[stick_breaking]", "evaluation.windows=1", "report.tensorboard=false"]
SHORT += ["stages.0.context_parallel_size=1", "stages.1.context_parallel_size=1", "checkpoint={interval: 2, keep: 9}"]
SHORT += ["stages.0.steps=6", "stages.1.steps=5", "stages.0.rows_per_step=2", "stages.1.rows_per_step=2"]


class Opened:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(SMALL_JOB)
    return path


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A finished run of a few steps."""
    out = tmp_path_factory.mktemp("finished") / "out"
    status, _, errors = train(config, *SHORT, "--out", out)
    assert status == 0, errors
    return out


@pytest.fixture
def checkpoint(finished, tmp_path):
    """A copy of its newest checkpoint, outside of the run."""
    return shutil.copytree(finished / "stick_breaking" / "checkpoints" / "extended-000005", tmp_path / "start")


def write_metadata(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def replace_an_object(folder, found):
    """Replace an entry of the checkpoint that is not a tensor."""
    metadata = FileSystemReader(folder).read_metadata()
    index = next(
        index
        for index in metadata.storage_data
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
    )
    place, buffer = metadata.storage_data[index], io.BytesIO()
    torch.save(found, buffer)
    path = folder / place.relative_path
    place.offset, place.length = path.stat().st_size, len(buffer.getvalue())
    with path.open("ab") as file:
        file.write(buffer.getvalue())
    write_metadata(folder, metadata)


@pytest.mark.parametrize("place", ["metadata", "entry"])
def test_a_hostile_checkpoint_runs_nothing(place, config, checkpoint, tmp_path):
    ran = tmp_path / "ran"
    if place == "metadata":
        write_metadata(checkpoint, Opened(ran))
    else:
        replace_an_object(checkpoint, Opened(ran))
    status, _, errors = train(config, *SHORT, f"initial_checkpoint={checkpoint}", "--out", tmp_path / "out")
    assert not ran.exists() and status != 0
    if place == "metadata":
        assert status == 2 and f"{checkpoint}/.metadata cannot be read: io.open is not a class" in errors, errors
        assert "Traceback" not in errors and not (tmp_path / "out" / "config.yaml").exists()


@pytest.mark.parametrize("recorded", ["in the checkpoint", "in the run"])
@pytest.mark.parametrize("kind", ["softmax", "stick_breaking"])
def test_another_kind_of_attention(kind, recorded, config, finished, checkpoint, tmp_path):
    """The weights have the same names and sizes, so that both would load."""
    if recorded == "in the run":  # as version 0.1.0 did
        start = tmp_path / "run" / "stick_breaking" / "checkpoints" / "extended-000005"
        shutil.copytree(finished, tmp_path / "run")
        for name in ("attention.json", "checksums.json"):
            (start / name).unlink(missing_ok=True)
    else:
        start = checkpoint
    model = {"softmax": "softmax_rope", "stick_breaking": "stick_breaking"}[kind]
    changes = [*SHORT, f"compare=[{model}]", f"initial_checkpoint={start}"]
    if kind == "stick_breaking":
        check_initial_checkpoint(load_config(config, changes))
        changes.append("initial_attention=softmax")
    with pytest.raises(ValueError, match=rf"initial_checkpoint .* 'softmax', got {start}, .* 'stick_breaking'\. Set"):
        check_initial_checkpoint(load_config(config, changes))
    status, _, errors = train(config, *changes, "--out", tmp_path / "out")
    assert status == 2 and "initial_checkpoint must hold a model with" in errors and "Traceback" not in errors
    check_initial_checkpoint(load_config(config, [*changes, "initial_attention=stick_breaking"]))


def test_attention_can_be_changed_on_purpose(config, checkpoint, tmp_path):
    start = [f"initial_checkpoint={checkpoint}", "compare=[softmax_rope]", "initial_attention=stick_breaking"]
    status, _, errors = train(config, *SHORT, *start, "--out", tmp_path / "out")
    assert status == 0, errors
    with pytest.raises(ValueError, match="initial_attention = 'softmax' contradicts initial_checkpoint = None"):
        load_config(config, [*SHORT, "initial_attention=softmax"])


def test_a_trained_model_gets_mixed_layers(config, checkpoint, tmp_path):
    """The run can be read and resumed; no other format has its layers."""
    layers = ["compare=[both]", "attention.both={kind: mixed, layers: [stick_breaking, softmax_rope]}"]
    start = [f"initial_checkpoint={checkpoint}", "initial_attention=stick_breaking"]
    options = [*SHORT, *layers, "report.attention_interval=2"]
    out = tmp_path / "out"
    status, _, errors = train(config, *options, *start, "--out", out)
    assert status == 0, errors
    observed = [line["step"] for line in metrics(out) if line.get("mean_remainder") is not None]
    assert observed == [2, 4, 6, 2, 4]
    with load_run(out) as loaded:
        assert loaded.logits([1, 2, 3]).isfinite().all()
        saved = loaded.checkpoint
    continued = [*options, f"initial_checkpoint={saved}"]
    check_initial_checkpoint(load_config(config, continued))
    with pytest.raises(
        ValueError, match=r"'stick_breaking', got .*, where it is 'mixed'\. Set initial_attention=mixed"
    ):
        check_initial_checkpoint(load_config(config, [*SHORT, f"initial_checkpoint={saved}"]))
    for source in (None, config_of_weights(saved, tmp_path)):
        with pytest.raises(ValueError, match=r"attention must be .*, got 'mixed'"):
            checkpoints_of_models.load(saved, source)


def config_of_weights(checkpoint, folder):
    """Write the config.json of a stick-breaking model of the job's sizes, as `convert --config` takes it."""
    decoders.make_model().config.save_pretrained(folder / "sizes")
    return folder / "sizes"


def flip(path, count=100):
    """Change bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + count] = bytes(255 - byte for byte in content[middle : middle + count])
    path.write_bytes(content)


def cut(path):
    """Remove the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage", "cause"),
    [
        ("__0_0.distcp", flip, "its checksum must be"),
        ("__0_0.distcp", cut, "bytes, got"),
        (".metadata", flip, "its checksum must be"),
        ("progress.json", cut, "is damaged: "),
        ("progress.json", Path.unlink, "No such file"),
        ("checksums.json", cut, "is damaged: "),
        ("attention.json", Path.unlink, "does not exist"),
    ],
)
def test_a_damaged_newest_checkpoint(name, damage, cause, finished, tmp_path):
    """The newest whole one takes its place, also one of the stage before."""
    root = shutil.copytree(finished / "stick_breaking" / "checkpoints", tmp_path / "checkpoints")
    checkpoints = CheckpointDirectory(root, keep=9)
    assert checkpoints.restore_latest() == []
    (root / "extended-000004").rename(root / "extended-000003")  # a name does not decide which one is newest
    for newest, next_one in (("extended-000005", "extended-000003"), ("extended-000003", "extended-000002")):
        damage(root / newest / name)
        *found, using = checkpoints.restore_latest()
        assert str(root / newest / name) in found[0] and cause in found[0] and "\n" not in found[0], found
        assert using == f"using {root / next_one}, the newest whole checkpoint"
        assert (root / "latest").read_text() == next_one and checkpoints.latest().tokens > 0
    for path in root.glob("*-*/.metadata"):
        path.unlink()
    with pytest.raises(ValueError, match=r"extended-000002/.*, and .*checkpoints has no whole checkpoint"):
        checkpoints.restore_latest()


@pytest.mark.parametrize("content", [b"\xff\xfe", bytes(16), b""], ids=["no UTF-8", "zeros", "empty"])
def test_a_damaged_name_of_the_newest_checkpoint(content, finished, tmp_path):
    """As a file has it after the machine stopped: the newest whole checkpoint is found without it."""
    root = shutil.copytree(finished / "stick_breaking" / "checkpoints", tmp_path / "checkpoints")
    (root / "latest").write_bytes(content)
    *_, using = CheckpointDirectory(root, keep=9).restore_latest()
    assert using == f"using {root / 'extended-000005'}, the newest whole checkpoint"


def test_a_run_resumes_from_the_newest_whole_checkpoint(config, finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    root = out / "stick_breaking" / "checkpoints"
    for name in ("extended-000005", "extended-000004"):
        flip(root / name / "__0_0.distcp")
    status, _, errors = train(config, *SHORT, "--out", out, "--resume")
    assert status == 0 and f"using {root / 'extended-000002'}, the newest whole checkpoint" in errors, errors
    assert errors.count("__0_0.distcp is damaged: its checksum must be") == 2 and "Traceback" not in errors
    assert [line["loss"] for line in metrics(out)] == [line["loss"] for line in metrics(finished)]
    assert CheckpointDirectory(root, keep=9).restore_latest() == []


@pytest.mark.parametrize("recorded", [True, False], ids=["with checksums", "without checksums"])
def test_a_damaged_initial_checkpoint(recorded, config, checkpoint, tmp_path):
    if not recorded:
        (checkpoint / "checksums.json").unlink()
    cut(checkpoint / "__0_0.distcp")
    status, _, errors = train(config, *SHORT, f"initial_checkpoint={checkpoint}", "--out", tmp_path / "out")
    assert status == 2 and f"{checkpoint}/__0_0.distcp is damaged: it must have" in errors, errors
    assert "Traceback" not in errors and not (tmp_path / "out").exists()
    (checkpoint / "metadata.json").write_text("{}")  # as Megatron-Core's
    with pytest.raises(ValueError, match=rf"^{checkpoint}/__0_0\.distcp is damaged"):
        read_weights(checkpoint)


@pytest.mark.parametrize("option", ["forget_gate", "remainder_bias", "head_norm"])
def test_attention_with_weights_that_the_initial_checkpoint_lacks(option, config, checkpoint, tmp_path):
    start = [*SHORT, f"initial_checkpoint={checkpoint}"]
    check_initial_checkpoint(load_config(config, start))
    changes = [*start, f"attention.stick_breaking.{option}=true"]
    status, _, errors = train(config, *changes, "--out", tmp_path / "out")
    assert status == 2 and "Traceback" not in errors and not (tmp_path / "out").exists(), errors
    assert f"attention.stick_breaking.{option} must be False to start from {checkpoint}, which has no" in errors
    mixed = ["compare=[both]", "attention.both={kind: mixed, layers: [softmax_rope, stick_breaking]}"]
    with pytest.raises(ValueError, match=rf"attention\.stick_breaking\.{option} must be False to start from"):
        check_initial_checkpoint(load_config(config, [*changes, *mixed, "initial_attention=stick_breaking"]))


def test_fire_has_weights_that_the_initial_checkpoint_lacks(config, checkpoint):
    fire = ["compare=[fire]", "attention.fire={kind: softmax, position: fire}", "initial_attention=stick_breaking"]
    changes = [*SHORT, *fire, f"initial_checkpoint={checkpoint}"]
    with pytest.raises(ValueError, match=r"attention\.fire\.position must be other than 'fire' to start"):
        check_initial_checkpoint(load_config(config, changes))


def test_weights_of_the_initial_checkpoint_are_left_out_only_on_purpose(config, tmp_path):
    """A model with gates is another model without them."""
    gated = "attention.gated={kind: stick_breaking, forget_gate: true}"
    options = ["compare=[gated]", "stages.0.steps=5", "stages.1.steps=5", "parallel.ranks=1"]
    options += ["stages.0.context_parallel_size=1", "stages.1.context_parallel_size=1"]
    status, _, errors = train(config, *options, gated, "--out", tmp_path / "out")
    assert status == 0, errors
    (start,) = (tmp_path / "out" / "gated" / "checkpoints").glob("extended-*5")
    options += [f"initial_checkpoint={start}"]
    check_initial_checkpoint(load_config(config, [*options, gated]))
    for layers, name in (("kind: stick_breaking", "gated"), ("kind: mixed, layers: [plain]", "plain")):
        plain = [f"attention.gated={{{layers}}}", "attention.plain={kind: stick_breaking}"]
        changes = [*options, *plain]
        if "mixed" in layers:  # the kind is recorded
            (start / "attention.json").unlink()
            (start / "checksums.json").unlink()
            (tmp_path / "out" / "config.yaml").unlink()
        with pytest.raises(
            ValueError, match=rf"attention\.{name}\.forget_gate must be True to .* which has weights for"
        ):
            check_initial_checkpoint(load_config(config, changes))
    purpose = ["attention.gated={kind: stick_breaking}", "initial_attention=stick_breaking"]
    check_initial_checkpoint(load_config(config, [*options, *purpose]))


@pytest.mark.parametrize("text", ["name: x", "attention: [1]", "attention: {start: }", "[1, 2]", "a: [", "\x00"])
def test_a_configuration_of_something_else_beside_the_checkpoint(text, config, checkpoint, tmp_path):
    """A checkpoint without a record, three folders below a config.yaml that is not that of a run."""
    for name in ("attention.json", "checksums.json"):
        (checkpoint / name).unlink()
    folder = tmp_path / "other" / "start" / "steps"
    folder.mkdir(parents=True)
    (tmp_path / "other" / "config.yaml").write_text(text)
    start = checkpoint.rename(folder / "one")
    check_initial_checkpoint(load_config(config, [*SHORT, f"initial_checkpoint={start}"]))


@pytest.mark.parametrize("change", ["model.hidden_size=64", "model.num_layers=3", "model.tie_word_embeddings=true"])
def test_an_initial_checkpoint_of_another_size(change, config, checkpoint):
    start = load_config(config, [*SHORT, f"initial_checkpoint={checkpoint}"])
    check_initial_checkpoint(start)
    changed = load_config(config, [*SHORT, f"initial_checkpoint={checkpoint}", change])
    with pytest.raises(ValueError, match=rf"configured sizes, [\d,]+ weights, got {checkpoint} with [\d,]+\."):
        check_initial_checkpoint(changed)


def test_an_initial_checkpoint_with_other_heads(config, finished):
    """Their weights have the same shapes."""
    (start,) = (finished / "stick_breaking" / "checkpoints").glob("extended-*5")
    options = [*SHORT, f"initial_checkpoint={start}"]
    check_initial_checkpoint(load_config(config, options))
    assert json.loads((start / "attention.json").read_text())["heads"]["num_heads"] == 2
    with pytest.raises(ValueError, match=rf"model\.num_heads must be 2 to start from {start}, .* got 4\."):
        check_initial_checkpoint(load_config(config, [*options, "model.num_heads=4", "model.num_kv_heads=2"]))


@pytest.mark.parametrize("option", ["attend_current=true", "logits=euclidean", "scale=0.5", "reach=[0.5, 10]"])
def test_an_initial_checkpoint_with_other_options_of_attention(option, config, finished, checkpoint):
    """They have no weights, so the weights would give another function."""
    (start,) = (finished / "stick_breaking" / "checkpoints").glob("extended-*5")
    changed, name = f"attention.stick_breaking.{option}", option.partition("=")[0]
    with pytest.raises(ValueError, match=rf"stick_breaking\.{name} must be .* to start from {start}, .*, got"):
        check_initial_checkpoint(load_config(config, [*SHORT, f"initial_checkpoint={start}", changed]))
    purpose = [f"initial_checkpoint={start}", "initial_attention=stick_breaking"]
    check_initial_checkpoint(load_config(config, [*SHORT, *purpose, changed]))
    check_initial_checkpoint(load_config(config, [*SHORT, f"initial_checkpoint={checkpoint}", changed]))  # unknown


# Runs a script with its arguments. Python would cut off the compiled modules that it caches.
LIMITED = """
import resource, runpy, sys
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, 40 << 10))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_full_disk(config, tmp_path):
    """Files may have 40 KiB, which a checkpoint exceeds."""
    limited, out = tmp_path / "limited.py", tmp_path / "out"
    limited.write_text(LIMITED)
    options = [*SHORT, "report.interval=100", "--out", out]
    done = run_python([limited, *FORKED_TRAIN, config, *options], seconds=TIMEOUT_SECONDS)
    saved = out / "stick_breaking" / "checkpoints" / "short-000002"
    # Not in the line of the progress bar.
    assert done.returncode == 1 and f"\nrank 0 failed: {saved} could not be saved: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), naming(Path("/dev/full")):
        Path("/dev/full").write_text("more than fits")


def test_damaged_files_of_other_formats(tmp_path, capsys):
    """`convert` names the file in one line."""
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / name
        checkpoints_of_models.save(decoders.make_model(**decoders.TO_CONVERT), folder, "huggingface")
        cut(folder / name)
        capsys.readouterr()
        assert cli.main(["convert", str(folder), str(tmp_path / "out"), "--to", "fla"]) == 2
        line = capsys.readouterr().err
        assert f"megatron-sb: {folder / name} is damaged: " in line and line.count("\n") == 1
