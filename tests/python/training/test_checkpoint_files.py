"""Checkpoints that a job must not load: hostile ones, damaged ones, and those of another model."""

import io
import pickle
import shutil

import pytest
import torch
from support.jobs import SMALL_JOB, train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_sb.training.config import load_config
from megatron_sb.training.initial_checkpoint import check_initial_checkpoint

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
        (start / "attention.json").unlink(missing_ok=True)
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
