"""Negative log-likelihood of real text by context length, beyond the length that models were trained at, for every
kind of attention of a configuration (Tan et al., arXiv 2410.17980, section 5.2 and Fig. 5).

Every model of `compare` is a run of its own with the same seed, so that all see the same rows. Lengths are the
configuration's: `evaluation.length_factor` times the trained one at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_sb.experiments import sweep, tables
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside those of every experiment."""
    sweep.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train every model, then write table and picture; 0."""
    config = load_config(options.config, options.set)
    if config.data.kind == "recall":
        raise ConfigError("data.kind is 'recall'; extrapolation needs text")
    trials = {model: sweep.Trial(model, (*options.set, f"compare=[{model}]")) for model in config.compare}
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
    """Table and picture: a row and a line per model and scaling of positions."""
    from megatron_sb.training import plots

    labels = tables.labels_of(config)
    contexts = [str(result["context"]) for result in evaluations[0]["results"]]
    rows = [
        [plots.label_of(entry, labels), *(f"{result['nll']:.3f}" for result in entry["results"])]
        for entry in evaluations
    ]
    first = evaluations[0]["results"][0]
    note = (
        f"\nNats per token of the last {config.evaluation.target_tokens} tokens of {first['windows']} held-out windows "
        f"by how much of a window a model sees; trained at {config.stages[-1].context_length}.\n"
    )
    text = tables.markdown_table(["attention", *contexts], rows) + note
    figure = plots.nll_by_length(list(evaluations), labels)
    device = tables.devices_of(evaluations)
    tables.write_results(out, {"evaluations": list(evaluations)}, text, figure, device)
