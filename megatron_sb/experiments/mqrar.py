"""Measure associative recall (MQRAR): accuracy by number of key-value pairs, with the best of several learning rates.

Tan et al., arXiv 2410.17980, section 5.1 and Fig. 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from megatron_sb.experiments import sweep, tables
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--pairs", type=int, nargs="+", metavar="N", help="numbers of pairs (default: data.num_pairs of CONFIG)"
    )
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        metavar="RATE",
        help="learning rates of the first stage (default: stages.0.learning_rate of CONFIG)",
    )
    sweep.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train every number of pairs with every learning rate, then write the results. Return the exit status."""
    first = [f"data.num_pairs={options.pairs[0]}"] if options.pairs else []
    config = load_config(options.config, [*options.set, *first])
    if config.data.kind != "recall":
        raise ConfigError(f"data.kind must be 'recall' for mqrar, got {config.data.kind!r}.")
    pairs = options.pairs or [config.data.num_pairs]
    rates = options.learning_rates or [config.stages[0].learning_rate]
    sweep.check_numbers("--learning-rates", rates)
    trials = {(count, rate): trial_of(count, rate, options.set) for count in pairs for rate in rates}
    out = sweep.output_folder(options)
    sweep.train_all(options.config, list(trials.values()), out, options.jobs)
    results = []
    for (count, rate), trial in trials.items():
        trial_config = trial.config(options.config)
        for model in config.compare:
            evaluation = sweep.evaluation(out / trial.name, trial_config, model)
            point = {"model": model, "num_pairs": count, "learning_rate": rate, "device": evaluation["device"]}
            results.append(point | evaluation["results"][-1])
    write(out, config, results)
    return 0


def trial_of(num_pairs: int, learning_rate: float, overrides: Sequence[str]) -> sweep.Trial:
    """Return the run of one point of the grid."""
    fields = (f"data.num_pairs={num_pairs}", f"stages.0.learning_rate={learning_rate!r}")
    return sweep.Trial(f"pairs{num_pairs}-rate{learning_rate:g}", (*overrides, *fields))


def best_runs(results: Sequence[dict[str, Any]]) -> DataFrame:
    """Return the most accurate run of every model (level 0) and number of pairs (level 1), both in ascending order."""
    runs = DataFrame(results)
    return runs.loc[runs.groupby(["model", "num_pairs"])["accuracy"].idxmax()].set_index(["model", "num_pairs"])


def write(out: Path, config: TrainingConfig, results: Sequence[dict[str, Any]]) -> None:
    """Write accuracy by number of pairs, with one table column and one line per model."""
    labels, best = tables.labels_of(config), best_runs(results)
    headers, columns = ["pairs"], [best.loc[config.compare[0]].index.map(str)]
    for model, label in labels.items():
        headers += [label, "learning rate"]
        columns += [
            best.loc[model, "accuracy"].map("{:.1%}".format),
            best.loc[model, "learning_rate"].map("{:g}".format),
        ]
    table = DataFrame(list(zip(*columns, strict=True)), columns=headers)
    chance = 1 / config.data.num_values
    note = f"\nAccuracy of held-out answers. Guessing one of the values is right {chance:.1%} of the time.\n"
    figure = draw({label: best.loc[model, "accuracy"] for model, label in labels.items()}, chance)
    text = tables.to_markdown(table) + note
    tables.write_results(out, {"runs": list(results)}, text, figure, tables.devices_of(results))


def draw(accuracies: dict[str, Any], chance: float) -> Any:
    """Draw accuracy by number of pairs. accuracies: label -> series of accuracy by number of pairs."""
    from megatron_sb.training.plots import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for label, accuracy in accuracies.items():
        axes.plot(accuracy.index, accuracy, marker="o", label=label)
        axes.set_xticks(accuracy.index)
    axes.axhline(chance, color="grey", linestyle=":", label="a guess")
    axes.set(xlabel="key-value pairs", ylabel="accuracy, best learning rate", ylim=(-0.02, 1.02))
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
