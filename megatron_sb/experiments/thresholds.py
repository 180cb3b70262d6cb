"""Measure what a larger mass_threshold costs and saves: likelihood, skipped tiles and time by context length.

All thresholds score the same windows. The likelihoods of two thresholds differ by much less than those of two windows,
so the standard error of the difference is over the differences of single windows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pandas import DataFrame
from tqdm import tqdm

from megatron_sb.experiments import tables
from megatron_sb.experiments.attention_times import PASSES, time_cases
from megatron_sb.training.config import TrainingConfig


def parse_threshold(text: str) -> float:
    """Return a threshold, given as a number or a power of two.

    Raises:
        ArgumentTypeError: The text is no number in [0, 1).

    Example:
        >>> parse_threshold("2^-3"), parse_threshold("0.25")
        (0.125, 0.25)
    """
    try:
        threshold = 2.0 ** float(text[2:]) if text.startswith("2^") else float(text)
    except (ValueError, OverflowError):
        threshold = math.nan
    if not 0 <= threshold < 1:
        raise argparse.ArgumentTypeError(f"a threshold must be a number in [0, 1), such as 0.001 or 2^-10, got {text}.")
    return threshold


def name_of(threshold: float) -> str:
    """Return a threshold in words.

    Example:
        >>> name_of(2.0**-20), name_of(0.0), name_of(0.001)
        ('2^-20', '0', '0.001')
    """
    mantissa, exponent = math.frexp(threshold)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{threshold:g}"


def contexts_of(config: TrainingConfig) -> list[int]:
    """Return the evaluated lengths at which thresholds are compared: from the trained length on."""
    last = config.stages[-1]
    return [length for length in config.evaluation_lengths(last) if length >= last.context_length]


def measure(
    engine: Any,
    config: TrainingConfig,
    corpus: Any,
    windows: Sequence[np.ndarray],
    thresholds: Sequence[float],
    seconds: float,
) -> list[dict[str, Any]]:
    """Measure every threshold at the trained context length and all longer ones of the evaluation.

    The engine has the last threshold afterwards.

    Args:
        engine: `loading.trained_engine` of a stick-breaking model.
        config: the configuration of its run, for one rank.
        corpus: `load_corpus` of config.
        windows: `choose_windows` of the corpus.
        thresholds: the first one is what the others are compared with.
        seconds: duration of each measurement of a time.

    Returns:
        A list of {"context", "mass_threshold", "windows", "nll" (nats per token), "standard_error", "difference" (of
        nll to the first threshold), "difference_error" (its standard error over windows), "skipped" (share of tiles,
        mean over layers, heads and windows), "milliseconds" (by pass, of all layers on one window)}. The standard
        errors are None with one window.
    """
    from megatron_sb.training.evaluate import mean_and_error

    contexts = contexts_of(config)
    scores: dict[tuple[int, float], np.ndarray] = {}
    skipped: dict[tuple[int, float], float] = {}
    times: dict[int, dict[str, list[float]]] = {}
    for context in tqdm(contexts, "thresholds", unit="length"):
        times[context] = _milliseconds(engine, corpus, windows[0], context, thresholds, seconds)
        for threshold in thresholds:
            engine.set_mass_threshold(threshold)
            scores[context, threshold] = _nll_of_windows(engine, corpus, windows, config, context)
            skipped[context, threshold] = _skipped_share(engine, corpus, windows, context)
    entries = []
    for context in contexts:
        for index, threshold in enumerate(thresholds):
            nll, error = mean_and_error(scores[context, threshold].tolist())
            change = scores[context, threshold] - scores[context, thresholds[0]]
            difference, difference_error = mean_and_error(change.tolist())
            entries.append(
                {
                    "context": context,
                    "mass_threshold": threshold,
                    "windows": len(windows),
                    "nll": nll,
                    "standard_error": error,
                    "difference": difference,
                    "difference_error": difference_error,
                    "skipped": skipped[context, threshold],
                    "milliseconds": {name: times[context][name][index] for name in PASSES},
                }
            )
    return entries


def _nll_of_windows(
    engine: Any, corpus: Any, windows: Sequence[np.ndarray], config: TrainingConfig, context: int
) -> np.ndarray:
    """Return the nats per target token of each window, as `evaluate.evaluate` scores them: float64 (windows,)."""
    from megatron_sb.training.data import PackedBatch, pack
    from megatron_sb.training.evaluate import score_windows, windows_at_once

    num_targets = config.evaluation.target_tokens

    def batch_of(indices: Sequence[int]) -> PackedBatch:
        return pack([windows[index][-context - 1 :] for index in indices], 1, corpus.end_of_document, num_targets)

    at_once = windows_at_once(context, len(windows[0]) - 1, corpus.vocab_size)
    (sums,) = score_windows(engine, [engine.window_losses], batch_of, len(windows), at_once)
    return (sums / num_targets).numpy()


def _skipped_share(engine: Any, corpus: Any, windows: Sequence[np.ndarray], context: int) -> float:
    from megatron_sb.megatron.statistics import skipped_share
    from megatron_sb.training.data import pack

    shares: list[float] = []

    def observe(*call: Any) -> None:
        shares.append(skipped_share(*call).mean().item())

    for window in windows:
        engine.watch_attention(pack([window[-context - 1 :]], 1, corpus.end_of_document), observe)
    return float(np.mean(shares))


def _milliseconds(
    engine: Any, corpus: Any, window: np.ndarray, context: int, thresholds: Sequence[float], seconds: float
) -> dict[str, list[float]]:
    """Return the time of all layers for each threshold, by pass. All thresholds have the same queries and keys."""
    from megatron_sb.training.data import pack

    layers: list[dict[str, list[float]]] = []

    def observe(core: Any, query: Any, key: Any, value: Any, packed_seq_params: Any) -> None:
        cases = [(query, key, {**core.attention_options, "mass_threshold": each}) for each in thresholds]
        layers.append(time_cases(cases, value, packed_seq_params.cu_seqlens_q, seconds))

    engine.watch_attention(pack([window[-context - 1 :]], 1, corpus.end_of_document), observe)
    return {name: np.sum([layer[name] for layer in layers], axis=0).tolist() for name in PASSES}


def to_table(entries: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each context length and threshold."""
    first = entries[0]["mass_threshold"]
    rows = []
    for entry in entries:
        difference = tables.with_error(entry["difference"], entry["difference_error"], ".1e")
        rows.append(
            [
                str(entry["context"]),
                name_of(entry["mass_threshold"]),
                f"{entry['skipped']:.1%}",
                *(f"{entry['milliseconds'][name]:.3g}" for name in PASSES),
                tables.with_error(entry["nll"], entry["standard_error"], ".4f"),
                difference if entry["mass_threshold"] != first else "",
            ]
        )
    names = ["context", "threshold", "tiles skipped", *(f"{name}, ms" for name in PASSES)]
    columns = [*names, "nats per token", f"difference to {name_of(first)}"]
    return tables.to_markdown(DataFrame(rows, columns=columns))
