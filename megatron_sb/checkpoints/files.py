"""Folders of a config.json and safetensors, as Hugging Face has them, and refusals of what cannot be said."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig


class Weights:
    """A checkpoint's tensors by name, each handed out once: what nobody asked for is refused at the end."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self._folder, self._left = folder, dict(tensors)

    def find(self, *names: str) -> Tensor | None:
        """The one with the first of these names that is there."""
        return next((self._left.pop(name) for name in names if name in self._left), None)

    def take(self, name: str) -> Tensor:
        """The one with this name. Raises ValueError where it is missing."""
        refuse_weights(self._folder, "missing", {name} - self._left.keys())
        return self._left.pop(name)

    def refuse_rest(self) -> None:
        """Raises ValueError where some were never handed out."""
        refuse_weights(self._folder, "without a place in it", self._left)


def refuse_weights(folder: Path, problem: str, names: Collection[str]) -> None:
    """Refuse a folder for the weights of these names, where there are any. Raises ValueError with the first few."""
    first, more = sorted(names)[:3], len(names) - 3
    if first:
        rest = f" and {more} more" if more > 0 else ""
        raise ValueError(
            f"{folder} does not have the weights of its configuration; {problem}: {', '.join(first)}{rest}"
        )


def read_config(folder: Path) -> dict:
    """The folder's config.json. Raises FileNotFoundError where there is none."""
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no config.json")
    return json.loads(path.read_text(encoding="utf-8"))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors, one file or several.

    Raises FileNotFoundError where there are none, ValueError where two files have the same one.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = load_file(path)
        refuse_weights(folder, "in two files", tensors.keys() & found.keys())
        tensors |= found
    return tensors


def write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Both, into an existing folder."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def require(config: PreTrainedConfig, fields: dict[str, object], whose: str) -> None:
    """Refuse a model with a field of another value than a format's models all have."""
    for name, value in fields.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} = {getattr(config, name)!r}: {whose} models have {value!r} and no other")


def take(config: dict, name: str, allowed: tuple, default: object = None) -> None:
    """Refuse a config with a field that has none of the allowed values; what is missing has the default."""
    value = config.get(name, default)
    if value not in allowed:
        said = " or ".join(map(repr, allowed))
        raise ValueError(f"config.json: {name} = {value!r} cannot be converted; {said} can")
