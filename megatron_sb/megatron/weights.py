"""Read and write the weights of a Megatron-Core distributed checkpoint as whole tensors, without a model.

Tensors are named after the model's modules. The tensors of all layers are stacked into one (dimensions: layers, then
experts), for all parallel sizes. Neither reading nor writing needs a process group.

Example:
    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> from megatron_sb.megatron.weights import has_optimizer, is_checkpoint, read_weights, write_weights
    >>> folder = Path(tempfile.mkdtemp())
    >>> weights = {"decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 8, 16)}  # of two layers
    >>> write_weights(folder, weights, num_layers=2, num_experts=None)
    >>> is_checkpoint(folder), has_optimizer(folder)
    (True, False)
    >>> read_weights(folder)["decoder.layers.mlp.linear_fc2.weight"].shape
    torch.Size([2, 8, 16])
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_sb.megatron.integrity import check_files
from megatron_sb.megatron.metadata import load_state, read_metadata
from megatron_sb.megatron.settings import MARKER
from megatron_sb.megatron.shards import PREFIXES, join_shards
from megatron_sb.validation import InputError, read_json_object

HEADS = ("num_heads", "num_kv_heads", "head_dim")  # fields of the trainer's `model`
ATTENTION = "attention.json"  # the checkpoint's own name for its model's attention; Megatron-Core does not read it
FOLDED_SCALE = "folded_scale"  # field of this file, in checkpoints that `checkpoints.save` wrote
LAYERS, EXTRA_STATE = "decoder.layers.", "_extra_state"
EMBEDDING, MOMENT = "embedding.word_embeddings.weight", "exp_avg"  # in names of optimizer state
WITH_EXTRA_STATE = (
    "linear_qkv.weight",
    "linear_proj.weight",
    "gate_proj.weight",
    "linear_fc1.weight",
    "linear_fc2.weight",
)
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder is a distributed checkpoint of Megatron-Core."""
    return (folder / ".metadata").exists() and (folder / "metadata.json").exists()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every weight of the model to the CPU. Code in the files of the folder is not executed.

    Raises:
        ValueError: if the folder is not a distributed checkpoint, a file is damaged, or its `.metadata` cannot be read
            safely.
    """
    if not (folder / ".metadata").exists():
        raise InputError(f"{folder} must be a distributed checkpoint, but .metadata is missing.")
    entries = read_metadata(folder).state_dict_metadata
    on_cpu = any(name.startswith(PREFIXES) for name in entries)
    if not on_cpu and not is_checkpoint(folder):
        raise InputError(f"{folder} must be a distributed checkpoint of Megatron-Core, but metadata.json is missing.")
    weights = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in entries.items()
        if isinstance(found, TensorStorageMetadata)
        and (name.startswith(PREFIXES) if on_cpu else not belongs_to_optimizer(name) and EXTRA_STATE not in name)
    }
    check_files(folder)
    with _without_process_group_warning():
        load_state(weights, folder, no_dist=True)
    return join_shards(weights) if on_cpu else weights


def belongs_to_optimizer(name: str) -> bool:
    """Return whether an entry of a checkpoint belongs to an optimizer, single or chained.

    Example:
        >>> from megatron_sb.megatron.weights import belongs_to_optimizer
        >>> belongs_to_optimizer("chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight")
        True
    """
    return "optimizer." in name and not name.startswith(("decoder.", "embedding.", "output_layer."))


def has_optimizer(folder: Path) -> bool:
    """Return whether a checkpoint holds optimizer state, so that training can resume.

    Raises:
        ValueError: if `.metadata` cannot be read safely.
    """
    return any(belongs_to_optimizer(name) for name in read_metadata(folder).state_dict_metadata)


def has_optimizer_of_attention(folder: Path) -> bool:
    """Return whether a checkpoint holds optimizer state of attention only, as after a stage with `loss: layers`.

    Raises:
        ValueError: if `.metadata` cannot be read safely.
    """
    names = [name for name in read_metadata(folder).state_dict_metadata if belongs_to_optimizer(name)]
    moments = [name for name in names if MOMENT in name]
    return bool(moments) and not any(EMBEDDING in name for name in moments)


def write_attention_kind(
    folder: Path, kind: str, folded_scale: float | None = None, heads: Mapping[str, int] | None = None
) -> None:
    """Record the attention of a checkpoint's model. The names and shapes of the weights do not tell it.

    Args:
        folder: folder of the checkpoint.
        kind: "stick_breaking", "softmax" or "mixed".
        folded_scale: scale of the logits that was folded into the weights. Default None: none was.
        heads: `HEADS` of the model. Default None: they are not recorded.
    """
    record: dict[str, Any] = {"kind": kind} if folded_scale is None else {"kind": kind, FOLDED_SCALE: folded_scale}
    record |= {"heads": dict(heads)} if heads is not None else {}
    (folder / ATTENTION).write_text(json.dumps(record), encoding="utf-8")


def check_scale_once(folder: Path, name: str, scale: float | None) -> None:
    """Raise ValueError if a configuration sets a scale of the logits that a checkpoint's weights contain already.

    Args:
        folder: folder of the checkpoint.
        name: name of the field in the configuration, for the message.
        scale: value of the field. None stands for the default scale.
    """
    path = folder / ATTENTION
    folded = read_json_object(path).get(FOLDED_SCALE) if scale is not None and path.exists() else None
    if folded is not None:
        raise InputError(
            f"{name} must be null for {folder}, whose weights contain the scale {folded} since their conversion, got "
            f"{scale}. Remove it from the configuration."
        )


def read_heads(folder: Path) -> dict[str, int]:
    """Return the `HEADS` that `write_attention_kind` recorded; {} if it recorded none, as in earlier versions.

    Raises:
        ValueError: if the record cannot be read.
    """
    path = folder / ATTENTION
    heads = read_json_object(path).get("heads") if path.exists() else None
    return heads if isinstance(heads, dict) else {}


def read_attention_kind(folder: Path) -> str | None:
    """Return what `write_attention_kind` recorded, or what the markers of Megatron's loop say. None without both.

    Raises:
        ValueError: if the record cannot be read.
    """
    path = folder / ATTENTION
    if not path.exists():
        return _marked_kind(folder) if (folder / ".metadata").exists() else None
    kind = read_json_object(path).get("kind")
    if not isinstance(kind, str):
        raise InputError(f"{path}: kind must be a string, got {kind!r}.")
    return kind


def _marked_kind(folder: Path) -> str | None:
    """Return the kind of attention of a model whose stick-breaking layers have markers, or None without markers.

    The layers of a mixed model have names of their own, in which the number of the layer follows LAYERS.
    """
    try:
        entries = read_metadata(folder).state_dict_metadata
    except ValueError:
        return None  # the function that reads the weights says what is wrong
    names = [name.removeprefix(LAYERS) for name in entries if name.startswith(LAYERS)]
    marked = {name.partition(".")[0] for name in names if f".core_attention.{MARKER}" in name}
    if not marked:
        return None
    attention = {name.partition(".")[0] for name in names if name.endswith(".self_attention.linear_proj.weight")}
    return "mixed" if attention - marked else "stick_breaking"


@contextlib.contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Suppress torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def write_weights(folder: Path, weights: dict[str, Tensor], num_layers: int, num_experts: int | None) -> None:
    """Write a checkpoint of weights into an existing folder.

    This uses torch's writer, which has the same file format. Megatron-Core's own writer starts processes that import
    the caller's script again.

    Args:
        folder: an existing folder.
        weights: weights as `read_weights` returns them.
        num_layers: number of layers that are stacked in a weight.
        num_experts: number of experts that are stacked in a weight. None without experts.
    """
    state: dict = dict(weights)
    # Megatron-Core expects the fp8 state of each module, a list with one entry. None stands for no state.
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
