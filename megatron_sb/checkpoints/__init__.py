"""Checkpoints of stick-breaking models from one format into another, every weight bit for bit.

    megatron-sb convert SOURCE OUT --to huggingface

All of them go through `StickBreakingForCausalLM`. Formats: "huggingface" (that model), "megatron" (Megatron-Core's
distributed checkpoints), "dolomite" (dolomite-engine, lm-engine) and "fla" (flash-linear-attention).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from megatron_sb.checkpoints import dolomite, files, fla
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
from megatron_sb.training.config import load_config

FORMATS = ("huggingface", "megatron", "dolomite", "fla")


def format_of(source: Path) -> str:
    """Which of FORMATS a folder is in. Raises ValueError where it is in none."""
    if (source / "metadata.json").exists() or (source / "latest_checkpointed_iteration.txt").exists():
        return "megatron"
    kind = files.read_config(source).get("model_type")
    if kind == StickBreakingConfig.model_type:
        return "huggingface"
    if kind == fla.MODEL_TYPE:
        return "fla"
    if kind in dolomite.MODEL_TYPES:
        return "dolomite"
    raise ValueError(f"{source}/config.json: model_type = {kind!r} is of none of the formats {', '.join(FORMATS)}")


def load(source: str | Path, config: str | Path | None = None) -> StickBreakingForCausalLM:
    """Read a model in any of FORMATS, on the CPU, with the dtype of its weights.

    config: for "megatron" alone, which does not have it: the training configuration (YAML), or the folder or
    config.json of a model of "huggingface"; by default the config.yaml of the run that the checkpoint is in.

    Raises:
        ValueError, FileNotFoundError: naming the folder, or the option that cannot be converted.
    """
    source = Path(source)
    kind = format_of(source)
    if config is not None and kind != "megatron":
        raise ValueError(f"config = {str(config)!r}: a {kind} folder has its own")
    if kind == "huggingface":
        made, weights = StickBreakingConfig.from_pretrained(source), files.read_tensors(source)
    elif kind == "megatron":
        from megatron_sb.checkpoints import megatron
        from megatron_sb.megatron.weights import read_weights

        source = megatron.newest(source)
        found = read_weights(source)
        files.refuse_weights(source, "missing", {megatron.EMBEDDING} - found.keys())
        made = _megatron_config(source, config, len(found[megatron.EMBEDDING]))
        weights = megatron.to_ours(found, made, source)
    else:
        made, weights = (fla if kind == "fla" else dolomite).load(source)
    model = _with_weights(made, weights, source)
    if kind == "huggingface" and (source / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def check_target(out: str | Path, to: str) -> None:
    """Raise ValueError where `to` is none of FORMATS or `out` exists: before a model is read, that is, for `save`."""
    if to not in FORMATS:
        raise ValueError(f"to = {to!r}; {', '.join(map(repr, FORMATS))} are allowed")
    if Path(out).exists():
        raise ValueError(f"out = {str(out)!r} exists")


def save(model: StickBreakingForCausalLM, out: str | Path, to: str) -> None:
    """Write a model in one of FORMATS to a new folder; it is there whole or not at all.

    Raises:
        ValueError: `to` is unknown, the model has what that format does not, or `out` exists.
    """
    check_target(out, to)
    out = Path(out)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _save(model, aside, to)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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


def _megatron_config(source: Path, config: str | Path | None, vocab_size: int) -> StickBreakingConfig:
    from megatron_sb.checkpoints import megatron

    path = Path(config) if config is not None else source.resolve().parent.parent.parent / "config.yaml"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: a Megatron checkpoint does not have its configuration; name the training "
            "configuration (YAML) or the folder of a Hugging Face model of these sizes"
        )
    if path.is_dir() or path.suffix == ".json":
        made = StickBreakingConfig.from_pretrained(path)
        megatron.require_one_epsilon(made)
        return made
    return megatron.config_of(load_config(path), source, vocab_size)


def _with_weights(config: StickBreakingConfig, weights: dict, source: Path) -> StickBreakingForCausalLM:
    """A model that has these weights. Raises ValueError where names or shapes are not the model's."""
    if config.tie_word_embeddings:
        weights = _tied(weights, source)
    dtypes = {tensor.dtype for tensor in weights.values()}
    with torch.device("meta"):
        model = StickBreakingForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    files.refuse_weights(source, "missing", shapes.keys() - weights.keys())
    files.refuse_weights(source, "without a place in it", weights.keys() - shapes.keys())
    others = {name: tuple(weights[name].shape) for name, shape in shapes.items() if weights[name].shape != shape}
    said = [f"{name} ({found}, not {tuple(shapes[name])})" for name, found in others.items()]
    files.refuse_weights(source, "of another shape", said)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    config.dtype = dtypes.pop() if len(dtypes) == 1 else None
    return model.eval()


def _tied(weights: dict, source: Path) -> dict:
    """The weights with the embedding as output layer too. Raises ValueError where another one comes with them."""
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if embedding is None:
        return weights
    if head is not None and (head.dtype != embedding.dtype or not torch.equal(head, embedding)):
        raise ValueError(f"{source}: tie_word_embeddings = True, but its output layer is not its embedding")
    return weights | {"lm_head.weight": embedding}
