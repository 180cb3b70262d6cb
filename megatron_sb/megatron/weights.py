"""Read and write the weights of a Megatron-Core distributed checkpoint as whole tensors, without a model.

Tensors are named after the model's modules. The tensors of all layers are stacked into one (dimensions: layers, then
experts), whatever parallel sizes saved them. Neither reading nor writing needs a process group.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sb.megatron.metadata import Reader, read_metadata

LAYERS, EXTRA_STATE = "decoder.layers.", "_extra_state"
WITH_EXTRA_STATE = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a distributed checkpoint of Megatron-Core."""
    return (folder / ".metadata").exists() and (folder / "metadata.json").exists()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of the model, whole, to the CPU. No code from the folder's files is executed.

    Raises:
        ValueError: if the folder is not a distributed checkpoint, or its `.metadata` cannot be read safely.
    """
    if not is_checkpoint(folder):
        raise ValueError(
            f"{folder} must be a distributed checkpoint of Megatron-Core, but .metadata or metadata.json is missing."
        )
    weights = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in read_metadata(folder).state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and not belongs_to_optimizer(name) and EXTRA_STATE not in name
    }
    with _without_process_group_warning():
        dcp.load(weights, storage_reader=Reader(folder), no_dist=True)
    return weights


def belongs_to_optimizer(name: str) -> bool:
    """Whether an entry of a checkpoint belongs to an optimizer, single or chained."""
    return "optimizer." in name and not name.startswith(("decoder.", "embedding.", "output_layer."))


def has_optimizer(folder: Path) -> bool:
    """Whether a checkpoint holds optimizer state, so that training can resume. Raises as `read_metadata`."""
    return any(belongs_to_optimizer(name) for name in read_metadata(folder).state_dict_metadata)


@contextlib.contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Suppress torch's warning that a single process reads or writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def write_weights(folder: Path, weights: dict[str, Tensor], num_layers: int, num_experts: int | None) -> None:
    """Write a checkpoint of weights, as `read_weights` returns them, into an existing folder.

    This uses torch's writer, which has the same file format. Megatron-Core's own starts processes that import the
    caller's script again.
    """
    state: dict = dict(weights)
    # Megatron-Core expects each module's fp8 state, a list with one entry. There is none, so the entry is None.
    for name in weights:
        if not (name.startswith(LAYERS) and name.endswith(WITH_EXTRA_STATE)):
            continue
        counts = (num_layers, num_experts) if num_experts is not None and ".experts." in name else (num_layers,)
        for place in itertools.product(*map(range, counts)):
            where = "_".join(".".join(map(str, numbers)) for numbers in (place, counts))
            state[f"{name.removesuffix('weight')}{EXTRA_STATE}/shard_{where}"] = [None]
    with _without_process_group_warning():
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
