"""Write the tables of the experiment `swap`, with what is measured so far."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pandas import DataFrame

from megatron_sb.experiments import tables
from megatron_sb.experiments.verdict_tables import NOT_RUN, mean_task
from megatron_sb.training.config import TrainingConfig

DROPE = "drope"  # the recipe that drops positions, and its entry of attention


def write(out: Path, config: TrainingConfig, results: dict[str, Any]) -> None:
    """Write the tables, and draw the likelihood by context length of the base and the runs with the most tokens.

    Args:
        out: folder of the results.
        config: the experiment's configuration.
        results: see `Swap.results`. The base is finished.
    """
    from megatron_sb.training import plots

    counts, evaluation = results["runs"], config.evaluation
    note = (
        f"Nats per token of the last {evaluation.target_tokens} tokens of held-out windows, by context length. The "
        f"base was trained at {config.stages[-1].context_length}. Errors are over windows."
    )
    ruler_note = "Right answers to RULER's tasks, mean over the tasks, by length. In brackets: right single tokens."
    sections = [
        f"{counts['finished']} of {counts['known']} known runs are finished. Standard errors follow the sign ±.\n",
        _section("Likelihood", _table(results, _likelihood), note),
        _section("RULER", _table(results, _ruler), ruler_note),
    ]
    shown = [results["base"], *_with_most_tokens(results["recalibrated"])]
    # One label for each recipe and model; a picture knows models by their names.
    renamed = [entry | {"model": _label(run), "stage": "recalibrated"} for run in shown for entry in run["evaluations"]]
    figure = plots.nll_by_length(renamed, {_label(run): _label(run) for run in shown})
    device = tables.devices_of([results["base"], *results["recalibrated"]])
    tables.write_results(out, results, "\n".join(sections), figure, device)


def _section(title: str, table: DataFrame | None, note: str) -> str:
    body = NOT_RUN if table is None else f"{tables.to_markdown(table)}\n{note}\n"
    return f"## {title}\n\n{body}"


def _table(results: dict[str, Any], cells_of: Callable[[dict[str, Any]], dict[str, str]]) -> DataFrame | None:
    """Return a row for the base and each best run, and for each scaling of positions. None if all cells are empty."""
    from megatron_sb.training import plots
    from megatron_sb.training.report import LABELS

    rows = []
    for run in [results["base"], *(run for run in results["recalibrated"] if run["best"])]:
        label = (LABELS | {DROPE: "softmax without positions"}).get(run["model"], run["model"])
        for evaluation in run["evaluations"]:
            cells = {name: cell for entry in evaluation["results"] for name, cell in cells_of(entry).items()}
            if cells:
                about = {"recipe": run["recipe"], "attention": plots.label_of(evaluation, {evaluation["model"]: label})}
                about |= {"share": f"{run['share']:.3g}", "rate": f"{run['rate']:g}"}
                rows.append(about | {"tokens": f"{run['tokens'] / 1e6:.3g} M"} | cells)
    return DataFrame(rows).fillna("") if rows else None


def _likelihood(entry: dict[str, Any]) -> dict[str, str]:
    return {str(entry["context"]): tables.with_error(entry["nll"], entry["standard_error"])}


def _ruler(entry: dict[str, Any]) -> dict[str, str]:
    if "ruler" not in entry:
        return {}
    accuracy, error, single = mean_task(entry)
    return {str(entry["context"]): f"{tables.with_error(accuracy, error, '.1%')} ({single:.1%})"}


def _label(run: dict[str, Any]) -> str:
    return run["recipe"] if run["recipe"] in ("base", "rope", "drope") else f"{run['recipe']}, {run['model']}"


def _with_most_tokens(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best run of each recipe and model with the largest share that is finished."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run["best"] and run["share"] >= found.get(_label(run), run)["share"]:
            found[_label(run)] = run
    return list(found.values())
