"""RULER's thirteen tasks by length: what a trained model finds again in ever longer texts (Tan et al.,
arXiv 2410.17980, section 5.3.1, Figs. 6 and 7).

Tokens are bytes. An answer counts where each of its bytes is the model's likeliest after all bytes before it: what
greedy decoding would write, as long as it has been right so far; answers after the first see the right ones before
them. The share of single bytes that are right stands beside it, which says more about a model that finds nothing.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_sb.experiments import ruler, sweep, tables, trained
from megatron_sb.training.config import ConfigError, load_config

BYTES_AT_ONCE = 65536  # of samples in a forward, at least one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside those of every experiment."""
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="BYTES",
        help="(default: 1, 2, 4 and 8 times the last stage's context)",
    )
    parser.add_argument("--samples", type=int, default=20, metavar="N", help="of each task and length (default 20)")
    parser.add_argument("--tasks", nargs="+", choices=ruler.TASKS, default=list(ruler.TASKS), metavar="TASK")


def run(options: argparse.Namespace) -> int:
    """Train unless CONFIG is that of a finished run, ask every model, write table and picture; 0."""
    config = load_config(options.config, options.set)
    if config.data.kind != "text":
        raise ConfigError(f"data.kind is {config.data.kind!r}; needles needs 'text', whose tokens are bytes")
    lengths = options.lengths or [factor * config.stages[-1].context_length for factor in (1, 2, 4, 8)]
    if min(lengths) < 1 or options.samples < 1:
        raise ValueError(f"--lengths is {lengths} and --samples is {options.samples}; 1 or more are allowed")
    asked = {(task, length): samples_of(task, length, options.samples) for task in options.tasks for length in lengths}
    alone, out = trained.on_one_rank(config), sweep.output_folder(options)
    folder = trained.trained_run(options, config)
    found = []
    for model in config.compare:
        with trained.trained_engine(folder, alone, model) as engine:
            for (task, length), samples in tqdm(asked.items(), desc=model, unit="task"):
                found.append({"model": model, "task": task, "length": length} | scores(engine, samples, length))
    write(out, tables.labels_of(config), found, trained.device_of(alone))
    return 0


def samples_of(task: str, length: int, count: int) -> list[ruler.Sample]:
    """The same for every model. Raises ValueError, naming the task, where it does not fit into `length` bytes."""
    seed, texts = zlib.crc32(task.encode()), ruler.load_texts().asking(held_out=True)
    try:
        return [
            ruler.TASKS[task](np.random.default_rng([seed, length, index]), length, texts) for index in range(count)
        ]
    except ValueError as error:
        raise ValueError(f"--tasks {task}: {error}") from None


def scores(engine: Any, samples: Sequence[ruler.Sample], length: int) -> dict[str, Any]:
    """{"accuracy": share of answers that are right as a whole, its "standard_error" over samples, "bytes": share of
    answers' bytes that are right}.
    """
    from megatron_sb.training.data import PackedBatch
    from megatron_sb.training.evaluate import mean_and_error

    at_once = max(1, BYTES_AT_ONCE // length)
    whole, single = [], []
    for start in range(0, len(samples), at_once):
        rows = [ruler.encoded(sample) for sample in samples[start : start + at_once]]
        batch = PackedBatch.concatenate([row for row, _ in rows])
        hits = engine.likeliest_tokens(batch).numpy() == batch.labels
        for (_, spans), begin in zip(rows, batch.cu_seqlens[:-1], strict=True):
            of_answers = [hits[begin + first : begin + last] for first, last in spans]
            whole.append(float(np.mean([answer.all() for answer in of_answers])))
            single.append(float(np.concatenate(of_answers).mean()))
    accuracy, error = mean_and_error(whole)
    return {"accuracy": accuracy, "standard_error": error, "bytes": float(np.mean(single)), "samples": len(samples)}


def mean_of(found: Sequence[dict[str, Any]], model: str, length: int, tasks: Sequence[str], measure: str) -> float:
    """Over tasks, those that were asked; nan for none."""
    values = [
        entry[measure]
        for entry in found
        if (entry["model"], entry["length"]) == (model, length) and entry["task"] in tasks
    ]
    return float(np.mean(values)) if values else float("nan")


def write(out: Path, labels: dict[str, str], found: Sequence[dict[str, Any]], device: str) -> None:
    """A row for each task and length, two columns for each model; a panel for each group of tasks."""
    lengths = sorted({entry["length"] for entry in found})
    tasks = list(dict.fromkeys(entry["task"] for entry in found))
    heads = ["task", "bytes", *(head for label in labels.values() for head in (f"{label}: answers", "single bytes"))]
    rows = []
    for name, group in [*((task, (task,)) for task in tasks), ("mean", tasks)]:
        for length in lengths:
            row = [name, str(length)]
            for model in labels:
                row += [f"{mean_of(found, model, length, group, measure):.1%}" for measure in ("accuracy", "bytes")]
            rows.append(row)
    text, figure = tables.markdown_table(heads, rows), draw(labels, found, lengths)
    tables.write_results(out, {"scores": list(found)}, text, figure, device)


def draw(labels: dict[str, str], found: Sequence[dict[str, Any]], lengths: Sequence[int]) -> Any:
    """Right answers and, dotted, right bytes by length."""
    from megatron_sb.training.plots import pyplot

    asked = {entry["task"] for entry in found}
    groups = {name: tasks for name, tasks in ruler.GROUPS.items() if asked & set(tasks)}
    figure, grid = pyplot.subplots(1, len(groups), figsize=(3.2 * len(groups), 3.4), squeeze=False, sharey=True)
    for axes, (name, tasks) in zip(grid[0], groups.items(), strict=True):
        for index, (model, label) in enumerate(labels.items()):
            for measure, style in (("accuracy", "o-"), ("bytes", ".:")):
                values = [mean_of(found, model, length, tasks, measure) for length in lengths]
                about = label if measure == "accuracy" else f"{label}, single bytes"
                axes.plot(lengths, values, style, color=f"C{index}", label=about, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
        axes.set(title=name, xlabel="length (bytes)", ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("right")
    grid[0][0].legend(fontsize="x-small")
    return figure
