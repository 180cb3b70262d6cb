"""Measure which tiles a trained model's attention skips and how much time this saves.

Tan et al., arXiv 2410.17980, section 4.1. A tile is 64 queries by 64 keys of a head. It is skipped if the mass of all
its queries is below mass_threshold before they reach it. A time is the forward or backward of one layer's attention on
one window of validation text. There are three cases:

- the model's mass_threshold;
- threshold 0, which skips only tiles that cannot contribute in the precision of the arithmetic;
- every tile: queries and keys of the same shapes that use up no stick, so that nothing is skipped.

--thresholds measures other thresholds on the same windows (thresholds.py).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pandas import DataFrame
from tqdm import tqdm

from megatron_sb.experiments import sweep, tables, thresholds, trained
from megatron_sb.experiments.attention_times import PASSES, time_cases
from megatron_sb.training import loading
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config
from megatron_sb.validation import InputError

CASES = ("model's threshold", "threshold 0", "every tile")
_LOGIT_OF_UNBROKEN_STICKS = -11.0  # low enough that 64K keys do not use up a stick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--model", metavar="NAME", help="a model of compare in CONFIG (default: its first stick-breaking model)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, metavar="S", help="duration of each measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--thresholds",
        type=thresholds.parse_threshold,
        nargs="+",
        default=[],
        metavar="T",
        help="values of mass_threshold, such as 2^-20, whose likelihood and time are compared with those of the first "
        "(default: none)",
    )


def run(options: argparse.Namespace) -> int:
    """Train unless the run is finished, measure every length, write the results. Return the exit status."""
    from megatron_sb.training.documents import load_corpus
    from megatron_sb.training.evaluate import choose_windows

    config = load_config(options.config, options.set)
    model = _chosen_model(config, options.model)
    if not 0 < options.seconds < math.inf:
        raise InputError(f"--seconds must be greater than 0 and finite, got {options.seconds}.")
    if options.thresholds and not thresholds.contexts_of(config):
        stage = config.stages[-1]
        raise ConfigError(
            f"evaluation.longest must be at least the context_length of stage {stage.name}, {stage.context_length}, "
            f"for --thresholds, got {config.evaluation.longest}."
        )
    single_rank_config = loading.on_one_rank(config)
    folder = trained.trained_run(options, config)
    with (
        trained.threads(single_rank_config.parallel.threads_per_rank),
        loading.trained_engine(folder, single_rank_config, model) as engine,
    ):
        corpus = load_corpus(single_rank_config)
        windows = choose_windows(corpus, single_rank_config)
        text = (single_rank_config, corpus, windows)
        entries, device = measure(engine, *text, options.seconds), trained.device_of(single_rank_config)
        compared = []
        if options.thresholds:
            compared = thresholds.measure(engine, *text, options.thresholds, options.seconds)
    results = {"model": model, "mass_threshold": config.attention[model].mass_threshold, "entries": entries}
    table = to_tables(entries)
    if compared:
        results["thresholds"] = compared
        table += "\n" + thresholds.to_table(compared)
    tables.write_results(sweep.output_folder(options), results, table, draw(entries), device)
    return 0


def _chosen_model(config: TrainingConfig, wanted: str | None) -> str:
    plain = trained.plain_stickbreaking_models(config, with_reach=True)
    supported = [name for name in plain if config.attention[name].mass_threshold]
    if config.data.kind == "recall":
        raise ConfigError("data.kind must be a kind of text for skipping, got 'recall'.")
    model = supported[0] if wanted is None and supported else wanted
    if model not in supported:
        raise ConfigError(
            f"--model must be one of {supported}, the stick-breaking models of compare with a mass_threshold above 0, "
            f"without forget gates and Euclidean logits, got {wanted!r}."
        )
    return model


def measure(
    engine: Any, config: TrainingConfig, corpus: Any, windows: Sequence[np.ndarray], seconds: float
) -> list[dict[str, Any]]:
    """Measure every context length and layer. Arguments are those of `thresholds.measure`.

    Returns a list of {"context", "layer" (from 1), "skipped" (share of each head, mean over windows), "windows",
    "milliseconds" (by pass, for each of CASES)}.
    """
    from megatron_sb.megatron.statistics import skipped_share
    from megatron_sb.training.data import pack

    entries = []
    for context in tqdm(config.evaluation_lengths(config.stages[-1]), "skipping", unit="length"):
        shares: dict[int, list[np.ndarray]] = {}
        times: dict[int, dict[str, list[float]]] = {}

        def observe(core: Any, *call: Any, shares: Any = shares, times: Any = times) -> None:
            layer = core.layer_number
            shares.setdefault(layer, []).append(skipped_share(core, *call).cpu().numpy())
            if layer not in times:
                times[layer] = time_layer(core, *call, seconds=seconds)

        for window in windows:
            part = window[-context - 1 :]
            engine.watch_attention(pack([part], 1, corpus.end_of_document), observe)
        for layer, layer_shares in sorted(shares.items()):
            skipped = np.mean(layer_shares, axis=0).tolist()
            measured = {"context": context, "layer": layer, "windows": len(windows)}
            entries.append(measured | {"skipped": skipped, "milliseconds": times[layer]})
    return entries


def time_layer(
    core: Any, query: Any, key: Any, value: Any, packed_seq_params: Any, *, seconds: float
) -> dict[str, list[float]]:
    """Return the median milliseconds of one call's forward and backward for each of CASES."""
    import torch

    generator = torch.Generator(device=query.device).manual_seed(1)
    unbroken = [torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) for x in (query, key)]
    unbroken[0][..., 0], unbroken[1][..., 0] = 4.0, _LOGIT_OF_UNBROKEN_STICKS / (4.0 * core.scale)
    options = core.attention_options
    cases = [(query, key, options), (query, key, {**options, "mass_threshold": 0.0}), (*unbroken, options)]
    return time_cases(cases, value, packed_seq_params.cu_seqlens_q, seconds)


def saved_shares(milliseconds: Sequence[float]) -> list[float]:
    """Return the time that the model's threshold saves, as shares of the times of the other two cases."""
    model_time, *other_times = milliseconds
    return [1 - model_time / other for other in other_times]


def to_tables(entries: Sequence[dict[str, Any]]) -> str:
    """Return two Markdown tables: all layers by context length, and each layer at the longest context."""
    by_context = []
    contexts = sorted({entry["context"] for entry in entries})
    for context in contexts:
        here = [entry for entry in entries if entry["context"] == context]
        sums = {name: np.sum([entry["milliseconds"][name] for entry in here], axis=0).tolist() for name in PASSES}
        by_context.append([str(context), f"{np.mean([entry['skipped'] for entry in here]):.1%}", *_times(sums)])
    cases, saved = " / ".join(CASES), " / ".join(f"of {case}" for case in CASES[1:])
    times = [header for name in PASSES for header in (f"{name}, ms: {cases}", f"{name} saved: {saved}")]
    all_layers = DataFrame(by_context, columns=["context", "tiles skipped, all layers", *times])
    by_layer = []
    for entry in (entry for entry in entries if entry["context"] == contexts[-1]):
        shares = entry["skipped"]
        cells = [f"{np.mean(shares):.1%}", f"{min(shares):.1%} to {max(shares):.1%}"]
        by_layer.append([str(entry["layer"]), *cells, *_times(entry["milliseconds"])])
    longest = DataFrame(
        by_layer, columns=[f"layer, at {contexts[-1]}", "tiles skipped", "heads, least to most", *times]
    )
    return tables.to_markdown(all_layers) + "\n" + tables.to_markdown(longest)


def _times(milliseconds: dict[str, Sequence[float]]) -> list[str]:
    cells = []
    for name in PASSES:
        cells.append(" / ".join(f"{case:.3g}" for case in milliseconds[name]))
        cells.append(" / ".join(f"{share:.1%}" for share in saved_shares(milliseconds[name])))
    return cells


def draw(entries: Sequence[dict[str, Any]]) -> Any:
    """Draw skipped tiles by layer and head, saved time by layer, and both by context length."""
    from megatron_sb.training.plots import pyplot

    contexts = sorted({entry["context"] for entry in entries})
    longest = [entry for entry in entries if entry["context"] == contexts[-1]]
    figure, (heat, bars, lines) = pyplot.subplots(1, 3, figsize=(14, 5))
    layers = [entry["layer"] for entry in longest]
    shares = np.array([entry["skipped"] for entry in longest])
    image = heat.imshow(100 * shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    heat.set_xticks(range(shares.shape[1]), range(1, shares.shape[1] + 1))
    heat.set_yticks(range(len(layers)), layers)
    heat.set(xlabel="head", ylabel="layer", title=f"tiles skipped at {contexts[-1]} (%)")
    figure.colorbar(image)
    for index, name in enumerate(PASSES):
        sums = [
            np.sum([entry["milliseconds"][name] for entry in entries if entry["context"] == context], axis=0)
            for context in contexts
        ]
        for other, style in enumerate((":", "-")):
            label = f"{name}, of {CASES[1 + other]}"
            style_of_case = {"color": f"C{index}", "alpha": 0.5 + 0.5 * other}
            by_layer = [100 * saved_shares(entry["milliseconds"][name])[other] for entry in longest]
            bars.bar(np.array(layers) + 0.2 * (2 * index + other) - 0.3, by_layer, 0.2, label=label, **style_of_case)
            lines.plot(
                contexts,
                [100 * saved_shares(times)[other] for times in sums],
                "o" + style,
                label=label,
                **style_of_case,
            )
    skipped = [np.mean([entry["skipped"] for entry in entries if entry["context"] == c]) for c in contexts]
    lines.plot(contexts, 100 * np.array(skipped), "s--", color="grey", label="tiles skipped")
    lines.set_xscale("log", base=2)
    lines.set_xticks(contexts, contexts)
    bars.set(xlabel="layer", xticks=layers, title=f"time saved at {contexts[-1]} (%)")
    lines.set(xlabel="context (tokens)", title="all layers (%)")
    for axes in (bars, lines):
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
        axes.grid(alpha=0.3)
    return figure
