"""What an experiment leaves behind: results.json, table.md and picture.png, each written aside and renamed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sb.training.checkpoint import write_aside
from megatron_sb.training.config import TrainingConfig


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, numbers to the right; the first column to the left.

    Raises ValueError for a row of another length than `heads`.
    """
    lines = [list(heads), ["---", *["---:"] * (len(heads) - 1)], *map(list, rows)]
    for line in lines:
        if len(line) != len(heads):
            raise ValueError(f"a row is {line!r}; {len(heads)} cells are allowed, as many as heads {list(heads)!r}")
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def labels_of(config: TrainingConfig) -> dict[str, str]:
    """What tables and pictures call the models of a configuration, in its order."""
    from megatron_sb.training.report import LABELS

    return {model: LABELS.get(model, model) for model in config.compare}


def provenance(device: str) -> dict[str, Any]:
    """When and on what: {"date", "device", "torch", "megatron_core"}. device: as `report.hardware` says it."""
    import importlib.metadata

    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": device,
        "torch": torch.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
    }


def devices_of(evaluations: Sequence[dict[str, Any]]) -> str:
    """What the runs of these evaluations ran on."""
    return " and ".join(dict.fromkeys(evaluation["device"] for evaluation in evaluations))


def write_results(out: Path, results: dict[str, Any], table: str, figure: Any, device: str) -> None:
    """Write results.json (with `provenance`), table.md and picture.png into `out`, and print the table.

    figure: of matplotlib; it is closed. device: what the results were measured on, in words.
    """
    from megatron_sb.training.plots import save

    out.mkdir(parents=True, exist_ok=True)
    about = provenance(device)
    write_aside(out / "results.json", json.dumps(about | results, indent=1) + "\n")
    write_aside(out / "table.md", f"{table}\n{about['date']}, {about['device']}\n")
    save(figure, out / "picture.png")
    print(f"{table}\nsee {out}/table.md, {out}/picture.png, {out}/results.json")
