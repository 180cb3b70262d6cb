"""The `.metadata` of a distributed checkpoint: a pickle, read without running anything else that it may name."""

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
    planner.BytesIOWriteData,  # these and below: of the ranks' plans, which Megatron-Core keeps beside it
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
)
_MEGATRONS = "megatron.core.dist_checkpointing.strategies.torch"  # up to 0.15 it had classes of its own
_ALLOWED = {(found.__module__, found.__qualname__): found for found in _CLASSES} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (_MEGATRONS, "MCoreMetadata"): metadata.Metadata,
    (_MEGATRONS, "MCoreSavePlan"): planner.SavePlan,
    # Where it was saved; a path of another system's cannot be made here. Python 3.13 names the module otherwise.
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): pathlib.PureWindowsPath for module in ("pathlib", "pathlib._local")},
}
_BROKEN = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, TypeError, ValueError)


class Reader(dcp.FileSystemReader):
    """Torch's reader of a checkpoint's folder, whose own `read_metadata` calls whatever the pickle says."""

    def read_metadata(self) -> Metadata:
        """As the module's."""
        return read_metadata(Path(self.path))


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint has. Raises ValueError where its file is damaged or names what no checkpoint needs."""
    path = folder / ".metadata"
    with path.open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except _BROKEN as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} holds a {type(found).__name__}; the Metadata of a distributed checkpoint is allowed")
    return found


class _Unpickler(pickle.Unpickler):
    """Makes what a checkpoint's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        """A class or function that a pickle names. Raises ValueError where it is none of metadata's."""
        dtype = vars(torch).get(name) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else _ALLOWED.get((module, name))
        if found is None:
            raise ValueError(f"it names {module}.{name}; the classes of a checkpoint's metadata are allowed")
        return found
