"""What an experiment leaves behind: results.json, table.md and picture.png, each written aside and renamed."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_sb.config import TrainingConfig
from megatron_sb.training.checkpoint import write_aside


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


def provenance() -> dict[str, Any]:
    """When and on what: {"date", "device", "torch", "megatron_core"}."""
    import importlib.metadata

    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cpu = f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": f"{len(names)} x {names[0]}" if names else cpu,
        "torch": torch.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
    }


def write_results(out: Path, results: dict[str, Any], table: str, figure: Any) -> None:
    """Write results.json (with `provenance`), table.md and picture.png into `out`, and print the table.

    figure: of matplotlib; it is closed.
    """
    from megatron_sb.training.plots import save

    out.mkdir(parents=True, exist_ok=True)
    about = provenance()
    write_aside(out / "results.json", json.dumps(about | results, indent=1) + "\n")
    write_aside(out / "table.md", f"{table}\n{about['date']}, {about['device']}\n")
    save(figure, out / "picture.png")
    print(f"{table}\nsee {out}/table.md, {out}/picture.png, {out}/results.json")
