"""Read and write folders with a config.json and safetensors files, in the layout of Hugging Face."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.validation import InputError, MissingFileError, read_json_object

NUM_NAMES_IN_MESSAGE = 3
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WITHOUT_VARIANTS = {
    "logits": "dot",
    "reach": None,
    "forget_gate": False,
}  # fields of a model for formats without variants
FORMATS_WITH = {  # field of a model that some formats lack -> formats that store every value of it
    **dict.fromkeys(("logits", "reach", "forget_gate", "head_dim"), ("huggingface", "megatron")),
    **dict.fromkeys(("remainder_bias", "head_norm", "num_experts"), ("huggingface", "megatron", "dolomite")),
    "attend_current": ("huggingface", "megatron", "fla"),
    "head_norm_eps": ("huggingface",),
}
TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
)


class Weights:
    """The tensors of a checkpoint by name. `pop` removes a tensor, and `check_all_used` rejects tensors that remain."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self._folder, self._unused = folder, dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._unused

    def pop_first(self, *names: str) -> Tensor | None:
        """Remove and return the tensor with the first of these names that exists. Return None if none exists."""
        return next((self._unused.pop(name) for name in names if name in self._unused), None)

    def pop(self, name: str, *shapes: tuple[int | None, ...]) -> Tensor:
        """Remove and return the tensor with this name. Raise ValueError if it is missing or has another shape.

        shapes: accepted shapes, in which None stands for any size. Default: any shape.
        """
        check_no_weights(self._folder, "Missing weights", {name} - self._unused.keys())
        check_shape(self._folder, name, self._unused[name], *shapes)
        return self._unused.pop(name)

    def check_all_used(self) -> None:
        """Raise ValueError if tensors remain."""
        check_no_weights(self._folder, "Unexpected weights", self._unused)


def check_no_weights(folder: Path, problem: str, names: Collection[str]) -> None:
    """Raise ValueError if `names` is not empty. The message gives the problem, the folder and the first names."""
    first, num_more = sorted(names)[:NUM_NAMES_IN_MESSAGE], len(names) - NUM_NAMES_IN_MESSAGE
    if first:
        more = f" and {num_more} more" if num_more > 0 else ""
        raise InputError(f"{problem} in the checkpoint {folder}: {', '.join(first)}{more}.")


def check_shape(folder: Path, name: str, tensor: Tensor, *shapes: tuple[int | None, ...]) -> None:
    """Raise ValueError if a tensor has none of these shapes. None stands for any size. Without shapes, all are right.

    A conversion that splits or permutes a tensor needs this check: torch's error would not name the tensor.
    """
    found = tuple(tensor.shape)
    fits = (len(s) == len(found) and all(n in (None, m) for n, m in zip(s, found, strict=True)) for s in shapes)
    if shapes and not any(fits):
        expected = " or ".join(str(shape).replace("None", "any") for shape in shapes)
        check_no_weights(folder, "Weights of the wrong shape", [f"{name} (must be {expected}, got {found})"])


def read_config(folder: Path) -> dict:
    """Return the folder's config.json. Raise FileNotFoundError if there is none."""
    path = folder / "config.json"
    if not path.exists():
        raise MissingFileError(f"{folder} has no config.json, and no checkpoint of Megatron-Core or of a run.")
    return read_json_object(path)


@contextlib.contextmanager
def naming_config(path: Path) -> Iterator[None]:
    """Raise ValueError with the file's name for a field of a config.json that is missing or has a wrong value."""
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path}: {error.args[0]} is required") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError, StrictDataclassError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error


def model_config(path: Path) -> StickBreakingConfig:
    """Return the configuration of a "huggingface" model. Raise ValueError for another model or a wrong value."""
    fields, expected = read_json_object(path), StickBreakingConfig.model_type
    if (found := fields.get("model_type")) != expected:
        raise InputError(f"{path}: model_type must be {expected!r}, got {found!r}.")
    with naming_config(path):
        return StickBreakingConfig.from_dict(fields)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder's safetensors files.

    Raises:
        FileNotFoundError: if the folder has no safetensors file.
        ValueError: if a file cannot be read or is damaged, the folder lacks a file that its index names, or two files
            hold a tensor with the same name.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise MissingFileError(f"{folder} has no *.safetensors file.")
    _check_index(folder)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            from_file = load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is damaged: {error}") from error
        except OSError as error:  # such as a link of a download's cache whose target was deleted
            raise InputError(f"{path} cannot be read: {error}") from error
        check_no_weights(folder, "Weights that two files hold", tensors.keys() & from_file.keys())
        tensors |= from_file
    return tensors


def _check_index(folder: Path) -> None:
    """Raise ValueError if the index names a file that is missing, as after a download that was interrupted."""
    path = folder / INDEX
    if not path.exists() or (folder / WEIGHTS).exists():  # transformers prefers the single file
        return
    places = read_json_object(path).get("weight_map")
    if not isinstance(places, dict):
        raise InputError(f"{path}: weight_map must be an object, got {places!r}.")
    missing = {name for name in map(str, places.values()) if not os.path.lexists(folder / name)}
    check_no_weights(folder, f"Missing files, which {INDEX} names,", missing)


def write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors into an existing folder."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(temporary: Path) -> Iterator[None]:
    """Create an empty folder for a conversion that writes there, and remove what is left of it at the end.

    What a killed conversion has left is removed first. The folder is locked, because another one could be writing there
    now, to the same place. On a file system without locks of folders, two of them are not detected.

    Raises:
        ValueError: another conversion writes there.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _lock(descriptor, temporary)
        try:
            for left_over in temporary.iterdir():
                if left_over.is_dir():
                    shutil.rmtree(left_over)
                else:
                    left_over.unlink()
            yield
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    """Lock an open folder. Raise ValueError if another process holds the lock, or has just moved the folder away."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
    except BlockingIOError:
        is_ours = False
    except OSError:  # a file system without locks of folders
        is_ours = True
    if not is_ours:
        raise InputError(f"out must be written by one command at a time, got another one that writes {folder}.")


def give_usual_modes(folder: Path) -> None:
    """Let those read the weights who can read other new files. safetensors writes files for their owner alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer, if the source has any."""
    for path in (path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
        if path.is_file():
            copied = folder / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)


def default_head_dim(config: PreTrainedConfig) -> int | float:
    """Return the head_dim of a format that does not store it. A fraction, if the heads do not divide the channels."""
    head_dim = config.hidden_size / config.num_attention_heads
    return int(head_dim) if head_dim.is_integer() else head_dim


def check_supported(config: PreTrainedConfig, fixed_fields: dict[str, object], format_name: str) -> None:
    """Raise ValueError if a field of the model differs from the only value that a format supports.

    fixed_fields: field, one of `FORMATS_WITH` -> its only value. The message names the formats that store the field.
    """
    for name, supported in fixed_fields.items():
        if (value := getattr(config, name)) != supported:
            raise InputError(
                f"{name} must be {supported!r} in the {format_name} format, got {value!r}. Formats that store this "
                f"value: {', '.join(FORMATS_WITH[name])}."
            )


def check_field(config: dict, name: str, supported: tuple, default: object = None) -> None:
    """Raise ValueError if a field of config.json has an unsupported value. A missing field has the default."""
    value = config.get(name, default)
    if value not in supported:
        raise InputError(f"config.json: {name} must be {' or '.join(map(repr, supported))}, got {value!r}.")
