"""The weights of a Megatron-Core distributed checkpoint as whole tensors, without a model.

Its tensors are named after the model's modules, the layers of a kind stacked into one (layers first, then experts),
whatever parallel layout saved them. Neither reading nor writing needs a process group.
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
    """Whether it is a distributed checkpoint of Megatron-Core's."""
    return (folder / ".metadata").exists() and (folder / "metadata.json").exists()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model, whole, on the CPU. What the folder's files say is read, none of it is run.

    Raises ValueError where the folder is no such checkpoint, or its `.metadata` names what no checkpoint needs.
    """
    if not is_checkpoint(folder):
        raise ValueError(f"{folder} is no distributed checkpoint of Megatron-Core's (.metadata and metadata.json)")
    weights = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in read_metadata(folder).state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata) and not is_optimizers(name) and EXTRA_STATE not in name
    }
    with _alone():
        dcp.load(weights, storage_reader=Reader(folder), no_dist=True)
    return weights


def is_optimizers(name: str) -> bool:
    """Whether an entry of a checkpoint is the optimizer's, alone or one of several that are chained."""
    return "optimizer." in name and not name.startswith(("decoder.", "embedding.", "output_layer."))


def has_optimizer(folder: Path) -> bool:
    """Whether a checkpoint can resume training, or holds weights alone. Raises ValueError as `read_metadata`."""
    return any(is_optimizers(name) for name in read_metadata(folder).state_dict_metadata)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Around what torch warns of: that one process reads or writes by itself, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def write_weights(folder: Path, weights: dict[str, Tensor], num_layers: int, num_experts: int | None) -> None:
    """The inverse of `read_weights`, into an existing folder: a checkpoint of weights alone.

    By torch's own writer, whose files Megatron-Core's are: Megatron-Core's starts processes that import the caller's
    script again.
    """
    state: dict = dict(weights)
    for name in weights:  # what each module would say of fp8 (a list, as Megatron-Core has it): nothing, but asked for
        if not (name.startswith(LAYERS) and name.endswith(WITH_EXTRA_STATE)):
            continue
        counts = (num_layers, num_experts) if num_experts is not None and ".experts." in name else (num_layers,)
        for place in itertools.product(*map(range, counts)):
            where = "_".join(".".join(map(str, numbers)) for numbers in (place, counts))
            state[f"{name.removesuffix('weight')}{EXTRA_STATE}/shard_{where}"] = [None]
    with _alone():
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
