"""Write the results of an experiment: results.json, table.md and picture.png."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tabulate  # noqa: F401  DataFrame.to_markdown needs it: fail before anything is trained
from pandas import DataFrame

from megatron_sb.training.checkpoint import write_atomically
from megatron_sb.training.config import TrainingConfig
from megatron_sb.validation import finite


def to_markdown(table: DataFrame) -> str:
    """Return a Markdown table of formatted cells. The first column is aligned left, the others right."""
    alignment = ["left", *["right"] * (table.shape[1] - 1)]
    return table.to_markdown(index=False, disable_numparse=True, colalign=alignment) + "\n"


def with_error(value: float, error: float | None, form: str = ".3f") -> str:
    """Return a value and its standard error, if it has one, after the sign ±."""
    return f"{value:{form}}" if error is None else f"{value:{form}} ± {error:{form}}"


def labels_of(config: TrainingConfig) -> dict[str, str]:
    """Return the name of every compared model in tables and pictures, in the configuration's order."""
    from megatron_sb.training.report import LABELS

    return {model: LABELS.get(model, model) for model in config.compare}


def provenance(device: str) -> dict[str, Any]:
    """Return {"date", "device", "torch", "megatron_core"} of a measurement. device: as `report.hardware` returns it."""
    import importlib.metadata

    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": device,
        "torch": torch.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
    }


def devices_of(evaluations: Sequence[dict[str, Any]]) -> str:
    """Return the devices that the runs of these evaluations used."""
    return " and ".join(dict.fromkeys(evaluation["device"] for evaluation in evaluations))


def write_results(out: Path, results: dict[str, Any], table: str, figure: Any, device: str) -> None:
    """Write results.json, table.md and picture.png into `out` and print the table. Each file is replaced atomically.

    Args:
        out: output folder; it is created if needed.
        results: content of results.json, to which `provenance` is added. Numbers that are not finite become null.
        table: Markdown.
        figure: a matplotlib figure, which this function closes.
        device: the hardware that was measured, in words.
    """
    from megatron_sb.training.plots import save

    out.mkdir(parents=True, exist_ok=True)
    measured = provenance(device)
    write_atomically(out / "results.json", json.dumps(finite(measured | results), indent=1, allow_nan=False) + "\n")
    write_atomically(out / "table.md", f"{table}\n{measured['date']}, {measured['device']}\n")
    save(figure, out / "picture.png")
    print(f"{table}\nSee {out}/table.md, {out}/picture.png and {out}/results.json.")
