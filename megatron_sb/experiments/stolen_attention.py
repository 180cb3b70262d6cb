"""Measure which keys lie on their convex hull and how much attention a key on it and a key inside it can receive.

The attentions are softmax over dot products, softmax over Euclidean distances, and stick-breaking. Keys, oldest first,
are normally distributed with unit variance around a mean of a given norm, or come from the layers of a trained model.
The query is newer than all keys; its norm is bounded. `key_hull` defines the maximum.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pandas import DataFrame
from pydantic import Field

from megatron_sb.experiments import key_hull, sweep, tables, trained
from megatron_sb.training import loading
from megatron_sb.training.config import ConfigError, load_fields
from megatron_sb.training.config.types import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Seed, section
from megatron_sb.training.report import hardware
from megatron_sb.validation import InputError

LABELS = {"softmax": "softmax", "euclidean": "softmax, Euclidean", "stick_breaking": "stick-breaking"}
PLACES = {"hull": "on the hull", "interior": "inside"}

HeadDim = Annotated[PositiveInt, Field(ge=2, le=key_hull.MAX_HEAD_DIM)]
NumKeys = Annotated[PositiveInt, Field(ge=16)]


@section
class StolenAttentionConfig(Section):
    """Configuration of the experiment: every head dimension with every number of keys and every mean.

    Attributes:
        head_dims: head dimensions, 2 to 8. Required.
        num_keys: numbers of keys, at least 16. Required.
        key_means: norms of the mean of the keys. Default (0,).
        draws: sets of keys for each combination. Default 1.
        query_norm: largest norm of the query, including the scale of the logits. Default 256.
        run: folder of a finished run with head_dim of at most 8. Default None. Each layer of its first stick-breaking
            model adds the keys of one window of validation text: one set per head, for every number of keys.
        seed: seed of the random keys. Default 0.
    """

    head_dims: tuple[HeadDim, ...]
    num_keys: tuple[NumKeys, ...]
    key_means: tuple[NonNegativeFloat, ...] = (0.0,)
    draws: PositiveInt = 1
    query_norm: PositiveFloat = 256.0
    run: str | None = None
    seed: Seed = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(options: argparse.Namespace) -> int:
    """Measure all sets of keys and write the results. Return the exit status."""
    config = load_fields(StolenAttentionConfig, options.config, options.set)
    for name in ("head_dims", "num_keys", "key_means"):
        if not getattr(config, name):
            raise ConfigError(f"{name} must have at least one value, got [].")
    out = sweep.output_folder(options)
    start = time.monotonic()
    sets = [
        ({"key_mean": key_mean}, draw_keys(config, head_dim, num_keys, key_mean))
        for head_dim in config.head_dims
        for num_keys in config.num_keys
        for key_mean in config.key_means
    ]
    sets += trained_keys(Path(config.run), config.num_keys) if config.run else []
    with trained.threads(1):  # with a few hundred rows a second thread makes the measurement slower
        entries, device = (
            [measure(draws, config.query_norm) | source for source, draws in sets],
            hardware("cpu", ranks=1),
        )
    results = {"config": dataclasses.asdict(config), "seconds": round(time.monotonic() - start, 1), "entries": entries}
    tables.write_results(out, results, to_table(entries), draw(entries, config), device)
    return 0


def draw_keys(config: StolenAttentionConfig, head_dim: int, num_keys: int, key_mean: float) -> list[torch.Tensor]:
    """Return `draws` sets of keys, (num_keys, head_dim) float64 each. The draws are the same for every key_mean."""
    generator = torch.Generator().manual_seed(config.seed)
    shift = key_mean * torch.ones(head_dim, dtype=torch.float64) / math.sqrt(head_dim)
    shape = (num_keys, head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) + shift for _ in range(config.draws)]


def trained_keys(run: Path, num_keys: Sequence[int]) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Return the last keys of a window for every layer (from 1) and number of keys.

    Each set has one (n, head_dim) float64 tensor per head, multiplied by the scale of the logits. The first layer maps
    equal tokens to equal keys; only the newest of equal keys is kept.

    Raise ValueError if the run has no such model or its windows are too short.
    """
    from megatron_sb.training.data import pack
    from megatron_sb.training.documents import load_corpus
    from megatron_sb.training.evaluate import choose_windows

    config = loading.on_one_rank(loading.config_of(run))
    models = trained.plain_stickbreaking_models(config)
    if config.data.kind == "recall" or not models or config.model.head_dim > key_hull.MAX_HEAD_DIM:
        raise InputError(
            f"run must have text, model.head_dim of at most {key_hull.MAX_HEAD_DIM} and a stick-breaking model without "
            f"forget gates, reach and Euclidean logits, got {str(run)!r} with data.kind = {config.data.kind!r}, "
            f"model.head_dim = {config.model.head_dim} and the models {models}."
        )
    corpus = load_corpus(config)
    window = choose_windows(corpus, config)[0]
    if max(num_keys) >= len(window):
        raise InputError(
            f"num_keys must be at most {len(window) - 1}, the longest evaluated length of the run, got "
            f"{list(num_keys)}."
        )
    with loading.trained_engine(run, config, models[0]) as engine:
        layers = engine.attention_inputs(pack([window], 1, corpus.end_of_document))
    sets = []
    for layer, inputs in enumerate(layers, start=1):
        for count in num_keys:
            heads = (inputs.scale * inputs.key[-count:].double()).unbind(dim=1)
            sets.append(({"layer": layer}, [_newest_of_equal_keys(keys) for keys in heads]))
    return sets


def _newest_of_equal_keys(keys: torch.Tensor) -> torch.Tensor:
    newest = {tuple(key): index for index, key in enumerate(keys.tolist())}
    return keys[sorted(newest.values())]


def measure(draws: list[torch.Tensor], query_norm: float) -> dict[str, Any]:
    """Measure sets of keys of one shape.

    Returns {"head_dim", "num_keys", "on_hull": share of keys on the hull, "attention": {name: {"hull", "interior",
    "by_age"}}}. "hull" and "interior" are the mean and the maximum over keys of the largest attention that a key can
    receive; None without such a key. "by_age" is the mean over keys of ages 1 (the newest), 2, 3 to 4, 5 to 8, ....
    """
    hull = np.stack([key_hull.on_hull(keys.numpy()) for keys in draws])
    age_class = np.ceil(np.log2(np.arange(hull.shape[1], 0, -1))).astype(int)
    attention = {}
    for name in key_hull.ATTENTIONS:
        largest = np.stack([key_hull.largest_attention(keys, name, query_norm).numpy() for keys in draws])
        attention[name] = {"hull": _mean_and_max(largest[hull]), "interior": _mean_and_max(largest[~hull])}
        attention[name]["by_age"] = [float(largest[:, age_class == age].mean()) for age in range(age_class.max() + 1)]
    num_keys, head_dim = draws[0].shape
    return {"head_dim": head_dim, "num_keys": num_keys, "on_hull": float(hull.mean()), "attention": attention}


def to_table(entries: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the mean (and the maximum) over keys of the largest attention they can receive."""
    headers = ["head_dim", "keys", "of", "on the hull"]
    headers += [f"{LABELS[name]}: {PLACES[place]}" for name in key_hull.ATTENTIONS for place in PLACES]
    rows = []
    for entry in entries:
        source = f"layer {entry['layer']}" if "layer" in entry else f"a mean of norm {entry['key_mean']:g}"
        cells = [str(entry["head_dim"]), str(entry["num_keys"]), source, f"{entry['on_hull']:.0%}"]
        for name in key_hull.ATTENTIONS:
            for values in (entry["attention"][name][place] for place in PLACES):
                cells.append("" if values is None else f"{values['mean']:.3f} ({values['max']:.3f})")
        rows.append(cells)
    return tables.to_markdown(DataFrame(rows, columns=headers))


def draw(entries: list[dict[str, Any]], config: StolenAttentionConfig) -> Any:
    """Draw the share of keys on the hull, and the largest attention by head dimension and by age, of drawn keys."""
    from megatron_sb.training.plots import pyplot

    figure, (shares, by_dim, by_age) = pyplot.subplots(1, 3, figsize=(14, 5))
    entries = [entry for entry in entries if "key_mean" in entry]
    first_mean, most_keys = config.key_means[0], max(config.num_keys)
    for num_keys in config.num_keys:
        found = [e for e in entries if (e["num_keys"], e["key_mean"]) == (num_keys, first_mean)]
        shares.plot([e["head_dim"] for e in found], [e["on_hull"] for e in found], "o-", label=f"{num_keys} keys")
    shown_dim = config.head_dims[len(config.head_dims) // 2]
    for index, name in enumerate(key_hull.ATTENTIONS):
        for mean, marker in zip(config.key_means, "os^v", strict=False):
            if name != "stick_breaking" and mean != first_mean:
                continue  # a common mean does not change softmax
            found = [e for e in entries if (e["num_keys"], e["key_mean"]) == (most_keys, mean)]
            label = LABELS[name] + (f", mean of norm {mean:g}" if name == "stick_breaking" else "")
            line_style = {"color": f"C{index}", "marker": marker, "markersize": 4}
            for place, style in (("hull", "-"), ("interior", ":")):
                here = [e for e in found if e["attention"][name][place] is not None]
                values = [e["attention"][name][place]["mean"] for e in here]
                by_dim.plot(
                    [e["head_dim"] for e in here], values, style, label=f"{label}: {PLACES[place]}", **line_style
                )
            ages = next(e["attention"][name]["by_age"] for e in found if e["head_dim"] == shown_dim)
            by_age.plot([2**age for age in range(len(ages))], ages, "-", label=label, **line_style)
    shares.set(xlabel="head dimension", ylabel="share of keys on the convex hull", ylim=(0, 1.02))
    by_dim.set(
        xlabel=f"head dimension ({most_keys} keys)", ylabel="largest attention a key can receive, mean", ylim=(0, 1.02)
    )
    by_age.set(xlabel=f"age of the key, up to (head dimension {shown_dim}, {most_keys} keys)", ylim=(0, 1.02))
    by_age.set_xscale("log", base=2)
    for axes in (shares, by_dim, by_age):
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
        axes.grid(alpha=0.3)
    return figure


def _mean_and_max(values: np.ndarray) -> dict[str, float] | None:
    return {"mean": float(values.mean()), "max": float(values.max())} if values.size else None
