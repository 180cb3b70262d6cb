"""Draw the attention of a trained model that recalls the latest value of a key.

Tan et al., arXiv 2410.17980, Fig. 4. `reference` computes the weights from the model's own queries and keys. Two layers
are enough. In the first layer each value attends to its key. In the second layer a repeated key attends to its latest
value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from pandas import DataFrame

from megatron_sb.experiments import sweep, tables, trained
from megatron_sb.training import loading
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config
from megatron_sb.validation import InputError

SEQUENCE = "B 6 P 4 E 3 X 1 Z 2 E 2 B 1 E 5 B 4"  # the paper's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--sequence",
        default=SEQUENCE,
        metavar="TEXT",
        help="alternating keys (words) and values (numbers) (default: %(default)r)",
    )
    parser.add_argument("--model", metavar="NAME", help="a model of compare in CONFIG (default: the first)")


def run(options: argparse.Namespace) -> int:
    """Train unless the run is finished, compute the attention, write the results. Return the exit status."""
    config = load_config(options.config, options.set)
    if config.data.kind != "recall":
        raise ConfigError(f"data.kind must be 'recall' for attention-picture, got {config.data.kind!r}.")
    what, model = "--model", options.model
    if model is None:
        what, model = "The first model of compare", config.compare[0]
    supported = trained.plain_stickbreaking_models(config)
    if model not in supported:
        raise ConfigError(
            f"{what} must be a stick-breaking model without "
            f"forget gates, reach and Euclidean logits, which are {supported}, got {model!r}."
        )
    words = options.sequence.split()
    batch = tokens_of(words, config)
    single_rank_config = loading.on_one_rank(config)
    with loading.trained_engine(trained.trained_run(options, config), single_rank_config, model) as engine:
        likeliest, layers = engine.likeliest_tokens(batch), engine.attention_inputs(batch)
    weights = [attention_weights(layer) for layer in layers]
    names = [
        f"layer {layer}, head {head}"
        for layer, layer_weights in enumerate(weights, 1)
        for head in range(1, 1 + len(layer_weights))
    ]
    heads = dict(zip(names, (head for layer_weights in weights for head in layer_weights), strict=True))
    answers = likeliest.numpy() - config.data.num_keys
    queries = [describe_query(position, heads, answers, words) for position in np.flatnonzero(batch.counted)]
    results = {"model": model, "sequence": options.sequence, "queries": queries}
    results["attention"] = {name: np.round(head, 4).tolist() for name, head in heads.items()}
    text, figure = to_table(queries, list(heads)), draw(heads, words, queries)
    tables.write_results(sweep.output_folder(options), results, text, figure, trained.device_of(single_rank_config))
    return 0


def tokens_of(words: Sequence[str], config: TrainingConfig) -> Any:
    """Return the batch of one sequence of alternating keys and values. Keys are numbered in order of appearance.

    Raise ValueError if the words do not alternate keys and values, or if data.num_keys or data.num_values is too small.
    """
    from megatron_sb.experiments.recall import labelled

    if len(words) % 2 or not words:
        raise InputError(f"--sequence must alternate keys and values, an even number of words, got {len(words)}.")
    names = list(dict.fromkeys(words[::2]))
    if len(names) > config.data.num_keys:
        raise InputError(f"--sequence must have at most data.num_keys = {config.data.num_keys} keys, got {len(names)}.")
    for word in words[1::2]:
        if not word.isdecimal() or int(word) >= config.data.num_values:
            raise InputError(f"values of --sequence must be from 0 to {config.data.num_values - 1}, got {word!r}.")
    keys = np.array([names.index(word) for word in words[::2]])
    batch = labelled(keys, config.data.num_keys + np.array([int(word) for word in words[1::2]]))
    if not batch.counted.any():
        raise InputError(f"--sequence must repeat a key, got {' '.join(words)!r}.")
    return batch


def attention_weights(layer: Any) -> np.ndarray:
    """Return the weights of paper eq. 1 for every head of a layer, (h, t, t) float64. Row j belongs to query j.

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


def describe_query(
    position: int, heads: dict[str, np.ndarray], answers: np.ndarray, words: Sequence[str]
) -> dict[str, Any]:
    """Return a query's right answer, the model's answer and two weights per head.

    One weight is that of the query to the right value, the other that of this value to its key.
    """
    earlier = [index for index in range(0, position, 2) if words[index] == words[position]]
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


def to_table(queries: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return a Markdown table with a row for each query."""
    headers = ["query", "right", "answer"]
    headers += [f"{name}: {what}" for name in names for what in ("value to its key", "query to its value")]
    rows = []
    for entry in queries:
        row = [f"{entry['key']} at {entry['position']}", entry["right"], entry["answer"]]
        for name in names:
            row += [f"{entry['value_to_key'][name]:.3f}", f"{entry['query_to_value'][name]:.3f}"]
        rows.append(row)
    return tables.to_markdown(DataFrame(rows, columns=headers))


def draw(heads: dict[str, np.ndarray], words: Sequence[str], queries: Sequence[dict[str, Any]]) -> Any:
    """Draw a heat map for each head. A frame marks the right value of each query."""
    from megatron_sb.training.plots import pyplot

    figure, grid = pyplot.subplots(1, len(heads), figsize=(5 * len(heads), 5.4), squeeze=False)
    for (name, head), axes in zip(heads.items(), grid[0], strict=True):
        axes.imshow(head, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(words)), words)
        axes.set_yticks(range(len(words)), words)
        axes.set(title=name, xlabel="key", ylabel="query")
        for entry in queries:
            corner = (entry["value_at"] - 0.5, entry["position"] - 0.5)
            axes.add_patch(pyplot.Rectangle(corner, 1, 1, fill=False, edgecolor="C3"))
    return figure
