"""A checkpoint's `.metadata` is an untrusted pickle. Unknown classes in it are rejected and never run."""

import collections
import os
import pathlib
import pickle

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, save

from megatron_sb import checkpoints
from megatron_sb.megatron.metadata import read_metadata
from megatron_sb.megatron.weights import has_optimizer, read_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the tests use one process
NAME = "decoder.final_layernorm.weight"
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


class Called:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.fixture
def folder(tmp_path):
    """Write a checkpoint of one tensor with torch."""
    save({NAME: torch.arange(6.0)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    (tmp_path / "metadata.json").write_text("{}")
    return tmp_path


def change(folder, change_it):
    metadata = FileSystemReader(folder).read_metadata()
    change_it(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("read", [read_weights, has_optimizer, checkpoints.load])
def test_nothing_is_run(read, folder):
    """Every reader rejects it: of weights, of optimizer state, of a model."""
    ran = folder / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Called(os.mkdir, str(ran))))
    with pytest.raises(ValueError, match=r"/\.metadata .*posix\.mkdir"):
        read(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Called(eval, "1"), r"builtins\.eval"),
        (Called(getattr, 1, "real"), r"builtins\.getattr"),
        (Called(torch.load, "there"), r"torch\.serialization\.load"),
        (torch.nn.Linear, r"torch\.nn\.modules\.linear\.Linear"),
        (collections.OrderedDict(), r"collections\.OrderedDict"),
    ],
)
def test_refused_by_name(value, named, folder):
    """The unknown class is found anywhere in the metadata, also after known ones."""
    change(folder, lambda metadata: metadata.planner_data.update({"more": value}))
    with pytest.raises(ValueError, match=rf"\.metadata .*{named}"):
        read_weights(folder)


def test_a_name_within_an_allowed_module(folder):
    """A pickle can name attributes of a known class or module with dots."""
    for name in (b"Size.__class__", b"serialization.load", b"float32.__class__"):
        (folder / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name + b"\x93.")
        with pytest.raises(ValueError, match=rf"torch\.{name.decode()}"):
            read_metadata(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Ran out of input"),
        (b"\x80\x04K\x01", r"\.metadata"),
        (b"none of it", r"\.metadata"),
        (pickle.dumps({"a": 1}), r"\.metadata .*dict"),
    ],
)
def test_damaged(content, message, folder):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_metadata(folder)


def test_what_torch_writes_is_read(tmp_path):
    """Every kind of entry is read as torch reads it."""
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    save({**tensors, "nested": {"step": 1, "list": [torch.ones(2)]}}, checkpoint_id=tmp_path, no_dist=True)
    expected, found = FileSystemReader(tmp_path).read_metadata(), read_metadata(tmp_path)
    for part in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(found, part) == getattr(expected, part)
    assert {found.state_dict_metadata[str(dtype)].properties.dtype for dtype in DTYPES} == set(DTYPES)
    assert found.storage_meta.checkpoint_id == pathlib.PurePosixPath(tmp_path)


def test_the_ranks_plans_are_read(folder):
    """Megatron-Core stores them in the metadata if it plans without a coordinator."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({NAME: torch.arange(6.0), "bytes": 1}, is_coordinator=True)
    plan = FileSystemWriter(folder).prepare_global_plan([planner.create_local_plan()])[0]
    change(folder, lambda metadata: setattr(metadata, "all_local_plans", [plan]))
    assert read_metadata(folder).all_local_plans == [plan]
    assert torch.equal(read_weights(folder)[NAME], torch.arange(6.0))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol(protocol, folder):
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    assert torch.equal(read_weights(folder)[NAME], torch.arange(6.0))


def test_metadata_of_older_megatrons(folder):
    """Up to 0.15 its class had one more field; newer versions may lack the class."""
    megatrons = pytest.importorskip("megatron.core.dist_checkpointing.strategies.torch")
    old = megatrons.MCoreMetadata()
    vars(old).update(vars(FileSystemReader(folder).read_metadata()))
    old.mcore_data = {NAME: {"nd_reformulated_orig_global_shape": (6,)}}
    (folder / ".metadata").write_bytes(pickle.dumps(old))
    assert read_metadata(folder).mcore_data == old.mcore_data
    assert torch.equal(read_weights(folder)[NAME], torch.arange(6.0))
