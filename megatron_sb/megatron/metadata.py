"""Read the `.metadata` of a distributed checkpoint. It is a pickle, and only objects of known classes are created."""

from __future__ import annotations

import pathlib
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata

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
            raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} must hold the Metadata of a distributed checkpoint, got {type(found).__name__}.")
    return found


class _Unpickler(pickle.Unpickler):
    """Create only objects of the classes that metadata contains."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class or function that the pickle names, or raise ValueError if metadata does not contain it."""
        dtype = vars(torch).get(name) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else _ALLOWED.get((module, name))
        if found is None:
            raise ValueError(f"{module}.{name} is not a class of a checkpoint's metadata.")
        return found
