"""Multi-query repeated associative recall: accuracy by the number of pairs that a model has to keep apart, the best of
several learning rates (Tan et al., arXiv 2410.17980, section 5.1 and Fig. 3).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sb.experiments import sweep, tables
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside those of every experiment."""
    parser.add_argument("--pairs", type=int, nargs="+", metavar="N", help="numbers of pairs (default: the file's)")
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", metavar="RATE", help="of the first stage (default: the file's)"
    )
    sweep.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train every number of pairs with every learning rate, then write the table; 0."""
    first = [f"data.num_pairs={options.pairs[0]}"] if options.pairs else []
    config = load_config(options.config, [*options.set, *first])
    if config.data.kind != "recall":
        raise ConfigError(f"data.kind is {config.data.kind!r}; mqrar needs 'recall'")
    pairs = options.pairs or [config.data.num_pairs]
    rates = options.learning_rates or [config.stages[0].learning_rate]
    trials = {(count, rate): trial_of(count, rate, options.set) for count in pairs for rate in rates}
    out = sweep.output_folder(options)
    sweep.train_all(options.config, list(trials.values()), out, options.jobs)
    found = []
    for (count, rate), trial in trials.items():
        of_trial = load_config(options.config, trial.overrides)
        for model in config.compare:
            evaluation = sweep.evaluation(out / trial.name, of_trial, model)
            about = {"model": model, "num_pairs": count, "learning_rate": rate, "device": evaluation["device"]}
            found.append(about | evaluation["results"][-1])
    write(out, config, found)
    return 0


def trial_of(num_pairs: int, learning_rate: float, overrides: Sequence[str]) -> sweep.Trial:
    """The run of one point of the grid."""
    fields = (f"data.num_pairs={num_pairs}", f"stages.0.learning_rate={learning_rate!r}")
    return sweep.Trial(f"pairs{num_pairs}-rate{learning_rate:g}", (*overrides, *fields))


def best_of(found: Sequence[dict[str, Any]], model: str, num_pairs: int) -> dict[str, Any]:
    """What the learning rate with the highest accuracy gave."""
    return max(
        (entry for entry in found if (entry["model"], entry["num_pairs"]) == (model, num_pairs)),
        key=lambda entry: entry["accuracy"],
    )


def write(out: Path, config: TrainingConfig, found: Sequence[dict[str, Any]]) -> None:
    """Table and picture: accuracy by number of pairs, a column and a line per model."""
    pairs = sorted({entry["num_pairs"] for entry in found})
    labels = tables.labels_of(config)
    best = {model: [best_of(found, model, count) for count in pairs] for model in config.compare}
    heads = ["pairs", *(head for label in labels.values() for head in (label, "learning rate"))]
    rows = [
        [str(count)]
        + [
            cell
            for model in config.compare
            for cell in (f"{best[model][index]['accuracy']:.1%}", f"{best[model][index]['learning_rate']:g}")
        ]
        for index, count in enumerate(pairs)
    ]
    chance = 1 / config.data.num_values
    note = f"\nAccuracy of held-out answers; a guess among the values is right {chance:.1%} of the time.\n"

    from megatron_sb.training.plots import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for model, entries in best.items():
        axes.plot(pairs, [entry["accuracy"] for entry in entries], marker="o", label=labels[model])
    axes.axhline(chance, color="grey", linestyle=":", label="a guess")
    axes.set(xlabel="key-value pairs", ylabel="accuracy, best learning rate", ylim=(-0.02, 1.02), xticks=pairs)
    axes.legend()
    axes.grid(alpha=0.3)
    text = tables.markdown_table(heads, rows) + note
    tables.write_results(out, {"runs": list(found)}, text, figure, tables.devices_of(found))
