"""Measure the negative log-likelihood of text by context length, up to many times the trained length.

Tan et al., arXiv 2410.17980, section 5.2 and Fig. 5. Every model of `compare` is a separate run with the same seed, so
that all models read the same rows. The longest context is `evaluation.length_factor` times the trained one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from pandas import DataFrame

from megatron_sb.experiments import sweep, tables
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    sweep.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train every model, then write the results. Return the exit status."""
    config = load_config(options.config, options.set)
    if config.data.kind == "recall":
        raise ConfigError("data.kind must be a kind of text for extrapolation, got 'recall'.")
    trials = {model: sweep.Trial(model, (*options.set, f"compare={json.dumps([model])}")) for model in config.compare}
    out = sweep.output_folder(options)
    sweep.train_all(options.config, list(trials.values()), out, options.jobs)
    evaluations = [
        sweep.evaluation(out / model, config, model, scaling)
        for model in config.compare
        for scaling in config.evaluated_scalings(model)
    ]
    write(out, config, evaluations)
    return 0


def write(out: Any, config: TrainingConfig, evaluations: Sequence[dict[str, Any]]) -> None:
    """Write a table row and draw a line for every model and every scaling of positions."""
    from megatron_sb.training import plots

    labels = tables.labels_of(config)
    contexts = [str(result["context"]) for result in evaluations[0]["results"]]
    rows = [
        [plots.label_of(entry, labels), *(f"{result['nll']:.3f}" for result in entry["results"])]
        for entry in evaluations
    ]
    first = evaluations[0]["results"][0]
    note = (
        f"\nNats per token of the last {config.evaluation.target_tokens} tokens of {first['windows']} held-out "
        f"windows, by context length. The models were trained at {config.stages[-1].context_length}.\n"
    )
    text = tables.to_markdown(DataFrame(rows, columns=["attention", *contexts])) + note
    figure = plots.nll_by_length(list(evaluations), labels)
    device = tables.devices_of(evaluations)
    tables.write_results(out, {"evaluations": list(evaluations)}, text, figure, device)
