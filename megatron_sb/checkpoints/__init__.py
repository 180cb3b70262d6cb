"""Convert checkpoints of stick-breaking models between formats. Every weight keeps its bits, except folded ones.

    megatron-sb convert SOURCE OUT --to huggingface

Every conversion goes through `StickBreakingForCausalLM`. The formats are "huggingface" (that model), "megatron"
(Megatron-Core's distributed checkpoints), "dolomite" (dolomite-engine, lm-engine) and "fla" (flash-linear-attention).
"megatron" and "fla" have no fields for the multipliers of muP: `save` folds these into the weights (`multipliers`).
Models with softmax attention can be read too, with `swap_attention`: "llama", and "megatron" checkpoints of such runs.
A "llama" without positions already has stick-breaking attention, and is read without `swap_attention`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import GenerationConfig

from megatron_sb.checkpoints import dolomite, files, fla, llama, multipliers, runs
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
from megatron_sb.megatron.integrity import CheckpointError, cause_of
from megatron_sb.training.config import SoftmaxAttentionConfig, load_config
from megatron_sb.validation import InputError, MissingFileError, check_output_folder, read_json_object

FORMATS = ("huggingface", "megatron", "dolomite", "fla")


def format_of(source: str | Path) -> str:
    """Return the format of a checkpoint folder.

    Args:
        source: folder of the checkpoint.

    Returns:
        One of `FORMATS`, or "llama", which `load` reads with swap_attention, or without it if it has no positions.

    Raises:
        FileNotFoundError: if the folder does not exist, or has neither a config.json nor a distributed checkpoint.
        ValueError: if model_type in config.json belongs to none of the formats.

    Example:
        >>> import tempfile
        >>> from megatron_sb import checkpoints
        >>> from megatron_sb.huggingface import StickBreakingConfig
        >>> folder = tempfile.mkdtemp()
        >>> StickBreakingConfig().save_pretrained(folder)
        >>> checkpoints.format_of(folder)
        'huggingface'
    """
    source = _existing_folder(source)
    if runs.find_checkpoint(source) is not None:
        return "megatron"
    model_type = files.read_config(source).get("model_type")
    if model_type == StickBreakingConfig.model_type:
        return "huggingface"
    if model_type == fla.MODEL_TYPE:
        return "fla"
    if model_type == llama.MODEL_TYPE:
        return "llama"
    if model_type in dolomite.MODEL_TYPES:
        return "dolomite"
    known = (StickBreakingConfig.model_type, fla.MODEL_TYPE, llama.MODEL_TYPE, *dolomite.MODEL_TYPES)
    raise InputError(f"{source}/config.json: model_type must be one of {', '.join(known)}, got {model_type!r}.")


def load(
    source: str | Path,
    config: str | Path | None = None,
    swap_attention: bool = False,
    kv_heads: str | None = None,
) -> StickBreakingForCausalLM:
    """Read a model in any of `FORMATS` onto the CPU.

    Args:
        source: folder of the checkpoint; its format is detected. For a run of `megatron-sb train`, or one of its
            models, the newest checkpoint is read.
        config: configuration of a "megatron" checkpoint, because such a checkpoint does not contain it. It is a
            training configuration (YAML), or the folder or config.json of a "huggingface" model. Default: config.yaml
            of the run that contains the checkpoint.
        swap_attention: read the weights of a model with softmax attention, "llama" or a "megatron" checkpoint of
            such a run, and give it stick-breaking attention. The weights were trained for softmax, so the model needs
            training. Must be False for a "llama" without positions. Default False.
        kv_heads: which KV head a query head n of a "dolomite" model reads: "grouped", n // (heads / kv_heads), or
            "tiled", n % kv_heads. Required if the model has more than one KV head and fewer than query heads, unless
            config.json records it, as in folders that `save` wrote. Default None.

    Returns:
        The model in eval mode, with the dtype of its weights.

    Raises:
        FileNotFoundError: if `source` does not exist, has no config.json or no weights, or `config` does not exist.
        ValueError: if an option cannot be converted, or a weight is missing, unexpected or of the wrong shape. Or if
            `config` is given for a format that stores its configuration. Or if the model has softmax attention without
            swap_attention, or stick-breaking attention with it. Or if kv_heads is missing, unknown, contradicts
            config.json, or is given for another format. Or if `config` has multipliers, because the format "megatron"
            has no multipliers.

    Example:
        >>> import tempfile
        >>> from megatron_sb import checkpoints
        >>> from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
        >>> model = StickBreakingForCausalLM(StickBreakingConfig(vocab_size=8, hidden_size=128, num_hidden_layers=1))
        >>> folder = tempfile.mkdtemp()
        >>> checkpoints.save(model, f"{folder}/fla", "fla")
        >>> checkpoints.load(f"{folder}/fla").config.hidden_size
        128
    """
    source = _existing_folder(source)
    source_format = format_of(source)
    if config is not None and source_format != "megatron":
        raise InputError(f"config must be None for a {source_format} folder, which has its own, got {str(config)!r}.")
    if kv_heads is not None and source_format != "dolomite":
        raise InputError(f"kv_heads must be None for a {source_format} folder, got {kv_heads!r}.")
    if source_format != "megatron":  # there the configuration tells
        _check_swap(swap_attention, source_format == "llama" and not llama.is_stick_breaking(source), source)
    if source_format == "huggingface":
        model_config, weights = files.model_config(source / "config.json"), files.read_tensors(source)
    elif source_format == "megatron":
        from megatron_sb.checkpoints import megatron
        from megatron_sb.megatron.weights import read_weights

        source = runs.find_checkpoint(source)
        found = read_weights(source)
        files.check_no_weights(source, "Missing weights", {megatron.EMBEDDING} - found.keys())
        files.check_shape(source, megatron.EMBEDDING, found[megatron.EMBEDDING], (None, None))
        model_config = _megatron_config(source, config, len(found[megatron.EMBEDDING]), swap_attention)
        _check_heads(source, model_config, config)
        weights = megatron.to_ours(found, model_config, source)
    else:
        with files.naming_config(source / "config.json"):
            if source_format == "dolomite":
                model_config, weights = dolomite.load(source, kv_heads)
            else:
                model_config, weights = {"fla": fla, "llama": llama}[source_format].load(source)
    model = _model_with_weights(model_config, weights, source)
    if (source / "generation_config.json").exists():  # of every format that transformers wrote
        with files.naming_config(source / "generation_config.json"):
            read_json_object(source / "generation_config.json")  # its error names the file
            # Not from_dict: transformers refuses to save some values, except in a configuration that was read here.
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def check_target(out: str | Path, to: str) -> None:
    """Check the arguments of `save` before a model is read.

    Args:
        out: folder to be written.
        to: format to be written, one of `FORMATS`.

    Raises:
        ValueError: if `to` is not one of `FORMATS`, or `out` exists or cannot be created.

    Example:
        >>> from megatron_sb import checkpoints
        >>> checkpoints.check_target("a-new-folder", "dolomite")
    """
    if to not in FORMATS:
        raise InputError(f"to must be one of {', '.join(map(repr, FORMATS))}, got {to!r}.")
    if out == "":  # as of a shell's variable that is not set
        raise InputError("out must be a new folder, got ''.")
    if os.path.lexists(out):  # also a link to a folder that does not exist: a folder cannot replace it
        raise InputError(f"out must be a new folder, got {str(out)!r}, which exists.")
    if Path(out).name == "..":  # its folder does not exist yet, so this one is not found above
        raise InputError(f"out must be a new folder, got {str(out)!r}.")
    check_output_folder("out", Path(out))


def save(model: StickBreakingForCausalLM, out: str | Path, to: str, tokenizer: str | Path | None = None) -> None:
    """Write a model to a new folder. If writing fails, neither the folder nor a parent made for it exists.

    Args:
        model: the model; its weights keep their dtype. "megatron" and "fla" have no fields for multipliers:
            `multipliers.fold` multiplies the weights by them, and rounds each of these weights once.
        out: folder to be written; it must not exist.
        to: format to be written, one of `FORMATS`.
        tokenizer: folder with the files of a tokenizer, which are copied. Default: none.

    Raises:
        FileNotFoundError: if `tokenizer` is not a folder.
        ValueError: if `model` is not a `StickBreakingForCausalLM`, `to` is not one of `FORMATS`, `out` exists or is
            being written by another process, or the model has an option that the format does not support. Or if the
            weights are not those that the model's configuration describes, as with adapters. Or if a multiplier cannot
            be folded: it is 0 or not finite, or a weight overflows its dtype.
        CheckpointError: if the folder cannot be written, for example because the disk is full.

    Example:
        >>> import tempfile
        >>> from megatron_sb import checkpoints
        >>> from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
        >>> model = StickBreakingForCausalLM(StickBreakingConfig(vocab_size=8, hidden_size=128, num_hidden_layers=1))
        >>> folder = tempfile.mkdtemp()
        >>> checkpoints.save(model, f"{folder}/dolomite", "dolomite")
        >>> checkpoints.format_of(f"{folder}/dolomite")
        'dolomite'
    """
    check_target(out, to)
    if not isinstance(model, StickBreakingForCausalLM):
        raise InputError(f"model must be a StickBreakingForCausalLM, got {type(model).__name__}.")
    _check_model(model)
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise MissingFileError(f"tokenizer must be a folder, got {str(tokenizer)!r}.")
    out = Path(out)
    temporary = out.with_name(f".{out.name}.tmp")
    new_parents = [parent for parent in out.absolute().parents if not parent.exists()]  # innermost first
    try:
        with files.new_folder(temporary):
            _save(model, temporary, to)
            files.give_usual_modes(temporary)
            if tokenizer is not None:
                files.copy_tokenizer(Path(tokenizer), temporary)
            temporary.rename(out)
    except (OSError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"{out} could not be written: {cause_of(error)}") from error
    finally:
        for parent in new_parents:
            with contextlib.suppress(OSError):  # it does not exist, or holds `out`
                parent.rmdir()


def _save(model: StickBreakingForCausalLM, folder: Path, to: str) -> None:
    if to == "huggingface":
        model.save_pretrained(folder)
        return
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if to == "megatron":
        from megatron_sb.checkpoints import megatron

        megatron.save(model.config, weights, folder)
    else:
        (fla if to == "fla" else dolomite).save(model.config, weights, folder)


def _check_model(model: StickBreakingForCausalLM) -> None:
    """Raise ValueError unless a model has the weights that its configuration describes.

    A folder with other weights, such as those of adapters, could not be read. A second output layer would be lost.
    """
    with torch.device("meta"):
        described = StickBreakingForCausalLM(copy.deepcopy(model.config)).state_dict()
    expected, found = ({name: tuple(x.shape) for name, x in y.items()} for y in (described, model.state_dict()))
    for name in sorted(expected.keys() | found.keys()):
        wanted, got = (shapes.get(name, "no such weight") for shapes in (expected, found))
        if wanted != got:
            advice = "" if name in expected else " Merge adapters into the weights first."
            raise InputError(
                f"model must have the weights that its configuration describes, for {name} {wanted}, got {got}.{advice}"
            )
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    is_tied = model.config.tie_word_embeddings
    if is_tied and not (head is embedding or torch.equal(head, embedding)):
        raise InputError(
            "model.config.tie_word_embeddings must be False if the output layer differs from the embedding."
        )
    if not is_tied and head is embedding:
        raise InputError(
            "model.config.tie_word_embeddings must be True if the output layer is the embedding, got False."
        )


def _existing_folder(source: str | Path) -> Path:
    source = Path(source)
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise MissingFileError(
            f"source must be the folder of a checkpoint or a run, got {str(source)!r}, which {what}."
        )
    return source


def _check_swap(swap_attention: bool, is_softmax: bool, source: Path) -> None:
    """Raise ValueError unless swap_attention is set exactly for a model with softmax attention."""
    if is_softmax and not swap_attention:
        raise InputError(
            f"swap_attention must be True (--swap-attention) to read {source}, which has softmax attention, got False. "
            "Its weights were trained for softmax, so the result needs training."
        )
    if swap_attention and not is_softmax:
        raise InputError(
            f"swap_attention must be False to read {source}, which has stick-breaking attention, got True."
        )


def _megatron_config(
    source: Path, config: str | Path | None, vocab_size: int, swap_attention: bool
) -> StickBreakingConfig:
    from megatron_sb.checkpoints import megatron
    from megatron_sb.megatron.weights import check_scale_once, read_attention_kind
    from megatron_sb.training.initial_checkpoint import attention_kind

    path = source.resolve().parent.parent.parent / "config.yaml" if config is None else Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists() and config is None:
        raise MissingFileError(
            "config must be the training configuration (YAML) or the folder of a Hugging Face model of the same sizes "
            f"(--config), got None: a Megatron checkpoint does not hold its configuration, and {source} is not in the "
            f"folder of a run, because there is no {path}."
        )
    if not path.exists():
        what = "has no config.json" if Path(config).is_dir() else "is missing"
        raise MissingFileError(
            "config must be a training configuration (YAML), or the folder or config.json of a Hugging Face model, got "
            f"{config}, which {what}."
        )
    if path.suffix == ".json":
        kind = attention_kind(source)
        if kind is not None:  # Megatron-LM's scripts record none
            megatron.check_one_kind(kind, source)
            _check_swap(swap_attention, kind == "softmax", source)
        model_config = files.model_config(path)
        megatron.check_one_epsilon(model_config)
        multipliers.check_none(model_config, "megatron")
        return model_config
    training = load_config(path)
    attention = megatron.attention_of(training, source)
    recorded = read_attention_kind(source)  # a folder that was moved out of its run does not name its model
    if recorded is not None and recorded != attention.kind:
        megatron.check_one_kind(recorded, source)
        if recorded != "softmax":
            raise InputError(
                f"config must describe the model in {source}, whose attention is {recorded!r}, got {str(path)!r}, "
                f"where it is {attention.kind!r}."
            )
        attention = SoftmaxAttentionConfig()
    _check_swap(swap_attention, attention.kind == "softmax", source)
    if attention.kind != "softmax":
        check_scale_once(source, f"{path}: the scale of the model's attention", attention.scale)
    return megatron.config_of(training, attention, vocab_size)


def _check_heads(source: Path, model_config: StickBreakingConfig, config: str | Path | None) -> None:
    """Raise ValueError if a checkpoint records other heads. Its weights have the same shapes with other heads."""
    from megatron_sb.checkpoints import megatron
    from megatron_sb.training.initial_checkpoint import recorded_heads

    own = megatron.heads_of(model_config)
    for name, found in recorded_heads(source).items():
        if found != own[name]:
            raise InputError(
                f"config must describe the model in {source}, whose {name} is {found}, got {str(config)!r}, where it "
                f"is {own[name]}."
            )


def _model_with_weights(config: StickBreakingConfig, weights: dict, source: Path) -> StickBreakingForCausalLM:
    """Build a model from weights. Raise ValueError if names, shapes or dtypes do not fit."""
    if config.tie_word_embeddings:
        weights = _with_tied_output_layer(weights, source)
    dtypes = {tensor.dtype for tensor in weights.values()}
    with torch.device("meta"):
        model = StickBreakingForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    files.check_no_weights(source, "Missing weights", shapes.keys() - weights.keys())
    files.check_no_weights(source, "Unexpected weights", weights.keys() - shapes.keys())
    misshapen = [
        f"{name} (must be {tuple(shape)}, got {tuple(weights[name].shape)})"
        for name, shape in shapes.items()
        if weights[name].shape != shape
    ]
    files.check_no_weights(source, "Weights of the wrong shape", misshapen)
    integers = [
        f"{name} (must be floating-point numbers, got {tensor.dtype})"
        for name, tensor in weights.items()
        if not tensor.is_floating_point()
    ]
    files.check_no_weights(source, "Weights of the wrong dtype", integers)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    config.dtype = dtypes.pop() if len(dtypes) == 1 else None
    return model.eval()


def _with_tied_output_layer(weights: dict, source: Path) -> dict:
    """Add the embedding as the output layer. Raise ValueError if the weights hold another output layer."""
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if embedding is None:
        return weights
    if head is not None and (head.dtype != embedding.dtype or not torch.equal(head, embedding)):
        raise InputError(f"{source}: tie_word_embeddings must be False if the output layer differs from the embedding.")
    return weights | {"lm_head.weight": embedding}
