"""Read distributed checkpoints without running code that their files name.

The `.metadata` is a pickle: only objects of the classes that metadata contains are created. The other objects of a
checkpoint are read by `torch.load` with weights_only.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_sb.validation import InputError

_CLASSES = (
    torch.Size,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
    planner.BytesIOWriteData,  # this and the following: save plans of the ranks, which Megatron-Core also stores
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
)
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.strategies.torch"  # releases up to 0.15 have their own classes
_ALLOWED = {(found.__module__, found.__qualname__): found for found in _CLASSES} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (_MEGATRON_MODULE, "MCoreMetadata"): metadata.Metadata,
    (_MEGATRON_MODULE, "MCoreSavePlan"): planner.SavePlan,
    # The path of the checkpoint. Paths of another system cannot be created. Python 3.13 renamed the module.
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): pathlib.PureWindowsPath for module in ("pathlib", "pathlib._local")},
}
_BROKEN = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, TypeError, ValueError)


class Reader(dcp.FileSystemReader):
    """Read a checkpoint folder as torch does, with a safe `read_metadata`: torch's executes what the pickle names."""

    def read_metadata(self) -> Metadata:
        """Read the metadata with the function of this module."""
        return read_metadata(Path(self.path))


def load_state(state: dict, folder: Path, *, no_dist: bool = False) -> None:
    """Read the entries of `state` from a checkpoint folder, tensors in place. Collective unless `no_dist`.

    Raises:
        ValueError: if the metadata are damaged, or name a class that metadata does not contain.
    """
    with weights_only():
        dcp.load(state, storage_reader=Reader(folder), no_dist=no_dist)


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Make every `torch.load` within the context refuse classes other than those of weights.

    torch's and Megatron-Core's readers ask for any class. torch's environment variable overrides them.
    """
    force, never = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (force, never)}
    os.environ[force] = "1"
    try:
        with torch.serialization.safe_globals([io.BytesIO]):  # Transformer Engine's extra states
            yield
    finally:
        del os.environ[force]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint folder.

    Raises:
        ValueError: if the file is damaged, or names a class that metadata does not contain.
    """
    path = folder / ".metadata"
    with path.open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except _BROKEN as error:
            raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise InputError(f"{path} must hold the Metadata of a distributed checkpoint, got {type(found).__name__}.")
    return found


class _Unpickler(pickle.Unpickler):
    """Create only objects of the classes that metadata contains."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class or function that the pickle names, or raise ValueError if metadata does not contain it."""
        dtype = vars(torch).get(name) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else _ALLOWED.get((module, name))
        if found is None:
            raise InputError(f"{module}.{name} is not a class of a checkpoint's metadata.")
        return found
