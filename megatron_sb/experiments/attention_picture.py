"""Attention of a trained model, drawn: where it looks to recall what a key was assigned last (Tan et al.,
arXiv 2410.17980, Fig. 4).

The weights are the definition's (`reference`), from the queries and keys that the model made. Two layers solve it: in
the first a value finds the key before it, in the second a key that is met again finds its latest value by that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_sb.experiments import sweep, tables, trained
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config

SEQUENCE = "B 6 P 4 E 3 X 1 Z 2 E 2 B 1 E 5 B 4"  # the paper's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside those of every experiment."""
    parser.add_argument(
        "--sequence", default=SEQUENCE, metavar="TEXT", help=f"keys (words) and values (numbers) by turns: {SEQUENCE!r}"
    )
    parser.add_argument("--model", metavar="NAME", help="one of the configuration's compare (default: the first)")


def run(options: argparse.Namespace) -> int:
    """Train unless CONFIG is that of a finished run, look, write table and picture; 0."""
    config = load_config(options.config, options.set)
    model = options.model or config.compare[0]
    if model not in (able := trained.plain_sticks(config)):
        raise ConfigError(
            f"--model is {model!r}; the stick-breaking models of compare without gates and Euclidean logits are "
            f"allowed: {able}"
        )
    words = options.sequence.split()
    batch = tokens_of(words, config)
    alone = trained.on_one_rank(config)
    with trained.trained_engine(trained.trained_run(options, config), alone, model) as engine:
        likeliest, layers = engine.likeliest_tokens(batch), engine.attention_inputs(batch)
    weights = [weights_of(layer) for layer in layers]
    names = [
        f"layer {1 + layer}, head {1 + head}" for layer, by_head in enumerate(weights) for head in range(len(by_head))
    ]
    heads = dict(zip(names, (head for by_head in weights for head in by_head), strict=True))
    answers = likeliest.numpy() - config.data.num_keys
    found = [found_at(position, heads, answers, words) for position in np.flatnonzero(batch.counted)]
    results = {"model": model, "sequence": options.sequence, "queries": found}
    results["attention"] = {name: np.round(head, 4).tolist() for name, head in heads.items()}
    text, figure = table_of(found, list(heads)), draw(heads, words, found)
    tables.write_results(sweep.output_folder(options), results, text, figure, trained.device_of(alone))
    return 0


def tokens_of(words: Sequence[str], config: TrainingConfig) -> Any:
    """The batch of one sequence of keys and values by turns: words are numbered as they come, values are numbers.

    Raises ValueError for what is no such sequence, or has more keys or higher values than the configuration's data.
    """
    from megatron_sb.experiments.recall import labelled

    if config.data.kind != "recall":
        raise ConfigError(f"data.kind is {config.data.kind!r}; attention-picture needs 'recall'")
    if len(words) % 2 or not words:
        raise ValueError(f"--sequence has {len(words)} words; keys and values by turns are allowed, an even number")
    names = list(dict.fromkeys(words[::2]))
    if len(names) > config.data.num_keys:
        raise ValueError(f"--sequence has {len(names)} keys; data.num_keys = {config.data.num_keys} are allowed")
    for word in words[1::2]:
        if not word.isdecimal() or int(word) >= config.data.num_values:
            raise ValueError(f"--sequence has the value {word!r}; 0 to {config.data.num_values - 1} are allowed")
    keys = np.array([names.index(word) for word in words[::2]])
    batch = labelled(keys, config.data.num_keys + np.array([int(word) for word in words[1::2]]))
    if not batch.counted.any():
        raise ValueError("--sequence meets no key twice, so that nothing is asked; repeat one")
    return batch


def weights_of(layer: Any) -> np.ndarray:
    """A of paper eq. 1 for every head of a layer, (h, t, t) float64: row j is what query j gives to each key.

    layer: `AttentionInputs` of one sequence.
    """
    import torch

    from megatron_sb import reference

    length, num_kv_heads = layer.key.shape[:2]
    identity = torch.eye(length, dtype=torch.float64)[:, None].expand(length, num_kv_heads, length)
    settings = {"scale": layer.scale, "attend_current": layer.attend_current}
    return (
        reference.stickbreaking_attention(layer.query[None], layer.key[None], identity[None], **settings)[0]
        .transpose(0, 1)
        .numpy()
    )


def found_at(position: int, heads: dict[str, np.ndarray], answers: np.ndarray, words: Sequence[str]) -> dict[str, Any]:
    """A query's right and given answer, and for every head how much the query gives to the value that it had last, and
    that value to its key.
    """
    earlier = [at for at in range(0, position, 2) if words[at] == words[position]]
    key, value = earlier[-1], earlier[-1] + 1
    return {
        "position": int(position),
        "key": words[position],
        "right": words[value],
        "answer": str(answers[position]) if answers[position] >= 0 else "a key",
        "value_at": value,
        "query_to_value": {name: float(head[position, value]) for name, head in heads.items()},
        "value_to_key": {name: float(head[value, key]) for name, head in heads.items()},
    }


def table_of(found: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """A row for each query."""
    heads = ["query", "right", "answer"]
    heads += [f"{name}: {what}" for name in names for what in ("value to its key", "query to its value")]
    rows = []
    for entry in found:
        row = [f"{entry['key']} at {entry['position']}", entry["right"], entry["answer"]]
        for name in names:
            row += [f"{entry['value_to_key'][name]:.3f}", f"{entry['query_to_value'][name]:.3f}"]
        rows.append(row)
    return tables.markdown_table(heads, rows)


def draw(heads: dict[str, np.ndarray], words: Sequence[str], found: Sequence[dict[str, Any]]) -> Any:
    """A heat map for each head; the queries' right values are framed."""
    from megatron_sb.training.plots import pyplot

    figure, grid = pyplot.subplots(1, len(heads), figsize=(5 * len(heads), 5.4), squeeze=False)
    for (name, head), axes in zip(heads.items(), grid[0], strict=True):
        axes.imshow(head, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(words)), words)
        axes.set_yticks(range(len(words)), words)
        axes.set(title=name, xlabel="key", ylabel="query")
        for entry in found:
            corner = (entry["value_at"] - 0.5, entry["position"] - 0.5)
            axes.add_patch(pyplot.Rectangle(corner, 1, 1, fill=False, edgecolor="C3"))
    return figure
