"""Write the tables of the experiment `verdict`, with what is measured so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from megatron_sb.experiments import tables
from megatron_sb.training.config import TrainingConfig
from megatron_sb.training.evaluate import error_of_mean, mean_and_error

NOT_RUN = "Not run yet.\n"
EQUAL_SPEED = 0.98  # of the fastest arm's: such an arm needs no run of its own for equal seconds


def write(out: Path, config: TrainingConfig, results: dict[str, Any]) -> None:
    """Write all tables, and draw the likelihood by context length of the final runs.

    Args:
        out: folder of the results.
        config: the experiment's configuration.
        results: see `Verdict.results`. At least one final run is finished.
    """
    from megatron_sb.training import plots

    labels = tables.labels_of(config)
    trained = config.stages[-1].context_length
    runs = results["runs"]
    sections = [
        f"{runs['finished']} of {runs['known']} known runs are finished. Standard errors follow the sign ±.\n",
        _section("Equal tokens", equal_tokens(results, labels), _equal_tokens_note(config)),
        _section("Equal GPU seconds", equal_seconds(results, labels, trained), EQUAL_SECONDS_NOTE),
        _section("Seeds", over_seeds(results, labels, trained), SEEDS_NOTE),
        _section("By position", by_position(results, labels, trained), POSITIONS_NOTE),
        _section("Sticks by layer", sticks_by_layer(results, labels), STICKS_NOTE),
        _section("RULER", ruler(results, labels), RULER_NOTE),
        _section("Sentence pairs", sentence_pairs(results, labels, trained), PAIRS_NOTE),
        _section("Associative recall", recall(results, labels), _rates_note(RECALL_NOTE, results, "recall", labels)),
        _section("Learning rates", rates(results, labels), _rates_note(RATES_NOTE, results, "rate", labels)),
    ]
    evaluations = [entry for final in results["finals"] for entry in final["evaluations"]]
    figure = plots.nll_by_length(evaluations, labels)
    tables.write_results(out, results, "\n".join(sections), figure, tables.devices_of(results["finals"]))


EQUAL_SECONDS_NOTE = (
    "Every arm is trained for the time that the fastest arm needs for all steps, alone on its device. tokens/s is the "
    "median of single steps, and counts tokens with a loss. The column of tokens counts all."
)
SEEDS_NOTE = (
    "Nats per token and the share of right answers to RULER's tasks, as means over seeds, for the best arm of each "
    "family."
)
POSITIONS_NOTE = "Nats per token at the trained length, by the position of the token that is read."
STICKS_NOTE = (
    "Percent, from the first layer on, in training rows at the beginning, after a quarter and at the end of the steps "
    "that were measured. Layers of other kinds are left out. Tokens are those with a loss."
)
RULER_NOTE = "Right answers to RULER's tasks, mean over the tasks, by length in bytes. In brackets: right single bytes."
PAIRS_NOTE = (
    "Pairs of sentences of which the model prefers the acceptable one, mean over the files. Errors are over pairs."
)
RECALL_NOTE = "Right answers in associative recall, with the best learning rate."
RATES_NOTE = "Nats per token at the trained length after the share of the steps that chooses the learning rate."


def _equal_tokens_note(config: TrainingConfig) -> str:
    return (
        f"Nats per token of the last {config.evaluation.target_tokens} tokens of held-out windows, by context length. "
        f"The models were trained at {config.stages[-1].context_length}. Errors are over windows."
    )


def _rates_note(note: str, results: dict[str, Any], kind: str, labels: dict[str, str]) -> str:
    """Return a note, followed by the arms whose best rate of this kind of run is at the edge."""
    entries = [entry for entry in results["at_the_edge"] if entry["kind"] == kind]
    return "\n".join([note, *([""] if entries else []), *(f"- {text}" for text in edge_sentences(entries, labels))])


def edge_sentences(entries: Sequence[dict[str, Any]], labels: dict[str, str]) -> list[str]:
    """Return a sentence for each entry of `Verdict.rates_at_the_edge`."""
    where = {"rate": "", "recall": " in associative recall"}
    return [
        f"{labels[entry['arm']]}: the best rate{where[entry['kind']]}, {entry['rate']:g}, is the {entry['edge']} that "
        "was tried."
        for entry in entries
    ]


def _section(title: str, table: DataFrame | None, note: str) -> str:
    body = NOT_RUN if table is None else f"{tables.to_markdown(table)}\n{note}\n"
    return f"## {title}\n\n{body}"


def equal_tokens(results: dict[str, Any], labels: dict[str, str]) -> DataFrame | None:
    """Return the likelihood by context length of the final runs: a row for each arm and scaling of positions."""
    from megatron_sb.training import plots

    rows = [
        {"attention": plots.label_of(evaluation, labels), "rate": f"{final['rate']:g}", "tokens": _tokens(final)}
        | {
            str(entry["context"]): tables.with_error(entry["nll"], entry["standard_error"])
            for entry in evaluation["results"]
        }
        for final in results["finals"]
        for evaluation in final["evaluations"]
    ]
    return _table(rows)


def equal_seconds(results: dict[str, Any], labels: dict[str, str], trained: int) -> DataFrame | None:
    """Return the likelihood of every arm after equal time: of its own run, or the final one of a fast arm."""
    speeds, own = results["speeds"], {run["arm"]: run for run in results["seconds"]}
    rows = []
    for final in results["finals"] if speeds else []:
        arm = final["arm"]
        run = own.get(arm)
        if run is None and not is_fast(arm, speeds):
            continue  # its run is not finished
        entries = (run or final)["evaluations"][0]["results"]
        by_context = {entry["context"]: entry for entry in entries}
        at_trained, at_longest = by_context[trained], entries[-1]
        rows.append(
            {
                "attention": labels[arm],
                "tokens/s": f"{speeds[arm]:,.0f}",
                "tokens": _tokens(run or final),
                str(trained): tables.with_error(at_trained["nll"], at_trained["standard_error"]),
                str(at_longest["context"]): tables.with_error(at_longest["nll"], at_longest["standard_error"]),
            }
        )
    return _table(rows)


def is_fast(arm: str, speeds: dict[str, float]) -> bool:
    """Return whether the final run of an arm is also its run for equal seconds."""
    return speeds[arm] >= EQUAL_SPEED * max(speeds.values())


def over_seeds(results: dict[str, Any], labels: dict[str, str], trained: int) -> DataFrame | None:
    """Return means over seeds of the best arm of each family."""
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in results["seeds"]):
        runs = [run for kind in ("finals", "seeds") for run in results[kind] if run["arm"] == arm]
        row = {"family": results["families"][arm], "attention": labels[arm], "seeds": str(len(runs))}
        lists = [run["evaluations"][0]["results"] for run in runs]
        for entry in lists[0]:
            if entry["context"] in (trained, lists[0][-1]["context"]):
                row[str(entry["context"])] = _over(lists, entry["context"], lambda found: found["nll"])
        for entry in (entry for entry in lists[0] if "ruler" in entry):
            row[f"RULER, {entry['context']}"] = _over(lists, entry["context"], lambda found: mean_task(found)[0])
        if all("sentence_pairs" in entry_at(found, trained) for found in lists):
            row["sentence pairs"] = _over(lists, trained, lambda found: found["sentence_pairs"]["accuracy"])
        rows.append(row)
    return _table(rows)


def by_position(results: dict[str, Any], labels: dict[str, str], trained: int) -> DataFrame | None:
    """Return the likelihood by position at the trained length of the final runs."""
    rows = []
    for final in results["finals"]:
        entry = entry_at(final["evaluations"][0]["results"], trained)
        if "by_position" in entry:
            cells = {
                f"{place['begin']} to {place['end'] - 1}": tables.with_error(place["nll"], place["standard_error"])
                for place in entry["by_position"]
            }
            rows.append({"attention": labels[final["arm"]]} | cells)
    return _table(rows)


def sticks_by_layer(results: dict[str, Any], labels: dict[str, str]) -> DataFrame | None:
    """Return the skipped tiles and the remaining mass of each stick-breaking layer of the final runs, over training."""
    rows = []
    for final in results["finals"]:
        lines = final["attention"]
        places = dict.fromkeys(round(share * (len(lines) - 1)) for share in (0, 0.25, 1))  # one line has one place
        for line in (lines[place] for place in places if lines):
            cells = {
                "tiles skipped": line["skipped_tiles_by_layer"],
                "mass that remains": line["remainder_by_layer"],
            }
            about = {"attention": labels[final["arm"]], "tokens": _tokens(line), "loss": f"{line['loss']:.3f}"}
            rows.append(about | {name: " ".join(f"{100 * x:.0f}" for x in values) for name, values in cells.items()})
    return _table(rows)


def ruler(results: dict[str, Any], labels: dict[str, str]) -> DataFrame | None:
    """Return the mean over RULER's tasks by length: a row for each final run and scaling of positions."""
    from megatron_sb.training import plots

    rows = []
    for final in results["finals"]:
        for evaluation in final["evaluations"]:
            cells = {}
            for entry in (entry for entry in evaluation["results"] if "ruler" in entry):
                accuracy, error, single_bytes = mean_task(entry)
                cells[str(entry["context"])] = f"{tables.with_error(accuracy, error, '.1%')} ({single_bytes:.1%})"
            if cells:
                rows.append({"attention": plots.label_of(evaluation, labels)} | cells)
    return _table(rows)


def entry_at(entries: Sequence[dict[str, Any]], context: int) -> dict[str, Any]:
    """Return the entry of an evaluation for a context length."""
    return next(entry for entry in entries if entry["context"] == context)


def mean_task(entry: dict[str, Any]) -> tuple[float, float | None, float]:
    """Return the mean over tasks of the accuracy, its standard error over samples, and the mean of right bytes.

    The error is None if a task has one sample.
    """
    scores = list(entry["ruler"].values())
    error = error_of_mean([score["standard_error"] for score in scores])
    means = [sum(score[name] for score in scores) / len(scores) for name in ("accuracy", "bytes")]
    return means[0], error, means[1]


def sentence_pairs(results: dict[str, Any], labels: dict[str, str], trained: int) -> DataFrame | None:
    """Return the accuracy of the final runs on sentence pairs: a row for each arm."""
    rows = []
    for final in results["finals"]:
        score = entry_at(final["evaluations"][0]["results"], trained).get("sentence_pairs")
        if score is not None:
            accuracy = tables.with_error(score["accuracy"], score["standard_error"], ".1%")
            rows.append({"attention": labels[final["arm"]], "accuracy": accuracy})
    return _table(rows)


def recall(results: dict[str, Any], labels: dict[str, str]) -> DataFrame | None:
    """Return the accuracy of the best learning rate in associative recall."""
    best: dict[str, dict[str, Any]] = {}
    for run in results["recall"]:
        best[run["arm"]] = max(best.get(run["arm"], run), run, key=lambda found: found["accuracy"])
    rows = [
        {
            "attention": labels[arm],
            "rate": f"{run['rate']:g}",
            "accuracy": tables.with_error(run["accuracy"], run["accuracy_standard_error"], ".1%"),
        }
        for arm, run in best.items()
    ]
    return _table(rows)


def rates(results: dict[str, Any], labels: dict[str, str]) -> DataFrame | None:
    """Return the likelihood by learning rate: a row for each arm."""
    rows: dict[str, dict[str, str]] = {}
    for run in results["rates"]:
        row = rows.setdefault(run["arm"], {"attention": labels[run["arm"]]})
        row[f"{run['rate']:g}"] = f"{run['nll']:.3f}"
    return _table(list(rows.values()))


def _over(lists: Sequence[list[dict[str, Any]]], context: int, value_of: Callable[[dict[str, Any]], float]) -> str:
    """Return the mean over runs, and its standard error over them, of a value at a context length."""
    values = [value_of(entry_at(found, context)) for found in lists]
    return tables.with_error(*mean_and_error(values))


def _tokens(run: dict[str, Any]) -> str:
    return f"{run['tokens'] / 1e6:.3g} M"


def _table(rows: list[dict[str, str]]) -> DataFrame | None:
    """Return a table with the columns of all rows, or None without rows. A missing cell is empty."""
    return DataFrame(rows).fillna("") if rows else None
