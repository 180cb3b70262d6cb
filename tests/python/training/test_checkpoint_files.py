"""Checkpoints that a job must not load: hostile ones, damaged ones, and those of another model."""

import io
import pickle
import shutil

import pytest
import torch
from support.jobs import SMALL_JOB, train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

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
