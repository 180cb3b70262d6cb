"""The two plots of a job, drawn from the files that its report wrote."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from megatron_sb.validation import naming

MARKERS = {"none": "o", "linear": "v", "ntk": "^", "yarn": "s"}
SCALINGS = {"none": "", "linear": ", linear scaling", "ntk": ", NTK scaling", "yarn": ", YaRN"}
STYLES = ("--", "-", ":", "-.")


def draw_losses(metrics: list[dict[str, Any]], labels: dict[str, str], path: Path) -> None:
    """Plot the training loss against tokens, one line per model. Dotted lines mark changes of stage."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for model in dict.fromkeys(line["model"] for line in metrics):
        lines = [line for line in metrics if line["model"] == model]
        tokens = np.array([line["tokens"] for line in lines])
        axes.plot(
            tokens, [line["loss"] for line in lines], label=labels[model], color=_colour(model, labels), linewidth=0.9
        )
        for before, after in itertools.pairwise(lines):
            if before["stage"] != after["stage"]:
                axes.axvline(before["tokens"], color="grey", linewidth=0.6, linestyle=":")
    axes.set(xlabel="tokens", ylabel="training loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    save(figure, path)


def draw_nll_by_length(evaluations: list[dict[str, Any]], labels: dict[str, str], path: Path) -> None:
    """Write the figure of `nll_by_length` to a file."""
    save(nll_by_length(evaluations, labels), path)


def nll_by_length(evaluations: list[dict[str, Any]], labels: dict[str, str]) -> Any:
    """Plot the negative log-likelihood against context length, one line per model and stage.

    Bars are standard errors over windows. All models see the same windows, so the difference of two models is more
    exact than the bars. A result without a standard error, as with one window, has no bar. Dotted lines mark the
    contexts that the models were trained with.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    stages = list(dict.fromkeys(entry["stage"] for entry in evaluations))
    for entry in evaluations:
        contexts = [result["context"] for result in entry["results"]]
        losses = [result["nll"] for result in entry["results"]]
        style = STYLES[stages.index(entry["stage"]) % len(STYLES)]
        stage = f", {entry['stage']} (trained at {entry['trained_context']})" if len(stages) > 1 else ""
        label = label_of(entry, labels) + stage
        look = {"marker": MARKERS[entry["scaling"]], "markersize": 4, "color": _colour(entry["model"], labels)}
        errors = [math.nan if (error := result.get("standard_error")) is None else error for result in entry["results"]]
        axes.errorbar(contexts, losses, errors, fmt=style, label=label, elinewidth=0.8, capsize=2, **look)
    for context in sorted({entry["trained_context"] for entry in evaluations}):
        axes.axvline(context, color="grey", linewidth=0.6, linestyle=":")
    ticks = sorted({result["context"] for entry in evaluations for result in entry["results"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    if any(0 < result["nll"] < math.inf for entry in evaluations for result in entry["results"]):
        axes.set_yscale("log")  # the gain of one model is small compared with the loss of another
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.set(xlabel="context (tokens)", ylabel="negative log-likelihood of the same tokens (nats)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small")
    axes.grid(alpha=0.3, which="both")
    return figure


def label_of(entry: dict[str, Any], labels: dict[str, str]) -> str:
    """Return the label of an evaluation: the model, and how its positions were scaled."""
    return labels[entry["model"]] + SCALINGS[entry["scaling"]]


def save(figure: Any, path: Path) -> None:
    """Write a figure under a temporary name, then rename it."""
    temporary = path.with_name(f".{path.name}")
    figure.tight_layout()
    with naming(path):
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)
    temporary.replace(path)


def _colour(model: str, labels: dict[str, str]) -> Any:
    index = list(labels).index(model)
    return f"C{index}" if len(labels) <= len(pyplot.colormaps["tab10"].colors) else pyplot.colormaps["tab20"](index)
