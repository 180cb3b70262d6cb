"""Keys on the convex hull by head dimension, and the largest attention that a key on it and a key inside it can get:
softmax over dot products, softmax over Euclidean distances, stick-breaking.

Keys are normal, with unit variance around a mean of a given norm, the oldest first, or those that the layers of a
trained model make of text; the query is newer than all and may be any vector of a bounded norm. `key_hull` says what is
maximised.
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
from pydantic import Field

from megatron_sb.experiments import key_hull, sweep, tables, trained
from megatron_sb.training.config import ConfigError, load_config, load_fields
from megatron_sb.training.config.types import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Seed, section
from megatron_sb.training.report import hardware

LABELS = {"softmax": "softmax", "euclidean": "softmax, Euclidean", "stick_breaking": "stick-breaking"}
PLACES = {"hull": "on the hull", "interior": "inside"}

HeadDim = Annotated[PositiveInt, Field(ge=2, le=key_hull.MAX_HEAD_DIM)]
NumKeys = Annotated[PositiveInt, Field(ge=16)]


@section
class StolenAttentionConfig(Section):
    """Every head dimension with every number of keys and every mean. draws: sets of keys for each of those.

    run: the folder of a finished run whose first stick-breaking model has heads of at most 8 channels; each of its
    layers then gives the keys of one window of validation text, a set for each head, of every number of keys.
    """

    head_dims: tuple[HeadDim, ...]
    num_keys: tuple[NumKeys, ...]
    key_means: tuple[NonNegativeFloat, ...] = (0.0,)
    draws: PositiveInt = 1
    query_norm: PositiveFloat = 256.0
    run: str | None = None
    seed: Seed = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace) -> int:
    """Measure what the configuration says; see `megatron_sb.experiments.main`."""
    config = load_fields(StolenAttentionConfig, options.config, options.set)
    for name in ("head_dims", "num_keys", "key_means"):
        if not getattr(config, name):
            raise ConfigError(f"{name} = []: at least one is needed")
    out = sweep.output_folder(options)
    begin = time.monotonic()
    sets = [
        ({"key_mean": key_mean}, draw_keys(config, head_dim, num_keys, key_mean))
        for head_dim in config.head_dims
        for num_keys in config.num_keys
        for key_mean in config.key_means
    ]
    sets += trained_keys(Path(config.run), config.num_keys) if config.run else []
    with trained.threads(1):  # matrices of a few hundred rows: a second thread costs more than it does
        entries, device = [measure(draws, config.query_norm) | about for about, draws in sets], hardware("cpu", ranks=1)
    results = {"config": dataclasses.asdict(config), "seconds": round(time.monotonic() - begin, 1), "entries": entries}
    tables.write_results(out, results, table(entries), draw(entries, config), device)
    return 0


def draw_keys(config: StolenAttentionConfig, head_dim: int, num_keys: int, key_mean: float) -> list[torch.Tensor]:
    """The draws: (num_keys, head_dim) float64 each. All means have the same draws, and all have one direction."""
    generator = torch.Generator().manual_seed(config.seed)
    shift = key_mean * torch.ones(head_dim, dtype=torch.float64) / math.sqrt(head_dim)
    shape = (num_keys, head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) + shift for _ in range(config.draws)]


def trained_keys(run: Path, num_keys: Sequence[int]) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
    """By layer (from 1) and number of keys: the last keys of a window, as long ones as the scale of the logits makes
    them, a (n, head_dim) float64 for each head. Of keys that are the same, which a first layer makes of the same
    tokens, the newest alone is left.

    Raises ValueError for a run without such a model, or whose windows are shorter.
    """
    from megatron_sb.training.data import load_corpus, pack
    from megatron_sb.training.evaluate import choose_windows

    config = trained.on_one_rank(load_config(run / "config.yaml"))
    able = trained.plain_sticks(config)
    if config.data.kind == "recall" or not able or config.model.head_dim > key_hull.MAX_HEAD_DIM:
        raise ValueError(
            f"run is {str(run)!r}, on {config.data.kind!r} with model.head_dim = {config.model.head_dim} and the "
            f"stick-breaking models {able}; text, a head_dim of at most {key_hull.MAX_HEAD_DIM} and one such model are "
            "allowed"
        )
    corpus = load_corpus(config)
    window = choose_windows(corpus, config)[0]
    if max(num_keys) >= len(window):
        raise ValueError(
            f"num_keys is {list(num_keys)}; up to {len(window) - 1}, run's longest evaluated length, is allowed"
        )
    with trained.trained_engine(run, config, able[0]) as engine:
        layers = engine.attention_inputs(pack([window], 1, corpus.end_of_document))
    found = []
    for layer, inputs in enumerate(layers, start=1):
        for count in num_keys:
            heads = (inputs.scale * inputs.key[-count:].double()).unbind(dim=1)
            found.append(({"layer": layer}, [_without_repetitions(keys) for keys in heads]))
    return found


def _without_repetitions(keys: torch.Tensor) -> torch.Tensor:
    newest = {tuple(key): index for index, key in enumerate(keys.tolist())}
    return keys[sorted(newest.values())]


def measure(draws: list[torch.Tensor], query_norm: float) -> dict[str, Any]:
    """What sets of keys of one shape, head_dim and num_keys, have in common.

    on_hull: the share of their keys. attention: by its name, the mean and the largest of the most attention that a key
    can get, on the hull and inside (None where no key is), and by_age: the mean over keys of ages 1 (the newest), 2,
    3 to 4, 5 to 8 and so on.
    """
    hull = np.stack([key_hull.on_hull(keys.numpy()) for keys in draws])
    octave = np.ceil(np.log2(np.arange(hull.shape[1], 0, -1))).astype(int)
    attention = {}
    for name in key_hull.ATTENTIONS:
        most = np.stack([key_hull.largest_attention(keys, name, query_norm).numpy() for keys in draws])
        attention[name] = {"hull": _mean_and_max(most[hull]), "interior": _mean_and_max(most[~hull])}
        attention[name]["by_age"] = [float(most[:, octave == age].mean()) for age in range(octave.max() + 1)]
    num_keys, head_dim = draws[0].shape
    return {"head_dim": head_dim, "num_keys": num_keys, "on_hull": float(hull.mean()), "attention": attention}


def table(entries: list[dict[str, Any]]) -> str:
    """In Markdown, a row for each shape and mean: mean (and maximum) over keys of the most attention they can get."""
    heads = ["head_dim", "keys", "of", "on the hull"]
    heads += [f"{LABELS[name]}: {PLACES[place]}" for name in key_hull.ATTENTIONS for place in PLACES]
    rows = []
    for entry in entries:
        source = f"layer {entry['layer']}" if "layer" in entry else f"a mean of norm {entry['key_mean']:g}"
        cells = [str(entry["head_dim"]), str(entry["num_keys"]), source, f"{entry['on_hull']:.0%}"]
        for name in key_hull.ATTENTIONS:
            found = [entry["attention"][name][place] for place in PLACES]
            cells += ["" if of is None else f"{of['mean']:.3f} ({of['max']:.3f})" for of in found]
        rows.append(cells)
    return tables.markdown_table(heads, rows)


def draw(entries: list[dict[str, Any]], config: StolenAttentionConfig) -> Any:
    """Of keys that were drawn: share on the hull; most attention by head dimension with the most keys; and by age."""
    from megatron_sb.training.plots import pyplot

    figure, (shares, by_dim, by_age) = pyplot.subplots(1, 3, figsize=(14, 5))
    entries = [entry for entry in entries if "key_mean" in entry]
    first_mean, most_keys = config.key_means[0], max(config.num_keys)
    for num_keys in config.num_keys:
        found = [e for e in entries if (e["num_keys"], e["key_mean"]) == (num_keys, first_mean)]
        shares.plot([e["head_dim"] for e in found], [e["on_hull"] for e in found], "o-", label=f"{num_keys} keys")
    oldest_dim = config.head_dims[len(config.head_dims) // 2]
    for index, name in enumerate(key_hull.ATTENTIONS):
        for mean, marker in zip(config.key_means, "os^v", strict=False):
            if name != "stick_breaking" and mean != first_mean:
                continue  # a mean changes nothing there
            found = [e for e in entries if (e["num_keys"], e["key_mean"]) == (most_keys, mean)]
            label = LABELS[name] + (f", mean of norm {mean:g}" if name == "stick_breaking" else "")
            look = {"color": f"C{index}", "marker": marker, "markersize": 4}
            for place, style in (("hull", "-"), ("interior", ":")):
                here = [e for e in found if e["attention"][name][place] is not None]
                values = [e["attention"][name][place]["mean"] for e in here]
                by_dim.plot([e["head_dim"] for e in here], values, style, label=f"{label}: {PLACES[place]}", **look)
            ages = next(e["attention"][name]["by_age"] for e in found if e["head_dim"] == oldest_dim)
            by_age.plot([2**age for age in range(len(ages))], ages, "-", label=label, **look)
    shares.set(xlabel="head dimension", ylabel="share of keys on the convex hull", ylim=(0, 1.02))
    by_dim.set(xlabel=f"head dimension ({most_keys} keys)", ylabel="most attention a key can get, mean", ylim=(0, 1.02))
    by_age.set(xlabel=f"age of the key, up to (head dimension {oldest_dim}, {most_keys} keys)", ylim=(0, 1.02))
    by_age.set_xscale("log", base=2)
    for axes in (shares, by_dim, by_age):
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
        axes.grid(alpha=0.3)
    return figure


def _mean_and_max(values: np.ndarray) -> dict[str, float] | None:
    return {"mean": float(values.mean()), "max": float(values.max())} if values.size else None
