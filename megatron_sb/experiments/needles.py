"""Measure RULER's thirteen tasks by text length: which facts a trained model retrieves from longer and longer texts.

Tan et al., arXiv 2410.17980, section 5.3.1, Figs. 6 and 7. `ruler.scoring` says when an answer is right.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame
from tqdm import tqdm

from megatron_sb.experiments import ruler, sweep, tables, trained
from megatron_sb.experiments.ruler.scoring import samples_of, scores
from megatron_sb.training import loading
from megatron_sb.training.config import ConfigError, load_config
from megatron_sb.validation import InputError

MEASURES = {"accuracy": "o-", "bytes": ".:"}  # measure -> style of its line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="BYTES",
        help="lengths of the texts (default: 1, 2, 4 and 8 times the context of the last stage)",
    )
    parser.add_argument(
        "--samples", type=int, default=20, metavar="N", help="samples of each task and length (default: %(default)s)"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=ruler.TASKS,
        default=list(ruler.TASKS),
        metavar="TASK",
        help=f"any of {', '.join(ruler.TASKS)} (default: all)",
    )


def run(options: argparse.Namespace) -> int:
    """Train unless the run is finished, query every model, write the results. Return the exit status."""
    config = load_config(options.config, options.set)
    if config.data.kind != "text":
        raise ConfigError(f"data.kind must be 'text' for needles, whose tokens are bytes, got {config.data.kind!r}.")
    lengths = options.lengths or [factor * config.stages[-1].context_length for factor in (1, 2, 4, 8)]
    if min(lengths) < 1 or options.samples < 1:
        raise InputError(f"--lengths and --samples must be at least 1, got {lengths} and {options.samples}.")
    samples_by_task = {
        (task, length): samples_of(task, length, options.samples) for task in options.tasks for length in lengths
    }
    single_rank_config, out = loading.on_one_rank(config), sweep.output_folder(options)
    folder = trained.trained_run(options, config)
    results = []
    for model in config.compare:
        with loading.trained_engine(folder, single_rank_config, model) as engine:
            for (task, length), samples in tqdm(samples_by_task.items(), desc=model, unit="task"):
                results.append({"model": model, "task": task, "length": length} | scores(engine, samples, length))
    write(out, tables.labels_of(config), results, trained.device_of(single_rank_config))
    return 0


def write(out: Path, labels: dict[str, str], results: Sequence[dict[str, Any]], device: str) -> None:
    """Write a row for each task and length, with two columns per model, and draw a panel for each group of tasks."""
    scores_table = DataFrame(results)
    tasks = list(scores_table["task"].unique())
    rows = []
    for name, group in [*((task, [task]) for task in tasks), ("mean", tasks)]:
        means = mean_scores(scores_table, group)
        for length in sorted(scores_table["length"].unique()):
            cells = [f"{means.loc[(model, length), measure]:.1%}" for model in labels for measure in MEASURES]
            rows.append([name, str(length), *cells])
    headers = ["task", "bytes", *(name for label in labels.values() for name in (f"{label}: answers", "single bytes"))]
    text = tables.to_markdown(DataFrame(rows, columns=headers))
    tables.write_results(out, {"scores": list(results)}, text, draw(labels, scores_table), device)


def mean_scores(scores_table: DataFrame, tasks: Sequence[str]) -> DataFrame:
    """Return the mean of every measure over tasks, by model (level 0) and length (level 1)."""
    chosen = scores_table[scores_table["task"].isin(tasks)]
    return chosen.groupby(["model", "length"])[list(MEASURES)].mean()


def draw(labels: dict[str, str], scores_table: DataFrame) -> Any:
    """Draw right answers and, dotted, right bytes by length."""
    from megatron_sb.training.plots import pyplot

    measured = set(scores_table["task"])
    groups = {name: tasks for name, tasks in ruler.GROUPS.items() if measured & set(tasks)}
    figure, grid = pyplot.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.4), squeeze=False, sharey=True)
    for axes, (name, tasks) in zip(grid[0], groups.items(), strict=True):
        means = mean_scores(scores_table, tasks)
        for index, (model, label) in enumerate(labels.items()):
            for measure, style in MEASURES.items():
                values = means.loc[model, measure]
                line_label = label if measure == "accuracy" else f"{label}, single bytes"
                axes.plot(values.index, values, style, color=f"C{index}", label=line_label, markersize=4)
        lengths = sorted(scores_table["length"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
        axes.set(title=name, xlabel="length (bytes)", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("right")
    grid[0][0].legend(fontsize="x-small")
    return figure
